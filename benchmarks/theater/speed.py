"""Time exits, forced answers and probes, interleaved, on one thread; write results/benchmarks/theater.json.

Run from the checkout: ``python benchmarks/theater/speed.py``. It takes some minutes. Seconds are of the wall clock, so
the machine should do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.language.theater import (
    AttentionProbe,
    ForcedAnswer,
    ProbeEarlyExit,
    Sampling,
    collect_traces,
    generate_with_exit,
    load_reasoner,
    reasoner_questions,
    record,
    trace_of,
)
from practicum.models import load_language_model

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "theater.json"
LAYER = 3
CHAIN, CUTS = 512, 20
NEW_TOKENS = 48


def main() -> None:
    """Measure and write."""
    chat = load_language_model()
    ratios = [armed(chat), forced(chat), prefixes(), *saved()]
    content = {
        "method": "theater",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "numpy", "torch", "transformers")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def armed(chat: Any) -> dict[str, Any]:
    """Generation with the exit armed and tau = 1, over plain generation."""
    model, tokenizer = chat.model, chat.tokenizer
    rng = np.random.default_rng(0)
    layer, width = model.config.num_hidden_layers // 2, model.config.hidden_size
    X = [torch.from_numpy(rng.normal(size=(20, width)).astype(np.float32)) for _ in range(40)]
    probe = AttentionProbe(epochs=2, random_state=0).fit(X, ["ABCD"[i % 4] for i in range(40)])
    early = ProbeEarlyExit(probe, layer, tokenizer, tau=1.0)
    prompt = tokenizer("A short walk through the history of bridges. First,", return_tensors="pt")
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}

    def plain() -> None:
        model.generate(**prompt, **options, pad_token_id=tokenizer.pad_token_id)

    def watched() -> None:
        with early.attach(model):
            model.generate(**prompt, **options, pad_token_id=tokenizer.pad_token_id, stopping_criteria=[early])

    data = f"{chat.name}, {NEW_TOKENS} new tokens, four heads at layer {layer}"
    return compared("generation with the exit armed (tau = 1), over plain generation", data, watched, plain, 1.05, 7)


def forced(chat: Any) -> dict[str, Any]:
    """Encoding every cut chain anew, over one cache that is cropped."""
    tokenizer = chat.tokenizer
    words = tokenizer.encode("The river is wide here and the old bridge is long. ")
    ids = (words * (CHAIN // len(words) + 1))[:CHAIN]
    trace = trace_of(tokenizer, question="?", options=tuple("ABCD"), prompt_ids=words, cot_ids=ids, answer="A")
    trace.boundaries = [round(CHAIN * k / CUTS) for k in range(1, CUTS + 1)]
    instrument = ForcedAnswer(chat.model, tokenizer, batch_size=1)
    difference = np.abs(instrument(trace) - instrument.beliefs([trace])[0]).max()
    data = f"{chat.name}, {CUTS} cuts of a chain of {CHAIN} tokens; answers differ by {difference:.1e} at most"
    return compared(
        "encoding every cut chain anew, over a cropped cache",
        data,
        partial(instrument.beliefs, [trace]),
        partial(instrument, trace),
        5,
        1,
        least=True,
    )


def prefixes() -> dict[str, Any]:
    """A probe on every prefix by itself, over all prefixes in one pass."""
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(64, 64)) for _ in range(40)]
    probe = AttentionProbe(epochs=2, random_state=0).fit(X, ["ABCD"[i % 4] for i in range(40)])
    chain = rng.normal(size=(512, 64))

    def one_by_one() -> None:
        for n in range(1, len(chain) + 1):
            probe.predict_proba([chain[:n]])

    return compared(
        "a probe on every prefix, over all prefixes in one pass",
        "512 tokens, width 64, four heads",
        one_by_one,
        partial(probe.predict_prefixes, [chain]),
        10,
        5,
        least=True,
    )


def saved() -> list[dict[str, Any]]:
    """Tokens and seconds of whole answers with the exit at 0.95, over those without, question by question."""
    reasoner = load_reasoner()
    model, tokenizer = reasoner
    train = []
    for kind in ("recall", "multi-hop"):
        train += collect_traces(
            model,
            tokenizer,
            reasoner_questions(kind, 400, 1),
            max_new_tokens=56,
            sampling=Sampling(1.0, 1.0),
            format=reasoner.format,
            batch_size=400,
        )
    record(model, train, [LAYER], batch_size=200)
    probe = AttentionProbe(lr=1e-2, epochs=40, random_state=0).fit(
        [trace.hidden[LAYER] for trace in train],
        [trace.answer for trace in train],
        start=[trace.start for trace in train],
        options=[trace.options for trace in train],
        groups=[trace.key for trace in train],
    )
    rows = []
    for kind in ("recall", "multi-hop"):
        questions = reasoner_questions(kind, 40, 2)
        tokens: dict[float, int] = {}

        def think(tau: float, questions: Any = questions, tokens: Any = tokens) -> None:
            early = ProbeEarlyExit(probe, LAYER, tokenizer, tau=tau)
            said = [
                generate_with_exit(model, tokenizer, question, early, format=reasoner.format, max_new_tokens=56)
                for question in questions
            ]
            tokens[tau] = sum(output.n_cot_tokens for output in said)

        what = f"seconds with the exit at 0.95, over those without ({kind})"
        row = compared(
            what, "the tiny reasoner, 40 questions one by one", partial(think, 0.95), partial(think, 1.0), 1, 3
        )
        rows += [
            row,
            {**row, "what": what.replace("seconds", "tokens of the chains"), "value": tokens[0.95] / tokens[1.0]},
        ]
        rows[-1]["met"] = rows[-1]["value"] <= 1
    return rows


def compared(
    what: str,
    data: str,
    first: Callable[[], Any],
    second: Callable[[], Any],
    target: float,
    repeats: int,
    *,
    least: bool = False,
) -> dict[str, Any]:
    """Seconds of the first over those of the second, each the median of its repeats, taken in turn."""
    work = partial(Workload, clock="wall", threads=1, repeats=repeats)
    timings, errors = time_workloads({"first": work(first), "second": work(second)})
    if errors:
        raise next(iter(errors.values()))
    value = timings["first"]["value"] / timings["second"]["value"]
    bound = "at least" if least else "at most"
    met = value >= target if least else value <= target
    seconds = {"seconds": timings["first"]["value"], "peer seconds": timings["second"]["value"]}
    return {"what": what, "data": data, "value": value, "target": f"{bound} {target:g}", "met": met, **seconds}


if __name__ == "__main__":
    main()
