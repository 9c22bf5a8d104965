"""Time decoding and training of a MemoryLLM beside the dense model; write results/benchmarks/memoryllm.json.

Run from the checkout: ``python benchmarks/memoryllm/speed.py``. It takes some minutes. Seconds are of one thread; all
ratios are of one run, the calls taken in turn. Weights are random, which cost as much as others. Tokens are sampled, so
that nearly every one is new to a cache. Cold: the system's pages of the table's file are dropped before each call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.language.memoryllm import MemoryLMForCausalLM, TokenLookups
from practicum.language.memoryllm.program import build, dense_sizes

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "memoryllm.json"
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 576,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "tie_word_embeddings": True,
}
SHAPE = (8192, 12, 576)
TOKENS = 48
CACHE_ROWS = 410  # 5 % of the vocabulary
KINDS = ("dense", "memory", "mmap", "cached")


def main() -> None:
    """Measure and write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.safetensors")
        table = torch.empty(SHAPE).uniform_(-0.02, 0.02, generator=torch.Generator().manual_seed(0))
        TokenLookups(table).save(path)
        eighth = Path(folder, "int8.safetensors")
        TokenLookups(table).quantize(8).save(eighth)
        ratios = [*decoding(path, eighth), *resident(path), training(), tabulating()]
    content = {
        "method": "memoryllm",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def slim() -> MemoryLMForCausalLM:
    """A MemoryLLM without memory networks."""
    model = build("memory", {**SIZES, "memory_weights": False}, 0).eval()
    model.generation_config.eos_token_id = None
    return model


def dense() -> Any:
    """The dense model of equal total size."""
    model = build("dense", dense_sizes(SIZES), 0).eval()
    model.generation_config.eos_token_id = None
    return model


def decode(model: Any, batch: int, tokens: int = TOKENS) -> None:
    """Sample so many tokens."""
    first = torch.arange(1, batch + 1)[:, None]
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        model.generate(
            first, attention_mask=torch.ones_like(first), max_new_tokens=tokens, do_sample=True, pad_token_id=0
        )


def drop_pages(path: Path) -> None:
    """Ask the system to forget what it has of a file; it keeps pages that are not on disk yet or are mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def decoding(path: Path, eighth: Path) -> list[dict[str, Any]]:
    """Decoding by where the rows are, over the dense model and over attention alone."""
    model, other = slim(), dense()
    in_memory = TokenLookups.load(path)
    mapped = TokenLookups.load(path, "mmap")
    rows = []

    def with_table(load: Callable[[], TokenLookups | None], batch: int) -> Callable[[], None]:
        def run() -> None:
            model.model.lookups = load()
            with nullcontext() if model.model.lookups is not None else model.drop_memory():
                decode(model, batch)

        return run

    # A file of its own, which nobody has mapped while its pages are dropped.
    cold_path = path.with_name("cold.safetensors")
    in_memory.save(cold_path)

    def cold() -> TokenLookups:
        drop_pages(cold_path)
        return TokenLookups.load(cold_path, "mmap")

    for batch in (1, 8):
        calls = {
            "dense": lambda batch=batch: decode(other, batch),
            "attention": with_table(lambda: None, batch),
            "memory": with_table(lambda: in_memory, batch),
            "mapped, warm": with_table(lambda: mapped, batch),
            "mapped, cold": with_table(cold, batch),
            "cached": with_table(lambda: TokenLookups.load(path, "cached", cache_rows=CACHE_ROWS), batch),
            "int8, cached": with_table(lambda: TokenLookups.load(eighth, "cached", cache_rows=CACHE_ROWS), batch),
        }
        # What waits for a disk is seen by the wall clock alone.
        took = seconds(calls, repeats=5, clock="wall")
        data = f"h=576, 12 layers, 8192 tokens, batch {batch}, {TOKENS} tokens"
        for name in ("memory", "mapped, warm", "mapped, cold", "cached", "int8, cached"):
            what = f"seconds of decoding with a table ({name}) over those of the dense model"
            row = figure(what, data, took[name] / took["dense"], 0.75 if name == "memory" else None)
            rows.append(
                {
                    **row,
                    "tokens/s": batch * TOKENS / took[name],
                    "tokens/s of the dense model": batch * TOKENS / took["dense"],
                }
            )
        what = "seconds of decoding with a table in memory over those of attention alone"
        rows.append(figure(what, data, took["memory"] / took["attention"], 1.1))
    return rows


def resident(path: Path) -> list[dict[str, Any]]:
    """Resident bytes that loading and decoding add, each in a process of its own."""
    added = {}
    for kind in KINDS:
        command = [sys.executable, __file__, kind, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        added[kind] = int(done.stdout.split()[-1])
    data = f"h=576, 12 layers, 8192 tokens, {TOKENS} tokens decoded; table of 226 MB"
    return [
        {
            **figure(
                f"resident memory with a table ({kind}) over that of the dense model",
                data,
                added[kind] / added["dense"],
                1.0 if kind == "cached" else None,
            ),
            "MB": added[kind] / 1e6,
            "MB of the dense model": added["dense"] / 1e6,
        }
        for kind in KINDS[1:]
    ]


def one_process(kind: str, path: Path) -> None:
    """Load, decode, and print what was added to resident memory."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tiny = {**SIZES, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    # Libraries that the first generation loads are not the model's.
    decode(build("dense", dense_sizes(tiny), 0).eval(), 1, 4)
    before = resident_bytes()
    if kind == "dense":
        model = dense()
    else:
        model = slim()
        model.model.lookups = TokenLookups.load(path, kind, cache_rows=CACHE_ROWS if kind == "cached" else None)  # type: ignore[arg-type]
    decode(model, 1)
    print(resident_bytes() - before)


def resident_bytes() -> int:
    """Of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024


def training() -> dict[str, Any]:
    """A step of training of a MemoryLLM over one of the dense model: forward and backward of 16 x 96 tokens."""
    sizes = {**SIZES, "num_hidden_layers": 4, "hidden_size": 288, "vocab_size": 4096}
    with torch.enable_grad():
        models = {"memory": build("memory", sizes, 0), "dense": build("dense", dense_sizes(sizes), 0)}
        # Zipf's law with the share of distinct tokens that docstrings have.
        weights = 1 / (torch.arange(4096) + 5.0)
        ids = torch.multinomial(weights, 16 * 96, replacement=True, generator=torch.Generator().manual_seed(0))
        ids = ids.reshape(16, 96)

        def step(model: Any) -> None:
            with torch.enable_grad():
                model.zero_grad(set_to_none=True)
                model(ids, labels=ids, use_cache=False).loss.backward()

        took = seconds({name: lambda m=model: step(m) for name, model in models.items()}, repeats=5, clock="cpu")
    distinct = len(torch.unique(ids)) / ids.numel()
    data = f"h=288, 4 layers, 4096 tokens, 16 x 96 tokens, {distinct:.0%} distinct"
    return figure(
        "seconds of a training step over those of the dense model", data, took["memory"] / took["dense"], 1.05
    )


def tabulating() -> dict[str, Any]:
    """Seconds that a table of 4096 tokens takes."""
    model = build("memory", {**SIZES, "vocab_size": 4096, "num_hidden_layers": 2}, 0).eval()
    took = seconds({"table": model.precompute_lookups}, repeats=3, clock="cpu")
    return figure("seconds of precompute_lookups", "h=576, 2 layers, 4096 tokens", took["table"], None)


def seconds(calls: Mapping[str, Callable[[], Any]], *, repeats: int, clock: Literal["wall", "cpu"]) -> dict[str, float]:
    """Median seconds of calls, taken in turn."""
    work = {name: Workload(call, clock=clock, threads=1, repeats=repeats) for name, call in calls.items()}
    timings, errors = time_workloads(work)
    if errors:
        raise next(iter(errors.values()))
    return {name: timing["value"] for name, timing in timings.items()}


def figure(what: str, data: str, value: float, at_most: float | None) -> dict[str, Any]:
    """A row of the table."""
    if at_most is None:
        return {"what": what, "data": data, "value": value, "target": "", "met": None}
    return {"what": what, "data": data, "value": value, "target": f"at most {at_most:.3g}", "met": value <= at_most}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    if len(sys.argv) == 3:
        one_process(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
