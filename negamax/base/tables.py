"""Read the tables that modules keep in TOML files beside them."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(module_file: str, name: str | None = None) -> dict[str, Any]:
    """Read the file `name` beside a module; by default, the file has the name of the module."""
    path = Path(module_file).with_suffix(".toml")
    return tomllib.loads((path.with_name(name) if name else path).read_text(encoding="utf-8"))
