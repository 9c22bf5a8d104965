"""Reads in Markdown what docstrings write in the manner of Sphinx: formulas, and numbered references.

Formulas become MathML while the site is built, so that a reader's browser fetches and runs nothing for them.
"""

from __future__ import annotations

import re
import textwrap
from re import Match
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor


class DocstringMarkup(Extension):
    """Formulas in ``:math:`` and ``.. math::``, references ``[1]_`` and ``.. [1]``."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the patterns: blocks before code and HTML are read, formulas in the text before code."""
        md.preprocessors.register(Blocks(md), "docstring blocks", 28)
        md.inlinePatterns.register(Formula(r":math:`([^`]+)`", md), "docstring formula", 200)


class Formula(InlineProcessor):
    """A formula in running text."""

    def handleMatch(self, m: Match[str], data: str) -> tuple[str | Element, int, int]:
        """Replace it by MathML."""
        return self.md.htmlStash.store(convert(m.group(1))), m.start(0), m.end(0)


class Blocks(Preprocessor):
    """Formulas on lines of their own, and the marks of references."""

    def run(self, lines: list[str]) -> list[str]:
        """Replace them, except in fenced code."""
        parts = re.split(r"(^```.*?^```$)", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
        return "".join(part if part.startswith("```") else self.replaced(part) for part in parts).split("\n")

    def replaced(self, text: str) -> str:
        """Text outside of fenced code."""
        text = re.sub(
            r"^\.\. math::(.*(?:\n(?:[ \t]+\S.*|[ \t]*(?=\n[ \t]+\S)))*)", self.formula, text, flags=re.MULTILINE
        )
        text = re.sub(r"^\.\. \[(\w+)\] ", r"[\1] ", text, flags=re.MULTILINE)
        return re.sub(r"(?<=\[)(\w+)\]_(?!\w)", r"\1]", text)

    def formula(self, found: Match[str]) -> str:
        """A formula on lines of its own, as MathML."""
        latex = " ".join(textwrap.dedent(found.group(1)).split())
        shown = f'<div class="formula">{convert(latex, display="block")}</div>'
        return f"\n\n{self.md.htmlStash.store(shown)}\n\n"
