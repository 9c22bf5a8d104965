"""The claims of TRIM, measured beside gradients, hidden vectors, sentence embeddings, words, length and chance."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from scipy.stats import spearmanr
from sklearn.base import clone
from torch import nn

from practicum.checks import CannotMeasure, Check, Comparison, Metrics, Request, Unavailable, Workload, arm
from practicum.language.trim.baselines import (
    BM25Selector,
    EmbeddingSelector,
    LengthSelector,
    PerplexitySelector,
    RepresentationSelector,
)
from practicum.language.trim.gradients import GradientSelector
from practicum.language.trim.samples import (
    Format,
    Part,
    SampleFile,
    SampleTokenizer,
    TokenizedSample,
    messages_of,
)
from practicum.language.trim.selector import CoresetSelector, TrimSelector, read_states
from practicum.language.trim.states import TokenStates
from practicum.language.trim.tasks import WANTED, instruction_pool, reworded_samples, wanted_samples, with_filler
from practicum.language.trim.training import (
    Checkpoint,
    fine_tune,
    response_logits,
    warm_up,
)
from practicum.models import load_language_model
from practicum.toolbox.extras import MissingExtra
from practicum.toolbox.taps import decoder_blocks
from practicum.toolbox.trunk import Forward, FrozenTrunk, TokenRow

NEEDS_FULL = "needs --scale full"
NOT_YOURS = "which samples of your own pool are of the task is not known"
NO_TEST = "needs --test, samples of the task to measure the loss on"
RANK = 8
BATCH = 4
DRAWS = 3
FRACTION = 0.05
N_TARGET = 8
FEWEST = 5
Scores = NDArray[np.float32]
Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What a scale changes."""

    per_family: int
    tests: int
    blocks: int
    steps: int
    learning_rate: float
    draws: int
    timed: int
    noisy_per_family: int
    most: int | None


class TrimCheck(Check):
    """A pool of eleven kinds of instructions, one of them wanted; eight examples of it in other words.

    A coreset as large as the wanted kind is chosen, an adapter is trained on it, and the loss of responses is measured
    on other examples. All adapters have the same rank, steps, batches and learning rate.
    """

    comparisons = (
        Comparison(
            "selects-better-than-chance", metric="precision", arm="trim", against="random", difference_above=0.0
        ),
        Comparison(
            "selects-better-than-gradients", metric="precision", arm="trim", against="less", difference_above=0.0
        ),
        Comparison(
            "selects-better-than-hidden-vectors",
            metric="precision",
            arm="trim",
            against=("rds-last", "rds-mean"),
            difference_above=0.0,
        ),
        Comparison(
            "selects-better-than-embeddings", metric="precision", arm="trim", against="minilm", difference_above=0.0
        ),
        Comparison("trains-better-than-chance", metric="loss", arm="trim", against="random", difference_at_most=0.0),
        Comparison("trains-no-worse-than-gradients", metric="loss", arm="trim", against="less", difference_at_most=0.0),
        Comparison(
            "trains-no-worse-than-hidden-vectors", metric="loss", arm="trim", against="rds-last", difference_at_most=0.0
        ),
        Comparison(
            "trains-better-than-whole-pool", metric="loss", arm="trim", against="whole-pool", difference_at_most=0.0
        ),
        Comparison(
            "helps-without-the-task",
            metric="loss (low overlap)",
            arm="trim",
            against="random",
            difference_at_most=0.0,
        ),
        Comparison(
            "cheaper-than-gradients",
            metric="seconds",
            arm="trim-pass",
            against="less-pass",
            ratio_at_most=0.7,
            timed=True,
        ),
        Comparison(
            "cheaper-than-four-checkpoints",
            metric="seconds",
            arm="trim-pass",
            against="less-pass-4",
            ratio_at_most=0.2,
            timed=True,
        ),
        Comparison(
            "costs-one-forward-pass",
            metric="seconds",
            arm="trim-pass",
            against="forward-pass",
            ratio_at_most=1.3,
            timed=True,
        ),
        Comparison("less-length-bias", metric="length bias", arm="trim", against="less", difference_at_most=0.0),
        Comparison("transfers-between-models", metric="gain kept", arm="trim-transfer", value_at_least=0.9),
        Comparison(
            "weights-help", metric="precision (noisy)", arm="trim", against="trim-uniform", difference_above=0.0
        ),
        Comparison(
            "selects-reworded", metric="precision (reworded)", arm="trim", against="minilm", difference_above=0.0
        ),
    )
    seeds = {"quick": 2, "full": 5, "paper": 5}
    portable = True

    def prepare(self, request: Request) -> Work:
        """Generate or read the pool, the target and the tests."""
        sizes = request.pick(
            quick=Sizes(3, 6, 4, 4, 3e-3, 1, 2, 0, 60),
            full=Sizes(24, 40, 6, 20, 1e-3, DRAWS, 8, 8, 300),
            paper=Sizes(40, 200, 30, 200, 2e-4, DRAWS, 64, 40, None),
        )
        if request.data is None:
            for option in ("target", "test", "fraction"):
                if option in request.options:
                    raise CannotMeasure(f"--{option}: goes with --data, a pool of your own")
            wanted = wanted_samples(N_TARGET + sizes.tests, request.seed)
            pool = instruction_pool(sizes.per_family, request.seed)
            return Work(request, sizes, pool, wanted[:N_TARGET], wanted[N_TARGET:], sizes.per_family)
        pool = list(SampleFile(request.data))
        rng = np.random.default_rng(request.seed)
        if len(pool) < FEWEST:
            raise CannotMeasure(f"{request.data}: has {len(pool)} samples; must have {FEWEST} at least")
        if "target" not in request.options:
            raise CannotMeasure("--target: is missing; must be a .jsonl file with 5 to 10 samples of the task")
        fraction = _fraction(request.options.get("fraction"))
        target = list(SampleFile(request.options["target"]))
        tests = list(SampleFile(request.options["test"])) if "test" in request.options else []
        if sizes.most is not None and len(pool) > sizes.most:
            pool = [pool[i] for i in np.sort(rng.choice(len(pool), sizes.most, replace=False))]
        return Work(request, sizes, pool, target, tests[: sizes.tests], max(1, int(fraction * len(pool) + 1e-9)))

    @arm("trim")
    def trim(self, work: Work) -> Metrics:
        """TRIM, with the model as it is."""
        return work.judged(work.trim(), "trim", trained=True, elsewhere=True)

    @arm("random")
    def random(self, work: Work) -> Metrics:
        """Samples drawn at random, a mean over the draws."""
        draws = [work.draw(i) for i in range(work.sizes.draws)]
        first, *others = (
            work.judged(scores, "random", trained=True, elsewhere=i == 0) for i, scores in enumerate(draws)
        )
        values = {
            name: float(np.mean([value, *(other.values[name] for other in others if name in other.values)]))
            for name, value in first.values.items()
        }
        return Metrics(values, missing=first.missing)

    @arm("less")
    def less(self, work: Work) -> Metrics:
        """LESS with one checkpoint: gradients of an adapter that was warmed up on 5 % of the pool."""
        if work.is_quick:
            return work.needs_full()
        return work.judged(work.less, "less", trained=True)

    @arm("rds-last")
    def rds_last(self, work: Work) -> Metrics:
        """The hidden vector of the last token of the response: cheap and strong."""
        return work.judged(work.representation("last"), "rds-last", trained=True, elsewhere=True)

    @arm("rds-mean")
    def rds_mean(self, work: Work) -> Metrics:
        """The mean hidden vector of the response."""
        return work.judged(work.representation("mean"), "rds-mean")

    @arm("rds-weighted")
    def rds_weighted(self, work: Work) -> Metrics:
        """RDS+: the mean with weights that grow with the place."""
        return work.judged(work.representation("weighted"), "rds-weighted")

    @arm("minilm")
    def minilm(self, work: Work) -> Metrics:
        """Sentence embeddings of all-MiniLM-L6-v2: cheap and strong."""
        selector = EmbeddingSelector()
        return work.judged(work.by_text(selector), "minilm", trained=not work.is_quick, noisy=selector)

    @arm("bm25")
    def bm25(self, work: Work) -> Metrics:
        """Words shared with the target."""
        selector = BM25Selector()
        try:
            return work.judged(work.by_text(selector), "bm25", noisy=selector)
        except MissingExtra as error:
            raise Unavailable(str(error)) from error

    @arm("length")
    def length(self, work: Work) -> Metrics:
        """The longest responses."""
        selector = LengthSelector(work.tokenizer, format=work.format)
        return work.judged(work.by_text(selector), "length")

    @arm("perplexity")
    def perplexity(self, work: Work) -> Metrics:
        """Responses about as likely as those of the target."""
        selector = PerplexitySelector(work.model, work.tokenizer, format=work.format, trunk=work.trunk)
        return work.judged(work.by_text(selector), "perplexity")

    @arm("whole-pool")
    def whole_pool(self, work: Work) -> Metrics:
        """No choice: as many steps on the whole pool."""
        everything = tuple(range(len(work.pool)))
        return Metrics(missing={"loss": NEEDS_FULL}) if work.is_quick else work.trained(everything)

    @arm("untrained")
    def untrained(self, work: Work) -> Metrics:
        """The model without an adapter."""
        return Metrics(work.loss_of(work.model)) if work.tests else Metrics(missing={"loss": NO_TEST})

    @arm("trim-uniform")
    def trim_uniform(self, work: Work) -> Metrics:
        """TRIM without its idea of saliency: all target tokens weigh the same."""
        return work.judged(work.trim(saliency="uniform"), "trim-uniform")

    @arm("trim-mean")
    def trim_mean(self, work: Work) -> Metrics:
        """The mean of token scores alone."""
        return work.judged(work.trim(max_weight=0.0), "trim-mean")

    @arm("trim-max")
    def trim_max(self, work: Work) -> Metrics:
        """The best token alone."""
        return work.judged(work.trim(max_weight=1.0), "trim-max")

    @arm("trim-unseen-0")
    def trim_unseen_0(self, work: Work) -> Metrics:
        """Tokens that the target has not count nothing."""
        return work.judged(work.trim(unseen_penalty=0.0), "trim-unseen-0")

    @arm("trim-unseen-1")
    def trim_unseen_1(self, work: Work) -> Metrics:
        """Tokens that the target has not count in full."""
        return work.judged(work.trim(unseen_penalty=1.0), "trim-unseen-1")

    @arm("trim-prompt")
    def trim_prompt(self, work: Work) -> Metrics:
        """The tokens of prompts instead of responses."""
        return work.judged(work.trim(scope="prompt"), "trim-prompt")

    @arm("trim-all")
    def trim_all(self, work: Work) -> Metrics:
        """The tokens of prompts and responses."""
        return work.judged(work.trim(scope="all"), "trim-all")

    @arm("trim-template")
    def trim_template(self, work: Work) -> Metrics:
        """Every token, those of the chat template too: what happens without masking."""
        return work.needs_full() if work.is_quick else work.judged(work.unmasked, "trim-template")

    @arm("trim-warmed")
    def trim_warmed(self, work: Work) -> Metrics:
        """TRIM with a model that was fine-tuned on 5 % of the pool, as in the paper."""
        return work.needs_full() if work.is_quick else work.judged(work.warmed, "trim-warmed")

    @arm("trim-transfer")
    def trim_transfer(self, work: Work) -> Metrics:
        """The coreset that a model with half of the blocks chooses, for the whole model."""
        if work.is_quick:
            return Metrics(missing={"gain kept": NEEDS_FULL})
        if not work.tests:
            return Metrics(missing={"gain kept": NO_TEST})
        found = work.judged(work.by_half_the_model, "trim-transfer", trained=True)
        chance = float(np.mean([work.loss_on(work.chosen(work.draw(i))) for i in range(work.sizes.draws)]))
        gain, whole = chance - found.values["loss"], chance - work.loss_on(work.chosen(work.trim()))
        if whole <= 0:
            return Metrics(found.values, missing={**found.missing, "gain kept": "TRIM gained nothing over chance"})
        return Metrics({**found.values, "gain kept": gain / whole}, missing=found.missing)

    @arm("trim-pass")
    def trim_pass(self, work: Work) -> Metrics:
        """The time of scoring with TRIM."""
        return Metrics(timed={"seconds": work.timed("trim")})

    @arm("forward-pass")
    def forward_pass(self, work: Work) -> Metrics:
        """The time of forward passes of the same batches, without making logits."""
        return Metrics(timed={"seconds": work.timed("forward")})

    @arm("less-pass")
    def less_pass(self, work: Work) -> Metrics:
        """The time of scoring with LESS and one checkpoint."""
        return Metrics(timed={"seconds": work.timed("less")})

    @arm("less-pass-4")
    def less_pass_4(self, work: Work) -> Metrics:
        """The time of scoring with LESS and four checkpoints."""
        if work.is_quick:
            return Metrics(missing={"seconds": NEEDS_FULL})
        return Metrics(timed={"seconds": work.timed("less-4")})

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """The best selectors, the ablations, and what masking is worth."""
        precise = {name: of["precision"] for name, of in means.items() if "precision" in of}
        if precise:
            told = ", ".join(f"{name} {precise[name]:.2f}" for name in sorted(precise, key=lambda n: -precise[n]))
            yield f"Share of the coreset that is of the task: {told}."
        if {"trim", "trim-uniform"} <= precise.keys():
            effect = precise["trim"] - precise["trim-uniform"]
            noisy = [means[name].get("precision (noisy)") for name in ("trim", "trim-uniform")]
            told = f"Weighting target tokens by attention changes the precision by {effect:+.3f}"
            if noisy[0] is not None and noisy[1] is not None:
                told += f", and by {noisy[0] - noisy[1]:+.3f} where responses are full of small talk"
            yield told + "."
        if {"trim", "trim-template"} <= precise.keys():
            yield (
                f"Without masking what the chat template writes, the precision is {precise['trim-template']:.2f} "
                f"instead of {precise['trim']:.2f}."
            )
        reworded = {name: of["precision (reworded)"] for name, of in means.items() if "precision (reworded)" in of}
        if reworded:
            told = ", ".join(f"{name} {reworded[name]:.2f}" for name in sorted(reworded, key=lambda n: -reworded[n]))
            yield f"Where the target's responses are worded otherwise than the pool's: {told}."
        losses = {name: of["loss"] for name, of in means.items() if "loss" in of}
        if losses:
            told = ", ".join(f"{name} {losses[name]:.3f}" for name in sorted(losses, key=lambda n: losses[n]))
            yield f"Loss on the task after the same training: {told}."


class Work:
    """The work of one seed; what several arms look at is computed once.

    Parameters
    ----------
    request : Request
    sizes : Sizes
    pool, target, tests : list of mapping
    n : int
        Size of the coreset.
    """

    def __init__(
        self,
        request: Request,
        sizes: Sizes,
        pool: Sequence[Sample],
        target: Sequence[Sample],
        tests: Sequence[Sample],
        n: int,
    ) -> None:
        self.request, self.sizes = request, sizes
        self.pool, self.target, self.tests, self.n = pool, target, tests, n
        loaded = load_language_model(request.model, device=request.device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.format = _format(request.model, self.tokenizer)
        self.tokenized = self._tokenize(pool, "pool")
        self._tokenize(target, "target")
        self.tokenized_tests = self._tokenize(tests, "test")
        self._trained: dict[tuple[int, ...], dict[str, float]] = {}

    @property
    def is_quick(self) -> bool:
        """Whether there is no time for the slower arms."""
        return self.request.scale == "quick"

    @property
    def own(self) -> bool:
        """Whether the pool is the user's."""
        return self.request.data is not None

    @property
    def blocks(self) -> int:
        """Blocks from the last that are trained."""
        return min(self.sizes.blocks, len(decoder_blocks(self.model)))

    @cached_property
    def trunk(self) -> FrozenTrunk | None:
        """The states below the blocks that are trained, where the architecture lets a pass begin there."""
        below = len(decoder_blocks(self.model)) - self.blocks
        if below == 0:
            return None
        trunk = FrozenTrunk(self.model, below)
        return trunk if trunk.is_exact(TokenRow(self.tokenized[0].ids)) else None

    # Selection --------------------------------------------------------------------------------------------------------

    def trim(self, **settings: Any) -> Scores:
        """Scores of TRIM with some settings, from states that are read once."""
        selector = self._trim(**settings).fit_states(self.target_states)
        return selector.score_states(self.pool_states)[:, 0]

    def representation(self, pool: str) -> Scores:
        """Scores of RDS."""
        selector = RepresentationSelector(self.model, self.tokenizer, pool=pool, format=self.format)  # type: ignore[arg-type]
        return selector.fit_states(self.target_states).score_states(self.pool_states)[:, 0]

    def by_text(self, selector: CoresetSelector) -> Scores:
        """Scores of a selector that needs no states."""
        return selector.fit(self.target).score_samples(self.pool)

    def draw(self, number: int) -> Scores:
        """Scores at random."""
        rng = np.random.default_rng([self.request.seed, 7, number])
        return rng.random(len(self.pool)).astype(np.float32)

    @cached_property
    def less(self) -> Scores:
        """Scores of LESS with one checkpoint."""
        checkpoints: list[Checkpoint] = []
        with _Adapted(self, checkpoints) as tuned:
            selector = GradientSelector(
                tuned, self.tokenizer, checkpoints=checkpoints[-1:], format=self.format, trunk=self.trunk
            )
            return selector.fit(self.target).score_samples(self.pool)

    @cached_property
    def warmed(self) -> Scores:
        """Scores of TRIM with a model that was fine-tuned for a moment."""
        with _Adapted(self) as tuned:
            target, pool = (self._states(samples, saliency, model=tuned) for samples, saliency in self._both())
            return self._trim().fit_states(target).score_states(pool)[:, 0]

    @cached_property
    def unmasked(self) -> Scores:
        """Scores of TRIM where the tokens of the template count too."""
        made = self.format or _template_format(self.tokenizer)

        def everything(sample: Sample) -> list[tuple[str, Part]]:
            return [(text, "response") for text, _ in made(sample)]

        target, pool = (
            self._states(samples, saliency, format=everything, tokenizer=_without_special(self.tokenizer))
            for samples, saliency in self._both()
        )
        return self._trim().fit_states(target).score_states(pool)[:, 0]

    @cached_property
    def by_half_the_model(self) -> Scores:
        """Scores of TRIM with the lower half of the blocks and the final norm."""
        half = _half(self.model)
        target, pool = (self._states(samples, saliency, model=half, trunk=None) for samples, saliency in self._both())
        return self._trim(model=half).fit_states(target).score_states(pool)[:, 0]

    @cached_property
    def target_states(self) -> TokenStates:
        """States of the target, with saliency."""
        return self._states(self.target, True)

    @cached_property
    def pool_states(self) -> TokenStates:
        """States of the pool."""
        return self._states(self.pool, False)

    @cached_property
    def noisy_pool(self) -> list[dict[str, str]]:
        """Samples whose responses are full of small talk."""
        seed = 1000 + self.request.seed
        return with_filler(instruction_pool(self.sizes.noisy_per_family, seed), seed)

    @cached_property
    def noisy_target(self) -> list[dict[str, str]]:
        """Target samples with small talk."""
        seed = 1000 + self.request.seed
        return with_filler(wanted_samples(N_TARGET, seed), seed + 1)

    @cached_property
    def reworded_target(self) -> list[dict[str, str]]:
        """Target samples that show their working in other words than the pool."""
        return reworded_samples(N_TARGET, self.request.seed)

    @cached_property
    def _reworded_states(self) -> TokenStates:
        return self._states(self.reworded_target, True)

    @cached_property
    def _noisy_states(self) -> tuple[TokenStates, TokenStates]:
        return self._states(self.noisy_target, True, trunk=None), self._states(self.noisy_pool, False, trunk=None)

    def _both(self) -> tuple[tuple[Sequence[Sample], bool], tuple[Sequence[Sample], bool]]:
        return (self.target, True), (self.pool, False)

    def _trim(self, **settings: Any) -> TrimSelector:
        return TrimSelector(**{"model": self.model, "tokenizer": self.tokenizer, "format": self.format, **settings})

    def _states(self, samples: Sequence[Sample], saliency: bool, **given: Any) -> TokenStates:
        settings = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "format": self.format,
            "trunk": self.trunk,
            "n_layers": min(4, len(decoder_blocks(self.model)) // 2 or 1),
            **given,
        }
        return read_states(samples=samples, saliency=saliency, **settings)

    def _tokenize(self, samples: Sequence[Sample], name: str) -> list[TokenizedSample]:
        found = SampleTokenizer(self.tokenizer, self.format).tokenize(samples, name) if samples else []
        for i, sample in enumerate(found):
            if not sample.in_scope("response"):
                raise CannotMeasure(f"{name}[{i}]: field 'response': has no tokens; must have text")
        return found

    # Judging ----------------------------------------------------------------------------------------------------------

    def judged(
        self,
        scores: Scores,
        name: str,
        *,
        trained: bool = False,
        elsewhere: bool = False,
        noisy: CoresetSelector | None = None,
    ) -> Metrics:
        """What the scores choose, and what training on it gives."""
        chosen = self.chosen(scores)
        lengths = np.array([len(sample.in_scope("response")) for sample in self.tokenized])
        constant = np.ptp(scores) == 0 or np.ptp(lengths) == 0
        values = {
            "length bias": 0.0 if constant else abs(float(spearmanr(scores, lengths).statistic)),
            "mean length": float(lengths[list(chosen)].mean()),
        }
        missing: dict[str, str] = {}
        if self.own:
            missing |= dict.fromkeys(("precision", "precision at 5 %", "loss (low overlap)"), NOT_YOURS)
            missing |= dict.fromkeys(("precision (noisy)", "precision (reworded)"), NOT_YOURS)
        else:
            five = max(1, int(FRACTION * len(self.pool)))
            values["precision"] = self._precision(chosen)
            values["precision at 5 %"] = self._precision(self.chosen(scores, five))
            noise = self._noisy_precision(name, noisy)
            if noise is not None:
                values["precision (noisy)"] = noise
            elif self.is_quick:
                missing["precision (noisy)"] = NEEDS_FULL
            reworded = self._reworded_precision(name, noisy)
            if reworded is not None:
                values["precision (reworded)"] = reworded
        if trained:
            found = self.trained(chosen)
            values |= found.values
            missing |= found.missing
        elif self.is_quick:
            missing["loss"] = NEEDS_FULL
        if elsewhere and not self.own:
            if self.is_quick:
                missing["loss (low overlap)"] = NEEDS_FULL
            else:
                values["loss (low overlap)"] = self.loss_on(self.chosen(self._without_the_task(scores)))
        return Metrics(values, missing=missing)

    def chosen(self, scores: Scores, n: int | None = None) -> tuple[int, ...]:
        """The best samples."""
        return tuple(int(i) for i in np.argsort(-scores, kind="stable")[: n or self.n])

    def _precision(self, chosen: Sequence[int]) -> float:
        return float(np.mean([self.pool[i]["family"] == WANTED for i in chosen]))

    def _without_the_task(self, scores: Scores) -> Scores:
        wanted = np.array([sample["family"] == WANTED for sample in self.pool])
        return np.where(wanted, -np.inf, scores).astype(np.float32)

    def _noisy_precision(self, name: str, selector: CoresetSelector | None) -> float | None:
        if self.is_quick:
            return None
        settings: dict[str, dict[str, Any]] = {
            "trim": {},
            "trim-uniform": {"saliency": "uniform"},
            "trim-mean": {"max_weight": 0.0},
        }
        if selector is not None:
            scores = clone(selector).fit(self.noisy_target).score_samples(self.noisy_pool)
        elif name in settings:
            target, pool = self._noisy_states
            scores = self._trim(**settings[name]).fit_states(target).score_states(pool)[:, 0]
        elif name in ("rds-last", "rds-mean"):
            target, pool = self._noisy_states
            rds = RepresentationSelector(self.model, self.tokenizer, pool=name[4:], format=self.format)  # type: ignore[arg-type]
            scores = rds.fit_states(target).score_states(pool)[:, 0]
        else:
            return None
        best = self.chosen(scores, self.sizes.noisy_per_family)
        return float(np.mean([self.noisy_pool[i]["family"] == WANTED for i in best]))

    def _reworded_precision(self, name: str, selector: CoresetSelector | None) -> float | None:
        """Of what is chosen when the target's responses are worded otherwise than the pool's."""
        if selector is not None:
            scores = clone(selector).fit(self.reworded_target).score_samples(self.pool)
        elif name in ("trim", "trim-uniform"):
            settings = {"saliency": "uniform"} if name == "trim-uniform" else {}
            scores = self._trim(**settings).fit_states(self._reworded_states).score_states(self.pool_states)[:, 0]
        elif name in ("rds-last", "rds-mean"):
            rds = RepresentationSelector(self.model, self.tokenizer, pool=name[4:], format=self.format)  # type: ignore[arg-type]
            scores = rds.fit_states(self._reworded_states).score_states(self.pool_states)[:, 0]
        else:
            return None
        return self._precision(self.chosen(scores))

    def trained(self, chosen: tuple[int, ...]) -> Metrics:
        """Loss and exact answers on the tests after training on the chosen samples."""
        if not self.tests:
            return Metrics(missing={"loss": NO_TEST, "exact": NO_TEST})
        key = tuple(sorted(chosen))
        if key not in self._trained:
            tuned = fine_tune(
                self.model,
                [self.tokenized[i] for i in key],
                self._lora(),
                steps=self.sizes.steps,
                learning_rate=self.sizes.learning_rate,
                batch_size=BATCH,
                trunk=self.trunk,
                random_state=self.request.seed,
            )
            try:
                self._trained[key] = self.loss_of(tuned)
            finally:
                _take_off(tuned)
        return Metrics(self._trained[key])

    def loss_on(self, chosen: tuple[int, ...]) -> float:
        """Loss on the tests after training on the chosen samples."""
        return float(self.trained(chosen).values["loss"])

    def loss_of(self, model: Any) -> dict[str, float]:
        """Mean negative log-likelihood of the tests' response tokens, and the share of tests that are all right."""
        forward = Forward(model, self.trunk)
        losses, exact = [], []
        with torch.no_grad():
            for chosen in forward.batches([TokenRow(sample.ids) for sample in self.tokenized_tests]):
                for logits, wanted in response_logits(forward, [self.tokenized_tests[i] for i in chosen]):
                    losses.append(nn.functional.cross_entropy(logits, wanted, reduction="none").double())
                    exact.append(bool((logits.argmax(-1) == wanted).all()))
        return {"loss": float(torch.cat(losses).mean()), "exact": float(np.mean(exact))}

    def needs_full(self) -> Metrics:
        """What an arm says that quick has no time for."""
        names = ("precision", "precision at 5 %", "length bias", "loss", "loss (low overlap)", "precision (noisy)")
        return Metrics(missing=dict.fromkeys(names, NEEDS_FULL))

    def _lora(self) -> LoraConfig:
        return _lora(self.model, self.blocks)

    # Time -------------------------------------------------------------------------------------------------------------

    def timed(self, what: str) -> Workload:
        """A few samples scored one way, in the process with the stopwatch."""
        chosen = np.random.default_rng([self.request.seed, 8]).choice(
            len(self.pool), min(self.sizes.timed, len(self.pool)), replace=False
        )
        samples = tuple(dict(self.pool[i]) for i in chosen)
        given = (self.request.model, self.request.device, self.blocks)
        call = partial(_passed, what, given, tuple(map(dict, self.target[:1])), samples)
        return Workload(call, clock="cpu", threads=1, repeats=self.request.pick(quick=1, full=2))


class _Adapted:
    """The model of a seed with an adapter that is warmed up on 5 % of the pool, and without it afterwards."""

    def __init__(self, work: Work, checkpoints: list[Checkpoint] | None = None) -> None:
        self.work, self.checkpoints = work, checkpoints

    def __enter__(self) -> Any:
        work = self.work
        self.tuned = warm_up(
            work.model,
            work.tokenizer,
            work.pool,
            FRACTION,
            work._lora(),
            learning_rate=work.sizes.learning_rate,
            batch_size=BATCH,
            format=work.format,
            trunk=work.trunk,
            checkpoints=self.checkpoints,
            random_state=work.request.seed,
        )
        return self.tuned

    def __exit__(self, *exception: object) -> None:
        _take_off(self.tuned)


def _take_off(tuned: Any) -> None:
    """Leave the model without its adapter, all of it trainable as before."""
    base = tuned.unload()
    for parameter in base.parameters():
        parameter.requires_grad_(True)


def _lora(model: Any, n_blocks: int) -> LoraConfig:
    """An adapter on all linear layers of the last blocks."""
    blocks = decoder_blocks(model)
    within = {id(module) for block in blocks[len(blocks) - n_blocks :] for module in block.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if id(module) in within and type(module).__name__ in ("Linear", "Conv1D")
    ]
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names, task_type="CAUSAL_LM")


def _half(model: Any) -> Any:
    """The same model with the lower half of its blocks, sharing their weights."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = max(1, len(decoder_blocks(model)) // 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        half = type(model)(config)
    half.load_state_dict(model.state_dict(), strict=False, assign=True)
    return half.to(model.device).eval()


def _fraction(given: str | None) -> float:
    try:
        fraction = FRACTION if given is None else float(given)
    except ValueError:
        fraction = float("nan")
    if not 0 < fraction <= 1:
        raise CannotMeasure(f"--fraction {given}: must be a number above 0 and at most 1")
    return fraction


# How a sample is written ----------------------------------------------------------------------------------------------


def chatml(sample: Sample) -> list[tuple[str, Part]]:
    """ChatML without the long system prompt that the embedded model's own template puts first."""
    found: list[tuple[str, Part]] = []
    for message in messages_of(sample, "sample"):
        part: Part = "response" if message["role"] == "assistant" else "prompt"
        head: tuple[str, Part] = (f"<|im_start|>{message['role']}\n", "template")
        found += [head, (message["content"], part), ("<|im_end|>\n", "template")]
    return found


def plain(sample: Sample) -> list[tuple[str, Part]]:
    """For a model without a chat template: messages in lines of their own."""
    found: list[tuple[str, Part]] = []
    for message in messages_of(sample, "sample"):
        part: Part = "response" if message["role"] == "assistant" else "prompt"
        found += [(message["content"], part), ("\n", "template")]
    return found


def _format(model: str | None, tokenizer: Any) -> Format | None:
    if model is None:
        return chatml
    return None if tokenizer.chat_template else plain


def _template_format(tokenizer: Any) -> Format:
    """The tokenizer's own template as a format."""

    def made(sample: Sample) -> list[tuple[str, Part]]:
        return [(tokenizer.apply_chat_template(messages_of(sample, "sample"), tokenize=False), "response")]

    return made


def _without_special(tokenizer: Any) -> Any:
    """The tokenizer, for one that holds no token for special."""
    return _Unspecial(tokenizer)


class _Unspecial:
    """Passes everything on to a tokenizer but which tokens are special."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    all_special_ids: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


# What the stopwatch times, in a process that has nothing of the seed's work ------------------------------------------

Given = tuple[str | None, str, int]


def _passed(what: str, given: Given, target: tuple[Sample, ...], samples: tuple[Sample, ...]) -> Any:
    """Score the samples one way."""
    return _ways(given)[what](target, samples)


@lru_cache(maxsize=1)
def _ways(given: Given) -> Mapping[str, Callable[[tuple[Sample, ...], tuple[Sample, ...]], Any]]:
    """The ways of scoring. LESS has a model of its own: its adapter would slow the others down."""
    name, device, n_blocks = given
    loaded, adapted = (load_language_model(name, device=device) for _ in range(2))
    format = _format(name, loaded.tokenizer)
    selector = TrimSelector(loaded.model, loaded.tokenizer, format=format)
    less: dict[int, GradientSelector] = {}

    @lru_cache(maxsize=1)
    def warmed(target: str) -> tuple[Any, list[Checkpoint]]:
        """An adapter after one step: what it learnt does not change how long its gradients take."""
        checkpoints: list[Checkpoint] = []
        tuned = fine_tune(
            adapted.model,
            SampleTokenizer(adapted.tokenizer, format).tokenize(json.loads(target)),
            _lora(adapted.model, n_blocks),
            steps=1,
            learning_rate=1e-3,
            batch_size=1,
            checkpoints=checkpoints,
        )
        return tuned, checkpoints

    def trim(target: tuple[Sample, ...], samples: tuple[Sample, ...]) -> Any:
        if not hasattr(selector, "fingerprints_"):
            selector.set_params(n_layers=min(4, len(decoder_blocks(loaded.model)))).fit(target)
        return selector.score_samples(samples)

    def forward(target: tuple[Sample, ...], samples: tuple[Sample, ...]) -> Any:
        passes = Forward(loaded.model, batch_size=8)
        rows = [TokenRow(sample.ids) for sample in SampleTokenizer(loaded.tokenizer, format).tokenize(samples)]
        with torch.no_grad():
            return [passes.logits([rows[i] for i in chosen], keep=1).sum() for chosen in passes.batches(rows)]

    def gradients(number: int, target: tuple[Sample, ...], samples: tuple[Sample, ...]) -> Any:
        if number not in less:
            tuned, checkpoints = warmed(json.dumps(target))
            one = GradientSelector(tuned, adapted.tokenizer, checkpoints=checkpoints * number, format=format)
            less[number] = one.fit(target)
        return less[number].score_samples(samples)

    return {
        "trim": trim,
        "forward": forward,
        "less": partial(gradients, 1),
        "less-4": partial(gradients, 4),
    }
