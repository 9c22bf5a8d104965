"""Draws results as one self-contained HTML page: a table over all claims first, then a section for each method.

The page asks the network for nothing: styles, scripts and the plotting library are inside it. It is made from the
results alone, so that a method need not be installed to report on it, and the same results give the same page.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from practicum import __version__
from practicum.checks.figures import Figure, curve_plot, mark, paired_plot, trade_off_plots
from practicum.checks.results import ClaimResult, Result, Row, write_text
from practicum.checks.words import (
    MISSING,
    base_name,
    bytes_in_words,
    deviation,
    finite,
    metric_name,
    plural,
    seconds_in_words,
    three_digits,
)

# Verdict to the name its colours and its icon have in the templates.
VERDICTS = {"holds": "holds", "does not hold": "fails", "inconclusive": "open", "could not measure": "none"}


def render_report(results: Sequence[Result], *, title: str = "practicum report") -> str:
    """Draw results as one HTML page that needs nothing but itself.

    Parameters
    ----------
    results : sequence of Result
        In the order in which they are to appear. May be empty: the page says so then.
    title : str
        The heading of the page.

    Returns
    -------
    str
        The page, about 5 MB of it the plotting library.

    Examples
    --------
    >>> page = render_report([], title="Nothing yet")
    >>> "Nothing yet" in page, "No results" in page
    (True, True)
    """
    environment = Environment(
        loader=PackageLoader("practicum.checks", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures: dict[str, Figure] = {}
    methods = [_section(result, f"m{number}", figures) for number, result in enumerate(results, 1)]
    return environment.get_template("report.html.j2").render(
        title=title,
        version=__version__,
        dates=_span([method.date for method in methods]),
        methods=methods,
        tally=_tally(methods),
        style=_asset("report.css"),
        dark_style=_asset("dark.css"),
        theme_script=_asset("theme.js"),
        script=_asset("report.js"),
        plotly=Markup(get_plotlyjs()) if figures else "",
        figures=_embed(figures),
    )


def write_report(results: Sequence[Result], path: str | Path, *, title: str = "practicum report") -> None:
    """Draw results into a file, which holds either its old content or all of the new, whatever happens.

    Parameters
    ----------
    results : sequence of Result
    path : path
        The HTML file. Its folder is made where it is missing.
    title : str
        The heading of the page.

    Raises
    ------
    ResultError
        When the folder cannot be made or written to, or the disk is full. The old file is untouched then.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report([], Path(folder) / "report.html")
    ...     (Path(folder) / "report.html").read_text()[:15]
    '<!doctype html>'
    """
    write_text(Path(path), render_report(results, title=title))


@dataclass
class Section:
    """One result, as the page shows it."""

    id: str
    method: str
    field: str
    title: str
    scale: str
    seeds: str
    date: str
    claims: list[Claim]
    trade_offs: list[Plot]
    curves: list[Plot]
    arms: list[Arm]
    has_device_memory: bool
    metric_arms: list[str]
    metric_groups: list[MetricGroup]
    remarks: list[str]
    failures: list[Failure]
    gaps: list[Gap]
    details: list[tuple[str, list[tuple[str, str]]]]


@dataclass
class Claim:
    """One claim with its verdict in words, its numbers, its interval and its plot."""

    id: str
    text: str
    what: str
    verdict: str
    kind: str
    effect: str
    interval: str
    method_of_interval: str
    demand: str
    n: int
    reason: str
    drawing: Drawing | None
    plot: Plot | None
    pairs: list[tuple[str, str, str, str, str]]
    has_baseline: bool


@dataclass
class Drawing:
    """An interval on a line of `Drawing.width` units, ready to be drawn."""

    low: float
    high: float
    effect: float
    low_open: bool
    high_open: bool
    margins: list[float]
    null: float | None
    wanted: tuple[float, float] | None
    labels: list[tuple[float, str, str]]
    width: ClassVar[int] = 232
    edge: ClassVar[int] = 12


@dataclass
class Plot:
    """Where a figure goes: its id among the figures, what it shows in words, and what stands above it.

    ``legend`` has the name of each arm with the number of its colour and its symbol.
    """

    id: str
    label: str
    caption: str
    legend: list[tuple[str, int, str]] = field(default_factory=list)


@dataclass
class Arm:
    """How one arm fared and what it used."""

    name: str
    status: str
    kind: str
    why: list[str]
    seconds: str
    cpu_seconds: str
    peak_memory: str
    added_memory: str
    device_memory: str
    notes: list[str]


@dataclass
class MetricGroup:
    """Metrics of one name that differ in a setting (``recall@10`` and ``recall@20``); ``name`` is "" for the rest."""

    name: str
    rows: list[tuple[str, str, list[Cell]]]


@dataclass
class Cell:
    """Mean and standard deviation over seeds of one metric of one arm; how many seeds, where not all; why none."""

    mean: str
    deviation: str = ""
    seeds: str = ""
    reason: str = ""


@dataclass
class Failure:
    """An arm that raised."""

    arm: str
    message: str
    traceback: str
    seeds: list[int]


@dataclass
class Gap:
    """Metrics of an arm that could not be measured, with the reason they share."""

    arm: str
    metrics: list[str]
    reason: str
    seeds: list[int] = field(default_factory=list)


def _section(result: Result, id: str, figures: dict[str, Figure]) -> Section:
    metric_arms, metric_groups = _metric_table(result)
    return Section(
        id=id,
        method=result.method,
        field=result.field,
        title=result.title,
        scale=result.scale,
        seeds=plural(len(result.seeds), "seed"),
        date=_date(result.run),
        claims=[_claim(claim, f"{id}-c{n}", result, figures) for n, claim in enumerate(result.claims, 1)],
        trade_offs=_trade_offs(result, id, figures),
        curves=_curves(result, id, figures),
        arms=_arms(result),
        has_device_memory=any("peak_device_memory_bytes" in row.resources for row in result.rows),
        metric_arms=metric_arms,
        metric_groups=metric_groups,
        remarks=list(result.remarks),
        failures=_failures(result.rows),
        gaps=_gaps(result.rows),
        details=_details(result),
    )


def _tally(methods: Iterable[Section]) -> list[tuple[str, str, int]]:
    """How many claims have each verdict, in the order of the verdicts, as (verdict, kind, count)."""
    counts = dict.fromkeys(VERDICTS, 0)
    for method in methods:
        for claim in method.claims:
            counts[claim.verdict] = counts.get(claim.verdict, 0) + 1
    return [(verdict, VERDICTS.get(verdict, "none"), count) for verdict, count in counts.items()]


@dataclass(frozen=True)
class Rule:
    """How a rule of `practicum.checks.check.Comparison` is read: what it looks at and on which side it is met."""

    of: str
    side: str
    words: str


LABEL_WIDTH = 44

# How an interval was made, in words.
INTERVALS = {
    "t": "95 %, Student's t",
    "BCa": "95 %, bootstrap (BCa)",
    "percentile": "95 %, bootstrap (percentile)",
    "constant": "a point: all seeds agree",
    "one seed": "none from one seed",
}

RULES = {
    "difference_at_least": Rule("difference", "above", "at least "),
    "difference_above": Rule("difference", "above", "above "),
    "difference_at_most": Rule("difference", "below", "at most "),
    "ratio_at_least": Rule("ratio", "above", "at least "),
    "ratio_at_most": Rule("ratio", "below", "at most "),
    "within": Rule("difference", "inside", "within ±"),
    "value_at_least": Rule("value", "above", "at least "),
    "value_at_most": Rule("value", "below", "at most "),
}


def _claim(claim: ClaimResult, id: str, result: Result, figures: dict[str, Figure]) -> Claim:
    rule = RULES.get(claim.rule, Rule("value", "unknown", f"{claim.rule} "))
    against = " or ".join(claim.against)
    figure = paired_plot(claim, result.arms, log=rule.of == "ratio")
    plot = None
    if figure:
        beside = f" beside {against}" if against else ", with the margin as a line"
        log = " (log scale)" if figure["layout"]["yaxis"].get("type") == "log" else ""
        name = metric_name(claim.metric)
        plot = Plot(f"{id}-pairs", f"{name} of {claim.arm}{beside}, by seed", f"{name}{log}, by seed")
        figures[plot.id] = figure
    return Claim(
        id=id,
        text=claim.text or claim.claim,
        what=f"{metric_name(claim.metric)}: {claim.arm}" + (f" against {against}" if against else ""),
        verdict=claim.verdict,
        kind=VERDICTS.get(claim.verdict, "none"),
        effect=_effect(claim.effect, rule),
        interval=_interval_in_words(claim, rule),
        method_of_interval=INTERVALS.get(claim.interval, claim.interval),
        demand=f"{rule.of} {rule.words}{_margin(claim.margin, rule)}",
        n=claim.n,
        reason=claim.reason,
        drawing=_drawing(claim, rule),
        plot=plot,
        pairs=[_pair_in_words(pair, rule) for pair in claim.pairs],
        has_baseline=bool(claim.against),
    )


def _effect(x: float | None, rule: Rule, *, exact: bool = False) -> str:
    """Write an effect under this rule: signed for a difference, with a cross for a ratio."""
    text = three_digits(x, exact=exact)
    if rule.of == "ratio":
        return f"{text}×" if finite(x) else text
    return f"+{text}" if rule.of == "difference" and x is not None and x > 0 else text


def _margin(margin: float, rule: Rule) -> str:
    return three_digits(margin, exact=True) if rule.side == "inside" else _effect(margin, rule, exact=True)


def _interval_in_words(claim: ClaimResult, rule: Rule) -> str:
    if claim.effect is None or math.isnan(claim.effect):
        return ""
    if not finite(claim.low) and not finite(claim.high):
        return "unbounded"
    return f"{_effect(claim.low, rule)} to {_effect(claim.high, rule)}"


def _pair_in_words(pair: Mapping[str, Any], rule: Rule) -> tuple[str, str, str, str, str]:
    ours, theirs = _number(pair.get("arm")), _number(pair.get("against"))
    effect = ours
    if rule.of == "difference":
        effect = ours - theirs if ours is not None and theirs is not None else None
    elif rule.of == "ratio":
        effect = ours / theirs if ours is not None and theirs else None
    baseline = pair.get("baseline")
    return (
        str(pair.get("seed", MISSING)),
        three_digits(ours),
        three_digits(theirs),
        MISSING if baseline is None else str(baseline),
        _effect(effect, rule),
    )


def _drawing(claim: ClaimResult, rule: Rule) -> Drawing | None:
    """Place effect, interval and margin on a line (a log scale for a ratio); None where there is no effect to place."""

    def on_scale(x: float | None, otherwise: float) -> float:
        if x is None or not finite(x) or (rule.of == "ratio" and x <= 0):
            return otherwise
        return math.log(x) if rule.of == "ratio" else float(x)

    effect = on_scale(claim.effect, math.nan)
    low, high = on_scale(claim.low, -math.inf), on_scale(claim.high, math.inf)
    no_effect = {"ratio": 1.0, "difference": 0.0}.get(rule.of)
    null = on_scale(no_effect, math.nan)
    demands = [-claim.margin, claim.margin] if rule.side == "inside" else [claim.margin]
    demands = [demand for demand in demands if finite(on_scale(demand, math.nan))]
    margins = [on_scale(demand, math.nan) for demand in demands]
    if math.isnan(effect):
        return None
    anchors = [x for x in (effect, low, high, null, *margins) if finite(x)]
    slack = 0.12 * (max(anchors) - min(anchors)) or max(abs(effect), 1.0) * 0.5
    first, last = min(anchors) - slack, max(anchors) + slack

    def place(x: float) -> float:
        share = min(max((x - first) / (last - first), 0.0), 1.0)
        return round(Drawing.edge + share * (Drawing.width - 2 * Drawing.edge), 1)

    wanted = None
    if margins and rule.side != "unknown":
        start = -math.inf if rule.side == "below" else margins[0]
        wanted = (place(start), place(math.inf if rule.side == "above" else margins[-1]))
    labels = [
        _axis_label(place(x), _effect(demand, rule, exact=True)) for x, demand in zip(margins, demands, strict=True)
    ]
    if finite(null) and all(abs(place(null) - place(x)) > LABEL_WIDTH for x in margins):
        labels.append(_axis_label(place(null), _effect(no_effect, rule, exact=True)))
    return Drawing(
        low=place(low),
        high=place(high),
        effect=place(effect),
        low_open=math.isinf(low),
        high_open=math.isinf(high),
        margins=[place(x) for x in margins],
        null=place(null) if finite(null) else None,
        wanted=wanted,
        labels=labels,
    )


def _axis_label(x: float, text: str) -> tuple[float, str, str]:
    """Place, text and anchor of a label, which must not leave the drawing."""
    room = LABEL_WIDTH / 2
    anchor = "start" if x < room else "end" if x > Drawing.width - room else "middle"
    return x, text, anchor


def _trade_offs(result: Result, id: str, figures: dict[str, Figure]) -> list[Plot]:
    means = {key: mean for key, (mean, _, _) in _summaries(result).items()}
    plots: list[Plot] = []
    for timed, quality, figure in trade_off_plots(result.trade_offs, means, result.arms):
        plot = Plot(
            f"{id}-trade-off-{len(plots) + 1}",
            f"{timed} over {quality}, a line for each of {plural(len(figure['data']), 'arm')}",
            f"{timed} (log scale) over {quality}; each point is a mean over seeds",
            [(arm, *mark(arm, result.arms)) for arm in (trace["meta"] for trace in figure["data"])],
        )
        figures[plot.id] = figure
        plots.append(plot)
    return plots


def _curves(result: Result, id: str, figures: dict[str, Figure]) -> list[Plot]:
    plots: list[Plot] = []
    for curve in result.curves:
        figure = curve_plot(curve, result.rows, result.arms)
        if figure is None:
            continue
        diagonal = "; dashed: where both are equal" if curve.get("diagonal") else ""
        plot = Plot(
            f"{id}-curve-{len(plots) + 1}",
            f"{curve['y']} over {curve['x']}, a line for each of {plural(len(figure['data']), 'arm')}",
            f"{curve['name']}: {curve['y']} over {curve['x']}, means over seeds{diagonal}",
            [(arm, *mark(arm, result.arms)) for arm in (trace["meta"] for trace in figure["data"])],
        )
        figures[plot.id] = figure
        plots.append(plot)
    return plots


def _arms(result: Result) -> list[Arm]:
    names = [*result.arms, *sorted({row.arm for row in result.rows} - set(result.arms))]
    return [_arm(name, [row for row in result.rows if row.arm == name]) for name in names]


def _arm(name: str, rows: Sequence[Row]) -> Arm:
    ok = [row for row in rows if row.status == "ok"]
    failed = sum(row.status == "failed" for row in rows)
    unavailable = [row for row in rows if row.status == "unavailable"]
    if failed:
        status, kind = f"failed on {failed} of {plural(len(rows), 'seed')}", "fails"
    elif unavailable:
        status, kind = "unavailable", "none"
    elif rows:
        status, kind = f"ran, {plural(len(ok), 'seed')}", ""
    else:
        status, kind = "did not run", "none"
    used: dict[str, list[float]] = {}
    for row in ok:
        for key, value in row.resources.items():
            if value is not None and finite(value):
                used.setdefault(key, []).append(value)

    def median_of(key: str) -> str:
        return seconds_in_words(statistics.median(used[key])) if key in used else MISSING

    def largest(key: str) -> str:
        return bytes_in_words(max(used[key])) if key in used else MISSING

    return Arm(
        name=name,
        status=status,
        kind=kind,
        why=_distinct((row.error or {}).get("message", "no reason given") for row in unavailable),
        seconds=median_of("seconds"),
        cpu_seconds=median_of("cpu_seconds"),
        peak_memory=largest("peak_memory_bytes"),
        added_memory=largest("added_memory_bytes"),
        device_memory=largest("peak_device_memory_bytes"),
        notes=_distinct(note for row in rows for note in row.notes),
    )


def _metric_table(result: Result) -> tuple[list[str], list[MetricGroup]]:
    """The arms that gave numbers, and every metric by arm; metrics of one family stand together."""
    means = _summaries(result)
    arms = [arm.name for arm in _arms(result) if any(who == arm.name for who, _ in means)]
    reasons = {(row.arm, metric): reason for row in result.rows for metric, reason in row.missing.items()}
    metrics = _distinct(metric for row in result.rows for metric in (*row.metrics, *row.missing))
    families: dict[str, list[str]] = {}
    for metric in metrics:
        families.setdefault(base_name(metric), []).append(metric)
    alone = MetricGroup("", [])
    groups = [alone]
    for base, members in families.items():
        group = alone if len(members) == 1 else MetricGroup(metric_name(base), [])
        for metric in members:
            label = metric_name(metric) if group is alone else _setting(metric)
            cells = [_cell(means.get((arm, metric)), reasons.get((arm, metric), ""), result) for arm in arms]
            group.rows.append((label, metric, cells))
        if group is not alone:
            groups.append(group)
    return arms, [group for group in groups if group.rows]


def _setting(metric: str) -> str:
    """What sets a metric apart within its family: ``@ 0.80`` of ``recall@0.80``."""
    setting = metric[len(base_name(metric)) :].strip().replace("_", " ")
    return f"@ {setting[1:]}" if setting.startswith("@") else setting or metric_name(metric)


def _cell(summary: tuple[float, float, int] | None, reason: str, result: Result) -> Cell:
    if summary is None:
        return Cell(MISSING, reason=reason)
    mean, spread, n = summary
    seeds = f"{n} of {len(result.seeds)} seeds" if n < len(result.seeds) else ""
    return Cell(three_digits(mean), "" if n < 2 else deviation(spread), seeds)


def _summaries(result: Result) -> dict[tuple[str, str], tuple[float, float, int]]:
    """``(arm, metric)`` to mean, standard deviation and number of the seeds that measured it."""
    gathered: dict[tuple[str, str], list[float]] = {}
    for row in result.rows:
        for metric, value in row.metrics.items():
            if metric not in row.missing and finite(value):
                gathered.setdefault((row.arm, metric), []).append(value)
    return {
        key: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))
        for key, values in gathered.items()
    }


def _failures(rows: Iterable[Row]) -> list[Failure]:
    found: dict[tuple[str, str, str], Failure] = {}
    for row in rows:
        if row.status == "failed":
            error = row.error or {}
            message = ": ".join(filter(None, (error.get("type", ""), error.get("message", "")))) or "no message"
            traceback = error.get("traceback", "")
            found.setdefault((row.arm, message, traceback), Failure(row.arm, message, traceback, [])).seeds.append(
                row.seed
            )
    return list(found.values())


def _gaps(rows: Iterable[Row]) -> list[Gap]:
    found: dict[tuple[str, str], Gap] = {}
    for row in rows:
        for metric, reason in row.missing.items():
            gap = found.setdefault((row.arm, reason), Gap(row.arm, [], reason))
            if metric_name(metric) not in gap.metrics:
                gap.metrics.append(metric_name(metric))
            if row.seed not in gap.seeds:
                gap.seeds.append(row.seed)
    return list(found.values())


def _details(result: Result) -> list[tuple[str, list[tuple[str, str]]]]:
    """What was asked for, then what ran it: plain values of ``run`` together, each mapping in it on its own."""
    request = {**result.request, "seeds": result.seeds}
    for key in ("model", "data"):
        if key in request and request[key] is None:
            request[key] = "embedded default"
    plain = {key: value for key, value in result.run.items() if not isinstance(value, Mapping)}
    parts: list[tuple[str, Mapping[str, Any]]] = [("Request", request), ("Run", plain)]
    parts += [(metric_name(key).capitalize(), value) for key, value in result.run.items() if isinstance(value, Mapping)]
    return [(name, list(_entries(part))) for name, part in parts if part]


def _entries(mapping: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in mapping.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _entries(value, f"{name}: ")
        elif key == "seconds" and finite(value):
            yield f"{prefix}took", seconds_in_words(value)
        elif str(key).endswith("_bytes") and finite(value):
            yield name.removesuffix(" bytes"), bytes_in_words(value)
        else:
            yield name, _value_in_words(value)


def _value_in_words(value: Any) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return three_digits(value, exact=True)
    if isinstance(value, list | tuple):
        return ", ".join(_value_in_words(item) for item in value) or MISSING
    moment = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(.*)", str(value))
    if moment:
        day, time, zone = moment.groups()
        return f"{day} {time} {'UTC' if zone in ('Z', '+00:00') else zone}".strip()
    return str(value)


def _date(run: Mapping[str, Any]) -> str:
    """The day a run ended (or began), as YYYY-MM-DD, or "" where it is not recorded."""
    for key in ("finished", "finished_at", "ended", "started", "started_at", "date"):
        found = re.match(r"\d{4}-\d{2}-\d{2}", str(run.get(key) or ""))
        if found:
            return found.group()
    return ""


def _span(dates: Iterable[str]) -> str:
    days = sorted(filter(None, dates))
    if not days:
        return ""
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _number(value: Any) -> float | None:
    return float(value) if finite(value) else None


def _asset(name: str) -> Markup:
    return Markup(resources.files("practicum.checks").joinpath("templates", name).read_text(encoding="utf-8"))


def _embed(figures: Mapping[str, Figure]) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"))
