"""Time LEMUR beside the authors' code and exact MaxSim, interleaved; write results/benchmarks/lemur.json.

Run from the checkout: ``python benchmarks/lemur/speed.py [--official FOLDER]``. FOLDER is where the authors' package
(github.com/ejaasaari/lemur) was installed with ``pip install --target FOLDER --no-deps``; without it only exact
MaxSim is compared. It takes some minutes, and the first time some more to encode the corpus. Seconds are of CPU time
on one thread.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.checks.check import Workload
from practicum.checks.measure import limit_threads, machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.datasets import TokenVectors, docstring_vectors
from practicum.retrieval.lemur import LemurEncoder, LemurIndex, MultiVectors, maxsim, maxsim_rerank

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "lemur.json"
NOT_INSTALLED = "the authors' code is not installed"
K = 10
N_QUERIES = 100


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, help="folder with the authors' package")
    official = installed(parser.parse_args().official)
    figures = []
    with limit_threads(1):
        if official is not None:
            figures += reranking(*official)
            figures += document_vectors(official[0])
        for n_documents, at_least in ((1500, 20.0), (4000, 35.0)):
            figures += searching(n_documents, at_least, official)
    content = {
        "method": "lemur",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "numpy", "torch", "faiss-cpu", "llvmlite")),
        "official": "compared" if official is not None else NOT_INSTALLED,
        "ratios": figures,
    }
    write_json(OUT, content)
    for figure in figures:
        print(figure)
    if official is None:
        print(NOT_INSTALLED)


def installed(folder: Path | None) -> tuple[Any, Any] | None:
    """The authors' class and reranker, or None. Another package of the name exists on PyPI."""
    if folder is not None:
        sys.path.insert(0, str(folder.resolve()))
    try:
        return importlib.import_module("lemur").Lemur, importlib.import_module("lemur.maxsim").MaxSim
    except (ImportError, AttributeError):
        return None


def reranking(_: Any, reranker: Any) -> list[dict[str, Any]]:
    """Seconds of reranking over those of the authors' compiled kernel."""
    generator = torch.Generator().manual_seed(0)
    documents = MultiVectors(torch.randn(4000 * 64, 128, generator=generator), torch.full((4000,), 64))
    halves = documents.to(torch.bfloat16)
    # It keeps pointers to its arguments.
    tokens, lengths = documents.vectors.numpy(), documents.lengths.int().numpy()
    theirs = reranker(tokens, lengths)
    figures = []
    for n_tokens in (16, 32):
        queries = MultiVectors(torch.randn(64 * n_tokens, 128, generator=generator), torch.full((64,), n_tokens))
        for n_candidates in (30, 100):
            candidates = torch.stack([torch.randperm(4000, generator=generator)[:n_candidates] for _ in range(64)])
            peer = partial(
                theirs.rerank_subset,
                queries.vectors.numpy(),
                queries.lengths.int().numpy(),
                K,
                candidates.int().numpy(),
                1,
            )
            same = maxsim_rerank(queries, documents, candidates, K)[1].numpy() == peer()
            assert same.mean() > 0.999
            for stored, at_most in ((documents, 1.1), (halves, 0.7)):
                dtype = str(stored.vectors.dtype).removeprefix("torch.")
                what = f"reranking {n_candidates} documents of 64 tokens for {n_tokens} query tokens, {dtype}"
                ours = partial(maxsim_rerank, queries, stored, candidates, K)
                figures.append(beside(what, ours, peer, at_most=at_most, repeats=25))
    return figures


def document_vectors(model: Any) -> list[dict[str, Any]]:
    """Seconds of all documents' vectors, the factorisation included, over those of the authors' code."""
    documents = sets(docstring_vectors(1500).documents)
    figures = []
    for n_features, n_solve_tokens, at_most in ((512, 4096, 0.9), (2048, 16_384, 0.6)):
        encoder = LemurEncoder(
            n_features, epochs=0, n_train_docs=100, n_train_tokens=500, n_solve_tokens=n_solve_tokens, random_state=0
        ).fit(documents)
        theirs = fitted_by_them(model, documents, n_features, n_train=100, n_learn=500, n_solve=n_features)
        counts = documents.lengths.int()

        def ours(encoder: LemurEncoder = encoder) -> None:
            encoder._prepare_solver()
            encoder.encode_document(documents)

        peer = partial(theirs.compute_weights, documents.vectors, counts, n_solve_tokens, False)
        what = f"vectors of 1,500 documents, {n_features} features, {n_solve_tokens:,} tokens"
        figures.append(beside(what, ours, peer, at_most=at_most, repeats=3 if n_features == 512 else 1))
    return figures


def searching(n_documents: int, at_least: float, official: tuple[Any, Any] | None) -> list[dict[str, Any]]:
    """Queries a second at recall 0.9 over exact MaxSim, and over the authors' code with the same vectors."""
    pairs = docstring_vectors(n_documents, N_QUERIES, random_state=0)
    documents, queries = sets(pairs.documents), sets(pairs.queries)
    parameters = {"n_train_docs": 512, "n_train_tokens": 8000, "n_solve_tokens": 4096}
    encoder = LemurEncoder(512, epochs=5, random_state=0, **parameters).fit(documents)
    vectors = encoder.encode_document(documents)
    index = LemurIndex(encoder)
    index.add(documents, vectors=vectors)
    truth = maxsim(queries, documents).topk(K).indices
    order = encoder.estimate(queries, vectors).argsort(dim=1, descending=True)
    ranks = torch.sort((order[:, None, :] == truth[:, :, None]).int().argmax(dim=2).flatten()).values
    n_candidates = max(K, int(ranks[int(np.ceil(0.9 * len(ranks))) - 1]) + 1)
    ours = partial(index.search, queries, K, n_candidates=n_candidates)
    some = queries[:20]

    def exact() -> Any:
        return maxsim(some, documents).topk(K)

    where = f"{n_documents:,} documents, recall 0.90 by {n_candidates} candidates"
    against = beside(f"search over exact MaxSim, {where}", exact, ours, at_least=at_least, repeats=7, units=(20, 100))
    figures = [against]
    if official is not None:
        peer = searching_by_them(official, encoder, vectors, documents, queries, n_candidates)
        same = index.search(queries, K, n_candidates=n_candidates)[1] == peer()
        assert same.mean() > 0.99, same.mean()
        what = f"search over the authors', same vectors, {where}"
        figures.append(beside(what, peer, ours, at_least=1.0, repeats=15, units=(100, 100)))
    return figures


def searching_by_them(
    official: tuple[Any, Any],
    encoder: LemurEncoder,
    vectors: torch.Tensor,
    documents: MultiVectors,
    queries: MultiVectors,
    n_candidates: int,
) -> Callable[[], np.ndarray]:
    """The search of the authors' README, with our features and vectors in their model."""
    model = fitted_by_them(official[0], documents, encoder.n_features, n_train=100, n_learn=600, n_solve=600)
    theirs = dict(model.mlp.feature_extractor.named_parameters())
    ours = list(encoder.features_.parameters())
    assert [tuple(p.shape) for p in theirs.values()] == [tuple(p.shape) for p in ours]
    with torch.no_grad():
        for parameter, value in zip(theirs.values(), ours, strict=True):
            parameter.copy_(value)
    model.W = vectors
    tokens, lengths = documents.vectors.numpy(), documents.lengths.int().numpy()
    reranker = official[1](tokens, lengths)
    query_tokens, query_lengths = queries.vectors.numpy(), queries.lengths.int().numpy()

    def search() -> np.ndarray:
        # Named here so that they live as long as the reranker, which keeps pointers to them.
        _ = tokens, lengths
        features = model.compute_features((query_tokens, query_lengths))
        candidates = torch.topk(features @ model.W.T, n_candidates, dim=1).indices
        return reranker.rerank_subset(query_tokens, query_lengths, K, candidates.int().numpy(), 1)

    return search


def fitted_by_them(
    model: Any, documents: MultiVectors, n_features: int, *, n_train: int, n_learn: int, n_solve: int
) -> Any:
    """The authors' model, fitted as briefly as it allows."""
    fitted = model(device="cpu")
    fitted.fit(
        train=documents.vectors,
        train_counts=documents.lengths.int(),
        train_subset_size=n_train,
        learn_subset_size=n_learn,
        ols_sample_size=n_solve,
        final_hidden_dim=n_features,
        epochs=1,
        verbose=False,
    )
    return fitted


def beside(
    what: str,
    first: Callable[[], Any],
    second: Callable[[], Any],
    *,
    repeats: int,
    at_most: float | None = None,
    at_least: float | None = None,
    units: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """Seconds a unit of the first over those of the second, each the median of its repeats, taken in turn."""
    works = {
        name: Workload(call, clock="cpu", threads=1, repeats=repeats, warm_up=repeats > 1)
        for name, call in (("first", first), ("second", second))
    }
    timings, errors = time_workloads(works)
    if errors:
        raise next(iter(errors.values()))
    seconds = [timings[name]["value"] / n for name, n in zip(works, units, strict=True)]
    ratio = seconds[0] / seconds[1]
    holds = ratio <= at_most if at_most is not None else ratio >= (at_least or 0.0)
    target = {"at most": at_most} if at_most is not None else {"at least": at_least}
    return {"what": what, "ratio": ratio, **target, "met": bool(holds), "seconds": seconds, "repeats": repeats}


def sets(tokens: TokenVectors) -> MultiVectors:
    """The container that LEMUR takes."""
    return MultiVectors(tokens.vectors, tokens.lengths)


if __name__ == "__main__":
    main()
