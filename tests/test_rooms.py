"""What every method meets: one battery over all rooms."""

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from practicum.catalog import Catalog
from practicum.checks.check import Request, as_metrics
from practicum.checks.measure import limit_threads
from practicum.checks.results import read_results
from practicum.checks.runner import run_check
from practicum.checks.verdict import VERDICTS
from practicum.cli import main

REPOSITORY = Path(__file__).resolve().parents[1]
CARDS = list(Catalog())
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module", params=CARDS, ids=[card.name for card in CARDS])
def card(request):
    return request.param


@pytest.fixture(scope="module")
def check(card):
    return Catalog().load_check(card)


@pytest.fixture(scope="module")
def room(card):
    return importlib.import_module(card.module)


@pytest.fixture(scope="module")
def first_run(card, check, tmp_path_factory):
    """The check at quick scale with one seed, shared by the tests that look at it."""
    return run_check(card, check, scale="quick", seeds=1, out=tmp_path_factory.mktemp(card.name))


def python(script, *arguments):
    """Run a script in a fresh interpreter on this package."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


# The card -------------------------------------------------------------------------------------------------------------


def test_there_are_rooms():
    assert CARDS


def test_the_card_is_complete(card):
    texts = [card.title, card.paper, card.summary, card.data_format, card.model_format, *card.limits, *card.hosts]
    texts += [claim.text for claim in card.claims] + [option.help for option in card.options]
    assert all(text.strip() for text in texts), card
    assert not any(text.startswith("Write ") for text in texts), "the card still has the words of the scaffold"
    assert card.hosts
    assert card.limits
    assert re.match(r"arXiv:\d{4}\.\d{5}$|https://|ICML 2026\b", card.paper), card.paper
    assert not card.code or card.code.startswith("https://"), card.code
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.id) for claim in card.claims)
    assert {card.extra, *card.check_needs} <= EXTRAS.keys()


def test_every_claim_is_a_comparison(card, check):
    assert [comparison.claim for comparison in check.comparisons] == [claim.id for claim in card.claims]


# The public names -----------------------------------------------------------------------------------------------------


def test_public_names_are_exported(card, room):
    assert room.__all__ == sorted(set(room.__all__), key=room.__all__.index), "a name stands twice in __all__"
    field = importlib.import_module(f"practicum.{card.field}")
    offered = [name for name in room.__all__ if name in field.__all__]
    assert offered, f"practicum.{card.field} offers nothing of {card.name}"
    assert all(getattr(field, name) is getattr(room, name) for name in offered)


def public_objects(room):
    """Every class and function of ``__all__``, and of each class its own public methods."""
    for name in room.__all__:
        member = getattr(room, name)
        if inspect.isclass(member):
            yield name, member
            for attribute, method in vars(member).items():
                function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
                if inspect.isfunction(function) and (not attribute.startswith("_") or attribute == "__call__"):
                    yield f"{name}.{attribute}", function
        elif inspect.isfunction(member):
            yield name, member


def parameters(member):
    names = list(inspect.signature(member).parameters)
    return [name for name in names if name not in ("self", "cls")]


def test_public_names_are_documented(room):
    for name, member in public_objects(room):
        text = inspect.getdoc(member) or ""
        assert text, f"{name} has no docstring"
        wanted = parameters(member)
        if wanted:
            section = re.search(
                r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL
            )
            assert section, f"{name} has no Parameters section"
            for parameter in wanted:
                named = re.search(rf"^[*\w, ]*\b{parameter}\b[\w*, ]*(:|$)", section.group(1), re.MULTILINE)
                assert named, f"{name} does not describe {parameter}"
        returned = inspect.signature(member).return_annotation
        if inspect.isfunction(member) and returned not in (None, "None", inspect.Signature.empty):
            assert re.search(r"^(Returns|Yields)\n-+\n", text, re.MULTILINE), f"{name} has no Returns section"


def test_public_names_say_their_shapes(room):
    for name in room.__all__:
        member = getattr(room, name)
        if callable(member):
            texts = [inspect.getdoc(part) or "" for label, part in public_objects(room) if label.split(".")[0] == name]
            assert re.search(r"\bshape\b|\((n|m|N|Q|T)\w*,", "\n".join(texts)), f"{name} says no shape"


def test_public_names_have_an_example(room):
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in room.__all__:
        member = getattr(room, name)
        if callable(member):
            assert any(found.examples for found in finder.find(member, name)), f"{name} has no example"


@pytest.mark.parametrize("part", ["the room", "the field"])
def test_without_its_extra_it_says_what_to_install(card, part):
    module = card.module if part == "the room" else f"practicum.{card.field}"
    room_names = sorted(importlib.import_module(card.module).__all__)
    names = [name for name in room_names if part == "the room" or name in importlib.import_module(module).__all__]
    done = python(WITHOUT_EXTRA, module, json.dumps(names), json.dumps(sorted(modules_of(card.extra))))
    assert done.returncode == 0, done.stderr
    blocked, message = json.loads(done.stdout)
    if blocked:
        expected = rf"{card.name} needs {blocked[0]}: pip install 'practicum\[{card.extra}\]'"
        assert re.fullmatch(expected, message), message
    else:
        assert message == "", message


def modules_of(extra):
    """Top-level modules of the distributions that an extra brings beside the base install."""
    providers = packages_distributions()
    modules = set()
    for requirement in EXTRAS[extra]:
        name = re.match(r"[\w.-]+", requirement).group()
        modules |= {module for module, owners in providers.items() if canonical(name) in map(canonical, owners)}
        modules.add(name.replace("-", "_").lower())
    return modules - {"numpy", "scipy"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


WITHOUT_EXTRA = """
import importlib, json, sys

module, names, forbidden = sys.argv[1], json.loads(sys.argv[2]), set(json.loads(sys.argv[3]))
blocked = []


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            blocked.append(name.partition(".")[0])
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
message = ""
try:
    for name in names:
        getattr(importlib.import_module(module), name)
except Exception as error:
    message = str(error)
    assert type(error).__name__ == "MissingExtra", repr(error)
print(json.dumps([blocked, message]))
"""


# The check ------------------------------------------------------------------------------------------------------------


def test_every_claim_gets_a_verdict(first_run, card):
    assert [claim.claim for claim in first_run.claims] == [claim.id for claim in card.claims]
    for claim in first_run.claims:
        assert claim.verdict in VERDICTS
        # What takes arms that are too slow for the quick scale says so.
        told = claim.verdict != "could not measure" or "needs --scale full" in claim.reason
        assert told, f"{claim.claim}: {claim.reason}"
    assert any(claim.verdict != "could not measure" for claim in first_run.claims)
    failed = {row.arm: row.error["traceback"] for row in first_run.rows if row.status == "failed"}
    assert not failed


def test_the_same_seed_gives_the_same_numbers(first_run, check):
    """The arms once more, outside the harness and without the stopwatch."""
    with limit_threads(check.threads):
        work = check.prepare(Request(scale="quick", seed=0))
    # An engine in a process of its own times itself: its times are no more repeatable than the stopwatch's.
    times = {metric for row in first_run.rows for metric in row.timings}
    compared = 0
    for row in first_run.rows:
        if row.status == "ok":
            with limit_threads(check.threads if row.arm in check.timed_arms() else 1):
                again = as_metrics(check.arms()[row.arm](work)).values
            repeatable = {name: value for name, value in again.items() if name not in times}
            assert {name: row.metrics[name] for name in repeatable} == repeatable, row.arm
            compared += len(repeatable)
    assert compared


MALFORMED = {
    ".csv": ("size,weight\n1,2\n3,heavy\n", r"line 3\b.*'weight'.*'heavy'"),
    ".jsonl": ('{"no_such_field": 1}\n', r"line 1\b.*'\w+'"),
    ".npy": ("not an array", r""),
    ".npz": ("not an archive", r""),
    ".parquet": ("not a table", r""),
}


def suffixes(card):
    """The kinds of data file that the card says it takes."""
    return [suffix for suffix in MALFORMED if re.search(rf"{re.escape(suffix)}\b", card.data_format)]


@pytest.mark.parametrize(
    ("given", "suffix"),
    [pytest.param(card, suffix, id=f"{card.name}{suffix}") for card in CARDS for suffix in suffixes(card)],
)
def test_bad_data_are_refused_by_line_and_field(given, suffix, tmp_path, capsys):
    content, expected = MALFORMED[suffix]
    path = tmp_path / f"mine{suffix}"
    path.write_text(content)
    message = refusal(given, path, tmp_path, capsys)
    assert path.name in message
    assert re.search(expected, message), message


def test_data_that_are_not_there_are_refused(card, tmp_path, capsys):
    for suffix in suffixes(card) or [""]:
        path = tmp_path / f"nowhere{suffix}"
        assert str(path) in refusal(card, path, tmp_path, capsys)


def refusal(card, path, out, capsys):
    """The one line that the command line says of this data file."""
    with pytest.raises(SystemExit) as ended:
        main(["check", card.name, "--seeds", "1", "--data", str(path), "--out", str(out)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 1
    assert len(lines) == 1, lines
    return lines[0]


# Without the frameworks -----------------------------------------------------------------------------------------------

LIGHT = """
import sys
import practicum
if len(sys.argv) > 1:
    from practicum.cli import main
    try:
        main(sys.argv[1:])
    except SystemExit as ended:
        assert not ended.code, ended.code
heavy = {"torch", "sklearn", "transformers", "faiss", "scipy", "numpy"} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.mark.parametrize("command", [[], ["list"], ["list", "--json"]], ids=["import", "list", "list --json"])
def test_the_catalog_needs_no_framework(command):
    done = python(LIGHT, *command)
    assert done.returncode == 0, done.stderr


def test_showing_it_needs_no_framework(card):
    done = python(LIGHT, "show", card.name)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert card.install in shown
    assert all(" ".join(claim.text.split()) in shown for claim in card.claims)


# Docs and results -----------------------------------------------------------------------------------------------------


def test_it_has_a_page(card, room):
    spec = importlib.util.spec_from_file_location("gen_pages", REPOSITORY / "docs" / "gen_pages.py")
    gen_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_pages)
    page = gen_pages.method_page(card)
    assert page.startswith(f"# {card.title}\n")
    assert all(gen_pages.cell(claim.text) in page for claim in card.claims)
    assert all(limit in page for limit in card.limits)
    assert all(re.search(rf"^::: practicum\.[\w.]+\.{name}$", page, re.MULTILINE) for name in room.__all__)


def test_its_results_are_recorded(card):
    recorded = [
        result
        for result in read_results(REPOSITORY / "results")
        if (result.method, result.scale) == (card.name, "full")
        and not any(result.request.get(k) for k in ("model", "data"))
    ]
    assert len(recorded) == 1, f"record it: practicum check {card.name} --scale full --out results"
    stated = [(claim.id, claim.text) for claim in card.claims]
    assert [(claim.claim, claim.text) for claim in recorded[0].claims] == stated, (
        "the card has changed: record it again"
    )
