"""Pictures of heads by layer, and a page for each task that needs no network."""

from __future__ import annotations

import html
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from practicum.language.taskheads.heads import LexicalTaskHeads, overlap, sharing
from practicum.toolbox import pages
from practicum.toolbox.errors import InputError

TITLES = {"examples": "given by examples", "instruction": "given by an instruction"}
MARK = "#c2571a"
STYLE = """.note { color: #51606f }
td:last-child { text-align: left }
.token { white-space: pre; background: #eef2f6; border-radius: 3px; padding: 0 .25rem; margin-right: .15rem }
.word { background: #f7dfd0 }
"""


def head_figure(finder: LexicalTaskHeads, task: str) -> go.Figure:
    """Draw the scores of all heads of a task, layers by heads, a picture for each prompting style.

    Parameters
    ----------
    finder : LexicalTaskHeads
        Fitted.
    task : str

    Returns
    -------
    plotly.graph_objects.Figure
        Circles are lexical task heads, filled where they are heads of all styles. The scores have the shape
        (layers, heads).

    Raises
    ------
    InputError
        A ValueError for a task that was not fitted.

    Examples
    --------
    >>> from practicum.language.taskheads import Task
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> task = Task("opposite", [("up", "down"), ("in", "out"), ("hot", "cold")], ["opposite"])
    >>> finder = LexicalTaskHeads(model, tokenizer, require_correct=False)
    >>> head_figure(finder.fit([task], styles=["examples"], n_shots=1), "opposite").data[0].z.shape
    (3, 4)
    """
    _require_task(finder, task)
    styles = finder.styles_
    figure = make_subplots(1, len(styles), shared_yaxes=True, subplot_titles=[TITLES[style] for style in styles])
    for column, style in enumerate(styles, 1):
        scores = finder.scores_[task][style]
        figure.add_trace(
            go.Heatmap(
                z=scores.numpy(),
                zmin=0,
                zmax=1,
                colorscale="Blues",
                showscale=column == 1,
                colorbar={"title": {"text": "share of prompts", "side": "right"}},
                hovertemplate="layer %{y}, head %{x}: %{z:.2f}<extra></extra>",
            ),
            row=1,
            col=column,
        )
        heads = finder.heads_[task][style]
        shared = [head in finder.shared_[task] and len(styles) > 1 for head in heads]
        figure.add_trace(
            go.Scatter(
                x=[head for _, head in heads],
                y=[layer for layer, _ in heads],
                mode="markers",
                marker={
                    "symbol": ["circle" if both else "circle-open" for both in shared],
                    "color": MARK,
                    "size": 9,
                    "line": {"width": 2},
                },
                text=["in all styles" if both else "in this style only" for both in shared],
                hovertemplate="layer %{y}, head %{x}: %{text}<extra></extra>",
                showlegend=False,
            ),
            row=1,
            col=column,
        )
        figure.update_xaxes(title_text="head", dtick=max(1, scores.shape[1] // 10), row=1, col=column)
    figure.update_yaxes(title_text="layer", row=1, col=1)
    figure.update_layout(
        title=f"{task}: how often each head says a word of the task",
        height=180 + 14 * finder.lens.n_layers,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 80, "b": 50},
    )
    return figure


def write_task_page(finder: LexicalTaskHeads, task: str, path: Path | str, n_heads: int = 8) -> Path:
    """Write what was found of a task as one HTML page: its heads by layer, what they say, what styles share.

    Parameters
    ----------
    finder : LexicalTaskHeads
        Fitted.
    task : str
    path : pathlib.Path or str
        The file to write. It needs no network.
    n_heads : int
        Heads of each style whose tokens are listed, those with the highest scores, of shape (n_heads,).

    Returns
    -------
    pathlib.Path

    Raises
    ------
    InputError
        A ValueError for a task that was not fitted, or a path that cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from practicum.language.taskheads import Task
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> task = Task("opposite", [("up", "down"), ("in", "out"), ("hot", "cold")], ["opposite"])
    >>> finder = LexicalTaskHeads(model, tokenizer, require_correct=False)
    >>> finder = finder.fit([task], styles=["examples"], n_shots=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_task_page(finder, "opposite", Path(folder, "opposite.html"))
    ...     "<h1>opposite</h1>" in page.read_text()
    True
    """
    _require_task(finder, task)
    parts = [
        f'<p class="note">{html.escape(_summary(finder, task))}</p>',
        _styles_table(finder, task),
        pages.drawn(head_figure(finder, task)),
        *(_tokens_table(finder, task, style, n_heads) for style in finder.styles_),
        _others_table(finder, task),
    ]
    return pages.write_page(path, task, parts, STYLE)


def _require_task(finder: LexicalTaskHeads, task: str) -> None:
    if not hasattr(finder, "heads_"):
        raise InputError("finder: is not fitted; call fit(tasks) first")
    if task not in finder.heads_:
        raise InputError(f"task={task!r}: was not fitted; there are {', '.join(finder.heads_)}")


def _summary(finder: LexicalTaskHeads, task: str) -> str:
    words = ", ".join(finder.tasks_[task].words)
    head = f"A head says the task when {finder.n_match} or more of its {finder.k} likeliest tokens are among: {words}."
    if not any(finder.heads_[task].values()):
        return f"{head} No lexical heads: none does so in {finder.threshold:.0%} of the prompts."
    if len(finder.styles_) < 2:
        return head
    a, b = (finder.heads_[task][style] for style in finder.styles_)
    found = sharing(a, b, finder.lens.n_layers * finder.lens.n_heads)
    return (
        f"{head} The styles share {found.shared} heads; by chance sets of these sizes would share {found.expected:.2f} "
        f"(p = {found.p_value:.2g})."
    )


def _styles_table(finder: LexicalTaskHeads, task: str) -> str:
    rows = []
    for style in finder.styles_:
        prompt = f"{TITLES[style]}"
        if style == "instruction":
            template = finder.tasks_[task].instructions[finder.template_[task]]
            prompt += f": “{template}”" + (" (has a word of the task in it)" if finder.copied_[task] else "")
        heads = ", ".join(f"{layer}.{head}" for layer, head in finder.heads_[task][style]) or "none"
        counted = f"{finder.n_used_[task][style]}"
        if finder.n_dropped_[task][style]:
            counted += f" ({finder.n_dropped_[task][style]} left out: the answer begins with white space)"
        rows.append([prompt, f"{finder.accuracy_[task][style]:.0%}", counted, heads])
    return pages.table(["The task is", "Answered", "Prompts counted", "Heads (layer.head)"], rows)


def _tokens_table(finder: LexicalTaskHeads, task: str, style: str, n_heads: int) -> str:
    scores = finder.scores_[task][style]
    best = sorted(finder.heads_[task][style], key=lambda head: -float(scores[head]))[:n_heads]
    if not best:
        return ""
    words = set(finder.words_[task].tolist())
    named = {finder.tokenizer.decode([token]) for token in words}
    rows = ""
    for layer, head in best:
        said = finder.says(task, style, layer, head)  # type: ignore[arg-type]
        tokens = "".join(
            f'<span class="token{" word" if token in named else ""}" title="{share:.0%} of the prompts">'
            f"{html.escape(token)}</span>"
            for token, share in said
        )
        shared = "yes" if (layer, head) in finder.shared_[task] and len(finder.styles_) > 1 else ""
        rows += f"<tr><td>{layer}.{head}</td><td>{float(scores[layer, head]):.2f}</td><td>{shared}</td>"
        rows += f"<td>{tokens}</td></tr>"
    head_row = "<tr><th>Head</th><th>Score</th><th>In all styles</th><th>What it says most often</th></tr>"
    return f"<h2>What heads say where the task is {TITLES[style]}</h2><table>{head_row}{rows}</table>"


def _others_table(finder: LexicalTaskHeads, task: str) -> str:
    """Overlap with the heads of other tasks."""
    others = [name for name in finder.heads_ if name != task]
    if not others:
        return ""
    rows = [
        [name, *(f"{overlap(finder.heads_[task][s], finder.heads_[name][s]):.2f}" for s in finder.styles_)]
        for name in others
    ]
    return pages.heading("Overlap with the heads of other tasks") + pages.table(
        ["Task", *(TITLES[style] for style in finder.styles_)], rows
    )
