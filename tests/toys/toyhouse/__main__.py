"""The command line over the toys: ``python -m toyhouse check coin``."""

from pathlib import Path

from practicum.catalog import Catalog
from practicum.cli import main

if __name__ == "__main__":
    main(catalog=Catalog(Path(__file__).parent, "toyhouse"))
