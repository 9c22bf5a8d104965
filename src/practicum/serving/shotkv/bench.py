"""Which tasks break when the cache is compressed, and by which method: the diagnosis of KVFundaBench."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from practicum.serving.shotkv.policies import H2O, ChunkKV, PyramidKV, RandomUnits, ShotKV, SnapKV, StreamingLLM
from practicum.serving.shotkv.press import MIN_WINDOW, Press, Reading, read
from practicum.serving.shotkv.tasks import ShotItem, shot_items
from practicum.serving.shotkv.units import Unit, split_units
from practicum.toolbox.errors import InputError

METHODS: dict[str, Callable[..., Press]] = {
    "shotkv": ShotKV,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "chunkkv": ChunkKV,
    "h2o": H2O,
    "streamingllm": StreamingLLM,
    "random": RandomUnits,
}
FULL = "full"
SINKS = 4


@dataclass(frozen=True)
class Answered:
    """How likely a model finds the answer that is right.

    Attributes
    ----------
    nll : float
        Negative log-likelihood in nats, as a mean over the answer's a tokens, shape (a,).
    accuracy : float
        Share of them that the model would have written itself, given those before.
    exact : bool
        Whether it would have written all of them: what greedy decoding comes to.
    kept : float
        Tokens of units that were kept, as a mean over layers.

    Examples
    --------
    >>> Answered(0.5, 1.0, True, 12.0).exact
    True
    """

    nll: float
    accuracy: float
    exact: bool
    kept: float


@dataclass
class TokenizedItem:
    """A `ShotItem` in tokens.

    Attributes
    ----------
    prompt : Tensor of int64, shape (1, n)
    answer : Tensor of int64, shape (1, a)
    units : tuple of Unit

    Examples
    --------
    >>> TokenizedItem(torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64), ()).tail
    5
    """

    prompt: Tensor
    answer: Tensor
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, item: ShotItem, tokenizer: Any) -> TokenizedItem:
        """Turn an item into tokens; the answer's are those that the prompt and the answer together have more.

        Parameters
        ----------
        item : ShotItem
        tokenizer : transformers.PreTrainedTokenizerBase

        Returns
        -------
        TokenizedItem
            With a prompt of shape (1, n).

        Raises
        ------
        InputError
            A ValueError: for an answer that adds no token.
        """
        if item.units:
            spans = split_units(tokenizer, item.prompt, spans=item.spans)
            prompt, units = spans.input_ids, spans.units
        else:
            prompt, units = torch.tensor([tokenizer(item.prompt)["input_ids"]]), ()
        answer = torch.tensor([tokenizer(item.answer, add_special_tokens=False)["input_ids"]], dtype=torch.int64)
        if answer.shape[1] == 0:
            raise InputError(f"answer: {item.answer!r} has no token")
        return cls(prompt, answer, units)

    @property
    def tail(self) -> int:
        """How many of the last tokens are the question: 8 at least."""
        n = self.prompt.shape[1]
        return min(n, max(MIN_WINDOW, n - self.units[-1].end if self.units else n))


class Evaluator:
    """Answer questions with whole and with compressed caches; what prompts have in common is read once.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast one.
    accumulated : bool
        Whether any press looks at all queries.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ... )
    >>> item = TokenizedItem(torch.arange(1, 25)[None], torch.tensor([[3, 4]]), (Unit(1, 6), Unit(6, 11)))
    >>> evaluator = Evaluator(LlamaForCausalLM(config).eval(), None)
    >>> reading = evaluator.read(item)  # keys (1, 2, 24, 8)
    >>> evaluator.answer(item, reading, ShotKV(0.5)).kept
    5.0
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, accumulated: bool = True) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.accumulated = accumulated
        self._before: Reading | None = None

    def read(self, item: TokenizedItem) -> Reading:
        """Read a prompt; if it begins like the one before, only what is new.

        Parameters
        ----------
        item : TokenizedItem

        Returns
        -------
        Reading
            With keys of shape (1, H_kv, n, d).
        """
        head = item.prompt[:, : item.prompt.shape[1] - item.tail]
        before = self._before
        if head.shape[1] == 0:
            before = None
        elif before is None or not torch.equal(before.input_ids, head):
            before = self._before = read(self.model, head, accumulated=self.accumulated)
        return read(self.model, item.prompt, window=item.tail, accumulated=self.accumulated, before=before)

    def answer(self, item: TokenizedItem, reading: Reading, press: Press | None) -> Answered:
        """How likely the right answer is after a press, or with the whole cache.

        Parameters
        ----------
        item : TokenizedItem
        reading : Reading
        press : Press or None

        Returns
        -------
        Answered
            From logits of shape (a, V).
        """
        whole = press is None or not item.units
        used: Press = ShotKV(prefill_ratio=1.0) if whole or press is None else press
        units = item.units or (Unit(0, 1),)
        cache = used.apply(self.model, reading, units)
        with used(self.model):
            nll, right = self._forced(item, cache) if used.decode_ratio == 1 else self._stepwise(item, cache)
        kept = float(np.mean(list(cache.report.kept_tokens.values()))) if item.units else 0.0
        return Answered(float(nll.mean()), float(right.float().mean()), bool(right.all()), kept)

    @torch.no_grad()
    def _forced(self, item: TokenizedItem, cache: Any) -> tuple[Tensor, Tensor]:
        """All tokens of the answer at once."""
        ids = torch.cat([item.prompt[:, -1:], item.answer[:, :-1]], dim=1)
        return _scored(self.model(ids, cache=cache, use_cache=True).logits[0], item.answer[0])

    @torch.no_grad()
    def _stepwise(self, item: TokenizedItem, cache: Any) -> tuple[Tensor, Tensor]:
        """One after another, so that generated tokens are let go of as in `generate`."""
        ids = torch.cat([item.prompt[:, -1:], item.answer[:, :-1]], dim=1)
        logits = [self.model(ids[:, i : i + 1], cache=cache, use_cache=True).logits[0] for i in range(ids.shape[1])]
        return _scored(torch.cat(logits), item.answer[0])


def _scored(logits: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    nll = nn.functional.cross_entropy(logits.float(), answer.to(logits.device), reduction="none")
    return nll, logits.argmax(-1) == answer.to(logits.device)


@dataclass(frozen=True)
class Cell:
    """One method at one ratio on one task and seed: means over the items.

    Attributes
    ----------
    task, method : str
    ratio : float
    seed : int
    nll, accuracy, exact : float
        Of shape () each, over the items.

    Examples
    --------
    >>> Cell("sums", "full", 1.0, 0, 0.1, 1.0, 1.0).task
    'sums'
    """

    task: str
    method: str
    ratio: float
    seed: int
    nll: float
    accuracy: float
    exact: float


@dataclass
class KVFundaBench:
    """What compression costs each task.

    Attributes
    ----------
    cells : list of Cell
    gain : dict of str to float
        By task: by how much the units lower the NLL of the answer, in nats a token.
    sinks : dict of str to float
        By task: share of the question's attention that goes to the first four tokens.
    entropy : dict of str to float
        By task: entropy of where the question's attention goes, in nats.

    Examples
    --------
    >>> cells = [Cell("sums", "full", 1.0, 0, 0.1, 0.8, 0.5), Cell("sums", "h2o", 0.1, 0, 0.9, 0.4, 0.0)]
    >>> KVFundaBench(cells).change("sums", "h2o", 0.1)  # of values of shape (seeds,)
    -0.5
    """

    cells: list[Cell] = field(default_factory=list)
    gain: dict[str, float] = field(default_factory=dict)
    sinks: dict[str, float] = field(default_factory=dict)
    entropy: dict[str, float] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in their order."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def methods(self) -> list[tuple[str, float]]:
        """Methods and ratios, in their order, without the whole cache."""
        return list(dict.fromkeys((cell.method, cell.ratio) for cell in self.cells if cell.method != FULL))

    def mean(self, task: str, method: str, ratio: float, metric: str = "accuracy") -> float:
        """Mean over seeds.

        Parameters
        ----------
        task, method : str
        ratio : float
        metric : {"accuracy", "nll", "exact"}

        Returns
        -------
        float
            Of values of shape (seeds,).
        """
        found = [
            getattr(cell, metric)
            for cell in self.cells
            if (cell.task, cell.method) == (task, method) and (cell.ratio == ratio or method == FULL)
        ]
        return float(np.mean(found)) if found else math.nan

    def change(self, task: str, method: str, ratio: float) -> float:
        """Relative change of the accuracy, the paper's statistic: (compressed - full) / full.

        Parameters
        ----------
        task, method : str
        ratio : float

        Returns
        -------
        float
            NaN where the whole cache has no token right. Of values of shape (seeds,).
        """
        full = self.mean(task, FULL, 1.0)
        return (self.mean(task, method, ratio) - full) / full if full else math.nan

    def sensitivity(self, task: str) -> float:
        """By how much compression raises the NLL of a task, as a mean over token-wise methods and ratios.

        Parameters
        ----------
        task : str

        Returns
        -------
        float
            In nats a token, of values of shape (methods,).
        """
        full = self.mean(task, FULL, 1.0, "nll")
        rises = [self.mean(task, m, r, "nll") - full for m, r in self.methods if m not in ("shotkv", "random")]
        return float(np.mean(rises)) if rises else math.nan

    def gain_and_sensitivity(self) -> float:
        """Spearman correlation over tasks of what the units bring and what compression costs.

        Returns
        -------
        float
            NaN for fewer than three tasks. Of two arrays of shape (tasks,).
        """
        tasks = [task for task in self.tasks if task in self.gain]
        if len(tasks) < 3:
            return math.nan
        return float(spearmanr([self.gain[t] for t in tasks], [self.sensitivity(t) for t in tasks]).statistic)

    def save(self, path: Path | str) -> None:
        """Write it as JSON, in one step.

        Parameters
        ----------
        path : path-like
            Of cells of shape (tasks, methods, seeds).
        """
        content = {
            "cells": [asdict(cell) for cell in self.cells],
            "gain": self.gain,
            "sinks": self.sinks,
            "entropy": self.entropy,
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f".{target.name}.tmp")
        half.write_text(json.dumps(content))
        half.replace(target)

    @classmethod
    def load(cls, path: Path | str) -> KVFundaBench:
        """Read what `save` wrote.

        Parameters
        ----------
        path : path-like

        Returns
        -------
        KVFundaBench
            With cells of shape (tasks, methods, seeds).

        Raises
        ------
        InputError
            A ValueError that names the file.
        """
        try:
            content = json.loads(Path(path).read_text())
            cells = [Cell(**cell) for cell in content["cells"]]
            return cls(cells, content["gain"], content["sinks"], content["entropy"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: is no result of the benchmark: {error}") from error


def kvfundabench(
    model: nn.Module,
    tokenizer: Any,
    tasks: Mapping[str, Callable[[int], Sequence[ShotItem]]] | Sequence[str],
    methods: Sequence[str] = tuple(METHODS),
    ratios: Sequence[float] = (0.5, 0.25, 0.1),
    seeds: int = 3,
    *,
    n_items: int = 8,
    n_units: int = 16,
    done: KVFundaBench | None = None,
) -> Iterator[KVFundaBench]:
    """Measure what compression costs each task, with progress after every task and seed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any causal language model whose attention goes through transformers' AttentionInterface, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    tasks : sequence of str, or mapping of str to callable
        Names of generated tasks, or ``items(seed)`` by name for one's own.
    methods : sequence of str
        Of ``METHODS``.
    ratios : sequence of float
        Shares of the tokens of units that are kept, in (0, 1].
    seeds : int
    n_items, n_units : int
        Of generated tasks, for each seed.
    done : KVFundaBench, optional
        What was measured before; it is not measured again.

    Yields
    ------
    KVFundaBench
        The same object, with more cells each time: (tasks, methods, seeds) in the end.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Examples
    --------
    >>> next(kvfundabench(None, None, ["sums"], methods=["none"]))
    Traceback (most recent call last):
    practicum.toolbox.errors.InputError: methods: 'none' is none of shotkv, snapkv, pyramidkv, chunkkv, h2o, ...
    """
    for name in methods:
        if name not in METHODS:
            raise InputError(f"methods: {name!r} is none of {', '.join(METHODS)}")
    if seeds < 1:
        raise InputError(f"seeds={seeds}: must be 1 or more")
    presses = [(name, ratio, METHODS[name](ratio)) for ratio in ratios for name in methods]
    found = done or KVFundaBench()
    makers: Mapping[str, Callable[[int], Sequence[ShotItem]]]
    if isinstance(tasks, Mapping):
        makers = tasks
    else:
        makers = {
            name: lambda seed, name=name: shot_items(name, n_items, n_units, random_state=seed)  # type: ignore[misc]
            for name in tasks
        }
    present = {(cell.task, cell.method, cell.ratio, cell.seed) for cell in found.cells}
    for seed in range(seeds):
        for task, items in makers.items():
            wanted = [(n, r, p) for n, r, p in presses if (task, n, r, seed) not in present]
            if wanted or (task, FULL, 1.0, seed) not in present:
                _measure(Evaluator(model, tokenizer), task, items(seed), wanted, seed, found)
                yield found


def _measure(
    evaluator: Evaluator,
    task: str,
    items: Sequence[ShotItem],
    presses: Sequence[tuple[str, float, Press]],
    seed: int,
    found: KVFundaBench,
) -> None:
    answers: dict[tuple[str, float], list[Answered]] = {}
    without, sinks, entropies = [], [], []
    for item in items:
        tokens = TokenizedItem.of(item, evaluator.tokenizer)
        reading = evaluator.read(tokens)
        answers.setdefault((FULL, 1.0), []).append(evaluator.answer(tokens, reading, None))
        for name, ratio, press in presses:
            answers.setdefault((name, ratio), []).append(evaluator.answer(tokens, reading, press))
        share, entropy = attention_profile(reading)
        sinks.append(share)
        entropies.append(entropy)
    # After the prompts that share their beginning.
    for item in items:
        bare = TokenizedItem.of(item.without_units(), evaluator.tokenizer)
        without.append(evaluator.answer(bare, evaluator.read(bare), None).nll)
    for (name, ratio), of in answers.items():
        if not any((c.task, c.method, c.ratio, c.seed) == (task, name, ratio, seed) for c in found.cells):
            means = [float(np.mean([getattr(one, metric) for one in of])) for metric in ("nll", "accuracy", "exact")]
            found.cells.append(Cell(task, name, ratio, seed, *means))
    gain = float(np.mean(without)) - float(np.mean([one.nll for one in answers[FULL, 1.0]]))
    # A mean over the seeds so far.
    for kept, value in ((found.gain, gain), (found.sinks, np.mean(sinks)), (found.entropy, np.mean(entropies))):
        kept[task] = (kept.get(task, 0.0) * seed + float(value)) / (seed + 1)


def attention_profile(reading: Reading) -> tuple[float, float]:
    """Where the question's attention goes.

    Parameters
    ----------
    reading : Reading
        With the sums of the last queries: (1, H, n) a layer.

    Returns
    -------
    (float, float)
        The share of it on the first four tokens, and the entropy over all n in nats, as means over layers and heads.

    Raises
    ------
    InputError
        A ValueError: for a reading without those sums.

    Examples
    --------
    >>> uniform = torch.full((1, 1, 8), 0.25)
    >>> share, entropy = attention_profile(Reading(None, torch.zeros(1, 8), {1: uniform}, 2, None))
    >>> share, round(entropy, 3)
    (0.5, 2.079)
    """
    if not reading.received:
        raise InputError("reading: has no sums of attention; read with window=")
    shares, entropies = [], []
    for received in reading.received.values():
        p = received / received.sum(-1, keepdim=True).clamp_min(1e-30)
        shares.append(float(p[..., :SINKS].sum(-1).mean()))
        entropies.append(float(torch.special.entr(p).sum(-1).mean()))
    return float(np.mean(shares)), float(np.mean(entropies))
