import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("practicum-*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_the_recorded_results(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    suffixes = {".py", ".toml", ".j2", ".jinja", ".css", ".js", ".typed", ".safetensors", ".json"}
    ours = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.suffix in suffixes}
    assert not ours - inside
    cards = {name for name in inside if name.endswith("/card.toml")}
    assert {"practicum/retrieval/lemur/card.toml", "practicum/clustering/lmbc/card.toml"} <= cards
    assert any(name.startswith("practicum/checks/templates/") for name in inside)
    recorded = {f"practicum/recorded/{path.name}" for path in (ROOT / "results").glob("*.json")}
    assert recorded
    assert recorded <= inside


def test_the_installed_wheel_lists_its_methods(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    code = "import practicum, practicum.cli; assert practicum.__file__.startswith(%r); practicum.cli.main(['list'])"
    environment = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-c", code % str(target)], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert found.returncode == 0, found.stderr
    for line in ("lemur", "lmbc"):
        (row,) = [row for row in found.stdout.splitlines() if row.startswith(line)]
        assert "(full, 20" in row, "the recorded results are not shown"


def test_every_extra_that_a_card_names_is_declared():
    import tomllib

    from practicum.catalog import Catalog

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for card in Catalog():
        assert {card.extra, *card.check_needs} <= set(extras)
