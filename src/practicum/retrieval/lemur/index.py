"""A FAISS index over LEMUR's document vectors, with exact reranking."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import safetensors.torch
import torch

from practicum.retrieval.lemur._flat import flat_search
from practicum.retrieval.lemur.encoder import LemurEncoder, read_description, write_whole
from practicum.retrieval.lemur.maxsim import maxsim_rerank
from practicum.retrieval.lemur.multivectors import MultiVectors, as_multivectors

STORE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLAT_BELOW = 50_000
# HNSW looks at no fewer entries than this a query. Of the best 50 by the flat index 64 keep 94 % and 128 keep 99 %, on
# 2,000 documents with 512 features.
EF_SEARCH = 128
LARGEST_ID = 2**63 - 1
FORMAT = 1


class LemurIndex:
    """Search documents of many token vectors: candidates from a FAISS index, then exact MaxSim.

    Parameters
    ----------
    encoder : LemurEncoder
        Fitted.
    factory : str or faiss.Index
        A string for ``faiss.index_factory``, or an empty inner product index of ``encoder.n_features`` dimensions
        (one on a GPU, say). ``"auto"`` is ``"Flat"`` where the first documents added are fewer than 50,000, else
        ``"HNSW32"``. An index that needs training is trained on the first documents added.
    store_dtype : {"float32", "bfloat16", "float16"}
        How the documents' tokens are kept for reranking. bfloat16 takes half the memory.
    n_candidates : int, optional
        Candidates to rerank in a search that does not say; by default ``max(50, 5 * k)``.

    Attributes
    ----------
    faiss_index : faiss.IndexIDMap2
        Over the document vectors, under the documents' ids; a FAISS index like any other. Documents removed from an
        index that cannot forget stay in it under negative ids.
    ntotal : int
        Documents in the index.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        When the encoder is not fitted.
    ValueError
        When an argument is out of range or FAISS does not know the factory string.

    Notes
    -----
    Only indexes of flat codes (``Flat``, ``SQ8``, ``PQ16`` ...) can forget. From others (HNSW, IVF) documents are
    removed by keeping them out of the results; their space is free again when the index is built anew.

    The vectors differ in length, which inverted lists suffer from: with FAISS's default of one list a query, IVF finds
    few of the best. Give it more, by ``params`` or on ``faiss_index``, or take a graph.

    Examples
    --------
    >>> from practicum.datasets import synthetic_multivectors
    >>> pairs = synthetic_multivectors(200, 5, 16, random_state=0)
    >>> documents = MultiVectors(pairs.documents.vectors, pairs.documents.lengths)
    >>> queries = MultiVectors(pairs.queries.vectors, pairs.queries.lengths)
    >>> index = LemurIndex.build(documents[:150], n_features=64, epochs=2, random_state=0)
    >>> index.add(documents[150:])
    >>> scores, ids = index.search(queries, k=3, n_candidates=20)
    >>> scores.shape, ids.dtype, index.ntotal
    ((5, 3), dtype('int64'), 200)
    >>> index.remove_ids([int(ids[0, 0])])
    1
    """

    def __init__(
        self,
        encoder: LemurEncoder,
        factory: str | faiss.Index = "auto",
        *,
        store_dtype: str = "float32",
        n_candidates: int | None = None,
    ) -> None:
        encoder.fingerprint()
        if store_dtype not in STORE_DTYPES:
            raise ValueError(f"store_dtype={store_dtype!r}: must be one of {', '.join(STORE_DTYPES)}")
        if n_candidates is not None and n_candidates < 1:
            raise ValueError(f"n_candidates={n_candidates}: must be at least 1, or None")
        self.encoder = encoder
        self.factory = factory
        self.store_dtype = store_dtype
        self.n_candidates = n_candidates
        self.faiss_index: Any = None
        if factory != "auto":
            self.faiss_index = _id_map(factory, encoder.n_features)
        self._store = _DocumentStore(encoder.n_features_in_, STORE_DTYPES[store_dtype])

    @classmethod
    def build(
        cls,
        documents: Any,
        queries: Any = None,
        *,
        factory: str | faiss.Index = "auto",
        store_dtype: str = "float32",
        n_candidates: int | None = None,
        ids: Any = None,
        **encoder_parameters: Any,
    ) -> LemurIndex:
        """Fit an encoder on the documents, and index them.

        Parameters
        ----------
        documents : MultiVectors, list of (n_i, d) arrays or tensors, or (N, L, d) block
        queries : the same forms, optional
            A sample of queries to learn from.
        factory, store_dtype, n_candidates
            As for the class.
        ids : array of shape (N,), int64, optional
        **encoder_parameters
            Of `LemurEncoder`, which knows no others.

        Returns
        -------
        LemurIndex
            With the documents in it.
        """
        documents = as_multivectors(documents, "documents")
        encoder = LemurEncoder(**encoder_parameters).fit(documents, queries)
        index = cls(encoder, factory, store_dtype=store_dtype, n_candidates=n_candidates)
        index.add(documents, ids)
        return index

    @property
    def ntotal(self) -> int:
        """Documents in the index."""
        return len(self._store)

    def add(self, documents: Any, ids: Any = None, *, vectors: Any = None) -> None:
        """Add documents; each costs one least-squares solution, and nothing is trained again.

        Parameters
        ----------
        documents : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one document (n, d)
        ids : array of shape (N,), int64, optional
            At least 0. By default they go on from the highest id so far.
        vectors : tensor of shape (N, n_features), optional
            What ``encoder.encode_document`` returned for these documents, where it is at hand.

        Raises
        ------
        ValueError
            When an id is given twice, is taken or negative, the documents are malformed, ``vectors`` have another
            shape, or the factory's index needs more documents to be trained on.
        """
        encoder = self.encoder
        documents = as_multivectors(documents, "documents", dimension=encoder.n_features_in_, expected="the encoder")
        numbers = self._new_ids(ids, len(documents))
        rows = encoder.encode_document(documents) if vectors is None else torch.as_tensor(vectors)
        if tuple(rows.shape) != (len(documents), encoder.n_features):
            wanted = (len(documents), encoder.n_features)
            raise ValueError(f"vectors have shape {tuple(rows.shape)}; must be {wanted}, one row a document")
        weights = rows.to(device="cpu", dtype=torch.float32).contiguous().numpy()
        if self.faiss_index is None:
            self.faiss_index = _id_map("Flat" if len(documents) < FLAT_BELOW else "HNSW32", encoder.n_features)
        if not self.faiss_index.is_trained:
            self._train(weights)
        self.faiss_index.add_with_ids(weights, numbers)
        self._store.append(documents, numbers)

    def remove_ids(self, ids: Any) -> int:
        """Remove documents.

        Parameters
        ----------
        ids : array of integers
            Those that are not there are passed over.

        Returns
        -------
        int
            Documents removed.
        """
        wanted = np.unique(np.atleast_1d(np.asarray(ids, dtype=np.int64)))
        there = wanted[self._store.positions(wanted) >= 0]
        if not len(there):
            return 0
        inner = faiss.downcast_index(self.faiss_index.index)
        if isinstance(inner, faiss.IndexFlatCodes):
            self.faiss_index.remove_ids(there)
        else:
            self._hide(there)
        self._store.remove(there)
        return len(there)

    def search(
        self,
        queries: Any,
        k: int,
        *,
        n_candidates: int | None = None,
        rerank: bool = True,
        params: Any = None,
        allowed_ids: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best k documents of each query.

        Parameters
        ----------
        queries : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one query (n, d)
        k : int
        n_candidates : int, optional
            Candidates to score exactly, at least k; more than there are documents means all of them.
        rerank : bool
            False returns the order and the estimates of the FAISS index, in the units of MaxSim.
        params : faiss.SearchParameters, optional
            For the index that the factory made, such as ``faiss.SearchParametersHNSW(efSearch=200)``. Its own
            selector is replaced where ids are filtered.
        allowed_ids : array of integers, optional
            Only these documents may be found.

        Returns
        -------
        scores : ndarray of shape (Q, k), float32
            MaxSim, in descending order; -inf where fewer documents are found.
        ids : ndarray of shape (Q, k), int64
            -1 where fewer documents are found.

        Raises
        ------
        ValueError
            When ``k < 1``, ``n_candidates < k``, or the queries are malformed or of another d.
        """
        encoder = self.encoder
        queries = as_multivectors(queries, "queries", dimension=encoder.n_features_in_, expected="the index")
        if k < 1:
            raise ValueError(f"k={k}: must be at least 1")
        if n_candidates is None:
            n_candidates = max(k, self.n_candidates) if self.n_candidates else max(50, 5 * k)
        if n_candidates < k:
            raise ValueError(f"n_candidates={n_candidates}: must be at least k={k}")
        if self.ntotal == 0:
            return np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
        n_found = min(n_candidates if rerank else k, self.ntotal)
        estimates, ids = self._candidates(encoder.encode_query(queries), n_found, params, allowed_ids)
        if rerank:
            rows = self._store.positions(ids)
            best, places = maxsim_rerank(queries, self._store.documents, rows, k)
            return best.numpy(), self._store.ids_at(places.numpy())
        scores = estimates * encoder.scale_ + queries.lengths.numpy()[:, None] * encoder.mean_
        missing = ((0, 0), (0, k - n_found))
        scores = np.where(ids < 0, -np.inf, scores).astype(np.float32)
        return np.pad(scores, missing, constant_values=-np.inf), np.pad(ids, missing, constant_values=-1)

    def memory(self) -> dict[str, int]:
        """Say where the memory goes.

        Returns
        -------
        dict of str to int
            Bytes of the ``tokens`` (all documents, d numbers each), of the document ``vectors`` as FAISS codes them,
            and of what FAISS keeps beside those, the ``graph`` or lists.
        """
        tokens = self._store.nbytes
        if self.faiss_index is None:
            return {"tokens": tokens, "vectors": 0, "graph": 0}
        inner = faiss.downcast_index(self.faiss_index.index)
        storage = faiss.downcast_index(inner.storage) if isinstance(inner, faiss.IndexHNSW) else inner
        code = storage.code_size if hasattr(storage, "code_size") else 4 * storage.d
        vectors = int(code) * int(self.faiss_index.ntotal)
        return {"tokens": tokens, "vectors": vectors, "graph": max(0, len(_serialised(self.faiss_index)) - vectors)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the encoder, the FAISS index, the tokens (safetensors) and JSON to a folder; nothing is pickled.

        Parameters
        ----------
        path : path
            The folder; it is made if need be.
        """
        folder = Path(path)
        self.encoder.save(folder)
        documents, ids = self._store.documents, self._store.ids
        tensors = {"vectors": documents.vectors, "lengths": documents.lengths, "ids": torch.from_numpy(ids)}
        described = {
            "format": FORMAT,
            "encoder": self.encoder.fingerprint(),
            "factory": self.factory if isinstance(self.factory, str) else "",
            "store_dtype": self.store_dtype,
            "n_candidates": self.n_candidates,
            "next_id": self._store.next_id,
            "has_faiss_index": self.faiss_index is not None,
        }
        write_whole(folder / "documents.safetensors", safetensors.torch.save(tensors))
        if self.faiss_index is not None:
            write_whole(folder / "index.faiss", _serialised(self.faiss_index).tobytes())
        write_whole(folder / "index.json", json.dumps(described, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: Any = None) -> LemurIndex:
        """Read an index that `save` wrote.

        Parameters
        ----------
        path : path
            The folder.
        device : str or torch.device, optional
            Where the encoder computes; by default where it was fitted.

        Returns
        -------
        LemurIndex

        Raises
        ------
        FileNotFoundError
            When a file is missing.
        ValueError
            When the files do not belong together, or were written by a newer version.
        """
        folder = Path(path)
        described = read_description(folder / "index.json", FORMAT)
        encoder = LemurEncoder.load(folder, device=device)
        if encoder.fingerprint() != described["encoder"]:
            raise ValueError(f"{folder}: the encoder there is not the one the index was built with; save both again")
        index = cls(encoder, "auto", store_dtype=described["store_dtype"], n_candidates=described["n_candidates"])
        index.factory = described["factory"]
        tensors = safetensors.torch.load_file(folder / "documents.safetensors")
        if len(tensors["ids"]):
            documents = MultiVectors.of_checked(tensors["vectors"], tensors["lengths"])
            index._store.append(documents, tensors["ids"].numpy())
        index._store.next_id = described["next_id"]
        if described["has_faiss_index"]:
            content = np.fromfile(folder / "index.faiss", np.uint8)
            try:
                index.faiss_index = faiss.deserialize_index(content)
            except RuntimeError as error:
                raise ValueError(f"{folder / 'index.faiss'}: is not a FAISS index: {error}") from error
        found = 0 if index.faiss_index is None else int((_ids_of(index.faiss_index) >= 0).sum())
        if found != index.ntotal:
            raise ValueError(f"{folder}: index.faiss has {found} documents, documents.safetensors {index.ntotal}")
        return index

    def _new_ids(self, ids: Any, n: int) -> np.ndarray:
        if ids is None:
            return np.arange(self._store.next_id, self._store.next_id + n, dtype=np.int64)
        given = np.asarray(ids)
        if given.shape != (n,) or given.dtype.kind not in "iu":
            raise ValueError(f"ids must be {n} integers, one a document; got {given.dtype} {given.shape}")
        numbers = given.astype(np.int64)
        if numbers.min() < 0:
            raise ValueError(f"ids: {int(numbers.min())} is negative; must be at least 0")
        distinct, times = np.unique(numbers, return_counts=True)
        if times.max() > 1:
            raise ValueError(f"ids: {int(distinct[times.argmax()])} is given twice")
        taken = distinct[self._store.positions(distinct) >= 0]
        if len(taken):
            raise ValueError(f"ids: {int(taken[0])} is taken; remove it first, or give another")
        return numbers

    def _train(self, weights: np.ndarray) -> None:
        try:
            self.faiss_index.train(weights)
        except RuntimeError as error:
            reason = str(error).rpartition("Error: ")[2].strip()
            message = f"factory={self.factory!r} cannot be trained on the {len(weights)} documents first added"
            raise ValueError(f"{message}: {reason}") from error
        inverted = faiss.try_extract_index_ivf(self.faiss_index.index)
        if inverted is not None:
            inverted.make_direct_map()

    def _candidates(
        self, features: torch.Tensor, n: int, params: Any, allowed_ids: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        selector: Any = None
        if allowed_ids is not None:
            allowed = np.unique(np.asarray(allowed_ids, dtype=np.int64))
            selector = faiss.IDSelectorBatch(allowed[allowed >= 0])
        elif self.faiss_index.ntotal > self.ntotal:
            # Ids of removed documents are negative.
            selector = faiss.IDSelectorRange(0, LARGEST_ID)
        inner = faiss.downcast_index(self.faiss_index.index)
        if isinstance(inner, faiss.IndexFlat) and selector is None and params is None:
            codes = faiss.rev_swig_ptr(inner.get_xb(), inner.ntotal * inner.d).reshape(inner.ntotal, inner.d)
            estimates, rows = flat_search(features.cpu(), torch.from_numpy(codes), n)
            return estimates, _ids_of(self.faiss_index)[rows]
        params = _search_parameters(self.faiss_index, params, selector, n)
        estimates, ids = self.faiss_index.search(features.cpu().numpy(), n, params=params)
        return estimates, ids

    def _hide(self, ids: np.ndarray) -> None:
        """Give the entries of these documents negative ids, each its own."""
        entries = _ids_of(self.faiss_index)
        rows = np.flatnonzero(np.isin(entries, ids))
        entries[rows] = -2 - rows
        faiss.copy_array_to_vector(entries, self.faiss_index.id_map)
        self.faiss_index.construct_rev_map()


class _DocumentStore:
    """Tokens and ids of the documents, in the order they were added. Room grows by half, so adding is linear."""

    def __init__(self, dimension: int, dtype: torch.dtype) -> None:
        self.vectors = torch.empty(0, dimension, dtype=dtype)
        self.n_tokens = 0
        self.lengths = torch.empty(0, dtype=torch.int64)
        self.ids = np.empty(0, np.int64)
        self.next_id = 0
        self._reorder()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.n_tokens * self.vectors.shape[1] * self.vectors.element_size()

    def append(self, documents: MultiVectors, ids: np.ndarray) -> None:
        total = self.n_tokens + len(documents.vectors)
        if total > len(self.vectors):
            room = total if self.n_tokens == 0 else max(total, len(self.vectors) * 3 // 2)
            larger = torch.empty(room, self.vectors.shape[1], dtype=self.vectors.dtype)
            larger[: self.n_tokens] = self.vectors[: self.n_tokens]
            self.vectors = larger
        self.vectors[self.n_tokens : total] = documents.vectors
        self.n_tokens = total
        self.lengths = torch.cat([self.lengths, documents.lengths])
        self.ids = np.concatenate([self.ids, ids])
        self.next_id = max(self.next_id, int(ids.max()) + 1)
        self._reorder()

    def remove(self, ids: np.ndarray) -> None:
        kept = np.flatnonzero(~np.isin(self.ids, ids))
        documents = self.documents[kept] if len(kept) else None
        self.ids = self.ids[kept]
        self.lengths = self.lengths[torch.from_numpy(kept)]
        self.n_tokens = 0 if documents is None else len(documents.vectors)
        self.vectors = self.vectors[:0] if documents is None else documents.vectors
        self._reorder()

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Where the documents of these ids are; -1 for an id that is not there."""
        if self._consecutive:
            return np.where((ids >= 0) & (ids < len(self.ids)), ids, -1)
        if not len(self.ids):
            return np.full(ids.shape, -1, np.int64)
        places = np.searchsorted(self._sorted_ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self._sorted_ids[places] == ids, self._order[places], -1)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        return np.where(positions < 0, -1, self.ids[positions])

    def _reorder(self) -> None:
        self.documents = MultiVectors.of_checked(self.vectors[: self.n_tokens], self.lengths)
        self._consecutive = bool(len(self.ids)) and bool((self.ids == np.arange(len(self.ids))).all())
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted_ids = self.ids[self._order]


def _id_map(factory: str | faiss.Index, d: int) -> faiss.IndexIDMap2:
    if isinstance(factory, faiss.Index):
        inner = factory
        if inner.d != d or inner.metric_type != faiss.METRIC_INNER_PRODUCT or inner.ntotal:
            raise ValueError(
                f"factory: an index given must be empty, for inner products, of d={d}; "
                f"it has {inner.ntotal} vectors, metric {inner.metric_type}, d={inner.d}"
            )
    else:
        try:
            inner = faiss.index_factory(d, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ValueError(f"factory={factory!r}: FAISS cannot make such an index of d={d}") from error
        inner.this.disown()  # type: ignore[attr-defined]
    known: Any = faiss.downcast_index(inner)
    if isinstance(known, faiss.IndexHNSW):
        graph = known.hnsw
        graph.efSearch = max(graph.efSearch, EF_SEARCH)
    if isinstance(known, faiss.IndexIDMap):
        raise ValueError(f"factory={factory!r}: ids are mapped already; leave the IDMap out")
    mapped = faiss.IndexIDMap2(inner)
    mapped.own_fields = isinstance(factory, str)
    if not mapped.own_fields:
        mapped.referenced_objects = [inner]  # type: ignore[attr-defined]
    return mapped


def _search_parameters(index: Any, params: Any, selector: Any, n: int) -> Any:
    """The caller's parameters, or those of the index itself, with the selector in them."""
    inner = faiss.downcast_index(index.index)
    if params is None:
        if isinstance(inner, faiss.IndexHNSW) and (selector is not None or n > inner.hnsw.efSearch):
            params = faiss.SearchParametersHNSW(efSearch=max(n, inner.hnsw.efSearch))  # type: ignore[attr-defined]
        elif isinstance(inner, faiss.IndexIVF) and selector is not None:
            params = faiss.SearchParametersIVF(nprobe=inner.nprobe)  # type: ignore[call-arg]
        elif selector is not None:
            params = faiss.SearchParameters()
    if selector is not None:
        params.sel = selector
    return params


def _ids_of(index: Any) -> np.ndarray:
    return faiss.vector_to_array(index.id_map).copy()


def _serialised(index: Any) -> np.ndarray:
    return faiss.serialize_index(index)
