import gc
import json
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

    def __call__(self, url: str, *options: str) -> dict[str, Any]:
        file = self._folder / "result.json"
        file.unlink(missing_ok=True)
        saved = (
            "--save-detailed",
            "--result-dir",
            str(self._folder),
            "--result-filename",
            file.name,
        )
        self.code = main(["bench", "serve", "--base-url", url, *saved, *options])
        gc.freeze()  # again, after the command: imports are exempt from collection
        self.out, self.err = self._captured.readouterr()
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found
