"""The command line: ``practicum list | show | check | report | run | new``.

Nothing here imports a method, numpy or torch before a command needs it: `list` and `show` read cards alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import practicum
from practicum.catalog import FIELDS, Card, CardError, Catalog, UnknownMethod
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import MissingExtra

if TYPE_CHECKING:
    from practicum.checks.results import Result

COULD_NOT_RUN, BAD_USAGE, INTERRUPTED = 1, 2, 130
DOCS = "https://practicum.readthedocs.io/methods"
DEFAULT_OUT = Path("practicum-results")

app = typer.Typer(
    name="practicum",
    help="Methods of ICML 2026 papers as parts of your tools, and a check of what the papers claim.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_catalog = Catalog()


def main(arguments: Sequence[str] | None = None, catalog: Catalog | None = None) -> NoReturn:
    """Run the command line and exit.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``sys.argv[1:]`` by default.
    catalog : Catalog, optional
        The rooms to choose from; those of this package by default.
    """
    global _catalog
    given = list(sys.argv[1:] if arguments is None else arguments)
    previous, _catalog = _catalog, catalog or _catalog
    try:
        code = app(args=given, prog_name="practicum", standalone_mode=False)
    except Exception as error:
        if "--debug" in given:
            raise
        code = _explain(error)
    finally:
        _catalog = previous
    raise SystemExit(code or 0)


def _explain(error: Exception) -> int:
    """One line on stderr for what the user can mend, and the exit code. Anything else is a defect and is raised."""
    from practicum.checks.results import ResultError

    usage = (UnknownMethod,)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        print(f"practicum: {error.format_message()}", file=sys.stderr)
        return BAD_USAGE
    if isinstance(error, (InputError, MissingExtra, CardError, ResultError, *usage)):
        print(f"practicum: {_one_line(error)}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, usage) or getattr(error, "usage", False) else COULD_NOT_RUN
    raise error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error.args[0] if error.args else error).split())


def _complete_methods(incomplete: str) -> list[tuple[str, str]]:
    return [(card.name, card.title) for card in _catalog if card.name.startswith(incomplete)]


def _complete_fields(incomplete: str) -> list[str]:
    return [field for field in FIELDS if field.startswith(incomplete)]


Method = Annotated[str, typer.Argument(metavar="METHOD", autocompletion=_complete_methods)]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the result files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a machine to read.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(f"practicum {practicum.__version__}")
        raise typer.Exit()


@app.command("list")
def list_methods(
    field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Only this field.", autocompletion=_complete_fields)
    ] = None,
    out: Out = DEFAULT_OUT,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the methods: field, what each is, its claims and the last verdicts."""
    if field is not None and field not in FIELDS:
        raise typer.BadParameter(f"{field!r} is none of {', '.join(FIELDS)}", param_hint="--field")
    cards = [card for card in _catalog if field in (None, card.field)]
    latest = {card.name: _latest(card, out) for card in cards}
    if as_json:
        rows = [
            {
                "method": card.name,
                "field": card.field,
                "title": card.title,
                "summary": card.summary,
                "claims": [{"id": claim.id, "text": claim.text} for claim in card.claims],
                "last": latest[card.name],
            }
            for card in cards
        ]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("method", "field", "what it is"):
        table.add_column(heading)
    table.add_column("claims", justify="right")
    table.add_column("last verdicts")
    for card in cards:
        table.add_row(card.name, card.field, card.summary, str(len(card.claims)), _told(latest[card.name]))
    _console().print(table)


def _latest(card: Card, out: Path) -> dict[str, Any] | None:
    """The verdicts of the newest result: the user's own if there is one, else the recorded one."""
    from practicum.checks.results import ResultError, read_result

    for folder in (out, recorded_results()):
        results = []
        for path in folder.glob(f"{card.name}-*.json") if folder else ():
            try:
                result = read_result(path)
            except ResultError:
                continue
            if result.method == card.name:
                results.append(result)
        if results:
            newest = max(results, key=lambda result: str(result.run.get("finished", "")))
            return {
                "scale": newest.scale,
                "finished": newest.run.get("finished"),
                "verdicts": {claim.claim: claim.verdict for claim in newest.claims},
            }
    return None


def recorded_results() -> Path | None:
    """Folder of the results recorded with this version, from the wheel or the checkout; None where there is none."""
    package = Path(__file__).parent
    for folder in (package / "recorded", package.parent.parent / "results"):
        if folder.is_dir():
            return folder
    return None


def _told(latest: dict[str, Any] | None) -> str:
    if latest is None:
        return "not checked yet"
    verdicts = list(latest["verdicts"].values())
    counts = [
        (word, sum(verdict == kind for verdict in verdicts))
        for kind, word in (
            ("holds", "hold"),
            ("does not hold", "do not"),
            ("inconclusive", "inconclusive"),
            ("could not measure", "not measured"),
        )
    ]
    told = ", ".join(f"{count} {word}" for word, count in counts if count)
    return f"{told} ({latest['scale']}, {str(latest['finished'])[:10]})"


@app.command()
def show(method: Method, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show a method's card: its claims, what --model and --data accept, and what to install."""
    card = _catalog[method]
    if as_json:
        import dataclasses

        print(json.dumps({**dataclasses.asdict(card), "path": str(card.path)}, indent=1, ensure_ascii=False))
        return
    from rich.padding import Padding

    console = _console()

    def section(heading: str, *lines: str) -> None:
        if any(lines):
            console.print(f"\n{heading}", style="bold", markup=False)
            for line in lines:
                console.print(Padding(line, (0, 0, 0, 2)), markup=False)

    console.print(card.title, style="bold", markup=False)
    console.print(card.summary, markup=False)
    section("Claims", *(f"{claim.id}: {claim.text}" for claim in card.claims))
    section("Paper", card.paper)
    section("Authors' code", card.code)
    section("A part for", ", ".join(card.hosts))
    section("Install", card.install)
    section("--data", card.data_format)
    section("--model", card.model_format)
    section("Options", *(f"--{option.name}: {option.help}" for option in card.options))
    section("Limits", *card.limits)
    section("Check it", f"practicum check {card.name} --scale quick")
    section("Documentation", f"{DOCS}/{card.name}/")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    methods: Annotated[
        list[str] | None, typer.Argument(metavar="METHOD...", autocompletion=_complete_methods, show_default=False)
    ] = None,
    all_methods: Annotated[bool, typer.Option("--all", help="Check every method.")] = False,
    scale: Annotated[str, typer.Option(metavar="SCALE", help="quick (<= 60 s), full (<= 30 min) or paper.")] = "quick",
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Number of seeds.", show_default="by scale")] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Your model: see `practicum show`.")] = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="Your data: see `practicum show`.")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="A torch device.")] = "cpu",
    backend: Annotated[str, typer.Option(metavar="NAME", help="loky (this machine), dask or ray.")] = "loky",
    address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address of the Dask or Ray cluster.")] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Tasks at a time.", show_default="all cores")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail also when a claim does not hold.")] = False,
    out: Out = DEFAULT_OUT,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write these results as a page.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure what the papers claim, side by side with the baselines, over several seeds.

    Exit code 0: every arm ran; 1: something could not run; 2: bad usage.
    """
    names, given = _split_options(methods or [])
    if not names and not all_methods:
        raise typer.BadParameter("name a method, or give --all", param_hint="METHOD...")
    if names and all_methods:
        raise typer.BadParameter("give methods or --all, not both", param_hint="--all")
    cards = list(_catalog) if all_methods else [_catalog[name] for name in dict.fromkeys(names)]
    _known_options(cards, given)
    results, failed = [], False
    for card in cards:
        own = {name: value for name, value in given.items() if name in {option.name for option in card.options}}
        try:
            with _progress(card.name) as listener:
                from practicum.checks.runner import run_check

                results.append(
                    run_check(
                        card,
                        _catalog.load_check(card),
                        scale=scale,  # type: ignore[arg-type]
                        seeds=seeds,
                        model=model,
                        data=data,
                        device=device,
                        options=own,
                        backend=backend,  # type: ignore[arg-type]
                        address=address,
                        jobs=jobs,
                        out=out,
                        listener=listener,
                    )
                )
        except KeyboardInterrupt:
            print("\npracticum: interrupted; what is finished is kept, the same command goes on.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if debug or len(cards) == 1:
                raise
            code = _explain(error)
            if code == BAD_USAGE:
                raise typer.Exit(code) from None
            failed = True
    failures = [row for result in results for row in result.rows if row.status == "failed"]
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=1, ensure_ascii=False))
    elif results:
        _print_claims(results)
        _print_failures(results)
    if html is not None and results:
        from practicum.checks.report import write_report

        write_report(results, html)
        print(f"wrote {html}", file=sys.stderr)
    if failures or failed:
        raise typer.Exit(COULD_NOT_RUN)
    verdicts = [claim.verdict for result in results for claim in result.claims]
    if strict and any(verdict == "does not hold" for verdict in verdicts):
        raise typer.Exit(COULD_NOT_RUN)


def _split_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate names of methods from ``--name value`` and ``--name=value`` options that only methods know."""
    names: list[str] = []
    given: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            names.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        following = value if equals else next(rest, None)
        if following is None:
            raise typer.BadParameter("needs a value", param_hint=argument)
        given[name] = following
    return names, given


def _known_options(cards: Sequence[Card], given: dict[str, str]) -> None:
    known = {option.name: card.name for card in cards for option in card.options}
    for name in given:
        if name not in known:
            there = ", ".join(f"--{option} ({method})" for option, method in known.items()) or "none"
            raise typer.BadParameter(
                f"no such option; of their own, the methods named have: {there}", param_hint=f"--{name}"
            )


@contextmanager
def _progress(method: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, plain lines elsewhere; both only for work of more than two seconds, and on stderr."""
    started = time.monotonic()
    if not sys.stderr.isatty():
        last = started

        def plain(done: int, total: int, text: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= 2:
                last = now
                print(f"{method}: {done}/{total}, {now - started:.0f} s, {text}", file=sys.stderr, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[method]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("starting", total=None, method=method)

    def drawn(done: int, total: int, text: str) -> None:
        bar.update(task, completed=done, total=total, description=text)
        if time.monotonic() - started >= 2 and not bar.live.is_started:
            bar.start()

    try:
        yield drawn
    finally:
        bar.stop()


@app.command()
def report(
    methods: Annotated[
        list[str] | None, typer.Argument(metavar="[METHOD...]", autocompletion=_complete_methods, show_default=False)
    ] = None,
    out: Out = DEFAULT_OUT,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the verdicts of all results in a folder, and write them as one HTML page that needs no network."""
    from practicum.checks.report import write_report
    from practicum.checks.results import read_results

    wanted = [_catalog[name].name for name in methods or ()]
    results = [result for result in read_results(out) if not wanted or result.method in wanted]
    if not results:
        there = "no results" if not wanted else f"no results of {', '.join(wanted)}"
        raise InputError(f"--out {out}: {there} there; run `practicum check` first")
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=1, ensure_ascii=False))
    else:
        _print_claims(results)
    write_report(results, html)
    print(f"wrote {html}", file=sys.stderr)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def run(context: typer.Context, method: Method) -> None:
    """Run a method that is a program; what follows its name are the program's own arguments."""
    import importlib

    card = _catalog[method]
    if not card.program:
        programs = ", ".join(card.name for card in _catalog if card.program) or "none yet"
        raise typer.BadParameter(f"{method} is not a program; programs are: {programs}", param_hint="METHOD")
    from practicum.toolbox.extras import requires

    module, _, attribute = card.program.partition(":")
    with requires(card.extra, card.name):
        program = getattr(importlib.import_module(module), attribute)
    code = program(args=context.args, prog_name=f"practicum run {method}", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


@app.command()
def new(
    room: Annotated[str, typer.Argument(metavar="FIELD/METHOD", help="Where the method is to live.")],
    root: Annotated[Path, typer.Option(metavar="DIR", help="The checkout.")] = Path(),
    debug: Debug = False,
) -> None:
    """Start a method: write its room in this checkout, with tests that fail until it is there."""
    from practicum.scaffold import new_room

    field, slash, name = room.partition("/")
    if not slash:
        raise typer.BadParameter(f"{room!r} is not FIELD/METHOD", param_hint="FIELD/METHOD")
    for path in new_room(field, name, root):
        print(path)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=160)


VERDICT_STYLES = {
    "holds": "green",
    "does not hold": "red",
    "inconclusive": "yellow",
    "could not measure": "magenta",
}


def _print_claims(results: Sequence[Result]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("method", "claim", "verdict", "effect", "95 % interval", "must be"):
        table.add_column(heading, overflow="fold")
    table.add_column("seeds", justify="right")
    table.add_column("scale")
    for result in results:
        for claim in result.claims:
            measured = claim.effect is not None
            table.add_row(
                result.method,
                Text(claim.claim),
                Text(claim.verdict, style=VERDICT_STYLES[claim.verdict]),
                Text(f"{claim.effect:.3g}{_unit(claim.rule)}" if measured else claim.reason),
                f"{claim.low:.3g} to {claim.high:.3g}" if claim.low is not None and claim.high is not None else "",
                f"{_sign(claim.rule)} {claim.margin:.3g}",
                str(claim.n or ""),
                result.scale,
            )
    _console().print(table)
    for result in results:
        for remark in result.remarks:
            print(f"{result.method}: {remark}")


def _unit(rule: str) -> str:
    return "x" if rule.startswith("ratio_") else ""


def _sign(rule: str) -> str:
    return {"least": ">=", "most": "<=", "above": ">", "within": "+-"}[rule.rpartition("_")[2]]


def _print_failures(results: Sequence[Result]) -> None:
    told = set()
    for result in results:
        for row in result.rows:
            if row.status == "ok" or row.error is None or (result.method, row.arm) in told:
                continue
            told.add((result.method, row.arm))
            print(f"{result.method}: the arm {row.arm} {row.status}: {_one_line(Exception(row.error['message']))}")


if __name__ == "__main__":
    main()
