"""The program: ``practicum run coral fit`` on questions with answers, ``practicum run coral apply`` on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from practicum.datasets.questions import read_questions
from practicum.language.coral.estimator import Coral
from practicum.language.coral.multiple_choice import CoralForMultipleChoice, Evaluation, evaluate_scores
from practicum.models import load_language_model
from practicum.toolbox.errors import InputError

app = typer.Typer(
    help="Correct the answers of a language model to multiple-choice questions: fit on yours, apply to others.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SETTINGS = "scorer.json"

Data = Annotated[
    Path,
    typer.Option(metavar="FILE", help="JSON Lines: question, options, answer and perhaps group.", show_default=False),
]
Model = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Hub id or folder.", show_default="the embedded model")
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="A torch device.")]
BatchSize = Annotated[int, typer.Option(metavar="N", help="Questions scored at a time.")]


@app.command()
def fit(
    data: Data,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the fitted probe is written.")] = Path("coral"),
    model: Model = None,
    mode: Annotated[str, typer.Option(metavar="MODE", help="continuation or letter.")] = "continuation",
    length_norm: Annotated[str, typer.Option(metavar="NORM", help="sum, mean or pmi.")] = "sum",
    layer: Annotated[str, typer.Option(metavar="LAYER", help="auto, a number, or several as in 12,18.")] = "auto",
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Where it is not tuned.")] = 10.0,
    alpha: Annotated[float, typer.Option(metavar="X", help="Strength, where it is not tuned.")] = 1.0,
    space: Annotated[str, typer.Option(metavar="SPACE", help="prob or logit.")] = "prob",
    temperature: Annotated[str, typer.Option(metavar="HOW", help="fit or none.")] = "fit",
    tune: Annotated[
        bool, typer.Option(help="Choose weight decay and strength by cross-validation over groups.")
    ] = True,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the probe.")] = 0,
    batch_size: BatchSize = 16,
    device: Device = "cpu",
) -> None:
    """Fit a probe on questions whose answers are known."""
    questions = read_questions(data)
    loaded = load_language_model(model, device=device)
    chosen: dict[str, Any] = {"mode": mode, "length_norm": length_norm}
    steered = CoralForMultipleChoice(
        loaded.model,
        loaded.tokenizer,
        **chosen,
        batch_size=batch_size,
        layer=_layer(layer),
        weight_decay=weight_decay,
        alpha=alpha,
        space=space,
        temperature=temperature,
        tune="cv" if tune else None,
        random_state=seed,
    ).fit(questions)
    coral = steered.coral_
    coral.save(out)
    (out / SETTINGS).write_text(json.dumps({"model": model, "length_norm": length_norm}, indent=1) + "\n", "utf-8")
    print(
        f"fitted on {len(questions)} questions: layer {coral.layer_}, weight decay {coral.weight_decay_:g}, "
        f"strength {coral.alpha_:g}, temperature {coral.temperature_:.2f}"
    )
    print(f"wrote {out}")


@app.command()
def apply(
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="JSON Lines: question and options; answers are compared with.", show_default=False
        ),
    ],
    coral: Annotated[Path, typer.Option(metavar="DIR", help="What fit wrote.")] = Path("coral"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the answers go, as JSON Lines.", show_default="the terminal"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with reliability diagrams.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Hub id or folder.", show_default="the one of fit")
    ] = None,
    batch_size: BatchSize = 16,
    device: Device = "cpu",
) -> None:
    """Answer questions with a fitted probe; where their answers are known, measure what it changed."""
    questions = read_questions(data, require_answer=False)
    settings = _settings(coral)
    fitted = Coral.load(coral)
    loaded = load_language_model(model or settings["model"], device=device)
    fitted.require_model(loaded.model)
    whole = CoralForMultipleChoice.with_fitted(
        fitted, loaded.model, loaded.tokenizer, length_norm=settings["length_norm"], batch_size=batch_size
    )
    known = [i for i, question in enumerate(questions) if question.answer is not None]
    if html is not None and not known:
        raise InputError(f"--html {html}: {data} has no answers to measure against")
    scores = whole.scorer(questions)
    steered, before = fitted.predict_proba(scores), fitted.base_proba(scores, temperature=1.0)
    lines = [
        json.dumps(
            {
                "question": question.question,
                "choice": question.choices[int(p.argmax())],
                "index": int(p.argmax()),
                "confidence": round(float(p.max()), 6),
                "probabilities": [round(float(x), 6) for x in p],
                "before": [round(float(x), 6) for x in b],
            },
            ensure_ascii=False,
        )
        for question, p, b in zip(questions, steered, before, strict=True)
    ]
    if out is None:
        print("\n".join(lines))
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {out}")
    if known:
        found = evaluate_scores(fitted, scores.take(known), np.array([questions[i].answer for i in known]))
        typer.echo(str(found), err=out is None)
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page(found, f"{data.name}, {loaded.name}"), encoding="utf-8")
            typer.echo(f"wrote {html}", err=out is None)


def page(evaluation: Evaluation, title: str) -> str:
    """Return a page that needs no network: the metrics as a table, and the reliability diagrams."""
    from html import escape

    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{m.base:.3f}</td><td>{m.steered:.3f}</td><td>{m.difference:+.3f}</td>"
        f"<td>{m.low:+.3f} to {m.high:+.3f}</td></tr>"
        for name, m in evaluation.metrics.items()
    )
    figure = evaluation.figure().to_html(full_html=False, include_plotlyjs=True)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>CORAL</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{padding:.2rem .8rem;text-align:right}</style></head><body>"
        f"<h1>CORAL: {escape(title)}</h1><p>{len(evaluation.y)} questions with answers. Intervals are 95 %, of the "
        "paired difference over questions.</p>"
        f"<table><tr><th></th><th>base</th><th>steered</th><th>difference</th><th>interval</th></tr>{rows}</table>"
        f"{figure}</body></html>\n"
    )


def _layer(given: str) -> Any:
    if given == "auto":
        return given
    try:
        layers = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise InputError(f"--layer {given}: must be auto, a whole number, or several with commas") from None
    return layers[0] if len(layers) == 1 else layers


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return {"model": settings["model"], "length_norm": settings["length_norm"]}
    except OSError as error:
        raise InputError(f"--coral {folder}: cannot read {path.name}: {error.strerror}; run fit first") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"--coral {folder}: {path.name} is not what fit writes") from None
