"""From scores to a coreset: how much of the pool, shared between tasks, and how different from one another."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from practicum.toolbox.errors import InputError

Allocation = Literal["max", "round_robin"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def select_coreset(
    scores: ArrayLike,
    *,
    fraction: float | None = None,
    n: int | None = None,
    tokens: int | None = None,
    lengths: ArrayLike | None = None,
    allocation: Allocation = "max",
    diversity: float = 0.0,
    states: ArrayLike | None = None,
    candidates: int = 4,
) -> Ints:
    r"""Choose the best samples within a budget.

    Give one of ``fraction``, ``n`` and ``tokens``. Samples of equal score are taken by index; those whose score is -inf
    are never taken.

    With ``diversity`` :math:`\delta > 0` samples are chosen one by one by maximal marginal relevance, which is not in
    the paper. The next is the one with the largest
    :math:`(1 - \delta) r_i - \delta \max_{j \text{ chosen}} \cos(m_i, m_j)`, where :math:`r` are the scores of the
    candidates scaled to [0, 1] and :math:`m` their mean token states less the mean of all candidates. Only the
    ``candidates`` times as many best as are wanted are looked at.

    Parameters
    ----------
    scores : array of shape (N,) or (N, T)
        Of samples, or of samples for each of T tasks.
    fraction : float, optional
        Share of the pool, above 0 and up to 1; rounded down, but one sample at least.
    n : int, optional
        Number of samples.
    tokens : int, optional
        Samples are taken in their order while all of them together have no more tokens than this.
    lengths : array of int, shape (N,), optional
        Tokens of each sample, for ``tokens``.
    allocation : {"max", "round_robin"}
        With several tasks: by the largest of a sample's scores, or the tasks take turns to choose their best.
    diversity : float
        From 0, the paper's ranking, to 1.
    states : array of shape (N, s), optional
        What samples are compared by, for ``diversity``.
    candidates : int

    Returns
    -------
    array of int64, shape (n,)
        Indices, the best first.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Warns
    -----
    UserWarning
        When ``fraction`` is less than one sample.

    Examples
    --------
    >>> select_coreset([0.1, 0.9, 0.5, 0.9], n=3)
    array([1, 3, 2])
    >>> select_coreset([0.1, 0.9, 0.5, 0.9], tokens=25, lengths=[5, 10, 10, 10])
    array([1, 3])
    >>> select_coreset([0.1, 0.9, 0.8, 0.7], n=2, diversity=0.5, states=[[0, 1], [1, 0], [1, 0], [0, 1]])
    array([1, 3])
    """
    scored = np.asarray(scores, dtype=np.float64)
    if scored.ndim not in (1, 2) or not scored.size:
        raise InputError(f"scores: must have shape (N,) or (N, tasks) with a sample at least; got {scored.shape}")
    if np.isnan(scored).any():
        raise InputError(f"scores: sample {int(np.argwhere(np.isnan(scored))[0][0])} has nan; must be numbers")
    if allocation not in ("max", "round_robin"):
        raise InputError(f"allocation={allocation!r}: must be 'max' or 'round_robin'")
    if not 0 <= diversity <= 1:
        raise InputError(f"diversity={diversity}: must be from 0 to 1")
    if candidates < 1:
        raise InputError(f"candidates={candidates}: must be at least 1")
    if diversity > 0 and allocation == "round_robin" and scored.ndim == 2:
        raise InputError("diversity: goes with allocation='max'; got allocation='round_robin'")
    by_task = scored.reshape(len(scored), -1)
    order = _turns(by_task) if allocation == "round_robin" else _ranked(by_task.max(1))
    order = order[np.isfinite(by_task.max(1)[order])]
    wanted, cost = _budget(len(scored), len(order), fraction, n, tokens, lengths)
    if diversity > 0:
        if states is None:
            raise InputError("diversity: needs states=, the mean token states of the samples")
        x = np.asarray(states, dtype=np.float32)
        if x.ndim != 2 or len(x) != len(scored):
            raise InputError(f"states: must have shape ({len(scored)}, s); got {x.shape}")
        likely = wanted if cost is None else max(1, _within(cost, order, wanted))
        pool = order[: candidates * likely]
        order = _diverse(by_task.max(1), x, pool, diversity, wanted if cost is None else len(pool))
    if cost is None:
        return order[:wanted]
    kept = _within(cost, order, wanted)
    if kept == 0:
        raise InputError(f"tokens={wanted}: the best sample alone has {int(cost[order[0]])}; must be as many at least")
    return order[:kept]


def _budget(
    size: int, usable: int, fraction: float | None, n: int | None, tokens: int | None, lengths: ArrayLike | None
) -> tuple[int, Ints | None]:
    """The number of samples, or of tokens with what each sample costs."""
    given = {"fraction": fraction, "n": n, "tokens": tokens}
    if sum(value is not None for value in given.values()) != 1:
        raise InputError(f"fraction, n, tokens: give exactly one; got {given}")
    if usable == 0:
        raise InputError("scores: no sample has any; all of them are empty in this scope")
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise InputError(f"fraction={fraction}: must be above 0 and at most 1")
        if fraction * size < 1:
            warnings.warn(f"fraction={fraction} of {size} samples is less than one: one is taken", stacklevel=3)
        return min(max(1, int(fraction * size + 1e-9)), usable), None
    if n is not None:
        if not 1 <= n <= usable:
            told = f"the {usable} samples of the pool" + ("" if usable == size else " that are not empty in this scope")
            raise InputError(f"n={n}: must be from 1 to {told}")
        return int(n), None
    if lengths is None:
        raise InputError("tokens: needs the lengths of the samples")
    cost = np.asarray(lengths, dtype=np.int64)
    if cost.shape != (size,):
        raise InputError(f"lengths: must have shape ({size},); got {cost.shape}")
    if tokens is None or tokens < 1:
        raise InputError(f"tokens={tokens}: must be at least 1")
    return int(tokens), cost


def _ranked(scores: Floats) -> Ints:
    return np.argsort(-scores, kind="stable")


def _turns(by_task: Floats) -> Ints:
    """Tasks choose in turn the best sample that is left."""
    orders = [iter(_ranked(scores)) for scores in by_task.T]
    taken = np.zeros(len(by_task), dtype=bool)
    found: list[int] = []
    while len(found) < len(by_task):
        for order in orders:
            best = next((i for i in order if not taken[i]), None)
            if best is not None:
                taken[best] = True
                found.append(int(best))
    return np.array(found, dtype=np.int64)


def _within(cost: Ints, order: Ints, tokens: int) -> int:
    """How many of the first samples fit."""
    return int(np.searchsorted(np.cumsum(cost[order]), tokens, side="right"))


def _diverse(scores: Floats, states: NDArray[np.float32], order: Ints, diversity: float, n: int) -> Ints:
    x = states[order] - states[order].mean(0)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    relevance = scores[order]
    width = np.ptp(relevance)
    relevance = (relevance - relevance.min()) / width if width > 0 else np.ones_like(relevance)
    nearest = np.full(len(order), -1.0)
    left = np.ones(len(order), dtype=bool)
    found = []
    for _ in range(n):
        # The first is the most relevant: nothing is near it yet.
        value = np.where(left, (1 - diversity) * relevance - diversity * nearest, -np.inf)
        best = int(value.argmax())
        found.append(best)
        left[best] = False
        nearest = np.maximum(nearest, x @ x[best])
    return order[np.array(found, dtype=np.int64)]
