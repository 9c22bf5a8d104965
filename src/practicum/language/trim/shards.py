"""Scores of a pool of any size, block by block, kept on disk so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.language.trim.samples import in_blocks
from practicum.toolbox.cache import cache_key
from practicum.toolbox.errors import InputError

SETTINGS = "settings.json"
FORMAT = 1


@dataclass(frozen=True)
class Scored:
    """What is known of N samples after one pass.

    Attributes
    ----------
    scores : array of shape (N, T), float32
        For each of T tasks.
    lengths : array of shape (N,), int64
        Tokens; -1 where they were not counted.
    sketches : array of shape (N, s), float16
        Random projections of mean token states, for diversity; s = 0 where there are none.
    n_truncated : int
        Samples that were longer than ``max_length``.
    n_seen : int
        Tokens in scope that the target has too.

    Examples
    --------
    >>> part = Scored(np.zeros((2, 1), np.float32), np.array([3, 4]), np.zeros((2, 0), np.float16), 1)
    >>> joined = Scored.joined([part, part])
    >>> joined.scores.shape, joined.n_truncated
    ((4, 1), 2)
    """

    scores: NDArray[np.float32]
    lengths: NDArray[np.int64]
    sketches: NDArray[np.float16]
    n_truncated: int = 0
    n_seen: int = 0

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """Blocks one after the other.

        Parameters
        ----------
        parts : sequence of Scored
            Shape (n_blocks,), at least one.

        Returns
        -------
        Scored
        """
        return cls(
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.sketches for part in parts]),
            sum(part.n_truncated for part in parts),
            sum(part.n_seen for part in parts),
        )


ScoreBlock = Callable[[Sequence[Mapping[str, Any]], int], Scored]


def score_in_shards(
    pool: Iterable[Mapping[str, Any]],
    score_block: ScoreBlock,
    shard_size: int,
    store: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Scored:
    """Score a pool in one pass, holding one block of samples at a time.

    Parameters
    ----------
    pool : iterable of mapping
    score_block : callable
        ``score_block(samples, index of the first) -> Scored``.
    shard_size : int
        Samples in a block.
    store : pathlib.Path or str, optional
        A folder with one file a block, written whole or not at all. Blocks that are there are not scored again; their
        samples are read, and must be those that were scored.
    settings : mapping, optional
        What the scores depend on, as JSON. A store with other settings is refused.
    progress : callable, optional
        Told the number of samples that are done, after each block.

    Returns
    -------
    Scored
        Of shape (N, T).

    Raises
    ------
    InputError
        A ValueError: for an empty pool, or a store of other settings or samples.

    Examples
    --------
    >>> def count(samples, first):
    ...     print(f"scoring from {first}")
    ...     n = len(samples)
    ...     return Scored(np.ones((n, 1), np.float32), np.ones(n, np.int64), np.zeros((n, 0), np.float16))
    >>> pool = [{"prompt": str(i)} for i in range(3)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = score_in_shards(pool[:2], count, 2, folder)
    ...     both = score_in_shards(pool, count, 2, folder)
    scoring from 0
    scoring from 2
    >>> both.scores.shape
    (3, 1)
    """
    if shard_size < 1:
        raise InputError(f"shard_size={shard_size}: must be at least 1")
    shards = None if store is None else _Store(Path(store), shard_size, dict(settings or {}))
    parts: list[Scored] = []
    done = 0
    for first, samples in in_blocks(pool, shard_size):
        digest = "" if shards is None else _digest_of(samples)
        part = None if shards is None else shards.read(first // shard_size, digest)
        if part is None:
            part = score_block(samples, first)
            if shards is not None:
                shards.write(first // shard_size, digest, part)
        parts.append(part)
        done += len(samples)
        if progress is not None:
            progress(done)
    if not parts:
        raise InputError("pool: has no samples; must have one at least")
    return Scored.joined(parts)


class _Store:
    """A folder of shards."""

    def __init__(self, folder: Path, shard_size: int, settings: dict[str, Any]) -> None:
        self.folder = folder
        wanted = {"format": FORMAT, "shard_size": shard_size, **settings}
        self.digest = cache_key(wanted)
        path = folder / SETTINGS
        if not path.exists():
            if folder.is_dir() and any(folder.glob("shard-*.npz")):
                raise InputError(f"store={str(folder)!r}: has shards without {SETTINGS}; give another folder")
            _write(path, (json.dumps({"digest": self.digest, **wanted}, indent=1) + "\n").encode())
            return
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            digest = kept["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"store={str(folder)!r}: {SETTINGS} cannot be read; give another folder") from None
        if digest != self.digest:
            other = next((name for name in wanted if kept.get(name) != wanted[name]), "digest")
            raise InputError(
                f"store={str(folder)!r}: was written with {other}={kept.get(other)!r}, now it is "
                f"{wanted.get(other)!r}; give another folder"
            )

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:08d}.npz"

    def read(self, number: int, samples: str) -> Scored | None:
        path = self.path(number)
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                kept = {name: stored[name] for name in ("scores", "lengths", "sketches", "facts")}
            digest, kept_samples, truncated, seen = (str(fact) for fact in kept["facts"])
            part = Scored(kept["scores"], kept["lengths"], kept["sketches"], int(truncated), int(seen))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # damaged: it is written anew
        if (digest, kept_samples) != (self.digest, samples):
            raise InputError(f"store={str(self.folder)!r}: {path.name} is of other samples; give another folder")
        return part

    def write(self, number: int, samples: str, part: Scored) -> None:
        buffer = io.BytesIO()
        facts = np.array([self.digest, samples, str(part.n_truncated), str(part.n_seen)])
        np.savez(buffer, scores=part.scores, lengths=part.lengths, sketches=part.sketches, facts=facts)
        _write(self.path(number), buffer.getvalue())


def _write(path: Path, content: bytes) -> None:
    """Give a file its name when all of it is on disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"store={str(path.parent)!r}: cannot be written to: {error.strerror or error}") from error


def _digest_of(samples: Sequence[Any]) -> str:
    text = json.dumps(samples, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
