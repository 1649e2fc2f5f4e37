"""Python statements per room, against the last release and against what the table allows.

    python tools/count_statements.py            # prints the table; exit code 1 if a room is too big
    python tools/count_statements.py --write    # the rooms may have what they have now
    python tools/count_statements.py --release  # the same, and this is the release to compare with

Statements, since lines get longer and shorter with their formatting. The table is
`tests/checks/statements.json`: a room may grow by a twentieth or 20 statements beyond `allowed`;
whoever needs more writes it down in the same change, where a reader of the change sees it.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "checks" / "statements.json"
PRODUCT = ROOT / "negamax"


def count_statements(product: Path = PRODUCT) -> dict[str, int]:
    """Room to statements. Modules beside the rooms are the room "."."""
    found: Counter[str] = Counter()
    for path in product.rglob("*.py"):
        parts = path.relative_to(product).parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[parts[0] if len(parts) > 1 else "."] += sum(
            isinstance(node, ast.stmt) for node in ast.walk(tree)
        )
    return dict(sorted(found.items()))


def too_big(counts: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """The rooms that have grown by more than the table allows."""
    return [
        room
        for room, count in counts.items()
        if count > (limit := allowed.get(room, 0)) + max(20, limit // 20)
    ]


def table_of(counts: dict[str, int], table: dict[str, dict[str, int]]) -> str:
    """Room, statements at the last release, now, their difference, and what is allowed."""
    release, allowed = table["release"], table["allowed"]
    lines = [f"{'room':<14}{'release':>9}{'now':>9}{'diff':>8}{'allowed':>9}"]
    for room in [*sorted({*counts, *release}), "total"]:
        old, now, limit = (
            sum(column.values()) if room == "total" else column.get(room, 0)
            for column in (release, counts, allowed)
        )
        lines.append(f"{room:<14}{old:>9}{now:>9}{now - old:>+8}{limit:>9}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the product's statements per room.")
    parser.add_argument("--write", action="store_true", help="allow what there is now")
    parser.add_argument("--release", action="store_true", help="and compare with it from now on")
    given = parser.parse_args()
    counts = count_statements()
    table: dict[str, dict[str, int]] = json.loads(TABLE.read_text(encoding="utf-8"))
    if given.write or given.release:
        table["allowed"] = counts
    if given.release:
        table["release"] = counts
    if given.write or given.release:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(table_of(counts, table))
    grown = too_big(counts, table["allowed"])
    if grown:
        print(f"grown: {', '.join(grown)}; cut, or write it down: {Path(__file__).name} --write")
    return int(bool(grown))


if __name__ == "__main__":
    raise SystemExit(main())
