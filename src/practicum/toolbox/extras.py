"""Say what to install when an optional dependency is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message says in one line what to install."""


@contextmanager
def requires(extra: str, what: str) -> Iterator[None]:
    """Turn a missing third-party module inside the block into a `MissingExtra`.

    Parameters
    ----------
    extra : str
        The extra of this package that brings the module.
    what : str
        What needs it, as it is called in the message.

    Examples
    --------
    >>> with requires("retrieval", "lemur"):
    ...     import a_module_that_is_not_there
    Traceback (most recent call last):
    practicum.toolbox.extras.MissingExtra: lemur needs a_module_that_is_not_there: pip install 'practicum[retrieval]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "practicum"):
            raise
        message = f"{what} needs {module}: pip install 'practicum[{extra}]'"
        raise MissingExtra(message, name=error.name) from error
