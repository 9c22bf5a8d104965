"""`practicum new`: a room that imports, whose tests say what is to be written, or nothing at all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from practicum.catalog import FIELDS, Catalog
from practicum.cli import main
from practicum.scaffold import LONGEST_NAME, ScaffoldError, new_room

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the package but none of its methods."""
    rooms = {card.path.parent for card in Catalog()}

    def outside_rooms(folder, names):
        return [name for name in names if Path(folder, name) in rooms or name == "__pycache__"]

    shutil.copytree(REPOSITORY / "src", tmp_path / "src", ignore=outside_rooms)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def run(checkout, *arguments):
    """Run Python on the checkout's own package."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)


def tree(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_room_imports_and_its_card_reads(checkout):
    written = new_room("federated", "trimmed_mean", checkout)
    assert all(path.is_file() for path in written)
    catalog = Catalog(checkout / "src" / "practicum")
    assert catalog["trimmed_mean"].field == "federated"
    script = (
        "from practicum.catalog import Catalog\n"
        "from practicum.federated import TrimmedMean\n"
        "check = Catalog().load_check(Catalog()['trimmed_mean'])\n"
        "print(TrimmedMean.__module__, type(check).__name__, *check.arms())\n"
    )
    done = run(checkout, "-c", script)
    assert done.stdout.split() == [
        "practicum.federated.trimmed_mean.trimmed_mean",
        "TrimmedMeanCheck",
        "trimmed_mean",
        "baseline",
    ], done.stderr


def test_every_test_of_the_room_fails_and_says_what_to_write(checkout):
    new_room("clustering", "trimmed_mean", checkout)
    done = run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/clustering/test_trimmed_mean.py")
    assert done.returncode == 1, done.stdout + done.stderr
    failures = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, flags=re.MULTILINE))
    room = "src/practicum/clustering/trimmed_mean"
    expected = {
        "test_the_card_is_written": f"{room}/card.toml: write title, paper, summary",
        "test_a_case_with_a_known_answer": "write here a small input whose output you know",
        "test_bad_input_is_refused": "write here what TrimmedMean refuses",
        "test_the_field_exports_it": 'add "trimmed_mean": ["TrimmedMean"] to src/practicum/clustering/__init__.py',
        "test_every_claim_gets_a_verdict": f"{room}/check.py: lower-error: ",
    }
    assert failures == expected.keys(), done.stdout
    for test, message in expected.items():
        assert message in done.stdout, (test, done.stdout)
    assert "write TrimmedMean.__call__" in done.stdout


def test_a_new_field_gets_its_public_face(checkout):
    shutil.rmtree(checkout / "src/practicum/federated", ignore_errors=True)
    written = new_room("federated", "trimmed_mean", checkout)
    assert checkout / "src/practicum/federated/__init__.py" in written
    assert run(checkout, "-c", "from practicum import federated; print(*federated.__all__)").stdout == "TrimmedMean\n"


def test_an_existing_field_is_left_as_it_is(checkout):
    face = checkout / "src/practicum/clustering/__init__.py"
    before = face.read_bytes()
    assert face not in new_room("clustering", "trimmed_mean", checkout)
    assert face.read_bytes() == before


@pytest.mark.parametrize("name", ["ab", "a_method_of_24_characters"[:LONGEST_NAME]])
@pytest.mark.parametrize("field", ["agents", "multimodal", "causal", "vision"])
def test_what_is_written_passes_the_linter(checkout, field, name):
    written = [path for path in new_room(field, name, checkout) if path.suffix == ".py"]
    for command in (["check"], ["format", "--check", "--diff"]):
        done = run(checkout, "-m", "ruff", *command, "--no-cache", *map(str, written))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("field", "name", "message"),
    [
        ("clustring", "new", "there is no field 'clustring': did you mean clustering? The fields are agents, biology"),
        ("", "new", "there is no field '': the fields are agents"),
        ("../federated", "new", "there is no field '../federated'"),
        ("federated", "trimmed-mean", "such as 'trimmed_mean'; got 'trimmed-mean'"),
        ("federated", "TrimmedMean", "name must be lower-case letters"),
        ("federated", "1st", "name must be lower-case letters, digits and single underscores; got '1st'"),
        ("federated", "_hidden", "such as 'hidden'"),
        ("federated", "", "got ''"),
        ("federated", "../../away", "such as 'away'"),
        ("federated", "a\n", "got 'a\\n'"),
        ("federated", "lambda", "name must not be a Python keyword; got 'lambda'"),
        ("federated", "x" * (LONGEST_NAME + 1), f"at most {LONGEST_NAME} characters; got {LONGEST_NAME + 1}"),
    ],
)
def test_bad_names_are_refused_and_nothing_is_written(tmp_path, field, name, message):
    (tmp_path / "src/practicum").mkdir(parents=True)
    before = tree(tmp_path)
    with pytest.raises(ScaffoldError) as refusal:
        new_room(field, name, tmp_path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert tree(tmp_path) == before


def test_a_root_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ScaffoldError, match=re.escape(f"a folder with src/practicum in it; got {tmp_path}")):
        new_room("federated", "trimmed_mean", tmp_path)
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    "there",
    ["src/practicum/federated/other/check.py", "src/practicum/federated/other.py", "tests/federated/test_other.py"],
)
def test_nothing_is_written_over(tmp_path, there):
    (tmp_path / "src/practicum").mkdir(parents=True)
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(ScaffoldError, match=r"the name .other. is taken: .* is there already"):
        new_room("federated", "other", tmp_path)
    assert tree(tmp_path) == before
    assert (tmp_path / there).read_text() == "mine"


def test_a_name_taken_in_another_field_is_refused(checkout):
    new_room("federated", "other", checkout)
    with pytest.raises(ScaffoldError, match=r"src/practicum/federated/other/card\.toml is there already"):
        new_room("causal", "other", checkout)


def test_a_file_that_cannot_be_written_takes_the_others_back(tmp_path):
    (tmp_path / "src/practicum").mkdir(parents=True)
    (tmp_path / "tests").write_text("a file where the folder of tests should be")
    before = tree(tmp_path)
    with pytest.raises(ScaffoldError, match=r"cannot write .*tests"):
        new_room("federated", "trimmed_mean", tmp_path)
    assert tree(tmp_path) == before


def test_all_fields_are_offered():
    with pytest.raises(ScaffoldError) as refusal:
        new_room("astrology", "other", REPOSITORY)
    assert all(field in str(refusal.value) for field in FIELDS)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["federated/trimmed-mean"], 2, "such as 'trimmed_mean'"),
        (["clustring/new"], 2, "did you mean clustering?"),
        (["trimmed_mean"], 2, "FIELD/METHOD"),
        (["federated/new", "--root", "nowhere"], 2, "a folder with src/practicum in it; got nowhere"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(tmp_path, monkeypatch, capsys, arguments, code, message):
    (tmp_path / "src/practicum").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["new", *arguments])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (code, 1), said
    assert message in said


def test_the_command_writes_the_room_and_lists_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "src/practicum").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["new", "federated/trimmed_mean"])
    assert not ended.value.code
    written = capsys.readouterr().out.split()
    assert len(written) == 6
    assert all((tmp_path / path).is_file() for path in written)
