"""Two families of generated questions: arithmetic, and the copying of a record out of a text."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from practicum.language.confidence.items import ConfItem
from practicum.toolbox.errors import InputError

NAMES = [
    "Ann",
    "Bob",
    "Carl",
    "Dora",
    "Emil",
    "Fay",
    "Gus",
    "Hana",
    "Ivan",
    "June",
    "Kurt",
    "Lena",
    "Milo",
    "Nora",
    "Otto",
    "Pia",
    "Quinn",
    "Rosa",
    "Sven",
    "Tara",
    "Uma",
    "Vera",
    "Will",
    "Xenia",
    "Yves",
    "Zoe",
]
FRUITS = [
    "apples",
    "pears",
    "plums",
    "figs",
    "dates",
    "limes",
    "grapes",
    "melons",
    "cherries",
    "mangos",
    "olives",
    "peaches",
]
TOWNS = ["Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito", "Dakar", "Minsk", "Turin", "Perth"]
N_CHOICES = 4
TIMES, PLUS = range(2, 13), range(1, 61)


def task_items(
    task: str, n: int, *, n_records: Sequence[int] = (2, 3, 4, 6, 8), random_state: int = 0
) -> list[ConfItem]:
    """Generate four-option questions of one task.

    Parameters
    ----------
    task : str
        Of the family ``"reasoning"``: ``"times"`` (factors from 2 to 12), ``"plus"`` (terms from 1 to 60),
        ``"minus"``, ``"next"`` (the next number of an arithmetic series). Of ``"copy"``, with the record that holds
        the answer as evidence: ``"codes"`` (a number of three digits for each name), ``"letters"`` (three letters for
        each name), ``"likes"`` (who likes a fruit), ``"lives"`` (where someone lives).
    n : int
        No question is there twice, so of ``"times"`` there are 121 at most.
    n_records : sequence of int
        In the tasks of the family ``"copy"``, how many records the context may have.
    random_state : int

    Returns
    -------
    list of ConfItem
        Shape (n,). The same on every platform and with every release of Python.

    Raises
    ------
    InputError
        A ValueError: on an unknown task, or more items than there are.

    Examples
    --------
    >>> item = task_items("codes", 1, n_records=[2])[0]
    >>> item.context, item.question
    ("Fay's code is 338. Emil's code is 124.", "What is Fay's code?")
    >>> item.evidence, item.answer in item.choices, len(item.choices)
    ("Fay's code is 338.", True, 4)
    """
    if task not in TASKS:
        raise InputError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    if n < 1:
        raise InputError(f"n must be at least 1; got {n}")
    if not n_records or min(n_records) < 1 or max(n_records) > len(TOWNS):
        raise InputError(f"n_records must be numbers from 1 to {len(TOWNS)}; got {list(n_records)}")
    draw = Draw(f"{task} {random_state}")
    found: dict[tuple[str, str | None], ConfItem] = {}
    for item in TASKS[task](draw, n_records):
        found.setdefault((item.question, item.context), item)
        if len(found) == n:
            return list(found.values())
    raise InputError(f"n must be at most {len(found)} for the task {task!r}; got {n}")


def families(
    family: str, n: int, *, n_records: Sequence[int] = (2, 3, 4, 6, 8), random_state: int = 0
) -> list[ConfItem]:
    """Generate questions of the tasks of a family that models are trained on.

    Parameters
    ----------
    family : {"reasoning", "copy"}
        ``"reasoning"`` is ``"times"`` and ``"plus"``, ``"copy"`` is ``"codes"``; see `task_items`.
    n : int
        Half of them products, as long as there are different ones.
    n_records : sequence of int
    random_state : int

    Returns
    -------
    list of ConfItem
        Shape (n,), the tasks mixed.

    Examples
    --------
    >>> [item.task for item in families("reasoning", 4)]
    ['times', 'plus', 'times', 'plus']
    """
    if family not in ("reasoning", "copy"):
        raise InputError(f"family must be 'reasoning' or 'copy'; got {family!r}")
    if family == "copy":
        return task_items("codes", n, n_records=n_records, random_state=random_state)
    n_times = min(n // 2, len(TIMES) ** 2 - 1)
    times = task_items("times", n_times, random_state=random_state) if n_times else []
    plus = task_items("plus", n - n_times, random_state=random_state)
    mixed = list(chain.from_iterable(zip(times, plus, strict=False)))
    return mixed + plus[n_times:]


class Draw:
    """Random choices that depend on nothing but the seed.

    Of the standard library's generator only ``random()`` gives the same in every release.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def some(self, values: Sequence[str], n: int) -> list[str]:
        """``n`` different values."""
        left = list(values)
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(n)]

    def shuffled(self, values: Sequence[str]) -> list[str]:
        """All of them in another order."""
        return self.some(values, len(values))


def _choices(draw: Draw, gold: str, wrong: Sequence[str]) -> list[str]:
    different = [text for text in dict.fromkeys(wrong) if text != gold]
    return draw.shuffled([gold, *draw.some(different, N_CHOICES - 1)])


def _arithmetic(draw: Draw, task: str, question: str, gold: int, near: Sequence[int]) -> ConfItem:
    wrong = [str(number) for number in near if number >= 0]
    return ConfItem(question, str(gold), choices=_choices(draw, str(gold), wrong), family="reasoning", task=task)


def _times(draw: Draw, n_records: Sequence[int]) -> Iterator[ConfItem]:
    pairs = draw.shuffled([f"{a} {b}" for a in TIMES for b in TIMES])
    for a, b in (map(int, pair.split()) for pair in pairs):
        near = [a * b + d for d in (a, -a, b, -b, 1, -1, 2, -2, 10, -10)]
        yield _arithmetic(draw, "times", f"What is {a} times {b}?", a * b, near)


def _plus(draw: Draw, n_records: Sequence[int]) -> Iterator[ConfItem]:
    for a, b in (map(int, pair.split()) for pair in draw.shuffled([f"{a} {b}" for a in PLUS for b in PLUS])):
        near = [a + b + d for d in (1, -1, 2, -2, 9, -9, 10, -10)]
        yield _arithmetic(draw, "plus", f"What is {a} + {b}?", a + b, near)


def _minus(draw: Draw, n_records: Sequence[int]) -> Iterator[ConfItem]:
    for a, b in (map(int, pair.split()) for pair in draw.shuffled([f"{a + b} {a}" for a in PLUS for b in PLUS])):
        near = [a - b + d for d in (1, -1, 2, -2, 9, -9, 10, -10)]
        yield _arithmetic(draw, "minus", f"What is {a} - {b}?", a - b, near)


def _next(draw: Draw, n_records: Sequence[int]) -> Iterator[ConfItem]:
    for a, d in (map(int, pair.split()) for pair in draw.shuffled([f"{a} {d}" for a in PLUS for d in range(2, 13)])):
        series = ", ".join(str(a + i * d) for i in range(4))
        near = [a + 4 * d + e for e in (1, -1, d, -d, 2, -2, 10)]
        yield _arithmetic(draw, "next", f"Which number comes next: {series}?", a + 4 * d, near)


def _records(
    draw: Draw, task: str, keys: Sequence[str], value: Callable[[], list[str]], record: str, question: str, swap: bool
) -> ConfItem:
    """A text of records "key, value"; ``swap`` asks for the key of a value."""
    values: list[str] = []
    spare: list[str] = []
    while len(values) + len(spare) < min(len(keys) + N_CHOICES, len(TOWNS)):
        for text in value():
            if text not in values and text not in spare:
                (values if len(values) < len(keys) else spare).append(text)
    records = [record.format(key=key, value=text) for key, text in zip(keys, values, strict=True)]
    asked = draw.number(0, len(keys) - 1)
    golds, given = (list(keys), values) if swap else (values, list(keys))
    if swap:
        spare = [name for name in NAMES if name not in keys]
    others = [text for i, text in enumerate(golds) if i != asked]
    # Those of the context first: they are the mistakes that matter.
    wrong = draw.shuffled(others)[: N_CHOICES - 1] + draw.shuffled(spare)
    wrong = wrong[: N_CHOICES - 1]
    return ConfItem(
        question.format(given[asked]),
        golds[asked],
        context=" ".join(records),
        evidence=records[asked],
        choices=draw.shuffled([golds[asked], *wrong]),
        family="copy",
        task=task,
    )


def _of_records(
    task: str, value: Callable[[Draw], list[str]], record: str, question: str, *, swap: bool = False
) -> Callable[[Draw, Sequence[int]], Iterator[ConfItem]]:
    def generate(draw: Draw, n_records: Sequence[int]) -> Iterator[ConfItem]:
        while True:
            n = n_records[draw.number(0, len(n_records) - 1)]
            yield _records(draw, task, draw.some(NAMES, n), lambda: value(draw), record, question, swap)

    return generate


def _code(draw: Draw) -> list[str]:
    return [str(draw.number(100, 999))]


def _letters(draw: Draw) -> list[str]:
    return ["".join(string.ascii_uppercase[draw.number(0, 25)] for _ in range(3))]


TASKS: dict[str, Callable[[Draw, Sequence[int]], Iterator[ConfItem]]] = {
    "times": _times,
    "plus": _plus,
    "minus": _minus,
    "next": _next,
    "codes": _of_records("codes", _code, "{key}'s code is {value}.", "What is {}'s code?"),
    "letters": _of_records("letters", _letters, "{key}'s code is {value}.", "What is {}'s code?"),
    "likes": _of_records(
        "likes", lambda draw: draw.some(FRUITS, len(FRUITS)), "{key} likes {value}.", "Who likes {}?", swap=True
    ),
    "lives": _of_records(
        "lives", lambda draw: draw.some(TOWNS, len(TOWNS)), "{key} lives in {value}.", "Where does {} live?"
    ),
}
