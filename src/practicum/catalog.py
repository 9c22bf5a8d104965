"""Finds the cards of the methods. Knows nothing of any method and imports none.

A card is the ``card.toml`` in a method's room ``<package>/<field>/<method>/``. Reading it needs the standard library
alone, so that listing the methods stays fast.
"""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.checks.check import Check

FIELDS = (
    "language",
    "serving",
    "retrieval",
    "multimodal",
    "vision",
    "federated",
    "clustering",
    "causal",
    "physics",
    "control",
    "biology",
    "agents",
)


class CardError(ValueError):
    """A card that cannot be read; the message names the file and the field."""


class UnknownMethod(LookupError):
    """No card has this name; the message gives the nearest names."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, in our words."""

    id: str
    text: str


@dataclass(frozen=True)
class Option:
    """An option of ``practicum check METHOD`` that this method alone understands, given as ``--name value``."""

    name: str
    help: str


@dataclass(frozen=True)
class Card:
    """What stands in a ``card.toml``.

    Attributes
    ----------
    name, field, title, paper, summary : str
    claims : tuple of Claim
    hosts : tuple of str
        The libraries the method is a part for.
    extra : str
        The extra that installs what the method needs.
    code : str
        Where the authors' code is, or "".
    limits : tuple of str
        What the method does not do.
    data_format, model_format : str
        What ``--data`` and ``--model`` accept.
    options : tuple of Option
    program : str
        ``module:attribute`` of a Typer app for ``practicum run``, or "".
    check_needs : tuple of str
        Extras beside ``extra`` that the check needs on its embedded default.
    package : str
        The package that holds the room, such as ``practicum``.
    path : Path
        The card file.
    """

    name: str
    field: str
    title: str
    paper: str
    summary: str
    claims: tuple[Claim, ...]
    hosts: tuple[str, ...]
    extra: str
    code: str = ""
    limits: tuple[str, ...] = ()
    data_format: str = ""
    model_format: str = ""
    options: tuple[Option, ...] = ()
    program: str = ""
    check_needs: tuple[str, ...] = ("embedded",)
    package: str = "practicum"
    path: Path = dataclasses.field(default=Path(), compare=False)

    @property
    def module(self) -> str:
        """Dotted name of the room."""
        return f"{self.package}.{self.field}.{self.name}"

    @property
    def install(self) -> str:
        """The command that installs what the method needs."""
        return f"pip install 'practicum[{self.extra}]'"

    def claim(self, id: str) -> Claim:
        """Return the claim of this id."""
        return next(claim for claim in self.claims if claim.id == id)


class Catalog:
    """The rooms under one package folder, sorted by field and name.

    Parameters
    ----------
    root : Path, optional
        Folder of the package; the installed ``practicum`` by default.
    package : str
        The dotted name under which the rooms are imported.

    Examples
    --------
    >>> catalog = Catalog()
    >>> catalog["lmbc"].field
    'clustering'
    """

    def __init__(self, root: Path | None = None, package: str = "practicum") -> None:
        self.root = root if root is not None else Path(__file__).parent
        self.package = package

    @cached_property
    def cards(self) -> dict[str, Card]:
        """Name to card. Raises `CardError` for a card that cannot be read or a name given twice."""
        found: dict[str, Card] = {}
        for path in sorted(self.root.glob("*/*/card.toml")):
            card = read_card(path, self.package)
            if card.name in found:
                raise CardError(f"{path}: the name {card.name!r} is taken by {found[card.name].path}")
            found[card.name] = card
        return found

    def __iter__(self) -> Iterator[Card]:
        return iter(self.cards.values())

    def __len__(self) -> int:
        return len(self.cards)

    def __getitem__(self, name: str) -> Card:
        try:
            return self.cards[name]
        except KeyError:
            raise UnknownMethod(self._unknown(name)) from None

    def _unknown(self, name: str) -> str:
        from difflib import get_close_matches

        near = get_close_matches(name, self.cards, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`practicum list` shows them all."
        return f"there is no method {name!r}; {hint}"

    def load_check(self, card: Card) -> Check:
        """Import the room's ``check.py`` and return its one `Check`, validated against the card.

        Raises
        ------
        practicum.toolbox.extras.MissingExtra
            When a library that the method or its check needs is not installed.
        CardError
            When the check's comparisons and the card's claims are not the same.
        """
        from practicum.checks.check import Check
        from practicum.toolbox.extras import requires

        with requires(",".join((card.extra, *card.check_needs)), f"the check of {card.name}"):
            module = importlib.import_module(f"{card.module}.check")
        classes = [
            member
            for member in vars(module).values()
            if isinstance(member, type) and issubclass(member, Check) and member.__module__ == module.__name__
        ]
        if len(classes) != 1:
            raise CardError(f"{module.__name__} must define one Check; it defines {len(classes)}")
        check = classes[0]()
        check.validate()
        stated, measured = [claim.id for claim in card.claims], [comparison.claim for comparison in check.comparisons]
        if stated != measured:
            raise CardError(f"{card.path}: the claims {stated} are not those of the check, {measured}")
        return check


def read_card(path: Path, package: str = "practicum") -> Card:
    """Read one card. Raises `CardError` naming the file and the field that is missing, unknown or of the wrong type."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CardError(f"{path}: not TOML: {error}") from error

    def text(table: dict[str, Any], key: str, where: str = "", *, optional: bool = False) -> str:
        value = table.pop(key, "" if optional else None)
        if not isinstance(value, str) or (not value and not optional):
            raise CardError(f"{path}: {where}{key} must be a text; got {value!r}")
        return value

    def texts(key: str, default: tuple[str, ...] | None = ()) -> tuple[str, ...]:
        value = raw.pop(key, default)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise CardError(f"{path}: {key} must be a list of texts; got {value!r}")
        return tuple(value)

    def tables(key: str) -> list[dict[str, Any]]:
        value = raw.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise CardError(f"{path}: {key} must be tables, [[{key}]]; got {value!r}")
        return value

    claims = tuple(Claim(text(c, "id", "claims."), text(c, "text", "claims.")) for c in tables("claims"))
    options = tuple(Option(text(o, "name", "options."), text(o, "help", "options.")) for o in tables("options"))
    data, model, program = raw.pop("data", {}), raw.pop("model", {}), raw.pop("program", {})
    card = Card(
        name=text(raw, "name"),
        field=text(raw, "field"),
        title=text(raw, "title"),
        paper=text(raw, "paper"),
        summary=text(raw, "summary"),
        claims=claims,
        hosts=texts("hosts"),
        extra=text(raw, "extra"),
        code=text(raw, "code", optional=True),
        limits=texts("limits"),
        data_format=text(data, "format", "data.", optional=True),
        model_format=text(model, "format", "model.", optional=True),
        options=options,
        program=text(program, "app", "program.", optional=True),
        check_needs=texts("check_needs", ("embedded",)),
        package=package,
        path=path,
    )
    if not claims:
        raise CardError(f"{path}: claims must not be empty")
    if raw:
        raise CardError(f"{path}: unknown field {sorted(raw)[0]!r}")
    place = (path.parent.parent.name, path.parent.name)
    if (card.field, card.name) != place:
        raise CardError(f"{path}: field and name are {card.field}/{card.name}, the folder is {'/'.join(place)}")
    return card
