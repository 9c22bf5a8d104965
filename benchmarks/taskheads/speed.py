"""Time the decoding of heads and the scan over them beside the plain ways; write results/benchmarks/taskheads.json.

Run from the checkout: ``python benchmarks/taskheads/speed.py``. It takes some minutes. Seconds are of CPU time on one
thread, on the embedded model; all ratios are of one run, the calls taken in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.datasets import load_tasks
from practicum.language.taskheads import HeadLens, HeadPatch, LexicalTaskHeads, build_prompts, head_scan
from practicum.language.taskheads.prompts import answer_tokens, word_tokens
from practicum.language.taskheads.steps import read
from practicum.models import load_language_model

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "taskheads.json"
TASKS = ("country-capital", "country-currency", "country-language", "antonym")
N_PROMPTS = 24
SCANNED = (12, 22)


def main() -> None:
    """Measure and write."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    loaded = load_language_model()
    ratios = [
        *decoding(loaded.model, loaded.tokenizer),
        *scanning(loaded.model, loaded.tokenizer),
        finding(loaded.model, loaded.tokenizer),
    ]
    content = {
        "method": "taskheads",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def decoding(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Which heads say the words of four tasks: decoding all of them in full over the shortcut."""
    tasks = load_tasks(TASKS)
    lens, words = HeadLens(model), [word_tokens(tokenizer, task) for task in tasks.values()]
    prompts = build_prompts(tasks[TASKS[0]], indices=range(N_PROMPTS))
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    normed = lens.normed(read(model, rows, torch.zeros(len(rows), dtype=torch.int64), 16).z)
    found: dict[str, Tensor] = {}

    def short() -> None:
        found["short"] = lens.hits(normed, words)

    def full() -> None:
        found["full"] = lens.hits(normed, words, shortcut=False)

    ours, theirs = seconds(short, full, repeats=3)
    data = f"{N_PROMPTS} prompts, {lens.n_layers * lens.n_heads} heads, {lens.vocabulary} tokens, {len(words)} tasks"
    same = float((found["short"] != found["full"]).sum())
    return [
        at_least("seconds of decoding every head over those of the exact shortcut", data, theirs / ours, 5.0),
        at_most("booleans that differ between the two", data, same, 0.0),
    ]


def scanning(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The effect of patching each head alone, over a loop with a forward pass for each patch."""
    task = load_tasks(TASKS[:1])[TASKS[0]]
    prompts = build_prompts(task, indices=range(8))
    answers = [task.pairs[i][1] for i in range(8)]
    values = torch.randn(30, 9, 64, generator=torch.Generator().manual_seed(0))
    tokens = answer_tokens(tokenizer, prompts, answers)
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    rows = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    found: dict[str, Tensor] = {}

    def likely() -> Tensor:
        logits = model(**batch, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits.softmax(1)[torch.arange(len(tokens)), tokens]

    def scan() -> None:
        found["scan"] = head_scan(model, tokenizer, prompts, answers, values, layers=SCANNED)[list(SCANNED)]

    def by_batch() -> None:
        plain = likely()
        effects = torch.zeros(len(SCANNED), 9)
        for i, layer in enumerate(SCANNED):
            for head in range(9):
                with HeadPatch(model, [(layer, head)], values):
                    effects[i, head] = (likely() - plain).mean()
        found["loop"] = effects

    def by_prompt() -> None:
        for layer in SCANNED:
            for head in range(9):
                with HeadPatch(model, [(layer, head)], values):
                    model(rows[0], use_cache=False, logits_to_keep=1)

    n = len(SCANNED) * 9
    ours, theirs = seconds(scan, by_batch, repeats=1)
    apart = float((found["scan"] - found["loop"]).abs().max())
    # One prompt stands for eight alike: their seconds add up.
    _, one_by_one = seconds(lambda: None, by_prompt, repeats=1)
    data = f"{n} heads, 8 prompts of five examples"
    return [
        at_least("seconds of a forward pass for each patch over those of the scan, prompts in a batch", data,
                 theirs / ours, 5.0),
        at_least("the same, a forward pass for each patch and prompt", data, 8 * one_by_one / ours, 5.0),
        at_most("largest difference of the effects (probability)", data, apart, 1e-4),
    ]  # fmt: skip


def finding(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Finding the heads of a task over running its prompts."""
    task = load_tasks(TASKS[:1])[TASKS[0]]
    finder = LexicalTaskHeads(model, tokenizer, require_correct=False)
    queries = {task.name: list(range(N_PROMPTS))}
    prompts = build_prompts(task, indices=queries[task.name])
    tokenizer.padding_side = "left"

    def fit() -> None:
        finder.fit([task], styles=("examples",), n_held_out=0, queries=queries)

    def forward() -> None:
        for start in range(0, len(prompts), 16):
            batch = tokenizer(prompts[start : start + 16], return_tensors="pt", padding=True)
            model(**batch, use_cache=False, logits_to_keep=1)

    ours, theirs = seconds(fit, forward, repeats=3)
    data = f"{N_PROMPTS} prompts of five examples"
    return at_most("seconds of finding heads over those of running their prompts", data, ours / theirs, 2.0)


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


def at_least(what: str, data: str, value: float, target: float) -> dict[str, Any]:
    """A row of the table that should be large."""
    return {"what": what, "data": data, "value": value, "target": f"at least {target:.3g}", "met": value >= target}


def at_most(what: str, data: str, value: float, target: float) -> dict[str, Any]:
    """A row of the table that should be small."""
    return {"what": what, "data": data, "value": value, "target": f"at most {target:.3g}", "met": value <= target}


if __name__ == "__main__":
    main()
