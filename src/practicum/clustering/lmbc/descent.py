"""Block coordinate descent on one-hot labels: every sweep lowers the objective or is undone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

# A sweep looks at the points in at least this many blocks, and updates the cluster sums after each.
BLOCKS = 20
# A move must gain more than this share of the mean variance of a point: less is rounding.
LEAST_GAIN = 1e-12


@dataclass(frozen=True)
class SizeTerm:
    r"""The balance term :math:`\lambda \sum_k n_k^{p/2}` that the objective subtracts."""

    weight: float
    p: float

    def value(self, sizes: NDArray[np.float64]) -> float:
        """Of all clusters."""
        return self.weight * float(np.sum(sizes ** (self.p / 2)))

    def slope(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """By how much the term grows when a cluster of this size gets one more point."""
        return self.weight * ((sizes + 1) ** (self.p / 2) - sizes ** (self.p / 2))


@dataclass
class Partition:
    """Labels (n,) with the sums M (c, r) and sizes (c,) of the clusters that they make."""

    labels: NDArray[np.int32]
    sums: NDArray[np.float64]
    sizes: NDArray[np.float64]

    @classmethod
    def of(cls, labels: NDArray[np.int32], coordinates: NDArray[np.float64], n_clusters: int) -> Partition:
        """Sum up the rows of each cluster."""
        sums = _one_hot(labels, n_clusters) @ coordinates
        return cls(labels, sums, np.bincount(labels, minlength=n_clusters).astype(np.float64))

    def compactness(self) -> float:
        r""":math:`\sum_k \|M_k\|^2 / n_k`; the inertia is the sum of squares of all rows less this."""
        return float(np.sum(np.einsum("ij,ij->i", self.sums, self.sums) / self.sizes))


@dataclass
class Descent:
    """Where the descent ended: the partition, J after every sweep (the start first), and the number of sweeps."""

    partition: Partition
    path: list[float]
    n_iter: int


def descend(
    coordinates: NDArray[np.float64],
    labels: NDArray[np.int32],
    n_clusters: int,
    size_term: SizeTerm | None,
    *,
    max_iter: int,
    tol: float,
    batch_size: int,
    random_state: np.random.RandomState,
) -> Descent:
    r"""Minimise :math:`J = \sum_i \|e_i\|^2 - \sum_k \|M_k\|^2 / n_k - \lambda \sum_k n_k^{p/2}` over the labels.

    A sweep passes over the points in random order, block by block; within a block every point is offered the cluster
    that would lower J most if it alone moved. J is evaluated after each block, which costs O(c r): if the moves of a
    block together raise it, because each counted on the sizes before the others moved, they are undone and only the
    better half is made, down to a single move, which cannot raise J. A sweep that still raises J, by rounding, is
    undone, and ends the descent. It also ends when no label changes (no single move lowers J then) or the drop of J
    in a sweep is below ``tol`` times the total variance.

    Parameters
    ----------
    coordinates : ndarray of float64, shape (n, r)
        The points :math:`e_i`.
    labels : ndarray of int32, shape (n,)
        Where to start. Empty clusters are given a point first.
    n_clusters : int
        c, at most n.
    size_term : SizeTerm or None
        None leaves the balance out.
    max_iter, tol, batch_size, random_state
        As in `LMBC`.
    """
    n = len(coordinates)
    squared_norms = np.einsum("ij,ij->i", coordinates, coordinates)
    energy = float(squared_norms.sum())
    variance = max(total_variance(coordinates), np.finfo(np.float64).tiny)
    least_gain = LEAST_GAIN * variance / n

    def objective(partition: Partition) -> float:
        inertia = energy - partition.compactness()
        return inertia if size_term is None else inertia - size_term.value(partition.sizes)

    partition = Partition.of(_fill_empty(labels.copy(), coordinates, n_clusters), coordinates, n_clusters)
    path = [objective(partition)]
    n_iter = 0
    while n_iter < max_iter:
        n_iter += 1
        before = partition.labels.copy()
        moved = _sweep(partition, coordinates, squared_norms, size_term, least_gain, batch_size, random_state)
        if not moved:
            break
        after = Partition.of(partition.labels, coordinates, n_clusters)
        J = objective(after)
        if path[-1] < J:
            partition = Partition.of(before, coordinates, n_clusters)
            break
        partition = after
        path.append(J)
        if path[-2] - J < tol * variance:
            break
    return Descent(partition, path, n_iter)


def total_variance(coordinates: NDArray[np.float64]) -> float:
    """Sum of the squared distances of the rows to their mean."""
    centred = coordinates - coordinates.mean(axis=0)
    return float(np.einsum("ij,ij->", centred, centred))


def _sweep(
    partition: Partition,
    coordinates: NDArray[np.float64],
    squared_norms: NDArray[np.float64],
    size_term: SizeTerm | None,
    least_gain: float,
    batch_size: int,
    random_state: np.random.RandomState,
) -> bool:
    """Offer every point the best cluster, in place; return whether any moved."""
    n = len(coordinates)
    order = random_state.permutation(n)
    block_size = max(1, min(batch_size, n // BLOCKS))
    moved = False
    for start in range(0, n, block_size):
        rows = order[start : start + block_size]
        block = coordinates[rows]
        target, gain = _best_moves(partition, block, squared_norms[rows], partition.labels[rows], size_term)
        movers = np.flatnonzero(gain > least_gain)
        if len(movers):
            movers = movers[np.argsort(-gain[movers], kind="stable")]
            moved |= _move(partition, rows[movers], block[movers], target[movers], size_term)
    return moved


def _best_moves(
    partition: Partition,
    block: NDArray[np.float64],
    squared_norms: NDArray[np.float64],
    own: NDArray[np.int32],
    size_term: SizeTerm | None,
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """For each point of the block the best other cluster, and by how much J falls if the point alone moves there."""
    M, N = partition.sums, partition.sizes
    squared_sums = np.einsum("ij,ij->i", M, M)
    joined = 1.0 / (N + 1)
    left = np.zeros_like(N)
    np.divide(1.0, N - 1, out=left, where=N > 1)
    # J with the point in cluster k, less J without it: row constants and e_i . M_k are all that differ by point.
    joining = squared_sums * (1.0 / N - joined)
    staying = squared_sums * (left - 1.0 / N)
    if size_term is not None:
        joining -= size_term.slope(N)
        staying -= size_term.slope(N - 1)
    staying[N <= 1] = -np.inf  # the last point of a cluster stays

    points = np.arange(len(block))
    products = block @ M.T
    stay = staying[own] + (squared_norms - 2.0 * products[points, own]) * left[own]
    cost = products
    cost *= -2.0 * joined
    cost += joining
    cost -= np.multiply.outer(squared_norms, joined)
    cost[points, own] = np.inf
    target = cost.argmin(axis=1)
    return target, stay - cost[points, target]


def _move(
    partition: Partition,
    rows: NDArray[np.intp],
    points: NDArray[np.float64],
    target: NDArray[np.intp],
    size_term: SizeTerm | None,
) -> bool:
    """Make the moves, best first, that together lower J; return whether any was made."""

    def gathered(part: Partition) -> float:
        return part.compactness() if size_term is None else part.compactness() + size_term.value(part.sizes)

    n_clusters = len(partition.sizes)
    kept = _leave_one(partition, rows, n_clusters)
    rows, points, target = rows[kept], points[kept], target[kept].astype(np.int32)
    now = gathered(partition)
    while len(rows):
        own = partition.labels[rows]
        change = _one_hot(target, n_clusters) - _one_hot(own, n_clusters)
        sizes = partition.sizes + np.bincount(target, minlength=n_clusters) - np.bincount(own, minlength=n_clusters)
        tried = Partition(partition.labels, partition.sums + change @ points, sizes)
        if gathered(tried) >= now:
            partition.labels[rows] = target
            partition.sums, partition.sizes = tried.sums, tried.sizes
            return True
        half = len(rows) // 2
        rows, points, target = rows[:half], points[:half], target[:half]
    return False


def _leave_one(partition: Partition, rows: NDArray[np.intp], n_clusters: int) -> NDArray[np.bool_]:
    """Which of the movers, best first, may go so that no cluster loses its last point."""
    own = partition.labels[rows]
    leaving = np.bincount(own, minlength=n_clusters)
    kept = np.ones(len(rows), dtype=bool)
    for cluster in np.flatnonzero((leaving > 0) & (leaving >= partition.sizes)):
        kept[np.flatnonzero(own == cluster)[-1]] = False
    return kept


def _fill_empty(labels: NDArray[np.int32], coordinates: NDArray[np.float64], n_clusters: int) -> NDArray[np.int32]:
    """Give each empty cluster the point that is farthest from the mean of its own, larger cluster."""
    sizes = np.bincount(labels, minlength=n_clusters)
    for empty in np.flatnonzero(sizes == 0):
        means = (_one_hot(labels, n_clusters) @ coordinates) / np.maximum(sizes, 1)[:, None]
        distances = np.sum((coordinates - means[labels]) ** 2, axis=1)
        distances[sizes[labels] <= 1] = -1.0
        farthest = int(distances.argmax())
        sizes[labels[farthest]] -= 1
        labels[farthest] = empty
        sizes[empty] = 1
    return labels


def _one_hot(labels: NDArray, n_clusters: int) -> sparse.csc_array:
    """The transposed label matrix, shape (c, n)."""
    n = len(labels)
    return sparse.csc_array((np.ones(n), labels, np.arange(n + 1)), shape=(n_clusters, n))
