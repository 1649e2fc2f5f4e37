"""The product grows only where a change says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import count_statements as statements


def test_no_room_grows_unsaid() -> None:
    table = json.loads(statements.TABLE.read_text(encoding="utf-8"))
    counts = statements.count_statements()
    print(statements.table_of(counts, table))
    assert not statements.too_big(counts, table["allowed"]), (
        "cut, or write it down: python tools/count_statements.py --write"
    )


def test_a_room_that_grows_is_named(tmp_path: Path) -> None:
    (tmp_path / "room" / "inner").mkdir(parents=True)
    (tmp_path / "room" / "inner" / "a.py").write_text("x = 1; y = 2\ndef f():\n    return x\n")
    (tmp_path / "top.py").write_text('"""Docstring."""\n')
    counts = statements.count_statements(tmp_path)
    assert counts == {".": 1, "room": 4}
    assert statements.too_big({"room": 425, "new": 21}, {"room": 400}) == ["room", "new"]
    assert statements.too_big({"room": 420, "new": 20}, {"room": 400}) == []
    table = {"release": {"room": 3, "gone": 2}, "allowed": {"room": 4}}
    assert [line.split() for line in statements.table_of(counts, table).splitlines()[1:]] == [
        [".", "0", "1", "+1", "0"],
        ["gone", "2", "0", "-2", "0"],
        ["room", "3", "4", "+1", "4"],
        ["total", "5", "5", "+0", "4"],
    ]
