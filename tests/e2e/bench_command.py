import gc
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from negamax.cli.main import main


class Bench:
    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._captured = captured
        self.code = 0
        self.out = self.err = ""

    def __call__(self, url: str, line: str, *options: str) -> dict[str, Any]:
        """Run the benchmark with the options of `line`. Return the saved result, or {}."""
        file = self._folder / "result.json"
        file.unlink(missing_ok=True)
        saved = f"--save-detailed --result-dir {self._folder} --result-filename {file.name}".split()
        words = ["--base-url", url, *saved, *shlex.split(line), *options]
        self.code = main(["bench", "serve", *words])
        gc.freeze()  # Imports of the command are exempt from garbage collection.
        self.out, self.err = self._captured.readouterr()
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def measure(self, url: str, line: str, *options: str) -> dict[str, Any]:
        found = self(url, line, *options)
        assert self.code == 0, self.out + self.err
        return found
