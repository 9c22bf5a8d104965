"""What LEMUR is compared with: fixed-dimensional encodings (MUVERA), nearest tokens (the first stage of PLAID and XTR)
and mean pooling. Each gives candidates that are then scored by the same exact MaxSim as LEMUR's.
"""

from __future__ import annotations

import faiss
import numpy as np
import scipy.sparse as sp
import torch

from practicum.retrieval.lemur.maxsim import maxsim_rerank
from practicum.retrieval.lemur.multivectors import MultiVectors


class Muvera:
    """MUVERA's fixed-dimensional encodings: the inner product of two of them estimates MaxSim.

    In each of ``repetitions`` the space of tokens is cut into ``2 ** hashes`` cells by random hyperplanes. Per cell a
    query has the sum of its tokens and a document their mean, both projected at random to ``projection`` numbers. A
    cell in which a document has no token takes the one whose signs differ in the fewest hyperplanes.

    Parameters
    ----------
    d : int
    repetitions, hashes, projection : int
        The encoding has ``repetitions * 2 ** hashes * projection`` numbers.
    rng : numpy.random.Generator
    fill_empty : bool
        Whether empty cells of documents are filled, as the paper has it.

    References
    ----------
    Dhulipala, Hadian, Jayaram, Lee and Mirrokni, "MUVERA: Multi-Vector Retrieval via Fixed Dimensional Encodings",
    NeurIPS 2024, arXiv:2405.19504.

    Examples
    --------
    >>> muvera = Muvera(8, repetitions=3, hashes=2, projection=4, rng=np.random.default_rng(0))
    >>> muvera.encode_document(MultiVectors(np.eye(8), [3, 5])).shape
    (2, 48)
    """

    def __init__(
        self,
        d: int,
        repetitions: int,
        hashes: int,
        projection: int,
        rng: np.random.Generator,
        fill_empty: bool = True,
    ) -> None:
        self.repetitions, self.hashes, self.projection, self.fill_empty = repetitions, hashes, projection, fill_empty
        self.hyperplanes = rng.standard_normal((repetitions, d, hashes)).astype(np.float32)
        signs = rng.choice(np.array([-1.0, 1.0], np.float32), (repetitions, d, projection))
        self.projections = signs / np.sqrt(np.float32(projection))

    def encode_query(self, queries: MultiVectors) -> np.ndarray:
        """Encode, giving shape (Q, repetitions * 2 ** hashes * projection), float32."""
        sums, _ = self._sums(queries, self._cells(queries), self._projected(queries))
        return sums.reshape(len(queries), -1)

    def encode_document(self, documents: MultiVectors) -> np.ndarray:
        """Encode, giving shape (N, repetitions * 2 ** hashes * projection), float32."""
        n_cells = 2**self.hashes
        blocks = []
        for first in range(0, len(documents), 1000):
            part = documents[first : first + 1000]
            cells, projected = self._cells(part), self._projected(part)
            sums, counts = self._sums(part, cells, projected)
            means = sums / np.maximum(counts, 1)[..., None].astype(np.float32)
            if self.fill_empty:
                nearest = self._nearest(part, cells)
                empty = counts == 0
                repetition = np.broadcast_to(np.arange(self.repetitions)[None, :, None], empty.shape)
                means[empty] = projected[nearest[empty], repetition[empty]]
            blocks.append(means.reshape(len(part), self.repetitions * n_cells * self.projection))
        return np.concatenate(blocks)

    def _cells(self, sets: MultiVectors) -> np.ndarray:
        """The cell of each token in each repetition, shape (T, R)."""
        d = sets.dimension
        flat = torch.from_numpy(self.hyperplanes.transpose(1, 0, 2).reshape(d, -1).copy())
        signs = (sets.vectors.float() @ flat > 0).numpy().reshape(-1, self.repetitions, self.hashes)
        return signs @ (1 << np.arange(self.hashes))

    def _projected(self, sets: MultiVectors) -> np.ndarray:
        flat = torch.from_numpy(self.projections.transpose(1, 0, 2).reshape(sets.dimension, -1).copy())
        return (sets.vectors.float() @ flat).numpy().reshape(-1, self.repetitions, self.projection)

    def _sums(self, sets: MultiVectors, cells: np.ndarray, projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums (n, R, cells, projection) and numbers (n, R, cells) of the tokens in each cell."""
        n, n_cells = len(sets), 2**self.hashes
        set_of_token = np.repeat(np.arange(n), sets.lengths.numpy())
        place = (set_of_token[:, None] * self.repetitions + np.arange(self.repetitions)) * n_cells + cells
        ones = np.ones(place.size, np.float32)
        shape = (n * self.repetitions * n_cells, place.size)
        gather = sp.csr_matrix((ones, (place.reshape(-1), np.arange(place.size))), shape=shape)
        sums = gather @ projected.reshape(-1, self.projection)
        counts = np.diff(gather.indptr).reshape(n, self.repetitions, n_cells)
        return sums.reshape(n, self.repetitions, n_cells, self.projection), counts

    def _nearest(self, sets: MultiVectors, cells: np.ndarray) -> np.ndarray:
        """For each set, repetition and cell the row of the token whose cell differs in the fewest bits."""
        n_cells, starts = 2**self.hashes, sets.offsets[:-1].numpy()
        differing = np.bitwise_count(np.arange(n_cells)[:, None] ^ np.arange(n_cells)).astype(np.int64)
        rows = np.arange(len(cells))[:, None]
        nearest = np.empty((len(sets), self.repetitions, n_cells), np.int64)
        for repetition in range(self.repetitions):
            # The distance in front of the row: the least of these is the first token at the least distance.
            ranked = differing[cells[:, repetition]] * len(cells) + rows
            nearest[:, repetition] = np.minimum.reduceat(ranked, starts, axis=0) % len(cells)
        return nearest


class TokenIndex:
    """Candidates by nearest tokens: an inverted-list index over all tokens of all documents.

    Each query token finds its nearest tokens; a document's score is the sum over query tokens of the best of its
    tokens found, counted from the last one found, which stands for those that were not.

    Parameters
    ----------
    documents : MultiVectors
    seed : int
        Of the k-means that makes the lists, about two for each square root of the number of tokens.
    """

    QUERIES_AT_A_TIME = 64

    def __init__(self, documents: MultiVectors, seed: int) -> None:
        self.documents = documents
        tokens = documents.vectors.float().numpy()
        self.n_lists = 2 ** max(0, round(np.log2(2 * np.sqrt(len(tokens)))))
        self.n_lists = min(self.n_lists, len(tokens))
        quantizer = faiss.IndexFlatIP(documents.dimension)
        self.index = faiss.IndexIVFFlat(quantizer, documents.dimension, self.n_lists, faiss.METRIC_INNER_PRODUCT)
        self.index.cp.niter, self.index.cp.seed, self.index.cp.max_points_per_centroid = 8, seed + 1, 64
        self.index.cp.min_points_per_centroid = 1
        self.index.train(tokens)
        self.index.add(tokens)
        self.document_of_token = np.repeat(np.arange(len(documents)), documents.lengths.numpy())

    def scores(self, queries: MultiVectors, n_probe: int, n_tokens: int) -> np.ndarray:
        """Scores of shape (Q, N), float32; 0 for a document of which no token was found."""
        out = np.empty((len(queries), len(self.documents)), np.float32)
        for first in range(0, len(queries), self.QUERIES_AT_A_TIME):
            part = queries[first : first + self.QUERIES_AT_A_TIME]
            out[first : first + len(part)] = self._scores(part, n_probe, n_tokens)
        return out

    def search(self, queries: MultiVectors, k: int, n_probe: int, n_tokens: int, n_candidates: int) -> np.ndarray:
        """The ids of shape (Q, k) after exact scoring."""
        scores = torch.from_numpy(self.scores(queries, n_probe, n_tokens))
        best = scores.topk(n_candidates, dim=1)
        candidates = torch.where(best.values > 0, best.indices, -1)
        return maxsim_rerank(queries, self.documents, candidates, k)[1].numpy()

    def inner_products(self, queries: MultiVectors, n_probe: int, n_tokens: int, n_candidates: int) -> float:
        """The work of a search in inner products, by which settings are ordered from cheap to dear."""
        n_tokens_in_all = len(self.document_of_token)
        scanned = self.n_lists + n_probe * n_tokens_in_all / self.n_lists + 15 * n_tokens
        return len(queries.vectors) * (scanned + n_candidates * n_tokens_in_all / len(self.documents))

    def _scores(self, queries: MultiVectors, n_probe: int, n_tokens: int) -> np.ndarray:
        n, n_documents = len(queries), len(self.documents)
        parameters = faiss.SearchParametersIVF(nprobe=n_probe)  # type: ignore[call-arg]
        similar, found = self.index.search(queries.vectors.float().numpy(), n_tokens, params=parameters)
        there = found >= 0
        floor = np.where(there, similar, np.inf).min(axis=1, keepdims=True)
        document = self.document_of_token[np.where(there, found, 0)]
        row = np.broadcast_to(np.arange(len(found))[:, None], found.shape)
        # Of a document's tokens the first found is the most similar: written last, its entry stays.
        entry = np.arange(found.size).reshape(found.shape)
        first = np.empty((len(found), n_documents), np.int32)
        backwards = [np.ascontiguousarray(x[:, ::-1]) for x in (row, document, np.where(there, entry, -1))]
        first[backwards[0], backwards[1]] = backwards[2]
        counted = there & (first[row, document] == entry)
        query = np.repeat(np.arange(n), queries.lengths.numpy())[:, None]
        place = (query * n_documents + document)[counted]
        # A hair above the floor, so that a document found only there still counts as found.
        gains = (similar - floor)[counted] + 1e-6
        return np.bincount(place, gains, minlength=n * n_documents).reshape(n, n_documents)


def mean_pooled(sets: MultiVectors) -> np.ndarray:
    """The mean token vector of each set at unit length, shape (N, d), float32."""
    sums = np.add.reduceat(sets.vectors.float().numpy(), sets.offsets[:-1].numpy(), axis=0)
    return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.finfo(np.float32).tiny)
