"""Time CORAL: steered beside unsteered answers, the packed scorer beside a row an option, and a check from its cache.

Run from the checkout: ``python benchmarks/coral/speed.py``. It takes some minutes and writes
results/benchmarks/coral.json. Seconds are of CPU time on one thread, except those of the check, which are elapsed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.datasets.questions import MCQuestion, mcq_topics
from practicum.language.coral import CoralForMultipleChoice
from practicum.models import load_language_model
from practicum.toolbox.choices import ChoiceScorer

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "coral.json"
LAYER = 19
REPEATS = 3


def main() -> None:
    """Measure and write."""
    loaded = load_language_model()
    train = mcq_topics(4).questions
    asked = list(mcq_topics(6, random_state=1).questions)
    data = f"{len(asked)} questions of the ten topics, {loaded.name}"
    ratios = [
        *scoring(loaded, train, asked, data),
        generating(loaded, train, asked[::2]),
        cached_check(),
    ]
    content = {
        "method": "coral",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers", "scikit-learn", "numpy")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def scoring(loaded: Any, train: Any, asked: list[MCQuestion], data: str) -> list[dict[str, Any]]:
    """Steered answers over unsteered ones by the same scorer, and that scorer over one with a row for each option."""
    steered = CoralForMultipleChoice(loaded.model, loaded.tokenizer, layer=LAYER, random_state=0).fit(train)
    coral = steered.coral_
    plain = ChoiceScorer(loaded.model, loaded.tokenizer, cache=False)
    reading = ChoiceScorer(loaded.model, loaded.tokenizer, layers=[LAYER], cache=False)

    def unsteered() -> list[int]:
        return [int(row.argmax()) for row in plain(asked).logits]

    timed = seconds_of(
        {
            "steered": lambda: coral.predict(reading(asked)),
            "unsteered": unsteered,
            "a row an option": partial(naive, loaded, asked),
        }
    )
    return [
        figure("seconds of steered answers over those of unsteered ones", data, timed, "steered", "unsteered", 1.05),
        figure(
            "seconds of unsteered answers over those of a row an option",
            data,
            timed,
            "unsteered",
            "a row an option",
            0.5,
        ),
    ]


def naive(loaded: Any, asked: list[MCQuestion], batch_size: int = 16) -> list[list[float]]:
    """What is done without a scorer: prompt and option in a row, padded, and the logits of every token."""
    tokenizer, model = loaded.tokenizer, loaded.model
    rows = []
    for question in asked:
        prompt = f"Question: {question.question}\nAnswer:"
        n_prompt = len(tokenizer(prompt)["input_ids"])
        rows += [(tokenizer(f"{prompt} {choice}")["input_ids"], n_prompt) for choice in question.choices]
    scores: list[float] = []
    for start in range(0, len(rows), batch_size * 4):
        batch = rows[start : start + batch_size * 4]
        width = max(len(tokens) for tokens, _ in batch)
        ids, mask = (
            torch.zeros((len(batch), width), dtype=torch.long),
            torch.zeros((len(batch), width), dtype=torch.long),
        )
        for i, (tokens, _) in enumerate(batch):
            ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
        with torch.inference_mode():
            logs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
        for i, (tokens, n) in enumerate(batch):
            wanted = torch.tensor(tokens[n:])
            scores.append(float(logs[i, n - 1 : len(tokens) - 1].gather(1, wanted[:, None]).sum()))
    sizes = [len(question.choices) for question in asked]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [scores[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def generating(loaded: Any, train: Any, asked: list[MCQuestion]) -> dict[str, Any]:
    """A generated letter with the hook and the processor, over one without."""
    steered = CoralForMultipleChoice(
        loaded.model, loaded.tokenizer, mode="letter", layer=LAYER, n_permutations=1, random_state=0
    ).fit(train)
    processor = steered.logits_processor("ABCD")
    inputs = [loaded.tokenizer(steered.prompt(question), return_tensors="pt") for question in asked]

    def generate(processors: list[Any]) -> None:
        for each in inputs:
            loaded.model.generate(**each, max_new_tokens=1, do_sample=False, logits_processor=processors)

    def with_hook() -> None:
        with steered.attach():
            generate([processor])

    timed = seconds_of({"steered": with_hook, "unsteered": lambda: generate([])})
    data = f"a letter for each of {len(asked)} questions, one by one"
    return figure("seconds of steered generation over those of unsteered", data, timed, "steered", "unsteered", 1.05)


def cached_check() -> dict[str, Any]:
    """Seconds of the quick check, run again with its scores in the cache."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "practicum.cli", "check", "coral", "--scale", "quick", "--json"]
    taken = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            subprocess.run([*command, "--out", folder], env=environment, check=True, stdout=subprocess.DEVNULL)
            taken.append(time.perf_counter() - started)
    value = taken[-1]
    what = "seconds of the quick check with its scores in the cache"
    return {"what": what, "data": "the whole command", "value": value, "target": "at most 20", "met": value <= 20}


def seconds_of(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """CPU seconds of each, the median of its repeats, taken in turn."""
    workloads = {name: Workload(call, clock="cpu", threads=1, repeats=REPEATS) for name, call in works.items()}
    timings, errors = time_workloads(workloads)
    if errors:
        raise next(iter(errors.values()))
    return {name: timing["value"] for name, timing in timings.items()}


def figure(what: str, data: str, timed: dict[str, float], ours: str, theirs: str, at_most: float) -> dict[str, Any]:
    """A row of the table."""
    value = timed[ours] / timed[theirs]
    target = f"at most {at_most:g}"
    row = {"what": what, "data": data, "value": value, "target": target, "met": value <= at_most}
    return {**row, "seconds": timed[ours], "peer seconds": timed[theirs], "repeats": REPEATS}


if __name__ == "__main__":
    main()
