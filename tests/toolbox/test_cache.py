import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from practicum.toolbox import cache
from practicum.toolbox.cache import CacheError, build_once, cache_folder, cache_key, load_or_build
from practicum.toolbox.errors import InputError

SLOW_BUILDER = """
import sys, time
from pathlib import Path
from practicum.toolbox.cache import build_once

def build(path):
    path.mkdir()
    (path / "first").write_text("first")
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (path / "second").write_text("second")
    with open(sys.argv[3], "a") as log:
        log.write("built\\n")

built = build_once(Path(sys.argv[1]), build)
assert {entry.name for entry in built.iterdir()} == {"first", "second"}
"""


def start_builder(target: Path, seconds: float, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", SLOW_BUILDER, str(target), str(seconds), str(log)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def write(text: str):
    def build(path: Path) -> None:
        path.write_text(text)

    return build


def must_not_build(path: Path) -> None:
    raise AssertionError("built although it was there")


def test_the_folder_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b"
    assert cache_folder().is_dir()
    monkeypatch.setenv("PRACTICUM_CACHE", "~/kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kept"
    monkeypatch.delenv("PRACTICUM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder().is_dir()


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"cannot write to the cache folder .*; set PRACTICUM_CACHE") as caught:
        cache_folder()
    assert "\n" not in str(caught.value)


def test_what_is_there_is_not_built_again(tmp_path: Path):
    target = tmp_path / "deep" / "note.txt"
    assert build_once(target, write("one")).read_text() == "one"
    assert build_once(target, must_not_build).read_text() == "one"
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_build_that_raises_leaves_nothing(tmp_path: Path):
    def build(path: Path) -> None:
        path.mkdir()
        (path / "part").write_text("part")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        build_once(tmp_path / "target", build)
    assert not (tmp_path / "target").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    assert build_once(tmp_path / "target", write("whole")).read_text() == "whole"


def test_of_two_processes_one_builds(tmp_path: Path):
    log = tmp_path / "log"
    both = [start_builder(tmp_path / "target", 0.5, log) for _ in range(2)]
    assert [process.wait(timeout=30) for process in both] == [0, 0]
    for process in both:
        process.stdout.close()
    assert log.read_text() == "built\n"


def test_without_locks_both_build_and_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)

    def build(path: Path) -> None:
        path.mkdir()
        (path / "note").write_text("slower")
        other = tmp_path / "target"
        if not other.exists():
            other.mkdir()
            (other / "note").write_text("faster")

    assert (build_once(tmp_path / "target", build) / "note").read_text() == "faster"
    assert not list(tmp_path.glob(".target.*.tmp"))


def test_a_killed_builder_leaves_nothing_that_is_taken_for_complete(tmp_path: Path):
    target, log = tmp_path / "target", tmp_path / "log"
    builder = start_builder(target, 60, log)
    assert builder.stdout.readline() == "building\n"
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait(timeout=30)
    builder.stdout.close()
    assert not target.exists()
    assert len(list(tmp_path.glob(".target.*.tmp"))) == 1

    began = time.monotonic()
    assert build_once(target, write("whole")).read_text() == "whole"
    assert time.monotonic() - began < 10
    assert not list(tmp_path.glob(".target.*.tmp"))


def test_a_full_disk(tmp_path: Path):
    def build(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CacheError, match="No space left on device; set PRACTICUM_CACHE"):
        build_once(tmp_path / "target", build)
    assert not (tmp_path / "target").exists()


def test_other_errors_of_the_build_pass_through(tmp_path: Path):
    def build(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone", "its source")

    with pytest.raises(FileNotFoundError, match="its source"):
        build_once(tmp_path / "target", build)


def test_a_damaged_file_is_built_anew(tmp_path: Path):
    target = tmp_path / "number"
    target.write_text("4x")
    assert load_or_build(target, write("42"), lambda path: int(path.read_text())) == 42
    assert load_or_build(target, must_not_build, lambda path: int(path.read_text())) == 42


def test_a_build_that_makes_what_cannot_be_loaded(tmp_path: Path):
    with pytest.raises(ValueError, match="invalid literal"):
        load_or_build(tmp_path / "number", write("x"), lambda path: int(path.read_text()))


def test_an_error_of_the_build_is_not_taken_for_damage(tmp_path: Path):
    calls = []

    def build(path: Path) -> None:
        calls.append(path)
        raise ValueError("wrong text")

    with pytest.raises(ValueError, match="wrong text"):
        load_or_build(tmp_path / "number", build, lambda path: None)
    assert len(calls) == 1


def test_keys_differ_with_any_input():
    keys = [cache_key({"n": 1}), cache_key({"n": 2}), cache_key({"m": 1}), cache_key({"n": "1"}), cache_key({})]
    assert len(set(keys)) == len(keys)


def test_names_of_one_target_are_not_taken_for_leftovers_of_another(tmp_path: Path):
    (tmp_path / ".target.other.abc.tmp").mkdir()
    (tmp_path / ".targets.abc.tmp").mkdir()
    build_once(tmp_path / "target", write("x"))
    assert (tmp_path / ".targets.abc.tmp").exists()
    assert cache._prefix(tmp_path / "target") == ".target."


def test_what_is_wrong_with_the_cache_is_for_the_user_to_mend():
    assert issubclass(CacheError, InputError)
    assert issubclass(CacheError, OSError)
    assert str(CacheError("one line")) == "one line"
