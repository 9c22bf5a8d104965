"""MaxSim, the score of late interaction: exact over a corpus, and for chosen candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from practicum.retrieval.lemur.multivectors import MultiVectors, as_multivectors

try:
    from practicum.retrieval.lemur._kernel import score_candidates
except ImportError:  # llvmlite is not there for every platform: candidates are then scored by torch
    score_candidates = None  # type: ignore[assignment]

# Numbers in a tile of inner products: what stays in a core's own cache, and what fills a GPU.
TILE = {"cpu": 2**18, "cuda": 2**24}
# Tokens of the other side that one tile takes.
TILE_COLUMNS = 512
# Numbers in a block of maxima, 32 MB.
BLOCK = 2**23
# Candidates that the torch path scores at a time.
CHUNK = 64


def maxsim(queries: Any, documents: Any, *, chunk_elements: int | None = None) -> torch.Tensor:
    r"""Score every document for every query: the sum over query tokens x of the maximum over tokens c of ``<x, c>``.

    .. math:: \mathrm{MaxSim}(X, C) = \sum_{x \in X} \max_{c \in C} \langle x, c \rangle

    Parameters
    ----------
    queries, documents : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one (n, d) set
        float16 and bfloat16 are computed in float32. The queries are moved to the documents' device.
    chunk_elements : int, optional
        Inner products held at a time; by default what suits the device.

    Returns
    -------
    tensor of shape (Q, N), float32
        On the documents' device.

    Raises
    ------
    ValueError
        When the dimensions differ, or one of the arguments is malformed.

    References
    ----------
    Khattab and Zaharia, "ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over
    BERT", SIGIR 2020.

    Examples
    --------
    >>> import numpy as np
    >>> documents = [np.eye(2), np.array([[0.6, 0.8]])]
    >>> maxsim([np.array([[1.0, 0.0], [0.0, 1.0]])], documents)
    tensor([[2.0000, 1.4000]])
    """
    documents = as_multivectors(documents, "documents")
    queries = as_multivectors(queries, "queries", dimension=documents.dimension, expected="documents")
    if chunk_elements is not None and chunk_elements < 1:
        raise ValueError(f"chunk_elements={chunk_elements}: must be at least 1")
    device = documents.vectors.device
    tokens = queries.vectors.to(device=device, dtype=torch.float32)
    scores = torch.empty(len(queries), len(documents), device=device)
    for chosen, maxima in blocks_of_maxima(tokens, documents, chunk_elements):
        scores[:, chosen.to(device)] = sum_by_set(maxima.T.contiguous(), queries.lengths)
    return scores


def maxsim_rerank(queries: Any, documents: Any, candidates: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the candidates of each query exactly, and return the best k of them.

    On the CPU, float32 and bfloat16 documents are scored by a compiled kernel where llvmlite is installed, others
    by torch.

    Parameters
    ----------
    queries, documents : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one (n, d) set
    candidates : array or tensor of shape (Q, k'), integers
        Positions of documents; negative where there is none.
    k : int
        At least 1.

    Returns
    -------
    scores : tensor of shape (Q, k), float32
        In descending order; -inf where a query has fewer candidates.
    ids : tensor of shape (Q, k), int64
        Of equal scores the lower position comes first; -1 goes with -inf.

    Raises
    ------
    ValueError
        When the dimensions differ, or ``candidates`` has another shape, no integers, or positions out of range.

    Examples
    --------
    >>> import numpy as np
    >>> documents = [np.eye(2), np.array([[0.6, 0.8]]), np.array([[1.0, 0.0]])]
    >>> scores, ids = maxsim_rerank(np.array([[1.0, 0.0]]), documents, [[1, 2, -1]], k=3)
    >>> ids
    tensor([[ 2,  1, -1]])
    """
    documents = as_multivectors(documents, "documents")
    queries = as_multivectors(queries, "queries", dimension=documents.dimension, expected="documents")
    rows = _candidate_rows(candidates, len(queries), len(documents))
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    # By position: neighbours in memory follow each other, and a stable sort by score leaves ties in this order.
    rows = torch.where(rows < 0, -1, rows).sort(dim=1).values
    scores = candidate_scores(queries, documents, rows)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    ids = rows.gather(1, order)[:, :k]
    missing = max(0, k - ids.shape[1])
    if missing:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return scores[:, :k].contiguous(), ids.contiguous()


def candidate_scores(queries: MultiVectors, documents: MultiVectors, rows: torch.Tensor) -> torch.Tensor:
    """Exact scores of shape (Q, k') for candidates of shape (Q, k') on the CPU; -inf where a candidate is negative."""
    stored = documents.vectors
    if score_candidates is not None and stored.device.type == "cpu" and stored.dtype != torch.float16:
        tokens = queries.vectors.to(device="cpu", dtype=torch.float32)
        return score_candidates(stored, documents.offsets, tokens, queries.lengths, rows.contiguous())
    return candidate_scores_by_torch(queries, documents, rows)


def candidate_scores_by_torch(queries: MultiVectors, documents: MultiVectors, rows: torch.Tensor) -> torch.Tensor:
    """The same as `candidate_scores` on any device, by gathering and one matrix product a chunk."""
    device = documents.vectors.device
    scores = torch.full(rows.shape, -torch.inf)
    for i, query in enumerate(queries):
        query = query.to(device=device, dtype=torch.float32)
        there = torch.nonzero(rows[i] >= 0)[:, 0]
        # Documents of like length go together, so that little of a chunk is padding.
        there = there[torch.argsort(documents.lengths[rows[i, there]])]
        for chosen in there.split(CHUNK):
            padded = padded_rows(documents, rows[i, chosen])
            n, length = padded.shape
            tokens = documents.vectors.index_select(0, padded.reshape(-1).to(device)).float()
            inner = (query @ tokens.T).view(len(query), n, length)
            scores[i, chosen] = inner.amax(dim=2).sum(dim=0).cpu()
    return scores


def padded_rows(documents: MultiVectors, chosen: torch.Tensor) -> torch.Tensor:
    """Rows of the chosen documents' tokens, shape (n, longest). A short one repeats its last, which no maximum sees."""
    starts, lengths = documents.offsets[:-1][chosen], documents.lengths[chosen]
    steps = torch.arange(int(lengths.max()))
    return starts[:, None] + torch.minimum(steps[None, :], lengths[:, None] - 1)


def blocks_of_maxima(
    tokens: torch.Tensor, documents: MultiVectors, tile_elements: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Compute ``g_j(x)``, the highest inner product of token x with a token of document j, block by block.

    Parameters
    ----------
    tokens : tensor of shape (n, d), float32
        On the device of the documents.
    documents : MultiVectors
    tile_elements : int, optional
        Inner products held at a time.

    Yields
    ------
    chosen : tensor of shape (b,), int64
        Positions of documents; every one comes once, in no particular order.
    maxima : tensor of shape (b, n), float32
        Valid until the next block.
    """
    device = documents.vectors.device
    tile_elements = tile_elements or TILE.get(device.type, TILE["cuda"])
    columns = min(len(tokens), TILE_COLUMNS if device.type == "cpu" else tile_elements // TILE_COLUMNS, tile_elements)
    rows = max(1, tile_elements // columns)
    order = torch.argsort(documents.lengths, stable=True)
    block = max(1, BLOCK // len(tokens))
    maxima = torch.empty(min(block, len(order)), len(tokens), device=device)
    tile = torch.empty(rows * columns, device=device)
    for chosen in order.split(block):
        for first, last in _groups_of_like_length(documents.lengths[chosen], rows):
            _maxima_of_group(tokens, documents, chosen[first:last], maxima[first:last], tile, columns)
        yield chosen, maxima[: len(chosen)]


def _groups_of_like_length(lengths: torch.Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """Cut ascending lengths into runs that take no more than so many rows when padded to their longest."""
    sizes, first = lengths.tolist(), 0
    for at, size in enumerate(sizes):
        if at > first and size * (at + 1 - first) > rows:
            yield first, at
            first = at
    yield first, len(sizes)


def _maxima_of_group(
    tokens: torch.Tensor,
    documents: MultiVectors,
    chosen: torch.Tensor,
    out: torch.Tensor,
    tile: torch.Tensor,
    columns: int,
) -> None:
    padded = padded_rows(documents, chosen)
    n = len(chosen)
    # Only a document that alone is too long for the tile is cut; then the maxima of its pieces are combined.
    for piece, part in enumerate(padded.split(len(tile) // columns // n, dim=1)):
        length = part.shape[1]
        gathered = documents.vectors.index_select(0, part.reshape(-1).to(tokens.device)).float()
        for start in range(0, len(tokens), columns):
            some = tokens[start : start + columns]
            inner = torch.mm(gathered, some.T, out=tile[: n * length * len(some)].view(n * length, len(some)))
            target = out[:, start : start + columns]
            highest = inner.view(n, length, len(some)).amax(dim=1)
            target.copy_(highest if piece == 0 else torch.maximum(target, highest))


def sum_by_set(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sum rows (T, m) set by set, giving (N, m)."""
    starts = torch.cumsum(lengths, 0) - lengths
    rows = torch.arange(len(values), device=values.device)
    return embedding_bag(rows, values, starts.to(values.device), mode="sum")


def _candidate_rows(candidates: Any, n_queries: int, n_documents: int) -> torch.Tensor:
    rows = candidates if isinstance(candidates, torch.Tensor) else torch.as_tensor(np.asarray(candidates))
    if rows.ndim != 2 or len(rows) != n_queries or rows.dtype.is_floating_point or rows.dtype == torch.bool:
        got = f"{str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}"
        raise ValueError(f"candidates must be integers of shape (Q, k') with Q={n_queries}; got {got}")
    rows = rows.to(device="cpu", dtype=torch.int64)
    if rows.numel() and int(rows.max()) >= n_documents:
        raise ValueError(f"candidates name document {int(rows.max())}; there are {n_documents}, counted from 0")
    return rows
