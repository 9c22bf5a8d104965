"""Time TRIM's scoring beside plain forward passes and LESS gradients; write results/benchmarks/trim.json.

Run from the checkout: ``python benchmarks/trim/speed.py``. It takes some minutes. Seconds are of CPU time on one
thread, the calls taken in turn; memory is what the process holds more at the highest than before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from practicum.checks.check import Workload
from practicum.checks.measure import MemoryGauge, limit_threads, machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.language.trim import Checkpoint, GradientSelector, SampleTokenizer, TrimSelector
from practicum.language.trim.check import chatml
from practicum.language.trim.tasks import instruction_pool, wanted_samples, with_filler
from practicum.language.trim.training import fine_tune
from practicum.models import load_language_model
from practicum.toolbox.trunk import Forward, TokenRow

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "trim.json"
N_BLOCKS = 6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
REPEATS = 3


def main() -> None:
    """Measure and write."""
    pool = with_filler(instruction_pool(1)) + list(instruction_pool(1, random_state=1))
    n_tokens = sum(len(sample.ids) for sample in tokenized(pool))
    calls = ways(pool)
    with limit_threads(1):
        seconds = timed(calls)
        memory = {name: added_megabytes(call) for name, call in calls.items()}
    ours = "TRIM"
    rows = [
        {"what": name, "tokens a second": n_tokens / s, "MB more than before": memory[name]}
        for name, s in seconds.items()
    ]
    data = f"SmolLM2-135M, {len(pool)} samples, {n_tokens} tokens"
    targets = {
        "plain forward passes": 1.3,
        "LESS, 1 checkpoint, adapters in 6 blocks": 0.7,
        "LESS, 4 checkpoints, adapters in 6 blocks": 0.2,
        "LESS, 1 checkpoint, adapters in all blocks": 0.7,
    }
    ratios = [
        figure(f"seconds of {ours} over those of {name}", data, seconds[ours] / seconds[name], at_most)
        for name, at_most in targets.items()
    ]
    ratios += [
        figure(f"MB of {ours} over those of {name}", data, memory[ours] / max(memory[name], 1e-3), None)
        for name in targets
    ]
    content = {
        "method": "trim",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers", "peft")),
        "rows": rows,
        "ratios": ratios,
    }
    write_json(OUT, content)
    for row in (*rows, *ratios):
        print(row)


def tokenized(samples: list[dict[str, str]]) -> list[Any]:
    """Tokens of the samples."""
    return SampleTokenizer(load_language_model().tokenizer, chatml).tokenize(samples)


def ways(pool: list[dict[str, str]]) -> dict[str, Callable[[], Any]]:
    """What is compared, each on a model of its own where adapters would slow the others down."""
    target = wanted_samples(8)
    loaded = load_language_model()
    selector = TrimSelector(loaded.model, loaded.tokenizer, format=chatml).fit(target)
    uniform = TrimSelector(loaded.model, loaded.tokenizer, format=chatml, saliency="uniform")

    def forward() -> None:
        passes = Forward(loaded.model, batch_size=8)
        rows = [TokenRow(sample.ids) for sample in tokenized_pool(loaded.tokenizer, pool)]
        with torch.no_grad():
            for chosen in passes.batches(rows):
                passes.logits([rows[i] for i in chosen], keep=1)

    upper, whole = gradients(N_BLOCKS, 1, target), gradients(30, 1, target)
    four = gradients(N_BLOCKS, 4, target)
    return {
        "TRIM": lambda: selector.score_samples(pool),
        "plain forward passes": forward,
        "LESS, 1 checkpoint, adapters in 6 blocks": lambda: upper.score_samples(pool),
        "LESS, 4 checkpoints, adapters in 6 blocks": lambda: four.score_samples(pool),
        "LESS, 1 checkpoint, adapters in all blocks": lambda: whole.score_samples(pool),
        "TRIM, fitting 8 samples": lambda: selector.fit(target),
        "TRIM, fitting 8 samples without saliency": lambda: uniform.fit(target),
    }


def tokenized_pool(tokenizer: Any, pool: list[dict[str, str]]) -> list[Any]:
    """Tokens, made anew as a selector does."""
    return SampleTokenizer(tokenizer, chatml).tokenize(pool)


def gradients(n_blocks: int, n_checkpoints: int, target: list[dict[str, str]]) -> GradientSelector:
    """LESS with adapters on the attention of the last blocks, after a step of training."""
    loaded = load_language_model()
    names = [f"model.layers.{i}.self_attn.{name}" for i in range(30 - n_blocks, 30) for name in ATTENTION]
    checkpoints: list[Checkpoint] = []
    tuned = fine_tune(
        loaded.model,
        SampleTokenizer(loaded.tokenizer, chatml).tokenize(target[:2]),
        LoraConfig(r=8, lora_alpha=16, target_modules=names),
        steps=1,
        learning_rate=1e-4,
        batch_size=2,
        checkpoints=checkpoints,
    )
    selector = GradientSelector(tuned, loaded.tokenizer, checkpoints=checkpoints * n_checkpoints, format=chatml)
    return selector.fit(target[:2])


def timed(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median CPU seconds, the calls taken in turn."""
    work = {name: Workload(call, clock="cpu", threads=1, repeats=REPEATS) for name, call in calls.items()}
    timings, errors = time_workloads(work)
    if errors:
        raise next(iter(errors.values()))
    return {name: timing["value"] for name, timing in timings.items()}


def added_megabytes(call: Callable[[], Any]) -> float:
    """What a call holds at its highest."""
    with MemoryGauge() as gauge:
        call()
    return (gauge.added or 0) / 1e6


def figure(what: str, data: str, value: float, at_most: float | None) -> dict[str, Any]:
    """A row of the table."""
    if at_most is None:
        return {"what": what, "data": data, "value": value, "target": "", "met": None}
    return {"what": what, "data": data, "value": value, "target": f"at most {at_most:.3g}", "met": value <= at_most}


if __name__ == "__main__":
    main()
