"""The distance that a small set of anchors induces between all points, and its low-pass coordinates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, sparse
from scipy.sparse.linalg import LinearOperator
from sklearn.cluster import MiniBatchKMeans, kmeans_plusplus
from sklearn.utils import check_array

# Anchors only have to cover the data: a sample of this many rows is enough to place them.
SAMPLE_ROWS = 20_000
ANCHOR_EPOCHS = 30
RESOLUTION = 2.0**26
# Eigenvalues of the anchor graph lie in [0, 1]; below this one they are rounding.
NEGLIGIBLE_EIGENVALUE = 1e-8


def anchor_graph(X: ArrayLike, anchors: ArrayLike, n_neighbors: int = 5, *, batch_size: int = 8192) -> sparse.csr_array:
    r"""Weights of every point to its nearest anchors.

    With the :math:`s + 1` smallest squared distances :math:`d_1 \le \dots \le d_{s+1}` of a point to the anchors,

    .. math:: b_j = \frac{d_{s+1} - d_j}{s\, d_{s+1} - \sum_{l \le s} d_l}, \qquad j \le s,

    which is the closed form of the adaptive-neighbour problem: the weights need no bandwidth and do not change when
    all data are scaled. Where all :math:`s + 1` distances are the same each weight is :math:`1/s`.

    Parameters
    ----------
    X : array-like of float, shape (n, d)
    anchors : array-like of float, shape (m, d)
    n_neighbors : int
        s, below m.
    batch_size : int
        Rows at a time: the distances take ``batch_size * m * 8`` bytes.

    Returns
    -------
    scipy.sparse.csr_array of float64, shape (n, m)
        B, with s stored entries a row (zeros among them where distances tie); rows sum to 1.

    Raises
    ------
    ValueError
        When n_neighbors is below 1 or not below the number of anchors, or X and anchors have different widths.

    References
    ----------
    The weights are those of F. Nie, X. Wang, H. Huang: Clustering and projected clustering with adaptive
    neighbors. KDD 2014.

    Examples
    --------
    >>> import numpy as np
    >>> from practicum.clustering.lmbc import anchor_graph
    >>> B = anchor_graph([[0.0], [1.0]], anchors=[[0.0], [1.0], [3.0]], n_neighbors=2)
    >>> B.toarray().round(3).tolist()
    [[0.529, 0.471, 0.0], [0.429, 0.571, 0.0]]
    """
    points: NDArray = check_array(X, dtype=(np.float64, np.float32), input_name="X")
    centers: NDArray = check_array(anchors, dtype=(np.float64, np.float32), input_name="anchors")
    n, m, s = len(points), len(centers), n_neighbors
    if points.shape[1] != centers.shape[1]:
        raise ValueError(f"anchors must have the {points.shape[1]} columns of X; got {centers.shape[1]}")
    if not 1 <= s < m:
        raise ValueError(f"n_neighbors must be at least 1 and below the {m} distinct anchors; got n_neighbors={s}")
    columns = np.empty((n, s), dtype=np.int32)
    weights = np.empty((n, s))
    for rows, nearest, squared in nearest_anchors(points, centers, s + 1, batch_size):
        # The farthest of the s + 1 is the first column: its distance is the one the weights are measured from.
        closeness = squared[:, :1] - squared[:, 1:]
        total = closeness.sum(axis=1, keepdims=True)
        tied = total[:, 0] <= 0
        total[tied] = s
        closeness[tied] = 1.0
        weights[rows] = closeness / total
        columns[rows] = nearest[:, 1:]
    index_dtype = np.int32 if n * s < np.iinfo(np.int32).max else np.int64
    starts = np.arange(0, n * s + 1, s, dtype=index_dtype)
    return sparse.csr_array((weights.ravel(), columns.ravel().astype(index_dtype, copy=False), starts), shape=(n, m))


def nearest_anchors(
    X: NDArray, anchors: NDArray, k: int, batch_size: int
) -> Iterator[tuple[slice, NDArray[np.intp], NDArray[np.float64]]]:
    """Yield, block by block, the k nearest anchors of each row and the squared distances, farthest of the k first.

    Yields
    ------
    rows : slice
    nearest : ndarray of int, shape (rows, k)
    squared : ndarray of float64, shape (rows, k)
    """
    # Distances by one matrix product lose digits when the data are far from the origin.
    origin = anchors.mean(axis=0, dtype=np.float64)
    centred = anchors - origin
    transposed = np.ascontiguousarray(-2.0 * centred.T)
    squared_norms = np.einsum("ij,ij->i", centred, centred)
    buffer = np.empty((min(batch_size, len(X)), len(anchors)))
    for start in range(0, len(X), batch_size):
        rows = slice(start, min(start + batch_size, len(X)))
        block = X[rows] - origin
        distances = np.matmul(block, transposed, out=buffer[: len(block)])
        distances += squared_norms
        nearest = _smallest(distances, k)
        squared = np.take_along_axis(distances, nearest, axis=1)
        squared += np.einsum("ij,ij->i", block, block)[:, None]
        yield rows, nearest, np.maximum(squared, 0.0, out=squared)


def _smallest(values: NDArray, k: int) -> NDArray[np.intp]:
    """Columns of the k smallest values of each row, the k-th smallest first."""
    if k == values.shape[1]:
        return np.argsort(values, axis=1)[:, ::-1]
    nearest = np.argpartition(values, k - 1, axis=1)[:, :k]
    return np.roll(nearest, 1, axis=1)


def anchor_distance(R: ArrayLike | sparse.sparray) -> LinearOperator:
    r"""The anchor-induced distance between all pairs of points, as an operator that is never formed.

    .. math:: D_{ij} = \|r_i - r_j\|^2 = A_{ii} + A_{jj} - 2 A_{ij}, \qquad A = R R^\top

    so :math:`D = h 1^\top + 1 h^\top - 2 R R^\top` with :math:`h_i = \|r_i\|^2`, and a product with a (n, c) matrix
    costs :math:`O(n s c)` instead of :math:`O(n^2 c)`.

    Parameters
    ----------
    R : array-like or sparse array of float, shape (n, m)
        The normalised anchor graph :math:`B \Lambda^{-1/2}`, or any other coordinates.

    Returns
    -------
    scipy.sparse.linalg.LinearOperator of float64, shape (n, n)
        Symmetric.

    Raises
    ------
    ValueError
        When R is not a finite matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from practicum.clustering.lmbc import anchor_distance
    >>> D = anchor_distance([[0.0, 0.0], [3.0, 4.0]])
    >>> (D @ np.eye(2)).tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    R = check_array(R, dtype=np.float64, accept_sparse="csr", input_name="R")
    squares = R.multiply(R) if sparse.issparse(R) else R * R
    h = np.asarray(squares.sum(axis=1)).reshape(-1, 1)
    n = R.shape[0]

    def product(Y: NDArray) -> NDArray:
        Y = Y.reshape(n, -1)
        return h * Y.sum(axis=0) + h.T @ Y - 2.0 * (R @ (R.T @ Y))

    return LinearOperator((n, n), matvec=product, rmatvec=product, matmat=product, rmatmat=product, dtype=np.float64)


def place_anchors(X: NDArray, n_anchors: int, method: str, random_state: np.random.RandomState) -> NDArray[np.float64]:
    """Anchors for the rows of X, shape (m, d) with m <= n_anchors: distinct, and each the nearest of some row."""
    rows = X
    if len(X) > SAMPLE_ROWS:
        rows = X[random_state.choice(len(X), max(SAMPLE_ROWS, n_anchors), replace=False)]
    if method == "random":
        picked = random_state.choice(len(rows), n_anchors, replace=False)
        return np.unique(rows[picked].astype(np.float64), axis=0)
    # In units of the spread and rounded, so that the unit of the data does not decide ties by its last digit.
    origin = rows.mean(axis=0, dtype=np.float64)
    rows = rows - origin
    unit = np.abs(rows).max()
    rows /= unit
    np.round(rows * RESOLUTION, out=rows)
    rows /= RESOLUTION
    if method == "k-means++":
        centers, _ = kmeans_plusplus(rows, n_anchors, random_state=random_state)
    else:
        model = MiniBatchKMeans(
            n_anchors, n_init=1, max_iter=ANCHOR_EPOCHS, batch_size=1024, random_state=random_state
        ).fit(rows)
        centers = model.cluster_centers_[np.unique(model.labels_)]
    return np.unique(centers, axis=0) * unit + origin


def normalize(B: sparse.csr_array) -> tuple[sparse.csr_array, NDArray[np.float64]]:
    r"""Return :math:`R = B \Lambda^{-1/2}` and the diagonal of :math:`\Lambda^{-1/2}`.

    With :math:`\Lambda = diag(B^\top 1)`, the rows and columns of :math:`A = R R^\top` sum to 1. An anchor that is
    near no point gets weight 0.
    R overwrites the entries of B.
    """
    degrees = np.asarray(B.sum(axis=0)).ravel()
    scale = np.zeros_like(degrees)
    np.divide(1.0, np.sqrt(degrees), out=scale, where=degrees > 0)
    R = B
    R.data *= scale[R.indices]
    return R, scale


def spectrum(R: sparse.csr_array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Eigenvalues (m,), largest first, and eigenvectors (m, m) of :math:`C = R^\top R`; A has the same eigenvalues."""
    C = (R.T @ R).toarray()
    w, V = linalg.eigh((C + C.T) / 2, overwrite_a=True, check_finite=False)
    return np.clip(w[::-1], 0.0, 1.0), np.ascontiguousarray(V[:, ::-1])
