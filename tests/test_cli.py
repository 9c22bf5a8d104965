import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from practicum.cli import main


@pytest.fixture
def cli(toys, tmp_path, monkeypatch, capsys):
    """Run the command line over the toys; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(arguments, toys)
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def test_list_shows_every_method_with_its_last_verdicts(cli):
    _, before, _ = cli("list")
    assert "coin" in before
    assert "race" in before
    assert "not checked yet" in before
    cli("check", "coin", "--jobs", "1")
    code, after, _ = cli("list", "--field", "clustering")
    assert code == 0
    assert "3 hold (quick, 20" in after
    assert "race" not in after


def test_list_for_machines(cli):
    cli("check", "coin", "--jobs", "1")
    _, out, _ = cli("list", "--json")
    coin = next(row for row in json.loads(out) if row["method"] == "coin")
    assert coin["last"]["verdicts"] == {"fairer": "holds", "same": "holds", "half": "holds"}
    assert [claim["id"] for claim in coin["claims"]] == ["fairer", "same", "half"]


def test_show_tells_the_card_and_what_to_install(cli):
    code, out, _ = cli("show", "coin")
    assert code == 0
    for told in ("COIN: Counting heads", "fairer:", "pip install 'practicum[clustering]'", "--pause", "It is a toy."):
        assert told in out
    assert json.loads(cli("show", "coin", "--json")[1])["field"] == "clustering"


def test_check_prints_a_line_per_claim_and_writes_the_result(cli, tmp_path):
    code, out, _ = cli("check", "coin", "--jobs", "1", "--seeds", "2", "--out", "there")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["coin", c] for c in ("fairer", "same", "half")]
    assert (tmp_path / "there" / "coin-quick.json").exists()


def test_check_for_machines_prints_json_alone(cli):
    _, out, _ = cli("check", "coin", "race", "--jobs", "1", "--json")
    assert [result["method"] for result in json.loads(out)] == ["coin", "race"]


def test_all_methods_and_a_failed_arm_is_exit_code_1(cli):
    code, out, _ = cli("check", "--all", "--jobs", "1")
    assert code == 1
    assert "broken: the arm raises failed: ZeroDivisionError: nothing to divide by" in out
    assert "race" in out
    assert "coin" in out


def test_options_of_a_method_reach_it(cli, tmp_path):
    (tmp_path / "sample.txt").write_text("0.1 0.2 0.35 0.9")
    code, out, _ = cli(
        "check", "coin", "--pause=0.001", "--sides", "2", "--data", "sample.txt", "--jobs", "1", "--json"
    )
    assert code == 0
    assert json.loads(out)[0]["request"] == {
        "model": None,
        "data": "sample.txt",
        "device": "cpu",
        "options": {"pause": "0.001", "sides": "2"},
    }


def test_strict_fails_on_a_claim_that_does_not_hold(cli, tmp_path):
    (tmp_path / "sample.txt").write_text("0.9 0.9 0.9 0.2")
    arguments = ("check", "coin", "--data", "sample.txt", "--jobs", "1")
    assert cli(*arguments)[0] == 0
    assert cli(*arguments, "--strict")[0] == 1


def test_the_report_command_prints_and_writes(cli, tmp_path):
    cli("check", "coin", "--jobs", "1")
    code, out, err = cli("report", "--html", "page.html")
    assert code == 0
    assert "fairer" in out
    assert "wrote page.html" in err
    assert "COIN" in (tmp_path / "page.html").read_text()


def test_a_program_gets_its_own_arguments(cli):
    assert cli("run", "race", "bob", "--times", "2") == (0, "on your marks, bob\n" * 2, "")
    assert "Greet." in cli("run", "race", "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("check", "coim"), 2, "there is no method 'coim'; did you mean coin?"),
        (("show", "nothing-like-it"), 2, "there is no method 'nothing-like-it'; `practicum list` shows them all."),
        (("check",), 2, "METHOD...: name a method, or give --all"),
        (("check", "coin", "--all"), 2, "--all: give methods or --all, not both"),
        (("check", "coin", "--scale", "huge"), 2, "--scale 'huge' is none of quick, full, paper"),
        (("check", "coin", "--seeds", "0"), 2, "--seeds must be at least 1; got 0"),
        (("check", "coin", "--seeds", "two"), 2, "--seeds"),
        (("check", "coin", "--colour", "red"), 2, "--colour: no such option"),
        (("check", "coin", "--pause"), 2, "--pause: needs a value"),
        (("check", "coin", "--pause", "x"), 1, "--pause must be a number; got 'x'"),
        (("check", "coin", "--device", "cuda:9"), 1, "--device cuda:9 is not available here"),
        (("check", "coin", "--backend", "ray"), 2, "--backend ray needs --address"),
        (("list", "--field", "cooking"), 2, "--field: 'cooking' is none of language, serving"),
        (("run", "coin"), 2, "METHOD: coin is not a program; programs are: race"),
        (("report",), 1, "--out practicum-results: no results there"),
        (("new", "nothing"), 2, "FIELD/METHOD: 'nothing' is not FIELD/METHOD"),
        (("lst",), 2, "No such command 'lst'"),
    ],
)
def test_bad_usage_is_one_line_and_an_exit_code(cli, arguments, code, message):
    found, out, err = cli(*arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert err.startswith("practicum: ")
    assert err.count("\n") == 1


def test_a_corrupt_result_is_one_line(cli, tmp_path):
    (tmp_path / "practicum-results").mkdir()
    (tmp_path / "practicum-results" / "coin-quick.json").write_text("{")
    code, _, err = cli("check", "coin", "--jobs", "1")
    assert (code, err.count("\n")) == (1, 1)
    assert "coin-quick.json: not a result file: line 1" in err


def test_debug_shows_the_traceback(toys):
    with pytest.raises(LookupError, match="there is no method"):
        main(["show", "coim", "--debug"], toys)


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("command", [["list"], ["show", "lemur"], ["show", "lmbc"]])
def test_looking_around_imports_no_framework(command):
    code = (
        "import sys\nfrom practicum.cli import main\n"
        f"try: main({command!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'faiss', 'transformers', 'plotly', 'joblib'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    found = python("-c", code)
    assert found.returncode == 0, found.stderr
    assert "lemur" in found.stdout or "LMBC" in found.stdout.upper()


def test_a_missing_extra_is_told_in_one_line(tmp_path):
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'sklearn':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(hide)}
    found = python("-m", "practicum.cli", "check", "lmbc", cwd=tmp_path, env=environment)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1
    assert "needs sklearn: pip install 'practicum[clustering" in found.stderr


def test_the_shell_completes_methods():
    environment = {
        **os.environ,
        "_PRACTICUM_COMPLETE": "complete_bash",
        "COMP_WORDS": "practicum check lem",
        "COMP_CWORD": "2",
    }
    program = Path(sys.executable).parent / "practicum"
    found = subprocess.run([program], capture_output=True, text=True, timeout=60, env=environment)
    assert found.stdout.split() == ["lemur"]
