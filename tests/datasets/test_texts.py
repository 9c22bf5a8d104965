import ast
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from practicum.datasets import (
    TokenVectors,
    docstring_corpus,
    docstring_vectors,
    docstrings,
    encode_texts,
    synthetic_multivectors,
    token_vectors,
)
from practicum.models import TokenEncoder, load_token_encoder
from practicum.toolbox.extras import MissingExtra
from practicum.toolbox.installed import package_folder


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRACTICUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def encoder() -> TokenEncoder:
    return load_token_encoder()


def best_documents(documents: TokenVectors, queries: TokenVectors) -> np.ndarray:
    """Documents by falling MaxSim for each query."""
    scores = [
        np.maximum.reduceat(queries.take([i]).vectors @ documents.vectors.T, documents.offsets[:-1], axis=1).sum(0)
        for i in range(len(queries))
    ]
    return np.argsort(-np.array(scores), axis=1)


class TestDocstrings:
    def test_there_are_enough_for_the_full_scale(self):
        pairs = docstrings()
        assert len(pairs.queries) == len(pairs.documents) >= 20_000
        for module in ("torch", "numpy", "scipy", "sklearn", "transformers", "sympy", "networkx"):
            assert f"{module} " in pairs.provenance
        assert "BSD-3-Clause" in pairs.licence
        assert "Apache-2.0" in pairs.licence

    def test_no_query_and_no_document_occurs_twice(self):
        pairs = docstrings()
        assert len({query.lower() for query in pairs.queries}) == len(pairs)
        assert len(set(pairs.documents)) == len(pairs)
        assert min(len(document.split()) for document in pairs.documents) >= 6
        assert all(query == query.strip() and "\n" not in query for query in pairs.queries)

    def test_the_draw_follows_the_state_and_is_nested(self):
        few, more = docstrings(50), docstrings(200)
        assert more.queries[:50] == few.queries
        assert more.documents[:50] == few.documents
        assert docstrings(50, random_state=1).queries != few.queries
        everything = docstrings()
        where = {query: i for i, query in enumerate(everything.queries)}
        assert all(everything.documents[where[q]] == d for q, d in zip(more.queries, more.documents, strict=True))

    def test_they_are_what_python_takes_for_docstrings(self):
        folder = package_folder("networkx")
        found, parsed = [], []
        for file in docstring_corpus._source_files(folder):
            source = file.read_text(encoding="utf-8")
            found += [inspect.cleandoc(text) for text in docstring_corpus._docstrings_of(source)]
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    parsed += [ast.get_docstring(node)] if ast.get_docstring(node) else []
        assert len(set(found) & set(parsed)) >= 0.98 * len(set(parsed))
        assert len(set(found) - set(parsed)) <= 0.02 * len(set(found))

    @pytest.mark.parametrize(
        ("docstring", "split"),
        [
            ("One line.\n\nThe body\n    goes on.", ("One line.", "The body goes on.")),
            ("Over\ntwo lines.\n\nBody.", ("Over two lines.", "Body.")),
            ("One sentence. And another one.", ("One sentence.", "And another one.")),
            ("Only this", ("Only this", "")),
        ],
    )
    def test_summary_and_body(self, docstring: str, split: tuple[str, str]):
        assert docstring_corpus._split(inspect.cleandoc(docstring)) == split

    def test_none_of_the_packages_is_imported(self):
        code = (
            "import sys; from practicum.datasets import docstrings; docstrings(10)\n"
            "assert not {'torch', 'scipy', 'sklearn', 'transformers', 'sympy', 'networkx'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("wrong", [0, -1, 10**6])
    def test_more_than_there_are(self, wrong: int):
        with pytest.raises(ValueError, match=rf"n_documents={wrong}: must be from 1 to the \d+ pairs"):
            docstrings(wrong)

    def test_without_any_of_the_packages(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(docstring_corpus, "package_folder", lambda package: None)
        with pytest.raises(MissingExtra, match=r"pip install 'practicum\[embedded\]'"):
            docstrings()


class TestDocstringVectors:
    def test_they_are_unit_vectors_of_the_right_documents(self, encoder: TokenEncoder):
        pairs, texts = docstring_vectors(60, dimension=384), docstrings(60)
        assert len(pairs.documents) == len(pairs.queries) == 60
        assert pairs.relevant.tolist() == list(range(60))
        assert pairs.documents.vectors.dtype == np.float32
        assert pairs.documents.lengths.dtype == np.int64
        assert pairs.documents.lengths.sum() == len(pairs.documents.vectors)
        np.testing.assert_allclose(np.linalg.norm(pairs.documents.vectors, axis=1), 1, atol=1e-5)
        assert pairs.energy_kept == pytest.approx(1)
        # With all directions kept the projection is a rotation, so inner products are those of the encoder.
        plain = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in encoder.encode(texts.documents, max_length=64)]
        for i in (0, 7, 59):
            found = pairs.documents.take([i]).vectors
            np.testing.assert_allclose(found @ found.T, plain[i] @ plain[i].T, atol=1e-4)

    def test_the_second_call_reads_what_the_first_wrote(self, monkeypatch: pytest.MonkeyPatch):
        first = docstring_vectors(30, dimension=32)
        monkeypatch.setattr("practicum.models.encoders.TokenEncoder.encode", None)
        again = docstring_vectors(30, dimension=32)
        assert np.array_equal(first.documents.vectors, again.documents.vectors)
        assert np.array_equal(first.queries.vectors, again.queries.vectors)

    def test_the_state_draws_queries_and_not_documents(self):
        everything = docstring_vectors(30, dimension=32)
        one, other = (docstring_vectors(30, 10, dimension=32, random_state=state) for state in (1, 2))
        assert np.array_equal(one.documents.vectors, other.documents.vectors)
        assert one.relevant.tolist() != other.relevant.tolist()
        assert len(set(one.relevant.tolist())) == 10
        assert np.array_equal(one.queries.vectors, everything.queries.take(one.relevant).vectors)

    def test_a_damaged_file_is_made_anew(self):
        from practicum.toolbox.cache import cache_folder

        first = docstring_vectors(12, dimension=16)
        newest = max((cache_folder() / "docstring_vectors").glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        newest.write_bytes(newest.read_bytes()[:1000])
        assert np.array_equal(docstring_vectors(12, dimension=16).documents.vectors, first.documents.vectors)

    def test_an_interrupted_encoding_goes_on(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(token_vectors, "TEXTS_A_CHUNK", 10)
        encode, encoded = TokenEncoder.encode, []

        def interrupted(self, texts, **options):
            if len(encoded) == 2:
                raise KeyboardInterrupt
            encoded.append(texts)
            return encode(self, texts, **options)

        with monkeypatch.context() as patch:
            patch.setattr(TokenEncoder, "encode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                docstring_vectors(40, dimension=8)

        def counted(self, texts, **options):
            encoded.append(texts)
            return encode(self, texts, **options)

        told = []
        with monkeypatch.context() as patch:
            patch.setattr(TokenEncoder, "encode", counted)
            pairs = docstring_vectors(40, dimension=8, progress=lambda done, total: told.append((done, total)))
        # Four chunks of documents and four of queries, each encoded once.
        assert len(encoded) == 8
        assert told[-1] == (80, 80)
        assert len(pairs.documents) == 40
        from practicum.toolbox.cache import cache_folder

        assert not list((cache_folder() / "docstring_vectors").glob("*.chunks"))

    @pytest.mark.parametrize("wrong", [0, 31])
    def test_more_queries_than_documents(self, wrong: int):
        with pytest.raises(ValueError, match=f"n_queries={wrong}: must be from 1 to 30"):
            docstring_vectors(30, wrong)

    def test_a_summary_finds_its_body(self):
        pairs = docstring_vectors(60, dimension=128)
        assert (best_documents(pairs.documents, pairs.queries)[:, 0] == pairs.relevant).mean() > 0.6


class TestEncodeTexts:
    DOCUMENTS = ("the cat sat on the mat", "stocks fell sharply today", "boil the pasta in salted water")

    def test_the_projection_keeps_the_most_energy(self, encoder: TokenEncoder):
        tokens = np.concatenate(encoder.encode(self.DOCUMENTS)).astype(np.float64)
        energies = np.linalg.svd(tokens, compute_uv=False) ** 2
        pairs = encode_texts(encoder, self.DOCUMENTS, [], dimension=5)
        assert pairs.energy_kept == pytest.approx(energies[:5].sum() / energies.sum(), rel=1e-5)
        assert pairs.queries.vectors.shape == (0, 5)

    def test_queries_meet_documents_in_the_same_space(self, encoder: TokenEncoder):
        queries = ["a cat on a mat", "the stock market", "cooking pasta"]
        pairs = encode_texts(encoder, self.DOCUMENTS, queries, dimension=16)
        assert pairs.relevant.tolist() == [0, 1, 2]
        assert best_documents(pairs.documents, pairs.queries)[:, 0].tolist() == [0, 1, 2]

    def test_which_document_is_relevant(self, encoder: TokenEncoder):
        assert encode_texts(encoder, self.DOCUMENTS, ["a cat"], dimension=4).relevant.tolist() == [-1]
        assert encode_texts(encoder, self.DOCUMENTS, ["a cat"], relevant=[2], dimension=4).relevant.tolist() == [2]
        for wrong in ([3], [-2], [0, 1]):
            with pytest.raises(ValueError, match="relevant: "):
                encode_texts(encoder, self.DOCUMENTS, ["a cat"], relevant=wrong)

    def test_chunks_on_disk_change_nothing(self, encoder: TokenEncoder, tmp_path: Path):
        kept = encode_texts(encoder, self.DOCUMENTS, ["a cat"], dimension=8, chunks=tmp_path / "chunks")
        plain = encode_texts(encoder, self.DOCUMENTS, ["a cat"], dimension=8)
        assert np.array_equal(kept.documents.vectors, plain.documents.vectors)
        assert np.array_equal(kept.queries.vectors, plain.queries.vectors)

    def test_wrong_arguments(self, encoder: TokenEncoder):
        with pytest.raises(ValueError, match="documents: there are none"):
            encode_texts(encoder, [], [])
        with pytest.raises(ValueError, match="dimension=0"):
            encode_texts(encoder, self.DOCUMENTS, [], dimension=0)
        with pytest.raises(ValueError, match="yields no tokens"):
            encode_texts(encoder, ["cat", ""], [])


class TestSynthetic:
    def test_sizes(self):
        pairs = synthetic_multivectors(3000, 100)
        assert pairs.documents.vectors.shape[1] == 64
        assert 110_000 < len(pairs.documents.vectors) < 126_000
        assert (len(pairs.documents), len(pairs.queries)) == (3000, 100)
        assert (pairs.documents.lengths.min(), pairs.documents.lengths.max()) == (16, 63)
        np.testing.assert_allclose(np.linalg.norm(pairs.documents.vectors, axis=1), 1, atol=1e-5)

    def test_tokens_share_a_direction(self):
        assert np.linalg.norm(synthetic_multivectors(500, 1).documents.vectors.mean(axis=0)) > 0.2

    def test_retrieval_by_maxsim_works_and_is_not_trivial(self):
        pairs = synthetic_multivectors(1000, 100)
        first = best_documents(pairs.documents, pairs.queries)[:, 0] == pairs.relevant
        assert 0.5 < first.mean() < 0.95

    def test_the_state_decides(self):
        one, same, other = (synthetic_multivectors(20, 5, 8, random_state=state) for state in (1, 1, 2))
        assert np.array_equal(one.documents.vectors, same.documents.vectors)
        assert np.array_equal(one.queries.vectors, same.queries.vectors)
        assert not np.array_equal(one.documents.vectors[:10], other.documents.vectors[:10])

    def test_no_queries(self):
        assert synthetic_multivectors(5, 0, 4).queries.vectors.shape == (0, 4)

    @pytest.mark.parametrize("wrong", [{"n_documents": 0}, {"n_queries": -1}, {"d": 1}])
    def test_wrong_sizes(self, wrong: dict):
        name, value = next(iter(wrong.items()))
        with pytest.raises(ValueError, match=f"{name}={value}: must be at least"):
            synthetic_multivectors(**{"n_documents": 5, "n_queries": 2, **wrong})


def test_taking_sets_in_any_order():
    sets = TokenVectors(np.arange(12, dtype=np.float32).reshape(6, 2), np.array([1, 3, 2]))
    taken = sets.take([2, 0, 2])
    assert taken.lengths.tolist() == [2, 1, 2]
    assert taken.vectors[:, 0].tolist() == [8, 10, 0, 8, 10]
    assert sets.take([]).vectors.shape == (0, 2)


def test_a_large_corpus_has_queries_for_its_first_documents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_vectors, "MOST_QUERIES", 5)
    pairs = docstring_vectors(14, dimension=8)
    assert (len(pairs.documents), len(pairs.queries), pairs.relevant.tolist()) == (14, 5, [0, 1, 2, 3, 4])
