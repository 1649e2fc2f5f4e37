"""What the load tests and replays in `tools/` say, run as programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def report(tool: str, flag: str, name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The report of `tools/TOOL --small FLAG NAME`, which must have found no problem."""
    file = folder / "report.json"
    command = [sys.executable, str(ROOT / "tools" / tool), "--small", flag, name]
    done = subprocess.run(
        [*command, "--json", str(file), *options], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())[name]
    assert found["problems"] == []
    return found
