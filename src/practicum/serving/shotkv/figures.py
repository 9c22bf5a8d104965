"""What compression costs each task, drawn: the table of changes, gain against sensitivity, where attention goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from practicum.serving.shotkv.bench import FULL, KVFundaBench
from practicum.toolbox import pages


def change_figure(bench: KVFundaBench) -> go.Figure:
    """Draw the relative change of accuracy of every task under every method, as a heat map.

    Parameters
    ----------
    bench : KVFundaBench

    Returns
    -------
    plotly.graph_objects.Figure
        Of values of shape (tasks, methods).

    Examples
    --------
    >>> from practicum.serving.shotkv.bench import Cell
    >>> cells = [Cell("sums", "full", 1.0, 0, 0.1, 0.8, 0.5), Cell("sums", "h2o", 0.1, 0, 0.9, 0.4, 0.0)]
    >>> [list(row) for row in change_figure(KVFundaBench(cells)).data[0].z]
    [[-0.5]]
    """
    methods = bench.methods
    z = [[bench.change(task, method, ratio) for method, ratio in methods] for task in bench.tasks]
    figure = go.Figure(
        go.Heatmap(
            z=z,
            x=[f"{method} {ratio:.0%}" for method, ratio in methods],
            y=bench.tasks,
            zmid=0,
            zmin=-1,
            zmax=1,
            colorscale="RdBu",
            hovertemplate="%{y}, %{x}: %{z:+.0%}<extra></extra>",
        )
    )
    figure.update_layout(title="Change of the share of right tokens", yaxis_autorange="reversed", height=360)
    return figure


def sensitivity_figure(bench: KVFundaBench) -> go.Figure:
    """Draw what units bring a task against what compression costs it.

    Parameters
    ----------
    bench : KVFundaBench

    Returns
    -------
    plotly.graph_objects.Figure
        A point a task, of values of shape (tasks,).

    Examples
    --------
    >>> from practicum.serving.shotkv.bench import Cell
    >>> cells = [Cell("sums", "full", 1.0, 0, 0.1, 0.8, 0.5), Cell("sums", "h2o", 0.1, 0, 0.9, 0.4, 0.0)]
    >>> [point] = sensitivity_figure(KVFundaBench(cells, gain={"sums": 0.7})).data
    >>> round(point.y[0], 3)
    0.8
    """
    tasks = [task for task in bench.tasks if task in bench.gain]
    points = go.Scatter(
        x=[bench.gain[task] for task in tasks],
        y=[bench.sensitivity(task) for task in tasks],
        text=tasks,
        mode="markers+text",
        textposition="top center",
        marker={"color": pages.COLOURS[0], "size": 10},
    )
    figure = go.Figure(points)
    figure.update_layout(
        title="What the prompt brings, and what compression costs",
        xaxis_title="gain by the units, nats a token",
        yaxis_title="loss by token-wise compression, nats a token",
        height=420,
    )
    return figure


def attention_figure(bench: KVFundaBench) -> go.Figure:
    """Draw where the question's attention goes, task by task.

    Parameters
    ----------
    bench : KVFundaBench

    Returns
    -------
    plotly.graph_objects.Figure
        Bars of shares and of entropies, of shape (tasks,) each.

    Examples
    --------
    >>> len(attention_figure(KVFundaBench(sinks={"sums": 0.4}, entropy={"sums": 3.0})).data)
    2
    """
    tasks = list(bench.sinks)
    figure = go.Figure(
        [
            go.Bar(x=tasks, y=[bench.sinks[t] for t in tasks], name="share on the first four tokens", offsetgroup=0),
            go.Bar(x=tasks, y=[bench.entropy[t] for t in tasks], name="entropy, nats", yaxis="y2", offsetgroup=1),
        ]
    )
    figure.update_layout(
        title="Where the question's attention goes",
        yaxis={"title": "share", "range": [0, 1]},
        yaxis2={"title": "nats", "overlaying": "y", "side": "right"},
        barmode="group",
        height=360,
    )
    return figure


def write_bench_page(path: Path | str, bench: KVFundaBench, *, title: str, notes: Sequence[str] = ()) -> None:
    """Write one page with the table and the plots, which needs no network.

    Parameters
    ----------
    path : path-like
    bench : KVFundaBench
        With cells of shape (tasks, methods, seeds).
    title : str
    notes : sequence of str
        Sentences for its top.

    Examples
    --------
    >>> import tempfile
    >>> from practicum.serving.shotkv.bench import Cell
    >>> cells = [Cell("sums", "full", 1.0, 0, 0.1, 0.8, 0.5), Cell("sums", "h2o", 0.1, 0, 0.9, 0.4, 0.0)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bench_page(Path(folder, "bench.html"), KVFundaBench(cells, {"sums": 0.7}), title="Mine")
    ...     "-50%" in Path(folder, "bench.html").read_text()
    True
    """
    head = ["task", "whole cache", *(f"{method} {ratio:.0%}" for method, ratio in bench.methods)]
    rows = [
        [task, f"{bench.mean(task, FULL, 1.0):.2f}", *(_signed(bench.change(task, m, r)) for m, r in bench.methods)]
        for task in bench.tasks
    ]
    nll = [
        [
            task,
            f"{bench.mean(task, FULL, 1.0, 'nll'):.3f}",
            *(f"{bench.mean(task, m, r, 'nll'):.3f}" for m, r in bench.methods),
        ]
        for task in bench.tasks
    ]
    rank = bench.gain_and_sensitivity()
    told = "needs three tasks at least" if math.isnan(rank) else f"is {rank:.2f}"
    parts = [
        *(pages.paragraph(note) for note in notes),
        pages.heading("Share of right tokens with the whole cache, and its relative change"),
        pages.table(head, rows),
        pages.drawn(change_figure(bench)),
        pages.heading("Negative log-likelihood of the right answer, nats a token"),
        pages.table(head, nll),
        pages.heading("Which tasks are sensitive"),
        pages.paragraph(f"The rank correlation over tasks of gain and loss {told}."),
        pages.drawn(sensitivity_figure(bench)),
        pages.drawn(attention_figure(bench)),
    ]
    pages.write_page(path, title, parts)


def _signed(change: float) -> str:
    return "–" if math.isnan(change) else f"{change:+.0%}"
