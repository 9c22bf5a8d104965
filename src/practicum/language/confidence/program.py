"""``practicum run confidence``: label questions, and see what a confidence that is taught is worth elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from practicum.language.confidence.format import ConfidenceFormat
from practicum.language.confidence.items import read_items, read_labels, write_labels
from practicum.language.confidence.labels import ConfidenceLabeler
from practicum.language.confidence.pool import TEMPLATE, labeled_pool
from practicum.language.confidence.transfer import pooled, transfer_cells, words, write_page
from practicum.models import load_language_model
from practicum.toolbox.errors import InputError

app = typer.Typer(help="Verbalized confidence in two parts.", no_args_is_help=True)

Model = Annotated[str | None, typer.Option(help="A hub id or folder; by default the embedded model.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
Template = Annotated[
    str | None,
    typer.Option(help="The prompt, with {question} in it; by default the chat template of the model, if it has one."),
]


@app.command()
def label(
    questions: Annotated[Path, typer.Argument(help="A .jsonl file, one question a line.")],
    out: Annotated[Path, typer.Option(help="Where to write the labelled questions.")] = Path("labels.jsonl"),
    model: Model = None,
    device: Device = "cpu",
    template: Template = None,
    samples: Annotated[int, typer.Option(help="Answers per question, where there are no choices.")] = 10,
    evidence: Annotated[str, typer.Option(help="ratio or quote.")] = "ratio",
    seed: int = 0,
) -> None:
    """Find how often a model answers rightly, and which part of the doubt is about the evidence."""
    items = read_items(questions)
    language = load_language_model(model, device=device)
    labeler = ConfidenceLabeler(
        language.model,
        language.tokenizer,
        format=ConfidenceFormat(template=template),
        n_samples=samples,
        evidence=evidence,  # type: ignore[arg-type]
        random_state=seed,
    )
    labeled = labeler.label(items)
    write_labels(out, labeled)
    mean = sum(one.p_hat for one in labeled) / len(labeled)
    print(f"wrote {out}: {len(labeled)} questions, {mean:.2f} of the answers right")
    if labeler.n_undefined_:
        print(f"{labeler.n_undefined_} are never right with the evidence alone: their evidence counts as found")


@app.command()
def matrix(
    labels: Annotated[
        Path | None, typer.Argument(help="Labelled questions, as `label` writes them; by default the generated ones.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page with the diagrams.")] = Path("confidence.html"),
    model: Model = None,
    device: Device = "cpu",
    template: Template = None,
    train: Annotated[int, typer.Option(help="Questions to train on.")] = 160,
    test: Annotated[int, typer.Option(help="Questions to test on.")] = 80,
    blocks: Annotated[int, typer.Option(help="Upper blocks to train; 0 is all.")] = 4,
    epochs: int = 8,
    lr: float = 5e-4,
    seeds: int = 1,
    mode: Annotated[str, typer.Option(help="scalar, decomposed or both.")] = "both",
) -> None:
    """Train on every family and on their mixture, test on every family, and draw each reliability."""
    modes: dict[str, tuple[Literal["scalar", "decomposed"], ...]] = {
        "both": ("scalar", "decomposed"),
        "scalar": ("scalar",),
        "decomposed": ("decomposed",),
    }
    if mode not in modes:
        raise InputError(f"--mode {mode}: must be scalar, decomposed or both")
    language = load_language_model(model, device=device)
    held_out = {}
    if labels is None:
        if model is not None:
            raise InputError("--model needs labelled questions of that model: practicum run confidence label")
        template = TEMPLATE
        pool = labeled_pool()
        families = {name: pool[name] for name in ("reasoning", "copy")}
        held_out = {name: pool[name] for name in ("minus", "letters")}
    else:
        families = {}
        for one in read_labels(labels):
            families.setdefault(one.item.kind, []).append(one)
    cells = []
    for cell in transfer_cells(
        language.model,
        language.tokenizer,
        families,
        {name: ConfidenceFormat(name, template=template, fallback="percent") for name in modes[mode]},
        range(seeds),
        held_out=held_out,
        n_train=train,
        n_test=test,
        n_blocks=blocks or None,
        lr=lr,
        epochs=epochs,
    ):
        cells.append(cell)
        print(f"{cell.arm} trained on {cell.train}, tested on {cell.test}, seed {cell.seed}: {words(cell)}", flush=True)
    if seeds > 1:
        for cell in pooled(cells):
            print(f"{cell.arm} trained on {cell.train}, tested on {cell.test}, all seeds: {words(cell)}")
    write_page(out, cells, "Transfer of verbalized confidence")
    print(f"wrote {out}")
