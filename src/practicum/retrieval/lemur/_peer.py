"""Run an engine that cannot share our process: ``python _peer.py NAME WORK.npz OUT.json``.

maxsim-cpu may end its process where it runs on more than one thread. FastPlaid and XTR-WARP bring extensions built
for one version of torch, and may end theirs where that is not the one installed. ``OUT.json`` gets a list of
``{"setting", "ids", "cpu_seconds"}``, one a setting.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

N_PROBES = (2, 4, 8, 16, 32)
REPEATS = 3

Search = Callable[[], list[list[tuple[int, float]]]]


def main(name: str, work: str, out: str) -> None:
    """Index the documents of ``work``, and search its queries with every setting of the engine on one thread."""
    with np.load(work, allow_pickle=False) as arrays:
        documents = np.split(arrays["documents"], np.cumsum(arrays["document_lengths"])[:-1])
        queries = np.split(arrays["queries"], np.cumsum(arrays["query_lengths"])[:-1])
        k, seed = int(arrays["k"]), int(arrays["seed"])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for setting, search in ENGINES[name](folder, documents, queries, k, seed):
            search()
            seconds = []
            for _ in range(REPEATS):
                start = time.process_time()
                results = search()
                seconds.append(time.process_time() - start)
            ids = [[int(document) for document, _ in result][:k] for result in results]
            found.append({"setting": setting, "ids": ids, "cpu_seconds": statistics.median(seconds)})
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def maxsim_cpu(folder: str, documents: Any, queries: Any, k: int, seed: int) -> Iterator[tuple[str, Search]]:
    """maxsim-cpu, which scores every document."""
    from maxsim_cpu import maxsim_scores_variable

    def search() -> list[list[tuple[int, float]]]:
        found = []
        for query in queries:
            scores = np.asarray(maxsim_scores_variable(query, documents))
            best = np.argpartition(-scores, k - 1)[:k]
            found.append([(int(i), float(scores[i])) for i in best[np.argsort(-scores[best])]])
        return found

    yield "exact", search


def fast_plaid(folder: str, documents: Any, queries: Any, k: int, seed: int) -> Iterator[tuple[str, Search]]:
    """FastPlaid, by the number of lists it looks into for a query token."""
    from fast_plaid.search import FastPlaid

    documents, queries = _tensors(documents), _tensors(queries)
    engine = FastPlaid(index=folder, device="cpu")
    engine.create(documents_embeddings=documents, seed=seed)
    for n in N_PROBES:
        yield f"n_ivf_probe={n}", partial(engine.search, queries, top_k=k, n_ivf_probe=n, show_progress=False)


def xtr_warp(folder: str, documents: Any, queries: Any, k: int, seed: int) -> Iterator[tuple[str, Search]]:
    """XTR-WARP, by the number of clusters it looks into for a query token."""
    from xtr_warp import XTRWarp

    documents, queries = _tensors(documents), _tensors(queries)
    engine = XTRWarp(folder, device="cpu")
    engine.create(documents, device="cpu", seed=seed, show_progress=False)
    engine.load(device="cpu")
    for n in N_PROBES:
        yield f"nprobe={n}", partial(engine.search, queries, top_k=k, nprobe=n, num_threads=1, show_progress=False)


ENGINES = {"maxsim-cpu": maxsim_cpu, "fast-plaid": fast_plaid, "xtr-warp": xtr_warp}


def _tensors(sets: list[np.ndarray]) -> list[Any]:
    import torch

    torch.set_num_threads(1)
    return [torch.from_numpy(vectors) for vectors in sets]


if __name__ == "__main__":
    main(*sys.argv[1:])
