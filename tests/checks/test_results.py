import json
import os
import resource

import pytest

from practicum.checks.results import SCHEMA, ClaimResult, Result, ResultError, Row, read_result, write_json


@pytest.fixture
def result():
    claim = ClaimResult("c", "C.", "m", "a", ["b"], "within", 0.1, False, "holds", 0.0, -0.1, 0.1, 2, "t")
    rows = [Row(seed, arm, metrics={"m": 1.0 + seed}) for seed in (0, 1) for arm in "ab"]
    return Result("toy", "clustering", "TOY", "quick", {"model": None}, [0, 1], ["a", "b"], [claim], rows)


def test_a_result_survives_the_disk(result, tmp_path):
    write_json(tmp_path / "r.json", result.to_json())
    assert read_result(tmp_path / "r.json") == result


def test_means_are_over_the_seeds_that_measured(result):
    result.rows.append(Row(2, "a", metrics={}, missing={"m": "no"}))
    assert result.means() == {"a": {"m": 1.5}, "b": {"m": 1.5}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1"),
        ("[]", "no schema number"),
        ('{"schema": 1}', "not a result file: 'claims'"),
        (json.dumps({"schema": SCHEMA + 1}), f"schema {SCHEMA + 1}, this version reads up to {SCHEMA}"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_result_is_named(content, message, tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ResultError, match=message) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot write .*file/r.json"):
        write_json(tmp_path / "file" / "r.json", {})


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "r.json"
    write_json(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ResultError, match="cannot write"):
            write_json(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == "old"
    assert os.listdir(tmp_path) == ["r.json"]
