"""The docs: they build, what they tell a reader to do works, and no number in them is typed by hand."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from practicum.catalog import Catalog
from practicum.checks.results import ClaimResult, Result, Row, write_json

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"


def load(name):
    """Import one of the scripts of the docs."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gen_pages():
    return load("gen_pages")


def blocks(page):
    """Yield the fenced blocks of a page as (language, title, text)."""
    pattern = r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$"
    yield from re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# Add a method: followed to the letter --------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the package and the battery, but none of the methods and no field ``federated``."""
    rooms = {card.path.parent for card in Catalog()} | {REPOSITORY / "src/practicum/federated"}

    def outside_rooms(folder, names):
        return [name for name in names if Path(folder, name) in rooms or name == "__pycache__"]

    shutil.copytree(REPOSITORY / "src", tmp_path / "src", ignore=outside_rooms)
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/test_rooms.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def follow(command, checkout):
    """Run a command line of the docs in a checkout."""
    modules = {"practicum": "practicum.cli", "pytest": "pytest"}
    program, *arguments = command.split()
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["LOKY_MAX_CPU_COUNT"] = "1"  # so small a check needs no pool of processes
    quiet = ["-p", "no:cacheprovider"] if program == "pytest" else []
    whole = [sys.executable, "-m", modules[program], *arguments, *quiet]
    return subprocess.run(whole, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def test_add_a_method_works_as_it_is_written(checkout):
    followed = []
    for language, title, text in blocks(DOCS / "add-a-method.md"):
        if title == "pyproject.toml":
            heading = "[project.optional-dependencies]\n"
            before = (checkout / title).read_text()
            (checkout / title).write_text(before.replace(heading, heading + text))
        elif title:
            assert (checkout / title).is_file(), f"{title} was not written by `practicum new`"
            (checkout / title).write_text(text)
        elif language == "console":
            command, *promised = text.removeprefix("$ ").splitlines()
            done = follow(command, checkout)
            followed.append(command)
            said = done.stdout + done.stderr
            assert done.returncode == any(line.startswith("FAILED") for line in promised), f"{command}\n{said}"
            for line in promised:
                assert line in said, f"{command}: {line}\n{said}"
    assert followed == [
        "practicum new federated/trimmed_mean",
        "pytest tests/federated/test_trimmed_mean.py",
        "pytest tests/federated/test_trimmed_mean.py",
        "practicum check trimmed_mean --scale quick --seeds 5",
        "practicum check trimmed_mean --scale full --out results",
        "pytest tests/test_rooms.py -k trimmed_mean",
    ]
    files = [str(path) for path in checkout.rglob("*trimmed_mean/*.py")]
    lint = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", *files], cwd=checkout, check=False)
    shape = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", *files], cwd=checkout, check=False
    )
    assert (lint.returncode, shape.returncode) == (0, 0)


# The README ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def readme_table(gen_pages, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return load("readme_table")


def test_the_readme_is_up_to_date_with_the_results(readme_table, capsys):
    assert readme_table.main(["--check"]) == 0, capsys.readouterr().err


def test_the_readme_follows_the_results(readme_table, tmp_path):
    record(tmp_path, low=0.2)
    first = readme_table.verdicts([card_of("lmbc")], tmp_path)
    assert "**holds**" in first
    assert "0.300 (0.200 to 0.400)" in first
    record(tmp_path, low=0.1, verdict="inconclusive")
    second = readme_table.verdicts([card_of("lmbc")], tmp_path)
    assert "**inconclusive**" in second
    assert "0.300 (0.100 to 0.400)" in second
    page = f"above\n{readme_table.BEGIN}\nold\n{readme_table.END}\nbelow\n"
    assert readme_table.updated(page, first) == f"above\n{readme_table.BEGIN}\n\n{first}\n\n{readme_table.END}\nbelow\n"


def test_a_readme_without_markers_is_refused(readme_table):
    with pytest.raises(ValueError, match="once each"):
        readme_table.updated("no markers", "")


@pytest.mark.parametrize("number", [0, 1], ids=["lemur", "lmbc"])
def test_the_examples_of_the_readme_run(number, capsys):
    examples = [text for language, _, text in blocks(REPOSITORY / "README.md") if language == "python"]
    assert len(examples) == 2
    exec(compile(examples[number], "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 2


def test_the_examples_of_getting_started_run():
    for language, _, text in blocks(DOCS / "getting-started.md"):
        if language == "python":
            exec(compile(text, "getting-started.md", "exec"), {})


# The site ------------------------------------------------------------------------------------------------------------


def card_of(name):
    return Catalog()[name]


def record(folder, *, low, verdict="holds", method="lmbc", scale="full"):
    """Write a small result of a method."""
    claims = [
        ClaimResult(
            claim=claim.id,
            text=claim.text,
            metric="accuracy",
            arm="ours",
            against=["theirs"],
            rule="difference_above",
            margin=0.0,
            timed=False,
            verdict=verdict,
            effect=0.3,
            low=low,
            high=0.4,
            n=2,
        )
        for claim in card_of(method).claims
    ]
    rows = [
        Row(seed, arm, metrics={"accuracy": 0.9 - seed / 10}, resources={"seconds": 1.5, "peak_memory_bytes": 2**30})
        for seed in (0, 1)
        for arm in ("ours", "theirs")
    ]
    run = {"finished": "2026-11-30T10:00:00+00:00", "machine": {"cores": 2, "processor": "A | processor"}}
    request = {"model": None, "data": None, "device": "cpu", "options": {}}
    result = Result(method, "clustering", "A title", scale, request, [0, 1], ["ours", "theirs"], claims, rows, run=run)
    write_json(folder / f"{method}-{scale}.json", result.to_json())


def test_a_page_tells_what_was_recorded(gen_pages, tmp_path):
    record(tmp_path, low=0.2)
    record(tmp_path, low=-0.2, verdict="inconclusive", scale="quick")
    write_json(
        tmp_path / "benchmarks" / "lmbc.json", [{"work": "fit, 10,000 points", "ratio": 1.25, "against": "a | b"}]
    )
    page = gen_pages.method_page(card_of("lmbc"), tmp_path)
    full, quick = page.index("### At the full scale"), page.index("### At the quick scale")
    assert full < page.index("0.300 (0.200 to 0.400)") < quick < page.index("0.300 (−0.200 to 0.400)")
    assert "Recorded on 2026-11-30 with 2 seeds on 2 cores (A \\| processor)." in page
    assert "| accuracy | 0.850 ± 0.071 | 0.850 ± 0.071 |" in page
    assert "the difference is above 0" in page
    assert "| fit, 10,000 points | 1.25 | a \\| b |" in page
    assert "not recorded yet" not in page


def test_a_page_without_results_says_so(gen_pages, tmp_path):
    page = gen_pages.method_page(card_of("lmbc"), tmp_path / "nothing")
    assert page.count("not recorded yet") == len(card_of("lmbc").claims)
    assert "No result of this method is recorded yet." in page


def test_someone_elses_data_are_not_shown_as_ours(gen_pages, tmp_path):
    record(tmp_path, low=0.2)
    path = tmp_path / "lmbc-full.json"
    path.write_text(path.read_text().replace('"data": null', '"data": "mine.csv"'))
    assert gen_pages.recorded_results("lmbc", tmp_path) == []


@pytest.mark.parametrize("text", ["a | b", "a_b_c", "*a*", "`a`", "<b>", "[a](b)", "\\"])
def test_text_in_a_table_is_taken_literally(gen_pages, text):
    import markdown

    html = markdown.markdown(gen_pages.table(["x", "y"], [(gen_pages.cell(text), "z")]), extensions=["tables"])
    shown = re.findall(r"<td>(.*?)</td>", html)
    unescaped = shown[0].replace("&lt;", "<").replace("&gt;", ">").replace("&#124;", "|").replace("&amp;", "&")
    assert (len(shown), unescaped) == (2, text), html


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page(site):
    pages = {path.relative_to(site).parent.as_posix() for path in site.rglob("index.html")}
    methods = {f"methods/{card.name}" for card in Catalog()}
    assert methods | {".", "methods", "getting-started", "how-a-claim-is-checked", "add-a-method"} <= pages
    assert {"command-line", "harness"} <= pages
    assert not list(site.rglob("*.py"))


def test_the_site_fetches_nothing(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'>]+", text)
        fetched += re.findall(r"<link\b[^>]*rel=[\"']?(?:stylesheet|preconnect|preload)[^>]*(?:https?:)?//[^>]+", text)
        fetched += re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+", text)
        assert not fetched, (path, fetched[:3])


def test_pages_show_definitions_and_formulas(site):
    page = (site / "methods/lmbc/index.html").read_text(encoding="utf-8")
    assert 'id="practicum.clustering.lmbc.estimator.LMBC"' in page
    described = re.sub(r"<details class=\"mkdocstrings-source\">.*?</details>", "", page, flags=re.DOTALL)
    assert "<math" in described
    assert ":math:" not in described
    assert ".. math::" not in described


def test_the_command_line_page_has_every_command(site):
    page = (site / "command-line/index.html").read_text(encoding="utf-8")
    for command in ("list", "show", "check", "report", "run", "new"):
        assert f">practicum {command}<" in page
    for option in ("--scale", "--seeds", "--backend", "--strict", "--html"):
        assert f"<code>{option}</code>" in page


@pytest.fixture
def to_html():
    import markdown

    docstring_markup = load("docstring_markup")
    return lambda text: markdown.markdown(text, extensions=["fenced_code", docstring_markup.DocstringMarkup()])


def test_formulas_become_mathml(to_html):
    html = to_html("So :math:`n_k^2` is it:\n\n.. math:: a = b,\n    c = d.\n\nAnd then `code`.")
    assert html.count("<math") == 2
    assert html.count('display="block"') == 1
    assert "<mi>c</mi>" in html
    assert "And then <code>code</code>." in html


def test_references_lose_their_marks(to_html):
    assert to_html("As in [1]_.\n\n.. [1] A. Author, a title.") == "<p>As in [1].</p>\n<p>[1] A. Author, a title.</p>"


def test_code_is_left_as_it_is(to_html):
    html = to_html("```\n.. math:: x\n[1]_\n```")
    assert ".. math:: x" in html
    assert "[1]_" in html
