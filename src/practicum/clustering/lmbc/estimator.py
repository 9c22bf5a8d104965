"""The scikit-learn estimator."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from practicum.clustering.lmbc.anchors import (
    NEGLIGIBLE_EIGENVALUE,
    anchor_graph,
    nearest_anchors,
    normalize,
    place_anchors,
    spectrum,
)
from practicum.clustering.lmbc.descent import SizeTerm, descend
from practicum.clustering.lmbc.measures import balance_entropy

# K-means for the start is restarted this often, on a sample: the best centres then label all points.
START_RESTARTS = 10
START_ROWS = 10_000


class LMBC(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):
    r"""Large-scale manifold balanced clustering.

    K-means minimises :math:`\tfrac12 tr(F^\top D F)` with :math:`F = Y (Y^\top Y)^{-1/2}`, :math:`Y` the one-hot
    labels and :math:`D` the squared Euclidean distances: :math:`F F^\top` is a similarity graph that the labels
    make. LMBC keeps this and changes two things. :math:`D` is the distance that m anchors induce: with the anchor
    graph :math:`B`, :math:`A = B \Lambda^{-1} B^\top` is a doubly stochastic similarity between all points, and

    .. math:: D_{ij} = (A^t)_{ii} + (A^t)_{jj} - 2 (A^t)_{ij} = \|e_i - e_j\|^2,

    so distances follow curved clusters, and neither A nor D is ever formed. And the labels are rewarded for a large
    Schatten p-norm, :math:`\|Y\|_{S_p}^p = \sum_k n_k^{p/2}`, which is largest for clusters of equal size:

    .. math:: J(Y) = \sum_i \|e_i\|^2 - \sum_k \frac{\|M_k\|^2}{n_k} - \lambda \sum_k n_k^{p/2},
        \qquad M_k = \sum_{i \in C_k} e_i.

    J is lowered by exact block coordinate descent on the labels, from a start by landmark spectral clustering. The
    cost is :math:`O(n d m)` for the anchor graph and :math:`O(n r c)` a sweep.

    The paper is known to us by its abstract: the anchor distance, the diffusion of order t, the unit of ``balance``
    and the solver are our choices.

    Parameters
    ----------
    n_clusters : int
        c.
    n_anchors : int or "auto"
        m; "auto" is ``min(max(300, 30 c), n // 3, 1000)``, and on few rows at least what c and s need. Fewer are
        used where anchors coincide or are nearest to no point.
    n_neighbors : int
        s, the anchors each point is tied to.
    diffusion : int
        t, the power of A. 1 is the plain anchor distance; more steps smooth it.
    n_components : int or "auto"
        r, the number of eigenvectors of A that are kept; "auto" is ``min(50, 5 c)``, less where A has a lower rank.
    p : float
        Of the Schatten norm, in (0, 2); 1 is the nuclear norm.
    balance : float
        Weight of the balance term, free of units: at 1 and at equal sizes, a point more in a cluster is worth the
        mean variance of a point under :math:`A^t`, components beyond r included. 0 leaves the term out. Lower it
        where the true classes differ in size.
    anchor_init : {"kmeans", "k-means++", "random"} or array-like of shape (m, d)
        How anchors are placed, or the anchors themselves.
    init : {"spectral", "kmeans", "random"} or array-like of int, shape (n,)
        Where the descent starts: landmark spectral clustering, K-means on the coordinates, random labels of equal
        sizes, or labels in 0..c-1.
    n_init : int
        Starts; the one with the lowest J is kept.
    max_iter : int
        Most sweeps.
    tol : float
        The descent ends when a sweep lowers J by less than this share of the total variance of the coordinates.
    batch_size : int
        Rows at a time: bounds the memory for distances to ``batch_size * m * 8`` bytes.
    random_state : int, RandomState or None

    Attributes
    ----------
    labels_ : ndarray of int32, shape (n,)
        Where the descent ended. ``predict`` of the training data may differ on border points, because it has no
        size term.
    cluster_sizes_ : ndarray of int64, shape (c,)
    anchors_ : ndarray of float64, shape (m, d)
    objective_ : float
        J of ``labels_``.
    objective_path_ : list of float
        J at the start and after every sweep; never rises.
    n_iter_ : int
        Sweeps of the start that was kept.
    balance_entropy_ : float
        Entropy of the sizes over log c, in [0, 1].
    balance_weight_ : float
        :math:`\lambda`, which ``balance`` was turned into.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Where X had them.

    Warns
    -----
    ConvergenceWarning
        When X has fewer distinct rows than n_clusters. Each distinct row then is a cluster and the other labels stay
        unused; on rows that are all the same, ``balance`` > 0 splits them at random into clusters of equal size.

    References
    ----------
    Large Scale Manifold Balanced Clustering. ICML 2026.

    Manifold Clustering with Schatten p-norm Maximization. arXiv:2504.20390.

    Examples
    --------
    >>> from practicum.clustering.lmbc import LMBC
    >>> from sklearn.datasets import make_circles
    >>> from sklearn.metrics import adjusted_rand_score
    >>> X, y = make_circles(1000, factor=0.5, noise=0.03, random_state=0)
    >>> model = LMBC(n_clusters=2, random_state=0).fit(X)
    >>> adjusted_rand_score(y, model.labels_) > 0.99
    True
    >>> model.predict(X[:3]).shape, model.transform(X[:3]).shape
    ((3,), (3, 10))
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_anchors: int | str = "auto",
        n_neighbors: int = 5,
        diffusion: int = 3,
        n_components: int | str = "auto",
        p: float = 1.0,
        balance: float = 1.0,
        anchor_init: str | ArrayLike = "kmeans",
        init: str | ArrayLike = "spectral",
        n_init: int = 1,
        max_iter: int = 50,
        tol: float = 1e-6,
        batch_size: int = 8192,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_anchors = n_anchors
        self.n_neighbors = n_neighbors
        self.diffusion = diffusion
        self.n_components = n_components
        self.p = p
        self.balance = balance
        self.anchor_init = anchor_init
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: None = None) -> LMBC:
        """Cluster the rows of X.

        Parameters
        ----------
        X : array-like of float32 or float64, shape (n, d)
        y : None
            Ignored.

        Returns
        -------
        LMBC
            Itself.

        Raises
        ------
        ValueError
            When X is not a finite dense matrix, or a parameter is out of range; the message names it.
        """
        points: NDArray = validate_data(self, X, dtype=(np.float64, np.float32))
        start = self._check_parameters(points)
        random_state = check_random_state(self.random_state)
        if self.n_clusters == 1:
            return self._fit_groups(
                points, points.mean(axis=0, dtype=np.float64)[None], np.zeros(len(points), dtype=np.int32)
            )
        distinct = _few_distinct_rows(points, self.n_clusters)
        if distinct is not None:
            return self._fit_distinct(points, *distinct, random_state)
        return self._fit_manifold(points, start, random_state)

    def predict(self, X: ArrayLike) -> NDArray[np.int32]:
        r"""Label of the nearest cluster, :math:`\arg\min_k \|e(x) - M_k / n_k\|^2`; sizes play no part.

        Parameters
        ----------
        X : array-like of float, shape (n, d)

        Returns
        -------
        ndarray of int32, shape (n,)

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before `fit`.
        ValueError
            When X is not a finite dense matrix with the columns of the training data.
        """
        check_is_fitted(self)
        points: NDArray = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        labels = np.empty(len(points), dtype=np.int32)
        if self._centers is None:
            for rows, nearest, _ in nearest_anchors(points, self.anchors_, 1, self.batch_size):
                labels[rows] = self._groups[nearest[:, 0]]  # type: ignore[index]
            return labels
        squared_norms = np.einsum("ij,ij->i", self._centers, self._centers)
        for start in range(0, len(points), self.batch_size):
            rows = slice(start, start + self.batch_size)
            labels[rows] = (squared_norms - 2.0 * (self._coordinates(points[rows]) @ self._centers.T)).argmin(axis=1)
        return labels

    def transform(self, X: ArrayLike) -> NDArray[np.float64] | NDArray[np.float32]:
        """Coordinates e(x) in which squared Euclidean distances are the anchor-induced distances.

        Parameters
        ----------
        X : array-like of float, shape (n, d)

        Returns
        -------
        ndarray of the dtype of X, shape (n, r)

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before `fit`.
        ValueError
            When X is not a finite dense matrix with the columns of the training data.
        """
        check_is_fitted(self)
        points: NDArray = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        return self._coordinates(points).astype(points.dtype, copy=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return self._projection.shape[1]

    def _coordinates(self, X: NDArray) -> NDArray[np.float64]:
        if self._centers is None:
            columns = np.concatenate(
                [near[:, 0] for _, near, _ in nearest_anchors(X, self.anchors_, 1, self.batch_size)]
            )
            return self._projection[columns].toarray()
        B = anchor_graph(X, self.anchors_, self.n_neighbors, batch_size=self.batch_size)
        return B @ self._projection

    def _check_parameters(self, X: NDArray) -> NDArray[np.int32] | None:
        """Raise ValueError for the first parameter out of range; return the labels to start from, if given."""
        n, c = len(X), self.n_clusters
        if not _is_int(c) or not 1 <= c <= n:
            raise ValueError(f"n_clusters must be an int from 1 to the number of rows; got {c!r} with n_samples={n}")
        for name, least in (("n_neighbors", 1), ("diffusion", 1), ("n_init", 1), ("max_iter", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}; got {name}={value!r}")
        if not _is_real(self.p) or not 0 < self.p < 2:
            raise ValueError(f"p must be above 0 and below 2 (at p=2 every partition has the norm n); got p={self.p!r}")
        for name in ("balance", "tol"):
            value = getattr(self, name)
            if not _is_real(value) or not 0 <= value < np.inf:
                raise ValueError(f"{name} must be a finite number of at least 0; got {name}={value!r}")
        m: Any = self.n_anchors
        if m != "auto" and (not _is_int(m) or not c <= m <= n):
            raise ValueError(
                f"n_anchors must be 'auto' or an int from n_clusters={c} to the number of rows, {n};"
                f" got n_anchors={self.n_anchors!r}"
            )
        r: Any = self.n_components
        if r != "auto" and (not _is_int(r) or r < 1):
            raise ValueError(
                f"n_components must be 'auto' or an int of at least 1; got n_components={self.n_components!r}"
            )
        if isinstance(self.anchor_init, str) and self.anchor_init not in ("kmeans", "k-means++", "random"):
            raise ValueError(
                "anchor_init must be 'kmeans', 'k-means++', 'random' or an array of anchors;"
                f" got anchor_init={self.anchor_init!r}"
            )
        if isinstance(self.init, str):
            if self.init not in ("spectral", "kmeans", "random"):
                raise ValueError(
                    f"init must be 'spectral', 'kmeans', 'random' or an array of labels; got init={self.init!r}"
                )
            return None
        return _check_labels(self.init, n, c)

    def _anchors(self, X: NDArray, random_state: np.random.RandomState) -> NDArray[np.float64]:
        c, s = self.n_clusters, self.n_neighbors
        if isinstance(self.anchor_init, str):
            m = self.n_anchors
            if m == "auto":
                m = max(min(max(300, 30 * c), len(X) // 3, 1000), min(len(X), max(c, s + 1)))
            anchors = place_anchors(X, int(m), self.anchor_init, random_state)
        else:
            given = check_array(self.anchor_init, dtype=np.float64, input_name="anchor_init")
            if given.shape[1] != X.shape[1] or len(given) < c:
                raise ValueError(
                    f"anchor_init must have at least n_clusters={c} rows and the {X.shape[1]} columns of X;"
                    f" got shape {given.shape}"
                )
            anchors = np.unique(given, axis=0)
        if s >= len(anchors):
            raise ValueError(
                f"n_neighbors must be below the number of distinct anchors, {len(anchors)}; got n_neighbors={s}"
            )
        return anchors

    def _fit_manifold(self, X: NDArray, start: NDArray[np.int32] | None, random_state: np.random.RandomState) -> LMBC:
        c, t = self.n_clusters, self.diffusion
        anchors = self._anchors(X, random_state)
        R, scale = normalize(anchor_graph(X, anchors, self.n_neighbors, batch_size=self.batch_size))
        w, V = spectrum(R)
        if self.n_components == "auto":
            r = max(min(50, 5 * c, int(np.sum(w > NEGLIGIBLE_EIGENVALUE))), min(c, len(anchors)))
        elif int(self.n_components) <= len(anchors):
            r = int(self.n_components)
        else:
            raise ValueError(
                f"n_components must be at most the number of distinct anchors, {len(anchors)};"
                f" got n_components={self.n_components}"
            )
        projection = V[:, :r] * w[:r] ** ((t - 1) / 2)
        coordinates = R @ projection
        # The variance of A^t itself, its dropped components included: tr(A^t) less the constant one.
        weight = self._balance_weight(float(np.sum(w**t)) - 1.0, len(X))
        size_term = SizeTerm(weight, self.p) if self.balance > 0 else None
        best = None
        for _ in range(self.n_init):
            labels = self._start(R, w, V, coordinates, random_state) if start is None else start
            found = descend(
                coordinates,
                labels,
                c,
                size_term,
                max_iter=self.max_iter,
                tol=self.tol,
                batch_size=self.batch_size,
                random_state=random_state,
            )
            if best is None or found.path[-1] < best.path[-1]:
                best = found
        assert best is not None
        self.anchors_ = anchors
        self._projection = scale[:, None] * projection
        self._centers: NDArray[np.float64] | None = best.partition.sums / best.partition.sizes[:, None]
        self._groups: NDArray[np.int32] | None = None
        return self._set_result(best.partition.labels, best.path, best.n_iter, weight)

    def _balance_weight(self, variance: float, n: int) -> float:
        half = self.p / 2
        return float(self.balance * (variance / n) / (half * (n / self.n_clusters) ** (half - 1)))

    def _start(
        self,
        R: sparse.csr_array,
        w: NDArray[np.float64],
        V: NDArray[np.float64],
        coordinates: NDArray[np.float64],
        random_state: np.random.RandomState,
    ) -> NDArray[np.int32]:
        c, n = self.n_clusters, len(coordinates)
        if self.init == "random":
            return random_state.permutation(np.arange(n, dtype=np.int32) % c)
        if self.init == "kmeans":
            return _kmeans_labels(coordinates, c, random_state)
        return landmark_spectral_labels(R, w, V, c, random_state)

    def _fit_distinct(
        self, X: NDArray, distinct: NDArray, labels: NDArray[np.int32], random_state: np.random.RandomState
    ) -> LMBC:
        """Every distinct row is a cluster; rows that are all the same are split at random if balance asks for it."""
        if len(distinct) < self.n_clusters:
            warnings.warn(
                f"X has {len(distinct)} distinct rows, fewer than n_clusters={self.n_clusters}",
                ConvergenceWarning,
                stacklevel=3,
            )
        if len(distinct) == 1 and self.balance > 0:
            labels = random_state.permutation(np.arange(len(X), dtype=np.int32) % self.n_clusters)
            return self._fit_groups(X, distinct.astype(np.float64), labels)
        return self._fit_groups(X, distinct.astype(np.float64), labels)

    def _fit_groups(self, X: NDArray, anchors: NDArray[np.float64], labels: NDArray[np.int32]) -> LMBC:
        """With s = 1 and an anchor a group, A averages within groups: its coordinates need no eigenvectors."""
        members = np.zeros(len(anchors))
        if len(anchors) == 1:
            members[0] = len(X)
        else:
            members += np.bincount(labels, minlength=len(anchors))
        self.anchors_ = anchors
        self._projection = sparse.diags_array(1.0 / np.sqrt(members), format="csr")
        self._centers = None
        self._groups = np.arange(len(anchors), dtype=np.int32)
        sizes = np.bincount(labels, minlength=self.n_clusters).astype(np.float64)
        weight = self._balance_weight(len(anchors) - 1.0, len(X))
        J = -SizeTerm(weight, self.p).value(sizes) if self.balance > 0 else 0.0
        return self._set_result(labels, [J], 0, weight)

    def _set_result(self, labels: NDArray[np.int32], path: list[float], n_iter: int, weight: float) -> LMBC:
        self.labels_ = labels
        self.cluster_sizes_ = np.bincount(labels, minlength=self.n_clusters)
        self.objective_path_ = path
        self.objective_ = path[-1]
        self.n_iter_ = n_iter
        self.balance_weight_ = weight
        self.balance_entropy_ = balance_entropy(labels, self.n_clusters)
        return self


def landmark_spectral_labels(
    R: sparse.csr_array,
    w: NDArray[np.float64],
    V: NDArray[np.float64],
    n_clusters: int,
    random_state: np.random.RandomState,
) -> NDArray[np.int32]:
    """Landmark spectral clustering: K-means on the rows, scaled to length 1, of the top eigenvectors of A.

    Parameters
    ----------
    R : csr array, shape (n, m)
    w, V
        From `practicum.clustering.lmbc.anchors.spectrum`.
    n_clusters : int
    random_state : RandomState

    Returns
    -------
    ndarray of int32, shape (n,)
    """
    return _kmeans_labels(spectral_embedding(R, w, V, n_clusters), n_clusters, random_state)


def spectral_embedding(
    R: sparse.csr_array, w: NDArray[np.float64], V: NDArray[np.float64], n_components: int
) -> NDArray[np.float64]:
    """Rows, scaled to length 1, of the top eigenvectors of A, shape (n, n_components)."""
    scale = np.zeros(min(n_components, len(w)))
    top = w[: len(scale)]
    np.divide(1.0, np.sqrt(top), out=scale, where=top > NEGLIGIBLE_EIGENVALUE)
    embedding = R @ (V[:, : len(scale)] * scale)
    embedding /= np.maximum(np.linalg.norm(embedding, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return embedding


def _kmeans_labels(points: NDArray[np.float64], n_clusters: int, random_state: np.random.RandomState) -> NDArray:
    """K-means, with the restarts on a sample of the points where there are many."""
    if len(points) <= START_ROWS:
        return KMeans(n_clusters, n_init=START_RESTARTS, random_state=random_state).fit_predict(points)
    sample = points[random_state.choice(len(points), max(START_ROWS, n_clusters), replace=False)]
    centers = KMeans(n_clusters, n_init=START_RESTARTS, random_state=random_state).fit(sample).cluster_centers_
    return KMeans(n_clusters, init=centers, n_init=1).fit_predict(points)


def _few_distinct_rows(X: NDArray, n_clusters: int) -> tuple[NDArray, NDArray[np.int32]] | None:
    """The distinct rows, in order of appearance, and the one each row is; None if there are more than n_clusters."""
    sample = X[: min(len(X), max(1000, 4 * n_clusters))]
    if len(sample) < len(X) and len(np.unique(sample, axis=0)) > n_clusters:
        return None
    rows, first, inverse = np.unique(X, axis=0, return_index=True, return_inverse=True)
    if len(rows) > n_clusters:
        return None
    rank = np.empty(len(rows), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(rows))
    return rows[np.argsort(first)], rank[inverse.ravel()]


def _check_labels(init: ArrayLike, n: int, n_clusters: int) -> NDArray[np.int32]:
    labels = np.asarray(init)
    if labels.shape != (n,) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"init must be one int label for each of the {n} rows; got shape {labels.shape}, dtype {labels.dtype}"
        )
    if labels.min() < 0 or labels.max() >= n_clusters:
        raise ValueError(
            f"init must have labels in 0..{n_clusters - 1}; got labels from {labels.min()} to {labels.max()}"
        )
    return labels.astype(np.int32)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
