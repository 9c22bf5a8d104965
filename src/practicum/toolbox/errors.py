"""The one kind of error a user can mend."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave cannot be used. The message is one line: the argument, the value seen, what is right.

    The command line shows it without a traceback; a program catches it as the `ValueError` it is.
    """
