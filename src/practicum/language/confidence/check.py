"""The claims on verbalized confidence, measured against confidences that need no training."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.checks import CannotMeasure, Check, Comparison, Metrics, Request, arm
from practicum.language.confidence.format import ConfidenceFormat, Mode
from practicum.language.confidence.items import ConfItem, LabeledItem, read_items, read_labels, write_labels
from practicum.language.confidence.labels import ConfidenceLabeler
from practicum.language.confidence.pool import TEMPLATE, label_pool, labeled_pool
from practicum.language.confidence.transfer import (
    ASK,
    Cell,
    brier_interval,
    calibration_report,
    cells_of,
    mixture,
    split,
    top_trunk,
)
from practicum.language.confidence.verbal import VerbalConfidence, linear_lora
from practicum.models import load_language_model
from practicum.toolbox.cache import cache_folder, cache_key, load_or_build
from practicum.toolbox.calibration import TemperatureScaling
from practicum.toolbox.taps import fingerprint
from practicum.toolbox.trunk import FrozenTrunk, TokenRow

FAMILIES = ("reasoning", "copy")
HELD_OUT = ("minus", "letters")
NEEDS_FULL = "needs --scale full"
FEWEST = 12
LABELS_VERSION = 1
N_SAMPLES = 10
TRUE = "\nIs this answer right? Say yes or no:"
SCORES = ("brier", "ece", "ece_debiased", "auroc", "accuracy")
TRAINED = ("scalar", "decomposed")


@dataclass
class Work:
    """The work of one seed: the model, and of every family the questions to train and to test on."""

    model: Any
    tokenizer: Any
    template: str | None
    train: dict[str, list[LabeledItem]]
    test: dict[str, list[LabeledItem]]
    held_out: dict[str, list[LabeledItem]]
    n_train: int
    settings: dict[str, Any]
    n_blocks: int | None
    trunk: FrozenTrunk | None
    seed: int
    is_quick: bool

    def form(self, mode: Mode, ask: str = "") -> ConfidenceFormat:
        """How confidence is stated."""
        return ConfidenceFormat(mode, template=self.template, ask=ask, fallback="percent")

    @property
    def tests(self) -> dict[str, list[LabeledItem]]:
        """All tasks to test on."""
        return {**self.test, **self.held_out}


class ConfidenceCheck(Check):
    """Arithmetic and copying with four options each; a model is trained on one or both and tested on either.

    The metrics of a test are named after it, as in ``brier (copy)``; ``brier (both)`` is the mean over the families.
    """

    comparisons = (
        Comparison(
            "better-within-reasoning",
            metric="brier (reasoning)",
            arm="scalar-reasoning",
            against="untrained",
            difference_at_most=0.0,
        ),
        Comparison(
            "better-within-copy", metric="brier (copy)", arm="scalar-copy", against="untrained", difference_at_most=0.0
        ),
        Comparison(
            "calibrated-within-reasoning",
            metric="ece (reasoning)",
            arm="scalar-reasoning",
            against="untrained",
            difference_at_most=0.0,
        ),
        Comparison(
            "calibrated-within-copy",
            metric="ece (copy)",
            arm="scalar-copy",
            against="untrained",
            difference_at_most=0.0,
        ),
        Comparison(
            "copy-fails-on-reasoning",
            metric="brier (reasoning)",
            arm="scalar-copy",
            against="scalar-reasoning",
            difference_above=0.0,
        ),
        Comparison(
            "reasoning-fails-on-copy",
            metric="brier (copy)",
            arm="scalar-reasoning",
            against="scalar-copy",
            difference_above=0.0,
        ),
        Comparison(
            "two-parts-on-both",
            metric="brier (both)",
            arm="decomposed-both",
            against="scalar-both",
            difference_at_most=0.0,
        ),
        Comparison(
            "two-parts-from-reasoning",
            metric="brier (copy)",
            arm="decomposed-reasoning",
            against="scalar-reasoning",
            difference_at_most=0.0,
        ),
        Comparison(
            "two-parts-from-copy",
            metric="brier (reasoning)",
            arm="decomposed-copy",
            against="scalar-copy",
            difference_at_most=0.0,
        ),
        *(
            Comparison(
                f"keeps-accuracy-{mode}-{train}",
                metric="accuracy (both)",
                arm=f"{mode}-{train}",
                against="untrained",
                difference_at_least=-0.01,
            )
            for mode in TRAINED
            for train in (*FAMILIES, "both")
        ),
        Comparison(
            "shuffled-labels-teach-nothing",
            metric="brier (both)",
            arm="shuffled-labels",
            against="constant",
            difference_at_least=0.0,
        ),
        Comparison(
            "right-answers-alone-say-less",
            metric="entropy of the labels",
            arm="right-answers-only",
            against="scalar-both",
            difference_at_most=0.0,
        ),
        Comparison(
            "right-answers-alone-teach-less",
            metric="auroc (both)",
            arm="right-answers-only",
            against="scalar-both",
            difference_at_most=0.0,
        ),
    )
    seeds = {"quick": 2, "full": 3, "paper": 5}

    def prepare(self, request: Request) -> Work:
        """Load the model, draw questions to train and to test on, and label what is not labelled."""
        relabel = request.options.get("relabel", "no")
        if relabel not in ("yes", "no"):
            raise CannotMeasure(f"--relabel {relabel}: must be yes or no")
        if request.data is not None:
            items = _own_items(request.data)
        language = load_language_model(request.model, device=request.device)
        model, tokenizer = language.model, language.tokenizer
        template: str | None = TEMPLATE
        if request.data is not None:
            template = None if tokenizer.chat_template else TEMPLATE
            pool = _own_labels(items, request.data, model, tokenizer, template)
        else:
            shipped = request.model is None and relabel == "no"
            labels = None if shipped else _labels(model, tokenizer)
            pool = labeled_pool(labels, random_state=request.seed)
            if request.scale == "quick":
                pool["copy"] = [one for one in pool["copy"] if (one.item.context or "").count(" code ") <= 3]
        families = {name: pool[name] for name in FAMILIES if name in pool}
        fewest = min(map(len, families.values()))
        n_test = min(request.pick(quick=20, full=80), fewest // 3)
        n_train = min(request.pick(quick=24, full=96), fewest - n_test)
        parts = {name: split(labeled, n_train, n_test, request.seed) for name, labeled in families.items()}
        n_held_out = request.pick(quick=0, full=24)
        held_out = {
            name: split(pool[name], 0, n_held_out, request.seed)[1] for name in HELD_OUT if name in pool and n_held_out
        }
        n_blocks = request.pick(quick=4, full=4, paper=None)
        settings = {
            "lr": request.pick(quick=5e-4, full=5e-4, paper=1e-4),
            "epochs": request.pick(quick=6, full=6, paper=2),
            "batch_size": request.pick(quick=8, full=8, paper=16),
        }
        return Work(
            model,
            tokenizer,
            template,
            train={name: part[0] for name, part in parts.items()},
            test={name: part[1] for name, part in parts.items()},
            held_out=held_out,
            n_train=n_train,
            settings=settings,
            n_blocks=n_blocks,
            trunk=None if n_blocks is None else top_trunk(model, n_blocks),
            seed=request.seed,
            is_quick=request.scale == "quick",
        )

    @arm("untrained")
    def untrained(self, work: Work) -> Metrics:
        """What the model says when it is asked for a digit, without training."""
        verbal = VerbalConfidence(
            work.model, work.tokenizer, work.form("scalar", ASK), batch_size=16, trunk=_working(work)
        )
        return _scored(list(cells_of(verbal, "none", "untrained", work.tests, work.seed)), work)

    @arm("scalar-reasoning")
    def scalar_reasoning(self, work: Work) -> Metrics:
        """One number, trained on reasoning."""
        return _trained(work, "scalar", "reasoning")

    @arm("scalar-copy")
    def scalar_copy(self, work: Work) -> Metrics:
        """One number, trained on copying."""
        return _trained(work, "scalar", "copy")

    @arm("scalar-both")
    def scalar_both(self, work: Work) -> Metrics:
        """One number, trained on half as many of each family."""
        return _trained_in_full(work, "scalar", "both")

    @arm("decomposed-reasoning")
    def decomposed_reasoning(self, work: Work) -> Metrics:
        """Two numbers, trained on reasoning."""
        return _trained_in_full(work, "decomposed", "reasoning")

    @arm("decomposed-copy")
    def decomposed_copy(self, work: Work) -> Metrics:
        """Two numbers, trained on copying."""
        return _trained_in_full(work, "decomposed", "copy")

    @arm("decomposed-both")
    def decomposed_both(self, work: Work) -> Metrics:
        """The method: two numbers, trained on half as many of each family."""
        return _trained_in_full(work, "decomposed", "both")

    @arm("shuffled-labels")
    def shuffled_labels(self, work: Work) -> Metrics:
        """A control: one number, trained on both with the labels of other questions."""
        if work.is_quick:
            return _needs_full(work)
        labeled = _training_set(work, "both")
        if labeled is None:
            return _no_family(work)
        order = np.random.default_rng(work.seed).permutation(len(labeled))
        shuffled = [replace(one, p_hat=labeled[i].p_hat) for one, i in zip(labeled, order, strict=True)]
        return _fitted(work, "scalar", shuffled, "both, shuffled")

    @arm("right-answers-only")
    def right_answers_only(self, work: Work) -> Metrics:
        """A control: one number, trained on questions of both families whose most likely answer is right."""
        if work.is_quick:
            return _needs_full(work)
        if set(work.train) != set(FAMILIES):
            return _no_family(work)
        right = {name: [one for one in labeled if _is_right(one)] for name, labeled in work.train.items()}
        return _fitted(work, "scalar", mixture(right, work.n_train, work.seed), "both, right answers only")

    @arm("constant")
    def constant(self, work: Work) -> Metrics:
        """The mean of the training labels of the family, whatever is asked."""
        return _untrained_scores(
            work, lambda name, of: np.full(len(of), np.mean([one.p_hat for one in work.train[name]])), choices=False
        )

    @arm("softmax")
    def softmax(self, work: Work) -> Metrics:
        """The probability that the model gives its answer among the options: free, and needs no training."""
        return _untrained_scores(work, lambda name, of: np.array([max(one.probabilities) for one in of]))

    @arm("temperature-scaling")
    def temperature_scaling(self, work: Work) -> Metrics:
        """The same, with a temperature that is fitted on the training questions of the family."""

        def confidence(name: str, of: Sequence[LabeledItem]) -> NDArray[np.float64]:
            scaling = TemperatureScaling().fit(_logits(work.train[name]), _gold(work.train[name]))
            return np.array([p.max() for p in scaling.predict_proba(_logits(of))])

        return _untrained_scores(work, confidence)

    @arm("self-consistency")
    def self_consistency(self, work: Work) -> Metrics:
        """The share of ten sampled answers that agree with the most likely one."""
        rng = np.random.default_rng(work.seed)
        return _untrained_scores(
            work,
            lambda name, of: np.array([rng.binomial(N_SAMPLES, max(one.probabilities)) / N_SAMPLES for one in of]),
        )

    @arm("p-true")
    def p_true(self, work: Work) -> Metrics:
        """The probability of yes against no when the model is asked whether its answer is right."""
        if work.is_quick:
            return _needs_full(work)
        form = work.form("scalar")
        verbal = VerbalConfidence(work.model, work.tokenizer, form, trunk=_working(work))
        asked = work.tokenizer(TRUE, add_special_tokens=False)["input_ids"]
        yes, no = (work.tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in (" yes", " no"))
        cells = []
        for name, labeled in work.tests.items():
            items = [one.item for one in labeled]
            answers, prefixes, _ = verbal.answer(items)
            log_probs = verbal._forward().last_log_probs([TokenRow((*prefix, *asked)) for prefix in prefixes])
            said = log_probs[:, [yes, no]].double().softmax(-1)[:, 0].cpu().numpy()
            right = np.array([answer == item.answer for answer, item in zip(answers, items, strict=True)])
            cells.append(Cell("none", "p-true", name, work.seed, said, right))
        return _scored(cells, work)

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """The transfer matrix, and which confidence is the best."""
        for name in means:
            cells = [
                f"{test} {means[name][f'brier ({test})']:.3f} [{means[name][f'brier low ({test})']:.3f}, "
                f"{means[name][f'brier high ({test})']:.3f}]"
                for test in (*FAMILIES, *HELD_OUT)
                if f"brier ({test})" in means[name]
            ]
            if cells:
                yield f"Brier score of {name} (interval over the questions of a seed): {', '.join(cells)}."
        scored = {name: of["brier (both)"] for name, of in means.items() if "brier (both)" in of}
        if scored:
            best = min(scored, key=lambda name: scored[name])
            yield f"The lowest Brier score as a mean over the families is that of {best} ({scored[best]:.3f})."
        for name in scored:
            if name.startswith(TRAINED) and "constant" in scored and scored[name] >= scored["constant"]:
                yield (
                    f"{name} loses to always saying the mean of the training labels ({scored[name]:.3f} against "
                    f"{scored['constant']:.3f})."
                )


def _own_items(path: str) -> dict[str, list[ConfItem]]:
    """The user's questions by family."""
    found: dict[str, list[ConfItem]] = {}
    for item in read_items(path):
        if item.kind not in FAMILIES:
            raise CannotMeasure(f"{path}: field 'family': must be reasoning or copy; got {item.kind!r}")
        found.setdefault(item.kind, []).append(item)
    for name, items in found.items():
        if len(items) < FEWEST:
            raise CannotMeasure(
                f"{path}: must have at least {FEWEST} questions of the family {name!r}; has {len(items)}"
            )
    return found


def _own_labels(
    items: Mapping[str, Sequence[ConfItem]], path: str, model: Any, tokenizer: Any, template: str | None
) -> dict[str, list[LabeledItem]]:
    """The user's questions, labelled once for a file and a model."""
    content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    found = {}
    for name, of_family in items.items():
        key = cache_key({"v": LABELS_VERSION, "file": content, "family": name, "model": fingerprint(model)})

        def build(target: Path, chosen: Sequence[ConfItem] = of_family) -> None:
            labeler = ConfidenceLabeler(
                model, tokenizer, format=ConfidenceFormat(template=template), n_samples=N_SAMPLES, random_state=0
            )
            write_labels(target, labeler.label(chosen))

        found[name] = load_or_build(cache_folder() / "confidence" / f"own-{key}.jsonl", build, read_labels)
    return found


def _labels(model: Any, tokenizer: Any) -> dict[str, list[list[float]]]:
    """Labels of the generated questions under another model, found once."""
    key = cache_key({"v": LABELS_VERSION, "model": fingerprint(model)})

    def build(target: Path) -> None:
        target.write_text(json.dumps(label_pool(model, tokenizer)))

    return load_or_build(
        cache_folder() / "confidence" / f"labels-{key}.json",
        build,
        lambda target: json.loads(target.read_text()),
    )


def _working(work: Work) -> FrozenTrunk | None:
    """The trunk, if this architecture can begin at its end."""
    if work.trunk is not None:
        first = next(iter(work.train.values()))[0]
        row = TokenRow(tuple(work.form("scalar").prompt_ids(first.item, work.tokenizer)))
        if not work.trunk.kept and not work.trunk.is_exact(row):
            work.trunk = None
    return work.trunk


def _training_set(work: Work, train: str) -> list[LabeledItem] | None:
    """The questions to train on, as many whatever the family; None where a family is not there."""
    if train == "both":
        return mixture(work.train, work.n_train, work.seed) if set(work.train) == set(FAMILIES) else None
    return work.train.get(train)


def _trained_in_full(work: Work, mode: Mode, train: str) -> Metrics:
    return _needs_full(work) if work.is_quick else _trained(work, mode, train)


def _trained(work: Work, mode: Mode, train: str) -> Metrics:
    labeled = _training_set(work, train)
    return _no_family(work) if labeled is None else _fitted(work, mode, labeled, train)


def _fitted(work: Work, mode: Mode, labeled: Sequence[LabeledItem], train: str) -> Metrics:
    """Train an adapter, test it on every task, and take it off."""
    if mode == "decomposed" and any(one.evidence is None for part in work.tests.values() for one in part):
        return Metrics(missing=dict.fromkeys(_names(work), "two numbers need the evidence of every context"))
    verbal = VerbalConfidence(
        work.model,
        work.tokenizer,
        work.form(mode),
        lora=linear_lora(work.model, work.n_blocks),
        trunk=_working(work),
        random_state=work.seed,
        **work.settings,
    )
    levels = [verbal.format.level(one.p_hat) for one in labeled]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="all labels are the same level")
            verbal.fit(labeled)
        metrics = _scored(list(cells_of(verbal, train, mode, work.tests, work.seed)), work)
    finally:
        verbal.unload()
    values = {**metrics.values, "entropy of the labels": _entropy(levels), "questions trained on": len(labeled)}
    return Metrics(values, missing=metrics.missing)


def _untrained_scores(work: Work, confidence: Any, *, choices: bool = True) -> Metrics:
    """Scores of a confidence that follows from the labels of the untrained model, on the families."""
    if choices and any(not one.probabilities for of in work.test.values() for one in of):
        return Metrics(missing=dict.fromkeys(_names(work), "needs questions with choices"))
    if any(one.greedy is None for of in work.test.values() for one in of):
        return Metrics(missing=dict.fromkeys(_names(work), "needs questions with choices"))
    cells = [
        Cell("none", "", name, work.seed, confidence(name, of), np.array([_is_right(one) for one in of]))
        for name, of in work.test.items()
    ]
    return _scored(cells, work)


def _scored(cells: Sequence[Cell], work: Work) -> Metrics:
    """The metrics of every test, and their means over the families."""
    values: dict[str, float] = {}
    for cell in cells:
        report = calibration_report(cell.confidence, cell.correct)
        values |= {f"{name} ({cell.test})": getattr(report, name) for name in SCORES}
        low, high = brier_interval(cell)
        values |= {f"brier low ({cell.test})": low, f"brier high ({cell.test})": high}
    if all(f"brier ({family})" in values for family in FAMILIES):
        for name in SCORES:
            values[f"{name} (both)"] = float(np.mean([values[f"{name} ({family})"] for family in FAMILIES]))
    absent = [family for family in FAMILIES if family not in work.test]
    missing = {
        f"{name} ({of})": f"--data has no questions of the family {absent[0]}"
        for name in SCORES
        for of in (*absent, *(["both"] if absent else []))
    }
    return Metrics(values, missing=missing)


def _names(work: Work) -> list[str]:
    of = [*FAMILIES, "both"]
    return [f"{name} ({test})" for name in SCORES for test in of] + ["entropy of the labels"]


def _needs_full(work: Work) -> Metrics:
    return Metrics(missing=dict.fromkeys(_names(work), NEEDS_FULL))


def _no_family(work: Work) -> Metrics:
    absent = next(family for family in FAMILIES if family not in work.train)
    return Metrics(missing=dict.fromkeys(_names(work), f"--data has no questions of the family {absent}"))


def _is_right(one: LabeledItem) -> bool:
    return one.greedy == one.item.answer


def _logits(labeled: Sequence[LabeledItem]) -> list[NDArray[np.float64]]:
    return [np.log(np.maximum(one.probabilities, 1e-12)) for one in labeled]


def _gold(labeled: Sequence[LabeledItem]) -> list[int]:
    return [list(one.item.choices or ()).index(one.item.answer) for one in labeled]


def _entropy(levels: Sequence[int]) -> float:
    """Of the levels that the training texts state, in nats."""
    shares = np.bincount(levels) / len(levels)
    return float(-sum(p * np.log(p) for p in shares if p > 0))
