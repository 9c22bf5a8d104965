"""The harness's instruments: the stopwatch, the memory gauge, and the limit on threads."""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

from practicum.checks.check import Workload


@contextmanager
def limit_threads(threads: int | None, controller: ThreadpoolController | None = None) -> Iterator[None]:
    """Limit BLAS, OpenMP and torch to so many threads inside the block; ``None`` leaves them as they are.

    Finding the loaded libraries takes a while; a ``controller`` that has found them is used where it is given.
    """
    if threads is None:
        yield
        return
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else None
    with (controller or ThreadpoolController()).limit(limits=threads):
        if torch is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)


class MemoryGauge:
    """Resident memory of this process at its highest inside a ``with`` block.

    On Linux the kernel's own high-water mark is reset on entry. Elsewhere the mark of the whole process is read,
    which is an upper bound.

    Attributes
    ----------
    peak, added : int or None
        Bytes at the highest, and that less the bytes on entry.
    peak_device : int or None
        Bytes that torch held on a CUDA device at the highest, when ``device`` is one.

    Examples
    --------
    >>> with MemoryGauge() as gauge:
    ...     block = bytearray(50_000_000)
    >>> gauge.peak > 50_000_000
    True
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.peak: int | None = None
        self.added: int | None = None
        self.peak_device: int | None = None
        self._before: int | None = None

    def _cuda(self) -> Any:
        torch = sys.modules.get("torch")
        return torch.cuda if torch is not None and self.device.startswith("cuda") else None

    def __enter__(self) -> MemoryGauge:
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_bytes("VmRSS")
        except OSError:
            self._before = None
        if cuda := self._cuda():
            cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            self.peak = _status_bytes("VmHWM")
            self.added = max(0, self.peak - self._before)
        elif sys.platform != "win32":
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if cuda := self._cuda():
            self.peak_device = int(cuda.max_memory_allocated(self.device))


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def time_workloads(
    workloads: Mapping[str, Workload], advance: Callable[[str], None] = lambda name: None
) -> tuple[dict[str, dict[str, Any]], dict[str, BaseException]]:
    """Time the workloads of one metric alone and interleaved.

    Each is called once to warm up; then they take turns, so that a slow minute of the machine meets all of them.

    Parameters
    ----------
    workloads : mapping of str to Workload
        By arm.
    advance : callable
        Told the arm before each of its calls.

    Returns
    -------
    timings : dict of str to dict
        By arm: ``wall`` and ``cpu`` (lists of seconds, one a repeat), ``clock``, ``units``, ``threads``, ``value``
        (the metric: units over the median of the seconds, or that median), ``metrics`` (of what was returned).
    errors : dict of str to exception
        Arms whose work raised; they have no timing.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in workloads}
    errors: dict[str, BaseException] = {}
    returned: dict[str, Any] = {}
    controller = ThreadpoolController()

    def once(name: str, keep: bool) -> None:
        work = workloads[name]
        advance(name)
        with limit_threads(work.threads, controller):
            wall, cpu = time.perf_counter(), time.process_time()
            outcome = work.call()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if keep:
            returned[name] = outcome if work.metrics is not None else None
            seconds[name]["wall"].append(wall)
            seconds[name]["cpu"].append(cpu)

    gc.collect()
    gc.disable()
    try:
        for turn in range(max((work.repeats for work in workloads.values()), default=0) + 1):
            # Anew after the warm-up, which may have loaded libraries.
            controller = ThreadpoolController() if turn < 2 else controller
            for name, work in workloads.items():
                if name in errors or turn > work.repeats or (turn == 0 and not work.warm_up):
                    continue
                try:
                    once(name, keep=turn > 0)
                except Exception as error:
                    errors[name] = error
    finally:
        gc.enable()
    measured = {}
    for name, work in workloads.items():
        if name not in errors and work.metrics is not None:
            try:
                measured[name] = dict(work.metrics(returned[name]))
            except Exception as error:
                errors[name] = error
    timings = {}
    for name, work in workloads.items():
        if name not in errors:
            median = max(statistics.median(seconds[name][work.clock]), 1e-9)
            value = median if work.units is None else work.units / median
            timings[name] = {
                **seconds[name],
                "clock": work.clock,
                "units": work.units,
                "threads": work.threads,
                "value": value,
                "metrics": measured.get(name, {}),
            }
    return timings, errors


def machine() -> dict[str, Any]:
    """What a reader needs to know of this machine: processor, cores, memory, system, Python, accelerators."""
    import joblib

    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": joblib.cpu_count(),
        "python": platform.python_version(),
    }
    try:
        facts["memory_bytes"] = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        facts["memory_bytes"] = None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
