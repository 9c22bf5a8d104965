"""What the site needs beside its configuration: the methods in the navigation, and the mark-up of docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

from practicum.catalog import Catalog

sys.path.insert(0, str(Path(__file__).parent))

from docstring_markup import DocstringMarkup


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the entry ``Methods`` of the navigation with the cards, and let docstrings have formulas."""
    pages = [{card.name: f"methods/{card.name}.md"} for card in Catalog()]
    for entry in config.nav or []:
        if "Methods" in entry:
            entry["Methods"] = ["methods/index.md", *pages]
    config.markdown_extensions.append(DocstringMarkup())  # type: ignore[arg-type]
    return config
