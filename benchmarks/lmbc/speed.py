"""Time LMBC beside K-means and spectral clustering, interleaved, on one thread; write results/benchmarks/lmbc.json.

Run from the checkout: ``python benchmarks/lmbc/speed.py``. It takes some minutes. Seconds are of CPU time.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.datasets import make_blobs
from sklearn.decomposition import PCA

from practicum.checks.check import Workload
from practicum.checks.measure import MemoryGauge, limit_threads, machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.clustering.lmbc import LMBC
from practicum.datasets import mnist_shifted

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "lmbc.json"
LARGE = {"n_samples": 200_000, "n_features": 20, "centers": 10, "cluster_std": 4.0, "random_state": 0}


def main() -> None:
    """Measure and write."""
    shifted = mnist_shifted()
    order = np.random.default_rng(0).permutation(len(shifted.X))
    pixels = shifted.X[order]
    reduced = PCA(50, svd_solver="covariance_eigh").fit_transform(pixels)
    spectral = SpectralClustering(10, affinity="nearest_neighbors", assign_labels="cluster_qr", random_state=0)
    ratios = [
        beside("K-means, three starts", KMeans(10, n_init=3, random_state=0), reduced, "MNIST, 45,000 x 50", "<= 4", 3),
        beside("K-means, three starts", KMeans(10, n_init=3, random_state=0), pixels, "MNIST, 45,000 x 784", "<= 4", 1),
        beside("spectral clustering", spectral, reduced[:10_000], "MNIST, 10,000 x 50", "<= 0.2", 1),
        *large(),
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


def beside(peer: str, model: KMeans | SpectralClustering, X: np.ndarray, data: str, target: str, repeats: int) -> dict:
    """Seconds of LMBC over those of the peer."""
    work = partial(Workload, clock="cpu", threads=1, repeats=repeats, warm_up=False)
    ours = LMBC(10, random_state=0)
    timings, errors = time_workloads({"lmbc": work(partial(ours.fit, X)), "peer": work(partial(model.fit, X))})
    if errors:
        raise next(iter(errors.values()))
    seconds, peers = timings["lmbc"]["value"], timings["peer"]["value"]
    return {
        "what": f"seconds over those of {peer}",
        "data": data,
        "value": seconds / peers,
        "target": target,
        "seconds": seconds,
        "peer seconds": peers,
    }


def large() -> list[dict]:
    """Seconds and memory for 200,000 points."""
    X, _ = make_blobs(**LARGE)
    model = LMBC(10, random_state=0)
    seconds = []

    def fit() -> None:
        model.fit(X)

    with limit_threads(1), MemoryGauge() as gauge:
        timings, errors = time_workloads({"lmbc": Workload(fit, clock="cpu", repeats=1, warm_up=False)})
    if errors:
        raise errors["lmbc"]
    seconds = timings["lmbc"]["value"]
    needed = X.nbytes + len(X) * model.transform(X[:1]).shape[1] * 8
    data = "blobs, 200,000 x 20"
    return [
        {"what": "CPU seconds of a fit", "data": data, "value": seconds, "target": "< 120"},
        {"what": "GB of memory added by a fit", "data": data, "value": (gauge.added or 0) / 1e9, "target": "< 2"},
        {
            "what": "memory added over that of the data and their coordinates",
            "data": data,
            "value": (gauge.added or 0) / needed,
            "target": "<= 3",
        },
    ]


if __name__ == "__main__":
    main()
