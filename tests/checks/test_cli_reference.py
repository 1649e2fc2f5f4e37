"""docs/cli.md says what the commands take: it is generated, and not stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "generate_cli_reference.py"
PAGE = SCRIPT.parents[1] / "docs" / "cli.md"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_page_is_what_the_commands_say() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_stale_page_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "cli.md"
    page.write_text(
        PAGE.read_text(encoding="utf-8").replace("| `--port` |", "| `--harbour` |"),
        encoding="utf-8",
    )
    done = run("--check", "--output", str(page))
    assert done.returncode == 1
    assert "+| `--port` |" in done.stderr and "-| `--harbour` |" in done.stderr
