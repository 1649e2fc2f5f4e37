"""Write a JSON file (a crash dump) for each crash. Crash dumps contain no text from requests."""

import datetime
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from negamax.base import env, log
from negamax.base.log import get_logger

logger = get_logger(__name__)

OFF = "none"  # Value of the folder option that disables crash dumps.
MAX_FILES = 20  # Largest number of crash dumps in a folder; older dumps are removed.
_PAUSE_SECONDS = 60.0  # Shortest time between two crash dumps of a process.
_MAX_LINE = 2000  # Longer lines of a traceback are truncated to this number of characters.
_PACKAGES = ("negamax", "torch", "triton", "xgrammar", "msgspec", "pyzmq", "tokenizers", "fastapi")


class CrashDumps:
    """Writes crash dumps of one process. The thread that notices a crash writes the dump."""

    def __init__(self, folder: str | None, *, part: str, options: Mapping[str, Any]) -> None:
        """Write into `folder`. None means the default folder; `OFF` disables crash dumps. `part` is
        the kind of process, such as "engine". `options` must not contain secrets.
        """
        self._folder, self._part, self._options = folder, part, options
        self._last = -_PAUSE_SECONDS

    def write(
        self,
        reason: str,
        *,
        details: Callable[[], Mapping[str, Any]],
        error: BaseException | None = None,
    ) -> Path | None:
        """Write a crash dump with file mode 0600, and log its path. Never raises. Return None if
        dumps are disabled, if the last dump is recent, or if writing fails.
        """
        now = time.monotonic()
        if self._folder == OFF or now - self._last < _PAUSE_SECONDS:
            return None
        self._last = now
        try:
            path = self._write(reason, details=details(), error=error)
        except Exception as problem:  # Do not raise a second error if the write fails.
            logger.warning("no crash dump could be written: %r", problem)
            return None
        logger.error("a crash dump was written to %s", path)
        return path

    def _write(
        self, reason: str, *, details: Mapping[str, Any], error: BaseException | None
    ) -> Path:
        at = datetime.datetime.now(datetime.UTC)
        lines = [] if error is None else "".join(traceback.format_exception(error)).splitlines()
        dump = {
            "time": at.isoformat(timespec="milliseconds"),
            "part": self._part,
            "pid": os.getpid(),
            "reason": reason,
            "versions": {
                "python": platform.python_version(),
                **{name: env.installed_version(name) for name in _PACKAGES},
            },
            "platform": {
                "system": platform.platform(),
                "machine": platform.machine(),
                "executable": sys.executable,
                "usable_cores": env.usable_cores(),
                "available_memory": env.available_memory(),
            },
            "options": self._options,
            **details,
            "traceback": [line[:_MAX_LINE] for line in lines],
            "log": log.recent_lines(),
        }
        content = json.dumps(dump, indent=1, default=str).encode()
        state = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        folder = state / "negamax" / "crashes" if self._folder is None else Path(self._folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(folder.glob("crash-*.json"))[: -(MAX_FILES - 1)]:
            old.unlink(missing_ok=True)
        path = folder / f"crash-{at:%Y%m%dT%H%M%S.%fZ}-{self._part}-{os.getpid()}.json"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return path
