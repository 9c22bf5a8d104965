"""One HTML page of text, tables and Plotly figures that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from practicum.toolbox.errors import InputError

COLOURS = ("#2a6fbb", "#c2571a", "#3d8b4f", "#8a4fa3", "#8c6d1f", "#1f8c8a", "#b03060", "#555555")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
blockquote {{ margin: .5rem 0; padding-left: .8rem; border-left: 3px solid #ccc; white-space: pre-wrap; }}
{style}</style><script>{script}</script></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_page(path: Path | str, title: str, parts: Iterable[str], style: str = "") -> Path:
    """Write a page.

    Parameters
    ----------
    path : path-like
    title : str
    parts : iterable of str
        HTML, of `paragraph`, `heading`, `table` and `drawn`.
    style : str
        Further rules of CSS.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    InputError
        A ValueError: for a path that cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = write_page(Path(folder, "page.html"), "1 < 2", [paragraph("So it is.")]).read_text()
    >>> "<h1>1 &lt; 2</h1>" in text, "So it is." in text
    (True, True)
    """
    body = "\n".join(parts)
    page = _PAGE.format(title=html.escape(title), style=style, script=get_plotlyjs(), body=body)
    try:
        Path(path).write_text(page, "utf-8")
    except OSError as error:
        raise InputError(f"path={str(path)!r}: cannot be written: {error.strerror}") from error
    return Path(path)


def paragraph(text: str) -> str:
    """A paragraph of plain text, as HTML.

    Examples
    --------
    >>> paragraph("a & b")
    '<p>a &amp; b</p>'
    """
    return f"<p>{html.escape(text)}</p>"


def heading(text: str, level: int = 2) -> str:
    """A heading of plain text, as HTML.

    Examples
    --------
    >>> heading("Results")
    '<h2>Results</h2>'
    """
    return f"<h{level}>{html.escape(text)}</h{level}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text, as HTML.

    Examples
    --------
    >>> table(["a"], [["<1>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def drawn(figure: Any) -> str:
    """A Plotly figure, as HTML for a page of `write_page`."""
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))
