"""Read tables of test cases and published configs from tests/tables.json, by their names."""

import json
from pathlib import Path
from typing import Any

_TABLES: dict[str, Any] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def read_table(name: str) -> Any:
    """Return the table `name`: rows of a test, or a config such as "configs.minimax_m2"."""
    return _TABLES[name]
