"""When a chain could have stopped: rules over its cuts, and what each saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from practicum.language.theater.beliefs import Beliefs
from practicum.language.theater.traces import Trace
from practicum.toolbox.errors import InputError

Scores = Sequence[NDArray[np.float64]]


def confidence_scores(belief: Sequence[Beliefs]) -> list[NDArray[np.float64]]:
    """The highest probability at every cut: of a probe, or of forced answers (as DEER exits).

    Parameters
    ----------
    belief : sequence of array of shape (S + 1, K)

    Returns
    -------
    list of array of shape (S + 1,)

    References
    ----------
    DEER: C. Yang et al., "Dynamic Early Exit in Reasoning Models", arXiv:2504.15895.

    Examples
    --------
    >>> confidence_scores([np.array([[0.5, 0.5], [0.9, 0.1]])])
    [array([0.5, 0.9])]
    """
    return [np.asarray(rows).max(-1) for rows in belief]


def certainty_scores(belief: Sequence[Beliefs]) -> list[NDArray[np.float64]]:
    """One less the entropy at every cut, as a share of that of K equal options: entropy-based stopping.

    Parameters
    ----------
    belief : sequence of array of shape (S + 1, K)

    Returns
    -------
    list of array of shape (S + 1,)

    Examples
    --------
    >>> certainty_scores([np.array([[0.5, 0.5], [1.0, 0.0]])])
    [array([0., 1.])]
    """
    found = []
    for rows in belief:
        p = np.clip(np.asarray(rows, dtype=np.float64), 1e-300, 1)
        found.append(1 + (p * np.log(p)).sum(-1) / np.log(p.shape[-1]))
    return found


def agreement_scores(belief: Sequence[Beliefs]) -> list[NDArray[np.float64]]:
    """How many cuts in a row, up to each, have had the same answer: answer consistency.

    Parameters
    ----------
    belief : sequence of array of shape (S + 1, K)

    Returns
    -------
    list of array of shape (S + 1,)

    Examples
    --------
    >>> agreement_scores([np.array([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]])])
    [array([1., 2., 1.])]
    """
    found = []
    for rows in belief:
        answers = np.asarray(rows).argmax(-1)
        runs = np.ones(len(answers))
        for k in range(1, len(answers)):
            if answers[k] == answers[k - 1]:
                runs[k] = runs[k - 1] + 1
        found.append(runs)
    return found


def budget_scores(traces: Sequence[Trace]) -> list[NDArray[np.float64]]:
    """Tokens of the chain at every cut: a fixed budget.

    Parameters
    ----------
    traces : sequence of Trace
        Shape (N,).

    Returns
    -------
    list of array of shape (S + 1,)

    Examples
    --------
    >>> budget_scores([Trace("?", ("A", "B"), [1], [2, 3], [1, 2], "A", None, "Hm. A.", [3, 6])])
    [array([0., 1., 2.])]
    """
    return [np.array(trace.cuts, dtype=np.float64) for trace in traces]


@dataclass(frozen=True)
class ExitCurve:
    """What stopping early saves and costs, by threshold.

    Attributes
    ----------
    thresholds : array of shape (m,)
    saved : array of shape (m,)
        Share of the tokens of all chains that are not written.
    accuracy : array of shape (m,)
        Share of answers that are right, those of the chains that ran to their end included.
    full_accuracy : float
        That without stopping.

    Examples
    --------
    >>> curve = ExitCurve(np.array([0.8, 0.9]), np.array([0.7, 0.4]), np.array([0.85, 0.9]), 0.9)
    >>> curve.saved_within(loss=0.01)
    0.4
    """

    thresholds: NDArray[np.float64]
    saved: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    full_accuracy: float

    def saved_within(self, loss: float) -> float:
        """The most that is saved by a threshold with no more loss of accuracy than this; 0 where none has.

        Parameters
        ----------
        loss : float

        Returns
        -------
        float
        """
        return float(self.saved[self.accuracy >= self.full_accuracy - loss - 1e-12].max(initial=0.0))


def exit_curve(
    traces: Sequence[Trace],
    scores: Scores,
    answers: Sequence[Beliefs],
    thresholds: Sequence[float],
    *,
    patience: int = 1,
    min_tokens: int = 0,
) -> ExitCurve:
    """Replay a stopping rule over recorded chains.

    A chain stops at the first cut whose score, and those of the ``patience - 1`` cuts before it, reach the threshold;
    the answer is then what the model says when it is forced there. A chain that never stops keeps its answer.

    Parameters
    ----------
    traces : sequence of Trace
        Shape (N,), with the right answers.
    scores : sequence of array of shape (S + 1,)
    answers : sequence of array of shape (S + 1, K)
        Forced answers; see `ForcedAnswer`.
    thresholds : sequence of float
        Shape (m,).
    patience : int
    min_tokens : int
        No stop before so many tokens.

    Returns
    -------
    ExitCurve

    Raises
    ------
    InputError
        A ValueError: for no traces, traces without the right answer, lengths that differ, ``patience`` below 1.

    Examples
    --------
    >>> trace = Trace("?", ("A", "B"), [1], [2, 3], [1, 2], "A", "A", "Hm. A.", [3, 6])
    >>> belief = [np.array([[0.6, 0.4], [0.96, 0.04], [1.0, 0.0]])]
    >>> exit_curve([trace], confidence_scores(belief), belief, [0.5, 0.95, 1.1]).saved
    array([1. , 0.5, 0. ])
    """
    if not traces:
        raise InputError("traces: is empty; must have one at least")
    if patience < 1:
        raise InputError(f"patience={patience!r}: must be 1 or more")
    for name, given in (("scores", scores), ("answers", answers)):
        if len(given) != len(traces):
            raise InputError(f"{name}: has {len(given)} entries; must have {len(traces)}, one a trace")
    for i, trace in enumerate(traces):
        if trace.gold is None:
            raise InputError(f"traces[{i}]: has no right answer, and accuracy needs it")
        if not len(scores[i]) == len(answers[i]) == len(trace.cuts):
            raise InputError(f"traces[{i}]: must have {len(trace.cuts)} scores and answers; has {len(scores[i])}")
    n_tokens = sum(len(trace.cot_ids) for trace in traces)
    full = float(np.mean([trace.answer == trace.gold for trace in traces]))
    saved, accuracy = [], []
    for threshold in thresholds:
        places = [
            first_stop(trace, row, threshold, patience, min_tokens) for trace, row in zip(traces, scores, strict=True)
        ]
        kept = sum(
            len(trace.cot_ids) if place is None else trace.cuts[place]
            for trace, place in zip(traces, places, strict=True)
        )
        right = [
            (trace.answer if place is None else trace.options[int(rows[place].argmax())]) == trace.gold
            for trace, place, rows in zip(traces, places, answers, strict=True)
        ]
        saved.append(1 - kept / max(n_tokens, 1))
        accuracy.append(float(np.mean(right)))
    return ExitCurve(np.asarray(thresholds, dtype=np.float64), np.array(saved), np.array(accuracy), full)


def first_stop(
    trace: Trace, scores: NDArray[np.float64], threshold: float, patience: int = 1, min_tokens: int = 0
) -> int | None:
    """The cut at which a chain stops, or None where it runs to its end.

    Examples
    --------
    >>> trace = Trace("?", ("A", "B"), [1], [2, 3], [1, 2], "A", "A", "Hm. A.", [3, 6])
    >>> first_stop(trace, np.array([0.99, 0.2, 0.99]), 0.95, patience=2) is None
    True
    """
    run = 0
    for k, score in enumerate(scores):
        run = run + 1 if score >= threshold else 0
        # The last cut is the end of the chain: nothing is left to stop.
        if run >= patience and trace.cuts[k] >= min_tokens and trace.cuts[k] < len(trace.cot_ids):
            return k
    return None
