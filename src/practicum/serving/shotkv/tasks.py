"""Tasks of many worked examples, sentences or documents: generated, and the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from practicum.datasets import DataFileError, docstrings
from practicum.datasets.files import json_lines, kind_of
from practicum.toolbox.errors import InputError

NAMES = ("Ann", "Ben", "Cora", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jana", "Karl", "Lea", "Max", "Nora", "Otto")
THINGS = ("apples", "books", "coins", "eggs", "pens", "cups", "shells", "stamps")
CLASSES = {
    "blim": ("apple", "pear", "plum", "grape", "lemon", "peach", "melon", "fig"),
    "dax": ("dog", "cat", "horse", "cow", "sheep", "goat", "mouse", "fox"),
    "zorp": ("hammer", "saw", "drill", "knife", "axe", "wrench", "file", "spade"),
    "quet": ("red", "blue", "green", "black", "white", "brown", "pink", "grey"),
}
FILLER = (
    "The road went on past the mill. ",
    "It rained for most of the morning. ",
    "Nobody had opened the window yet. ",
    "A bird sat on the old fence. ",
    "The kettle took its time again. ",
    "They talked about the harvest. ",
    "The train was late that day. ",
    "Someone had left a coat behind. ",
)
LONGEST_SUMMARY = 90
TRIES = 2000


@dataclass(frozen=True)
class ShotItem:
    r"""A prompt in parts, and what should follow it.

    Attributes
    ----------
    preamble : str
        Before the units; may be empty.
    units : tuple of str
        m worked examples, sentences or documents, each with the white space behind it.
    query : str
        The question, up to where the answer begins.
    answer : str
        With the white space before it.

    Examples
    --------
    >>> ShotItem("", ("1+1=2\n",), "2+2=", "4").prompt
    '1+1=2\n2+2='
    """

    preamble: str
    units: tuple[str, ...]
    query: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text of the prompt."""
        return self.preamble + "".join(self.units) + self.query

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the units are, in characters: m spans."""
        ends = np.cumsum([len(self.preamble), *map(len, self.units)]).tolist()
        return list(itertools.pairwise(ends))

    def without_units(self) -> ShotItem:
        """The same question with no unit, to see what they bring.

        Returns
        -------
        ShotItem
            With m = 0 units.
        """
        return ShotItem(self.preamble, (), self.query, self.answer)


Shot = tuple[str, str]


def _sums(rng: np.random.Generator) -> Shot:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.integers(10, 40, size=2)
    c = rng.integers(2, 10)
    question = f"Q: {name} has {a} {thing} and finds {b} more. Then {name} loses {c}. How many {thing} are left?\nA:"
    return question, f" {a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}. The answer is {a + b - c}.\n\n"


def _chain(rng: np.random.Generator) -> Shot:
    x, y, z = rng.choice(list("abcdefgh"), size=3, replace=False)
    a, b, c = rng.integers(1, 10, size=3)
    question = f"Q: {x} = {a}, {y} = {x} + {b}, {z} = {y} + {c}. What is {z}?\nA:"
    return question, f" {y} = {a} + {b} = {a + b}. {z} = {a + b} + {c} = {a + b + c}. {z} is {a + b + c}.\n\n"


def _label(rng: np.random.Generator) -> Shot:
    name = rng.choice(list(CLASSES))
    return f"Q: To which class does the word {rng.choice(CLASSES[name])} belong?\nA:", f" It is a {name}.\n\n"


def _reversed(rng: np.random.Generator) -> Shot:
    words = rng.choice([word for words in CLASSES.values() for word in words], size=4, replace=False)
    return f"Q: Say these words backwards: {' '.join(words)}\nA:", f" {' '.join(words[::-1])}\n\n"


FEW_SHOT: dict[str, Callable[[np.random.Generator], Shot]] = {
    "sums": _sums,
    "chain": _chain,
    "label": _label,
    "reversed": _reversed,
}
TASKS = (*FEW_SHOT, "mixed", "needle", "docs")


def shot_items(task: str, n_items: int, n_units: int = 16, *, random_state: int = 0) -> list[ShotItem]:
    """Generate prompts that share their units, with a question of their own each.

    Parameters
    ----------
    task : {"sums", "chain", "label", "reversed", "mixed", "needle", "docs"}
        Word problems of two steps with their working; chains of variables; words into classes that are made up; words
        backwards; all four in turn, the question being one of them; facts hidden among sentences; the first sentence
        of a docstring among others.
    n_items : int
    n_units : int
        Worked examples, sentences or documents of a prompt, 4 at least.
    random_state : int

    Returns
    -------
    list of ShotItem
        ``n_items`` of them.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Examples
    --------
    >>> item = shot_items("mixed", 1, n_units=8)[0]
    >>> len(item.units), item.units[2].startswith("Q: To which class")
    (8, True)
    """
    if task not in TASKS:
        raise InputError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    if n_items < 1:
        raise InputError(f"n_items={n_items}: must be 1 or more")
    if n_units < 4:
        raise InputError(f"n_units={n_units}: must be 4 or more")
    rng = np.random.default_rng([random_state, TASKS.index(task)])
    if task == "needle":
        return _needles(n_items, n_units, rng)
    if task == "docs":
        return _documents(n_items, n_units, random_state)
    kinds = list(FEW_SHOT.values()) if task == "mixed" else [FEW_SHOT[task]]
    # No question is among the examples, nor twice.
    asked: set[str] = set()
    shots = [_new(kinds[i % len(kinds)], rng, asked) for i in range(n_units)]
    units = tuple(question + answer for question, answer in shots)
    queries = [_new(kinds[i % len(kinds)], rng, asked) for i in range(n_items)]
    return [ShotItem("Answer like the examples.\n\n", units, q, a.rstrip("\n")) for q, a in queries]


def long_item(n_questions: int, n_units: int = 10, *, random_state: int = 0) -> ShotItem:
    """Generate one prompt that asks many questions at once, to be answered one after another.

    Parameters
    ----------
    n_questions : int
    n_units : int
        Worked examples.
    random_state : int

    Returns
    -------
    ShotItem
        Its answer has ``n_questions`` lines.

    Raises
    ------
    InputError
        A ValueError: for a number below 1.

    Examples
    --------
    >>> long_item(3).answer.count("The answer is")
    3
    """
    if n_questions < 1:
        raise InputError(f"n_questions={n_questions}: must be 1 or more")
    rng = np.random.default_rng([random_state, len(TASKS)])
    asked: set[str] = set()
    shots = [_new(_sums, rng, asked) for _ in range(n_units)]
    units = tuple(question + answer for question, answer in shots)
    many = [_new(_sums, rng, asked) for _ in range(n_questions)]
    listed = "".join(f"{i}. {q[3:-3]}\n" for i, (q, _) in enumerate(many, 1))
    answers = "".join(f"\n{i}.{a.rstrip()}" for i, (_, a) in enumerate(many, 1))
    return ShotItem(
        "Answer like the examples.\n\n", units, f"Answer these questions one after another.\n{listed}A:", answers
    )


def read_shot_items(path: Path | str) -> list[ShotItem]:
    r"""Read one's own prompts: JSON Lines with ``preamble``, ``units``, ``query`` and ``answer``.

    Parameters
    ----------
    path : path-like
        Each line an object: ``units`` is a list of m texts, the others are texts; ``preamble`` may be missing.

    Returns
    -------
    list of ShotItem

    Raises
    ------
    DataFileError
        A ValueError that names the line and the field.

    Examples
    --------
    >>> import json, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "mine.jsonl")
    ...     _ = file.write_text(json.dumps({"units": ["a\n", "b\n"], "query": "c", "answer": " d"}))
    ...     read_shot_items(file)[0].prompt
    'a\nb\nc'
    """
    path = Path(path)
    items = []
    for line, parsed in json_lines(path):
        if not isinstance(parsed, dict):
            raise DataFileError(path, f"line {line}: must be an object; got {kind_of(parsed)}")
        for name in ("query", "answer"):
            if not isinstance(parsed.get(name), str) or not parsed[name]:
                found = kind_of(parsed[name]) if name in parsed else "nothing"
                raise DataFileError(path, f"line {line}: field {name!r}: must be text that is not empty; got {found}")
        units = parsed.get("units")
        if not isinstance(units, list) or not units or not all(isinstance(unit, str) and unit for unit in units):
            raise DataFileError(path, f"line {line}: field 'units': must be a list of texts that are not empty")
        preamble = parsed.get("preamble", "")
        if not isinstance(preamble, str):
            raise DataFileError(path, f"line {line}: field 'preamble': must be text; got {kind_of(preamble)}")
        items.append(ShotItem(preamble, tuple(units), parsed["query"], parsed["answer"]))
    if not items:
        raise DataFileError(path, "has no prompt")
    return items


def _new(kind: Callable[[np.random.Generator], Shot], rng: np.random.Generator, asked: set[str]) -> Shot:
    for _ in range(TRIES):
        shot = kind(rng)
        if shot[0] not in asked:
            asked.add(shot[0])
            return shot
    raise InputError(f"n_units and n_items: there are not as many questions of a kind; {len(asked)} were found")


def _needles(n_items: int, n_units: int, rng: np.random.Generator) -> list[ShotItem]:
    """A quarter of the sentences are facts."""
    names = _drawn(NAMES, max(1, n_units // 4), rng)
    codes = {name: str(rng.integers(100, 1000)) for name in names}
    facts = [f"The locker of {name} has the code {codes[name]}. " for name in names]
    fill = [FILLER[i] for i in rng.integers(len(FILLER), size=n_units - len(facts))]
    sentences = [str(text) for text in rng.permutation([*facts, *fill])]
    wanted = [names[i % len(names)] for i in range(n_items)]
    return [
        ShotItem(
            "Read the text and answer.\n",
            tuple(sentences),
            f"\nQuestion: Which code has the locker of {name}?\nAnswer: The locker of {name} has the code",
            f" {codes[name]}.",
        )
        for name in wanted
    ]


def _documents(n_items: int, n_units: int, random_state: int) -> list[ShotItem]:
    pairs = docstrings(random_state=random_state)
    rng = np.random.default_rng([random_state, len(TASKS) + 1])
    short = [i for i, text in enumerate(pairs.queries) if 30 <= len(text) <= LONGEST_SUMMARY and "\n" not in text]
    chosen = rng.permutation(short)[:n_units]
    parts = [(f"Function {i}", pairs.queries[j], _shortened(pairs.documents[j])) for i, j in enumerate(chosen, 1)]
    units = tuple(f"{name}: {summary}\n{body}\n\n" for name, summary, body in parts)
    return [
        ShotItem("Documentation.\n\n", units, f"Question: What does {name.lower()} do?\nAnswer: {name}:", f" {summary}")
        for name, summary, _ in (parts[i % len(parts)] for i in rng.permutation(max(n_items, len(parts)))[:n_items])
    ]


def _shortened(text: str) -> str:
    return text[:160].rsplit(" ", 1)[0]


def _drawn(names: Sequence[str], n: int, rng: np.random.Generator) -> list[str]:
    """Names that differ; numbered once they run out."""
    order: Iterable[str] = [str(name) for name in rng.permutation(names)]
    found = list(order)
    return (found + [f"{name} {i}" for i in range(2, 2 + n // len(found)) for name in found])[:n]
