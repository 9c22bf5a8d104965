"""``practicum run theater``: probe a model on questions and write what it believes along its chains as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from practicum.datasets.questions import MCQuestion, read_questions
from practicum.language.theater.beliefs import ProbeBelief, choose_depth
from practicum.language.theater.curves import performativity
from practicum.language.theater.figures import write_page
from practicum.language.theater.forced import ForcedAnswer
from practicum.language.theater.monitors import HFMonitor, RegexMonitor
from practicum.language.theater.reasoner import load_reasoner, reasoner_questions
from practicum.language.theater.traces import Sampling, Traces, collect_traces, format_of, record, write_traces
from practicum.models import load_language_model
from practicum.toolbox.errors import InputError
from practicum.toolbox.probes import AttentionProbe, save_probe
from practicum.toolbox.taps import fingerprint, n_layers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
NARROW = 128


@app.command()
def main(
    model: Annotated[
        str | None, typer.Option(help="Hub id or folder; 'embedded' for SmolLM2. The tiny reasoner by default.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Questions, .jsonl; the tiny reasoner brings its own.")] = None,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("theater.html"),
    layer: Annotated[int | None, typer.Option(help="By default the best of four depths.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The longest chain with its answer.")] = 512,
    monitor: Annotated[str, typer.Option(help="regex, model (reads its own chains) or embedded (SmolLM2).")] = "regex",
    n: Annotated[int, typer.Option(help="Questions of a group at most.")] = 400,
    examples: Annotated[int, typer.Option(help="Chains of each group that get a heat map.")] = 3,
    traces: Annotated[Path | None, typer.Option(help="Also write the chains, .jsonl.")] = None,
    probe: Annotated[Path | None, typer.Option(help="Also write the probe, a folder.")] = None,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of sampling, split and probe.")] = 0,
) -> None:
    """Let a model think, probe half of its chains, and write the beliefs along the other half as a page."""
    if monitor not in ("regex", "model", "embedded"):
        raise InputError(f"--monitor {monitor}: must be regex, model or embedded")
    for name, value in (("--n", n), ("--max-new-tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"{name} {value}: must be 1 or more")
    questions: Sequence[MCQuestion] | None = None if data is None else read_questions(data, require_answer=False)
    if model is None and questions is None:
        reasoner = load_reasoner()
        network, tokenizer = reasoner
        format, sampling, name = reasoner.format, Sampling(1.0, 1.0), "the tiny reasoner"
        questions = [q for kind in ("recall", "multi-hop") for q in reasoner_questions(kind, n, seed, reasoner.world)]
    else:
        if questions is None:
            raise InputError("--data: must be given with --model")
        loaded = load_language_model(None if model in (None, "embedded") else model, device=device)
        network, tokenizer, name = loaded.model, loaded.tokenizer, loaded.name
        format, sampling = format_of(tokenizer), Sampling()
        questions = _at_most(questions, n)
    found = collect_traces(
        network,
        tokenizer,
        questions,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        format=format,
        batch_size=128 if network.config.hidden_size <= NARROW else 16,
        random_state=seed,
    )
    if traces is not None:
        write_traces(traces, found)
    learnt, rest = _halves(found, seed)
    layers = [layer] if layer is not None else _depths(n_layers(network))
    record(network, found, layers)
    fresh = AttentionProbe(lr=1e-2 if network.config.hidden_size <= NARROW else 1e-3, random_state=seed)
    chosen = layers[0] if len(layers) == 1 else choose_depth(fresh, learnt, layers, random_state=seed)
    fresh.fit(
        [trace.hidden[chosen] for trace in learnt],
        [trace.answer for trace in learnt],
        start=[trace.start for trace in learnt],
        options=[trace.options for trace in learnt],
        groups=[trace.key for trace in learnt],
    )
    if probe is not None:
        save_probe(fresh, probe, fingerprint=fingerprint(network))
    reader: Any = RegexMonitor()
    if monitor != "regex":
        reader = HFMonitor(network, tokenizer) if monitor == "model" else HFMonitor()
    read = ProbeBelief(fresh, chosen).beliefs(rest)
    notes = [
        f"{name}: {len(found)} chains, {found.n_truncated} cut off and {found.n_unanswered} without an option left "
        f"out. The probe reads layer {chosen} of {n_layers(network)} and has learnt from {len(learnt)} of them; "
        f"what follows is of the other {len(rest)}."
    ]
    write_page(
        html,
        rest,
        probe=read,
        forced=ForcedAnswer(network, tokenizer, format.stub).beliefs(rest),
        monitor=reader,
        title=f"Beliefs along the chains of {name}",
        notes=notes,
        examples=examples,
    )
    rates = {}
    for group in dict.fromkeys(trace.group or "all" for trace in rest):
        members = [i for i, trace in enumerate(rest) if (trace.group or "all") == group]
        result = performativity([rest[i] for i in members], [read[i] for i in members], reader)
        rates[group] = {"performativity": round(result.rate, 4), "interval": [round(x, 4) for x in result.ci]}
    print(json.dumps({"model": name, "layer": chosen, "chains": len(found), "groups": rates}, indent=1))
    print(f"wrote {html}")


def _at_most(questions: Sequence[MCQuestion], n: int) -> list[MCQuestion]:
    taken: dict[str | None, int] = {}
    chosen = []
    for question in questions:
        taken[question.group] = taken.get(question.group, 0) + 1
        if taken[question.group] <= n:
            chosen.append(question)
    return chosen


def _halves(traces: Traces, seed: int) -> tuple[Traces, Traces]:
    keys = sorted({trace.key for trace in traces})
    if len(keys) < 4:
        raise InputError(f"--data: only {len(keys)} questions got an answer; must be 4 at least, half to learn from")
    chosen = {keys[i] for i in np.random.default_rng(seed).permutation(len(keys))[: len(keys) // 2]}
    return Traces([t for t in traces if t.key in chosen]), Traces([t for t in traces if t.key not in chosen])


def _depths(n: int) -> list[int]:
    return sorted({max(1, round(n * share)) for share in (0.25, 0.5, 0.75, 1.0)})
