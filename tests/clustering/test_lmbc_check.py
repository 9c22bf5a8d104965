"""The check of LMBC on a user's own data, and the example."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import make_blobs

from practicum.catalog import Catalog
from practicum.checks import Request, run_check
from practicum.clustering.lmbc.check import LMBCCheck, Points, _thinned, clustering_accuracy
from practicum.toolbox.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmbc.py"


@pytest.fixture(scope="module")
def blobs():
    X, y = make_blobs(300, n_features=4, centers=3, cluster_std=0.7, random_state=3)
    return X, y


@pytest.fixture(scope="module")
def files(blobs, tmp_path_factory):
    """The same table in the three formats."""
    import pyarrow
    import pyarrow.parquet

    X, y = blobs
    folder = tmp_path_factory.mktemp("tables")
    names = np.array(["ash", "beech", "cedar"])[y]
    lines = [
        "a,b,c,d,kind",
        *(",".join([*map(repr, map(float, row)), name]) for row, name in zip(X, names, strict=True)),
    ]
    (folder / "trees.csv").write_text("\n".join(lines) + "\n")
    np.save(folder / "trees.npy", np.column_stack([X, y]))
    columns = {**{name: X[:, i] for i, name in enumerate("abcd")}, "kind": names}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "trees.parquet")
    return folder


@pytest.fixture
def check(tmp_path):
    catalog = Catalog()

    def run(seeds=2, **options):
        card = catalog["lmbc"]
        return run_check(card, catalog.load_check(card), seeds=seeds, jobs=1, out=tmp_path, **options)

    return run


@pytest.fixture(scope="module")
def of_csv(files, tmp_path_factory):
    """The result on the table as .csv."""
    catalog = Catalog()
    card = catalog["lmbc"]
    options = {"data": str(files / "trees.csv"), "options": {"label": "kind"}}
    return run_check(card, catalog.load_check(card), seeds=2, jobs=1, out=tmp_path_factory.mktemp("csv"), **options)


def test_a_table_with_classes_gets_every_verdict(of_csv):
    assert {claim.verdict for claim in of_csv.claims} <= {"holds", "does not hold", "inconclusive"}
    means = of_csv.means()
    assert means["lmbc"]["accuracy"] > 0.95
    assert means["kmeans"]["accuracy (imbalanced)"] > 0.5
    assert "slope" in means["lmbc"]


@pytest.mark.parametrize(("name", "label"), [("trees.npy", "4"), ("trees.parquet", "kind")])
def test_the_same_seed_gives_the_same_numbers_whatever_the_format(check, files, of_csv, name, label):
    result = check(seeds=1, data=str(files / name), options={"label": label})
    assert untimed(result) == untimed(of_csv)


def untimed(result):
    """Metrics of seed 0 that no stopwatch measured."""
    return {
        (row.arm, metric): value
        for row in result.rows
        for metric, value in row.metrics.items()
        if row.seed == 0 and "seconds" not in metric and metric != "slope"
    }


def test_without_classes_only_their_claims_are_not_measured(check, files, tmp_path):
    np.save(tmp_path / "points.npy", np.load(files / "trees.npy")[:, :4])
    result = check(data=str(tmp_path / "points.npy"), options={"clusters": "5"})
    verdicts = {claim.claim: claim for claim in result.claims}
    for claim in ("follows-the-manifold", "beyond-the-anchor-graph", "as-good-as-spectral", "no-worse-than-told-sizes"):
        assert verdicts[claim].verdict == "could not measure"
        assert "needs --label" in verdicts[claim].reason
    for claim in ("balanced", "balance-term-balances", "linear-time", "faster-than-spectral"):
        assert verdicts[claim].verdict != "could not measure"
    means = result.means()
    assert means["lmbc"]["ari to lmbc"] == 1.0
    assert means["kmeans"]["ari to lmbc"] < 1.0
    # LMBC ends lowest on its own objective; without the balance term another one is lowered.
    assert all(means["lmbc"]["objective"] <= of_arm["objective"] + 1e-9 for of_arm in means.values())


def test_too_few_rows_for_the_stopwatch_say_so(check, tmp_path, blobs):
    np.save(tmp_path / "few.npy", blobs[0][:90])
    result = check(data=str(tmp_path / "few.npy"), options={"clusters": "3"})
    slope = next(claim for claim in result.claims if claim.claim == "linear-time")
    assert (slope.verdict, "needs at least 200 rows" in slope.reason) == ("could not measure", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": "x"}, "--clusters must be a whole number; got 'x'"),
        ({"clusters": "1"}, "--clusters must be at least 2; got 1"),
        ({"clusters": "1000000"}, "--clusters 1000000: must be from 2 to 30, a tenth of the distinct rows"),
        ({}, "--data without --label needs --clusters"),
        ({"label": "colour"}, "colour"),
    ],
)
def test_an_option_that_does_not_fit_is_named(check, files, options, message):
    with pytest.raises(InputError, match=message):
        check(data=str(files / "trees.npy"), options=options)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (np.column_stack([np.arange(300.0), np.zeros(300)]), {"label": "1"}, "--label 1: all rows are of one class"),
        (np.ones((300, 2)), {"clusters": "3"}, "--data must have at least 60 distinct rows; odd.npy has 1"),
        (np.arange(24.0).reshape(12, 2), {"clusters": "2"}, "--data must have at least 60 distinct rows"),
    ],
)
def test_data_that_no_clustering_can_divide_are_refused(check, tmp_path, table, options, message):
    np.save(tmp_path / "odd.npy", table)
    with pytest.raises(InputError, match=message):
        check(data=str(tmp_path / "odd.npy"), options=options)


def test_what_the_method_does_not_take_is_refused(check):
    with pytest.raises(InputError, match="--model gpt: lmbc has no model"):
        check(model="gpt")
    with pytest.raises(InputError, match="--label goes with --data"):
        check(options={"label": "kind"})


def test_a_malformed_table_is_told_by_line_and_column(check, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("a,b,kind\n1.0,2.0,x\n1.0,two,y\n")
    with pytest.raises(InputError, match=r"bad\.csv.*line 3.*b"):
        check(data=str(path), options={"label": "kind"})


def test_the_embedded_work_of_a_seed_is_the_same_each_time():
    first, second = (LMBCCheck().prepare(Request(seed=1)) for _ in range(2))
    assert [points.name for points in first.balanced] == ["digits", "mfeat-pix"]
    assert list(first.timed) == [2000, 4000, 8000]
    for one, other in zip(first.balanced + first.imbalanced, second.balanced + second.imbalanced, strict=True):
        np.testing.assert_array_equal(one.X, other.X)
        np.testing.assert_array_equal(one.anchors, other.anchors)
    np.testing.assert_array_equal(first.timed[8000].X, second.timed[8000].X)


def test_accuracy_matches_clusters_to_classes():
    y = np.array([0, 0, 0, 1, 1, 2])
    assert clustering_accuracy(y, np.array([2, 2, 2, 0, 0, 1], np.int32)) == 1.0
    assert clustering_accuracy(y, np.zeros(6, np.int32)) == 0.5


def test_imbalanced_data_keep_even_classes_whole_and_a_quarter_of_the_odd():
    y = np.repeat(np.arange(4), 1000)
    thinned = _thinned(Points("p", np.arange(4000.0)[:, None], y, 4, seed=0))
    sizes = np.bincount(thinned.y)
    assert sizes[0] == sizes[2] == 1000
    assert abs(sizes[1] - 250) < 60
    assert abs(sizes[3] - 250) < 60
    assert _thinned(Points("p", np.zeros((4, 1)), None, 2, seed=0)) is None


def test_the_example_runs():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "adjusted Rand index" in ran.stdout
