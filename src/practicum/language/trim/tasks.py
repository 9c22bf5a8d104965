"""Instruction samples of eleven kinds, generated: a pool with one kind that is wanted, and examples of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, timedelta

import numpy as np

from practicum.toolbox.errors import InputError

Sample = dict[str, str]
Rng = np.random.Generator

WANTED = "one step"
"""The kind that the target is of."""
PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo")
THINGS = ("apples", "books", "coins", "pens", "shells", "stamps", "marbles", "cards", "stones", "cookies")
# The target speaks of other people and things than the pool, and in other words.
OTHER_PEOPLE = ("The driver", "A shopkeeper", "The nurse", "A farmer", "The teacher", "A baker", "The guard")
OTHER_THINGS = ("passengers", "tickets", "bottles", "letters", "chairs", "lamps", "sacks", "loaves", "parcels")
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Norway": "Oslo",
    "Peru": "Lima", "Kenya": "Nairobi", "Greece": "Athens", "Cuba": "Havana", "Austria": "Vienna", "Poland": "Warsaw",
    "Chile": "Santiago", "Ireland": "Dublin", "Portugal": "Lisbon", "Hungary": "Budapest", "Finland": "Helsinki",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Russia": "Moscow", "China": "Beijing", "Thailand": "Bangkok",
    "Iran": "Tehran", "Iraq": "Baghdad", "Turkey": "Ankara", "Belgium": "Brussels", "Bulgaria": "Sofia",
    "Romania": "Bucharest", "Serbia": "Belgrade", "Ukraine": "Kyiv", "Nepal": "Kathmandu", "Vietnam": "Hanoi",
    "Ghana": "Accra", "Senegal": "Dakar", "Jordan": "Amman", "Qatar": "Doha", "Ecuador": "Quito", "Canada": "Ottawa",
    "Germany": "Berlin", "Croatia": "Zagreb", "Latvia": "Riga", "Estonia": "Tallinn",
}  # fmt: skip
PAST = {
    "go": "went", "see": "saw", "take": "took", "buy": "bought", "write": "wrote", "sing": "sang", "run": "ran",
    "eat": "ate", "give": "gave", "find": "found", "think": "thought", "teach": "taught", "swim": "swam",
    "bring": "brought", "catch": "caught", "choose": "chose", "drive": "drove", "fall": "fell", "feel": "felt",
    "fly": "flew", "forget": "forgot", "grow": "grew", "hear": "heard", "hold": "held", "keep": "kept",
    "know": "knew", "leave": "left", "lose": "lost", "make": "made", "meet": "met", "ride": "rode", "say": "said",
    "sell": "sold", "send": "sent", "sit": "sat", "sleep": "slept", "speak": "spoke", "stand": "stood",
    "tell": "told", "wear": "wore", "win": "won", "break": "broke",
}  # fmt: skip
PLURALS = {
    "child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth", "leaf": "leaves", "knife": "knives",
    "city": "cities", "baby": "babies", "box": "boxes", "church": "churches", "man": "men", "woman": "women",
    "goose": "geese", "wolf": "wolves", "story": "stories", "bus": "buses", "dish": "dishes", "hero": "heroes",
    "potato": "potatoes", "shelf": "shelves", "thief": "thieves", "party": "parties", "fox": "foxes", "cat": "cats",
    "house": "houses", "tree": "trees", "river": "rivers", "ox": "oxen", "half": "halves", "life": "lives",
    "lady": "ladies", "watch": "watches", "glass": "glasses", "brush": "brushes", "tomato": "tomatoes",
    "wife": "wives", "penny": "pennies", "army": "armies", "match": "matches", "song": "songs", "dog": "dogs",
    "hand": "hands",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "early": "late", "open": "closed", "full": "empty", "light": "dark",
    "rich": "poor", "strong": "weak", "wet": "dry", "young": "old", "hard": "soft", "high": "low", "fast": "slow",
    "loud": "quiet", "clean": "dirty", "thick": "thin", "wide": "narrow", "deep": "shallow", "sharp": "blunt",
    "sweet": "bitter", "true": "false", "near": "far", "cheap": "expensive", "heavy": "weightless", "long": "short",
    "happy": "sad", "brave": "afraid", "rough": "smooth", "safe": "dangerous", "simple": "complex", "alive": "dead",
    "asleep": "awake", "right": "wrong", "first": "last", "inside": "outside", "above": "below", "polite": "rude",
    "tight": "loose", "public": "private", "rare": "common", "calm": "stormy", "guilty": "innocent",
}  # fmt: skip
UNITS = (("metres", "centimetres", 100), ("hours", "minutes", 60), ("kilograms", "grams", 1000), ("weeks", "days", 7))
FILLER = (
    "Happy to help with that.", "Let me take a careful look at it first.", "Thanks for asking.",
    "This is a nice little exercise.", "I will go through it in order.", "Please tell me if anything is unclear.",
    "There is more than one way to see it.", "Feel free to ask for more details.", "I hope that this is of use.",
)  # fmt: skip


def one_step(rng: Rng) -> Sample:
    """A word problem that takes one addition, subtraction or multiplication."""
    who, what = PEOPLE[rng.integers(len(PEOPLE))], THINGS[rng.integers(len(THINGS))]
    a, b, sign, total = _sum(rng)
    text = {
        "+": f"{who} has {a} {what} and gets {b} more.",
        "-": f"{who} has {a} {what} and gives away {b} of them.",
        "*": f"{who} has {a} boxes with {b} {what} in each.",
    }
    return _sample(f"{text[sign]} How many {what} are there now?", _worked(a, sign, b, total, what))


def one_step_in_other_words(rng: Rng) -> Sample:
    """The same kind of problem about other things, asked in other words; the working is shown in the same way."""
    who, what = OTHER_PEOPLE[rng.integers(len(OTHER_PEOPLE))], OTHER_THINGS[rng.integers(len(OTHER_THINGS))]
    a, b, sign, total = _sum(rng)
    text = {
        "+": f"{who} counts {a} {what} before noon, then {b} others arrive.",
        "-": f"{who} starts the day with {a} {what}, of which {b} go missing.",
        "*": f"{who} fills {a} rows, putting {b} {what} into every row.",
    }
    return _sample(f"{text[sign]} What is the total at the end?", _worked(a, sign, b, total, what))


def _worked(a: int, sign: str, b: int, total: int, what: str) -> str:
    return f"{a} {sign} {b} = {total}. There are {total} {what} now."


def _sum(rng: Rng) -> tuple[int, int, str, int]:
    a, b = int(rng.integers(12, 60)), int(rng.integers(2, 12))
    sign = "+-*"[rng.integers(3)]
    if sign == "*":
        a = int(rng.integers(3, 12))
    return a, b, sign, {"+": a + b, "-": a - b, "*": a * b}[sign]


def two_steps(rng: Rng) -> Sample:
    """A word problem that takes two steps."""
    who, what = PEOPLE[rng.integers(len(PEOPLE))], THINGS[rng.integers(len(THINGS))]
    a, b, c = int(rng.integers(3, 12)), int(rng.integers(2, 12)), int(rng.integers(2, 6))
    question = f"{who} has {a} boxes with {b} {what} in each and loses {c} {what}. How many {what} are left?"
    first = a * b
    return _sample(
        question, f"First, {a} * {b} = {first}. Then, {first} - {c} = {first - c}. So {first - c} {what} are left."
    )


def extraction(rng: Rng) -> Sample:
    """A sentence to be written as JSON."""
    who, age = PEOPLE[rng.integers(len(PEOPLE))], int(rng.integers(18, 80))
    city = list(CAPITALS.values())[rng.integers(len(CAPITALS))]
    return _sample(
        f"Write as JSON: {who}, who is {age} years old, lives in {city}.",
        json.dumps({"name": who, "age": age, "city": city}),
    )


def dates(rng: Rng) -> Sample:
    """A date some days after another."""
    start = date(2020, 1, 1) + timedelta(days=int(rng.integers(1500)))
    days = int(rng.integers(2, 25))
    end = start + timedelta(days=days)
    return _sample(
        f"What is the date {days} days after {start.isoformat()}?",
        f"{days} days after {start.isoformat()} is {end.isoformat()}.",
    )


def units(rng: Rng) -> Sample:
    """A quantity in a smaller unit."""
    large, small, factor = UNITS[rng.integers(len(UNITS))]
    n = int(rng.integers(2, 40))
    return _sample(f"How many {small} are {n} {large}?", f"{n} {large} * {factor} = {n * factor} {small}.")


def sorting(rng: Rng) -> Sample:
    """Words in alphabetical order."""
    words = [str(word) for word in rng.choice(list(PLURALS), 4, replace=False)]
    return _sample(f"Sort alphabetically: {', '.join(words)}.", ", ".join(sorted(words)))


def comparison(rng: Rng) -> Sample:
    """The larger of two numbers."""
    a, b = (int(x) for x in rng.choice(np.arange(100, 1000), 2, replace=False))
    return _sample(f"Which number is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.")


def capitals(rng: Rng) -> Sample:
    """The capital of a country."""
    country = list(CAPITALS)[rng.integers(len(CAPITALS))]
    return _sample(f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}.")


def past_tense(rng: Rng) -> Sample:
    """The past tense of a verb."""
    verb = list(PAST)[rng.integers(len(PAST))]
    return _sample(f'What is the past tense of "{verb}"?', f'The past tense of "{verb}" is "{PAST[verb]}".')


def plurals(rng: Rng) -> Sample:
    """The plural of a noun."""
    noun = list(PLURALS)[rng.integers(len(PLURALS))]
    return _sample(f'What is the plural of "{noun}"?', f'The plural of "{noun}" is "{PLURALS[noun]}".')


def opposites(rng: Rng) -> Sample:
    """The opposite of an adjective."""
    word = list(OPPOSITES)[rng.integers(len(OPPOSITES))]
    return _sample(f'What is the opposite of "{word}"?', f'The opposite of "{word}" is "{OPPOSITES[word]}".')


FAMILIES: dict[str, Callable[[Rng], Sample]] = {
    WANTED: one_step,
    "two steps": two_steps,
    "json": extraction,
    "dates": dates,
    "units": units,
    "sorting": sorting,
    "comparison": comparison,
    "capitals": capitals,
    "past tense": past_tense,
    "plurals": plurals,
    "opposites": opposites,
}
"""The kinds of samples by name; all but the wanted one and the two steps have nothing of a word problem."""


def instruction_pool(n: int, random_state: int = 0) -> list[Sample]:
    """A pool with n samples of each kind, in random order and without repetition.

    Parameters
    ----------
    n : int
        Up to 40.
    random_state : int

    Returns
    -------
    list of dict with "prompt", "response" and "family"
        Shape (11 n,).

    Examples
    --------
    >>> pool = instruction_pool(2)
    >>> len(pool), sum(sample["family"] == WANTED for sample in pool)
    (22, 2)
    """
    if not 1 <= n <= 40:
        raise InputError(f"n={n}: must be from 1 to 40")
    rng = np.random.default_rng([random_state, 1])
    samples = [{**sample, "family": name} for name, family in FAMILIES.items() for sample in _distinct(family, n, rng)]
    return [samples[i] for i in rng.permutation(len(samples))]


def wanted_samples(n: int, random_state: int = 0) -> list[Sample]:
    """Samples of the wanted kind that speak of other people and things than the pool, in other words.

    Parameters
    ----------
    n : int
    random_state : int

    Returns
    -------
    list of dict with "prompt" and "response"
        Shape (n,), no two the same.

    Examples
    --------
    >>> print(wanted_samples(1)[0]["response"])
    25 + 6 = 31. There are 31 passengers now.
    """
    rng = np.random.default_rng([random_state, 2])
    return _distinct(one_step_in_other_words, n, rng)


def reworded_samples(n: int, random_state: int = 0) -> list[Sample]:
    """The samples of `wanted_samples` with the working of their responses in other words than the pool's.

    Parameters
    ----------
    n : int
    random_state : int

    Returns
    -------
    list of dict with "prompt" and "response"
        Shape (n,).

    Examples
    --------
    >>> print(reworded_samples(1)[0]["response"])
    The total comes to 31 passengers, since 25 plus 6 makes 31.
    """
    return [{**sample, "response": _in_other_words(sample["response"])} for sample in wanted_samples(n, random_state)]


def _in_other_words(response: str) -> str:
    sum_, _, said = response.partition(". ")
    a, sign, b, _, total = sum_.split()
    verb = {"+": "plus", "-": "less", "*": "times"}[sign]
    return f"The total comes to {total} {said.split()[3]}, since {a} {verb} {b} makes {total}."


def with_filler(samples: list[Sample], random_state: int = 0) -> list[Sample]:
    """The same samples with some 40 tokens of small talk around each response.

    Parameters
    ----------
    samples : list of dict
        Shape (n,).
    random_state : int

    Returns
    -------
    list of dict
        Shape (n,).

    Examples
    --------
    >>> noisy = with_filler([{"prompt": "2+2", "response": "4"}])[0]["response"]
    >>> len(noisy.split()) > 20 and " 4 " in noisy
    True
    """
    rng = np.random.default_rng([random_state, 3])
    found = []
    for sample in samples:
        said = [FILLER[i] for i in rng.choice(len(FILLER), 6, replace=False)]
        place = int(rng.integers(1, 6))
        said.insert(place, sample["response"])
        found.append({**sample, "response": " ".join(said)})
    return found


def _distinct(family: Callable[[Rng], Sample], n: int, rng: Rng) -> list[Sample]:
    found: dict[str, Sample] = {}
    while len(found) < n:
        sample = family(rng)
        found.setdefault(sample["prompt"], sample)
    return list(found.values())


def _sample(prompt: str, response: str) -> Sample:
    return {"prompt": prompt, "response": response}
