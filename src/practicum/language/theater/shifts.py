"""Belief shifts and inflection points: does the text say "wait" where the belief changes?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from practicum.language.theater.beliefs import Beliefs, beliefs_of
from practicum.language.theater.traces import Trace
from practicum.toolbox.calibration import auroc
from practicum.toolbox.errors import InputError

INFLECTIONS = (
    r"\b(?:(?:wait|actually|hold on|hmm,? no|let me (?:reconsider|re-?check|re-?think|double[- ]check)|alternatively|"
    r"on second thought|aha|oh,? i see|i made a mistake|scratch that|that(?:'s| is) not right)\b|no,|i see[,.!])"
)
LARGE_SHIFT = 0.3
CONFIDENT, CONFIDENT_SHARE = 0.9, 0.8
MOST_LAGS = 5


@dataclass(frozen=True)
class Inflections:
    """How inflections in the text go with shifts of the belief.

    Attributes
    ----------
    table : array of shape (2, 2), int64
        Traces by large shift (no, yes) and inflection (no, yes).
    p_large, p_small : float or None
        Share of traces with an inflection among those with a large shift, and among the others. None without any.
    risk_ratio : float or None
        ``p_large / p_small``, a half being added to every cell of the table where one of them is empty. None where
        there are no inflections.
    ci : tuple of float, or None
        Its 95 % interval (of the logarithm, normal).
    auroc : float or None
        Of the largest shift of a trace, for whether it has an inflection.
    lags : dict of int to int
        Steps from the largest shift to the nearest inflection, to number of traces; from -5 to 5, the rest at the
        ends.
    n_confident : int
        Traces with a probability of at least 0.9 at 80 % of the boundaries or more.
    verdict : str
        "associated" where the whole interval is above 1, "not associated" where it is not, "inconclusive" where
        there are no inflections, or only inflections.
    shifts : array of shape (N,)
        The largest shift of each trace.

    Examples
    --------
    >>> trace = Trace("?", ("A", "B"), [1], [2, 3], [1, 2], "A", None, "Hm. A.", [3, 6])
    >>> found = inflections([trace], [np.array([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])])
    >>> found.shifts, found.p_large, found.verdict
    (array([0.5]), 0.0, 'inconclusive')
    """

    table: NDArray[np.int64]
    p_large: float | None
    p_small: float | None
    risk_ratio: float | None
    ci: tuple[float, float] | None
    auroc: float | None
    lags: dict[int, int]
    n_confident: int
    verdict: str
    shifts: NDArray[np.float64]


def belief_shifts(belief: Beliefs) -> NDArray[np.float64]:
    """Total variation between the beliefs at neighbouring cuts.

    Parameters
    ----------
    belief : array of shape (S + 1, K)

    Returns
    -------
    array of shape (S,)

    Examples
    --------
    >>> belief_shifts(np.array([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]]))
    array([1.  , 0.25])
    """
    return 0.5 * np.abs(np.diff(np.asarray(belief, dtype=np.float64), axis=0)).sum(-1)


def inflections(
    traces: Sequence[Trace],
    belief: Any,
    pattern: str | Callable[[str], Sequence[int]] = INFLECTIONS,
    *,
    shift: float = LARGE_SHIFT,
) -> Inflections:
    """Compare traces whose belief shifts with those whose belief does not.

    Parameters
    ----------
    traces : sequence of Trace
        Shape (N,).
    belief : object
        An instrument, or its beliefs, N arrays of shape (S + 1, K).
    pattern : str or callable
        Regular expression, read without regard to case, or ``pattern(text) -> places in the text``. The paper's list
        of words is not public; this one is ours.
    shift : float
        From this total variation between neighbouring cuts on, a shift is large (our threshold).

    Returns
    -------
    Inflections

    Raises
    ------
    InputError
        A ValueError: for no traces, a pattern that cannot be read, a shift outside (0, 1].

    References
    ----------
    Boppana et al., "Reasoning Theater", arXiv:2603.05488.

    Examples
    --------
    >>> def trace(text):
    ...     ends = [match.end() for match in re.finditer(r"[.]", text)]
    ...     return Trace("?", ("A", "B"), [1], [2] * len(ends), list(range(1, len(ends) + 1)), "A", None, text, ends)
    >>> traces = [trace("B. Wait. A."), trace("A. A. A.")] * 20
    >>> moved = np.array([[0.2, 0.8], [0.1, 0.9], [0.9, 0.1], [0.9, 0.1]])
    >>> result = inflections(traces, [moved, np.tile([0.9, 0.1], (4, 1))] * 20)
    >>> result.table.tolist(), result.verdict, result.auroc
    ([[20, 0], [0, 20]], 'associated', 1.0)
    """
    if not 0 < shift <= 1:
        raise InputError(f"shift={shift!r}: must be above 0 and at most 1")
    find = pattern if callable(pattern) else _finder(pattern)
    believed = beliefs_of(belief, traces)
    shifts = [belief_shifts(rows) for rows in believed]
    largest = np.array([row.max(initial=0.0) for row in shifts])
    places = [list(find(trace.text)) for trace in traces]
    inflected = np.array([len(found) > 0 for found in places])
    large = largest >= shift
    table = np.array(
        [
            [np.sum(~inflected & ~large), np.sum(inflected & ~large)],
            [np.sum(~inflected & large), np.sum(inflected & large)],
        ]
    )
    both = 0 < inflected.sum() < len(traces)
    ratio, ci = _risk_ratio(table) if inflected.any() else (None, None)
    return Inflections(
        table=table,
        p_large=float(inflected[large].mean()) if large.any() else None,
        p_small=float(inflected[~large].mean()) if not large.all() else None,
        risk_ratio=ratio,
        ci=ci,
        auroc=auroc(largest, inflected.astype(float)) if both else None,
        lags=_lags(traces, shifts, places),
        n_confident=sum(np.mean(rows.max(-1) >= CONFIDENT) >= CONFIDENT_SHARE for rows in believed),
        verdict="inconclusive" if not both or ci is None else "associated" if ci[0] > 1 else "not associated",
        shifts=largest,
    )


def _finder(pattern: str) -> Callable[[str], list[int]]:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InputError(f"pattern={pattern!r}: is no regular expression: {error}") from None
    return lambda text: [match.start() for match in compiled.finditer(text)]


def _risk_ratio(table: NDArray[np.int64]) -> tuple[float, tuple[float, float]]:
    cells = table + (0.5 if (table == 0).any() else 0.0)
    (_, small), (_, large) = cells
    n_small, n_large = cells.sum(1)
    ratio = (large / n_large) / (small / n_small)
    deviation = np.sqrt(1 / large - 1 / n_large + 1 / small - 1 / n_small)
    half = float(stats.norm.ppf(0.975)) * deviation
    return float(ratio), (float(ratio * np.exp(-half)), float(ratio * np.exp(half)))


def _lags(
    traces: Sequence[Trace], shifts: Sequence[NDArray[np.float64]], places: Sequence[Sequence[int]]
) -> dict[int, int]:
    lags: Counter[int] = Counter()
    for trace, row, found in zip(traces, shifts, places, strict=True):
        if len(row) and found:
            # An inflection belongs to the step it stands in, a shift to the step that brought it.
            steps = np.searchsorted(trace.ends, np.array(found), side="right")
            distances = steps - int(row.argmax())
            nearest = int(distances[np.abs(distances).argmin()])
            lags[int(np.clip(nearest, -MOST_LAGS, MOST_LAGS))] += 1
    return dict(sorted(lags.items()))
