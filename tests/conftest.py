"""Shared fixtures: a small house of toy methods, seen by this process and by every process that it starts."""

import os
import sys
from pathlib import Path

import pytest

from practicum.catalog import Catalog

TOYS = Path(__file__).parent / "toys"
sys.path.insert(0, str(TOYS))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TOYS), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def toys() -> Catalog:
    return Catalog(TOYS / "toyhouse", "toyhouse")
