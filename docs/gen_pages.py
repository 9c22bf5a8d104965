"""Makes one page for each method while the site is built: from its card, its docstrings and its recorded results.

mkdocs-gen-files runs this file. No number on these pages is typed by hand: what was measured is read from
``results/``, and a method without a recorded result says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import griffe

from practicum.catalog import Card, Catalog
from practicum.checks.check import RULES, SCALES
from practicum.checks.results import ClaimResult, Result, Row, read_json, read_results
from practicum.checks.words import (
    MISSING,
    bytes_in_words,
    deviation,
    metric_name,
    plural,
    seconds_in_words,
    three_digits,
)

RESULTS = Path(__file__).resolve().parents[1] / "results"
LITERALS = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {mark: f"\\{mark}" for mark in "\\`*_|[]"}


def method_page(card: Card, results: Path = RESULTS) -> str:
    """Write the page of one method in Markdown.

    Parameters
    ----------
    card : Card
    results : Path
        Folder of the recorded results; ratios to other implementations are in its ``benchmarks/<method>.json``.

    Returns
    -------
    str
        Markdown, with the directives of mkdocstrings for the method's public names.
    """
    recorded = recorded_results(card.name, results)
    parts = [
        f"# {card.title}",
        card.summary,
        facts(card),
        "## What the paper claims, and what was measured",
        *([claims_only(card)] if not recorded else [section(result) for result in recorded]),
        benchmarks(results / "benchmarks" / f"{card.name}.json"),
        own_work(card),
        "## Limits",
        "\n".join(f"- {limit}" for limit in card.limits) or "None are stated.",
        "## Reference",
        *(f"::: {path}\n    options:\n      heading_level: 3" for path in public_paths(card)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def recorded_results(method: str, results: Path) -> list[Result]:
    """Return the recorded results of a method on its embedded default, the largest scale first."""
    if not results.is_dir():
        return []
    found = [result for result in read_results(results) if result.method == method and not on_own_work(result)]
    return sorted(found, key=lambda result: SCALES.index(result.scale), reverse=True)  # type: ignore[arg-type]


def on_own_work(result: Result) -> bool:
    """Whether someone's own model or data was measured."""
    return bool(result.request.get("model") or result.request.get("data"))


def facts(card: Card) -> str:
    """Where the paper and the code are, which tools the method is a part for, and how to install it."""
    paper = card.paper
    if paper.startswith("arXiv:"):
        paper = f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"
    rows = [("Paper", paper), ("Authors' code", f"<{card.code}>" if card.code else "none that we know of")]
    rows += [("Field", card.field), ("A part for", ", ".join(card.hosts)), ("Install", f"`{card.install}`")]
    needs = [extra for extra in card.check_needs if extra != card.extra]
    check = f"`practicum check {card.name}`"
    if needs:
        check += f", which also needs `pip install 'practicum[{','.join(needs)}]'`"
    return table(["", ""], [*rows, ("Check", check)])


def claims_only(card: Card) -> str:
    """The claims as the card states them, for a method that has no recorded result."""
    rows = [(cell(claim.text), "not recorded yet") for claim in card.claims]
    return "No result of this method is recorded yet.\n\n" + table(["Claim", "Verdict"], rows)


def section(result: Result) -> str:
    """One recorded result: its verdicts, the mean of every metric by arm, and what ran it."""
    parts = [
        f"### At the {result.scale} scale",
        f"Recorded on {day(result)} with {plural(len(result.seeds), 'seed')}{machine(result)}.",
        verdict_table([result]),
        *(f"!!! note\n    {remark}" for remark in result.remarks),
        f'??? info "Every arm: mean over seeds ± standard deviation"\n\n{indented(arm_table(result))}',
        f'??? info "What ran: versions, time and memory"\n\n{indented(what_ran(result))}',
    ]
    return "\n\n".join(parts)


def verdict_table(results: Sequence[Result], *, with_method: bool = False) -> str:
    """Write the claims with their verdicts as a table.

    Parameters
    ----------
    results : sequence of Result
    with_method : bool
        Whether the first column is the method, for a table over several.
    """
    head = ["Claim", "Measured", "Asked", "Effect (95 % interval)", "Seeds", "Verdict"]
    rows: list[tuple[str, ...]] = []
    for result in results:
        for claim in result.claims:
            row = (cell(claim.text), what(claim), asked(claim), effect(claim), str(claim.n or MISSING), verdict(claim))
            rows.append((f"{result.method} ({result.scale})", *row) if with_method else row)
    return table(["Method", *head] if with_method else head, rows)


def what(claim: ClaimResult) -> str:
    """What is compared, such as ``recall@10: lemur against muvera``."""
    against = f" against {cell(' or '.join(claim.against))}" if claim.against else ""
    return f"{cell(metric_name(claim.metric))}: {cell(claim.arm)}{against}"


def asked(claim: ClaimResult) -> str:
    """The margin that was stated beforehand, in words."""
    unit = "×" if claim.rule.startswith("ratio_") else ""
    space = "" if claim.rule == "within" else " "
    return f"{RULES[claim.rule]}{space}{three_digits(claim.margin, exact=True)}{unit}"


def effect(claim: ClaimResult) -> str:
    """The effect and its interval, on the scale of the rule."""
    if claim.effect is None:
        return MISSING
    text = three_digits(claim.effect) + ("×" if claim.rule.startswith("ratio_") else "")
    if claim.low is None or claim.high is None:
        return text
    return f"{text} ({three_digits(claim.low)} to {three_digits(claim.high)})"


def verdict(claim: ClaimResult) -> str:
    """The verdict, with the reason where there is one."""
    return f"**{claim.verdict}**" + (f": {cell(claim.reason)}" if claim.reason else "")


def arm_table(result: Result) -> str:
    """Every metric of every arm: the mean over seeds and its standard deviation."""
    metrics = list(dict.fromkeys(name for row in result.rows for name in (*row.metrics, *row.missing)))
    arms = [arm for arm in result.arms if any(row.arm == arm and row.metrics for row in result.rows)]
    rows = [
        (cell(metric_name(metric)), *(mean_and_deviation(result.rows, arm, metric) for arm in arms))
        for metric in metrics
    ]
    silent = [f"- {cell(arm)}: {cell(why_silent(result.rows, arm))}" for arm in result.arms if arm not in arms]
    notes = dict.fromkeys(f"- {cell(row.arm)}: {cell(note)}" for row in result.rows for note in row.notes)
    lists = [block for block in ("\n".join(silent), "\n".join(notes)) if block]
    return "\n\n".join([table(["", *map(cell, arms)], rows), *lists])


def mean_and_deviation(rows: Iterable[Row], arm: str, metric: str) -> str:
    """Such as ``0.913 ± 0.004``; a dash where no seed measured it."""
    values = [row.metrics[metric] for row in rows if row.arm == arm and metric in row.metrics]
    if not values:
        return MISSING
    mean = three_digits(statistics.fmean(values))
    return f"{mean} ± {deviation(statistics.stdev(values))}" if len(values) > 1 else mean


def why_silent(rows: Iterable[Row], arm: str) -> str:
    """Why an arm gave no number."""
    for row in rows:
        if row.arm == arm:
            reasons = [(row.error or {}).get("message", ""), *row.missing.values()]
            return f"{row.status}: {next(filter(None, reasons), 'no reason given')}"
    return "did not run"


def what_ran(result: Result) -> str:
    """The machine, the versions, and the time and memory of every arm."""
    by_arm: list[tuple[str, ...]] = []
    for arm in result.arms:
        used = [row.resources for row in result.rows if row.arm == arm and row.status == "ok"]
        seconds = [took for resources in used if (took := resources.get("seconds")) is not None]
        memory = [peak for resources in used if (peak := resources.get("peak_memory_bytes")) is not None]
        time = seconds_in_words(statistics.median(seconds)) if seconds else MISSING
        by_arm.append((cell(arm), time, bytes_in_words(max(memory)) if memory else MISSING))
    facts = [(cell(name), cell(value)) for name, value in flat(result.run)]
    return "\n\n".join([table(["Arm", "Time a seed", "Peak memory"], by_arm), table(["", ""], facts)])


def flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested facts as pairs of name and text."""
    for key, value in mapping.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}: ")
        elif key.endswith("_bytes") and value is not None:
            yield name.removesuffix(" bytes"), bytes_in_words(value)
        else:
            yield name, MISSING if value is None else str(value)


def machine(result: Result) -> str:
    """Where it ran, such as `` on 2 cores (...)``."""
    facts = result.run.get("machine") or {}
    cores, processor = facts.get("cores"), facts.get("processor")
    if not cores:
        return ""
    return f" on {plural(cores, 'core')}" + (f" ({cell(processor)})" if processor else "")


def day(result: Result) -> str:
    """The day the run ended, YYYY-MM-DD."""
    return str(result.run.get("finished") or result.run.get("started") or "an unknown day")[:10]


def benchmarks(path: Path) -> str:
    """Ratios to other implementations of the same method, measured in one run each; nothing where none are recorded."""
    if not path.is_file():
        return ""
    content = read_json(path)
    ratios = content.get("ratios", []) if isinstance(content, Mapping) else content
    heads = list(dict.fromkeys(key for entry in ratios for key in entry))
    rows = [tuple(cell(measured(entry.get(head))) for head in heads) for entry in ratios]
    lead = (
        "Ratios compare two implementations in one run on one machine; times of different runs are never compared. "
        "Seconds and bytes are of the machine that is named in the recorded file."
    )
    return "\n\n".join(["## Speed and memory", lead, table([metric_name(head) for head in heads], rows)])


def measured(value: Any) -> str:
    """A recorded value as text: numbers to three digits, lists joined."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: MISSING}[value]
    if isinstance(value, int | float):
        return three_digits(float(value))
    if isinstance(value, list):
        return " to ".join(measured(item) for item in value)
    return str(value)


def own_work(card: Card) -> str:
    """How to run the check on one's own model and data."""
    rows = [("`--data`", cell(card.data_format)), ("`--model`", cell(card.model_format))]
    rows += [(f"`--{option.name}`", cell(option.help)) for option in card.options]
    lines = ["## On your own work", table(["Option", "What it takes"], [row for row in rows if row[1]])]
    if card.program:
        lines.append(f"The method is also a program: `practicum run {card.name} --help`.")
    return "\n\n".join(lines)


def public_paths(card: Card) -> list[str]:
    """Return the dotted paths where the room's public names are defined, read from its source without importing it."""
    source_root = card.path.resolve().parents[card.module.count(".") + 1]
    room = griffe.load(card.module, search_paths=[source_root])
    if not room.exports:
        raise ValueError(f"{card.module} must define __all__ as a list of names")
    names = [str(name) for name in room.exports]
    return [getattr(room.members[name], "target_path", f"{card.module}.{name}") for name in names]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(text: object) -> str:
    """Text that may stand in a table: on one line, its mark-up characters taken literally."""
    plain = " ".join(str(text).split())
    for character, literal in LITERALS.items():
        plain = plain.replace(character, literal)
    return plain


def indented(text: str) -> str:
    """Indent by four spaces, as the body of a block."""
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


def write_pages() -> None:
    """Write the pages into the site being built, and the overview of all methods."""
    import mkdocs_gen_files

    cards = list(Catalog())
    for card in cards:
        with mkdocs_gen_files.open(f"methods/{card.name}.md", "w") as page:
            page.write(method_page(card))
    with mkdocs_gen_files.open("methods/index.md", "w") as page:
        page.write(overview(cards))
    with mkdocs_gen_files.open("command-line.md", "a") as page:
        page.write(command_line())


def command_line() -> str:
    """Every command with its arguments and options, as the command line itself describes them."""
    import typer

    from practicum.cli import app

    parts = ["## Commands"]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        described = " ".join((command.help or "").split())
        usage = " ".join(["practicum", name, *(usage_of(parameter) for parameter in command.params)])
        parts += [f"### practicum {name}", cell(described), f"```text\n{usage}\n```"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "debug"]
        rows = [(f"`{p.opts[0]}`", cell(p.help or ""), default_of(p)) for p in options]
        parts += [table(["Option", "What it does", "Default"], rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def usage_of(parameter: Any) -> str:
    """An argument or option as it stands in a usage line."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return f"[{parameter.opts[0]}{value}]"


def default_of(option: Any) -> str:
    """The default of an option, as a reader would type it."""
    if isinstance(option.show_default, str):
        return option.show_default
    return "" if option.is_flag or option.default is None else f"`{option.default}`"


def overview(cards: Sequence[Card], results: Path = RESULTS) -> str:
    """All methods in one table, and all recorded verdicts in another."""
    rows = [(f"[{card.name}]({card.name}.md)", card.field, cell(card.summary), ", ".join(card.hosts)) for card in cards]
    recorded = [result for card in cards for result in recorded_results(card.name, results)[:1]]
    verdicts = verdict_table(recorded, with_method=True) if recorded else "No result is recorded yet."
    return (
        "\n\n".join(
            [
                "# Methods",
                table(["Method", "Field", "What it does", "A part for"], rows),
                "## Recorded verdicts",
                "The largest scale that is recorded for each method. What the words mean: "
                "[How a claim is checked](../how-a-claim-is-checked.md).",
                verdicts,
            ]
        )
        + "\n"
    )


if __name__ == "<run_path>":
    write_pages()
