"""Finding the files of installed packages without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from practicum.toolbox.extras import MissingExtra


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed top-level package, or None; nothing of it is imported.

    Examples
    --------
    >>> package_folder("numpy").name
    'numpy'
    >>> package_folder("a_package_that_is_not_there") is None
    True
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def packaged_file(package: str, path: str, *, what: str, install: str) -> Path:
    """Return a file or folder that a package brings.

    Parameters
    ----------
    package : str
        Name to import it by.
    path : str
        Below the package's folder.
    what : str
        What needs it, as it is called in the message.
    install : str
        What brings it, in full.

    Raises
    ------
    MissingExtra
        When the package, or the file in it, is not there; one line that says what to install.

    Examples
    --------
    >>> packaged_file("nowhere", "a.csv", what="mfeat", install="pip install nowhere")
    Traceback (most recent call last):
    practicum.toolbox.extras.MissingExtra: mfeat needs nowhere: pip install nowhere
    """
    folder = package_folder(package)
    if folder is None:
        raise MissingExtra(f"{what} needs {package}: {install}", name=package)
    if not (folder / path).exists():
        raise MissingExtra(f"{what} needs {path}, which the installed {package} does not have: {install}", name=package)
    return folder / path


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, ``"unknown"`` where it has no metadata.

    Examples
    --------
    >>> installed_version("a-package-that-is-not-there")
    'unknown'
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
