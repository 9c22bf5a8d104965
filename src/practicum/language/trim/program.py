"""The program: ``practicum run trim score`` rates a pool for a task, ``practicum run trim select`` takes its best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from practicum.datasets.files import DataFileError, json_lines
from practicum.language.trim.budget import select_coreset
from practicum.language.trim.samples import SampleFile, take
from practicum.language.trim.selector import TrimSelector
from practicum.models import load_language_model
from practicum.toolbox.errors import InputError

app = typer.Typer(
    help="Choose the instruction samples of a pool that teach a task: score the pool, then select within a budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Pool = Annotated[
    Path,
    typer.Option(metavar="FILE", help="JSON Lines: prompt and response, or messages.", show_default=False),
]


@app.command()
def score(
    pool: Pool,
    target: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON Lines, 5 to 10 samples of the task.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the scores go, a line a sample.")] = Path(
        "scores.jsonl"
    ),
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep scores here while running; an interrupted run goes on.", show_default="OUT.shards"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Hub id or folder.", show_default="the embedded model")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Such as bfloat16.", show_default="as stored")
    ] = None,
    scope: Annotated[str, typer.Option(metavar="SCOPE", help="response, prompt or all.")] = "response",
    layers: Annotated[int, typer.Option(metavar="N", help="Last layers whose attention is read.")] = 4,
    unseen_penalty: Annotated[float, typer.Option(metavar="X", help="For tokens that the target has not.")] = 0.5,
    max_weight: Annotated[float, typer.Option(metavar="X", help="Of the best token against the mean.")] = 0.5,
    saliency: Annotated[str, typer.Option(metavar="HOW", help="attention or uniform.")] = "attention",
    skip_empty: Annotated[bool, typer.Option(help="Pass over samples without a token in scope.")] = False,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Samples in a forward pass.")] = 8,
    max_length: Annotated[int, typer.Option(metavar="N", help="Tokens kept of a sample.")] = 2048,
    shard_size: Annotated[int, typer.Option(metavar="N", help="Samples that are stored together.")] = 4096,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="A torch device.")] = "cpu",
) -> None:
    """Score every sample of a pool, higher for those that are more like the target."""
    samples, wanted = SampleFile(pool), SampleFile(target)
    loaded = load_language_model(model, device=device, dtype=dtype)
    selector = TrimSelector(
        loaded.model,
        loaded.tokenizer,
        n_layers=layers,
        scope=scope,  # type: ignore[arg-type]
        unseen_penalty=unseen_penalty,
        max_weight=max_weight,
        saliency=saliency,  # type: ignore[arg-type]
        batch_size=batch_size,
        max_length=max_length,
        on_empty="skip" if skip_empty else "raise",
        shard_size=shard_size,
    ).fit(wanted)
    kept = store or out.with_name(f"{out.name}.shards")
    found = selector._pass(samples, kept, lambda done: typer.echo(f"{done} samples scored", err=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as stream:
        for i, (scores, length) in enumerate(zip(found.scores, found.lengths, strict=True)):
            by_task = {
                task: None if np.isneginf(value) else round(float(value), 6)
                for task, value in zip(selector.tasks_, scores, strict=True)
            }
            best = None if np.isneginf(scores.max()) else round(float(scores.max()), 6)
            line: dict[str, Any] = {"index": i, "score": best, "tokens": int(length)}
            stream.write(json.dumps({**line, "tasks": by_task} if len(by_task) > 1 else line) + "\n")
    print(f"scored {len(found.scores)} samples, {selector.n_truncated_} of them cut at {max_length} tokens")
    print(f"wrote {out}")


@app.command()
def select(
    pool: Pool,
    scores: Annotated[Path, typer.Option(metavar="FILE", help="What score wrote.")] = Path("scores.jsonl"),
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the chosen samples go, the best first.")] = Path(
        "coreset.jsonl"
    ),
    fraction: Annotated[float | None, typer.Option(metavar="X", help="Share of the pool.", show_default="0.05")] = None,
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="Number of samples.", show_default=False)] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of all of them together.", show_default=False)
    ] = None,
    allocation: Annotated[str, typer.Option(metavar="HOW", help="With several tasks: max, or round_robin.")] = "max",
) -> None:
    """Write the best samples of a pool within a budget."""
    if fraction is None and n is None and tokens is None:
        fraction = 0.05
    samples = SampleFile(pool)
    values, lengths = read_scores(scores)
    size = sum(1 for _ in samples)
    if size != len(values):
        raise InputError(f"--scores {scores}: has {len(values)} samples, but {pool} has {size}; score it again")
    chosen = select_coreset(
        values,
        fraction=fraction,
        n=n,
        tokens=tokens,
        lengths=lengths,
        allocation=allocation,  # type: ignore[arg-type]
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as stream:
        for sample in take(_once(samples), chosen):
            stream.write(json.dumps(sample, ensure_ascii=False) + "\n")
    print(f"chose {len(chosen)} of {size} samples with {int(lengths[chosen].sum())} tokens")
    print(f"wrote {out}")


def read_scores(path: Path) -> tuple[Any, Any]:
    """Scores of shape (N, T) and lengths of shape (N,) of a file that score wrote."""
    if not path.exists():
        raise DataFileError(path, "there is no such file; run score first")
    rows, lengths = [], []
    for line, row in json_lines(path):
        try:
            values = list(row["tasks"].values()) if "tasks" in row else [row["score"]]
            rows.append([-np.inf if value is None else float(value) for value in values])
            lengths.append(int(row["tokens"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataFileError(path, "is not what score writes", line=line) from None
    if not rows or len({len(row) for row in rows}) > 1:
        raise DataFileError(path, "is not what score writes")
    return np.array(rows), np.array(lengths)


def _once(samples: SampleFile) -> Iterator[Any]:
    """A stream of the file, of which no more is held than what is chosen."""
    yield from samples
