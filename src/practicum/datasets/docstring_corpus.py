"""Pairs of a short and a long text about the same thing, taken from the docstrings of installed packages."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from practicum.toolbox.cache import build_once, cache_folder, cache_key
from practicum.toolbox.extras import MissingExtra
from practicum.toolbox.installed import installed_version, package_folder

# Name to import by, name of the distribution, licence of what it ships.
SOURCES = (
    ("numpy", "numpy", "BSD-3-Clause"),
    ("scipy", "scipy", "BSD-3-Clause"),
    ("sklearn", "scikit-learn", "BSD-3-Clause"),
    ("networkx", "networkx", "BSD-3-Clause"),
    ("sympy", "sympy", "BSD-3-Clause"),
    ("torch", "torch", "BSD-3-Clause"),
    ("transformers", "transformers", "Apache-2.0"),
)
HARVEST_VERSION = 2
LONGEST_SUMMARY = 300
SHORTEST_SUMMARY_WORDS = 3
SHORTEST_BODY_WORDS = 6
LONGEST_BODY = 2000
LONGEST_BODY_READ = 10_000

# Reading a docstring by a pattern and only its literal by `ast` is ten times faster than parsing whole files.
DOCSTRING = re.compile(r':[ \t]*(?:\#[^\n]*)?\n(?:[ \t]*\n)?[ \t]+([rR]?)"""(.*?)"""', re.DOTALL)
BLANK_LINE = re.compile(r"\n[ \t]*\n")
SENTENCE_END = re.compile(r"(?<=[a-z)`\"'0-9]\.)\s+(?=[A-Z`\"'(])")


@dataclass(frozen=True)
class TextPairs:
    """Queries with the document each belongs to.

    Attributes
    ----------
    queries : list of str
        ``queries[i]`` belongs to ``documents[i]``. Empty where a user's file has documents only.
    documents : list of str
    name, provenance, licence : str

    Examples
    --------
    >>> len(TextPairs(["a query"], ["its document"], "mine", "typed here", "mine"))
    1
    """

    queries: list[str]
    documents: list[str]
    name: str
    provenance: str
    licence: str

    def __len__(self) -> int:
        return len(self.documents)


def docstrings(n_documents: int | None = None, *, random_state: int = 0) -> TextPairs:
    """Return pairs of summary (query) and body (document) from the docstrings of installed packages.

    The packages are numpy, scipy, scikit-learn, networkx, sympy, torch and transformers, those that are installed;
    none of them is imported. A summary is the first paragraph, or the first sentence where that is all there is or
    it is longer than 300 characters; the body is the rest with its white space joined, cut at 2000 characters. Each
    summary and each body occurs once. The harvest is kept in the cache folder, for these versions of the packages.

    Parameters
    ----------
    n_documents : int, optional
        How many, drawn without replacement; the first n of a larger draw are the draw of n. All of them by default,
        in the order of the files.
    random_state : int
        Of the draw.

    Returns
    -------
    TextPairs
        ``provenance`` lists the packages with their versions.

    Raises
    ------
    ValueError
        When there are fewer than ``n_documents`` pairs, or ``n_documents < 1``.
    MissingExtra
        When none of the packages is installed.

    Examples
    --------
    >>> pairs = docstrings(100, random_state=0)
    >>> len(pairs.queries), len(pairs.documents)
    (100, 100)
    """
    versions = installed_sources()
    if not versions:
        raise MissingExtra("the corpus of docstrings needs packages to read: pip install 'practicum[embedded]'")
    key = cache_key({"harvest": HARVEST_VERSION, "versions": versions})
    harvest = json.loads(build_once(cache_folder() / "docstrings" / f"{key}.json", _write_harvest).read_text("utf-8"))
    if n_documents is None:
        chosen = np.arange(len(harvest))
    elif 1 <= n_documents <= len(harvest):
        chosen = np.random.default_rng(random_state).permutation(len(harvest))[:n_documents]
    else:
        raise ValueError(f"n_documents={n_documents}: must be from 1 to the {len(harvest)} pairs there are")
    licences = sorted({licence for module, _, licence in SOURCES if module in versions})
    return TextPairs(
        queries=[harvest[i][0] for i in chosen],
        documents=[harvest[i][1] for i in chosen],
        name="docstrings",
        provenance="docstrings of " + ", ".join(f"{module} {version}" for module, version in versions.items()),
        licence=" and ".join(licences) + ", as the packages",
    )


def installed_sources() -> dict[str, str]:
    """Return the version of every package of the corpus that is installed, by the name it is imported by.

    Examples
    --------
    >>> "numpy" in installed_sources()
    True
    """
    return {
        module: installed_version(distribution)
        for module, distribution, _ in SOURCES
        if package_folder(module) is not None
    }


def _write_harvest(path: Path) -> None:
    path.write_text(json.dumps(list(_harvest()), ensure_ascii=False), encoding="utf-8")


def _harvest() -> Iterator[tuple[str, str]]:
    summaries: set[str] = set()
    bodies: set[str] = set()
    for module, _, _ in SOURCES:
        folder = package_folder(module)
        if folder is None:
            continue
        for file in _source_files(folder):
            for docstring in _docstrings_of(file.read_text(encoding="utf-8", errors="replace")):
                summary, body = _split(docstring)
                if not _is_worthwhile(summary, body) or summary.lower() in summaries or body in bodies:
                    continue
                summaries.add(summary.lower())
                bodies.add(body)
                yield summary, body


def _source_files(folder: Path) -> list[Path]:
    left_out = {"tests", "test", "testing", "_vendor"}
    return [file for file in sorted(folder.rglob("*.py")) if not left_out & set(file.relative_to(folder).parts)]


def _docstrings_of(source: str) -> Iterator[str]:
    for raw, text in DOCSTRING.findall(source):
        if "\\" in text and not raw:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    text = ast.literal_eval(f'"""{text}"""')
            except (SyntaxError, ValueError):
                continue
        yield text


def _split(docstring: str) -> tuple[str, str]:
    summary, body = [*BLANK_LINE.split(docstring.strip(), maxsplit=1), ""][:2]
    body = body[:LONGEST_BODY_READ]
    if not body or len(summary) > LONGEST_SUMMARY:
        sentence, *rest = SENTENCE_END.split(summary, maxsplit=1)
        summary, body = sentence, "\n\n".join([*rest, body])
    return " ".join(summary.split()), " ".join(body.split())[:LONGEST_BODY]


def _is_worthwhile(summary: str, body: str) -> bool:
    return (
        len(summary) <= LONGEST_SUMMARY
        and len(summary.split()) >= SHORTEST_SUMMARY_WORDS
        and len(body.split()) >= SHORTEST_BODY_WORDS
        and re.search("[A-Za-z]{2}", summary) is not None
        and re.search("[A-Za-z]{2}", body) is not None
    )
