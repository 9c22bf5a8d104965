"""A headless Chromium, and the pages of the report's tests opened in it."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "checks"))

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def chromium():
    """A started browser. Fails where there is none: these tests are only asked for where there is one."""
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium")
    assert executable, "these tests need the command chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()
