"""Token-wise lookups (ToLs): what the memory of every layer holds for every token, as a table."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from practicum.language.memoryllm.storage import (
    TYPES,
    Bytes,
    Cached,
    Ids,
    InMemory,
    Mapped,
    Rows,
    bytes_of,
    read_header,
    read_tensors,
    write_table,
)
from practicum.toolbox.errors import InputError

Backend = Literal["memory", "mmap", "cached"]
BACKENDS = ("memory", "mmap", "cached")
ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMAT = "practicum-token-lookups-1"
# Tokens that are decoded, quantised or written at a time.
BATCH = 4096


@dataclass
class LookupStats:
    """What was looked up so far; a token that occurs twice in a call of `gather` is one lookup.

    Attributes
    ----------
    lookups, hits, misses : int
        ``hits`` were in memory; ``misses`` were read from the file. With a mapped file all count as misses, as the
        system alone knows which pages it has.
    prefetched : int
        Misses whose reading had begun before `gather` asked.
    bytes_read : int
        Of the misses.

    Examples
    --------
    For ids of shape (n,) there are as many lookups as distinct ids:

    >>> lookups = TokenLookups(torch.randn(9, 2, 4))
    >>> _ = lookups.gather([3, 5, 3])
    >>> lookups.stats
    LookupStats(lookups=2, hits=2, misses=0, prefetched=0, bytes_read=0)
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    bytes_read: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that were hits; not a number before the first."""
        return self.hits / self.lookups if self.lookups else float("nan")


@dataclass(frozen=True)
class Layout:
    """What the stored bytes mean.

    Attributes
    ----------
    n_tokens, n_layers, hidden_size : int
        V, N and h.
    dtype : torch.dtype
        Of the rows that are given out.
    layers : tuple of int
        Those that are stored.
    bits : int or None
        8 or 4 where values are quantised.
    rank : int or None
        Where a row is stored by its coefficients in a basis of the layer.
    fingerprint : str
        Of the weights that the table was computed from.
    """

    n_tokens: int
    n_layers: int
    hidden_size: int
    dtype: torch.dtype
    layers: tuple[int, ...]
    bits: int | None = None
    rank: int | None = None
    fingerprint: str = ""

    @property
    def width(self) -> int:
        """Numbers that are stored of a token and layer."""
        return self.hidden_size if self.rank is None else self.rank

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the stored numbers; two of 4 bits share a byte."""
        return {None: self.dtype, 8: torch.int8, 4: torch.uint8}[self.bits]

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Of the stored tensor: token-major, so that all layers of a token lie side by side."""
        width = (self.width + 1) // 2 if self.bits == 4 else self.width
        return self.n_tokens, len(self.layers), width

    @property
    def row_bytes(self) -> int:
        """Of one token: what one read brings."""
        return self.stored_shape[1] * self.stored_shape[2] * self.stored_dtype.itemsize


class TokenLookups:
    """A table T of shape (V, N, h): the output of layer L's memory for token v is ``T[v, L]``.

    It is token-major: all that a token needs lies together, so that a token costs one read. Rows are given out in the
    type that the table was computed in, however they are stored.

    Make one with `MemoryLMForCausalLM.precompute_lookups` or `load`, or give a tensor.

    Parameters
    ----------
    table : Tensor of shape (V, N, h)
        Of float32, float16 or bfloat16.
    fingerprint : str
        Of the weights that it comes from; see `MemoryLMForCausalLM.memory_fingerprint`.

    Attributes
    ----------
    shape : (int, int, int)
        V, N and h.
    dtype : torch.dtype
        Of the rows that are given out.
    backend : {"memory", "mmap", "cached"}
    layers : tuple of int
        The layers that have rows; the others read as 0.
    fingerprint : str
    stats : LookupStats

    Raises
    ------
    ValueError
        For a tensor of another shape or type.

    References
    ----------
    arXiv:2602.00398, section 2. Layout, backends and quantisation are ours.

    Examples
    --------
    >>> lookups = TokenLookups(torch.randn(100, 3, 8))
    >>> lookups.gather(torch.tensor([[5, 6, 5]])).shape
    torch.Size([1, 3, 3, 8])
    >>> lookups.nbytes, lookups.quantize(8).nbytes, lookups.quantize(4).nbytes
    (9600, 3000, 1800)
    """

    def __init__(self, table: Tensor, fingerprint: str = "") -> None:
        if table.ndim != 3 or 0 in table.shape:
            raise InputError(f"table: must have shape (tokens, layers, hidden size); got {tuple(table.shape)}")
        if table.dtype not in ROW_TYPES:
            raise InputError(f"table: must be float32, float16 or bfloat16; got {table.dtype}")
        n_tokens, n_layers, hidden_size = table.shape
        layout = Layout(n_tokens, n_layers, hidden_size, table.dtype, tuple(range(n_layers)), fingerprint=fingerprint)
        self._set(layout, InMemory(_flat(table)), "memory", None, None)

    def _set(self, layout: Layout, rows: Rows, backend: Backend, scales: Tensor | None, basis: Tensor | None) -> None:
        self._layout, self._rows, self.backend = layout, rows, backend
        # Small beside the rows, and needed with each of them: they stay in memory.
        self._scales, self._basis = scales, basis
        self.stats = LookupStats()
        self._lock = threading.Lock()
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: tuple[Ids, Future[Bytes]] | None = None

    @classmethod
    def _of(
        cls,
        layout: Layout,
        rows: Rows,
        backend: Backend = "memory",
        scales: Tensor | None = None,
        basis: Tensor | None = None,
    ) -> TokenLookups:
        lookups = cls.__new__(cls)
        lookups._set(layout, rows, backend, scales, basis)
        return lookups

    @property
    def shape(self) -> tuple[int, int, int]:
        """V, N and h."""
        return self._layout.n_tokens, self._layout.n_layers, self._layout.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that are given out."""
        return self._layout.dtype

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have rows."""
        return self._layout.layers

    @property
    def bits(self) -> int | None:
        """8 or 4 where the values are quantised."""
        return self._layout.bits

    @property
    def fingerprint(self) -> str:
        """Of the weights that the table comes from."""
        return self._layout.fingerprint

    @property
    def row_bytes(self) -> int:
        """What is read for one token."""
        return self._layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table, wherever it is: rows, scales and basis."""
        return self._layout.n_tokens * self._layout.row_bytes + self._small_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that it holds in memory itself; pages of a mapped file belong to the system and do not count."""
        return self._rows.resident_bytes + self._small_bytes

    @property
    def _small_bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self._scales, self._basis) if t is not None)

    def __repr__(self) -> str:
        stored = f"{self.bits} bits" if self.bits else str(self.dtype).removeprefix("torch.")
        return f"TokenLookups(shape={self.shape}, stored={stored}, backend={self.backend!r}, nbytes={self.nbytes})"

    # Looking up -------------------------------------------------------------------------------------------------------

    def gather(self, ids: Tensor | ArrayLike) -> Tensor:
        r"""Rows of tokens. Every distinct token is read once.

        Parameters
        ----------
        ids : int array or Tensor of any shape

        Returns
        -------
        Tensor of shape (\*ids.shape, N, h)
            On the device of ``ids``; layers without rows are 0.

        Raises
        ------
        ValueError
            For ids that are not whole numbers from 0 to V - 1.
        """
        device = ids.device if isinstance(ids, Tensor) else torch.device("cpu")
        wanted = self._checked(ids)
        distinct, place = (wanted.reshape(-1), None) if wanted.size == 1 else np.unique(wanted, return_inverse=True)
        rows = self._decoded(self._raw(distinct), distinct)
        if place is not None:
            rows = rows[torch.from_numpy(place.reshape(-1))]
        return rows.reshape(*wanted.shape, *rows.shape[1:]).to(device)

    def prefetch(self, ids: Tensor | ArrayLike) -> None:
        """Begin to read the rows of tokens in a thread of its own, for a `gather` that comes later.

        With everything in memory there is nothing to do. What was begun before is finished first.

        Parameters
        ----------
        ids : int array or Tensor of any shape

        Raises
        ------
        ValueError
            As `gather`.
        """
        distinct = np.unique(self._checked(ids))
        if not self._rows.slow:
            return
        with self._lock:
            self._finish_ahead()
            scratch = np.empty((len(distinct), self._layout.row_bytes), dtype=np.uint8)
            missing = distinct[~self._rows.held(distinct, scratch)]
            if len(missing):
                if self._reader is None:
                    self._reader = ThreadPoolExecutor(1, thread_name_prefix="token-lookups")
                self._ahead = missing, self._reader.submit(self._rows.fetch, missing)

    def _checked(self, ids: Tensor | ArrayLike) -> Ids:
        found = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        if found.dtype.kind not in "iu":
            raise InputError(f"ids: must be whole numbers; got {found.dtype}")
        found = found.astype(np.int64, copy=False)
        if found.size and (found.min() < 0 or found.max() >= self._layout.n_tokens):
            wrong = found[(found < 0) | (found >= self._layout.n_tokens)][0]
            raise InputError(f"ids: the table has tokens 0 to {self._layout.n_tokens - 1}; got {wrong}")
        return found

    def _raw(self, ids: Ids) -> Bytes:
        """Stored rows of distinct sorted ids."""
        raw = np.empty((len(ids), self._layout.row_bytes), dtype=np.uint8)
        with self._lock:
            here = self._rows.held(ids, raw)
            missing = ids[~here]
            if len(missing):
                raw[~here] = self._missing(missing)
            stats = self.stats
            stats.lookups += len(ids)
            stats.hits += len(ids) - len(missing)
            stats.misses += len(missing)
            stats.bytes_read += len(missing) * self._layout.row_bytes
        return raw

    def _missing(self, ids: Ids) -> Bytes:
        known: dict[int, int] = {}
        if self._ahead is not None:
            begun, reading = self._ahead
            self._ahead = None
            early = reading.result()
            known = {token: i for i, token in enumerate(begun.tolist())}
        places = np.array([known.get(token, -1) for token in ids.tolist()])
        if (places >= 0).all():
            rows = early[places]
        else:
            rows = np.empty((len(ids), self._layout.row_bytes), dtype=np.uint8)
            rows[places < 0] = self._rows.fetch(ids[places < 0])
            if known:
                rows[places >= 0] = early[places[places >= 0]]
        if known:
            self.stats.prefetched += int((places >= 0).sum())
            others = ~np.isin(begun, ids)
            self._rows.keep(begun[others], early[others])
        self._rows.keep(ids, rows)
        return rows

    def _finish_ahead(self) -> None:
        if self._ahead is not None:
            begun, reading = self._ahead
            self._ahead = None
            self._rows.keep(begun, reading.result())

    def _decoded(self, raw: Bytes, ids: Ids) -> Tensor:
        """Rows of shape (n, N, h) from what is stored."""
        layout = self._layout
        values = _unpacked(torch.from_numpy(raw), layout)
        if self._scales is not None:
            values = values.float() * self._scales[torch.from_numpy(ids)].float()[..., None]
        if self._basis is not None:
            values = torch.einsum("nlr,lrh->nlh", values.float(), self._basis.float())
        values = values.to(layout.dtype)
        if len(layout.layers) == layout.n_layers:
            return values
        full = torch.zeros(len(ids), layout.n_layers, layout.hidden_size, dtype=layout.dtype)
        full[:, list(layout.layers)] = values
        return full

    def layer(self, layer: int, token_ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """Rows of one layer.

        Parameters
        ----------
        layer : int
            From 0.
        token_ids : sequence of int or Tensor, optional
            All tokens by default.

        Returns
        -------
        Tensor of shape (n, h)

        Raises
        ------
        ValueError
            For a layer or a token that the table has not.
        """
        (layer,) = _checked_layers([layer], self._layout.n_layers)
        wanted = np.arange(self._layout.n_tokens) if token_ids is None else self._checked(token_ids).reshape(-1)
        parts = [
            self._decoded(self._rows.fetch(ids), ids)[:, layer]
            for ids in (wanted[i : i + BATCH] for i in range(0, len(wanted), BATCH))
        ]
        return torch.cat(parts) if parts else torch.empty(0, self._layout.hidden_size, dtype=self._layout.dtype)

    # Other tables of the same -----------------------------------------------------------------------------------------

    def quantize(self, bits: int) -> TokenLookups:
        """Store whole numbers of so many bits, with a float16 scale for each token and layer.

        Symmetric and rounded to nearest: a value x is stored as round(x / s), with s the largest absolute value of the
        token's layer divided by 127 (or 7). The scale is rounded up, so that the error is at most s / 2. A row of zeros
        stays one. Of a table of low rank the coefficients are quantised.

        Parameters
        ----------
        bits : {8, 4}

        Returns
        -------
        TokenLookups
            In memory.

        Raises
        ------
        ValueError
            For other bits, a table that is quantised already, or values that float16 scales cannot reach.
        """
        if bits not in (8, 4):
            raise InputError(f"bits={bits}: must be 8 or 4")
        if self.bits is not None:
            raise InputError(f"bits={bits}: the table is quantised to {self.bits} bits already")
        layout = replace(self._layout, bits=bits)
        stored = torch.empty(layout.stored_shape, dtype=layout.stored_dtype)
        scales = torch.empty(layout.stored_shape[:2], dtype=torch.float16)
        for ids in self._batches():
            values = _unpacked(torch.from_numpy(self._rows.fetch(ids)), self._layout).float()
            span = slice(int(ids[0]), int(ids[-1]) + 1)
            stored[span], scales[span] = _quantized(values, bits)
        return self._of(layout, InMemory(_flat(stored)), scales=scales, basis=self._basis)

    def low_rank(self, rank_fraction: float) -> TokenLookups:
        r"""Store the best approximation :math:`T_L \approx U_L V_L` of a rank r for every layer.

        U has the r coefficients of each token, token-major like the table; V, of shape (r, h), stays in memory. It
        comes from the eigenvectors of the h x h matrix :math:`T_L^\top T_L`, so that the table is read in batches.

        Parameters
        ----------
        rank_fraction : float
            r over h, in (0, 1]; at least rank 1 is kept.

        Returns
        -------
        TokenLookups
            In memory.

        Raises
        ------
        ValueError
            For a fraction out of range, or a table that is quantised or of low rank already.

        Warns
        -----
        UserWarning
            When no space is saved, which takes r <= V h / (V + h).
        """
        if not 0 < rank_fraction <= 1:
            raise InputError(f"rank_fraction={rank_fraction}: must be above 0 and at most 1")
        if self.bits is not None or self._basis is not None:
            raise InputError("low_rank: the table is compressed already; begin with the one as it was computed")
        n_tokens, _, h = self.shape
        rank = max(1, round(rank_fraction * h))
        most = n_tokens * h // (n_tokens + h)
        if rank > most:
            warnings.warn(
                f"rank {rank} of {h} saves no space for {n_tokens} tokens: a rank of {most} or less would", stacklevel=2
            )
        kept = len(self._layout.layers)
        gram = torch.zeros(kept, h, h, dtype=torch.float64)
        for _, values in self._stored():
            gram += torch.einsum("nlh,nlk->lhk", values.double(), values.double())
        # The eigenvalues ascend.
        basis = torch.linalg.eigh(gram).eigenvectors[:, :, -rank:].flip(2).transpose(1, 2)
        layout = replace(self._layout, rank=rank)
        stored = torch.empty(layout.stored_shape, dtype=self.dtype)
        for ids, values in self._stored():
            coefficients = torch.einsum("nlh,lrh->nlr", values.double(), basis)
            stored[int(ids[0]) : int(ids[-1]) + 1] = coefficients.to(self.dtype)
        return self._of(layout, InMemory(_flat(stored)), basis=basis.to(self.dtype).contiguous())

    def select_layers(self, layers: Sequence[int]) -> TokenLookups:
        """Keep the rows of some layers; the others read as 0, which drops their memory.

        Parameters
        ----------
        layers : sequence of int
            From 0; of those that have rows.

        Returns
        -------
        TokenLookups
            In memory.

        Raises
        ------
        ValueError
            For layers that are not there, or are named twice.
        """
        chosen = _checked_layers(layers, self._layout.n_layers)
        gone = [layer for layer in chosen if layer not in self.layers]
        if gone:
            raise InputError(f"layers: {gone[0]} has no rows in this table; there are {list(self.layers)}")
        if not chosen:
            raise InputError("layers: must name one at least")
        places = [self.layers.index(layer) for layer in chosen]
        layout = replace(self._layout, layers=tuple(chosen))
        stored = torch.empty(layout.stored_shape, dtype=layout.stored_dtype)
        for ids in self._batches():
            raw = torch.from_numpy(self._rows.fetch(ids)).reshape(len(ids), len(self.layers), -1)
            stored[int(ids[0]) : int(ids[-1]) + 1] = raw[:, places].contiguous().view(layout.stored_dtype)
        scales = None if self._scales is None else self._scales[:, places].contiguous()
        basis = None if self._basis is None else self._basis[places].contiguous()
        return self._of(layout, InMemory(_flat(stored)), scales=scales, basis=basis)

    def _batches(self) -> Iterator[Ids]:
        for start in range(0, self._layout.n_tokens, BATCH):
            yield np.arange(start, min(start + BATCH, self._layout.n_tokens))

    def _stored(self) -> Iterator[tuple[Ids, Tensor]]:
        for ids in self._batches():
            yield ids, _unpacked(torch.from_numpy(self._rows.fetch(ids)), self._layout)

    # Files ------------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Write a safetensors file with the tensors ``values``, ``scales`` and ``basis``, as far as there are any.

        ``values`` has shape (V, layers, numbers); it is written in batches, and the file takes its name when whole.

        Parameters
        ----------
        path : Path or str
        """
        small = {"scales": self._scales, "basis": self._basis}
        given = {name: tensor for name, tensor in small.items() if tensor is not None}

        def parts() -> Iterator[Any]:
            yield given
            for ids in self._batches():
                yield self._rows.fetch(ids)
            yield given

        _write(Path(path), self._layout, parts())

    @classmethod
    def load(
        cls,
        path: Path | str,
        backend: Backend = "memory",
        cache_rows: int | None = None,
        counts: ArrayLike | Mapping[int, int] | None = None,
    ) -> TokenLookups:
        """Open a table that was saved.

        Parameters
        ----------
        path : Path or str
        backend : {"memory", "mmap", "cached"}
            ``"memory"`` reads all of it. ``"mmap"`` maps the file, so that the system keeps what memory allows; several
            processes may share it. ``"cached"`` reads rows when they are asked for, one read each, and keeps
            ``cache_rows`` of them: its memory is bounded whatever the system does.
        cache_rows : int, optional
            Of ``"cached"``, from 1 to V.
        counts : array of shape (V,), or mapping from id to count, optional
            How often tokens occur, for ``"cached"``: the most frequent are read at once and stay. Without it the row
            that was not used for the longest time makes room (LRU).

        Returns
        -------
        TokenLookups

        Raises
        ------
        ValueError
            With the path, for a file that is missing, damaged or not such a table; for arguments that do not go
            together.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TokenLookups(torch.randn(50, 2, 4)).save(f"{folder}/tol.safetensors")
        ...     lookups = TokenLookups.load(f"{folder}/tol.safetensors", backend="cached", cache_rows=5)
        ...     for ids in ([1, 2, 3], [2, 3, 4]):
        ...         _ = lookups.gather(ids)
        >>> lookups.stats.hits, lookups.stats.misses
        (2, 4)
        """
        path = Path(path)
        if backend not in BACKENDS:
            raise InputError(f"backend={backend!r}: must be one of {', '.join(map(repr, BACKENDS))}")
        if backend != "cached" and (cache_rows is not None or counts is not None):
            raise InputError(f"backend={backend!r}: cache_rows and counts are for backend='cached'")
        layout, offset = _read_layout(path)
        small = read_tensors(path, [name for name, there in _small(layout).items() if there])
        shape = layout.n_tokens, layout.row_bytes
        rows: Rows
        if backend == "memory":
            rows = InMemory(np.fromfile(path, dtype=np.uint8, count=shape[0] * shape[1], offset=offset).reshape(shape))
        elif backend == "mmap":
            rows = Mapped(path, offset, shape)
        else:
            if cache_rows is None or not 1 <= cache_rows <= layout.n_tokens:
                raise InputError(f"cache_rows={cache_rows}: backend='cached' needs 1 to {layout.n_tokens} rows")
            rows = Cached(path, offset, shape, cache_rows, _checked_counts(counts, layout.n_tokens))
        return cls._of(layout, rows, backend, small.get("scales"), small.get("basis"))


def write_rows(path: Path, layout: Layout, batches: Iterator[Tensor]) -> None:
    """Write a table whose rows are being computed, so that it need not fit into memory.

    Parameters
    ----------
    path : Path
    layout : Layout
        Neither quantised nor of low rank.
    batches : iterator of Tensor of shape (n, N, h)
    """

    def parts() -> Iterator[Any]:
        yield {}
        for batch in batches:
            yield bytes_of(batch)

    _write(path, layout, parts())


def _write(path: Path, layout: Layout, parts: Iterator[Any]) -> None:
    metadata = {
        "format": FORMAT,
        "fingerprint": layout.fingerprint,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "n_layers": str(layout.n_layers),
        "hidden_size": str(layout.hidden_size),
        "layers": " ".join(map(str, layout.layers)),
        "bits": str(layout.bits or ""),
        "rank": str(layout.rank or ""),
    }
    write_table(path, ("values", layout.stored_dtype, layout.stored_shape), parts, metadata)


def _small(layout: Layout) -> dict[str, bool]:
    return {"scales": layout.bits is not None, "basis": layout.rank is not None}


def _read_layout(path: Path) -> tuple[Layout, int]:
    metadata, entries = read_header(path)
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path}: is not a table of token lookups; save one with TokenLookups.save")
    values = entries.get("values")
    if values is None:
        raise InputError(f"{path}: has no tensor 'values'; there are {', '.join(entries) or 'none'}")
    try:
        layout = Layout(
            n_tokens=values.shape[0],
            n_layers=int(metadata["n_layers"]),
            hidden_size=int(metadata["hidden_size"]),
            dtype=getattr(torch, metadata["dtype"]),
            layers=tuple(int(layer) for layer in metadata["layers"].split()),
            bits=int(metadata["bits"]) if metadata["bits"] else None,
            rank=int(metadata["rank"]) if metadata["rank"] else None,
            fingerprint=metadata["fingerprint"],
        )
        expected = {"values": (TYPES[layout.stored_dtype], layout.stored_shape)}
    except (KeyError, ValueError, AttributeError, IndexError, TypeError) as error:
        raise InputError(f"{path}: what it says of the table is damaged: {error}") from error
    kept = len(layout.layers)
    if layout.bits is not None:
        expected["scales"] = ("F16", (layout.n_tokens, kept))  # type: ignore[assignment]
    if layout.rank is not None:
        expected["basis"] = (TYPES[layout.dtype], (kept, layout.rank, layout.hidden_size))
    for name, (dtype, shape) in expected.items():
        entry = entries.get(name)
        if entry is None:
            raise InputError(f"{path}: has no tensor {name!r}; there are {', '.join(entries)}")
        if (entry.dtype, entry.shape) != (dtype, shape):
            found = f"{entry.dtype} of shape {entry.shape}"
            raise InputError(f"{path}: {name!r} is {found}; must be {dtype} of shape {shape}")
    return layout, values.offset


def _checked_counts(counts: ArrayLike | Mapping[int, int] | None, n_tokens: int) -> NDArray[Any] | None:
    if counts is None:
        return None
    if isinstance(counts, Mapping):
        dense = np.zeros(n_tokens)
        for token, count in counts.items():
            if not 0 <= int(token) < n_tokens:
                raise InputError(f"counts: the table has tokens 0 to {n_tokens - 1}; got {token}")
            dense[int(token)] = count
        return dense
    found = np.asarray(counts.detach().cpu() if isinstance(counts, Tensor) else counts)
    if found.shape != (n_tokens,):
        raise InputError(f"counts: must have shape ({n_tokens},), a count for each token; got {found.shape}")
    return found


def _checked_layers(layers: Sequence[int], n_layers: int) -> list[int]:
    chosen = [int(layer) for layer in layers]
    for layer in chosen:
        if not 0 <= layer < n_layers:
            raise InputError(f"layers: there are layers 0 to {n_layers - 1}; got {layer}")
    if len(set(chosen)) < len(chosen):
        raise InputError(f"layers: one is named twice in {chosen}")
    return sorted(chosen)


def _flat(stored: Tensor) -> Bytes:
    """(V, bytes of a token)."""
    return bytes_of(stored.reshape(len(stored), -1))


def _unpacked(raw: Tensor, layout: Layout) -> Tensor:
    """Stored numbers (n, layers, width) from bytes (n, row_bytes)."""
    if not len(raw):
        return torch.empty(0, len(layout.layers), layout.width, dtype=layout.dtype)
    stored = raw.view(layout.stored_dtype).reshape(len(raw), *layout.stored_shape[1:])
    if layout.bits != 4:
        return stored
    pairs = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)
    return pairs[..., : layout.width].to(torch.int8) - 8


def _quantized(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers and scales of values of shape (n, layers, width)."""
    largest = 2 ** (bits - 1) - 1
    exact = values.abs().amax(-1) / largest
    scales = exact.half()
    # Adding one to the bits of a positive float16 gives the next; too small a scale would cut off the largest value.
    bumped = (scales.view(torch.int16) + (scales.float() < exact).to(torch.int16)).view(torch.float16)
    if not bool(torch.isfinite(bumped).all()):
        raise InputError(f"quantize: a value of {float(values.abs().max()):.3g} is beyond what float16 scales reach")
    step = bumped.float()[..., None]
    whole = torch.where(step > 0, values / step.clamp_min(1e-30), 0.0).round().clamp(-largest, largest).to(torch.int8)
    if bits == 8:
        return whole, bumped
    shifted = (whole + 8).to(torch.uint8)
    if shifted.shape[-1] % 2:
        shifted = torch.nn.functional.pad(shifted, (0, 1))
    return shifted[..., 0::2] | (shifted[..., 1::2] << 4), bumped
