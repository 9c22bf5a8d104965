"""The claims about LEMUR, measured.

Every arm finds candidates in its own way and has them scored by exact MaxSim. Its recall is that of the exact top k;
its speed is measured at the fewest candidates with which it reaches a level of recall on the queries.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from practicum.checks.check import Check, Comparison, Metrics, Request, Unavailable, Workload, arm
from practicum.datasets import (
    DataFileError,
    TokenVectors,
    docstring_vectors,
    docstrings,
    encode_texts,
    read_multivectors_npz,
    read_text_pairs,
)
from practicum.models import load_token_encoder
from practicum.retrieval.lemur import LemurEncoder, LemurIndex, MultiVectors, maxsim, maxsim_rerank
from practicum.retrieval.lemur._baselines import Muvera, TokenIndex, mean_pooled
from practicum.retrieval.lemur._flat import flat_search
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires

LEVELS = (0.80, 0.90, 0.95, 0.99)
# Where the arms beside the main ones are timed.
SOME_LEVELS = (0.80, 0.90)
DIMENSION = 128
ADDED_PART = 0.2
EXACT_QUERIES = 10
# Nearest tokens: lists looked into and tokens taken for each query token.
TOKEN_SETTINGS = ((1, 16), (2, 32), (4, 64), (4, 256), (8, 256))
EF_SEARCHES = (16, 32, 64, 128, 256, 512, 1024)
PEER_SECONDS = 900
NOT_FOUND = 2**62


@dataclass(frozen=True)
class Sizes:
    """What a scale fixes."""

    n_documents: int
    n_queries: int
    n_timed: int
    k: int
    n_features: int
    epochs: int
    n_train_docs: int
    n_train_tokens: int
    n_solve_tokens: int


QUICK = Sizes(1500, 100, 25, 10, 512, 5, 512, 8000, 4096)
FULL = Sizes(20_000, 500, 100, 100, 1024, 5, 2048, 16_384, 4096)
PAPER = Sizes(1_000_000, 1000, 200, 100, 2048, 100, 8192, 100_000, 16_384)


@dataclass
class Corpus:
    """The work of a seed.

    ``exact`` has the MaxSim of every query with every document, and ``truth`` the k best documents of each query.
    ``added`` marks the documents that come after the fit in the incremental arm.
    """

    sizes: Sizes
    seed: int
    device: str
    source: str
    document_tokens: TokenVectors
    query_tokens: TokenVectors
    exact: np.ndarray
    truth: np.ndarray
    added: np.ndarray
    memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def documents(self) -> MultiVectors:
        """The documents' tokens."""
        return self._once("documents", lambda: _multivectors(self.document_tokens))

    @property
    def queries(self) -> MultiVectors:
        """The queries' tokens."""
        return self._once("queries", lambda: _multivectors(self.query_tokens))

    @property
    def timed_queries(self) -> MultiVectors:
        """Those that the stopwatch sees."""
        return self.queries[: self.sizes.n_timed]

    def fitted(self, epochs: int) -> tuple[LemurEncoder, torch.Tensor]:
        """The encoder fitted on all documents, and their vectors; fitted once for the arms of one process."""

        def fit() -> tuple[LemurEncoder, torch.Tensor]:
            encoder = self.encoder(epochs).fit(self.documents)
            return encoder, encoder.encode_document(self.documents)

        return self._once(f"encoder of {epochs} epochs", fit)

    def encoder(self, epochs: int) -> LemurEncoder:
        """An encoder of this scale."""
        s = self.sizes
        return LemurEncoder(
            s.n_features,
            epochs=epochs,
            n_train_docs=s.n_train_docs,
            n_train_tokens=s.n_train_tokens,
            n_solve_tokens=s.n_solve_tokens,
            random_state=self.seed,
            device=self.device,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "memo": {}}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]


def qps(level: float) -> str:
    """Name of the metric of speed at a level of recall."""
    return f"queries_per_second@{level:.2f}"


class LemurCheck(Check):
    """LEMUR against exact MaxSim, MUVERA, nearest tokens and mean pooling."""

    comparisons = (
        Comparison(
            "faster-at-equal-recall",
            metric=qps(0.80),
            arm="lemur",
            against=("muvera-10240", "token-ann"),
            ratio_at_least={"quick": 2.0, "full": 3.0, "paper": 3.0},
            timed=True,
        ),
        Comparison(
            "compact",
            metric="candidate_recall",
            arm="lemur",
            against="muvera-10240",
            difference_at_least=0.0,
        ),
        Comparison("estimates-maxsim", metric="pearson", arm="lemur", value_at_least=0.90),
        Comparison(
            "learning-saves-candidates",
            metric="candidates@0.90",
            arm="lemur-random",
            against="lemur",
            ratio_at_least=1.2,
        ),
        Comparison(
            "no-retraining-for-new-documents",
            metric="recall_of_added",
            arm="lemur-incremental",
            against="lemur",
            difference_at_least=-0.02,
        ),
    )
    trade_offs = tuple((qps(level), f"recall@{level:.2f}") for level in LEVELS)
    threads = None

    def prepare(self, request: Request) -> Corpus:
        """Draw the queries of this seed, and score everything exactly."""
        sizes = request.pick(quick=QUICK, full=FULL, paper=PAPER)
        documents, queries, source = _tokens(request, sizes)
        least = 5 * sizes.k
        if len(documents) < least:
            raise InputError(f"--data: {len(documents)} documents; the {request.scale} scale needs at least {least}")
        rng = np.random.default_rng(request.seed)
        chosen = rng.permutation(len(queries))[: sizes.n_queries]
        queries = queries.take(chosen)
        exact = maxsim(_multivectors(queries), _multivectors(documents).to(request.device)).cpu()
        truth = exact.sort(dim=1, descending=True, stable=True).indices[:, : sizes.k]
        added = np.zeros(len(documents), bool)
        added[rng.permutation(len(documents))[: int(ADDED_PART * len(documents))]] = True
        return Corpus(
            sizes,
            request.seed,
            request.device,
            source,
            documents,
            queries,
            exact.numpy(),
            truth.numpy(),
            added,
        )

    @arm("lemur")
    def lemur(self, corpus: Corpus) -> Metrics:
        """LEMUR as it comes: trained features, flat index."""
        return self._lemur(corpus, corpus.sizes.epochs)

    @arm("lemur-hnsw", timed=True)
    def lemur_hnsw(self, corpus: Corpus) -> Metrics:
        """The same vectors in a graph."""
        encoder, weights = corpus.fitted(corpus.sizes.epochs)
        index = LemurIndex(encoder, "HNSW32")
        index.add(corpus.documents, vectors=weights)
        features = encoder.encode_query(corpus.queries).cpu().numpy()
        values: dict[str, float] = {}
        timed, missing, ranks = {}, {}, {}
        for ef in (ef for ef in EF_SEARCHES if ef >= corpus.sizes.k):
            n = min(ef, len(corpus.documents))
            found = index.faiss_index.search(features, n, params=_ef_search(ef))[1]
            ranks[ef] = _ranks_in_lists(found, corpus.truth)
        for level in SOME_LEVELS:
            needed = {ef: _candidates_for(of_truth, level) for ef, of_truth in ranks.items()}
            reached = {ef: n for ef, n in needed.items() if n is not None}
            if not reached:
                missing[qps(level)] = f"recall {level:.2f} is not reached with efSearch={EF_SEARCHES[-1]}"
                continue
            ef = min(reached)
            values[f"recall@{level:.2f}"] = float((ranks[ef] < reached[ef]).mean())
            values[f"candidates@{level:.2f}"] = reached[ef]
            search = partial(
                index.search,
                corpus.timed_queries,
                corpus.sizes.k,
                n_candidates=reached[ef],
                params=_ef_search(ef),
            )
            timed[qps(level)] = _one_thread(search, corpus)
        note = f"efSearch is the least of {', '.join(map(str, EF_SEARCHES))} with which the recall is reached"
        return Metrics(values, timed, missing, [note])

    @arm("lemur-random", timed=True)
    def lemur_random(self, corpus: Corpus) -> Metrics:
        """Random features in place of trained ones."""
        return self._lemur(corpus, 0, SOME_LEVELS)

    @arm("lemur-incremental", timed=True)
    def lemur_incremental(self, corpus: Corpus) -> Metrics:
        """Fitted without a part of the documents, which come later."""
        kept = np.flatnonzero(~corpus.added)
        encoder = corpus.encoder(corpus.sizes.epochs).fit(corpus.documents[kept])
        estimates = encoder.estimate(corpus.queries, encoder.encode_document(corpus.documents))
        return Metrics(_recalls(estimates.cpu().numpy(), corpus))

    @arm("muvera-10240")
    def muvera(self, corpus: Corpus) -> Metrics:
        """Fixed-dimensional encodings of the size in the paper's comparison."""
        return self._muvera(corpus, repetitions=20, hashes=5, projection=16)

    @arm("muvera-2048", timed=True)
    def muvera_small(self, corpus: Corpus) -> Metrics:
        """Fixed-dimensional encodings of the size of LEMUR's vectors in the paper."""
        return self._muvera(corpus, repetitions=8, hashes=4, projection=16, levels=SOME_LEVELS)

    @arm("token-ann")
    def token_ann(self, corpus: Corpus) -> Metrics:
        """Nearest tokens by inverted lists, then exact scores of the documents with the best of them."""
        index = TokenIndex(corpus.documents, corpus.seed)
        k, timed_queries = corpus.sizes.k, corpus.timed_queries
        values: dict[str, float] = {}
        timed, missing = {}, {}
        ranks = {s: _ranks(index.scores(corpus.queries, *s), corpus.truth, least=0.0) for s in TOKEN_SETTINGS}
        for level in LEVELS:
            works = {}
            for setting, of_truth in ranks.items():
                n = _candidates_for(of_truth, level)
                if n is not None:
                    works[(*setting, n)] = index.inner_products(timed_queries, *setting, n)
            if not works:
                missing[qps(level)] = f"recall {level:.2f} is not reached by any of {len(TOKEN_SETTINGS)} settings"
                continue
            n_probe, n_tokens, n = min(works, key=works.__getitem__)
            values[f"recall@{level:.2f}"] = float((ranks[n_probe, n_tokens] < n).mean())
            values[f"candidates@{level:.2f}"] = n
            search = partial(index.search, timed_queries, k, n_probe=n_probe, n_tokens=n_tokens, n_candidates=n)
            timed[qps(level)] = _one_thread(search, corpus)
        note = f"{index.n_lists} lists; of {len(TOKEN_SETTINGS)} settings the one with the fewest inner products"
        return Metrics(values, timed, missing, [note])

    @arm("mean-pooling", timed=True)
    def mean_pooling(self, corpus: Corpus) -> Metrics:
        """One mean vector a document and a query: what LEMUR has to beat where the encoder was trained for it."""
        return self._flat(corpus, mean_pooled(corpus.documents), mean_pooled)

    @arm("exact-torch", timed=True)
    def exact_torch(self, corpus: Corpus) -> Metrics:
        """Exact MaxSim of all documents, by this library."""
        queries, documents, k = corpus.queries[:EXACT_QUERIES], corpus.documents, corpus.sizes.k
        return _exact(lambda: maxsim(queries, documents).topk(k), len(queries))

    @arm("exact-maxsim-cpu", timed=True)
    def exact_maxsim_cpu(self, corpus: Corpus) -> Metrics:
        """Exact MaxSim of all documents, by maxsim-cpu in a process of its own."""
        # Of longer queries version 0.1.0 gives wrong scores with documents of more than 55 tokens.
        short = np.flatnonzero(corpus.queries.lengths.numpy() <= 32)[:EXACT_QUERIES]
        if not len(short):
            raise Unavailable("every query has more than 32 tokens, which maxsim-cpu does not score rightly")
        metrics = _peer("maxsim-cpu", "maxsim_cpu", corpus, short)
        if metrics.values.get("recall@0.99", 0.0) < 0.999:
            raise Unavailable("maxsim-cpu gives other scores than MaxSim here")
        return metrics

    @arm("lemur-official", timed=True)
    def lemur_official(self, corpus: Corpus) -> Metrics:
        """The authors' code, where it is installed."""
        official, rerank = _official()
        s, documents, queries = corpus.sizes, corpus.documents, corpus.queries
        counts = documents.lengths.to(torch.int32)
        with torch.random.fork_rng():
            torch.manual_seed(corpus.seed)
            model = official(device="cpu")
            model.fit(
                train=documents.vectors,
                train_counts=counts,
                train_subset_size=s.n_train_docs,
                learn_subset_size=s.n_train_tokens,
                ols_sample_size=s.n_solve_tokens,
                final_hidden_dim=s.n_features,
                epochs=s.epochs,
                verbose=False,
            )
        # The reranker keeps pointers to these two.
        tokens, lengths = documents.vectors.numpy(), counts.numpy()
        reranker = rerank(tokens, lengths)
        timed_queries = corpus.timed_queries
        query_tokens, query_counts = timed_queries.vectors.numpy(), timed_queries.lengths.to(torch.int32)

        def search(n_candidates: int) -> Any:
            features = model.compute_features((query_tokens, query_counts))
            candidates = torch.topk(features @ model.W.T, n_candidates, dim=1).indices.numpy().astype(np.int32)
            return reranker.rerank_subset(query_tokens, query_counts.numpy(), s.k, candidates, 1), tokens, lengths

        scores = model.compute_features((queries.vectors, queries.lengths.to(torch.int32))) @ model.W.T
        return _staged(corpus, scores.numpy(), search)

    @arm("fast-plaid", timed=True)
    def fast_plaid(self, corpus: Corpus) -> Metrics:
        """FastPlaid in a process of its own."""
        return _peer("fast-plaid", "fast_plaid", corpus, np.arange(corpus.sizes.n_timed))

    @arm("xtr-warp", timed=True)
    def xtr_warp(self, corpus: Corpus) -> Metrics:
        """XTR-WARP in a process of its own."""
        return _peer("xtr-warp", "xtr_warp", corpus, np.arange(corpus.sizes.n_timed))

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """Ratios at each level of recall, the exact arm that counts, and what mean pooling does."""
        yield "Queries per second are by CPU time of the process on one thread, from the query's tokens to the top k."
        exact = {name: means[name][qps(0.90)] for name in ("exact-torch", "exact-maxsim-cpu") if name in means}
        for level in LEVELS:
            ours = means.get("lemur", {}).get(qps(level))
            if ours is None:
                yield f"At recall {level:.2f} LEMUR was not measured."
                continue
            against = [
                f"{ours / means[name][qps(level)]:.2f} times {name}"
                for name in ("muvera-10240", "token-ann", "mean-pooling")
                if qps(level) in means.get(name, {})
            ]
            if exact:
                against.append(f"{ours / max(exact.values()):.1f} times exact MaxSim")
            yield f"At recall {level:.2f} LEMUR answers {ours:,.0f} queries a second: {', '.join(against)}."
        if exact:
            fastest = max(exact, key=exact.__getitem__)
            yield f"Exact MaxSim is {fastest}, the fastest there is here, at {exact[fastest]:,.0f} queries a second."
        yield from _on_mean_pooling(means)

    def _lemur(self, corpus: Corpus, epochs: int, levels: Sequence[float] = LEVELS) -> Metrics:
        encoder, weights = corpus.fitted(epochs)
        index = LemurIndex(encoder, "Flat")
        index.add(corpus.documents, vectors=weights)
        estimates = encoder.estimate(corpus.queries, weights).cpu().numpy()
        search = partial(index.search, corpus.timed_queries, corpus.sizes.k)
        return _staged(corpus, estimates, lambda n: search(n_candidates=n), levels)

    def _muvera(
        self, corpus: Corpus, repetitions: int, hashes: int, projection: int, levels: Sequence[float] = LEVELS
    ) -> Metrics:
        rng = np.random.default_rng(corpus.seed)
        d = corpus.documents.dimension
        # Empty cells stay empty: filled, the encodings of documents as short as these find fewer of the best.
        muvera = Muvera(d, repetitions, hashes, projection, rng, fill_empty=False)
        return self._flat(corpus, muvera.encode_document(corpus.documents), muvera.encode_query, levels)

    def _flat(
        self,
        corpus: Corpus,
        vectors: np.ndarray,
        encode_query: Callable[[MultiVectors], np.ndarray],
        levels: Sequence[float] = LEVELS,
    ) -> Metrics:
        """An arm that has one vector a document, searched as LEMUR's are."""
        table = torch.from_numpy(vectors)
        timed_queries, documents, k = corpus.timed_queries, corpus.documents, corpus.sizes.k

        def search(n_candidates: int) -> Any:
            candidates = flat_search(torch.from_numpy(encode_query(timed_queries)), table, n_candidates)[1]
            return maxsim_rerank(timed_queries, documents, candidates, k)

        return _staged(corpus, encode_query(corpus.queries) @ vectors.T, search, levels)


def _staged(
    corpus: Corpus, estimates: np.ndarray, search: Callable[[int], Any], levels: Sequence[float] = LEVELS
) -> Metrics:
    """Metrics of an arm that ranks all documents by estimates (Q, N) and scores the first n exactly."""
    ranks = _ranks(estimates, corpus.truth)
    values, timed = _recalls(estimates, corpus, ranks), {}
    for level in LEVELS:
        n = _candidates_for(ranks, level)
        assert n is not None  # all documents are ranked
        values[f"candidates@{level:.2f}"] = n
        values[f"recall@{level:.2f}"] = float((ranks < n).mean())
        if level in levels:
            timed[qps(level)] = _one_thread(partial(search, n), corpus)
    return Metrics(values, timed)


def _recalls(estimates: np.ndarray, corpus: Corpus, ranks: np.ndarray | None = None) -> dict[str, float]:
    """What the estimates alone say: recall among the first k, 2k and 5k, and correlation with exact MaxSim."""
    k = corpus.sizes.k
    ranks = _ranks(estimates, corpus.truth) if ranks is None else ranks
    values = {f"candidate_recall@{times}k": float((ranks < times * k).mean()) for times in (1, 2, 5)}
    values["candidate_recall"] = float(np.mean(list(values.values())))
    of_added = corpus.added[corpus.truth]
    values["recall_of_added"] = float((ranks < 5 * k)[of_added].mean())
    values["pearson"] = float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(estimates, corpus.exact, strict=True)]))
    return values


def _ranks(estimates: np.ndarray, truth: np.ndarray, least: float = -np.inf) -> np.ndarray:
    """Rank of each true document by its estimate, shape (Q, k); `NOT_FOUND` where that is not above ``least``."""
    order = np.argsort(-estimates, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(order.shape[1])[None, :], axis=1)
    found = np.take_along_axis(estimates, truth, axis=1) > least
    return np.where(found, np.take_along_axis(ranks, truth, axis=1), NOT_FOUND)


def _ranks_in_lists(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Rank of each true document in the list found for its query, shape (Q, k)."""
    ranks = np.full(truth.shape, NOT_FOUND)
    for row, (ids, wanted) in enumerate(zip(found, truth, strict=True)):
        _, here, there = np.intersect1d(wanted, ids, return_indices=True)
        ranks[row, here] = there
    return ranks


def _candidates_for(ranks: np.ndarray, level: float) -> int | None:
    """The fewest candidates, no fewer than k, whose exact scoring reaches the recall; None where none do."""
    rank = int(np.sort(ranks, axis=None)[int(np.ceil(level * ranks.size)) - 1])
    return None if rank == NOT_FOUND else max(rank + 1, ranks.shape[1])


def _ef_search(ef: int) -> Any:
    return faiss.SearchParametersHNSW(efSearch=ef)  # type: ignore[attr-defined]


def _one_thread(search: Callable[[], Any], corpus: Corpus) -> Workload:
    return Workload(search, units=len(corpus.timed_queries), clock="cpu", threads=1)


def _exact(search: Callable[[], Any], n_queries: int) -> Metrics:
    """Metrics of an exact arm, whose speed is the same at every recall and is measured once."""
    return Metrics({"recall@0.90": 1.0}, {qps(0.90): Workload(search, units=n_queries, clock="cpu", threads=1)})


def _on_mean_pooling(means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    if "mean-pooling" not in means or "lemur" not in means:
        return
    pooled, ours = means["mean-pooling"], means["lemur"]
    ahead = [
        f"{level:.2f}"
        for level in LEVELS
        if qps(level) in pooled and qps(level) in ours and pooled[qps(level)] > ours[qps(level)]
    ]
    if ahead:
        yield f"Mean pooling is faster than LEMUR at recall {', '.join(ahead)}."
    yield (
        f"Mean pooling needs {pooled['candidates@0.90']:,.0f} candidates for recall 0.90, "
        f"LEMUR {ours['candidates@0.90']:,.0f}. The embedded encoder was trained with mean pooling, which favours it."
    )


def _official() -> tuple[Any, Any]:
    """The authors' class and reranker. Another package of the name exists on PyPI."""
    try:
        model = importlib.import_module("lemur").Lemur
        rerank = importlib.import_module("lemur.maxsim").MaxSim
    except (ImportError, AttributeError) as error:
        raise Unavailable("the authors' code is not installed: build it from github.com/ejaasaari/lemur") from error
    return model, rerank


def _peer(name: str, module: str, corpus: Corpus, chosen: np.ndarray) -> Metrics:
    """Run an engine on the chosen queries in a process of its own, which times itself."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{name} is not installed")
    chosen = chosen[chosen < len(corpus.queries)]
    queries = corpus.queries[chosen]
    with tempfile.TemporaryDirectory() as folder:
        work, out = Path(folder, "work.npz"), Path(folder, "out.json")
        np.savez(
            work,
            documents=corpus.document_tokens.vectors,
            document_lengths=corpus.document_tokens.lengths,
            queries=queries.vectors.numpy(),
            query_lengths=queries.lengths.numpy(),
            k=corpus.sizes.k,
            seed=corpus.seed,
        )
        # -P: the modules of this folder are not there for the engine to import.
        command = [sys.executable, "-P", str(Path(__file__).with_name("_peer.py")), name, str(work), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        try:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PEER_SECONDS)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{name} did not finish within {PEER_SECONDS} s") from None
        if ended.returncode != 0:
            said = ended.stderr.strip().splitlines()
            reason = said[-1] if said else f"its process ended with {ended.returncode}"
            raise Unavailable(f"{name} does not run here, beside torch {torch.__version__}: {reason}")
        runs = json.loads(out.read_text(encoding="utf-8"))
    return _of_peer(runs, corpus.truth[chosen])


def _of_peer(runs: Sequence[Mapping[str, Any]], truth: np.ndarray) -> Metrics:
    """At each level of recall, the fastest setting that reaches it."""
    values, missing = {}, {}
    recalls = [
        float(np.mean([len(set(ids) & set(wanted)) for ids, wanted in zip(run["ids"], truth.tolist(), strict=True)]))
        / truth.shape[1]
        for run in runs
    ]
    for level in LEVELS:
        fast = [
            (len(truth) / run["cpu_seconds"], recall)
            for run, recall in zip(runs, recalls, strict=True)
            if recall >= level
        ]
        if fast:
            values[qps(level)], values[f"recall@{level:.2f}"] = max(fast)
        else:
            missing[qps(level)] = f"recall {level:.2f} is not reached; the highest is {max(recalls):.3f}"
    return Metrics(values, missing=missing, notes=["timed by itself, in its own process, not interleaved"])


def _tokens(request: Request, sizes: Sizes) -> tuple[TokenVectors, TokenVectors, str]:
    """Documents, and the queries to draw from: the user's, or the embedded ones."""
    if request.data is None and request.model is None:
        n = min(sizes.n_documents, len(docstrings().documents))
        pairs = docstring_vectors(n, dimension=DIMENSION, device=request.device)
        return pairs.documents, pairs.queries, pairs.name
    if request.data is None:
        return _encoded(request.model, None, 0, sizes, request.device)
    path = Path(request.data)
    if not path.is_dir():
        changed = path.stat().st_mtime_ns if path.exists() else 0
        return _encoded(request.model, str(path), changed, sizes, request.device)
    if request.model is not None:
        raise InputError(f"--model {request.model}: {path} has token vectors already; give texts, or no model")
    documents, queries = (read_multivectors_npz(path / f"{what}.npz") for what in ("documents", "queries"))
    d, of_queries = documents.vectors.shape[1], queries.vectors.shape[1]
    if d != of_queries:
        raise DataFileError(path / "queries.npz", f"has d={of_queries}; documents.npz has d={d}", field="vectors")
    return documents.take(_sample(len(documents), sizes.n_documents)), queries, str(path)


@lru_cache(maxsize=1)
def _encoded(
    model: str | None, data: str | None, changed: int, sizes: Sizes, device: str
) -> tuple[TokenVectors, TokenVectors, str]:
    """Texts as token vectors; the seeds of one run share them. ``changed`` is the file's time, for a file edited."""
    if data is None:
        available = docstrings()
        n = min(sizes.n_documents, len(available.documents))
        texts, source = docstrings(n), available.name
    else:
        texts, source = read_text_pairs(data), data
    documents, queries = _divided(texts.documents, texts.queries, sizes)
    if model is not None and _is_multi_vector_encoder(model):
        return (*_late_interaction(model, documents, queries, device), source)
    pairs = encode_texts(load_token_encoder(model, device=device), documents, queries, dimension=DIMENSION)
    return pairs.documents, pairs.queries, source


def _divided(documents: Sequence[str], queries: Sequence[str], sizes: Sizes) -> tuple[list[str], list[str]]:
    """No more documents than the scale has. Where there are no queries, some of the texts serve as such."""
    order = _sample(len(documents), len(documents))
    if queries:
        chosen = order[: sizes.n_documents]
        return [documents[i] for i in chosen], [queries[i] for i in chosen]
    n_queries = min(2 * sizes.n_queries, len(order) // 5)
    if n_queries == 0:
        raise InputError(f"--data: {len(order)} texts; at least 5 are needed to hold some out as queries")
    held_out, rest = order[:n_queries], order[n_queries : n_queries + sizes.n_documents]
    return [documents[i] for i in rest], [documents[i] for i in held_out]


def _sample(n: int, wanted: int) -> np.ndarray:
    """The same sample for every seed, in the order of the data unless it is all of it."""
    order = np.random.default_rng(0).permutation(n)
    return order if wanted >= n else order[:wanted]


def _is_multi_vector_encoder(model: str) -> bool:
    """Whether sentence-transformers, PyLate or ColBERT made the model for late interaction, by its configuration."""
    from transformers.utils.hub import cached_file

    for name, key, known in (
        ("config_sentence_transformers.json", "model_type", {"MultiVectorEncoder", "ColBERT"}),
        ("config.json", "architectures", {"HF_ColBERT"}),
    ):
        try:
            found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        except OSError:
            return False
        if found is not None:
            value = json.loads(Path(found).read_text(encoding="utf-8")).get(key)
            if known & set(value if isinstance(value, list) else [value]):
                return True
    return False


def _late_interaction(
    model: str, documents: Sequence[str], queries: Sequence[str], device: str
) -> tuple[TokenVectors, TokenVectors]:
    """Token vectors as the model itself makes them."""
    with requires("peers", f"the late-interaction model {model}"):
        from sentence_transformers import MultiVectorEncoder
    try:
        encoder = MultiVectorEncoder(model, device=device)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {model}: cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    joined = [
        MultiVectors.from_list([x.float().cpu() for x in vectors])
        for vectors in (
            encoder.encode_document(list(documents)),
            encoder.encode_query(list(queries)),
        )
    ]
    first, second = (TokenVectors(sets.vectors.numpy(), sets.lengths.numpy()) for sets in joined)
    return first, second


def _multivectors(tokens: TokenVectors) -> MultiVectors:
    return MultiVectors(tokens.vectors, tokens.lengths)
