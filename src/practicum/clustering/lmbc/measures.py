"""How balanced a partition is: the Schatten p-norm of its label matrix, and the entropy of its cluster sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def schatten_norm(labels: ArrayLike, p: float) -> float:
    r"""Schatten p-norm of a label matrix.

    .. math:: \|Y\|_{S_p} = \Big(\sum_i \sigma_i(Y)^p\Big)^{1/p} = \Big(\sum_k n_k^{p/2}\Big)^{1/p}

    The columns of a one-hot :math:`Y` are orthogonal with squared lengths :math:`n_k`, the cluster sizes, so no
    singular value decomposition is needed. For :math:`0 < p < 2` the norm is largest exactly when all clusters have
    the same size and smallest when one cluster has all points; at :math:`p = 2` it is :math:`\sqrt n` for every
    partition.

    Parameters
    ----------
    labels : array-like, shape (n,) of int, or (n, c)
        Cluster labels, or a label matrix. A label matrix with entries other than one-hot is decomposed.
    p : float
        Above 0. With p = 1 this is the nuclear norm.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        When p is not above 0, or labels is neither a vector of non-negative integers nor a finite matrix.

    References
    ----------
    Large Scale Manifold Balanced Clustering. ICML 2026.

    Examples
    --------
    >>> from practicum.clustering.lmbc import schatten_norm
    >>> schatten_norm([0, 0, 1, 1], p=1) > schatten_norm([0, 0, 0, 1], p=1)
    True
    >>> float(round(schatten_norm([0, 0, 0, 1], p=1) ** 2, 3))  # (sqrt 3 + sqrt 1) squared
    7.464
    """
    if not p > 0:
        raise ValueError(f"p must be above 0; got p={p!r}")
    Y = np.asarray(labels)
    if Y.ndim == 2:
        if not np.all(np.isfinite(Y)):
            raise ValueError("labels must be finite; the label matrix has NaN or infinite entries")
        one_hot = np.all((Y == 0) | (Y == 1)) and np.all(Y.sum(axis=1) == 1)
        squared = Y.sum(axis=0) if one_hot else np.linalg.svd(Y, compute_uv=False) ** 2
    else:
        squared = _sizes(Y)
    squared = squared[squared > 0].astype(np.float64)
    return float(np.sum(squared ** (p / 2)) ** (1 / p))


def balance_entropy(labels: ArrayLike, n_clusters: int) -> float:
    r"""Entropy of the cluster sizes relative to that of equal sizes.

    .. math:: -\frac{1}{\log c} \sum_k \frac{n_k}{n} \log \frac{n_k}{n}

    Parameters
    ----------
    labels : array-like of int, shape (n,)
        Labels in 0..n_clusters-1.
    n_clusters : int
        The number of clusters c, empty ones included.

    Returns
    -------
    float
        In [0, 1]: 1 for equal sizes, 0 when one cluster has all points. 1 when n_clusters is 1.

    Raises
    ------
    ValueError
        When labels has a value outside 0..n_clusters-1, or n_clusters is below 1.

    Examples
    --------
    >>> from practicum.clustering.lmbc import balance_entropy
    >>> balance_entropy([0, 0, 1, 1], n_clusters=2)
    1.0
    >>> balance_entropy([0, 0, 0, 0], n_clusters=2)
    0.0
    """
    if n_clusters < 1:
        raise ValueError(f"n_clusters must be at least 1; got n_clusters={n_clusters}")
    sizes = _sizes(np.asarray(labels))
    if len(sizes) > n_clusters:
        raise ValueError(f"labels must be in 0..{n_clusters - 1} for n_clusters={n_clusters}; got {len(sizes) - 1}")
    if n_clusters == 1:
        return 1.0
    shares = sizes[sizes > 0] / sizes.sum()
    return float(min(1.0, max(0.0, -np.sum(shares * np.log(shares)) / np.log(n_clusters))))


def _sizes(labels: NDArray) -> NDArray[np.int64]:
    if labels.ndim != 1 or labels.size == 0 or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ValueError(
            f"labels must be a non-empty vector of integers from 0; got shape {labels.shape}, dtype {labels.dtype}"
            + (f", smallest {labels.min()}" if labels.size and labels.dtype.kind in "if" else "")
        )
    return np.bincount(labels)
