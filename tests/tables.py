"""Read tables of test cases from tests/tables.json, by module and test."""

import json
from pathlib import Path
from typing import Any

_TABLES: dict[str, list[Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def read_table(name: str) -> list[Any]:
    """Return the rows of the table `name`, such as "api_schemas.every_name_of_a_form"."""
    return _TABLES[name]
