"""The claims of LMBC, measured against K-means, spectral clustering and balanced clustering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import Birch, KMeans, MiniBatchKMeans, SpectralClustering
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score, confusion_matrix, normalized_mutual_info_score
from sklearn.utils import check_random_state

from practicum.checks import CannotMeasure, Check, Comparison, Metrics, Request, Unavailable, Workload, arm
from practicum.clustering.lmbc import LMBC, anchor_graph, balance_entropy
from practicum.clustering.lmbc.anchors import normalize, place_anchors, spectrum
from practicum.clustering.lmbc.estimator import landmark_spectral_labels, spectral_embedding
from practicum.datasets import Table, digits, mfeat, mnist_5k, mnist_shifted, read_table

PCA_COMPONENTS = 50
# The share of the odd classes that the imbalanced data keep.
KEPT_OF_ODD_CLASSES = 0.25
# How far from equal the sizes may be that constrained K-means is told.
TOLD_SIZES = 0.1
FEWEST_TIMED = 200
# With fewer distinct rows there may not be enough distinct anchors.
FEWEST_ROWS = 60
ROWS_PER_CLUSTER = 10

Labels = NDArray[np.int32]
Clusterer = Callable[["Points"], Labels]


@dataclass(frozen=True)
class Points:
    """What one clustering gets: points (n, d), their classes (n,) or None, c, the seed, and anchors (m, d) to share."""

    name: str
    X: NDArray[np.float64]
    y: NDArray[np.int64] | None
    n_clusters: int
    seed: int
    anchors: NDArray[np.float64] | None = None

    def with_anchors(self) -> Points:
        """The same with the anchors that LMBC would place by default, for every arm that uses anchors."""
        n_anchors = min(max(300, 30 * self.n_clusters), len(self.X) // 3, 1000)
        anchors = place_anchors(self.X, n_anchors, "kmeans", check_random_state(self.seed))
        return Points(self.name, self.X, self.y, self.n_clusters, self.seed, anchors)

    def spectrum(self) -> tuple[Any, NDArray[np.float64], NDArray[np.float64]]:
        """The normalised anchor graph with the eigenvalues and eigenvectors of its Gram matrix."""
        R, _ = normalize(anchor_graph(self.X, self.anchors))  # type: ignore[arg-type]
        return (R, *spectrum(R))

    def rows(self, chosen: NDArray[np.intp]) -> Points:
        """Some of the points."""
        return Points(self.name, self.X[chosen], None if self.y is None else self.y[chosen], self.n_clusters, self.seed)


@dataclass
class Work:
    """The work of one seed.

    ``balanced`` and ``imbalanced`` are for quality, ``timed`` for the stopwatch, by number of points; ``versus`` is
    the number of points at which spectral clustering is timed.
    """

    balanced: list[Points]
    imbalanced: list[Points]
    timed: dict[int, Points] = field(default_factory=dict)
    versus: int = 0


class LMBCCheck(Check):
    """LMBC on digits, features of handwritten numerals and MNIST, whose ten classes are about equally large.

    Every quality metric is the mean over the data sets of the scale; ``metric/<data set>`` is that of one. Data
    without classes get, for every arm, LMBC's objective of its labels and their ARI to those of LMBC instead.
    """

    comparisons = (
        Comparison("follows-the-manifold", metric="ari", arm="lmbc", against="kmeans", difference_above=0.0),
        Comparison(
            "beyond-the-anchor-graph", metric="accuracy", arm="lmbc", against="landmark-spectral", difference_above=0.0
        ),
        Comparison(
            "balance-term-balances", metric="entropy", arm="lmbc", against="lmbc-unbalanced", difference_above=0.0
        ),
        Comparison("balanced", metric="entropy", arm="lmbc", value_at_least=0.99),
        Comparison("linear-time", metric="slope", arm="lmbc", value_at_most=1.15, timed=True),
        Comparison(
            "faster-than-spectral", metric="seconds", arm="lmbc", against="spectral", ratio_at_most=1 / 3, timed=True
        ),
        Comparison(
            "as-good-as-spectral", metric="ari (timed)", arm="lmbc", against="spectral", difference_at_least=0.0
        ),
        Comparison(
            "no-worse-than-told-sizes",
            metric="accuracy",
            arm="lmbc",
            against="kmeans-constrained-on-embedding",
            difference_at_least=-0.02,
        ),
    )
    seeds = {"quick": 5, "full": 10, "paper": 10}
    portable = True
    trade_offs = (("seconds", "ari (timed)"),)

    def prepare(self, request: Request) -> Work:
        """Draw the imbalanced rows and the rows to be timed; the balanced data are whole."""
        if request.model is not None:
            raise CannotMeasure(f"--model {request.model}: lmbc has no model; leave it out")
        n_clusters = _clusters(request.options.get("clusters"))
        if request.data is not None:
            return self._own(request, read_table(request.data, label=request.options.get("label")), n_clusters)
        for name in ("label", "clusters"):
            if name in request.options:
                raise CannotMeasure(f"--{name} goes with --data")
        tables = request.pick(
            quick=[_scaled(digits()), mfeat("pix")],
            full=[_scaled(digits()), mfeat("pix"), mfeat("fac"), _reduced(mnist_5k())],
        )
        balanced = [_points(table, request.seed) for table in tables]
        sizes = request.pick(quick=(2000, 4000, 8000), full=(5000, 10_000, 20_000, 45_000))
        versus = request.pick(quick=4000, full=10_000)
        drawn = np.random.default_rng(request.seed).permutation(45_000)[: max(sizes)]
        shifted = mnist_shifted()
        largest = _reduced(Table(shifted.X[drawn], shifted.y[drawn], "mnist-shifted", "", ""))  # type: ignore[index]
        return self._work(balanced, _points(largest, request.seed), sizes, versus)

    def _own(self, request: Request, table: Table, n_clusters: int | None) -> Work:
        if table.y is None and n_clusters is None:
            raise CannotMeasure("--data without --label needs --clusters, the number of clusters")
        if n_clusters is None:
            n_clusters = int(table.y.max()) + 1  # type: ignore[union-attr]
            if n_clusters < 2:
                raise CannotMeasure(f"--label {request.options['label']}: all rows are of one class; give --clusters")
        n, distinct = len(table.X), len(np.unique(table.X, axis=0))
        if distinct < FEWEST_ROWS:
            raise CannotMeasure(f"--data must have at least {FEWEST_ROWS} distinct rows; {table.name} has {distinct}")
        if n_clusters > distinct // ROWS_PER_CLUSTER:
            raise CannotMeasure(
                f"--clusters {n_clusters}: must be from 2 to {distinct // ROWS_PER_CLUSTER}, a tenth of the distinct "
                "rows of --data"
            )
        points = Points(table.name, table.X, table.y, n_clusters, request.seed)
        shuffled = points.rows(np.random.default_rng(request.seed).permutation(n))
        sizes = tuple(sorted({n // 4, n // 2, n}))
        limit = request.pick(quick=4000, full=10_000)
        versus = max((size for size in sizes if size <= limit), default=limit)
        return self._work([points], shuffled, tuple(sorted({*sizes, versus})), versus)

    def _work(self, balanced: list[Points], largest: Points, sizes: tuple[int, ...], versus: int) -> Work:
        imbalanced = [thinned.with_anchors() for points in balanced if (thinned := _thinned(points)) is not None]
        balanced = [points.with_anchors() for points in balanced]
        if max(sizes) < FEWEST_TIMED:
            return Work(balanced, imbalanced)
        timed = {n: largest.rows(np.arange(n)) for n in sizes if n >= max(FEWEST_TIMED // 4, largest.n_clusters)}
        return Work(balanced, imbalanced, timed, versus)

    @arm("lmbc")
    def lmbc(self, work: Work) -> Metrics:
        """The method with its defaults; in the timed part it places its own anchors."""
        return _measure(
            partial(_lmbc, balance=1.0), work, _timed(work, _lmbc_alone, tuple(work.timed)), imbalanced=True
        )

    @arm("lmbc-unbalanced")
    def lmbc_unbalanced(self, work: Work) -> Metrics:
        """Without the Schatten norm: what the balance term adds, and what it costs on imbalanced data."""
        return _measure(partial(_lmbc, balance=0.0), work, imbalanced=True)

    @arm("kmeans", timed=True)
    def kmeans(self, work: Work) -> Metrics:
        """The incumbent."""
        timed = _timed(work, partial(_kmeans, n_init=3), (work.versus, max(work.timed, default=0)))
        return _measure(partial(_kmeans, n_init=10), work, timed, imbalanced=True)

    @arm("minibatch-kmeans")
    def minibatch_kmeans(self, work: Work) -> Metrics:
        """The incumbent where there are many points."""
        return _measure(lambda p: MiniBatchKMeans(p.n_clusters, n_init=3, random_state=p.seed).fit_predict(p.X), work)

    @arm("birch")
    def birch(self, work: Work) -> Metrics:
        """The other linear-time clusterer of scikit-learn."""
        return _measure(_birch, work)

    @arm("spectral")
    def spectral(self, work: Work) -> Metrics:
        """Exact spectral clustering on the graph of nearest neighbours: follows manifolds, slow with many points."""
        return _measure(_spectral, work, _timed(work, _spectral, (work.versus,)))

    @arm("landmark-spectral")
    def landmark_spectral(self, work: Work) -> Metrics:
        """The same anchors and the same graph, clustered by K-means: isolates what LMBC adds."""
        return _measure(_landmark_spectral, work, imbalanced=True)

    @arm("kmeans-constrained")
    def kmeans_constrained(self, work: Work) -> Metrics:
        """K-means that is told the sizes, on the points; one start, since its starts take seconds."""
        return _measure(lambda p: _constrained(p.X, p, n_init=1), work)

    @arm("kmeans-constrained-on-embedding")
    def kmeans_constrained_on_embedding(self, work: Work) -> Metrics:
        """The strongest peer where classes are balanced: told the sizes, on the spectral embedding of the anchors."""

        def cluster(points: Points) -> Labels:
            return _constrained(spectral_embedding(*points.spectrum(), points.n_clusters), points, n_init=3)

        return _measure(cluster, work)

    def derive(self, arm: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The slope of log seconds over log points."""
        seconds = {int(m.partition("@")[2]): v for m, v in metrics.items() if m.startswith("seconds@")}
        if "seconds" in metrics and "points (timed)" in metrics:
            seconds[int(metrics["points (timed)"])] = metrics["seconds"]
        if len(seconds) < 2:
            return {}
        sizes = sorted(seconds)
        return {"slope": float(np.polyfit(np.log(sizes), np.log([seconds[n] for n in sizes]), 1)[0])}

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """What the balance costs on imbalanced data, and the times in words."""
        ours, without = means["lmbc"], means["lmbc-unbalanced"]
        imbalanced = "accuracy (imbalanced)"
        if imbalanced in ours and imbalanced in without:
            difference = ours[imbalanced] - without[imbalanced]
            told = "loses" if difference < 0 else "does not lose"
            others = ", ".join(
                f"{name} {means[name][imbalanced]:.3f}"
                for name in ("landmark-spectral", "kmeans")
                if imbalanced in means.get(name, {})
            )
            yield (
                f"Where every second class is cut to a quarter, the balance term {told}: accuracy "
                f"{ours[imbalanced]:.3f} with balance=1, {without[imbalanced]:.3f} with balance=0 ({others})."
            )
        kmeans = means.get("kmeans", {})
        shared = [m for m in ours if m.startswith("seconds@") and m in kmeans]
        if shared:
            largest = max(shared, key=lambda metric: int(metric.partition("@")[2]))
            yield (
                f"At {int(largest.partition('@')[2]):,} points LMBC took {ours[largest]:.2f} s, "
                f"{ours[largest] / kmeans[largest]:.1f} times what K-means with three starts took "
                "(CPU seconds, one thread)."
            )


def _clusters(given: str | None) -> int | None:
    if given is None:
        return None
    try:
        n_clusters = int(given)
    except ValueError:
        raise CannotMeasure(f"--clusters must be a whole number; got {given!r}") from None
    if n_clusters < 2:
        raise CannotMeasure(f"--clusters must be at least 2; got {n_clusters}")
    return n_clusters


def _points(table: Table, seed: int) -> Points:
    return Points(table.name, table.X, table.y, int(table.y.max()) + 1, seed)  # type: ignore[union-attr]


def _scaled(table: Table) -> Table:
    return Table(table.X / table.X.max(), table.y, table.name, table.provenance, table.licence)


def _reduced(table: Table) -> Table:
    X = PCA(PCA_COMPONENTS, svd_solver="covariance_eigh").fit_transform(table.X)
    return Table(X, table.y, table.name, table.provenance, table.licence)


def _thinned(points: Points) -> Points | None:
    """The points with every odd class cut to a quarter; None without classes."""
    if points.y is None:
        return None
    rng = np.random.default_rng(points.seed)
    kept = (points.y % 2 == 0) | (rng.random(len(points.y)) < KEPT_OF_ODD_CLASSES)
    chosen = np.flatnonzero(kept)
    enough = len(np.unique(points.X[chosen], axis=0)) >= max(FEWEST_ROWS, 6 * points.n_clusters)
    return points.rows(chosen) if enough and len(np.unique(points.y[chosen])) >= points.n_clusters else None


def _measure(
    cluster: Clusterer, work: Work, timed: Mapping[str, Workload] | None = None, *, imbalanced: bool = False
) -> Metrics:
    values, missing = _mean_scores(cluster, work.balanced, "")
    if imbalanced and work.imbalanced:
        thinned, thinned_missing = _mean_scores(cluster, work.imbalanced, " (imbalanced)")
        values, missing = values | thinned, missing | thinned_missing
    if timed:
        values["points (timed)"] = float(work.versus)
    elif timed is not None:
        reason = f"needs at least {FEWEST_TIMED} rows of --data"
        missing |= dict.fromkeys(("seconds", "slope", "ari (timed)"), reason)
    if timed and work.timed[work.versus].y is None:
        missing["ari (timed)"] = "needs --label, the column with the classes"
    return Metrics(values, timed or {}, missing)


def _mean_scores(cluster: Clusterer, sets: list[Points], suffix: str) -> tuple[dict[str, float], dict[str, str]]:
    by_set = {points.name: _scores(cluster(points), points) for points in sets}
    means = {
        f"{metric}{suffix}": float(np.mean([scores[metric] for scores in by_set.values()]))
        for metric in next(iter(by_set.values()), {})
    }
    each = {f"{metric}{suffix}/{name}": v for name, scores in by_set.items() for metric, v in scores.items()}
    lacks = [m for m in ("accuracy", "nmi", "ari") if f"{m}{suffix}" not in means]
    missing = {f"{metric}{suffix}": "needs --label, the column with the classes" for metric in lacks}
    return (means | each if len(by_set) > 1 else means), missing


def _scores(labels: Labels, points: Points) -> dict[str, float]:
    sizes = np.bincount(labels, minlength=points.n_clusters)
    scores = {
        "entropy": balance_entropy(labels, points.n_clusters),
        "smallest over largest": float(sizes.min() / sizes.max()),
    }
    if points.y is None:
        return {
            **scores,
            "objective": _objective(labels, points),
            "ari to lmbc": float(adjusted_rand_score(_lmbc(points, balance=1.0), labels)),
        }
    return {
        "accuracy": clustering_accuracy(points.y, labels),
        "nmi": float(normalized_mutual_info_score(points.y, labels)),
        "ari": float(adjusted_rand_score(points.y, labels)),
        **scores,
    }


def clustering_accuracy(y: NDArray[np.int64], labels: Labels) -> float:
    """Share of points in their class, with clusters matched to classes in the best way there is.

    >>> clustering_accuracy(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 1]))
    0.75
    """
    table = confusion_matrix(y, labels)
    return float(table[linear_sum_assignment(-table)].sum() / len(y))


def _timed(work: Work, cluster: Clusterer, sizes: tuple[int, ...]) -> dict[str, Workload]:
    """A clustering of each number of points for the stopwatch; the agreement with the classes is measured after it."""
    workloads = {}
    for n in sizes:
        points = work.timed.get(n)
        if points is None:
            continue
        metrics = partial(_agreement, points) if n == work.versus and points.y is not None else None
        name = "seconds" if n == work.versus else f"seconds@{n}"
        workloads[name] = Workload(partial(cluster, points), clock="cpu", repeats=1, warm_up=False, metrics=metrics)
    return workloads


def _agreement(points: Points, labels: Labels) -> dict[str, float]:
    return {"ari (timed)": float(adjusted_rand_score(points.y, labels))}


def _lmbc(points: Points, balance: float) -> Labels:
    anchors: Any = points.anchors
    model = LMBC(points.n_clusters, balance=balance, anchor_init=anchors, random_state=points.seed)
    return model.fit_predict(points.X)


def _objective(labels: Labels, points: Points) -> float:
    """LMBC's objective of any labels: where its descent from them starts."""
    anchors: Any = points.anchors
    model = LMBC(points.n_clusters, init=labels, max_iter=1, anchor_init=anchors, random_state=points.seed)  # type: ignore[arg-type]
    return model.fit(points.X).objective_path_[0]


def _lmbc_alone(points: Points) -> Labels:
    return LMBC(points.n_clusters, random_state=points.seed).fit_predict(points.X)


def _kmeans(points: Points, n_init: int) -> Labels:
    return KMeans(points.n_clusters, n_init=n_init, random_state=points.seed).fit_predict(points.X)


def _landmark_spectral(points: Points) -> Labels:
    return landmark_spectral_labels(*points.spectrum(), points.n_clusters, check_random_state(points.seed))


def _spectral(points: Points) -> Labels:
    model = SpectralClustering(
        points.n_clusters, affinity="nearest_neighbors", assign_labels="cluster_qr", random_state=points.seed
    )
    return model.fit_predict(points.X)


def _birch(points: Points) -> Labels:
    # Half the spread of the data: scikit-learn's default of 0.5 is in the unit of the data.
    threshold = 0.5 * float(np.sqrt(points.X.var(axis=0).sum()))
    return Birch(n_clusters=points.n_clusters, threshold=threshold).fit_predict(points.X).astype(np.int32)


def _constrained(X: NDArray[np.float64], points: Points, n_init: int) -> Labels:
    try:
        from k_means_constrained import KMeansConstrained
    except ImportError:
        raise Unavailable("k-means-constrained is not installed: pip install 'practicum[peers]'") from None
    even = len(X) / points.n_clusters
    model = KMeansConstrained(
        points.n_clusters,
        size_min=int((1 - TOLD_SIZES) * even),
        size_max=int(np.ceil((1 + TOLD_SIZES) * even)),
        random_state=points.seed,
        n_init=n_init,
    )
    return model.fit_predict(X).astype(np.int32)
