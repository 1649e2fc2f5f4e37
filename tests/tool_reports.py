import json
from pathlib import Path
from typing import Any

from tests.forked_children import finished


def report(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Return the report of a scenario at its small size, which must contain no problem."""
    file = folder / "report.json"
    given = ("tools.drive", name, "--small", "--json", str(file), *options)
    done = finished("tests.forked_tool", *given, timeout=800.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())[name]
    assert found["problems"] == []
    return found
