"""A cache on disk that several processes may fill at the same time, and that a killed process leaves whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from practicum.toolbox.errors import InputError

ENVIRONMENT_VARIABLE = "PRACTICUM_CACHE"


class CacheError(InputError, OSError):
    """The cache folder cannot be made or written to; the message names it and says what to do."""


def cache_folder() -> Path:
    """Return the folder of everything that is converted, harvested or encoded once, making it if need be.

    It is the user's cache folder of the platform, or what the environment variable ``PRACTICUM_CACHE`` names.

    Returns
    -------
    pathlib.Path
        An existing folder.

    Raises
    ------
    CacheError
        When it cannot be made.

    Examples
    --------
    >>> cache_folder().is_dir()
    True
    """
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    folder = Path(chosen).expanduser().absolute() if chosen else Path(platformdirs.user_cache_dir("practicum"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cache_error(folder, error) from error
    return folder


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, a file or folder that ``build`` makes if it is not there.

    ``build(path)`` writes to a temporary path beside ``target``, as a file or a folder as it likes. Only when it
    has returned and everything is synced does the result take its name, in one step, so ``target`` is complete
    whenever it exists. Of several processes one builds and the others wait for it; where the file system has no
    locks they all build and the first to finish wins. What killed builders left is removed.

    Parameters
    ----------
    target : pathlib.Path
        Usually below `cache_folder`. Its parents are made.
    build : callable
        ``build(path) -> None``. What it raises passes through, and nothing is left behind.

    Returns
    -------
    pathlib.Path
        ``target``.

    Raises
    ------
    CacheError
        When the folder cannot be written to or the disk is full.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for text in ("first", "second"):
    ...         made = build_once(Path(folder, "note.txt"), lambda path, text=text: path.write_text(text) and None)
    ...         print(made.read_text())
    first
    first
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target) as alone:
            if target.exists():
                return target
            if alone:
                _remove_leftovers(target)
            workshop = Path(tempfile.mkdtemp(dir=target.parent, prefix=_prefix(target), suffix=".tmp"))
            try:
                made = workshop / target.name
                build(made)
                _sync(made)
                _take_name(made, target)
            finally:
                shutil.rmtree(workshop, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            raise _cache_error(target.parent, error) from error
        raise
    return target


def load_or_build(target: Path, build: Callable[[Path], None], load: Callable[[Path], Any]) -> Any:
    """Return ``load(target)`` after `build_once`; a file that ``load`` cannot read is built anew.

    Parameters
    ----------
    target : pathlib.Path
        A file.
    build : callable
        As in `build_once`.
    load : callable
        ``load(path)``; raises ValueError, KeyError, EOFError or OSError on a damaged file.

    Returns
    -------
    object
        What ``load`` returned.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     damaged = Path(folder, "numbers.json")
    ...     _ = damaged.write_text("[1, 2")
    ...     write = lambda path: path.write_text("[1, 2, 3]") and None
    ...     load_or_build(damaged, write, lambda path: json.loads(path.read_text()))
    [1, 2, 3]
    """
    try:
        return load(build_once(target, build))
    except CacheError:
        raise
    except (ValueError, KeyError, EOFError, OSError):
        if not target.exists():
            raise
    target.unlink(missing_ok=True)
    return load(build_once(target, build))


def cache_key(inputs: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that stand for the inputs of something cached.

    Examples
    --------
    >>> cache_key({"n": 3, "version": "1.0"}) == cache_key({"version": "1.0", "n": 3})
    True
    """
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Hold the lock of the target; yields whether there is one. A process that dies lets go of it."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows: the rename decides
        yield False
        return
    descriptor = os.open(target.parent / f"{_prefix(target)}lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # some network file systems have no locks: the rename decides
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _prefix(target: Path) -> str:
    return f".{target.name}."


def _remove_leftovers(target: Path) -> None:
    for entry in target.parent.iterdir():
        if entry.name.startswith(_prefix(target)) and entry.name.endswith(".tmp"):
            shutil.rmtree(entry, ignore_errors=True)


def _sync(made: Path) -> None:
    folders = [made] if made.is_dir() else []
    files = [made] if made.is_file() else []
    for entry in made.rglob("*") if made.is_dir() else ():
        (folders if entry.is_dir() else files).append(entry)
    # On POSIX folders are synced too; elsewhere they cannot be opened.
    for path in files + (folders if os.name == "posix" else []):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _take_name(made: Path, target: Path) -> None:
    try:
        made.replace(target)
    except OSError:
        # A folder cannot replace one that is not empty: another process was first, and its result is as good.
        if not target.is_dir():
            raise


def _cache_error(folder: Path, error: OSError) -> CacheError:
    reason = error.strerror or str(error)
    message = f"cannot write to the cache folder {folder}: {reason}; set {ENVIRONMENT_VARIABLE} to another folder"
    return CacheError(message)
