"""Check that replaced words do not return. `words.toml` lists names of code, and words of prose."""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "words.toml").read_text(encoding="utf-8")
)
PROSE = WORDS.pop("prose")
# Dated pages keep their words, and the table of words must contain the old words.
UNCHECKED = ("docs/log/", "CONTRIBUTING.md", "tests/checks/")


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
    """Map all names without leading underscores, and the file's name, to their first line."""
    found = {path.stem: 1}
    for name, line in names(ast.parse(path.read_text(encoding="utf-8"))):
        found.setdefault(name.lstrip("_"), line)
    return found


@pytest.mark.parametrize("place", WORDS)
def test_replaced_names_stay_replaced(place: str) -> None:
    root = ROOT / place
    assert root.exists(), f"words.toml names {place}, which does not exist"
    any_word = re.compile(rf"\b_*({'|'.join(WORDS[place])})\b")
    old = []
    for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
        if path.stem not in WORDS[place] and not any_word.search(path.read_text("utf-8")):
            continue
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


def find_prose(path: Path) -> str:
    """Return the sentences of a file: a whole page, or the docstrings and comments of code.

    In folders with text for users, the result includes all strings.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type == tokenize.STRING and (
            token.string.startswith(('"""', 'r"""')) or path.parent.name in ("options", "cli")
        )
        if is_text or token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("#"))
    return "\n".join(found)


def test_replaced_words_stay_out_of_prose() -> None:
    old = re.compile("|".join(rf"\b{word}\b".replace(" ", r"\s+") for word in PROSE), re.IGNORECASE)
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [
        f"{name}: {match[0]!r}, say {PROSE[' '.join(match[0].lower().split())]}"
        for name in listed.stdout.splitlines()
        if not name.startswith(UNCHECKED) and (ROOT / name).is_file()
        if old.search((ROOT / name).read_text(encoding="utf-8"))
        for match in old.finditer(find_prose(ROOT / name))
    ]
    assert found == []
