"""Writes the room of a new method: a card, the method, its check and tests that say what is still to be written."""

from __future__ import annotations

import keyword
import re
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from practicum.catalog import FIELDS
from practicum.toolbox.errors import InputError

LONGEST_NAME = 24


class ScaffoldError(InputError):
    """A room that cannot be written; the message says in one line why.

    Attributes
    ----------
    usage : bool
        Whether what was asked for is wrong, rather than the disk.
    """

    usage: bool = True


def new_room(field: str, name: str, root: Path) -> list[Path]:
    """Write the files of a new method, and the field's ``__init__.py`` where the field is new.

    Everything is written or nothing: a file that cannot be written takes the others back with it.

    Parameters
    ----------
    field : str
        One of `practicum.catalog.FIELDS`.
    name : str
        The method's name in lower case, such as ``"trimmed_mean"``: the name of the room, of the command's argument
        and of the test file.
    root : Path
        The checkout: the folder that has ``src/practicum``.

    Returns
    -------
    list of Path
        The files written, in the order in which a reader should open them.

    Raises
    ------
    ScaffoldError
        When the field is unknown, the name is not usable or taken, ``root`` is not a checkout, or a file cannot be
        written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as checkout:
    ...     package = Path(checkout, "src", "practicum")
    ...     package.mkdir(parents=True)
    ...     for path in new_room("federated", "trimmed_mean", Path(checkout)):
    ...         print(path.relative_to(checkout).as_posix())
    src/practicum/federated/trimmed_mean/card.toml
    src/practicum/federated/trimmed_mean/trimmed_mean.py
    src/practicum/federated/trimmed_mean/check.py
    src/practicum/federated/trimmed_mean/__init__.py
    src/practicum/federated/__init__.py
    tests/federated/test_trimmed_mean.py
    """
    refuse_unknown_field(field)
    refuse_bad_name(name)
    refuse_taken(field, name, root)
    room, field_init = Path("src/practicum", field, name), Path("src/practicum", field, "__init__.py")
    templates = {
        room / "card.toml": "card.toml",
        room / f"{name}.py": "method.py",
        room / "check.py": "check.py",
        room / "__init__.py": "room_init.py",
        field_init: "field_init.py",
        Path("tests", field, f"test_{name}.py"): "tests.py",
    }
    if (root / field_init).exists():
        del templates[field_init]
    words = {"field": field, "name": name, "class_name": class_name(name), "room": room.as_posix()}
    texts = {root / path: render(template, words) for path, template in templates.items()}
    write_all(texts)
    return list(texts)


def refuse_unknown_field(field: str) -> None:
    """Raise `ScaffoldError` for a field that is not one of `FIELDS`."""
    if field in FIELDS:
        return
    near = get_close_matches(field, FIELDS, n=1)
    hint = f"did you mean {near[0]}? The fields are" if near else "the fields are"
    raise ScaffoldError(f"there is no field {field!r}: {hint} {', '.join(sorted(FIELDS))}")


def refuse_bad_name(name: str) -> None:
    """Raise `ScaffoldError` for a name that cannot be a module, a command's argument and a test file."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        usable = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f", such as {usable!r}" if usable and usable[0].isalpha() else ""
        raise ScaffoldError(f"name must be lower-case letters, digits and single underscores{hint}; got {name!r}")
    if keyword.iskeyword(name):
        raise ScaffoldError(f"name must not be a Python keyword; got {name!r}")
    if len(name) > LONGEST_NAME:
        raise ScaffoldError(f"name must have at most {LONGEST_NAME} characters; got {len(name)} in {name!r}")


def refuse_taken(field: str, name: str, root: Path) -> None:
    """Raise `ScaffoldError` where ``root`` is no checkout, or something of this name is there already."""
    package = root / "src" / "practicum"
    if not package.is_dir():
        raise ScaffoldError(f"root must be a checkout of practicum, a folder with src/practicum in it; got {root}")
    taken = [
        *package.glob(f"*/{name}/card.toml"),
        package / field / name,
        package / field / f"{name}.py",
        root / "tests" / field / f"test_{name}.py",
    ]
    for path in taken:
        if path.exists():
            raise ScaffoldError(f"the name {name!r} is taken: {path.relative_to(root).as_posix()} is there already")


def class_name(name: str) -> str:
    """The class's name for a method's name.

    >>> class_name("trimmed_mean")
    'TrimmedMean'
    """
    return "".join(word.capitalize() for word in name.split("_"))


def render(template: str, words: dict[str, str]) -> str:
    """Fill in one of the templates of the package."""
    from jinja2 import Environment, StrictUndefined

    source = (files("practicum") / "scaffold_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    return environment.from_string(source).render(words)


def write_all(texts: dict[Path, str]) -> None:
    """Write new files and the folders they need. When one cannot be written, none of it stays."""
    made: list[Path] = []
    try:
        for path, text in texts.items():
            for folder in reversed(path.parents):
                if not folder.exists():
                    folder.mkdir()
                    made.append(folder)
            with path.open("x", encoding="utf-8", newline="\n") as stream:
                made.append(path)
                stream.write(text)
    except BaseException as error:
        for path in reversed(made):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            refusal = ScaffoldError(f"cannot write {error.filename or path}: {error.strerror or error}")
            refusal.usage = False
            raise refusal from error
        raise
