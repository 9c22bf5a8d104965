"""What a check leaves behind: one JSON file per check run, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1


class ResultError(Exception):
    """A result file that cannot be read or written; the message names the file and the reason."""


@dataclass
class Row:
    """What one arm gave for one seed.

    ``metrics`` are the numbers; ``missing`` says why a metric is not there; ``timings`` has, per timed metric, the
    seconds of every repeat by both clocks. ``status`` is "ok", "failed" (``error`` has type, message and traceback)
    or "unavailable" (``error["message"]`` says why the arm cannot run here). ``resources`` has ``seconds``,
    ``cpu_seconds``, ``peak_memory_bytes`` (resident set at its highest while the arm ran) and
    ``added_memory_bytes`` (that less the resident set before). ``curves`` has points (x, y), with None for a number
    that is not finite.
    """

    seed: int
    arm: str
    status: str = "ok"
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    error: dict[str, str] | None = None
    timings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    resources: dict[str, float | None] = dataclasses.field(default_factory=dict)
    curves: dict[str, list[list[float | None]]] = dataclasses.field(default_factory=dict)


@dataclass
class ClaimResult:
    """One claim with its verdict.

    ``verdict`` is "holds", "does not hold", "inconclusive" or "could not measure" (then ``reason`` says why).
    ``effect``, ``low`` and ``high`` are on the scale of the rule: a difference, a ratio, or a value. ``pairs`` has
    one ``{"seed", "arm", "against", "baseline"}`` for each seed that was measured.
    """

    claim: str
    text: str
    metric: str
    arm: str
    against: list[str]
    rule: str
    margin: float
    timed: bool
    verdict: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    interval: str = ""
    reason: str = ""
    pairs: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclass
class Result:
    """One run of one check.

    ``run`` holds what differs between two runs of the same work: dates, the machine, versions, the git revision.
    """

    method: str
    field: str
    title: str
    scale: str
    request: dict[str, Any]
    seeds: list[int]
    arms: list[str]
    claims: list[ClaimResult]
    rows: list[Row]
    trade_offs: list[list[str]] = dataclasses.field(default_factory=list)
    curves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    def means(self) -> dict[str, dict[str, float]]:
        """``means[arm][metric]`` over the seeds that measured it."""
        gathered: dict[str, dict[str, list[float]]] = {}
        for row in self.rows:
            for metric, value in row.metrics.items():
                if metric not in row.missing:
                    gathered.setdefault(row.arm, {}).setdefault(metric, []).append(value)
        return {arm: {m: sum(v) / len(v) for m, v in metrics.items()} for arm, metrics in gathered.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain containers for `json.dumps`."""
        return dataclasses.asdict(self)


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `write_text` writes text."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text so that ``path`` holds either its old content or all of the new one, whatever happens.

    The text goes to a temporary file in the same folder, is synced, and takes the name in one step. What UTF-8 has no
    character for is replaced.

    Raises
    ------
    ResultError
        When the folder cannot be made or written to, or the disk is full. The old file is untouched then.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with open(descriptor, "w", encoding="utf-8", errors="replace", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in the folder durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Read JSON. Raises `ResultError` naming the file, and the line where it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultError(f"{path}: not a result file: line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{path}: not a result file: not UTF-8 text") from error
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}") from error


def read_result(path: Path) -> Result:
    """Read a result file. Raises `ResultError` for one that is corrupt or of a newer schema."""
    raw = read_json(path)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("schema"), int):
        raise ResultError(f"{path}: not a result file: it has no schema number")
    if raw["schema"] > SCHEMA:
        raise ResultError(f"{path}: written with schema {raw['schema']}, this version reads up to {SCHEMA}: upgrade")
    try:
        fields = dict(raw)
        fields["claims"] = [ClaimResult(**claim) for claim in raw["claims"]]
        fields["rows"] = [Row(**row) for row in raw["rows"]]
        return Result(**fields)
    except (KeyError, TypeError) as error:
        raise ResultError(f"{path}: not a result file: {error}") from error


def read_results(folder: Path) -> list[Result]:
    """All results in a folder, by method and scale. Raises `ResultError` for the first that cannot be read."""
    return [read_result(path) for path in sorted(folder.glob("*.json"))]
