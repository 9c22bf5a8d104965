"""Runs a check: the seeds, the arms, the stopwatch, and what to do when something fails."""

from __future__ import annotations

import logging
import math
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import joblib

import practicum
from practicum.catalog import Card
from practicum.checks.check import SCALES, Check, Metrics, Request, Scale, Unavailable, Workload, as_metrics
from practicum.checks.measure import MemoryGauge, limit_threads, machine, time_workloads
from practicum.checks.results import Result, Row, write_json
from practicum.checks.store import LIBRARIES, Store, Writer, result_path, versions
from practicum.checks.verdict import judge_all
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import MissingExtra

Backend = Literal["loky", "dask", "ray"]
BACKENDS: tuple[Backend, ...] = ("loky", "dask", "ray")
Listener = Callable[[int, int, str], None]


def run_check(
    card: Card,
    check: Check,
    *,
    scale: Scale = "quick",
    seeds: int | None = None,
    model: str | None = None,
    data: str | None = None,
    device: str = "cpu",
    options: Mapping[str, str] | None = None,
    backend: Backend = "loky",
    address: str | None = None,
    jobs: int | None = None,
    out: Path = Path("practicum-results"),
    listener: Listener = lambda done, total, text: None,
) -> Result:
    """Run a check and write its result.

    Seeds go through joblib, each with one ``prepare`` and all its arms. A check with timed comparisons goes seed by
    seed in this process instead: the untimed arms of the seed through joblib, then the timed ones alone, interleaved.
    Where the check is ``portable``, joblib does all but the stopwatch of as many seeds as it has workers, and then
    this process runs the stopwatch of each.
    Every finished arm of a seed is on disk before the next begins; the same call takes an interrupted run up again.

    Parameters
    ----------
    card, check
        The method, and its check as `practicum.catalog.Catalog.load_check` gives it.
    scale : {"quick", "full", "paper"}
    seeds : int, optional
        Number of seeds, 0 to ``seeds - 1``; by default what the check asks for at this scale.
    model, data : str, optional
        The user's model and data in place of the embedded default.
    device : str
    options : mapping of str to str
        The method's own options.
    backend : {"loky", "dask", "ray"}
        Where joblib runs the tasks. Dask and Ray need the ``address`` of a cluster that is there.
    address : str, optional
    jobs : int, optional
        Tasks at a time; by default the number of cores, or all workers of the cluster.
    out : Path
        Folder of the result file.
    listener : callable
        Told ``(done, total, text)``: arms of seeds finished, of how many, and what was done last.

    Returns
    -------
    Result
        Also written to ``out``. Arms that raised are rows with status "failed"; their claims could not be measured.

    Raises
    ------
    InputError
        When the request cannot be met: malformed data, an option out of range.
    MissingExtra
        When a library is not installed that the work needs.
    practicum.checks.results.ResultError
        When the result cannot be written, or a corrupt or newer file is in its place.
    """
    _validate(scale, seeds, backend, address, jobs, device)
    seed_list = list(range(seeds if seeds is not None else check.seeds[scale]))
    request = {"model": model, "data": data, "device": device, "options": dict(options or {})}
    path = result_path(out, card.name, scale, request)
    source = card.path.parent.parent.parent
    store = Store(path, {"method": card.name, "scale": scale, **request}, source)
    try:
        started = datetime.now(UTC)
        clock = time.perf_counter()
        run = _Run(check, store, listener, len(seed_list))
        base = Request(scale, 0, model, data, device, dict(options or {}))
        requests = [replace(base, seed=seed) for seed in seed_list]
        with _backend(backend, address, jobs) as parallel:
            if check.timed_arms():
                run.timed(requests, parallel)
            else:
                run.untimed(requests, parallel)
        arms = list(check.arms())
        rows = [store.rows[seed, arm] for seed in seed_list for arm in arms]
        result = Result(
            method=card.name,
            field=card.field,
            title=card.title,
            scale=scale,
            request=request,
            seeds=seed_list,
            arms=arms,
            claims=judge_all(check, {claim.id: claim.text for claim in card.claims}, scale, rows),
            rows=rows,
            trade_offs=[list(pair) for pair in check.trade_offs],
            curves=[asdict(curve) for curve in check.curves],
            run={
                "started": started.isoformat(timespec="seconds"),
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(store.seconds_before + time.perf_counter() - clock, 1),
                "practicum": practicum.__version__,
                "git": _revision(source),
                "machine": machine(),
                "versions": versions(dict.fromkeys((*LIBRARIES, *card.hosts))),
                "backend": backend,
            },
        )
        result.remarks = _remarks(check, result)
        write_json(path, result.to_json())
        store.remove()
        return result
    finally:
        store.close()


class BadOption(InputError):
    """An option that does not go, whatever the work; the command line exits with 2 for it."""

    usage = True


def _validate(scale: str, seeds: int | None, backend: str, address: str | None, jobs: int | None, device: str) -> None:
    if scale not in SCALES:
        raise BadOption(f"--scale {scale!r} is none of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise BadOption(f"--seeds must be at least 1; got {seeds}")
    if jobs is not None and jobs < 1:
        raise BadOption(f"--jobs must be at least 1; got {jobs}")
    if backend not in BACKENDS:
        raise BadOption(f"--backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend != "loky" and address is None:
        raise BadOption(f"--backend {backend} needs --address, where the cluster is")
    if backend == "loky" and address is not None:
        raise BadOption("--address goes with --backend dask or --backend ray")
    _validate_device(device)


def _validate_device(device: str) -> None:
    if device == "cpu":
        return
    with MissingDevice.explained(device):
        import torch

        torch.empty(1, device=device)


class MissingDevice(InputError):
    """The device is not there."""

    @staticmethod
    @contextmanager
    def explained(device: str) -> Iterator[None]:
        """Turn whatever torch says of a device it does not have into one line."""
        try:
            yield
        except ModuleNotFoundError:
            raise MissingDevice(f"--device {device} needs torch, which is not installed") from None
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            first = str(error).strip().partition("\n")[0].partition(". ")[0]
            raise MissingDevice(f"--device {device} is not available here: {first}") from None


@contextmanager
def _backend(backend: str, address: str | None, jobs: int | None) -> Iterator[joblib.Parallel]:
    if backend == "loky":
        with joblib.parallel_config("loky", inner_max_num_threads=1):
            yield joblib.Parallel(n_jobs=jobs or joblib.cpu_count(), return_as="generator_unordered")
        return
    if backend == "dask":
        try:
            from distributed import Client
        except ModuleNotFoundError:
            raise MissingExtra("--backend dask needs distributed: pip install 'practicum[dask]'") from None
        try:
            client = Client(address, timeout=10)
        except (OSError, ValueError) as error:
            raise InputError(f"--address {address}: no Dask scheduler answers there: {error}") from None
        with client, joblib.parallel_config("dask"):
            yield joblib.Parallel(n_jobs=jobs or -1, return_as="generator_unordered")
        return
    try:
        import ray
        from ray.util.joblib import register_ray
    except ModuleNotFoundError:
        raise MissingExtra("--backend ray needs ray: pip install 'practicum[ray]'") from None
    mine = not ray.is_initialized()
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"--address {address}: no Ray cluster answers there: {error}") from None
    register_ray()
    try:
        with joblib.parallel_config("ray"):
            yield joblib.Parallel(n_jobs=jobs or -1)
    finally:
        if mine:
            ray.shutdown()


class _Run:
    """One run under way: what is done, and what is left."""

    def __init__(self, check: Check, store: Store, listener: Listener, seeds: int) -> None:
        self.check = check
        self.store = store
        self.listener = listener
        self.total = seeds * len(check.arms())
        self.started = time.perf_counter()

    def missing(self, seed: int, arms: Iterable[str]) -> list[str]:
        return [arm for arm in arms if (seed, arm) not in self.store.rows]

    def note(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.store.rows[row.seed, row.arm] = row
            self.store.note_seconds(time.perf_counter() - self.started)
            self.tell(f"seed {row.seed}: {row.arm}" + ("" if row.status == "ok" else f" ({row.status})"))

    def tell(self, text: str) -> None:
        self.listener(len(self.store.rows), self.total, text)

    def untimed(self, requests: Sequence[Request], parallel: joblib.Parallel) -> None:
        arms = list(self.check.arms())
        tasks = [
            joblib.delayed(_seed_task)(self.check, request, left, self.store.writer)
            for request in requests
            if (left := self.missing(request.seed, arms))
        ]
        self.tell("start")
        for outcomes, written in parallel(tasks):
            rows = [row for row, _ in outcomes]
            if not written:
                self.store.keep(rows)
            self.note(rows)

    def timed(self, requests: Sequence[Request], parallel: joblib.Parallel) -> None:
        left = [request for request in requests if self.missing(request.seed, self.check.arms())]
        if not self.check.portable:
            for request in left:
                self.timed_seed(request, parallel)
            return
        step = parallel.n_jobs if parallel.n_jobs > 0 else len(left) or 1
        for start in range(0, len(left), step):
            self.timed_seeds(left[start : start + step], parallel)

    def timed_seed(self, request: Request, parallel: joblib.Parallel) -> None:
        """One seed: prepared here, its untimed arms through joblib, its timed ones here."""
        timed = self.check.timed_arms()
        left = self.missing(request.seed, (arm for arm in self.check.arms() if arm not in timed))
        left_timed = timed if self.missing(request.seed, timed) else []
        self.tell(f"seed {request.seed}: preparing")
        with limit_threads(self.check.threads):
            work, failed = _prepare(self.check, request, [*left, *left_timed])
        if failed:
            self.store.writer.write(failed)
            self.note(failed)
            return
        tasks = [joblib.delayed(_arm_task)(self.check, request, arm, work, self.store.writer) for arm in left]
        for row, written in parallel(tasks) if tasks else ():
            if not written:
                self.store.keep([row])
            self.note([row])
        outcomes = {}
        for arm in left_timed:
            self.tell(f"seed {request.seed}: {arm}")
            outcomes[arm] = _run_arm(self.check, request, arm, work, threads=self.check.threads)
        self.time_arms(request.seed, outcomes)

    def timed_seeds(self, requests: Sequence[Request], parallel: joblib.Parallel) -> None:
        """Several seeds: all but the stopwatch through joblib, a seed a worker; then the stopwatch, seed by seed."""
        timed = self.check.timed_arms()
        tasks = []
        for request in requests:
            arms = self.missing(request.seed, self.check.arms())
            arms = [arm for arm in self.check.arms() if arm in arms or (arm in timed and {*timed} & {*arms})]
            tasks.append(joblib.delayed(_seed_task)(self.check, request, arms, self.store.writer))
        self.tell(f"seeds {', '.join(str(request.seed) for request in requests)}: all but the stopwatch")
        waiting: dict[int, dict[str, tuple[Row, Metrics]]] = {}
        for outcomes, written in parallel(tasks):
            rows = [row for row, metrics in outcomes if not metrics.timed]
            if not written:
                self.store.keep(rows)
            self.note(rows)
            for row, metrics in outcomes:
                if metrics.timed:
                    waiting.setdefault(row.seed, {})[row.arm] = row, metrics
        for seed in sorted(waiting):
            self.time_arms(seed, waiting[seed])

    def _tell_timing(self, seed: int, metric: str, arm: str) -> None:
        self.tell(f"seed {seed}: timing {metric}: {arm}")

    def time_arms(self, seed: int, outcomes: Mapping[str, tuple[Row, Metrics]]) -> None:
        """Run what the timed arms of a seed left for the stopwatch, and keep their rows."""
        rows = {arm: row for arm, (row, _) in outcomes.items()}
        workloads: dict[str, dict[str, Workload]] = {}
        for arm, (_, metrics) in outcomes.items():
            for metric, workload in metrics.timed.items():
                workloads.setdefault(metric, {})[arm] = workload
        for metric, by_arm in workloads.items():
            timings, errors = time_workloads(by_arm, partial(self._tell_timing, seed, metric))
            for arm, timing in timings.items():
                outcome = as_metrics(timing.pop("metrics"))
                rows[arm].metrics |= {metric: timing["value"], **outcome.values}
                rows[arm].missing |= outcome.missing
                rows[arm].timings[metric] = timing
            for arm, error in errors.items():
                _fail(rows[arm], error)
        for arm, row in rows.items():
            _derive(self.check, arm, row)
        if rows:
            self.store.writer.write(list(rows.values()))
            self.note(list(rows.values()))


def _seed_task(
    check: Check, request: Request, arms: Sequence[str], writer: Writer
) -> tuple[list[tuple[Row, Metrics]], bool]:
    """All that is left of a seed but the stopwatch, in one worker. True when every finished row is on disk already."""
    with limit_threads(1):
        work, failed = _prepare(check, request, arms)
    if failed:
        return [(row, Metrics()) for row in failed], writer.write(failed)
    outcomes, written = [], True
    for arm in arms:
        row, metrics = _run_arm(check, request, arm, work, threads=1)
        if not metrics.timed:
            _derive(check, arm, row)
            written = writer.write([row]) and written
        outcomes.append((row, metrics))
    return outcomes, written


def _arm_task(check: Check, request: Request, arm: str, work: Any, writer: Writer) -> tuple[Row, bool]:
    row, _ = _run_arm(check, request, arm, work, threads=1)
    _derive(check, arm, row)
    return row, writer.write([row])


def _prepare(check: Check, request: Request, arms: Sequence[str]) -> tuple[Any, list[Row]]:
    """The work of this seed, or the failed rows of its arms. What the user must mend is raised."""
    try:
        return check.prepare(request), []
    except (InputError, MissingExtra):
        raise
    except Exception as error:
        rows = [Row(request.seed, arm) for arm in arms]
        for row in rows:
            _fail(row, error, "prepare: ")
        return None, rows


def _run_arm(check: Check, request: Request, arm: str, work: Any, threads: int | None) -> tuple[Row, Metrics]:
    row, metrics = Row(request.seed, arm), Metrics()
    wall, cpu = time.perf_counter(), time.process_time()
    with limit_threads(threads), MemoryGauge(request.device) as gauge:
        try:
            metrics = as_metrics(check.arms()[arm](work))
            if metrics.timed and arm not in check.timed_arms():
                raise TypeError(f"the arm {arm!r} returned timed work: mark it with @arm({arm!r}, timed=True)")
            row.metrics, row.missing, row.notes = dict(metrics.values), dict(metrics.missing), list(metrics.notes)
            row.curves = {name: _points(points) for name, points in metrics.curves.items()}
        except Unavailable as reason:
            row.status, row.error = "unavailable", {"type": "Unavailable", "message": str(reason), "traceback": ""}
        except (InputError, MissingExtra):
            raise
        except Exception as error:
            _fail(row, error)
    row.resources = {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_memory_bytes": gauge.peak,
        "added_memory_bytes": gauge.added,
    }
    if gauge.peak_device is not None:
        row.resources["peak_device_memory_bytes"] = gauge.peak_device
    return row, metrics


def _points(points: Iterable[tuple[float, float]]) -> list[list[float | None]]:
    """The points of a curve as JSON has them."""
    return [[float(value) if math.isfinite(value) else None for value in point] for point in points]


def _fail(row: Row, error: BaseException, prefix: str = "") -> None:
    row.status = "failed"
    row.error = {
        "type": type(error).__name__,
        "message": f"{prefix}{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _derive(check: Check, arm: str, row: Row) -> None:
    if row.status != "ok":
        return
    try:
        derived = as_metrics(check.derive(arm, row.metrics))
    except Exception as error:
        _fail(row, error)
        return
    row.metrics.update(derived.values)
    row.missing.update(derived.missing)


def _remarks(check: Check, result: Result) -> list[str]:
    try:
        return list(check.remarks(result.means()))
    except KeyError as error:
        return [f"No remarks: {error} was not measured."]


def _revision(folder: Path) -> str | None:
    """The git revision of the checkout the code lies in, with a mark when it was edited; None outside of one."""
    try:
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=10
        )
        if tracked.returncode != 0:
            return None
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
