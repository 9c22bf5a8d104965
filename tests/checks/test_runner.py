import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from joblib.externals.loky import get_reusable_executor

from practicum.checks.check import Workload
from practicum.checks.measure import MemoryGauge, limit_threads, time_workloads
from practicum.checks.results import ResultError, read_result
from practicum.checks.runner import run_check
from practicum.checks.store import result_path
from practicum.toolbox.errors import InputError

TOYS = Path(__file__).parent.parent / "toys"


@pytest.fixture
def check(toys, tmp_path):
    def run(name, **options):
        return run_check(toys[name], toys.load_check(toys[name]), **{"jobs": 1, "out": tmp_path / "out", **options})

    return run


def verdicts(result):
    return {claim.claim: claim.verdict for claim in result.claims}


def untimed(result):
    return {(row.seed, row.arm): {k: v for k, v in row.metrics.items() if k not in row.timings} for row in result.rows}


def test_every_arm_of_a_seed_gets_the_same_work(check, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    result = check("coin")
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [f"prepare {seed}" for seed in range(4)]
    by_arm = {(row.seed, row.arm): row.metrics["heads"] for row in result.rows}
    assert all(by_arm[seed, "fair"] == by_arm[seed, "again"] for seed in range(4))
    assert len({by_arm[seed, "fair"] for seed in range(4)}) > 1


def test_the_result_is_written_and_nothing_else_is_left(check, tmp_path):
    result = check("coin")
    assert os.listdir(tmp_path / "out") == ["coin-quick.json"]
    assert read_result(tmp_path / "out" / "coin-quick.json") == result
    assert set(result.run) >= {"started", "finished", "seconds", "practicum", "git", "machine", "versions"}
    assert all(row.resources["peak_memory_bytes"] > 1e6 for row in result.rows)


def test_seeds_and_scale_and_margins_follow_the_request(check):
    result = check("coin", scale="full", seeds=2)
    assert result.seeds == [0, 1]
    assert next(claim for claim in result.claims if claim.claim == "half").margin == 0.45


@pytest.mark.parametrize("jobs", [2, 3])
def test_parallel_seeds_give_the_same_numbers(check, jobs, tmp_path):
    assert untimed(check("coin", jobs=jobs, out=tmp_path / "parallel")) == untimed(check("coin"))


def test_what_goes_wrong_in_an_arm_stays_in_that_arm(check):
    result = check("broken")
    assert verdicts(result) == {
        "over-the-broken": "could not measure",
        "over-nothing": "could not measure",
        "over-the-absent": "could not measure",
        "over-the-best-there-is": "inconclusive",
        "unmeasured": "could not measure",
    }
    rows = {row.arm: row for row in result.rows if row.seed == 0}
    assert rows["raises"].status == "failed"
    assert "ZeroDivisionError: nothing to divide by" in rows["raises"].error["traceback"]
    assert rows["absent"].status == "unavailable"
    assert rows["sound"].metrics == {"score": 1.0}
    best = next(claim for claim in result.claims if claim.claim == "over-the-best-there-is")
    assert "it is not installed here" in best.reason


def test_timed_arms_are_interleaved_after_one_warm_up(check, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    result = check("race", seeds=1)
    assert (tmp_path / "log").read_text().split("\n")[:-1] == ["prepare 0", *["numpy", "python"] * 4]
    row = next(row for row in result.rows if row.arm == "python")
    timing = row.timings["sums_per_second"]
    assert len(timing["wall"]) == len(timing["cpu"]) == 3
    assert row.metrics["sums_per_second"] == pytest.approx(1 / sorted(timing["wall"])[1])
    assert row.metrics["seconds"] == pytest.approx(sorted(timing["wall"])[1])
    assert result.remarks == [f"numpy made {row.metrics['sum']:.0f}"]
    length = next(row for row in result.rows if row.arm == "length")
    assert length.metrics == {"length": 20_000.0}
    assert length.curves == {"partial sums": [[0.0, 0.0], [1.0, None]]}
    assert result.curves == [{"name": "partial sums", "x": "numbers", "y": "sum", "diagonal": False}]


@pytest.fixture
def portable(toys, tmp_path, monkeypatch):
    """The race with work that goes from one process to another: all but the stopwatch in workers, two at a time."""
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    # Workers that were there before do not see the variable, those of this test must not outlive it.
    get_reusable_executor().shutdown()
    race = toys.load_check(toys["race"])
    race.portable = True

    def run(**options):
        return run_check(toys["race"], race, **{"jobs": 2, "out": tmp_path / "portable", **options})

    yield run
    get_reusable_executor().shutdown()


def test_portable_work_is_prepared_in_workers_and_timed_alone(check, portable, tmp_path):
    log = tmp_path / "log"
    result = portable()
    timed = ["numpy", "python"] * 4
    lines = log.read_text().split("\n")[:-1]
    assert sorted(lines[:2]) == ["prepare 0", "prepare 1"]
    assert lines[2:] == [*timed, *timed, "prepare 2", *timed]
    assert {row.status for row in result.rows} == {"ok"}
    assert all("seconds" in row.metrics for row in result.rows if row.arm != "length")
    sums = {(row.seed, row.arm): row.metrics.get("sum") for row in result.rows}
    assert sums == {(row.seed, row.arm): row.metrics.get("sum") for row in check("race").rows}


def test_portable_work_that_was_interrupted_is_taken_up(portable, tmp_path):
    log = tmp_path / "log"

    def stop(done, total, text):
        if text.startswith("seed 1: timing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        portable(listener=stop)
    log.write_text("")
    result = portable()
    assert {row.status for row in result.rows} == {"ok"}
    assert "prepare 0" not in log.read_text()


def test_the_stopwatch_takes_the_median_of_the_clock_that_was_asked_for():
    pauses = iter([0.0, 0.05, 0.01, 0.03])
    timings, errors = time_workloads({"a": Workload(lambda: time.sleep(next(pauses)), units=3)})
    assert not errors
    assert timings["a"]["value"] == pytest.approx(3 / sorted(timings["a"]["wall"])[1])
    assert sorted(timings["a"]["wall"])[1] == pytest.approx(0.03, abs=0.015)
    cpu, _ = time_workloads({"a": Workload(lambda: time.sleep(0.05), clock="cpu", repeats=1)})
    assert cpu["a"]["value"] < 0.03


def test_work_that_raises_leaves_the_other_arms_timed():
    def fail():
        raise OSError("no")

    timings, errors = time_workloads({"a": Workload(fail), "b": Workload(lambda: None)})
    assert list(timings) == ["b"]
    assert list(errors) == ["a"]


def test_what_the_last_call_returned_is_measured_off_the_clock():
    numbers = iter(range(9))
    slow = lambda returned: time.sleep(0.1) or {"last": returned}  # noqa: E731
    timings, errors = time_workloads({"a": Workload(lambda: next(numbers), metrics=slow)})
    assert not errors
    assert timings["a"]["metrics"] == {"last": 3}
    assert max(timings["a"]["wall"]) < 0.1


def test_the_memory_of_an_arm_is_its_own():
    with MemoryGauge() as large:
        bytearray(200_000_000)
    with MemoryGauge() as small:
        bytearray(1_000)
    assert large.added >= 190_000_000
    assert small.added < 50_000_000


def test_threads_are_limited_inside_and_restored():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with limit_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_killed_at_twenty_random_moments_a_check_ends_as_if_it_had_run_through(tmp_path):
    script = Path(__file__).parent / "kill_trials.py"
    found = subprocess.run(
        [sys.executable, str(script), str(TOYS), str(tmp_path), "20"], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    counts = json.loads(found.stdout)
    assert counts["interrupted"] >= 10
    assert counts["resumed"] >= 5


def test_an_interrupted_run_does_no_seed_twice(check, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))

    def stop(done, total, text):
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("coin", listener=stop, options={"pause": "0.2"})
    assert check("coin", options={"pause": "0.2"}).run["seconds"] >= 1.6
    prepared = (tmp_path / "log").read_text().split("\n")[:-1]
    assert prepared == [f"prepare {seed}" for seed in (0, 1, 2, 3)]


def test_rows_of_other_code_or_data_are_not_taken_up(check, tmp_path, monkeypatch):
    data = tmp_path / "sample.txt"
    data.write_text("0.1 0.2 0.9 0.4")

    def stop(done, total, text):
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("coin", data=str(data), listener=stop)
    data.write_text("0.9 0.9 0.9 0.1 0.1 0.1 0.1 0.1")
    result = check("coin", data=str(data))
    assert {row.metrics["heads"] for row in result.rows if row.arm == "fair"} == {5 / 8}


def test_a_check_killed_with_its_workers_running_is_taken_up_by_the_same_command(tmp_path):
    command = [sys.executable, "-m", "toyhouse", "check", "coin", "--pause", "0.3", "--jobs", "2", "--out", "out"]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/.partial/*/seed-*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert {claim["verdict"] for claim in json.loads(second.stdout)[0]["claims"]} == {"holds"}


@pytest.mark.parametrize("content", ["{", '{"schema": 99}'])
def test_a_corrupt_or_newer_result_in_the_way_is_left_alone(check, tmp_path, content):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "coin-quick.json"
    path.write_text(content)
    with pytest.raises(ResultError, match="coin-quick.json"):
        check("coin")
    assert path.read_text() == content


def test_a_folder_that_cannot_be_written_is_told_before_the_work(check, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot write"):
        check("coin", out=tmp_path / "file" / "out")
    assert not (tmp_path / "log").exists()


def test_a_disk_that_fills_up_keeps_the_old_result_and_what_is_finished(check, tmp_path):
    check("coin", seeds=1)
    path = tmp_path / "out" / "coin-quick.json"
    old = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(ResultError, match="cannot write .*coin-quick.json"):
            check("coin", seeds=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == old
    assert len(list((tmp_path / "out").glob(".partial/*/seed-*.json"))) == 12
    assert len(check("coin", seeds=4).rows) == 12


def test_two_checks_do_not_write_the_same_result_at_once(check, tmp_path):
    def second(done, total, text):
        with pytest.raises(ResultError, match="another check is writing"):
            check("coin")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("coin", listener=second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "huge"}, "--scale 'huge' is none of quick, full, paper"),
        ({"seeds": 0}, "--seeds must be at least 1; got 0"),
        ({"jobs": 0}, "--jobs must be at least 1; got 0"),
        ({"backend": "slurm"}, "--backend 'slurm' is none of loky, dask, ray"),
        ({"backend": "dask"}, "--backend dask needs --address"),
        ({"address": "127.0.0.1:1"}, "--address goes with"),
        ({"device": "cuda:77"}, "--device cuda:77 is not available here"),
        ({"device": "toaster"}, "--device toaster is not available here"),
        ({"options": {"pause": "x"}}, "--pause must be a number; got 'x'"),
        ({"backend": "dask", "address": "tcp://127.0.0.1:9"}, "no Dask scheduler answers there"),
    ],
)
def test_a_request_that_cannot_be_met_is_told_in_one_line(check, options, message):
    with pytest.raises(InputError, match=message):
        check("coin", **options)


def test_own_work_gets_a_file_of_its_own(tmp_path):
    default = {"model": None, "data": None, "device": "cpu", "options": {}}
    own = {**default, "data": "mine.csv"}
    paths = {result_path(tmp_path, "coin", "quick", request).name for request in (default, own)}
    assert len(paths) == 2
    assert "coin-quick.json" in paths


def test_a_dask_cluster_gives_the_same_numbers(check, tmp_path):
    from distributed import LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as cluster:
        there = check("coin", backend="dask", address=cluster.scheduler_address, jobs=None, out=tmp_path / "dask")
    here = check("coin")
    assert untimed(there) == untimed(here)
    assert [(c.verdict, c.effect, c.low, c.high) for c in there.claims] == [
        (c.verdict, c.effect, c.low, c.high) for c in here.claims
    ]


@pytest.fixture
def ray_head():
    """A real Ray head of its own, in a process that ends with the test."""
    said = []
    for _ in range(3):  # Ray draws the ports of its parts at random and gives up when one is taken
        head, address, words = start_ray_head()
        if head is not None:
            break
        said.append(words)
    else:
        raise RuntimeError("the Ray head did not start:\n" + "\n".join(said))
    try:
        yield address
    finally:
        stop(head)


def start_ray_head():
    """The process and the address of a Ray head, or None with what it said before it gave up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = Path(sys.executable).parent / "ray"
    options = ["--head", "--block", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    head = subprocess.Popen(
        [ray, "start", *options, "--node-ip-address=127.0.0.1", f"--port={port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    words = []
    for line in head.stdout:
        if "Ray runtime started" in line:
            return head, f"127.0.0.1:{port}", ""
        words.append(line)
    stop(head)
    return None, "", "".join(words)


def stop(head):
    head.terminate()
    try:
        head.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
    head.stdout.close()


def test_a_ray_cluster_gives_the_same_numbers(check, tmp_path, ray_head):
    there = check("coin", backend="ray", address=ray_head, jobs=None, out=tmp_path / "ray")
    here = check("coin")
    assert untimed(there) == untimed(here)
    assert [(c.verdict, c.effect, c.low, c.high) for c in there.claims] == [
        (c.verdict, c.effect, c.low, c.high) for c in here.claims
    ]
