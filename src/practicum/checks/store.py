"""Keeps what is finished: each finished arm of a seed is on disk before the next begins, so a run can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import practicum
from practicum.checks.results import SCHEMA, ResultError, Row, read_json, read_result, sync_folder, write_json


def result_path(out: Path, method: str, scale: str, request: Mapping[str, Any]) -> Path:
    """The file a check run writes: ``<method>-<scale>.json``, with a digest for a user's model, data or device.

    >>> result_path(Path("results"), "lmbc", "full", {"model": None, "data": None, "device": "cpu", "options": {}})
    PosixPath('results/lmbc-full.json')
    """
    own = {key: value for key, value in request.items() if value and (key, value) != ("device", "cpu")}
    tail = f"-{_digest(own)[:8]}" if own else ""
    return out / f"{method}-{scale}{tail}.json"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class Store:
    """The finished rows of one check run, in ``<out>/.partial/<name of the result>/``.

    A run that was interrupted is taken up again only where it measured the same thing: the same request on the same
    data file, by the same code, with the same versions of the libraries. Otherwise its rows are dropped.

    Parameters
    ----------
    path : Path
        The result file to be.
    identity : mapping
        Method, scale and request.
    source : Path
        Folder whose Python files are the code that measures.

    Raises
    ------
    ResultError
        When the folder cannot be written, when another process is writing the same result, or when a result file is
        in the way that is corrupt or of a newer schema. That file is untouched.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], source: Path) -> None:
        self.path = path
        self.folder = path.parent / ".partial" / path.stem
        self.token = uuid.uuid4().hex
        self.dropped = False
        if path.exists():
            read_result(path)
        self._lock = self._take_lock()
        try:
            self._open(
                _digest([SCHEMA, practicum.__version__, identity, _inputs(identity), _code(source), _versions()])
            )
        except BaseException:
            self.close()
            raise

    def _open(self, digest: str) -> None:
        manifest = self.folder / "manifest.json"
        try:
            known = read_json(manifest)["digest"] if manifest.exists() else None
        except (ResultError, KeyError, TypeError):
            known = ""
        if known != digest:
            self.dropped = any(self.folder.glob("seed-*.json"))
            for stale in self.folder.glob("seed-*.json"):
                stale.unlink()
        write_json(manifest, {"digest": digest, "token": self.token})
        self.rows = self._read_rows()
        self.seconds_before = self._read_seconds() if self.rows else 0.0

    def _take_lock(self) -> IO[str] | None:
        if os.name != "posix":
            return None
        import fcntl

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stream = (self.folder / "lock").open("w")
        except OSError as error:
            raise ResultError(f"cannot write {self.folder}: {error.strerror or error}") from error
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.close()
            raise ResultError(f"another check is writing {self.path}: wait for it, or give another --out") from error
        return stream

    def _read_rows(self) -> dict[tuple[int, str], Row]:
        rows: dict[tuple[int, str], Row] = {}
        for file in sorted(self.folder.glob("seed-*.json")):
            try:
                found = [Row(**row) for row in read_json(file)]
            except (ResultError, TypeError):
                continue
            for row in found:
                if row.status != "failed":
                    rows[row.seed, row.arm] = row
        return rows

    def _read_seconds(self) -> float:
        try:
            return float(read_json(self.folder / "elapsed.json")["seconds"])
        except (ResultError, KeyError, TypeError, ValueError):
            return 0.0

    def note_seconds(self, seconds: float) -> None:
        """Keep how long this run has taken, so that the one that takes it up can tell how long both took."""
        write_json(self.folder / "elapsed.json", {"seconds": self.seconds_before + seconds})

    @property
    def writer(self) -> Writer:
        """What a worker needs to write rows; it can be sent to another process."""
        return Writer(self.folder, self.token)

    def keep(self, rows: Iterable[Row]) -> None:
        """Write rows that a worker could not, because it does not see this folder."""
        for row in rows:
            if (row.seed, row.arm) not in self.rows:
                self.writer.write([row])
                self.rows[row.seed, row.arm] = row

    def remove(self) -> None:
        """Drop the partial rows, once the result itself is on disk."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with_others = self.folder.parent
        if with_others.exists() and not any(with_others.iterdir()):
            with_others.rmdir()
        if self.path.parent.exists():
            sync_folder(self.path.parent)
        self.close()

    def close(self) -> None:
        """Let another process have the result."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes finished rows into the folder of a `Store`, from whatever process measured them."""

    folder: Path
    token: str

    def write(self, rows: list[Row]) -> bool:
        """Write the rows as one file; False where this machine does not see the folder, or the run is over.

        A worker that outlives its killed run finds another token in the manifest and leaves the new run alone.
        """
        try:
            if read_json(self.folder / "manifest.json")["token"] != self.token:
                return False
        except (ResultError, KeyError, TypeError):
            return False
        name = hashlib.sha256("/".join(row.arm for row in rows).encode()).hexdigest()[:12]
        write_json(self.folder / f"seed-{rows[0].seed:04d}-{name}.json", [dataclasses.asdict(row) for row in rows])
        return True


def _inputs(identity: Mapping[str, Any]) -> list[Any]:
    """Size and time of the user's files, so that an edited file is measured afresh."""
    stamps = []
    for key in ("data", "model"):
        given = Path(str(identity.get(key) or ""))
        if identity.get(key) and given.exists():
            files = sorted(given.rglob("*")) if given.is_dir() else [given]
            stamps += [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    return stamps


def _code(source: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*.py")):
        digest.update(str(file.relative_to(source)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


LIBRARIES = (
    "numpy",
    "scipy",
    "scikit-learn",
    "torch",
    "transformers",
    "sentence-transformers",
    "faiss-cpu",
    "joblib",
)


def _versions() -> dict[str, str]:
    return versions(LIBRARIES)


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the distributions that are installed, by name."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
