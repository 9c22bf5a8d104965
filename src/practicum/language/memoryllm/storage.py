"""Where the rows of a table are: in memory, in a mapped file, or in a file behind a cache of bounded size."""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from practicum.toolbox.errors import InputError

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]

# Names of types in a safetensors header.
TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class Rows(Protocol):
    """The stored rows of a table, as bytes; ids are sorted and distinct."""

    resident_bytes: int
    # Whether reading may wait for a disk, so that it pays to begin early.
    slow: bool

    def held(self, ids: Ids, into: Bytes) -> NDArray[np.bool_]:
        """Copy the rows that are in memory into their places; True where that was so."""

    def fetch(self, ids: Ids) -> Bytes:
        """Read rows from where they are; safe to call from several threads."""

    def keep(self, ids: Ids, rows: Bytes) -> None:
        """Take note of rows that were read."""


class InMemory:
    """All rows in memory.

    Parameters
    ----------
    rows : array of shape (V, bytes), uint8
    """

    slow = False

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows
        self.resident_bytes = rows.nbytes

    def held(self, ids: Ids, into: Bytes) -> NDArray[np.bool_]:
        """All of them."""
        np.take(self.rows, ids, axis=0, out=into)
        return np.ones(len(ids), dtype=bool)

    def fetch(self, ids: Ids) -> Bytes:
        """Copy rows."""
        return self.rows[ids]

    def keep(self, ids: Ids, rows: Bytes) -> None:
        """Nothing is to be done."""


class Mapped:
    """Rows in a file that is mapped into memory, read-only; the system decides which pages stay.

    Parameters
    ----------
    path : Path
    offset : int
        Of the first row, in bytes.
    shape : (int, int)
        (V, bytes).
    """

    slow = True
    resident_bytes = 0

    def __init__(self, path: Path, offset: int, shape: tuple[int, int]) -> None:
        self.rows = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=shape)
        mapped = getattr(self.rows, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
            # Rows of tokens come in no order: what the system would read ahead is not needed.
            mapped.madvise(mmap.MADV_RANDOM)

    def held(self, ids: Ids, into: Bytes) -> NDArray[np.bool_]:
        """Nobody knows; none."""
        return np.zeros(len(ids), dtype=bool)

    def fetch(self, ids: Ids) -> Bytes:
        """Copy rows out of the map."""
        return np.asarray(self.rows[ids])

    def keep(self, ids: Ids, rows: Bytes) -> None:
        """The system's page cache has them."""


class Cached:
    """Rows in a file, of which so many are kept in memory: the most frequent, or those that were used last.

    Parameters
    ----------
    path : Path
    offset : int
    shape : (int, int)
        (V, bytes).
    capacity : int
        In rows.
    counts : array of shape (V,), optional
        How often each token occurs. With it the most frequent rows are read at once and stay; without it the row that
        has not been used for the longest time makes room.
    """

    slow = True

    def __init__(
        self, path: Path, offset: int, shape: tuple[int, int], capacity: int, counts: NDArray[Any] | None
    ) -> None:
        self.path, self.offset, self.shape = path, offset, shape
        self._file = path.open("rb", buffering=0)
        self._seeking = threading.Lock()
        self._buffer = np.empty((capacity, shape[1]), dtype=np.uint8)
        self._slot_of = np.full(shape[0], -1, dtype=np.int32)
        # Token ids from the one that was used longest ago to the latest, with their places in the buffer.
        self._order: OrderedDict[int, int] = OrderedDict()
        self.static = counts is not None
        self.resident_bytes = self._buffer.nbytes + self._slot_of.nbytes
        if counts is not None:
            # Of equally frequent tokens those with the lower ids, which merges of a tokenizer made first.
            hot = np.sort(np.argsort(-counts, kind="stable")[:capacity]).astype(np.int64)
            self._buffer[:] = self.fetch(hot)
            self._slot_of[hot] = np.arange(len(hot), dtype=np.int32)

    @property
    def cached_ids(self) -> list[int]:
        """Ids in memory: of the hot set sorted, else from the one that was used longest ago to the latest."""
        return np.flatnonzero(self._slot_of >= 0).tolist() if self.static else list(self._order)

    def held(self, ids: Ids, into: Bytes) -> NDArray[np.bool_]:
        """Those of the cache."""
        slots = self._slot_of[ids]
        here = slots >= 0
        into[here] = self._buffer[slots[here]]
        if not self.static:
            for token in ids[here].tolist():
                self._order.move_to_end(token)
        return here

    def fetch(self, ids: Ids) -> Bytes:
        """One read a row."""
        rows = np.empty((len(ids), self.shape[1]), dtype=np.uint8)
        for row, token in zip(rows, ids.tolist(), strict=True):
            if self._read(self.offset + token * self.shape[1], memoryview(row.data)) != len(row):
                raise InputError(f"{self.path}: ends before the row of token {token}; it has been truncated")
        return rows

    def _read(self, start: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            if hasattr(os, "preadv"):
                n = os.preadv(self._file.fileno(), [into[done:]], start + done)
            else:
                with self._seeking:
                    self._file.seek(start + done)
                    n = self._file.readinto(into[done:]) or 0
            if n == 0:
                break
            done += n
        return done

    def keep(self, ids: Ids, rows: Bytes) -> None:
        """Put rows into the cache; where they are more than it holds, the last of them."""
        if self.static:
            return
        capacity = len(self._buffer)
        for token, row in zip(ids[-capacity:].tolist(), rows[-capacity:], strict=True):
            if token in self._order:
                continue
            if len(self._order) == capacity:
                oldest, slot = self._order.popitem(last=False)
                self._slot_of[oldest] = -1
            else:
                slot = len(self._order)
            self._buffer[slot] = row
            self._order[token] = slot
            self._slot_of[token] = slot


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its type, its shape, and where it begins in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def write_table(
    path: Path, first: tuple[str, torch.dtype, tuple[int, ...]], batches: Iterator[Any], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file whose first tensor comes in batches, so that it need not fit into memory.

    The file takes its name when it is whole.

    Parameters
    ----------
    path : Path
    first : (name, dtype, shape)
    batches : iterator of array or of dict
        Arrays of bytes with the rows of ``first``, in order; then one dict from name to the small tensors after it,
        of which the header needs shapes: it is the first thing that is yielded, with empty tensors of these shapes.
    metadata : mapping of str to str
    """
    small: dict[str, Tensor] = next(batches)
    name, dtype, shape = first
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key, kind, size in [(name, dtype, shape), *((k, t.dtype, tuple(t.shape)) for k, t in small.items())]:
        start, end = end, end + int(np.prod(size)) * kind.itemsize
        header[key] = {"dtype": TYPES[kind], "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # Every row begins at a multiple of its element's size, as readers of the format expect.
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for batch in batches:
                if isinstance(batch, dict):
                    for key in small:
                        file.write(bytes_of(batch[key]).tobytes())
                else:
                    file.write(np.ascontiguousarray(batch).tobytes())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def bytes_of(tensor: Tensor) -> Bytes:
    """The memory of a tensor with its last dimension in bytes; it is shared where the tensor is contiguous."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and the tensors of a safetensors file; none of them is read.

    Raises
    ------
    InputError
        A ValueError with the path: where there is no such file, or it is damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="numpy") as file:  # checks the header, and the length against it
            metadata = dict(file.metadata() or {})
        with path.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise InputError(f"{path}: truncated or damaged: must be a safetensors file ({error})") from error
    entries = {
        name: Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return metadata, entries


def read_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Read whole tensors into memory of their own."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in names}
