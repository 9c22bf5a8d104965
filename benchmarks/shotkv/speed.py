"""Time decoding with whole and with compressed caches, and what looking at attention adds to a prefill.

Run from the checkout: ``python benchmarks/shotkv/speed.py``. It takes some minutes and writes
results/benchmarks/shotkv.json. Seconds are of CPU time on one thread, on the embedded model; all ratios are of one run,
the calls taken in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.models import load_language_model
from practicum.serving.shotkv import ShotKV, read
from practicum.serving.shotkv.check import _of_length

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "shotkv.json"
KEEP = 0.4
CONTEXTS = (2000, 4000, 8000)
STEPS = 8
PROMPT = 4096


def main() -> None:
    """Measure and write."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    model = load_language_model().model
    ratios = [*(decoding(model, n) for n in CONTEXTS), evicting(model), prefill(model)]
    content = {
        "method": "shotkv",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def decoding(model: Any, n: int) -> dict[str, Any]:
    """A step with 40 % kept over one with the whole cache."""
    kept, whole = (_of_length(model, n, share) for share in (KEEP, 1.0))
    ours, theirs = seconds(partial_steps(model, kept), partial_steps(model, whole), repeats=5)
    return {
        "what": f"decoding at {n} tokens, {KEEP:.0%} kept over all",
        "ratio": ours / theirs,
        "target": "<= 0.75 at 8000",
        "milliseconds a step": [1e3 * ours / STEPS, 1e3 * theirs / STEPS],
        "bytes held": [kept.held().nbytes, whole.held().nbytes],
    }


def evicting(model: Any) -> dict[str, Any]:
    """Letting go of generated tokens as well: what counting and evicting add to a step at 2000 tokens."""
    plain, counted = (_of_length(model, 2000, KEEP) for _ in range(2))
    press = ShotKV(KEEP, 0.5, decode_interval=STEPS, min_decode=2, recent=1)
    inner = partial_steps(model, counted)

    def evict() -> None:
        with press(model):
            inner()

    ours, theirs = seconds(evict, partial_steps(model, plain), repeats=5)
    return {"what": "decoding with eviction over without", "ratio": ours / theirs, "target": "<= 1.03"}


def prefill(model: Any) -> dict[str, Any]:
    """A prefill that looks at the attention of 32 queries over a plain one."""
    ids = torch.randint(5, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    ours, theirs = seconds(lambda: read(model, ids, window=32), lambda: read(model, ids), repeats=1)
    return {
        "what": f"prefill of {PROMPT} tokens with a window of 32 over without",
        "ratio": ours / theirs,
        "target": "<= 1.05",
    }


def partial_steps(model: Any, cache: Any) -> Callable[[], None]:
    """Some steps, taken back afterwards."""
    token = torch.ones(1, 1, dtype=torch.int64)
    before = [(layer.keys, layer.values, layer.positions, layer.seen, layer.received) for layer in cache.layers]

    def steps() -> None:
        for _ in range(STEPS):
            model(token, cache=cache, use_cache=True)
        for layer, held in zip(cache.layers, before, strict=True):
            layer.keys, layer.values, layer.positions, layer.seen, layer.received = held

    return steps


def seconds(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median CPU seconds of two calls, taken in turn."""
    loads = {
        "ours": Workload(ours, clock="cpu", repeats=repeats),
        "theirs": Workload(theirs, clock="cpu", repeats=repeats),
    }
    timings, errors = time_workloads(loads)
    if errors:
        raise next(iter(errors.values()))
    return float(timings["ours"]["value"]), float(timings["theirs"]["value"])


if __name__ == "__main__":
    main()
