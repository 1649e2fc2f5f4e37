"""Functions start with verbs; names of classes and of test files are unique."""

import ast
from collections import Counter

from tests.checks.sources import ROOT, SOURCES, nodes, room

# Callbacks (`on_`), conversions (`to_`, `as_`) and alternative constructors may start with these.
FIRST_WORDS = {
    "a", "an", "the", "of", "at", "by", "in", "for", "from", "with", "without", "beside", "behind",
    "between", "among", "under", "over", "above", "below", "after", "before", "since", "until",
    "during", "within", "through", "across", "per", "into", "onto", "about", "against", "near",
}  # fmt: skip


def has_free_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether it is a property or may be an alternative constructor."""
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    return any(word in decorators for word in ("property", "classmethod", "staticmethod"))


def test_public_functions_do_not_start_with_a_preposition() -> None:
    found = [
        f"{room(path)}:{node.lineno}: {node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.split("_")[0] in FIRST_WORDS
        and not has_free_name(node)
    ]
    assert found == []


def test_names_of_test_files_are_unique() -> None:
    """pytest imports test modules into one name space, except those of packages."""
    names = [
        path.name
        for folder in (ROOT / "tests", ROOT / "nano")
        for path in folder.rglob("*.py")
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists()
    ]
    assert sorted(names) == sorted(set(names))


def test_names_of_classes_are_unique() -> None:
    count = Counter(
        node.name for path in SOURCES for node in nodes(path) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in count.items() if number > 1] == []
