"""The claims of CORAL, measured beside temperature scaling, simpler probes, other steering and fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GroupKFold

from practicum.checks import CannotMeasure, Check, Comparison, Curve, Metrics, Request, Unavailable, arm
from practicum.datasets.questions import MCQuestion, mcq_topics, read_questions
from practicum.language.coral.estimator import Coral, steer
from practicum.language.coral.multiple_choice import layers_to_score, permuted
from practicum.language.coral.steering import ResidualSteering
from practicum.models import LanguageModel, load_language_model
from practicum.toolbox.calibration import (
    TemperatureScaling,
    auroc,
    brier,
    debiased_ece,
    ece,
    nll,
    reliability_curve,
)
from practicum.toolbox.choices import ChoiceScorer, ChoiceScores, Mode

# Of the depth: where the probe reads when nothing is tuned.
LAYER = 0.625
# What each seed draws of the questions of every topic to fit on, where a topic is held out.
SHARE = 0.8
N_PERMUTATIONS = 4
FEWEST_QUESTIONS = 40
FEWEST_TOPICS = 3
# Times the mean difference, for contrastive activation addition; 0 is the model itself.
STRENGTHS = (1.0, 4.0)
N_FOR_STRENGTH = 60
RIDGE_PENALTIES = np.logspace(1, 5, 5)
BINS_OF_DIAGRAM = 10
HELD_OUT = " (held-out topics)"

Rows = list[NDArray[np.float64]]
Predictor = Callable[["Split"], Rows]


@dataclass(frozen=True)
class Split:
    """Scores to fit on with their answers and groups, and scores to predict; never of the same question."""

    train: ChoiceScores
    y: NDArray[np.int64]
    groups: NDArray[Any]
    test: ChoiceScores
    seed: int
    layer: int
    mode: Mode


@dataclass
class Work:
    """The work of one seed: the scored questions, which are for fitting, and which topics are held out in turn.

    ``copies`` is 1, or in letter mode the number of orders of the options; row ``copy * n + i`` of the scores is the
    question i in one of them.
    """

    questions: list[MCQuestion]
    y: NDArray[np.int64]
    y_to_fit: NDArray[np.int64]
    scores: ChoiceScores
    copies: int
    train: NDArray[np.intp]
    test: NDArray[np.intp]
    held_out: list[tuple[NDArray[np.intp], NDArray[np.intp]]]
    seed: int
    layer: int
    mode: Mode
    request: Request
    language_model: LanguageModel

    @property
    def groups(self) -> NDArray[Any]:
        """Topic of each question; the question itself where there are no topics."""
        return np.array([question.group or f"question {i}" for i, question in enumerate(self.questions)])

    @cached_property
    def in_distribution(self) -> Split:
        """Half of each topic to fit on, the other half to predict."""
        return self.split(self.train, self.test)

    def split(self, train: NDArray[np.intp], test: NDArray[np.intp]) -> Split:
        """Fit on all copies of some questions, predict others in their own order."""
        n = len(self.questions)
        rows = np.concatenate([train + copy * n for copy in range(self.copies)])
        groups = self.groups if self.has_topics else np.arange(n)
        return Split(
            self.scores.take(rows),
            self.y_to_fit[rows],
            np.tile(groups[train], self.copies),
            self.scores.take(test),
            self.seed,
            self.layer,
            self.mode,
        )

    @property
    def has_topics(self) -> bool:
        """Whether there are enough topics to hold out one."""
        return len(self.held_out) > 0


class CoralCheck(Check):
    """Questions of ten topics, answered by a small language model.

    In distribution, half of each topic is fitted on and the other half is measured. Under transfer each topic is held
    out in turn (at the quick scale three, drawn by the seed), and all answers to held-out questions are measured
    together. Every arm sees the same scores.
    """

    comparisons = (
        Comparison("more-accurate", metric="accuracy", arm="coral", against="base", difference_above=0.0),
        Comparison("better-calibrated", metric="ece", arm="coral", against="base", ratio_at_most=0.7),
        Comparison(
            "better-brier-than-temperature", metric="brier", arm="coral", against="temperature", difference_at_most=0.0
        ),
        Comparison(
            "better-ece-than-temperature", metric="ece", arm="coral", against="temperature", difference_at_most=0.0
        ),
        Comparison(
            "weight-decay-transfers",
            metric=f"brier{HELD_OUT}",
            arm="coral",
            against="coral-without-decay",
            difference_at_most=0.0,
        ),
        Comparison(
            "calibration-transfers", metric=f"ece{HELD_OUT}", arm="coral", against="base", difference_at_most=0.0
        ),
        Comparison(
            "accuracy-transfers", metric=f"accuracy{HELD_OUT}", arm="coral", against="base", difference_above=0.0
        ),
        Comparison(
            "residual-target", metric="brier", arm="coral", against="coral-correctness-target", difference_at_most=0.0
        ),
        Comparison("distributed", metric="brier", arm="coral", against="single-neuron", difference_at_most=0.0),
    )
    seeds = {"quick": 3, "full": 5, "paper": 5}
    curves = (Curve("reliability", x="confidence", y="accuracy", diagonal=True),)

    def prepare(self, request: Request) -> Work:
        """Score all questions, which do not change with the seed, and split them by it."""
        mode: Any = request.options.get("mode", "continuation")
        if mode not in ("continuation", "letter"):
            raise CannotMeasure(f"--mode {mode}: must be continuation or letter")
        labels = request.options.get("labels", "right")
        if labels not in ("right", "shuffled"):
            raise CannotMeasure(f"--labels {labels}: must be right or shuffled")
        if request.data is None:
            questions = list(mcq_topics(request.pick(quick=40, full=100)).questions)
        else:
            questions = read_questions(request.data)
            if len(questions) < FEWEST_QUESTIONS:
                raise CannotMeasure(
                    f"--data {request.data}: has {len(questions)} questions; must have {FEWEST_QUESTIONS} at least"
                )
        copies = 1 if mode == "continuation" else N_PERMUTATIONS
        asked = in_orders(questions, copies)
        language_model = load_language_model(request.model, device=request.device)
        full = request.scale != "quick"
        fixed = layers_to_score(language_model.model, "auto")
        layer = fixed[2]
        scorer = ChoiceScorer(
            language_model.model, language_model.tokenizer, mode=mode, layers=fixed if full else (layer,)
        )
        scores = score_by_topic(scorer, asked, backwards=request.seed % 2 == 1)
        rng = np.random.default_rng(request.seed)
        y = np.array([question.answer for question in asked])
        topics = by_topic(questions)
        halves = [rng.permutation(members) for members in topics.values()]
        return Work(
            questions=questions,
            y=y,
            y_to_fit=y if labels == "right" else shuffled(asked, request.seed),
            scores=scores,
            copies=copies,
            train=np.sort(np.concatenate([half[: (len(half) + 1) // 2] for half in halves])),
            test=np.sort(np.concatenate([half[(len(half) + 1) // 2 :] for half in halves])),
            held_out=holding_out(topics, request.pick(quick=3, full=len(topics)), rng),
            seed=request.seed,
            layer=layer,
            mode=mode,
            request=request,
            language_model=language_model,
        )

    @arm("base")
    def base(self, work: Work) -> Metrics:
        """The model's own probabilities."""
        return measured(lambda split: softmax_rows(split.test.logits), work, held_out=True, diagram=True)

    @arm("temperature")
    def temperature(self, work: Work) -> Metrics:
        """Temperature scaling, the incumbent of calibration after training."""
        return measured(tempered, work, held_out=True, diagram=True)

    @arm("coral")
    def coral(self, work: Work) -> Metrics:
        """The method with fixed settings: 5/8 of the depth, decay 10, strength 1, temperature fitted."""
        return measured(predict_with(), work, held_out=True, diagram=True)

    @arm("coral-tuned")
    def coral_tuned(self, work: Work) -> Metrics:
        """Layer, decay and strength chosen on the questions to fit on."""
        only_full(work)
        return measured(predict_with(layer="auto", tune="cv"), work)

    @arm("coral-without-decay")
    def coral_without_decay(self, work: Work) -> Metrics:
        """The method without its weight decay."""
        return measured(predict_with(weight_decay=0.0), work, held_out=True)

    @arm("coral-plain")
    def coral_plain(self, work: Work) -> Metrics:
        """Added to the model's own probabilities, without the temperature: the paper's form."""
        return measured(predict_with(temperature="none"), work)

    @arm("coral-correctness-target")
    def coral_correctness_target(self, work: Work) -> Metrics:
        """The same probe, taught which option is right instead of what the probabilities miss."""
        return measured(predict_with(target="correctness"), work)

    @arm("coral-shuffled-labels")
    def coral_shuffled_labels(self, work: Work) -> Metrics:
        """Negative control: fitted on answers drawn at random."""

        def predict(split: Split) -> Rows:
            rng = np.random.default_rng(split.seed)
            y = np.array([rng.integers(len(row)) for row in split.train.logits])
            coral = Coral(mode=split.mode, layer=split.layer, random_state=split.seed)
            return coral.fit(split.train, y).predict_proba(split.test)

        return measured(predict, work)

    @arm("ridge")
    def ridge(self, work: Work) -> Metrics:
        """A linear probe of the residual, its penalty by cross-validation: the simple thing that might be enough."""
        return measured(ridge_probe, work, held_out=True)

    @arm("logistic-regression")
    def logistic_regression(self, work: Work) -> Metrics:
        """A linear probe of correctness, softmax over the options."""
        return measured(correctness_probe, work)

    @arm("single-neuron")
    def single_neuron(self, work: Work) -> Metrics:
        """The one activation that predicts the residual best, by least squares."""
        return measured(neuron_probe, work)

    @arm("pmi")
    def pmi(self, work: Work) -> Metrics:
        """Options scored by what the question adds to their likelihood."""
        only_full(work)
        only_continuation(work)
        scorer = ChoiceScorer(work.language_model.model, work.language_model.tokenizer, length_norm="pmi")
        scores = score_by_topic(scorer, work.questions, backwards=False)
        return Metrics(metrics_of(softmax_rows(scores.take(work.test).logits), work.y[work.test]))

    @arm("activation-addition")
    def activation_addition(self, work: Work) -> Metrics:
        """The mean difference of right and wrong added to the residual stream, its strength by Brier score."""
        only_full(work)
        only_continuation(work)
        split, language_model = work.in_distribution, work.language_model
        scorer = ChoiceScorer(language_model.model, language_model.tokenizer, cache=False)
        steering = ResidualSteering(split.layer).fit(split.train, split.y)

        def steered(chosen: NDArray[np.intp], strength: float) -> Rows:
            with steering.set_params(strength=strength).attach(language_model.model):
                return softmax_rows(scorer([work.questions[i] for i in chosen]).logits)

        few = np.random.default_rng(work.seed).permutation(work.train)[:N_FOR_STRENGTH]
        found = {0.0: brier(softmax_rows(work.scores.take(few).logits), work.y_to_fit[few])}
        for strength in STRENGTHS:
            found[strength] = brier(steered(few, strength), work.y_to_fit[few])
        best = min(found, key=lambda strength: found[strength])
        return Metrics(
            metrics_of(steered(work.test, best), work.y[work.test]) | {"strength": best},
            notes=["Written here: steering-vectors and repeng do not install beside this transformers."],
        )

    @arm("lora")
    def lora(self, work: Work) -> Metrics:
        """Upper bound: the model's weights fine-tuned on the right answers."""
        only_full(work)
        only_continuation(work)
        return Metrics(metrics_of(fine_tuned(work), work.y[work.test]))

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """What is not a claim but a reader must know."""
        ours, linear = means["coral"], means["ridge"]
        ahead = "is not ahead of" if linear["brier"] <= ours["brier"] else "is ahead of"
        yield (
            f"The probe {ahead} a linear one: Brier score {ours['brier']:.3f} against {linear['brier']:.3f} of ridge "
            "regression in distribution."
        )
        control = means["coral-shuffled-labels"]
        yield (
            f"Fitted on shuffled labels, accuracy is {control['accuracy']:.3f} (base {means['base']['accuracy']:.3f}, "
            f"CORAL {ours['accuracy']:.3f}) and the Brier score {control['brier']:.3f} "
            f"(base {means['base']['brier']:.3f})."
        )
        if "lora" in means:
            yield (
                f"LoRA fine-tuning on the same answers reaches accuracy {means['lora']['accuracy']:.3f} and Brier "
                f"score {means['lora']['brier']:.3f}; CORAL {ours['accuracy']:.3f} and {ours['brier']:.3f}."
            )


# Questions and splits -------------------------------------------------------------------------------------------------


def in_orders(questions: Sequence[MCQuestion], copies: int) -> list[MCQuestion]:
    """The questions, then ``copies - 1`` times the same with their options in other orders."""
    rng = np.random.default_rng(0)
    return [q if copy == 0 else permuted(q, rng) for copy in range(copies) for q in questions]


def by_topic(questions: Sequence[MCQuestion]) -> dict[str | None, NDArray[np.intp]]:
    """Indices of the questions of each topic."""
    topics: dict[str | None, list[int]] = {}
    for i, question in enumerate(questions):
        topics.setdefault(question.group, []).append(i)
    return {topic: np.array(members) for topic, members in topics.items()}


def holding_out(
    topics: Mapping[str | None, NDArray[np.intp]], n_held_out: int, rng: np.random.Generator
) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """For some of the topics what to fit on, a share of all others, and what to predict, the same share of its own."""
    if len(topics) < FEWEST_TOPICS:
        return []
    drawn = [np.sort(rng.permutation(members)[: max(1, round(SHARE * len(members)))]) for members in topics.values()]
    chosen = sorted(rng.permutation(len(drawn))[:n_held_out])
    return [(np.concatenate(drawn[:i] + drawn[i + 1 :]), drawn[i]) for i in chosen]


def score_by_topic(scorer: ChoiceScorer, questions: Sequence[MCQuestion], *, backwards: bool) -> ChoiceScores:
    """Score topic by topic, each cached on its own; seeds that run side by side begin at opposite ends."""
    topics = list(by_topic(questions).values())
    scored = {i: scorer([questions[j] for j in topics[i]]) for i in sorted(range(len(topics)), reverse=backwards)}
    ordered = [scored[i] for i in range(len(topics))]
    joined = ChoiceScores(
        [row for part in ordered for row in part.logits],
        {layer: [h for part in ordered for h in part.hidden[layer]] for layer in scorer.layers},
    )
    return joined.take(np.argsort(np.concatenate(topics)))


def shuffled(questions: Sequence[MCQuestion], seed: int) -> NDArray[np.int64]:
    """An option of each question, drawn at random."""
    rng = np.random.default_rng(seed)
    return np.array([rng.integers(len(question.choices)) for question in questions])


def only_full(work: Work) -> None:
    """Leave out of the quick scale what takes minutes."""
    if work.request.scale == "quick":
        raise Unavailable("takes minutes: runs at the full scale")


def only_continuation(work: Work) -> None:
    """Leave out of letter mode what steers or scores the text of an option."""
    if work.mode != "continuation":
        raise Unavailable("options are scored by their text: not in --mode letter")


# Measuring ------------------------------------------------------------------------------------------------------------


def measured(predict: Predictor, work: Work, *, held_out: bool = False, diagram: bool = False) -> Metrics:
    """Metrics in distribution and, where asked for, of all answers to held-out topics together."""
    p, y = predict(work.in_distribution), work.y[work.test]
    values = metrics_of(p, y)
    missing: dict[str, str] = {}
    if held_out and work.has_topics:
        rows = [predict(work.split(train, test)) for train, test in work.held_out]
        transferred = metrics_of(
            [row for topic in rows for row in topic], np.concatenate([work.y[t] for _, t in work.held_out])
        )
        values |= {f"{name}{HELD_OUT}": value for name, value in transferred.items()}
    elif held_out:
        reason = f"needs questions of {FEWEST_TOPICS} groups at least"
        missing = {f"{name}{HELD_OUT}": reason for name in ("accuracy", "ece", "brier")}
    return Metrics(values, missing=missing, curves={"reliability": diagram_of(p, y)} if diagram else {})


def metrics_of(p: Rows, y: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy, and how far the confidences can be trusted."""
    confidence = np.array([row.max() for row in p])
    correct = np.array([row.argmax() for row in p]) == y
    return {
        "accuracy": float(correct.mean()),
        "ece": ece(confidence, correct),
        "debiased ece": debiased_ece(confidence, correct),
        "brier": brier(p, y),
        "nll": nll(p, y),
        "auroc": auroc(confidence, correct),
    }


def diagram_of(p: Rows, y: NDArray[np.int64]) -> list[tuple[float, float]]:
    """Points of the reliability diagram: confidence and accuracy in bins of equally many answers."""
    confidence = np.array([row.max() for row in p])
    curve = reliability_curve(confidence, np.array([row.argmax() for row in p]) == y, BINS_OF_DIAGRAM, "mass")
    points = [(float(x), float(accuracy)) for x, accuracy in zip(curve.confidence, curve.accuracy, strict=True)]
    # Equal confidences share a bin, which leaves others out.
    return points + [(math.nan, math.nan)] * (BINS_OF_DIAGRAM - len(points))


# Predictors -----------------------------------------------------------------------------------------------------------


def predict_with(**options: Any) -> Predictor:
    """CORAL with these options, the others as by default."""

    def predict(split: Split) -> Rows:
        coral = Coral(**{"mode": split.mode, "layer": split.layer, "random_state": split.seed, **options})
        return coral.fit(split.train, split.y, split.groups).predict_proba(split.test)

    return predict


def tempered(split: Split) -> Rows:
    """Temperature scaling fitted on the questions to fit on."""
    return TemperatureScaling().fit(split.train.logits, split.y).predict_proba(split.test.logits)


def softmax_rows(logits: Sequence[NDArray[np.floating]]) -> Rows:
    """Probabilities of the options at temperature 1."""
    rows = [np.exp(np.asarray(row, dtype=np.float64) - np.max(row)) for row in logits]
    return [row / row.sum() for row in rows]


def ridge_probe(split: Split) -> Rows:
    """CORAL's steering with scikit-learn's ridge regression in place of the probe."""
    (X, r), features = residuals(split)
    # The options of a question sum to nothing: what is left out must be whole questions.
    questions = np.repeat(np.arange(len(split.train)), [len(row) for row in split.train.logits])
    folds = list(GroupKFold(5).split(X, r, questions))
    return steered(split, RidgeCV(RIDGE_PENALTIES, cv=folds).fit(X, r).predict(features))


def neuron_probe(split: Split) -> Rows:
    """The activation whose straight line comes nearest to the residual."""
    (X, r), features = residuals(split)
    centred = X - X.mean(axis=0)
    covariance, variance = centred.T @ (r - r.mean()), np.maximum((centred**2).sum(axis=0), 1e-12)
    best = int(np.argmax(covariance**2 / variance))
    slope = covariance[best] / variance[best]
    return steered(split, r.mean() + slope * (features[:, best] - X[:, best].mean()))


def correctness_probe(split: Split) -> Rows:
    """Logistic regression of being right, and the softmax of its logits over the options."""
    X, scale = standardised(features_of(split.train, split))
    hits = np.concatenate([np.arange(len(row)) == gold for row, gold in zip(split.train.logits, split.y, strict=True)])
    z = LogisticRegression(C=0.01, max_iter=1000).fit(X, hits).decision_function(scale(features_of(split.test, split)))
    return softmax_rows(split_rows(z, split.test))


def residuals(split: Split) -> tuple[tuple[NDArray, NDArray], NDArray]:
    """Standardised features with the residual of tempered probabilities, and the features to predict from."""
    scaling = TemperatureScaling().fit(split.train.logits, split.y)
    hits = np.concatenate([np.arange(len(row)) == gold for row, gold in zip(split.train.logits, split.y, strict=True)])
    X, scale = standardised(features_of(split.train, split))
    r = hits - np.concatenate(scaling.predict_proba(split.train.logits))
    return (X, r), scale(features_of(split.test, split))


def features_of(scores: ChoiceScores, split: Split) -> NDArray[np.float64]:
    """Activations of all options, less their question's mean; in letter mode with the letter beside them."""
    rows = [np.asarray(h, dtype=np.float64) for h in scores.hidden[split.layer]]
    if split.mode == "continuation":
        return np.concatenate([h - h.mean(axis=0) for h in rows])
    widest = 26
    return np.concatenate([np.hstack([h, np.eye(widest)[: len(h)]]) for h in rows])


def standardised(X: NDArray[np.float64]) -> tuple[NDArray[np.float64], Callable[[NDArray], NDArray]]:
    """The features with mean 0 and deviation 1, and what does the same to others."""
    mean, deviation = X.mean(axis=0), X.std(axis=0) + 1e-4
    return (X - mean) / deviation, lambda other: (other - mean) / deviation


def steered(split: Split, residual: NDArray[np.float64]) -> Rows:
    """The tempered probabilities with a residual added."""
    return [steer(p, g) for p, g in zip(tempered(split), split_rows(residual, split.test), strict=True)]


def split_rows(values: NDArray[np.float64], scores: ChoiceScores) -> Rows:
    """Values of all options, one after the other, by question."""
    return np.split(values, np.cumsum([len(row) for row in scores.logits])[:-1])


# Fine-tuning ----------------------------------------------------------------------------------------------------------

EPOCHS, BATCH, LEARNING_RATE = 1, 8, 5e-4


def fine_tuned(work: Work) -> Rows:
    """Probabilities of the test questions after LoRA fine-tuning on the tokens of the right answers."""
    from peft import LoraConfig, get_peft_model

    own = load_language_model(work.request.model, device=work.request.device)
    scorer = ChoiceScorer(own.model, own.tokenizer, cache=False)
    examples = [answered(own.tokenizer, scorer.template, work.questions[i], int(work.y_to_fit[i])) for i in work.train]
    devices = [own.model.device] if own.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(work.seed)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(own.model, config)
        train_on(model, examples, np.random.default_rng(work.seed))
    merged = model.merge_and_unload().eval()
    after = ChoiceScorer(merged, own.tokenizer, cache=False)
    return softmax_rows(after([work.questions[i] for i in work.test]).logits)


def answered(tokenizer: Any, template: str, question: MCQuestion, answer: int) -> tuple[list[int], int]:
    """Tokens of the question with its answer, and how many of them are the question."""
    prompt = template.format(question=question.question)
    whole = tokenizer(f"{prompt} {question.choices[answer]}")["input_ids"]
    return whole, len(tokenizer(prompt)["input_ids"])


def train_on(model: Any, examples: Sequence[tuple[list[int], int]], rng: np.random.Generator) -> None:
    """AdamW on the likelihood of the answers' tokens, with a rate that falls to nothing."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    n_steps = EPOCHS * -(-len(examples) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / n_steps))
    model.train()
    for _ in range(EPOCHS):
        order = rng.permutation(len(examples))
        for start in range(0, len(order), BATCH):
            batch = [examples[i] for i in order[start : start + BATCH]]
            longest = max(len(tokens) for tokens, _ in batch)
            ids, labels, mask = (torch.full((len(batch), longest), fill) for fill in (0, -100, 0))
            for row, (tokens, n_prompt) in enumerate(batch):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, n_prompt : len(tokens)] = torch.tensor(tokens[n_prompt:])
                mask[row, : len(tokens)] = 1
            device = model.device
            loss = model(
                input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels.to(device), use_cache=False
            ).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
