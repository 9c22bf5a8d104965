"""Plots of results as plain data for plotly.js, which draws them in the page of the report.

Colours are names of variables of the page's style sheet, so that a plot follows the theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.checks.results import ClaimResult, Row
from practicum.checks.words import MISSING, base_name, finite, metric_name, three_digits

Figure = dict[str, Any]

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")


def paired_plot(claim: ClaimResult, arms: Sequence[str], *, log: bool) -> Figure | None:
    """Draw a line for each seed from the baseline to the arm, or only points and the margin where there is no baseline.

    Parameters
    ----------
    claim : ClaimResult
    arms : sequence of str
        All arms of the result; the place of an arm decides its colour and symbol.
    log : bool
        Whether the metric has a log axis.

    Returns
    -------
    dict or None
        ``data`` and ``layout`` of plotly.js. None where no seed has the numbers.

    Examples
    --------
    >>> claim = ClaimResult("c", "", "error", "ours", ["theirs"], "difference_at_most", 0.0, False, "inconclusive")
    >>> claim.pairs = [{"seed": 0, "arm": 1.0, "against": 2.0, "baseline": "theirs"}]
    >>> [trace["mode"] for trace in paired_plot(claim, ["ours", "theirs"], log=False)["data"]]
    ['lines', 'markers', 'markers']
    """
    pairs = [pair for pair in claim.pairs if finite(pair.get("arm"))]
    if claim.against:
        pairs = [pair for pair in pairs if finite(pair.get("against"))]
    if not pairs:
        return None
    values = [pair[key] for pair in pairs for key in ("against", "arm") if finite(pair.get(key))]
    y_axis = _axis(values, log=log)
    if claim.against:
        traces = [_join(pair) for pair in pairs] + _paired_points(pairs, claim, arms)
        baseline = claim.against[0] if len(claim.against) == 1 else "best of " + ", ".join(claim.against)
        x_axis = {"tickvals": [0, 1], "ticktext": [_wrapped(baseline), _wrapped(claim.arm)], "range": [-0.4, 1.4]}
        return _figure(traces, x_axis | {"showgrid": False}, y_axis)
    ticks = [_wrapped(f"seed {pair.get('seed', MISSING)}") for pair in pairs]
    seeds = list(range(len(pairs)))
    x_axis = {"tickvals": seeds, "ticktext": ticks, "range": [-0.6, len(pairs) - 0.4], "showgrid": False}
    figure = _figure([_points(seeds, "arm", pairs, claim.arm, claim, arms)], x_axis, y_axis)
    if finite(claim.margin):
        line = {"color": "--margin", "width": 1.5, "dash": "dash"}
        edges = {"xref": "paper", "x0": 0, "x1": 1, "y0": claim.margin, "y1": claim.margin}
        figure["layout"]["shapes"] = [{"type": "line", "line": line} | edges]
        figure["layout"]["yaxis"] |= _axis([*values, claim.margin])
    return figure


def trade_off_plots(
    pairs: Sequence[Sequence[str]], means: Mapping[tuple[str, str], float], arms: Sequence[str]
) -> list[tuple[str, str, Figure]]:
    """Draw time over quality, each arm a trace through its points.

    Pairs whose metrics differ only in a setting, such as ``queries_per_second@0.80`` and ``@0.90``, share a plot.

    Parameters
    ----------
    pairs : sequence of (str, str)
        Timed metric and quality metric.
    means : mapping of (str, str) to float
        Arm and metric to the mean over seeds.
    arms : sequence of str

    Returns
    -------
    list of (str, str, dict)
        The name of the timed metric, that of the quality metric, and the figure.

    Examples
    --------
    >>> means = {("a", "seconds@1"): 2.0, ("a", "recall@1"): 0.5, ("a", "seconds@2"): 3.0, ("a", "recall@2"): 0.7}
    >>> plots = trade_off_plots([("seconds@1", "recall@1"), ("seconds@2", "recall@2")], means, ["a"])
    >>> [(timed, quality, figure["data"][0]["y"]) for timed, quality, figure in plots]
    [('seconds', 'recall', [2.0, 3.0])]
    """
    families: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for pair in pairs:
        timed, quality = pair
        families.setdefault((base_name(timed), base_name(quality)), []).append((timed, quality))
    plots = []
    for members in families.values():
        traces = [trace for arm in arms if (trace := _arm_trace(members, means, arm, arms))]
        if not traces:
            continue
        timed_name, quality_name = (_common_name([member[i] for member in members]) for i in (0, 1))
        x_axis = _axis([x for trace in traces for x in trace["x"]])
        x_axis["title"] = _axis_title(quality_name)
        y_axis = _axis([y for trace in traces for y in trace["y"]], log=True)
        figure = _figure(traces, x_axis, y_axis)
        plots.append((timed_name, quality_name, figure))
    return plots


def curve_plot(curve: Mapping[str, Any], rows: Sequence[Row], arms: Sequence[str]) -> Figure | None:
    """Draw a curve of every arm that gave points for it, their means over seeds.

    Parameters
    ----------
    curve : mapping
        The fields of a `practicum.checks.Curve`.
    rows : sequence of Row
    arms : sequence of str

    Returns
    -------
    dict or None
        None where no arm gave a point.

    Examples
    --------
    >>> rows = [Row(seed, "ours", curves={"c": [[0.0, 1.0], [1.0, y]]}) for seed, y in ((0, 2.0), (1, 4.0))]
    >>> curve_plot({"name": "c", "x": "place", "y": "share"}, rows, ["ours"])["data"][0]["y"]
    [1.0, 3.0]
    """
    traces = [trace for arm in arms if (trace := _curve_trace(curve, rows, arm, arms))]
    if not traces:
        return None
    x_axis = _axis([x for trace in traces for x in trace["x"]])
    x_axis["title"] = _axis_title(str(curve["x"]))
    figure = _figure(traces, x_axis, _axis([y for trace in traces for y in trace["y"]]))
    if curve.get("diagonal"):
        low, high = figure["layout"]["xaxis"]["range"]
        line = {"color": "--margin", "width": 1.5, "dash": "dash"}
        figure["layout"]["shapes"] = [{"type": "line", "line": line, "x0": low, "x1": high, "y0": low, "y1": high}]
    return figure


def _curve_trace(curve: Mapping[str, Any], rows: Sequence[Row], arm: str, arms: Sequence[str]) -> dict[str, Any] | None:
    given = [row.curves[curve["name"]] for row in rows if row.arm == arm and row.curves.get(curve["name"])]
    points = []
    for place in zip(*given, strict=False):
        measured = [point for point in place if finite(point[0]) and finite(point[1])]
        if measured:
            points.append([sum(point[axis] for point in measured) / len(measured) for axis in (0, 1)])
    if not points:
        return None
    words = [f"{arm}: {curve['y']} {three_digits(y)}, {curve['x']} {three_digits(x)}" for x, y in points]
    trace = _line(arm, arms, points, words)
    trace["marker"] |= {"size": 7}
    return trace


def mark(arm: str, arms: Sequence[str]) -> tuple[int, str]:
    """Return the number of the colour of an arm, and the symbol of its points.

    >>> mark("theirs", ["ours", "theirs"])
    (1, 'square')
    """
    slot = arms.index(arm) % len(SYMBOLS) if arm in arms else 0
    return slot, SYMBOLS[slot]


def _join(pair: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [0, 1],
        "y": [pair["against"], pair["arm"]],
        "hoverinfo": "skip",
        "line": {"color": "--join", "width": 1.5},
    }


def _paired_points(pairs: Sequence[Mapping[str, Any]], claim: ClaimResult, arms: Sequence[str]) -> list[dict[str, Any]]:
    """Points of the baselines, each in its own colour where the best one differs between seeds, and of the arm."""
    by_baseline: dict[str, list[Mapping[str, Any]]] = {}
    for pair in pairs:
        by_baseline.setdefault(str(pair.get("baseline") or claim.against[0]), []).append(pair)
    traces = [_points([0] * len(b), "against", b, name, claim, arms) for name, b in by_baseline.items()]
    return [*traces, _points([1] * len(pairs), "arm", pairs, claim.arm, claim, arms)]


def _points(
    x: Sequence[float],
    key: str,
    pairs: Sequence[Mapping[str, Any]],
    name: str,
    claim: ClaimResult,
    arms: Sequence[str],
) -> dict[str, Any]:
    metric = metric_name(claim.metric)
    words = [f"{name}, seed {pair.get('seed', MISSING)}: {metric} {three_digits(pair[key])}" for pair in pairs]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": [pair[key] for pair in pairs],
        "text": [_plain(text) for text in words],
        "hoverinfo": "text",
        "marker": _marker(name, arms),
    }


def _arm_trace(
    members: Sequence[tuple[str, str]], means: Mapping[tuple[str, str], float], arm: str, arms: Sequence[str]
) -> dict[str, Any] | None:
    measured = [pair for pair in members if means.get((arm, pair[0]), 0) > 0 and (arm, pair[1]) in means]
    points = sorted((means[arm, quality], means[arm, timed], timed, quality) for timed, quality in measured)
    if not points:
        return None
    words = [
        f"{arm}: {metric_name(timed)} {three_digits(y)}, {metric_name(quality)} {three_digits(x)}"
        for x, y, timed, quality in points
    ]
    return _line(arm, arms, points, words)


def _line(arm: str, arms: Sequence[str], points: Sequence[Sequence[Any]], words: Sequence[str]) -> dict[str, Any]:
    """A line through points (x, y, ...) in the colour of an arm, with words for each."""
    slot, _ = mark(arm, arms)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "meta": arm,
        "x": [point[0] for point in points],
        "y": [point[1] for point in points],
        "text": [_plain(text) for text in words],
        "hoverinfo": "text",
        "line": {"color": f"--series-{slot}", "width": 2},
        "marker": _marker(arm, arms),
    }


def _marker(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    slot, symbol = mark(arm, arms)
    outline = {"color": "--panel", "width": 1.5}
    return {"color": f"--series-{slot}", "symbol": symbol, "size": 11, "line": outline}


def _figure(traces: list[dict[str, Any]], x_axis: dict[str, Any], y_axis: dict[str, Any]) -> Figure:
    frame = {
        "gridcolor": "--grid",
        "linecolor": "--grid",
        "tickcolor": "--grid",
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        "exponentformat": "power",
    }
    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--muted", "size": 13},
        "margin": {"l": 8, "r": 12, "t": 10, "b": 8},
        "xaxis": frame | x_axis,
        "yaxis": frame | y_axis,
        "showlegend": False,
        "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--rule", "font": {"color": "--ink"}},
        "hovermode": "closest",
        "dragmode": False,
    }
    return {"data": traces, "layout": layout}


def _axis(values: Sequence[float], *, log: bool = False) -> dict[str, Any]:
    """A range with room around all values, which does not magnify what differs in the fourth digit only."""
    low, high = min(values), max(values)
    if not log or low <= 0:
        slack = max(0.12 * (high - low), 0.002 * max(abs(low), abs(high)), 1e-12)
        return {"range": [low - slack, high + slack]}
    low, high = math.log10(low), math.log10(high)
    slack = max(0.08 * (high - low), 0.06)
    axis = {"type": "log", "range": [low - slack, high + slack]}
    ticks = _log_ticks(low - slack, high + slack)
    return axis | {"tickvals": ticks, "ticktext": [three_digits(tick, exact=True) for tick in ticks]}


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": _plain(_shortened(text, 40)), "font": {"size": 13}, "standoff": 12}


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten: as many as fit, six at most where the range spans few decades."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks: list[float] = []
    for digits in (
        [d / 10 for d in range(10, 100)],
        (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9),
        (1, 2, 3, 5, 7),
        (1, 2, 5),
        (1,),
    ):
        every = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in every if low <= math.log10(tick) <= high]
        if len(ticks) <= 6:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 6)]


def _common_name(metrics: Sequence[str]) -> str:
    return metric_name(metrics[0] if len(set(metrics)) == 1 else base_name(metrics[0]))


def _wrapped(text: str, width: int = 18) -> str:
    """Break a tick label into at most four lines at spaces."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    if len(lines) > 4:
        lines = [*lines[:3], "…"]
    return "<br>".join(_plain(_shortened(line, width + 8)) for line in lines)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _plain(text: str) -> str:
    """Keep a string from being read as mark-up by the plotting library, which knows some tags and entities."""
    return html.escape(text, quote=False)
