"""The check of verbalized confidence, its program and its example, on a tiny model and a user's own questions."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from practicum.catalog import Catalog
from practicum.checks import Request, run_check
from practicum.cli import main
from practicum.language.confidence import families, read_labels
from practicum.language.confidence.check import NEEDS_FULL, ConfidenceCheck, Work, _entropy
from practicum.language.confidence.tiny import tiny_model
from practicum.toolbox.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "confidence.py"
IN_QUICK = {
    "better-within-reasoning",
    "better-within-copy",
    "calibrated-within-reasoning",
    "calibrated-within-copy",
    "copy-fails-on-reasoning",
    "reasoning-fails-on-copy",
    "keeps-accuracy-scalar-reasoning",
    "keeps-accuracy-scalar-copy",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model."""
    path = tmp_path_factory.mktemp("tiny")
    model, tokenizer = tiny_model("llama", 5, scale=0.3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Questions of both families in one file."""
    path = tmp_path_factory.mktemp("questions") / "mine.jsonl"
    write(path, families("reasoning", 18, random_state=5) + families("copy", 18, n_records=[2, 3], random_state=5))
    return path


def write(path, items):
    rows = [{key: value for key, value in vars(item).items() if value is not None} for item in items]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    def check(data, scale="quick", seeds=1):
        card = Catalog()["confidence"]
        return run_check(
            card,
            Catalog().load_check(card),
            scale=scale,
            seeds=seeds,
            jobs=1,
            model=str(folder),
            data=str(data),
            out=tmp_path_factory.mktemp("out"),
        )

    return check


@pytest.fixture(scope="module")
def in_full(run, questions):
    return run(questions, scale="full", seeds=2)


def test_every_claim_gets_a_verdict_on_ones_own_questions(in_full):
    assert {claim.verdict for claim in in_full.claims} <= {"holds", "does not hold", "inconclusive"}
    assert not [row for row in in_full.rows if row.status != "ok"]


def test_arms_are_trained_on_as_many_questions(in_full):
    trained = [
        {row.metrics["questions trained on"] for row in in_full.rows if row.arm == arm}
        for arm in in_full.arms
        if arm.startswith(("scalar", "decomposed", "shuffled"))
    ]
    assert len(trained) == 7
    assert len(set.union(*trained)) == 1


def test_the_table_has_what_needs_no_training(in_full):
    means = in_full.means()
    for arm in ("constant", "softmax", "temperature-scaling", "self-consistency", "p-true", "untrained"):
        assert 0 <= means[arm]["brier (both)"] <= 1
        assert means[arm]["brier (both)"] == pytest.approx(
            (means[arm]["brier (reasoning)"] + means[arm]["brier (copy)"]) / 2
        )
    remarks = " ".join(in_full.remarks)
    assert "Brier score of decomposed-both (interval" in remarks
    assert "lowest Brier score" in remarks


def test_a_trained_confidence_that_loses_to_the_mean_is_said_to_lose():
    means = {"scalar-both": {"brier (both)": 0.3}, "constant": {"brier (both)": 0.2}}
    assert "scalar-both loses to always saying the mean of the training labels (0.300 against 0.200)." in set(
        ConfidenceCheck().remarks(means)
    )


def test_quick_says_what_needs_full(run, questions):
    result = run(questions)
    for claim in result.claims:
        if claim.claim in IN_QUICK:
            assert claim.verdict != "could not measure", claim
        else:
            assert claim.verdict == "could not measure"
            assert NEEDS_FULL in claim.reason


def test_the_same_seed_gives_the_same_numbers(in_full, run, questions):
    again = run(questions, scale="full", seeds=1)
    first, second = ([row.metrics for row in in_full.rows if row.seed == seed] for seed in (0, 1))
    assert [row.metrics for row in again.rows] == first
    assert first != second


def test_questions_of_one_family_leave_the_other_unmeasured(run, tmp_path):
    write(tmp_path / "sums.jsonl", families("reasoning", 12))
    result = run(tmp_path / "sums.jsonl", scale="full")
    verdicts = {claim.claim: claim for claim in result.claims}
    assert verdicts["better-within-reasoning"].verdict != "could not measure"
    assert verdicts["better-within-copy"].reason.count("no questions of the family copy")
    assert not [row for row in result.rows if row.status == "failed"]


def test_contexts_without_evidence_leave_two_numbers_unmeasured(run, tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [
        {
            "question": f"Who is number {n}?",
            "answer": "Ann",
            "context": f"Ann is number {n}.",
            "choices": ["Ann", "Bob"],
        }
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run(path, scale="full")
    reasons = {row.arm: set(row.missing.values()) for row in result.rows}
    assert "two numbers need the evidence of every context" in reasons["decomposed-copy"]
    assert not [row for row in result.rows if row.status == "failed"]


def test_open_answers_are_checked_too(run, tmp_path):
    path = tmp_path / "open.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in range(12)))
    result = run(path)
    assert not [row for row in result.rows if row.status == "failed"]
    assert "needs questions with choices" in {r for row in result.rows for r in row.missing.values()}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ['{"question": "a", "answer": "b", "family": "poetry"}'],
            "field 'family': must be reasoning or copy; got 'poetry'",
        ),
        (['{"question": "a", "answer": "b"}'] * 5, "must have at least 12 questions of the family 'reasoning'; has 5"),
        (['{"question": "a"}'], "line 1: field 'answer'"),
        (
            ['{"question": "a", "answer": "b", "context": "c", "evidence": "d"}'],
            "line 1: field 'evidence': evidence 'd' is not in the context of 'a'",
        ),
    ],
)
def test_bad_questions_are_refused(tmp_path, lines, message):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError) as refused:
        ConfidenceCheck().prepare(Request(data=str(path)))
    assert message in str(refused.value)


def test_a_bad_option_is_refused():
    with pytest.raises(InputError, match="--relabel maybe: must be yes or no"):
        ConfidenceCheck().prepare(Request(options={"relabel": "maybe"}))


def test_another_model_is_labelled_anew(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path))
    monkeypatch.setattr("practicum.language.confidence.pool.N_POOL", 60)
    monkeypatch.setattr("practicum.language.confidence.pool.N_HELD_OUT", 8)
    work = ConfidenceCheck().prepare(Request(model=str(folder)))
    assert isinstance(work, Work)
    assert {name: len(of) for name, of in work.train.items()} == dict.fromkeys(("reasoning", "copy"), work.n_train)
    assert max(one.item.context.count(" code ") for one in work.train["copy"]) <= 3
    assert len(list((tmp_path / "confidence").glob("labels-*.json"))) == 1
    again = ConfidenceCheck().prepare(Request(model=str(folder)))
    assert again.train == work.train
    tested = [one.item for one in work.test["copy"]]
    assert not any(one.item in tested for one in work.train["copy"])


def test_the_entropy_of_labels():
    assert _entropy([3, 3, 3]) == 0
    assert _entropy([1, 2, 3, 4]) == pytest.approx(np.log(4))


# The program and the example ------------------------------------------------------------------------------------------


def test_the_program_labels_and_draws(folder, questions, tmp_path, capsys):
    labels, page = tmp_path / "labels.jsonl", tmp_path / "page.html"
    told = practicum(capsys, "label", str(questions), "--model", str(folder), "--out", str(labels))
    assert "36 questions" in told
    assert len(read_labels(labels)) == 36
    sizes = ["--train", "8", "--test", "6", "--blocks", "1", "--epochs", "1", "--seeds", "2"]
    told = practicum(capsys, "matrix", str(labels), "--model", str(folder), "--out", str(page), *sizes)
    assert "decomposed trained on mixture, tested on copy, all seeds: Brier" in told
    assert page.read_text().count("class='diagram'") == 14


def practicum(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["run", "confidence", *arguments])
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    return told.out


def test_the_program_refuses_in_one_line(folder, tmp_path, capsys):
    for arguments, message in (
        (["label", str(tmp_path / "none.jsonl")], "none.jsonl: cannot be read"),
        (["matrix", "--mode", "triple"], "--mode triple: must be scalar, decomposed or both"),
        (["matrix", "--model", str(folder)], "--model needs labelled questions of that model"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["run", "confidence", *arguments])
        assert ended.value.code == 1
        assert message in capsys.readouterr().err


def test_the_example_runs(folder):
    done = subprocess.run([sys.executable, str(EXAMPLE), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "trained: Brier" in done.stdout
