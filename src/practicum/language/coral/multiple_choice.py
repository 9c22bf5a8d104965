"""From questions to steered answers: the model scores, CORAL corrects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import bootstrap
from sklearn.base import clone
from sklearn.utils import check_random_state

from practicum.datasets.questions import MCQuestion, require_questions
from practicum.language.coral.estimator import Coral
from practicum.language.coral.serving import CoralLogitsProcessor
from practicum.toolbox.calibration import auroc, brier, ece, nll, reliability_diagram
from practicum.toolbox.choices import LETTERS, PLACEHOLDER, ChoiceScorer, ChoiceScores, with_letters
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import fingerprint, n_layers

# Shares of the depth among which layer="auto" chooses.
DEPTHS = (0.25, 0.5, 0.625, 0.75, 0.875)
RESAMPLES = 999


class CoralForMultipleChoice:
    r"""A causal language model that answers multiple-choice questions, corrected by CORAL.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any causal language model. It is not changed.
    tokenizer : transformers.PreTrainedTokenizerBase
    mode : {"continuation", "letter"}, default="continuation"
        Whether options are scored by the likelihood of their text, or by that of their letter after a list of them. The
        former is right for base and small models. The latter is what `generate` can be steered in.
    length_norm : {"sum", "mean", "pmi"}, default="sum"
        Score of an option's text: the sum of its tokens' log-probabilities, their mean, or the sum less what it is
        without the question.
    n_permutations : int, default=4
        In letter mode, how often each training question is there, each time with its options in another order. With 1
        the order is left, and a probe may learn which letter tends to be right.
    batch_size : int, default=16
    **options
        Of `Coral`: ``layer``, ``weight_decay``, ``tune``, ``random_state`` and so on. ``layer="auto"`` chooses among
        1/4, 1/2, 5/8, 3/4 and 7/8 of the depth.

    Attributes
    ----------
    coral_ : Coral
        After `fit`.
    scorer : ChoiceScorer

    Examples
    --------
    A model of random weights and a tokenizer of single characters; `practicum.models.load_language_model` loads real
    ones.

    >>> import torch
    >>> from tokenizers import Tokenizer, models, decoders
    >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    >>> from practicum.datasets.questions import mcq_topics
    >>> letters = models.BPE({chr(i): i for i in range(128)}, [], unk_token="?")
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(letters), pad_token="\x00", unk_token="?")
    >>> config = LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
    ...                      num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> train, test = mcq_topics(10, topics=["add", "mul", "http"]).hold_out("http")
    >>> steered = CoralForMultipleChoice(model, tokenizer, layer=3, epochs=5, random_state=0).fit(train)
    >>> [p.shape for p in steered.predict_proba(test)[:2]]
    [(4,), (4,)]
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        mode: Literal["continuation", "letter"] = "continuation",
        length_norm: Literal["sum", "mean", "pmi"] = "sum",
        n_permutations: int = 4,
        batch_size: int = 16,
        **options: Any,
    ) -> None:
        if isinstance(n_permutations, bool) or not isinstance(n_permutations, int) or n_permutations < 1:
            raise InputError(f"n_permutations={n_permutations!r}: must be a whole number, 1 or more")
        self._coral = Coral(mode=mode, **options)
        self.n_permutations = n_permutations
        self.model = model
        self.tokenizer = tokenizer
        self.scorer = ChoiceScorer(
            model,
            tokenizer,
            mode=mode,
            length_norm=length_norm,
            layers=layers_to_score(model, self._coral.layer),
            batch_size=batch_size,
        )

    @classmethod
    def with_fitted(
        cls,
        coral: Coral,
        model: Any,
        tokenizer: Any,
        *,
        length_norm: Literal["sum", "mean", "pmi"] = "sum",
        batch_size: int = 16,
    ) -> Self:
        """Put a fitted `Coral` (`Coral.load`) to the model that it was fitted on.

        Parameters
        ----------
        coral : Coral
            Fitted on N questions; it says layer and mode.
        model : transformers.PreTrainedModel
        tokenizer : transformers.PreTrainedTokenizerBase
        length_norm : {"sum", "mean", "pmi"}
            As when it was fitted.
        batch_size : int

        Returns
        -------
        CoralForMultipleChoice
            Fitted.
        """
        coral.require_model(model)
        whole = cls(
            model, tokenizer, mode=coral.mode, length_norm=length_norm, batch_size=batch_size, layer=coral.layer_
        )
        whole.coral_ = coral
        return whole

    def fit(self, questions: Sequence[MCQuestion]) -> Self:
        """Score the questions once and fit on them.

        Parameters
        ----------
        questions : sequence of MCQuestion, of length N
            Each with its answer. Their groups, where all have one, are what cross-validation leaves out.

        Returns
        -------
        CoralForMultipleChoice
            Itself.

        Raises
        ------
        InputError
            A ValueError that names the question or the argument.
        """
        listed = require_questions(questions, answers=True)
        groups: list[Any] | None = [question.group for question in listed]
        if any(group is None for group in groups or ()):
            groups = None
        if self.scorer.mode == "letter":
            listed, groups = self._permuted(listed, groups)
        y = [question.answer for question in listed]
        self.coral_ = clone(self._coral).fit(self.scorer(listed), y, groups)
        self.coral_.fingerprint_ = fingerprint(self.model)
        return self

    def _permuted(self, questions: list[MCQuestion], groups: Any) -> tuple[list[MCQuestion], Any]:
        """Every question ``n_permutations`` times, its own order first, and groups that hold its copies together."""
        if len({question.answer for question in questions}) == 1:
            letter = LETTERS[int(questions[0].answer or 0) % 26]
            warnings.warn(
                f"the right option of every question is {letter}; only the permutation of options keeps the probe from "
                f"learning that (n_permutations={self.n_permutations})",
                stacklevel=3,
            )
        rng = np.random.default_rng(check_random_state(self._coral.random_state).randint(2**31 - 1))
        copies = [
            question if copy == 0 else permuted(question, rng)
            for copy in range(self.n_permutations)
            for question in questions
        ]
        one_each = groups if groups is not None and len(set(groups)) >= 3 else list(range(len(questions)))
        return copies, list(one_each) * self.n_permutations

    def predict_proba(self, questions: Sequence[MCQuestion]) -> list[NDArray[np.float64]]:
        """Return the steered probabilities of the options.

        Parameters
        ----------
        questions : sequence of MCQuestion, of length N
            Answers are not looked at.

        Returns
        -------
        list of ndarray of shape (K,), float64
        """
        return self._fitted.predict_proba(self.scorer(require_questions(questions)))

    def predict(self, questions: Sequence[MCQuestion]) -> NDArray[np.int64]:
        """Return the index of the option with the highest steered probability.

        Parameters
        ----------
        questions : sequence of MCQuestion, of length N

        Returns
        -------
        ndarray of shape (N,), int64
        """
        return self._fitted.predict(self.scorer(require_questions(questions)))

    def evaluate(self, questions: Sequence[MCQuestion]) -> Evaluation:
        """Measure base and steered answers on questions whose answers are known.

        Parameters
        ----------
        questions : sequence of MCQuestion, of length N
            Others than those of `fit`.

        Returns
        -------
        Evaluation
        """
        listed = require_questions(questions, answers=True)
        return evaluate_scores(self._fitted, self.scorer(listed), np.array([question.answer for question in listed]))

    def attach(self, model: Any = None) -> Any:
        """`Coral.attach` on the model.

        Parameters
        ----------
        model : transformers.PreTrainedModel, optional
            By default the one given.

        Returns
        -------
        context manager
        """
        return self._fitted.attach(self.model if model is None else model)

    def prompt(self, question: MCQuestion) -> str:
        """Return the text that the model is asked, for ``generate``.

        Parameters
        ----------
        question : MCQuestion
            With K choices.

        Returns
        -------
        str
            Ends where the answer begins; in letter mode it lists the options.
        """
        (sound,) = require_questions([question])
        asked = with_letters(sound) if self.scorer.mode == "letter" else sound.question
        return self.scorer.template.replace(PLACEHOLDER, asked)

    def logits_processor(self, letters: str | Sequence[str] = "ABCD") -> CoralLogitsProcessor:
        """Return what steers the letter that `generate` answers with, inside `attach`.

        Parameters
        ----------
        letters : str or sequence of str, of length K
            The letters of the question's options, from A on.

        Returns
        -------
        CoralLogitsProcessor
        """
        if list(letters) != list(LETTERS[: len(letters)]):
            raise InputError(f"letters={letters!r}: must be the letters from A on, as many as there are options")
        return CoralLogitsProcessor(self._fitted, self.scorer.letter_tokens(len(letters)))

    @property
    def _fitted(self) -> Coral:
        if not hasattr(self, "coral_"):
            raise InputError("this CoralForMultipleChoice is not fitted: call fit, or start from with_fitted")
        return self.coral_

    coral_: Coral


@dataclass(frozen=True)
class Measured:
    """One metric of base and steered answers, and the 95 % interval of their difference over questions."""

    base: float
    steered: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Base and steered answers to the same N questions.

    Attributes
    ----------
    metrics : dict of str to Measured
        accuracy, ece, brier, nll and auroc (of the confidence). Intervals are of the paired difference, by a BCa
        bootstrap over questions.
    probabilities : dict of str to list of ndarray of shape (K,)
        ``"base"``, ``"temperature"`` and ``"CORAL"``.
    y : ndarray of shape (N,), int64

    Examples
    --------
    >>> from practicum.toolbox.choices import ChoiceScores
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=200)
    >>> hidden = [(np.eye(2)[i][:, None] + rng.normal(size=(2, 4))).astype(np.float16) for i in y]
    >>> scores = ChoiceScores([rng.normal(size=2) for _ in y], {1: hidden})
    >>> coral = Coral(epochs=5, random_state=0).fit(scores.take(range(100)), y[:100])
    >>> found = evaluate_scores(coral, scores.take(range(100, 200)), y[100:])
    >>> print(found)
    100 questions      base  steered  difference  95 % interval
    accuracy   ...
    """

    metrics: Mapping[str, Measured]
    probabilities: Mapping[str, list[NDArray[np.float64]]]
    y: NDArray[np.int64]

    def __str__(self) -> str:
        lines = [f"{f'{len(self.y)} questions':14} {'base':>8} {'steered':>8}  difference  95 % interval"]
        for name, m in self.metrics.items():
            lines.append(
                f"{name:14} {m.base:8.3f} {m.steered:8.3f} {m.difference:+11.3f}  {m.low:+.3f} to {m.high:+.3f}"
            )
        return "\n".join(lines)

    def figure(self) -> Any:
        """Draw the reliability diagram of the base model, of temperature scaling and of CORAL.

        Returns
        -------
        plotly.graph_objects.Figure
        """
        answers = {}
        for name, rows in self.probabilities.items():
            confidence = np.array([row.max() for row in rows])
            answers[name] = (confidence, np.array([row.argmax() for row in rows]) == self.y)
        return reliability_diagram(answers, title="Accuracy of answers by their confidence")


def evaluate_scores(coral: Coral, scores: ChoiceScores, y: ArrayLike) -> Evaluation:
    """Measure base and steered answers from scores.

    Parameters
    ----------
    coral : Coral
        Fitted.
    scores : ChoiceScores
        Of N questions.
    y : array-like of shape (N,)

    Returns
    -------
    Evaluation

    Examples
    --------
    See `Evaluation`.

    >>> evaluate_scores.__name__
    'evaluate_scores'
    """
    gold = np.asarray(y, dtype=np.int64)
    probabilities = {
        "base": coral.base_proba(scores, temperature=1.0),
        "temperature": coral.base_proba(scores, temperature=coral.nll_temperature_),
        "CORAL": coral.predict_proba(scores),
    }
    base, steered = _Answers.of(probabilities["base"], gold), _Answers.of(probabilities["CORAL"], gold)
    metrics = {name: _measured(name, base, steered) for name in ("accuracy", "ece", "brier", "nll", "auroc")}
    return Evaluation(metrics, probabilities, gold)


def permuted(question: MCQuestion, rng: np.random.Generator) -> MCQuestion:
    """Return the question with its options in another order, and its answer where that went."""
    order = rng.permutation(len(question.choices))
    answer = None if question.answer is None else int(np.flatnonzero(order == question.answer)[0])
    return replace(question, choices=tuple(question.choices[i] for i in order), answer=answer)


def layers_to_score(model: Any, layer: Any) -> tuple[int, ...]:
    """Layers of which the scorer keeps the activations: those given, or those that "auto" chooses among."""
    depth = n_layers(model)
    if isinstance(layer, str):
        return tuple(sorted({max(1, round(share * depth)) for share in DEPTHS})) if layer == "auto" else ()
    chosen = (layer,) if np.isscalar(layer) else tuple(layer)
    for each in chosen:
        if isinstance(each, bool) or int(each) != each or not 0 <= each <= depth:
            raise InputError(f"layer={layer!r}: must be from 0 (embeddings) to {depth}, the blocks of this model")
    return tuple(int(each) for each in chosen)


@dataclass(frozen=True)
class _Answers:
    """What the metrics look at: confidence, whether right, and the two proper scores of each of N questions."""

    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]
    brier: NDArray[np.float64]
    nll: NDArray[np.float64]

    @classmethod
    def of(cls, probabilities: Sequence[NDArray[np.float64]], y: NDArray[np.int64]) -> _Answers:
        pairs = list(zip(probabilities, y, strict=True))
        return cls(
            confidence=np.array([row.max() for row, _ in pairs]),
            correct=np.array([row.argmax() == gold for row, gold in pairs]),
            brier=np.array([brier([row], [gold]) for row, gold in pairs]),
            nll=np.array([nll([row], [gold]) for row, gold in pairs]),
        )


# Means of what each question has; the others look at all answers together.
MEANS: dict[str, Callable[[_Answers], NDArray[np.float64]]] = {
    "accuracy": lambda answers: answers.correct.astype(np.float64),
    "brier": lambda answers: answers.brier,
    "nll": lambda answers: answers.nll,
}
JOINT = {"ece": ece, "auroc": auroc}


def _measured(name: str, base: _Answers, steered: _Answers) -> Measured:
    if name in MEANS:
        before, after = MEANS[name](base), MEANS[name](steered)
        low, high = _interval(after - before, lambda sample, axis=-1: sample.mean(axis=axis), vectorized=True)
        return Measured(float(before.mean()), float(after.mean()), float((after - before).mean()), low, high)

    def of(answers: _Answers, chosen: NDArray[np.intp]) -> float:
        return JOINT[name](answers.confidence[chosen], answers.correct[chosen])

    def difference(chosen: NDArray[np.intp]) -> float:
        return of(steered, chosen) - of(base, chosen)

    everything = np.arange(len(base.correct))
    low, high = _interval(everything, difference, vectorized=False)
    return Measured(of(base, everything), of(steered, everything), difference(everything), low, high)


def _interval(sample: NDArray, statistic: Callable[..., Any], *, vectorized: bool) -> tuple[float, float]:
    """BCa where it can be had, else the percentiles; of a single question there is none."""
    if len(sample) < 2:
        return float("nan"), float("nan")
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a difference that is the same in every sample
            found = bootstrap(
                (sample,),
                statistic,
                vectorized=vectorized,
                n_resamples=RESAMPLES,
                method=method,
                rng=np.random.default_rng(0),
            ).confidence_interval
        if np.isfinite(found.low) and np.isfinite(found.high):
            break
    return float(found.low), float(found.high)
