"""Check that files which ruff ignores have at most 100 columns."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 100
KINDS = ("c", "h", "js", "mjs", "css", "html", "jinja", "toml", "yaml", "yml", "conf", "sh", "md")
NAMES = ("Makefile", "run", "Dockerfile")
OTHERS = re.compile(r"(^|/)vendor/")  # Vendored files stay as their authors wrote them.
_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_TARGET = re.compile(r"\]\([^)\s]+\)|<?https?://\S+")


def files() -> list[str]:
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    own = [name for name in listed if not OTHERS.search(name) and (ROOT / name).is_file()]
    return [name for name in own if name.rpartition(".")[2] in KINDS or Path(name).name in NAMES]


def wide_lines(text: str, *, is_prose: bool) -> list[int]:
    """Return the numbers of lines that are too wide.

    Prose may exceed the limit in tables, code and link targets.
    """
    if is_prose:
        text = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
        text = _TARGET.sub("", text)
    return [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if len(line.expandtabs(4)) > WIDTH and not (is_prose and line.lstrip().startswith("|"))
    ]


def test_lines_fit_beside_each_other() -> None:
    found = {}
    for name in files():
        text = (ROOT / name).read_text(encoding="utf-8")
        found[name] = wide_lines(text, is_prose=name.endswith(".md"))
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_wide_lines_are_found() -> None:
    wide = "word " * 21
    prose = f"a\n{wide}\n| {wide} |\n```sh\n{wide}\n```\n[a]({'x' * 120})\n\n{wide}"
    assert wide_lines(prose, is_prose=True) == [2, 9]
    assert wide_lines(f"{wide}\n| {wide}\n", is_prose=False) == [1, 2]
