"""Parse source files once for all checks."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "negamax"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the modules that `path` imports, and the names that it imports from modules."""
    return find_imports(nodes(path))


def top_imports(path: Path) -> tuple[str, ...]:
    """Return the modules that are imported when `path` is imported, outside of functions."""
    found = list[ast.AST](tree(path).body)
    for node in found:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += ast.iter_child_nodes(node)
    return find_imports(found)


def find_imports(found: list[ast.AST]) -> tuple[str, ...]:
    names: list[str] = []
    for node in found:
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(names)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()
