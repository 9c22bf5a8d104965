"""The claims of ShotKV, measured beside token-wise and chunk-wise methods on the same readings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from practicum.checks import CannotMeasure, Check, Comparison, Curve, Metrics, Request, Workload, arm
from practicum.models import load_language_model
from practicum.serving.shotkv import (
    H2O,
    ChunkKV,
    Press,
    PyramidKV,
    RandomUnits,
    ShotKV,
    ShotKVCache,
    ShotKVLayer,
    ShotKVReport,
    SnapKV,
    StreamingLLM,
)
from practicum.serving.shotkv.bench import Answered, Evaluator, TokenizedItem
from practicum.serving.shotkv.press import Reading
from practicum.serving.shotkv.tasks import TASKS, ShotItem, long_item, read_shot_items, shot_items

KEEP = 0.25
LONG_KEEP = 0.4
RATIOS = (0.25, 0.1)
TOKEN_WISE = ("snapkv", "chunkkv", "h2o", "streamingllm")
PEERS = (*TOKEN_WISE, "random-units")
ARITHMETIC = ("sums", "chain")
NEEDS_FULL = "needs --scale full"
YOURS = "yours"
NOT_YOURS = "is about generated tasks; not measured on your own data"


@dataclass(frozen=True)
class Sizes:
    """What a scale changes."""

    tasks: tuple[str, ...]
    n_items: int
    n_units: int
    long_questions: int
    context: int
    steps: int
    ratios: tuple[float, ...]


@dataclass
class Work:
    """The work of one seed: prompts in tokens, and answers of every press, found once."""

    model: Any
    tokenizer: Any
    items: dict[str, list[TokenizedItem]]
    long: TokenizedItem | None
    sizes: Sizes
    seed: int
    is_quick: bool
    own: bool
    answers: dict[str, dict[tuple[str, float], list[Answered]]] = field(default_factory=dict)
    long_reading: Reading | None = None

    def answer_all(self, presses: Mapping[str, Mapping[float, Press]]) -> None:
        """Answer every question with every press: arms share one reading of each prompt."""
        if self.answers:
            return
        for task, items in self.items.items():
            # Prompts that share their units are read once.
            evaluator = Evaluator(self.model, self.tokenizer)
            found: dict[tuple[str, float], list[Answered]] = defaultdict(list)
            for item in items:
                reading = evaluator.read(item)
                found["full-cache", 1.0].append(evaluator.answer(item, reading, None))
                for name, by_ratio in presses.items():
                    for ratio, press in by_ratio.items():
                        found[name, ratio].append(evaluator.answer(item, reading, press))
            self.answers[task] = dict(found)


class ShotKVCheck(Check):
    """Many-shot prompts whose answers are scored token by token, one long answer, and decoding at a long context."""

    comparisons = (
        *(
            Comparison(f"better-than-{peer}", metric="nll (mixed)", arm="shotkv", against=peer, difference_at_most=0.0)
            for peer in PEERS
        ),
        Comparison(
            "close-to-full-mixed", metric="nll (mixed)", arm="shotkv", against="full-cache", difference_at_most=0.05
        ),
        Comparison(
            "close-to-full-sums", metric="nll (sums)", arm="shotkv", against="full-cache", difference_at_most=0.05
        ),
        Comparison(
            "scores-find-facts", metric="nll (needle)", arm="shotkv", against="random-units", difference_at_most=0.0
        ),
        Comparison(
            "close-to-full-documents", metric="nll (docs)", arm="shotkv", against="full-cache", difference_at_most=0.15
        ),
        Comparison("best-on-documents", metric="nll (docs)", arm="shotkv", against=PEERS, difference_at_most=0.0),
        Comparison("long-generation", metric="nll (long)", arm="shotkv", against="h2o", difference_at_most=0.0),
        Comparison(
            "faster-decoding", metric="seconds", arm="shotkv", against="full-cache", ratio_at_most=0.89, timed=True
        ),
        Comparison(
            "reasoning-is-fragile",
            metric="fall (arithmetic) over fall (needle)",
            arm="snapkv",
            value_at_least=1.0,
        ),
    )
    seeds = {"quick": 2, "full": 5, "paper": 5}
    portable = True
    curves = (Curve("kept", x="share of the units' tokens", y="nats a token, mixed task"),)

    def prepare(self, request: Request) -> Work:
        """Load the model and write the prompts."""
        sizes = request.pick(
            quick=Sizes(("mixed", "sums"), 3, 12, 0, 8000, 2, (KEEP,)),
            full=Sizes(TASKS, 4, 20, 10, 8000, 8, RATIOS),
            paper=Sizes(TASKS, 20, 50, 20, 8000, 64, RATIOS),
        )
        loaded = load_language_model(request.model, device=request.device)
        model, tokenizer = loaded.model, loaded.tokenizer
        made: dict[str, Sequence[ShotItem]]
        if request.data is None:
            made = {
                task: shot_items(
                    task,
                    sizes.n_items,
                    min(sizes.n_units, 20) if task == "label" else sizes.n_units,
                    random_state=request.seed,
                )
                for task in sizes.tasks
            }
        else:
            given = read_shot_items(request.data)
            order = np.random.default_rng(request.seed).permutation(len(given))[: request.pick(quick=6, full=60)]
            made = {YOURS: [given[i] for i in sorted(order)]}
        items = {task: [TokenizedItem.of(item, tokenizer) for item in of] for task, of in made.items()}
        longest = max(item.prompt.shape[1] + item.answer.shape[1] for of in items.values() for item in of)
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and longest > most:
            raise CannotMeasure(f"--data: a prompt of {longest} tokens is longer than the model reads, {most}")
        long = None
        if sizes.long_questions and request.data is None:
            long = TokenizedItem.of(long_item(sizes.long_questions, random_state=request.seed), tokenizer)
        return Work(
            model, tokenizer, items, long, sizes, request.seed, request.scale == "quick", request.data is not None
        )

    @arm("full-cache")
    def full_cache(self, work: Work) -> Metrics:
        """The whole cache."""
        return self._measured(work, "full-cache", LONG_KEEP_ALL, timed=1.0)

    @arm("shotkv")
    def shotkv(self, work: Work) -> Metrics:
        """The method: whole units, layer by layer, by the question's attention."""
        return self._measured(work, "shotkv", ShotKV(LONG_KEEP, LONG_KEEP), timed=LONG_KEEP)

    @arm("shotkv-accumulated")
    def accumulated(self, work: Work) -> Metrics:
        """Whole units by the attention of all queries."""
        return self._measured(work, "shotkv-accumulated")

    @arm("shotkv-global")
    def one_choice(self, work: Work) -> Metrics:
        """Whole units, the same in all layers."""
        return self._measured(work, "shotkv-global")

    @arm("shotkv-prefill-only")
    def prefill_only(self, work: Work) -> Metrics:
        """The method, with all generated tokens kept."""
        return self._measured(work, None, ShotKV(LONG_KEEP))

    @arm("random-units")
    def random_units(self, work: Work) -> Metrics:
        """Whole units at random."""
        return self._measured(work, "random-units", RandomUnits(LONG_KEEP, LONG_KEEP, random_state=work.seed))

    @arm("snapkv")
    def snapkv(self, work: Work) -> Metrics:
        """Tokens by the question's attention, smoothed."""
        return self._measured(work, "snapkv", SnapKV(LONG_KEEP))

    @arm("pyramidkv")
    def pyramidkv(self, work: Work) -> Metrics:
        """The same, more of them in lower layers."""
        return self._measured(work, "pyramidkv")

    @arm("chunkkv")
    def chunkkv(self, work: Work) -> Metrics:
        """Chunks of ten tokens by the question's attention."""
        return self._measured(work, "chunkkv", ChunkKV(LONG_KEEP))

    @arm("h2o")
    def h2o(self, work: Work) -> Metrics:
        """Tokens by the attention of all queries, in the prompt and while generating."""
        return self._measured(work, "h2o", H2O(LONG_KEEP, LONG_KEEP))

    @arm("streamingllm")
    def streamingllm(self, work: Work) -> Metrics:
        """The first tokens and the last."""
        return self._measured(work, "streamingllm", StreamingLLM(LONG_KEEP))

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """What compression does to each task, and where a simpler choice is better."""
        full = means.get("full-cache", {})
        for task in (*TASKS, YOURS):
            name = f"accuracy ({task})"
            if full.get(name):
                changes = [
                    f"{arm} {(of[name] - full[name]) / full[name]:+.0%}"
                    for arm, of in means.items()
                    if name in of and arm != "full-cache"
                ]
                told = f"Share of right tokens on {task}, change from {full[name]:.2f} at {KEEP:.0%}"
                yield f"{told}: {', '.join(changes)}."
        low = f"nll (mixed) at {RATIOS[-1]:g}"
        if low in means.get("shotkv", {}) and low in means.get("shotkv-global", {}):
            layerwise, together = means["shotkv"][low], means["shotkv-global"][low]
            better = "each layer for itself" if layerwise < together else "one choice for all layers"
            yield f"At {RATIOS[-1]:.0%} {better} is better: {layerwise:.3f} against {together:.3f} nats (one choice)."

    def _measured(
        self, work: Work, name: str | None, long: Press | None = None, *, timed: float | None = None
    ) -> Metrics:
        work.answer_all(_presses(work))
        values: dict[str, float] = {}
        missing: dict[str, str] = {}
        curve: list[tuple[float, float]] = []
        if name is not None:
            for task, answers in work.answers.items():
                for (of, ratio), found in answers.items():
                    if of == name:
                        values |= _metrics(task, ratio if of != "full-cache" else KEEP, found)
            curve = [
                (ratio, float(np.mean([one.nll for one in found])))
                for (of, ratio), found in sorted(work.answers.get("mixed", {}).items(), key=lambda each: each[0][1])
                if of == name
            ]
            values |= _falls(work, name)
        if long is not None and work.long is not None:
            values["nll (long)"] = _long(work, long)
        for task in (*TASKS, "long"):
            if f"nll ({task})" not in values:
                missing[f"nll ({task})"] = NOT_YOURS if work.own else NEEDS_FULL
        fall = "fall (arithmetic) over fall (needle)"
        if fall not in values:
            missing[fall] = NOT_YOURS if work.own else NEEDS_FULL
        workloads = {} if timed is None else {"seconds": _decoding(work, timed)}
        curves = {"kept": curve} if len(curve) > 1 else {}
        return Metrics(values, workloads, missing, curves=curves)


LONG_KEEP_ALL = ShotKV(1.0)


def _presses(work: Work) -> dict[str, dict[float, Press]]:
    kinds: dict[str, Any] = {
        "shotkv": ShotKV,
        "shotkv-accumulated": partial(ShotKV, scoring="accumulated"),
        "shotkv-global": partial(ShotKV, layerwise=False),
        "random-units": partial(RandomUnits, random_state=work.seed),
        "snapkv": SnapKV,
        "pyramidkv": PyramidKV,
        "chunkkv": ChunkKV,
        "h2o": H2O,
        "streamingllm": StreamingLLM,
    }
    return {name: {ratio: kind(ratio) for ratio in work.sizes.ratios} for name, kind in kinds.items()}


def _metrics(task: str, ratio: float, found: Sequence[Answered]) -> dict[str, float]:
    """At the ratio of the claims under the task's own name."""
    suffix = f"({task})" if ratio == KEEP else f"({task}) at {ratio:g}"
    return {
        f"nll {suffix}": float(np.mean([one.nll for one in found])),
        f"accuracy {suffix}": float(np.mean([one.accuracy for one in found])),
        f"exact {suffix}": float(np.mean([one.exact for one in found])),
        f"kept {suffix}": float(np.mean([one.kept for one in found])),
    }


def _falls(work: Work, name: str) -> dict[str, float]:
    """How much more accuracy falls on arithmetic than on facts to be found."""
    if name == "full-cache" or not {*ARITHMETIC, "needle"} <= work.answers.keys():
        return {}
    falls = {}
    for task in (*ARITHMETIC, "needle"):
        full, found = (work.answers[task][key] for key in (("full-cache", 1.0), (name, KEEP)))
        before, after = (float(np.mean([one.accuracy for one in of])) for of in (full, found))
        falls[task] = (before - after) / before if before else float("nan")
    arithmetic = float(np.mean([falls[task] for task in ARITHMETIC]))
    ratio = arithmetic / falls["needle"] if falls["needle"] else float("nan")
    return {
        "fall (arithmetic)": arithmetic,
        "fall (needle)": falls["needle"],
        "fall (arithmetic) over fall (needle)": ratio,
    }


def _long(work: Work, press: Press) -> float:
    assert work.long is not None
    evaluator = Evaluator(work.model, work.tokenizer)
    if work.long_reading is None:
        work.long_reading = evaluator.read(work.long)
    return evaluator.answer(work.long, work.long_reading, press).nll


def _decoding(work: Work, share: float) -> Workload:
    """Some steps at a long context; what the keys are has no part in the time."""
    cache = _of_length(work.model, work.sizes.context, share)
    step = torch.ones(1, 1, dtype=torch.int64, device=work.model.device)

    @torch.no_grad()
    def decode() -> None:
        for _ in range(work.sizes.steps):
            work.model(step, cache=cache, use_cache=True)
        cache.crop(-work.sizes.steps)

    return Workload(decode, threads=1)


def _of_length(model: Any, n: int, share: float) -> ShotKVCache:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    held = int(n * share)
    layers = []
    for _ in range(config.num_hidden_layers):
        x: Tensor = torch.zeros(1, heads, held, width, dtype=model.dtype, device=model.device)
        layers.append(ShotKVLayer(x, x.clone(), torch.arange(n - held, n), n))
    report = ShotKVReport(n, 0, held, {}, {}, 0, (), 0, 1)
    return ShotKVCache(layers, report, torch.zeros(1, n, dtype=torch.int64))
