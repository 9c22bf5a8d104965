"""Time the attention monitor beside the attention that it watches; write results/benchmarks/aitchison.json.

Run from the checkout: ``python benchmarks/aitchison/speed.py``. It takes some minutes. Seconds are of CPU time on one
thread; all ratios are of one run, the calls taken in turn. Layers have the shape of SmolLM2-135M's: 9 heads, 3 of keys,
64 dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.language.aitchison import AitchisonState, AttentionMonitor, attention_statistics, causal_aitchison
from practicum.models import load_language_model
from practicum.toolbox.kv import AttentionCall

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "aitchison.json"
HEADS, KV_HEADS, D = 9, 3, 64
SCALING = D**-0.5


def main() -> None:
    """Measure and write."""
    torch.set_grad_enabled(False)
    ratios = [
        *[beside_entropy(n, at_most) for n, at_most in ((2048, 1 / 10), (8192, 1 / 30))],
        *[beside_attention(n, at_most) for n, at_most in ((1024, None), (4096, 0.1), (16384, 0.1))],
        *[in_a_model(n) for n in (1024, 2048)],
        decoding(),
        memory(8192),
    ]
    content = {
        "method": "aitchison",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def layer(n: int) -> tuple[Tensor, Tensor]:
    """Random queries and keys of a layer."""
    generator = torch.Generator().manual_seed(n)
    query = torch.randn(1, HEADS, n, D, generator=generator)
    return query, torch.randn(1, KV_HEADS, n, D, generator=generator)


def beside_entropy(n: int, at_most: float) -> dict[str, Any]:
    """The norm over entropy computed by blocks of rows, only of the keys that they see."""
    query, key = layer(n)
    call = AttentionCall(1, torch.nn.Identity(), query, key, key, None, SCALING, True, "flash")
    ours, theirs = seconds(
        lambda: causal_aitchison(query, key, scaling=SCALING),
        lambda: attention_statistics(call, ["entropy"], block_size=256),
        repeats=3,
    )
    return figure("seconds of the norm over those of entropy, by blocks", f"a layer, L={n}", ours / theirs, at_most)


def beside_attention(n: int, at_most: float | None) -> dict[str, Any]:
    """The norm over the attention itself."""
    query, key = layer(n)
    ours, theirs = seconds(
        lambda: causal_aitchison(query, key, scaling=SCALING),
        lambda: scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True),
        repeats=3,
    )
    return figure("seconds of the norm over those of sdpa attention", f"a layer, L={n}", ours / theirs, at_most)


def in_a_model(n: int) -> dict[str, Any]:
    """What the monitor adds to a forward pass of the embedded model."""
    model = load_language_model().model
    ids = torch.randint(0, 40_000, (1, n), generator=torch.Generator().manual_seed(n))
    monitor = AttentionMonitor(model, metrics=("aitchison",))

    def plain() -> None:
        model(ids, use_cache=False, logits_to_keep=1)

    def watched() -> None:
        with monitor:
            plain()

    ours, theirs = seconds(watched, plain, repeats=3)
    data = f"SmolLM2-135M, 30 layers, L={n}"
    return figure("seconds that the monitor adds over those of the forward pass", data, ours / theirs - 1, None)


def decoding() -> dict[str, Any]:
    """A step of decoding with 8192 keys over one with 512."""

    def steps(n: int) -> Callable[[], None]:
        query, key = layer(n)
        state = AitchisonState()
        state.update(key)

        def run() -> None:
            for _ in range(200):
                state.update(key[:, :, :1])
                state.row(query[:, :, :1], scaling=SCALING)

        return run

    long, short = seconds(steps(8192), steps(512), repeats=5)
    return figure("seconds of a decoded token with 8192 keys over one with 512", "a layer", long / short, 1.5)


def memory(n: int) -> dict[str, Any]:
    """The most bytes that tensors made meanwhile hold at once, over those of the queries."""
    query, key = layer(n)
    with Held() as held:
        causal_aitchison(query, key, scaling=SCALING)
    allowed = 8 * (KV_HEADS * D * D * 8 + HEADS * 128 * 128 * 4)
    data = f"a layer, L={n}, beside the result"
    row = figure("MB made meanwhile", data, (held.most - query.numel() // D * 4) / 1e6, allowed / 1e6)
    return {**row, "MB of one matrix of all pairs": HEADS * n * n * 4 / 1e6}


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        import weakref

        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
                if storage.data_ptr() not in given:
                    self._alive[id(x)] = (weakref.ref(x), storage.nbytes())
        self._alive = {i: entry for i, entry in self._alive.items() if entry[0]() is not None}
        self.most = max(self.most, sum(n for _, n in self._alive.values()))
        return out


def seconds(ours: Callable[[], Any], theirs: Callable[[], Any], *, repeats: int) -> tuple[float, float]:
    """Median CPU seconds of two calls, taken in turn."""
    work = {
        "ours": Workload(ours, clock="cpu", threads=1, repeats=repeats),
        "theirs": Workload(theirs, clock="cpu", threads=1, repeats=repeats),
    }
    timings, errors = time_workloads(work)
    if errors:
        raise next(iter(errors.values()))
    return timings["ours"]["value"], timings["theirs"]["value"]


def figure(what: str, data: str, value: float, at_most: float | None) -> dict[str, Any]:
    """A row of the table."""
    if at_most is None:
        return {"what": what, "data": data, "value": value, "target": "", "met": None}
    return {"what": what, "data": data, "value": value, "target": f"at most {at_most:.3g}", "met": value <= at_most}


if __name__ == "__main__":
    main()
