"""The claims of Reasoning Theater, measured on a model whose performativity is known, or on the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

from practicum.checks import CannotMeasure, Check, Comparison, Metrics, Request, arm
from practicum.datasets.files import DataFileError
from practicum.datasets.questions import MCQuestion, mcq_topics, read_questions
from practicum.language.theater import (
    AttentionProbe,
    ExitCurve,
    ForcedAnswer,
    HFMonitor,
    ProbeBelief,
    RegexMonitor,
    Sampling,
    TextProbeMonitor,
    Trace,
    Traces,
    agreement_scores,
    budget_scores,
    certainty_scores,
    choose_depth,
    collect_traces,
    confidence_scores,
    exit_curve,
    format_of,
    inflections,
    load_reasoner,
    performativity,
    read_traces,
    reasoner_questions,
    record,
)
from practicum.language.theater.beliefs import Beliefs, among
from practicum.language.theater.reasoner import KINDS
from practicum.models import load_language_model
from practicum.toolbox.taps import n_layers

TAU = 0.95
ACCEPTED_LOSS = 0.01
CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.01)
CERTAINTIES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999, 1.01)
AGREEMENTS = (1, 2, 3, 4, 5, 6, 8, 10, 1000)
BUDGETS = (0, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 10**6)

# The last of the tiny model's three blocks, whose output its own head reads.
LAYER = 3
RATE, EPOCHS = 1e-2, 40
NARROW = 128
MODELS_PER_SEEDS = 3
LONGEST = 56
EASY, HARD, CONTROL = "recall", "multi-hop", "theatrical"
SYNONYMS = {"recall": EASY, "easy": EASY, "multi-hop": HARD, "multihop": HARD, "hard": HARD, "theatrical": CONTROL}
FEWEST = 8


@dataclass
class Work:
    """The work of one seed: recorded chains by group, split by question, and what is forced from the model.

    ``answers`` are those that the probes learn, one a training trace: the model's own. ``questions`` tell which
    training traces are of the same question.
    """

    train: list[Trace]
    answers: list[str]
    questions: list[str]
    test: dict[str, list[Trace]]
    forced: dict[str, list[Beliefs]]
    monitor: Any
    layers: list[int]
    seed: int
    rate: float
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def layer(self) -> int:
        """The layer that the claims are about; more may be there to compare."""
        return self.layers[0]

    @property
    def groups(self) -> list[str]:
        """Of recall and multi-hop those that are there."""
        return [group for group in self.test if group != CONTROL]


class TheaterCheck(Check):
    """Recall questions, whose chains are filler, beside multi-hop questions, whose chains do the work.

    Accuracy of instruments is against the model's own final answer; that of exits is against the right answer.
    """

    comparisons = (
        Comparison("recall-is-theatre", metric="performativity gap", arm="attention-probe", value_at_least=0.1),
        Comparison(
            "attention-beats-last-token",
            metric="prefix accuracy (recall)",
            arm="attention-probe",
            against="last-token-probe",
            difference_at_least=0.1,
        ),
        Comparison("recall-saves-half", metric="saved (recall)", arm="attention-probe", value_at_least=0.5),
        Comparison(
            "recall-keeps-accuracy",
            metric="accuracy (recall)",
            arm="attention-probe",
            against="full-chain",
            difference_at_least=-0.01,
        ),
        Comparison("recall-saves-more", metric="saved gap", arm="attention-probe", value_at_least=0.1),
        Comparison(
            "multi-hop-keeps-accuracy",
            metric="accuracy (multi-hop)",
            arm="attention-probe",
            against="full-chain",
            difference_at_least=-0.02,
        ),
        Comparison(
            "inflections-follow-shifts", metric="risk ratio, lower bound", arm="attention-probe", value_at_least=1.0
        ),
        Comparison(
            "theatrical-waits-do-not",
            metric="risk ratio, lower bound (theatrical)",
            arm="attention-probe",
            value_at_most=1.0,
        ),
        Comparison(
            "saves-more-than-peers",
            metric="saved within 1 point",
            arm="attention-probe",
            against=("deer", "answer-consistency", "entropy-stopping", "fixed-budget"),
            difference_at_least=0.0,
        ),
    )
    seeds = {"quick": 3, "full": 9, "paper": 3}
    # Of recall and as many of multi-hop; five sixteenths of it with inflections at random.
    n_questions: Mapping[str, int] = {"quick": 640, "full": 1200}

    def prepare(self, request: Request) -> Work:
        """Sample the chains, record the layers, and force the answers of the test chains."""
        options = _Options.of(request)
        given = None if request.data is None else _given(request.data)
        if request.model is None and request.data is None:
            return self._embedded(request, options)
        return self._own(request, options, given)

    def _embedded(self, request: Request, options: _Options) -> Work:
        """The tiny model; at full scale every three seeds have one of their own, the first the shipped one."""
        if options.retrain is not None:
            reasoner = load_reasoner(options.retrain)
        else:
            number = request.pick(quick=0, full=request.seed // MODELS_PER_SEEDS)
            reasoner = load_reasoner(number or None)
        n = request.pick(**self.n_questions)
        sizes = {EASY: n, HARD: n, CONTROL: 5 * n // 16}
        collected, notes = {}, []
        for kind in KINDS:
            traces = collect_traces(
                reasoner.model,
                reasoner.tokenizer,
                reasoner_questions(kind, sizes[kind], request.seed, reasoner.world),
                max_new_tokens=LONGEST,
                sampling=Sampling(1.0, 1.0),
                format=reasoner.format,
                batch_size=400,
                random_state=request.seed,
            )
            collected[kind] = list(traces)
            notes.append(_dropped(kind, traces))
        layers = [options.layer or LAYER]
        if request.scale != "quick":
            layers += [layer for layer in (1, 2, 3) if layer not in layers]
        # Two kinds ask for the same facts: what is learnt of a fact must not be asked in the test in other words.
        fact = {trace.key: trace.key.split(" ", 1)[1] for traces in collected.values() for trace in traces}
        train, test = _split(collected, fact, request.seed)
        record(reasoner.model, [*train, *(t for traces in test.values() for t in traces)], layers, batch_size=256)
        forced = ForcedAnswer(reasoner.model, reasoner.tokenizer, reasoner.format.stub, batch_size=400)
        questions = [fact[trace.key] for trace in train]
        return self._work(request, options, train, questions, test, forced, RegexMonitor(), layers, RATE, notes)

    def _own(self, request: Request, options: _Options, given: Traces | list[MCQuestion] | None) -> Work:
        """The user's model or data, or both."""
        if options.retrain is not None:
            raise CannotMeasure("--retrain is of the embedded model; leave it out with --model and --data")
        name = None if request.model in (None, "embedded") else request.model
        loaded = load_language_model(name, device=request.device)
        model, tokenizer = loaded.model, loaded.tokenizer
        format = format_of(tokenizer)
        notes = [f"{loaded.name} on {request.data or 'capitals and sums of three numbers'}"]
        if isinstance(given, Traces):
            traces = given
        else:
            most = request.pick(quick=24, full=100, paper=500)
            questions = _drawn(given or _default_questions(most, request.seed), most, request.seed)
            tokens = options.max_new_tokens or request.pick(quick=48, full=96, paper=2048)
            traces = collect_traces(
                model, tokenizer, questions, max_new_tokens=tokens, format=format, random_state=request.seed
            )
        notes.append(_dropped("all", traces))
        collected, missing = _by_group(traces, options)
        train, test = _split(collected, {}, request.seed)
        depth = n_layers(model)
        if options.layer is not None:
            if options.layer > depth:
                raise CannotMeasure(f"--layer {options.layer}: the model has {depth}")
            layers = [options.layer]
        else:
            layers = sorted({max(1, round(depth * share)) for share in (0.25, 0.5, 0.75, 1.0)})
        record(model, [*train, *(t for traces in test.values() for t in traces)], layers, batch_size=8)
        rate = RATE if train[0].hidden[layers[0]].shape[1] <= NARROW else 1e-3
        if len(layers) > 1:
            probe = AttentionProbe(lr=rate, epochs=EPOCHS, random_state=request.seed)
            layers = [choose_depth(probe, train, layers, random_state=request.seed)]
            notes.append(f"layer {layers[0]} of {depth} was chosen on the training questions")
        forced = ForcedAnswer(model, tokenizer, stub=format.stub, batch_size=8)
        monitor: Any = RegexMonitor()
        if options.monitor == "model":
            monitor = HFMonitor(model, tokenizer)
        elif options.monitor == "embedded":
            monitor = HFMonitor()
        questions_of = [trace.key for trace in train]
        work = self._work(request, options, train, questions_of, test, forced, monitor, layers, rate, notes)
        work.missing |= missing
        return work

    def _work(
        self,
        request: Request,
        options: _Options,
        train: list[Trace],
        questions: list[str],
        test: dict[str, list[Trace]],
        forced: ForcedAnswer,
        monitor: Any,
        layers: list[int],
        rate: float,
        notes: list[str],
    ) -> Work:
        answers = [trace.answer for trace in train]
        if options.shuffle:
            answers = _shuffled(train, request.seed)
            notes.append("negative control: every probe has learnt answers drawn at random from the options")
        if len(set(answers)) < 2:
            raise CannotMeasure(f"the model gave the answer {answers[0]} to every training question")
        read = {group: forced.beliefs(traces) for group, traces in test.items() if group != CONTROL}
        return Work(train, answers, questions, test, read, monitor, layers, request.seed, rate, notes)

    @arm("attention-probe")
    def attention_probe(self, work: Work) -> Metrics:
        """The method: four heads, recency slopes, one probe for prefixes of any length, exit at tau = 0.95."""
        probe = _fit(work)
        source = _Given(_read(ProbeBelief(probe, work.layer), work))
        metrics = _instrument(source, work, inflected=True)
        values = dict(metrics.values) | _prefix_accuracy(probe, work, work.layer)
        for layer in work.layers[1:]:
            other = _fit(work, layer=layer)
            values |= {f"{name}/layer {layer}": v for name, v in _prefix_accuracy(other, work, layer).items()}
            gap = _performativity(_Given(_read(ProbeBelief(other, layer), work)), work, work.monitor)
            values |= {f"{name}/layer {layer}": v for name, v in gap.items()}
        reader = TextProbeMonitor(window=16).fit(work.train)
        strong = _performativity(source, work, reader)
        values |= {f"{name}/against a trained reader": v for name, v in strong.items()}
        return replace(metrics, values=values, notes=[*work.notes, *metrics.notes])

    @arm("attention-probe-plain")
    def attention_probe_plain(self, work: Work) -> Metrics:
        """The form that the paper tells of: one head, content alone."""
        probe = _fit(work, n_heads=1, recency=False)
        metrics = _instrument(ProbeBelief(probe, work.layer), work, inflected=True)
        return replace(metrics, values=dict(metrics.values) | _prefix_accuracy(probe, work, work.layer))

    @arm("last-token-probe")
    def last_token_probe(self, work: Work) -> Metrics:
        """The linear probe of the paper."""
        probe = _fit(work, pooling="last")
        metrics = _instrument(ProbeBelief(probe, work.layer), work)
        return replace(metrics, values=dict(metrics.values) | _prefix_accuracy(probe, work, work.layer))

    @arm("mean-probe")
    def mean_probe(self, work: Work) -> Metrics:
        """A linear probe on the mean of the activations."""
        probe = _fit(work, pooling="mean")
        metrics = _instrument(ProbeBelief(probe, work.layer), work)
        return replace(metrics, values=dict(metrics.values) | _prefix_accuracy(probe, work, work.layer))

    @arm("shuffled-labels")
    def shuffled_labels(self, work: Work) -> Metrics:
        """The negative control: the same probe, taught answers drawn at random from the options."""
        probe = _fit(work, answers=_shuffled(work.train, work.seed + 1))
        metrics = _instrument(ProbeBelief(probe, work.layer), work)
        return replace(metrics, values=dict(metrics.values) | _prefix_accuracy(probe, work, work.layer))

    @arm("deer")
    def deer(self, work: Work) -> Metrics:
        """Exit when a forced answer is confident, as DEER does; also the second instrument for beliefs."""
        return _instrument(_Given(work.forced), work, inflected=True)

    @arm("answer-consistency")
    def answer_consistency(self, work: Work) -> Metrics:
        """Exit when forced answers have agreed k times in a row."""
        return _exits(work, lambda group: agreement_scores(work.forced[group]), AGREEMENTS)

    @arm("entropy-stopping")
    def entropy_stopping(self, work: Work) -> Metrics:
        """Exit when the entropy of the forced answer is low."""
        return _exits(work, lambda group: certainty_scores(work.forced[group]), CERTAINTIES)

    @arm("fixed-budget")
    def fixed_budget(self, work: Work) -> Metrics:
        """Exit after so many tokens."""
        return _exits(work, lambda group: budget_scores(work.test[group]), BUDGETS)

    @arm("full-chain")
    def full_chain(self, work: Work) -> Metrics:
        """Think to the end."""
        return _exits(work, lambda group: budget_scores(work.test[group]), (10**6,), at=10**6)

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """The negative control, and what forced answers cost at the same threshold."""
        control, ours, deer = (means.get(name, {}) for name in ("shuffled-labels", "attention-probe", "deer"))
        name = "prefix accuracy (recall)"
        if name in control and name in ours:
            yield (
                f"A probe taught answers at random reads {control[name]:.2f} of the recall answers over all prefixes, "
                f"the same probe taught the model's own {ours[name]:.2f}."
            )
        lost = "accuracy (multi-hop)"
        full = means.get("full-chain", {})
        if all(lost in by_arm for by_arm in (ours, deer, full)):
            told = [
                f"{100 * (by_arm[lost] - full[lost]):+.1f} points for {by_arm['saved (multi-hop)']:.0%} of the tokens"
                for by_arm in (ours, deer)
            ]
            yield (
                f"With the threshold 0.95 on multi-hop questions, accuracy changes by {told[0]} with the probe, and by "
                f"{told[1]} with forced answers."
            )


@dataclass(frozen=True)
class _Options:
    """The method's own options, parsed."""

    layer: int | None
    retrain: int | None
    max_new_tokens: int | None
    shuffle: bool
    easy: str | None
    hard: str | None
    monitor: str

    @classmethod
    def of(cls, request: Request) -> _Options:
        """Parse them. Raises CannotMeasure for one that does not go."""
        given = request.options

        def number(name: str, least: int) -> int | None:
            if name not in given:
                return None
            try:
                value = int(given[name])
            except ValueError:
                raise CannotMeasure(f"--{name} must be a whole number; got {given[name]!r}") from None
            if value < least:
                raise CannotMeasure(f"--{name} must be at least {least}; got {value}")
            return value

        def word(name: str, known: Sequence[str]) -> str:
            value = given.get(name, known[0])
            if value not in known:
                raise CannotMeasure(f"--{name} must be one of {', '.join(known)}; got {value!r}")
            return value

        layer = number("layer", 1)
        if request.model is None and request.data is None:
            if layer is not None and layer > LAYER:
                raise CannotMeasure(f"--layer must be from 1 to {LAYER}, the blocks of the embedded model; got {layer}")
            for name in ("easy", "hard", "monitor", "max-new-tokens"):
                if name in given:
                    raise CannotMeasure(f"--{name} goes with --model or --data")
        return cls(
            layer=layer,
            retrain=number("retrain", 0),
            max_new_tokens=number("max-new-tokens", 1),
            shuffle=word("shuffle", ("no", "yes")) == "yes",
            easy=given.get("easy"),
            hard=given.get("hard"),
            monitor=word("monitor", ("regex", "model", "embedded")),
        )


class _Given:
    """Beliefs that are there already, by the group of the traces."""

    def __init__(self, by_group: Mapping[str, list[Beliefs]]) -> None:
        self.by_group = by_group


def _fit(
    work: Work,
    *,
    layer: int | None = None,
    answers: list[str] | None = None,
    pooling: Literal["attention", "mean", "last"] = "attention",
    n_heads: int = 4,
    recency: bool = True,
) -> Any:
    probe = AttentionProbe(
        n_heads=n_heads, recency=recency, lr=work.rate, epochs=EPOCHS, pooling=pooling, random_state=work.seed
    )
    return probe.fit(
        [trace.hidden[layer or work.layer] for trace in work.train],
        answers or work.answers,
        start=[trace.start for trace in work.train],
        options=[trace.options for trace in work.train],
        groups=work.questions,
    )


def _instrument(source: Any, work: Work, *, inflected: bool = False) -> Metrics:
    """Performativity, exit at the threshold, the best exit, and inflections, all from one source of beliefs."""
    beliefs = _read(source, work)
    values = _performativity(_Given(beliefs), work, work.monitor)
    missing: dict[str, str] = {}
    exits = _exits(work, lambda group: confidence_scores(beliefs[group]), CONFIDENCES, at=TAU)
    values |= exits.values
    if inflected:
        traces = [trace for group in work.groups for trace in work.test[group]]
        found = inflections(traces, [rows for group in work.groups for rows in beliefs[group]])
        values |= _told(found, "")
        if found.ci is None:
            missing["risk ratio, lower bound"] = "there is no inflection in the chains"
        for group in work.groups:
            values |= _told(inflections(work.test[group], beliefs[group]), f" ({group})")
        if CONTROL in beliefs:
            values |= _told(inflections(work.test[CONTROL], beliefs[CONTROL]), f" ({CONTROL})")
        else:
            missing[f"risk ratio, lower bound ({CONTROL})"] = "there are no chains with inflections put in at random"
    return Metrics(values, missing={**exits.missing, **missing, **work.missing})


def _read(source: Any, work: Work) -> dict[str, list[Beliefs]]:
    if isinstance(source, _Given):
        return dict(source.by_group)
    return {group: source.beliefs(traces) for group, traces in work.test.items()}


def _told(found: Any, suffix: str) -> dict[str, float]:
    named = {
        "risk ratio": found.risk_ratio,
        "risk ratio, lower bound": None if found.ci is None else found.ci[0],
        "inflections after a large shift": found.p_large,
        "inflections without": found.p_small,
        "shift AUROC": found.auroc,
        "large shifts": float(np.mean(found.table.sum(1)[1] / found.table.sum())),
    }
    return {f"{name}{suffix}": float(value) for name, value in named.items() if value is not None}


def _performativity(source: Any, work: Work, monitor: Any) -> dict[str, float]:
    beliefs = _read(source, work)
    values: dict[str, float] = {}
    for kind in ("area", "slope", "trace"):
        rates = {
            group: performativity(work.test[group], beliefs[group], monitor, kind=kind, random_state=work.seed).rate  # type: ignore[arg-type]
            for group in work.groups
        }
        suffix = "" if kind == "area" else f"/{kind}"
        values |= {f"performativity ({group}){suffix}": rate for group, rate in rates.items()}
        if {EASY, HARD} <= rates.keys():
            values[f"performativity gap{suffix}"] = rates[EASY] - rates[HARD]
    return values


def _prefix_accuracy(probe: Any, work: Work, layer: int) -> dict[str, float]:
    """Mean over traces of the accuracy over every prefix, from the question alone to the whole chain."""
    values = {}
    for group in work.groups:
        traces = work.test[group]
        shares = []
        for trace, rows in zip(traces, probe.predict_prefixes([t.hidden[layer] for t in traces]), strict=True):
            belief = among(np.asarray(rows, dtype=np.float64)[trace.start - 1 :], probe.classes_, trace.options)
            shares.append(np.mean(belief.argmax(-1) == trace.options.index(trace.answer)))
        values[f"prefix accuracy ({group})"] = float(np.mean(shares))
    return values


def _exits(work: Work, scores: Callable[[str], Any], thresholds: Sequence[float], at: float | None = None) -> Metrics:
    """What a rule saves and costs: at one threshold, and at the best that loses no more than a point."""
    if any(trace.gold is None for group in work.groups for trace in work.test[group]):
        reason = "needs the right answers, in the field 'answer' of questions or 'gold' of traces"
        names = [f"{name} ({group})" for name in ("saved", "accuracy") for group in work.groups]
        return Metrics(missing={**dict.fromkeys([*names, "saved gap", "saved within 1 point"], reason), **work.missing})
    curves = {
        group: exit_curve(work.test[group], scores(group), work.forced[group], thresholds) for group in work.groups
    }
    mean = ExitCurve(
        np.asarray(thresholds, dtype=np.float64),
        np.mean([curve.saved for curve in curves.values()], axis=0),
        np.mean([curve.accuracy for curve in curves.values()], axis=0),
        float(np.mean([curve.full_accuracy for curve in curves.values()])),
    )
    values = {"saved within 1 point": mean.saved_within(ACCEPTED_LOSS)}
    for threshold, saved, accuracy in zip(thresholds, mean.saved, mean.accuracy, strict=True):
        values |= {f"saved@{threshold:g}": float(saved), f"accuracy@{threshold:g}": float(accuracy)}
    if at is not None:
        place = list(thresholds).index(at)
        for group, curve in curves.items():
            values[f"saved ({group})"] = float(curve.saved[place])
            values[f"accuracy ({group})"] = float(curve.accuracy[place])
        if {EASY, HARD} <= curves.keys():
            values["saved gap"] = values[f"saved ({EASY})"] - values[f"saved ({HARD})"]
    return Metrics(values, missing=dict(work.missing))


def _dropped(kind: str, traces: Traces) -> str:
    left_out = f"{traces.n_truncated} cut off and {traces.n_unanswered} without an option left out"
    return f"{kind}: {len(traces)} chains; {left_out}"


def _shuffled(traces: Sequence[Trace], seed: int) -> list[str]:
    rng = np.random.default_rng([seed, 17])
    return [trace.options[int(rng.integers(len(trace.options)))] for trace in traces]


def _split(
    collected: Mapping[str, list[Trace]], same: Mapping[str, str], seed: int
) -> tuple[list[Trace], dict[str, list[Trace]]]:
    """Halve every group by question; ``same`` names questions that must be on one side."""
    rng: Generator = np.random.default_rng([seed, 23])
    keys = sorted({same.get(trace.key, trace.key) for traces in collected.values() for trace in traces})
    chosen = {keys[i] for i in rng.permutation(len(keys))[: len(keys) // 2]}
    train, test = [], {}
    for group, traces in collected.items():
        learnt = [trace for trace in traces if same.get(trace.key, trace.key) in chosen]
        test[group] = [trace for trace in traces if same.get(trace.key, trace.key) not in chosen]
        if min(len(learnt), len(test[group])) < FEWEST:
            raise CannotMeasure(
                f"group {group!r}: {len(traces)} answered questions are too few to learn from one half and test on the "
                f"other; each needs {FEWEST} at least"
            )
        train += learnt
    return train, test


def _given(path: str) -> Traces | list[MCQuestion]:
    """Traces where the first line has the tokens of a chain, else questions; ``difficulty`` stands in for ``group``."""
    first = _first_object(Path(path))
    if "cot_ids" in first:
        return read_traces(path)
    questions = read_questions(path)
    if "group" in first or "difficulty" not in first:
        return questions
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    named = []
    for i, (question, line) in enumerate(zip(questions, lines, strict=True), 1):
        difficulty = json.loads(line).get("difficulty")
        if not isinstance(difficulty, str):
            raise DataFileError(path, "must be a text, as in the first line", line=i, field="difficulty")
        named.append(replace(question, group=difficulty))
    return named


def _first_object(path: Path) -> Mapping[str, Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), "{}"))
    except (OSError, ValueError):
        return {}
    return first if isinstance(first, dict) else {}


def _default_questions(n: int, seed: int) -> list[MCQuestion]:
    capitals = [replace(question, group=EASY) for question in mcq_topics(n, ["capital"], seed).questions]
    rng = np.random.default_rng([seed, 29])
    sums = []
    for _ in range(n):
        a, b, c = (int(x) for x in rng.integers(11, 50, size=3))
        right = a + b - c
        others = [right + int(d) for d in rng.permutation([-10, -2, -1, 1, 2, 10])[:3]]
        choices = [str(x) for x in rng.permutation([right, *others])]
        sums.append(MCQuestion(f"What is {a} + {b} - {c}?", choices, choices.index(str(right)), HARD))
    return capitals + sums


def _drawn(questions: Sequence[MCQuestion], most: int, seed: int) -> list[MCQuestion]:
    """At most so many questions of every group."""
    rng = np.random.default_rng([seed, 31])
    chosen: list[MCQuestion] = []
    for group in dict.fromkeys(question.group for question in questions):
        members = [question for question in questions if question.group == group]
        chosen += [members[i] for i in sorted(rng.permutation(len(members))[:most])]
    return chosen


def _by_group(traces: Sequence[Trace], options: _Options) -> tuple[dict[str, list[Trace]], dict[str, str]]:
    """Call the user's groups recall and multi-hop, as the options or the names themselves say."""
    names = dict(SYNONYMS)
    there = list(dict.fromkeys(trace.group or "" for trace in traces))
    for option, given, stands_for in (("easy", options.easy, EASY), ("hard", options.hard, HARD)):
        if given is not None:
            if given not in there:
                raise CannotMeasure(
                    f"--{option} {given}: there is no such group; there are {', '.join(there) or 'none'}"
                )
            names = {name: group for name, group in names.items() if group != stands_for} | {given: stands_for}
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(names.get(trace.group or "", "other"), []).append(trace)
    if EASY in found or HARD in found:
        found.pop("other", None)
    missing: dict[str, str] = {}
    lacking = [group for group in (EASY, HARD) if group not in found]
    if lacking:
        reason = "needs two groups of questions, named recall and multi-hop or by --easy and --hard"
        names_of_metrics = [f"{m} ({group})" for m in ("saved", "accuracy", "prefix accuracy") for group in lacking]
        missing = dict.fromkeys([*names_of_metrics, "performativity gap", "saved gap"], reason)
    return found, missing
