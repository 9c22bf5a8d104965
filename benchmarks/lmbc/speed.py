"""Time LMBC beside K-means and spectral clustering, interleaved, on one thread; write results/benchmarks/lmbc.json.

Run from the checkout: ``python benchmarks/lmbc/speed.py``. It takes some minutes. Seconds are of CPU time.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.datasets import make_blobs
from sklearn.decomposition import PCA

from practicum.checks.check import Workload
from practicum.checks.measure import MemoryGauge, machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.clustering.lmbc import LMBC
from practicum.datasets import mnist_shifted

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "lmbc.json"
LARGE = {"n_samples": 200_000, "n_features": 20, "centers": 10, "cluster_std": 4.0, "random_state": 0}


def main() -> None:
    """Measure and write."""
    # First, while the process has no freed memory that a fit could use unseen.
    of_large = large()
    shifted = mnist_shifted()
    order = np.random.default_rng(0).permutation(len(shifted.X))
    pixels = shifted.X[order]
    reduced = PCA(50, svd_solver="covariance_eigh").fit_transform(pixels)
    kmeans = KMeans(10, n_init=3, random_state=0)
    spectral = SpectralClustering(10, affinity="nearest_neighbors", assign_labels="cluster_qr", random_state=0)
    ratios = [
        *of_large,
        beside("K-means, three starts", kmeans, reduced, "MNIST by PCA, 45,000 x 50", 4, repeats=3),
        beside("spectral clustering", spectral, reduced[:10_000], "MNIST by PCA, 10,000 x 50", 0.2, repeats=1),
        beside("K-means, three starts", kmeans, pixels, "MNIST pixels, 45,000 x 784", 4, repeats=1),
    ]
    content = {
        "method": "lmbc",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "numpy", "scipy", "scikit-learn")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def beside(
    peer: str, model: KMeans | SpectralClustering, X: np.ndarray, data: str, at_most: float, *, repeats: int
) -> dict[str, Any]:
    """Seconds of LMBC over those of the peer, each the median of its repeats, taken in turn."""
    work = partial(Workload, clock="cpu", threads=1, repeats=repeats, warm_up=False)
    ours = LMBC(10, random_state=0)
    timings, errors = time_workloads({"lmbc": work(partial(ours.fit, X)), "peer": work(partial(model.fit, X))})
    if errors:
        raise next(iter(errors.values()))
    seconds, peers = timings["lmbc"]["value"], timings["peer"]["value"]
    row = figure(f"seconds over those of {peer}", data, seconds / peers, at_most)
    return {**row, "seconds": seconds, "peer seconds": peers, "repeats": repeats}


def large() -> list[dict[str, Any]]:
    """Seconds and memory for 200,000 points."""
    X, _ = make_blobs(**LARGE)
    model = LMBC(10, random_state=0)
    fit = Workload(partial(model.fit, X), clock="cpu", repeats=1, warm_up=False)
    with MemoryGauge() as gauge:
        timings, errors = time_workloads({"lmbc": fit})
    if errors:
        raise errors["lmbc"]
    if gauge.added is None:
        raise RuntimeError("memory added is read from /proc, which this system does not have")
    held = X.nbytes + gauge.added
    needed = X.nbytes + len(X) * model.transform(X[:1]).shape[1] * 8
    data = "blobs, 200,000 x 20, 10 clusters"
    return [
        figure("CPU seconds of a fit", data, timings["lmbc"]["value"], 120),
        figure("GB of memory, the data included", data, held / 1e9, 2),
        figure("memory over that of the data and their coordinates", data, held / needed, 3),
    ]


def figure(what: str, data: str, value: float, at_most: float) -> dict[str, Any]:
    """A row of the table."""
    return {"what": what, "data": data, "value": value, "target": f"at most {at_most:g}", "met": value <= at_most}


if __name__ == "__main__":
    main()
