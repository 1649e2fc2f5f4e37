"""Names of test files are unique."""

from tests.checks.sources import ROOT


def test_names_of_test_files_are_unique() -> None:
    """pytest imports test modules into one name space, except those of packages."""
    names = [
        path.name
        for folder in (ROOT / "tests", ROOT / "nano")
        for path in folder.rglob("*.py")
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists()
    ]
    assert sorted(names) == sorted(set(names))
