"""Replaced names of code do not return: `words.toml` lists them with their successors."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "words.toml").read_text(encoding="utf-8")
)


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that the code defines, imports or uses, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name, node.lineno
            case ast.alias(name=name, asname=other):
                yield from ((part, node.lineno) for part in (*name.split("."), other or ""))
            case ast.ImportFrom(module=str(name)):
                yield from ((part, node.lineno) for part in name.split("."))


@cache
def used(path: Path) -> dict[str, int]:
    """Map names without leading underscores, and the file's own, to their first line."""
    found = {path.stem: 1}
    for name, line in names(ast.parse(path.read_text(encoding="utf-8"))):
        found.setdefault(name.lstrip("_"), line)
    return found


@pytest.mark.parametrize("place", WORDS)
def test_replaced_names_stay_replaced(place: str) -> None:
    root = ROOT / place
    assert root.exists(), f"words.toml names {place}, which is not there"
    old = []
    for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
        for word, better in WORDS[place].items():
            if line := used(path).get(word):
                old.append(f"{path.relative_to(ROOT)}:{line}: {word}, say {better}")
    assert old == []


def test_the_check_finds_every_kind_of_name() -> None:
    code = (
        "import a.b as c\nfrom d.e import f\nclass G: h: int = i.j(k=1)\n"
        "async def m(n): ...\ndef o(*p): q = lambda r: s\n"
    )
    found = {name for name, _ in names(ast.parse(code))}
    assert found >= set("abcdefGhijkmnopqrs"), "abcdefGhijkmnopqrs"
    assert all(re.fullmatch(r"[A-Za-z]\w*", word) for place in WORDS.values() for word in place)
