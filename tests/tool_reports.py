"""What the load tests and replays in `tools/` say, run as programs that are forked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.forked_children import start


def report(tool: str, flag: str, name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The report of `tools/TOOL.py --small FLAG NAME`, which must have found no problem."""
    file = folder / "report.json"
    given = (f"tools.{tool}", "--small", flag, name, "--json", str(file), *options)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with start("tests.forked_tool", *given, **pipes) as running:
        try:
            said, _ = running.communicate(timeout=800)
        except BaseException:
            running.kill()
            raise
    assert running.returncode == 0, said
    found: dict[str, Any] = json.loads(file.read_text())[name]
    assert found["problems"] == []
    return found
