"""Write logs to standard error, one line per event; stdout is for data only.

A child process reads its parent's settings from an environment variable that `spawn` sets.
"""

import datetime
import json
import logging
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Any

from negamax.base import env
from negamax.base.log_output import RateLimit, StderrHandler, TextFormatter

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
# `spawn` sets this variable to LEVEL:REPLICA:FORMAT for `setup_as_parent` in the child process.
CHILD_VARIABLE = "NEGAMAX_CHILD_LOG"

_KEPT_LINES = 100  # Number of recent log lines in a crash dump.
_KEPT_CHARACTERS = 2000  # Crash dumps truncate log lines to this length.

get_logger = logging.getLogger

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"


def setup(level: str | int = "info", log_format: str = "text", *, replica: str = "") -> None:
    """Configure the root logger. Negamax logs at `level`, and libraries at level warning.
    `log_format` is "text" or "json". `replica` is the index of this engine if several engines run.
    """
    handler = StderrHandler()
    handler.addFilter(RateLimit())
    text = _TEXT.replace("%(name)s", f"replica {replica}: %(name)s") if replica else _TEXT
    is_json = log_format == "json"
    handler.setFormatter(_JsonFormatter(replica) if is_json else TextFormatter(text, _DATE))
    root = logging.getLogger()
    root.handlers[:] = [handler, _RecentLines()]
    root.setLevel(logging.WARNING)
    logging.getLogger("negamax").setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(True)
    if is_json:
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda end: _log_uncaught(
            end.exc_type, end.exc_value or end.exc_type(), end.exc_traceback
        )


def setup_as_parent() -> None:
    """Configure the root logger of a child process like the logger of its parent."""
    given = env.get(CHILD_VARIABLE) or f"{logging.INFO}::text"
    level, replica, log_format = given.split(":")
    setup(int(level), log_format, replica=replica)


def settings(replica: int | None = None) -> str:
    """Return the value of `CHILD_VARIABLE` for a child of `replica`, or of this replica if None."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, _JsonFormatter) for handler in root.handlers)
    level = logging.getLogger("negamax").getEffectiveLevel()
    _, own, _ = (env.get(CHILD_VARIABLE) or "::").split(":")
    return f"{level}:{own if replica is None else replica}:{'json' if is_json else 'text'}"


def recent_lines() -> list[str]:
    """Return recent log lines. Lines of `negamax.api` are omitted: they may quote requests."""
    handlers = logging.getLogger().handlers
    return [line for each in handlers if isinstance(each, _RecentLines) for line in each.lines]


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Log an uncaught exception. Python's own hook would write plain text to a JSON log."""
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logger = logging.getLogger("negamax")
    logger.critical("uncaught %s", kind.__name__, exc_info=(kind, error, traceback))


class _RecentLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_TEXT, _DATE))
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("negamax.api."):
            return
        try:
            self.lines.append(self.format(record)[:_KEPT_CHARACTERS])
        except Exception:
            self.handleError(record)


class _JsonFormatter(logging.Formatter):
    """Writes each record, including its `fields`, as a JSON object on one line."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = {"replica": int(replica)} if replica else {}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).astimezone()
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **self._replica,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
