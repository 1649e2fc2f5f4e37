"""What the load tests and replays in `tools/` say, run as programs that are forked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.forked_children import finished


def report(tool: str, flag: str, name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The report of `tools/TOOL.py --small FLAG NAME`, which must have found no problem."""
    file = folder / "report.json"
    given = (f"tools.{tool}", "--small", flag, name, "--json", str(file), *options)
    done = finished("tests.forked_tool", *given, timeout=800.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())[name]
    assert found["problems"] == []
    return found
