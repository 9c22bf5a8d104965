"""The program: ``practicum run shotkv bench`` says which tasks break when the cache is compressed, and by what."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from practicum.models import load_language_model
from practicum.serving.shotkv.bench import METHODS, KVFundaBench, kvfundabench
from practicum.serving.shotkv.figures import write_bench_page
from practicum.serving.shotkv.tasks import TASKS, ShotItem, read_shot_items, shot_items
from practicum.toolbox.errors import InputError

app = typer.Typer(
    help="Find out what compressing the KV cache costs which task.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Maker = Callable[[int], Sequence[ShotItem]]


@app.callback()
def shotkv() -> None:
    """Find out what compressing the KV cache costs which task."""


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Hub id or folder.", show_default="the embedded model")
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="NAMES", help="Generated tasks, or files of prompts in JSON Lines, with commas.")
    ] = ",".join(TASKS),
    methods: Annotated[str, typer.Option(metavar="NAMES", help="With commas.")] = ",".join(METHODS),
    ratios: Annotated[str, typer.Option(metavar="SHARES", help="Of the units' tokens that are kept.")] = "0.5,0.25,0.1",
    seeds: Annotated[int, typer.Option(metavar="N", help="Sets of prompts.")] = 3,
    items: Annotated[int, typer.Option(metavar="N", help="Questions of each generated task and seed.")] = 8,
    shots: Annotated[int, typer.Option(metavar="N", help="Units of a generated prompt.")] = 16,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results and the page go.")] = Path("shotkv-bench"),
    device: Annotated[str, typer.Option(metavar="DEVICE", help="A torch device.")] = "cpu",
) -> None:
    """Measure tasks, methods and ratios; interrupted, the same command goes on where it was."""
    named = _split(tasks)
    own = {Path(name).stem: read_shot_items(name) for name in named if name not in TASKS}
    shares = _shares(ratios)
    loaded = load_language_model(model, device=device)
    out.mkdir(parents=True, exist_ok=True)
    result = out / "bench.json"
    done = KVFundaBench.load(result) if result.exists() else KVFundaBench()
    generated = [name for name in named if name in TASKS]
    total = seeds * (len(generated) + len(own))
    with Progress(console=Console(stderr=True), disable=not Console(stderr=True).is_terminal) as progress:
        bar = progress.add_task("tasks", total=total)
        for found in kvfundabench(
            loaded.model,
            loaded.tokenizer,
            {**_makers(generated, items, shots), **{name: _given(of) for name, of in own.items()}},
            _split(methods),
            shares,
            seeds,
            done=done,
        ):
            found.save(result)
            progress.advance(bar)
    write_bench_page(out / "bench.html", done, title=f"What compression costs {loaded.name}")
    _print(done)
    print(f"wrote {result} and {out / 'bench.html'}")


def _makers(names: Sequence[str], items: int, shots: int) -> dict[str, Maker]:
    return {name: _generated(name, items, shots) for name in names}


def _generated(name: str, items: int, shots: int) -> Maker:
    return lambda seed: shot_items(name, items, shots, random_state=seed)


def _given(items: list[ShotItem]) -> Maker:
    return lambda seed: items


def _split(names: str) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise InputError(f"{names!r}: names nothing")
    return found


def _shares(ratios: str) -> list[float]:
    try:
        return [float(ratio) for ratio in _split(ratios)]
    except ValueError:
        raise InputError(f"--ratios {ratios}: must be numbers with commas") from None


def _print(bench: KVFundaBench) -> None:
    by_method: dict[tuple[str, float], dict[str, float]] = defaultdict(dict)
    for method, ratio in bench.methods:
        for task in bench.tasks:
            by_method[method, ratio][task] = bench.change(task, method, ratio)
    width = max(len(f"{m} {r:.0%}") for m, r in by_method)
    print(" ".join([" " * width, *(f"{task:>9}" for task in bench.tasks)]))
    for (method, ratio), changes in by_method.items():
        cells = ["–" if math.isnan(changes[task]) else f"{changes[task]:+.0%}" for task in bench.tasks]
        print(" ".join([f"{method} {ratio:.0%}".ljust(width), *(f"{cell:>9}" for cell in cells)]))
