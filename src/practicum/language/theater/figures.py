"""Plots of beliefs along chains, and all of them as one page that needs no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from practicum.language.theater.beliefs import Beliefs, beliefs_of
from practicum.language.theater.curves import Performativity, performativity
from practicum.language.theater.shifts import Inflections, inflections
from practicum.language.theater.stopping import (
    ExitCurve,
    agreement_scores,
    budget_scores,
    certainty_scores,
    confidence_scores,
    exit_curve,
)
from practicum.language.theater.traces import Trace
from practicum.toolbox import pages
from practicum.toolbox.errors import InputError
from practicum.toolbox.pages import COLOURS, drawn, heading, paragraph, table

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99, 0.999, 1.01)
AGREEMENTS = (1, 2, 3, 4, 5, 6, 8, 1000)


def belief_figure(trace: Trace, beliefs: Mapping[str, Any]) -> go.Figure:
    """Draw what each instrument believes along one chain, as heat maps below each other.

    Parameters
    ----------
    trace : Trace
    beliefs : mapping of str to array of shape (S + 1, K)
        By instrument.

    Returns
    -------
    plotly.graph_objects.Figure
        Cuts of the chain across, options down; the step that was read last shows under the pointer.

    Raises
    ------
    InputError
        A ValueError: for no instrument, or beliefs that are no probabilities.

    Examples
    --------
    >>> trace = Trace("2 + 2?", ("A", "B"), [5], [7, 8], [1, 2], "A", "A", "Hm. Four.", [3, 9])
    >>> figure = belief_figure(trace, {"probe": np.array([[0.5, 0.5], [0.8, 0.2], [1.0, 0.0]])})
    >>> figure.data[0].z.shape
    (2, 3)
    """
    if not beliefs:
        raise InputError("beliefs: is empty; must have an instrument at least")
    read = {name: beliefs_of([rows], [trace], f"beliefs[{name!r}]")[0] for name, rows in beliefs.items()}
    figure = make_subplots(
        rows=len(read), cols=1, shared_xaxes=True, vertical_spacing=0.12 / len(read), subplot_titles=list(read)
    )
    labels = [_marked(option, trace) for option in trace.options]
    steps = ["question", *(_last_step(a, b) for a, b in zip(trace.prefixes, trace.prefixes[1:], strict=False))]
    for i, rows in enumerate(read.values(), 1):
        figure.add_trace(
            go.Heatmap(
                z=rows.T,
                x=list(range(len(trace.cuts))),
                y=labels,
                customdata=np.array([steps] * len(labels)),
                hovertemplate="%{y}: %{z:.2f}<br>after: %{customdata}<extra></extra>",
                zmin=0,
                zmax=1,
                colorscale="Blues",
                showscale=i == 1,
            ),
            row=i,
            col=1,
        )
    figure.update_xaxes(
        tickvals=list(range(len(steps))), ticktext=[_shortened(step, 18) for step in steps], row=len(read), col=1
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        height=130 + 110 * len(read), margin={"l": 90, "r": 20, "t": 30, "b": 90}, template="plotly_white"
    )
    return figure


def curves_figure(results: Mapping[str, Performativity], name: str = "probe", title: str = "") -> go.Figure:
    """Draw accuracy against the model's own final answer over the position in the chain.

    Parameters
    ----------
    results : mapping of str to Performativity
        By instrument; all with the same monitor, whose curve is drawn once. Curves have the shape (grid,).
    name : str
        Not drawn where only one instrument is given under its own name; kept as the legend's title.
    title : str

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    InputError
        A ValueError, for no results.

    Examples
    --------
    >>> grid = np.linspace(0, 1, 3)
    >>> result = Performativity(0.5, (0.4, 0.6), "area", grid, np.ones(3), np.full(3, 0.5), np.full(2, 0.5))
    >>> [line.name for line in curves_figure({"probe": result}).data]
    ['probe', 'monitor']
    """
    if not results:
        raise InputError("results: is empty; must have an instrument at least")
    figure = go.Figure()
    for colour, (instrument, result) in zip(COLOURS, results.items(), strict=False):
        figure.add_scatter(x=result.positions, y=result.belief, name=instrument, line={"color": colour, "width": 2})
    last = next(iter(results.values()))
    figure.add_scatter(
        x=last.positions, y=last.monitor, name="monitor", line={"color": "#555555", "width": 2, "dash": "dash"}
    )
    figure.update_xaxes(title="position in the chain", range=[0, 1], tickformat=".0%")
    figure.update_yaxes(title="accuracy (own final answer)", range=[0, 1.02], tickformat=".0%")
    figure.update_layout(title=title, legend_title=name, height=380, template="plotly_white")
    return figure


def exit_figure(curves: Mapping[str, ExitCurve], title: str = "") -> go.Figure:
    """Draw accuracy over tokens saved, a line for each stopping rule.

    Parameters
    ----------
    curves : mapping of str to ExitCurve
        By rule; each of shape (m,).
    title : str

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    InputError
        A ValueError, for no curves.

    Examples
    --------
    >>> curve = ExitCurve(np.array([0.8, 0.9]), np.array([0.7, 0.4]), np.array([0.85, 0.9]), 0.9)
    >>> exit_figure({"probe": curve}).data[0].x
    array([0.7, 0.4])
    """
    if not curves:
        raise InputError("curves: is empty; must have one at least")
    figure = go.Figure()
    for colour, (rule, curve) in zip(COLOURS, curves.items(), strict=False):
        figure.add_scatter(
            x=curve.saved,
            y=curve.accuracy,
            name=rule,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            customdata=curve.thresholds,
            hovertemplate="threshold %{customdata:g}: %{x:.0%} saved, accuracy %{y:.1%}<extra></extra>",
        )
    full = next(iter(curves.values())).full_accuracy
    figure.add_hline(full, line={"color": "#555555", "dash": "dot", "width": 1}, annotation_text="whole chains")
    figure.update_xaxes(title="tokens of the chain saved", range=[-0.02, 1.02], tickformat=".0%")
    figure.update_yaxes(title="accuracy (right answer)", tickformat=".0%")
    figure.update_layout(title=title, height=380, template="plotly_white")
    return figure


def write_page(
    path: Path | str,
    traces: Sequence[Trace],
    *,
    probe: Any,
    forced: Any,
    monitor: Any,
    title: str = "Beliefs along chains of thought",
    notes: Sequence[str] = (),
    examples: int = 3,
) -> None:
    """Write one HTML page with all plots, group by group, that needs no network.

    Parameters
    ----------
    path : pathlib.Path or str
    traces : sequence of Trace
        Shape (N,), none of which the probe has learnt from. Exit curves are drawn where all have the right answer.
    probe, forced, monitor : object
        Instruments, or their beliefs, N arrays of shape (S + 1, K).
    title : str
    notes : sequence of str
        Sentences for the top of the page.
    examples : int
        Chains of each group that get a heat map.

    Raises
    ------
    InputError
        A ValueError: for no traces, and beliefs that are no probabilities.

    Examples
    --------
    >>> import tempfile
    >>> trace = Trace("2 + 2?", ("A", "B"), [5], [7, 8], [1, 2], "A", "A", "Hm. Four.", [3, 9])
    >>> rows = [np.array([[0.5, 0.5], [0.8, 0.2], [1.0, 0.0]])]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page(Path(folder, "page.html"), [trace], probe=rows, forced=rows, monitor=rows)
    ...     "Plotly.newPlot" in Path(folder, "page.html").read_text()
    True
    """
    read = {
        "probe": beliefs_of(probe, traces, "probe"),
        "forced answer": beliefs_of(forced, traces, "forced"),
        "monitor": beliefs_of(monitor, traces, "monitor"),
    }
    groups: dict[str, list[int]] = {}
    for i, trace in enumerate(traces):
        groups.setdefault(trace.group or "all", []).append(i)
    parts = [paragraph(note) for note in notes]
    parts.append(_summary(traces, groups, read))
    for group, members in groups.items():
        parts += _group_part(group, [traces[i] for i in members], _some(read, members), examples)
    everything = {"all together": list(range(len(traces)))} if len(groups) > 1 else {}
    parts.append(_inflection_table(traces, {**groups, **everything}, read["probe"]))
    pages.write_page(path, title, parts)


def _some(read: Mapping[str, list[Beliefs]], members: Sequence[int]) -> dict[str, list[Beliefs]]:
    return {name: [rows[i] for i in members] for name, rows in read.items()}


def _summary(traces: Sequence[Trace], groups: Mapping[str, Sequence[int]], read: Mapping[str, list[Beliefs]]) -> str:
    rows = []
    for group, members in groups.items():
        chosen = [traces[i] for i in members]
        some = _some(read, members)
        cells = [group, str(len(chosen)), f"{np.mean([len(trace.cot_ids) for trace in chosen]):.1f}"]
        for name in ("probe", "forced answer"):
            result = performativity(chosen, some[name], some["monitor"])
            cells.append(f"{result.rate:.3f} ({result.ci[0]:.3f} to {result.ci[1]:.3f})")
        rows.append(cells)
    head = ["group", "chains", "tokens a chain", "performativity (probe)", "performativity (forced answer)"]
    return table(head, rows)


def _group_part(group: str, traces: Sequence[Trace], read: Mapping[str, list[Beliefs]], examples: int) -> list[str]:
    results = {name: performativity(traces, read[name], read["monitor"]) for name in ("probe", "forced answer")}
    parts = [
        heading(group),
        drawn(curves_figure(results, "read by", "What is believed, and what is said")),
    ]
    if all(trace.gold is not None for trace in traces):
        longest = max(len(trace.cot_ids) for trace in traces)
        forced = read["forced answer"]
        rules = {
            "probe": exit_curve(traces, confidence_scores(read["probe"]), forced, CONFIDENCES),
            "forced answer (DEER)": exit_curve(traces, confidence_scores(forced), forced, CONFIDENCES),
            "answer consistency": exit_curve(traces, agreement_scores(forced), forced, AGREEMENTS),
            "entropy": exit_curve(traces, certainty_scores(forced), forced, CONFIDENCES),
            "fixed budget": exit_curve(
                traces, budget_scores(traces), forced, np.linspace(0, longest + 1, 12).round().tolist()
            ),
        }
        parts.append(drawn(exit_figure(rules, "What stopping early saves and costs")))
    for trace, *beliefs in zip(traces[:examples], *(rows[:examples] for rows in read.values()), strict=True):
        told = f"answered {trace.answer}" + ("" if trace.gold is None else f"; right is {trace.gold}")
        parts.append(heading(_shortened(trace.question, 160), 3) + paragraph(told))
        parts.append(f"<blockquote>{html.escape(trace.text)}</blockquote>")
        parts.append(drawn(belief_figure(trace, dict(zip(read, beliefs, strict=True)))))
    return parts


def _inflection_table(traces: Sequence[Trace], groups: Mapping[str, Sequence[int]], belief: Sequence[Beliefs]) -> str:
    head = ["group", "large shift", "of these with inflection", "small shift", "of these with inflection", "risk ratio"]
    head += ["AUROC", "steps from shift to inflection", ""]
    rows = []
    for group, members in groups.items():
        found = inflections([traces[i] for i in members], [belief[i] for i in members])
        small, large = found.table.sum(1)
        rows.append([group, str(large), _share(found.p_large), str(small), _share(found.p_small), _ratio(found)])
        lags = ", ".join(f"{lag:+d}: {count}" for lag, count in found.lags.items())
        rows[-1] += ["–" if found.auroc is None else f"{found.auroc:.2f}", lags or "–", found.verdict]
    return heading("Shifts of the probe's belief, and inflections in the text") + table(head, rows)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _ratio(found: Inflections) -> str:
    if found.risk_ratio is None or found.ci is None:
        return "–"
    return f"{found.risk_ratio:.2f} ({found.ci[0]:.2f} to {found.ci[1]:.2f})"


def _marked(option: str, trace: Trace) -> str:
    marks = [mark for mark, label in (("answered", trace.answer), ("right", trace.gold)) if label == option]
    return option + (f" ({', '.join(marks)})" if marks else "")


def _last_step(before: str, after: str) -> str:
    return _shortened(after[len(before) :].strip(), 80) or "(nothing)"


def _shortened(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
