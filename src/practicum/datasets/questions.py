"""Multiple-choice questions: topics made offline from installed packages, and the reading of the user's own."""

from __future__ import annotations

import http
import importlib
import inspect
import platform
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from practicum.datasets.files import DataFileError, json_lines, kind_of
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires
from practicum.toolbox.installed import installed_version

N_CHOICES = 4


@dataclass(frozen=True)
class MCQuestion:
    """A question with options, of which one is right.

    Attributes
    ----------
    question : str
    choices : tuple of str
        Any sequence is taken and kept as a tuple.
    answer : int, optional
        Index of the right one, from 0; None where it is not known.
    group : str, optional
        The topic, or whatever may be held out as a whole.

    Examples
    --------
    >>> MCQuestion("What is 2 + 2?", ["3", "4"], answer=1).choices
    ('3', '4')
    """

    question: str
    choices: Sequence[str]
    answer: int | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        """Keep the options as they are now."""
        if not isinstance(self.choices, str):
            object.__setattr__(self, "choices", tuple(self.choices))


@dataclass(frozen=True)
class MCQTopics:
    """Questions of several topics.

    Attributes
    ----------
    questions : tuple of MCQuestion
        Topic by topic; the group of each is its topic.
    provenance : str
        Packages and versions.
    licence : str
    """

    questions: tuple[MCQuestion, ...]
    provenance: str
    licence: str

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics there are, in order."""
        return tuple(dict.fromkeys(str(question.group) for question in self.questions))

    def hold_out(self, *topics: str) -> tuple[tuple[MCQuestion, ...], tuple[MCQuestion, ...]]:
        """Split so that no topic is on both sides.

        Parameters
        ----------
        *topics : str
            At least one, and not all there are.

        Returns
        -------
        others, held_out : tuple of MCQuestion

        Raises
        ------
        InputError
            A ValueError: for a topic that is not there, or where one side would be empty.

        Examples
        --------
        >>> train, test = mcq_topics(4, topics=["add", "mul", "http"]).hold_out("http")
        >>> len(train), {question.group for question in test}
        (8, {'http'})
        """
        for topic in topics:
            if topic not in self.topics:
                raise InputError(f"topics={topic!r}: there is no such topic here; there are {', '.join(self.topics)}")
        if not 0 < len(set(topics)) < len(self.topics):
            raise InputError(
                f"topics={topics!r}: must be at least one, and fewer than the {len(self.topics)} there are"
            )
        others = tuple(question for question in self.questions if question.group not in topics)
        return others, tuple(question for question in self.questions if question.group in topics)


def mcq_topics(n_per_topic: int = 40, topics: Sequence[str] | None = None, random_state: int | None = 0) -> MCQTopics:
    """Make questions of four options from packages that are installed; nothing is downloaded.

    ============== ======================================================= ====== =====================
    topic          asks for                                                 has    made from
    ============== ======================================================= ====== =====================
    capital        the capital of a country                                 224    countryinfo
    capital_inv    the country of a capital                                 224    countryinfo
    subregion      the part of the world a country is in                    240    countryinfo
    currency       the currency of a country                                216    countryinfo, pycountry
    province       the country of a province, state, ...                    471    pycountry
    element        the element with a chemical symbol                       118    periodictable
    add            the sum of two numbers of two digits                     4005   arithmetic
    mul            the product of two numbers from 2 to 20                  190    arithmetic
    http           the meaning of an HTTP status code                       62     http.HTTPStatus
    pydoc          the Python function with a docstring's first sentence    405    the standard library
    demonym        the people of a country; not among the ten by default    210    countryinfo
    ============== ======================================================= ====== =====================

    The counts are those of Python 3.11 with countryinfo 1.0.1 and pycountry 26.2.16; other versions have some more or
    less. Wrong options are answers of the same topic, for numbers their neighbours, and none of them is right as well.
    Where the answer stands in the question, the question is left out (but for currencies and demonyms, which are often
    named for the country). The right option is in each of the four places equally often.

    Parameters
    ----------
    n_per_topic : int
        At most; a topic that has fewer gives all it has.
    topics : sequence of str, optional
        The ten by default.
    random_state : int, optional
        Of the choice of questions and wrong options, and of their order. The first n questions of a topic do not change
        with ``n_per_topic``, nor with the other topics.

    Returns
    -------
    MCQTopics

    Raises
    ------
    InputError
        A ValueError naming the argument.
    MissingExtra
        When countryinfo, pycountry or periodictable is not installed and a topic needs it.

    Examples
    --------
    >>> questions = mcq_topics(2, topics=["add", "element"]).questions
    >>> [(question.group, len(question.choices)) for question in questions]
    [('add', 4), ('add', 4), ('element', 4), ('element', 4)]
    """
    if isinstance(n_per_topic, bool) or not isinstance(n_per_topic, int | np.integer) or n_per_topic < 1:
        raise InputError(f"n_per_topic={n_per_topic!r}: must be a whole number, at least 1")
    chosen = DEFAULT_TOPICS if topics is None else tuple(topics)
    if not chosen or isinstance(topics, str):
        raise InputError(f"topics={topics!r}: must be a list of topics, at least one")
    for i, topic in enumerate(chosen):
        if topic not in TOPICS:
            raise InputError(f"topics={topic!r}: there is no such topic; there are {', '.join(TOPICS)}")
        if topic in chosen[:i]:
            raise InputError(f"topics={topic!r}: is there twice")
    questions: list[MCQuestion] = []
    for topic in chosen:
        # The topic's own place in the list, so that a topic's questions are the same in whatever company.
        seed = np.random.SeedSequence(random_state, spawn_key=(list(TOPICS).index(topic),))
        questions += _questions(topic, int(n_per_topic), np.random.default_rng(seed))
    sources = dict.fromkeys(source for topic in chosen for source in TOPICS[topic].sources)
    licences = dict.fromkeys(LICENCES[source] for source in sources)
    made_from = ", ".join(_with_version(source) for source in sources)
    return MCQTopics(tuple(questions), f"made from {made_from}", " and ".join(licences))


def read_questions(path: Path | str, require_answer: bool = True) -> list[MCQuestion]:
    r"""Read questions from a file with one JSON object a line.

    An object has ``question`` (text), ``choices`` or ``options`` (two or more different texts; lines may differ in how
    many), ``answer`` and optionally ``group`` (text). An answer that is a number is the index of the option, from 0;
    one that is text is the option itself or, where no option reads so, its letter, A for the first. Other fields are
    left out.

    Parameters
    ----------
    path : pathlib.Path or str
        UTF-8 text. Blank lines are passed over.
    require_answer : bool
        Whether every question must have one; else it may be missing or null.

    Returns
    -------
    list of MCQuestion
        At least one.

    Raises
    ------
    DataFileError
        A ValueError naming line and field.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "mine.jsonl")
    ...     _ = file.write_text('{"question": "2 + 2?", "choices": ["3", "4"], "answer": "B"}\n')
    ...     read_questions(file)
    [MCQuestion(question='2 + 2?', choices=('3', '4'), answer=1, group=None)]
    """
    path = Path(path)
    questions = [_question_of(path, line, parsed, require_answer) for line, parsed in json_lines(path)]
    if not questions:
        raise DataFileError(path, "is empty; must have one JSON object a line")
    return questions


def require_questions(questions: Any, *, answers: bool = False) -> list[MCQuestion]:
    """Return the questions as a list if all are sound.

    Parameters
    ----------
    questions : sequence of MCQuestion
    answers : bool
        Whether every one must have its answer.

    Raises
    ------
    InputError
        A ValueError naming ``questions[i]``: for no question at all, a question without text, fewer than two choices,
        an empty or a repeated one, an answer that is out of range or missing.

    Examples
    --------
    >>> require_questions([MCQuestion("2 + 2?", ["4", "4"])])
    Traceback (most recent call last):
    practicum.toolbox.errors.InputError: questions[0]: choice '4' is there twice
    """
    if isinstance(questions, MCQuestion):
        raise InputError("questions: is one question; must be a list of them")
    listed = list(questions)
    if not listed:
        raise InputError("questions: is empty; must have at least one")
    for i, question in enumerate(listed):
        fault = _fault(question, answers)
        if fault:
            raise InputError(f"questions[{i}]: {fault}")
    return listed


def _fault(question: Any, answers: bool) -> str:
    if not isinstance(question, MCQuestion):
        return f"is of type {type(question).__name__}; must be MCQuestion"
    if not isinstance(question.question, str) or not question.question.strip():
        return "has no text"
    if isinstance(question.choices, str):
        return "choices is a text; must be a list of texts"
    if len(question.choices) < 2:
        return f"has {len(question.choices)} choices; must have 2 or more"
    for i, choice in enumerate(question.choices):
        if not isinstance(choice, str):
            return f"choices[{i}] is of type {type(choice).__name__}; must be text"
        if not choice.strip():
            return f"choices[{i}] is empty; must have text"
        if choice in question.choices[:i]:
            return f"choice {choice!r} is there twice"
    if question.answer is None:
        return "has no answer" if answers else ""
    is_index = isinstance(question.answer, int | np.integer) and not isinstance(question.answer, bool)
    if not is_index or not 0 <= question.answer < len(question.choices):
        return f"answer={question.answer!r}; must be from 0 to {len(question.choices) - 1}"
    return ""


def _question_of(path: Path, line: int, parsed: Any, require_answer: bool) -> MCQuestion:
    if not isinstance(parsed, dict):
        wanted = '{"question": ..., "choices": [...], "answer": ...}'
        raise DataFileError(path, f"is {kind_of(parsed)}; must be an object {wanted}", line=line)
    question = _text(path, line, "question", parsed.get("question", ...))
    if "choices" in parsed and "options" in parsed:
        raise DataFileError(path, "stands beside 'choices'; must be one of the two", line=line, field="options")
    field = "options" if "options" in parsed else "choices"
    choices = _choices(path, line, field, parsed.get(field, ...))
    answer = parsed.get("answer")
    if answer is not None:
        answer = _answer(path, line, answer, choices)
    elif require_answer:
        reason = "is null" if "answer" in parsed else "is missing"
        raise DataFileError(
            path, f"{reason}; must be the index, the letter or the text of an option", line=line, field="answer"
        )
    group = parsed.get("group")
    return MCQuestion(question, choices, answer, None if group is None else _text(path, line, "group", group))


def _text(path: Path, line: int, field: str, value: Any) -> str:
    if value is ...:
        raise DataFileError(path, "is missing", line=line, field=field)
    if not isinstance(value, str):
        raise DataFileError(path, f"is {kind_of(value)}; must be text", line=line, field=field)
    if not value.strip():
        raise DataFileError(path, "is empty; must have text", line=line, field=field)
    return value


def _choices(path: Path, line: int, field: str, value: Any) -> tuple[str, ...]:
    if value is ...:
        raise DataFileError(path, "is missing; must be a list of texts ('options' will do)", line=line, field=field)
    if not isinstance(value, list):
        raise DataFileError(path, f"is {kind_of(value)}; must be a list of texts", line=line, field=field)
    if len(value) < 2:
        raise DataFileError(path, f"has {len(value)} options; must have 2 or more", line=line, field=field)
    choices = tuple(_text(path, line, f"{field}[{i}]", choice) for i, choice in enumerate(value))
    for i, choice in enumerate(choices):
        if choice in choices[:i]:
            raise DataFileError(path, f"{choice!r} is there twice", line=line, field=f"{field}[{i}]")
    return choices


def _answer(path: Path, line: int, answer: Any, choices: tuple[str, ...]) -> int:
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(choices):
            return answer
    elif isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        if len(answer.strip()) == 1 and answer.strip().upper() in letters:
            return letters.index(answer.strip().upper())
    elif not isinstance(answer, float):
        raise DataFileError(
            path,
            f"is {kind_of(answer)}; must be the index, the letter or the text of an option",
            line=line,
            field="answer",
        )
    known = f"0 to {len(choices) - 1}, A to {letters[-1]} or the text of an option"
    raise DataFileError(path, f"{answer!r} is no option; must be {known}", line=line, field="answer")


@dataclass(frozen=True)
class _Item:
    """A question before it has wrong options; ``others`` are given where not any answer of the topic will do."""

    question: str
    answer: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Topic:
    items: Callable[[np.random.Generator], Iterator[_Item]]
    sources: tuple[str, ...]


def _questions(topic: str, n: int, rng: np.random.Generator) -> list[MCQuestion]:
    pool = list(TOPICS[topic].items(rng))
    answers = sorted({item.answer for item in pool})
    questions = []
    places = np.empty(0, dtype=np.int64)
    for i in rng.permutation(len(pool))[:n]:
        item = pool[i]
        if not len(places):
            places = rng.permutation(N_CHOICES)
        place, places = int(places[0]), places[1:]
        wrong = list(item.others or rng.choice([a for a in answers if a != item.answer], N_CHOICES - 1, replace=False))
        choices = [*wrong[:place], item.answer, *wrong[place:]]
        questions.append(MCQuestion(item.question, tuple(map(str, choices)), place, topic))
    return questions


def _with_version(source: str) -> str:
    if source == STANDARD_LIBRARY:
        return f"{source} {platform.python_version()}"
    return source if source == ARITHMETIC else f"{source} {installed_version(source)}"


def _countries() -> list[dict[str, Any]]:
    """Those of today: in ISO 3166, and each once."""
    with requires("embedded", "the questions about countries"):
        import countryinfo
        import pycountry

    found: dict[str, dict[str, Any]] = {}
    for country in countryinfo.all_countries():
        known = country.info()
        code = (known.get("ISO") or {}).get("alpha2")
        if code and "," not in known["name"] and pycountry.countries.get(alpha_2=code):
            found.setdefault(code, dict(known))
    return sorted(found.values(), key=lambda known: str(known["name"]))


def _capitals() -> list[tuple[str, str]]:
    """Pairs (country, capital) where neither name gives the other away and no other country has the capital."""
    # The package has a list for one country, an empty text for others, and one entry with three cities.
    pairs = [(str(known["name"]), known.get("capital")) for known in _countries()]
    named = [(name, capital) for name, capital in pairs if isinstance(capital, str) and capital and "/" not in capital]
    cities = [capital for _, capital in named]
    return [(name, city) for name, city in named if cities.count(city) == 1 and not _tells(name, city)]


def _tells(one: str, other: str) -> bool:
    return one.lower() in other.lower() or other.lower() in one.lower()


def _capital(_: np.random.Generator) -> Iterator[_Item]:
    for country, capital in _capitals():
        yield _Item(f"What is the capital of {country}?", capital)


def _capital_inv(_: np.random.Generator) -> Iterator[_Item]:
    for country, capital in _capitals():
        yield _Item(f"Which country has the capital {capital}?", country)


def _subregion(_: np.random.Generator) -> Iterator[_Item]:
    for known in _countries():
        # One entry is capitalised unlike the others of its region.
        region = (known.get("subregion") or "").replace("South-Eastern", "South-eastern")
        if region and not _tells(str(known["name"]), region):
            yield _Item(f"In which part of the world is {known['name']}?", region)


def _currency(_: np.random.Generator) -> Iterator[_Item]:
    with requires("embedded", "the questions about currencies"):
        import pycountry

    for known in _countries():
        codes = known.get("currencies") or []
        currency = pycountry.currencies.get(alpha_3=codes[0]) if len(codes) == 1 else None
        if currency is not None:
            yield _Item(f"What is the currency of {known['name']}?", currency.name)


def _demonym(_: np.random.Generator) -> Iterator[_Item]:
    known = [(str(country["name"]), country.get("demonym") or "") for country in _countries()]
    demonyms = [demonym for _, demonym in known]
    for country, demonym in known:
        if demonym and not set(",/") & set(demonym) and demonyms.count(demonym) == 1 and demonym != country:
            yield _Item(f"What are people from {country} called?", demonym)


def _province(rng: np.random.Generator) -> Iterator[_Item]:
    """A few of each country, or those with hundreds would be all there is."""
    with requires("embedded", "the questions about provinces"):
        import pycountry

    subdivisions = sorted(pycountry.subdivisions, key=lambda subdivision: subdivision.code)
    repeated = Counter(subdivision.name for subdivision in subdivisions)
    of_country: dict[str, list[Any]] = {}
    for subdivision in subdivisions:
        if subdivision.type in PROVINCES and repeated[subdivision.name] == 1 and subdivision.name.isascii():
            of_country.setdefault(subdivision.country_code, []).append(subdivision)
    for code, found in of_country.items():
        country: Any = pycountry.countries.get(alpha_2=code)
        name = getattr(country, "common_name", country.name).partition(",")[0]
        for i in rng.permutation(len(found))[:PROVINCES_OF_A_COUNTRY]:
            if not _tells(found[i].name, name):
                yield _Item(f"In which country is the {found[i].type.lower()} {found[i].name}?", name)


def _element(_: np.random.Generator) -> Iterator[_Item]:
    with requires("embedded", "the questions about elements"):
        import periodictable

    for element in periodictable.elements:
        if element.number > 0:
            yield _Item(f"Which chemical element has the symbol {element.symbol}?", element.name)


def _add(rng: np.random.Generator) -> Iterator[_Item]:
    for a in range(10, 100):
        for b in range(a + 1, 100):
            yield _number_item("What is {} + {}?", a, b, a + b, {1, 2, 9, 10, 11, 20}, rng)


def _mul(rng: np.random.Generator) -> Iterator[_Item]:
    for a in range(2, 21):
        for b in range(a, 21):
            yield _number_item("What is {} times {}?", a, b, a * b, {1, 2, a, b, 10, a + b}, rng)


def _number_item(text: str, a: int, b: int, result: int, distances: set[int], rng: np.random.Generator) -> _Item:
    """Wrong results near the right one, which is in each place of their order equally often."""
    if rng.random() < 0.5:
        a, b = b, a
    below = sorted(result - distance for distance in distances if distance < result)
    above = sorted(result + distance for distance in distances)
    n_below = min(int(rng.integers(N_CHOICES)), len(below))
    wrong = [
        *rng.choice(below, n_below, replace=False),
        *rng.choice(above, N_CHOICES - 1 - n_below, replace=False),
    ]
    return _Item(text.format(a, b), str(result), tuple(str(value) for value in rng.permutation(wrong)))


def _http(_: np.random.Generator) -> Iterator[_Item]:
    for status in http.HTTPStatus:
        yield _Item(f"What does the HTTP status code {status.value} mean?", status.phrase)


def _pydoc(_: np.random.Generator) -> Iterator[_Item]:
    found: dict[str, list[str]] = {}
    for module in PYDOC_MODULES:
        for name, function in sorted(vars(importlib.import_module(module)).items()):
            sentence = _first_sentence(function) if not name.startswith("_") else ""
            words = len(sentence.split())
            if SHORTEST_SENTENCE <= words <= LONGEST_SENTENCE and name.lower() not in sentence.lower():
                found.setdefault(sentence, []).append(name)
    names = [name for same in found.values() for name in same]
    for sentence, same in found.items():
        if len(same) == 1 and names.count(same[0]) == 1:
            yield _Item(f"Which Python function is described as: {sentence}", same[0])


def _first_sentence(function: Any) -> str:
    if not inspect.isroutine(function):
        return ""
    first = re.split(r"\n\s*\n", inspect.getdoc(function) or "")[0]
    sentence = " ".join(re.split(r"(?<=[a-z)]\.)\s", first)[0].split())
    # Some docstrings begin with the signature.
    return sentence if sentence.endswith(".") and "(" not in sentence.split(" ")[0] and "->" not in sentence else ""


ARITHMETIC = "arithmetic"
STANDARD_LIBRARY = "the standard library of Python"
LICENCES = {
    "countryinfo": "MIT (countryinfo)",
    "pycountry": "LGPL-2.1 (pycountry)",
    "periodictable": "public domain (periodictable)",
    STANDARD_LIBRARY: "PSF-2.0 (Python)",
    ARITHMETIC: "CC0-1.0 (arithmetic)",
}
TOPICS = {
    "capital": _Topic(_capital, ("countryinfo",)),
    "capital_inv": _Topic(_capital_inv, ("countryinfo",)),
    "subregion": _Topic(_subregion, ("countryinfo",)),
    "currency": _Topic(_currency, ("countryinfo", "pycountry")),
    "province": _Topic(_province, ("pycountry",)),
    "element": _Topic(_element, ("periodictable",)),
    "add": _Topic(_add, (ARITHMETIC,)),
    "mul": _Topic(_mul, (ARITHMETIC,)),
    "http": _Topic(_http, (STANDARD_LIBRARY,)),
    "pydoc": _Topic(_pydoc, (STANDARD_LIBRARY,)),
    "demonym": _Topic(_demonym, ("countryinfo",)),
}
DEFAULT_TOPICS = tuple(topic for topic in TOPICS if topic != "demonym")
PROVINCES = ("Province", "State", "Region", "Department", "County", "Governorate", "Prefecture", "Canton")
PROVINCES_OF_A_COUNTRY = 4
SHORTEST_SENTENCE, LONGEST_SENTENCE = 4, 25
# Of these what is there does not depend on the operating system.
PYDOC_MODULES = (
    "ast", "base64", "binascii", "bisect", "builtins", "calendar", "cmath", "codecs", "colorsys", "contextlib",
    "copy", "difflib", "dis", "fnmatch", "functools", "gc", "glob", "gzip", "heapq", "hmac", "html", "inspect",
    "json", "keyword", "linecache", "math", "mimetypes", "operator", "pickle", "pkgutil", "platform", "pprint",
    "posixpath", "random", "re", "secrets", "shlex", "shutil", "socket", "statistics", "struct", "subprocess",
    "tempfile", "textwrap", "threading", "tokenize", "traceback", "types", "unicodedata", "urllib.parse",
    "uuid", "warnings", "weakref", "zlib",
)  # fmt: skip
