"""Time labelling beside generate, and training beside plain PEFT; write results/benchmarks/confidence.json.

Run from the checkout: ``python benchmarks/confidence/speed.py``. It takes some minutes on the embedded model, one
thread. Seconds are of CPU time, the contestants taken in turn.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.language.confidence import ConfidenceFormat, VerbalConfidence, linear_lora, task_items
from practicum.language.confidence.generation import decode
from practicum.language.confidence.pool import TEMPLATE, labeled_pool
from practicum.models import load_language_model
from practicum.toolbox.trunk import Forward

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "confidence.json"
N_SAMPLES, NEW_TOKENS, LONG = 10, 16, 100
N_BLOCKS, BATCH = 4, 16


def main() -> None:
    """Measure and write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=OUT)
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    language = load_language_model()
    ratios = [
        *labelling(language.model, language.tokenizer, given.repeats),
        *training(language.model, language.tokenizer, given.repeats),
    ]
    content = {
        "method": "confidence",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers", "peft")),
        "ratios": ratios,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(given.out, content)
    for ratio in ratios:
        print(ratio)


def labelling(model: Any, tokenizer: Any, repeats: int) -> list[dict[str, Any]]:
    """Ten answers of sixteen tokens to a question with a long context: one prompt, computed once."""
    form = ConfidenceFormat(template=TEMPLATE)
    prompt = form.prompt_ids(task_items("codes", 1, n_records=[12])[0], tokenizer)
    assert len(prompt) >= LONG
    ids = torch.tensor([prompt])
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": True,
        "top_k": 0,
        "min_new_tokens": NEW_TOKENS,
        "max_new_tokens": NEW_TOKENS,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ours = partial(decode, model, [prompt], n_samples=N_SAMPLES, max_new_tokens=NEW_TOKENS)
    one_by_one = lambda: [model.generate(ids, **options) for _ in range(N_SAMPLES)]  # noqa: E731
    together = lambda: model.generate(ids, num_return_sequences=N_SAMPLES, **options)  # noqa: E731
    seconds = timed({"ours": ours, "one by one": one_by_one, "together": together}, repeats)
    data = f"a prompt of {len(prompt)} tokens, {N_SAMPLES} samples of {NEW_TOKENS} tokens"
    return [
        figure("seconds of ten calls of generate over ours", data, seconds["one by one"] / seconds["ours"], 3),
        figure(
            "seconds of generate with num_return_sequences over ours", data, seconds["together"] / seconds["ours"], None
        ),
    ]


def training(model: Any, tokenizer: Any, repeats: int) -> list[dict[str, Any]]:
    """A step on the same batch with the same adapter in the upper four of thirty blocks, by three ways."""
    labeled = labeled_pool()["copy"][:BATCH]
    form = ConfidenceFormat("decomposed", template=TEMPLATE)
    verbal = VerbalConfidence(model, tokenizer, form, lora=linear_lora(model, N_BLOCKS), epochs=1, random_state=0)
    verbal.fit(labeled)
    examples = verbal.examples(labeled)
    wrapped, trunk = verbal.model_, verbal.trunk_
    losses = {}

    def step(name: str, forward: Forward, from_the_bottom: bool) -> None:
        handle = None
        if from_the_bottom:
            handle = model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())
        try:
            wrapped.zero_grad()
            loss = verbal.batch_loss(forward, examples)
            loss.backward()
        finally:
            if handle is not None:
                handle.remove()
        losses[name] = float(loss.detach())

    seconds = timed(
        {
            "ours": partial(step, "ours", Forward(wrapped, trunk), False),
            "whole": partial(step, "whole", Forward(wrapped), False),
            "from the bottom": partial(step, "from the bottom", Forward(wrapped), True),
        },
        repeats,
    )
    verbal.unload()
    data = f"{BATCH} copy questions, an adapter in the upper {N_BLOCKS} of 30 blocks"
    apart = max(abs(losses[name] - losses["ours"]) for name in losses)
    return [
        figure(
            "seconds of a step of PEFT with the backward pass to the embeddings over ours",
            data,
            seconds["from the bottom"] / seconds["ours"],
            5,
        ),
        figure(
            "seconds of a step of PEFT with the backward pass to the adapter over ours",
            data,
            seconds["whole"] / seconds["ours"],
            None,
        ),
        {
            "what": "largest difference of the losses",
            "data": data,
            "value": apart,
            "target": "at most 1e-4",
            "met": apart <= 1e-4,
        },
    ]


def timed(calls: dict[str, Any], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, taken in turn."""
    work = {name: Workload(call, clock="cpu", threads=1, repeats=repeats) for name, call in calls.items()}
    timings, errors = time_workloads(work)
    if errors:
        raise next(iter(errors.values()))
    return {name: timing["value"] for name, timing in timings.items()}


def figure(what: str, data: str, value: float, at_least: float | None) -> dict[str, Any]:
    """A row of the table; one without a target is for comparison."""
    row: dict[str, Any] = {"what": what, "data": data, "value": value}
    if at_least is not None:
        row |= {"target": f"at least {at_least:g}", "met": value >= at_least}
    return row


if __name__ == "__main__":
    main()
