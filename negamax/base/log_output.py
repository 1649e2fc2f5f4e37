"""Write log records to standard error without blocking. Escape and rate-limit the records."""

import contextlib
import logging
import os
import re
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_CONTROL_IN_LINES = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))

_LIMIT_SECONDS = 10.0
_LIMIT_RECORDS = 20  # Largest number of records of one kind per _LIMIT_SECONDS.
_LIMIT_KINDS = 1000  # Largest number of kinds of records in `RateLimit._seen`.

_MOST_PENDING = 1000  # Largest number of lines that wait for standard error.
_LONGEST_WRITE = 4096  # Writes of up to this number of bytes to a pipe are never split.


def escaped(text: str) -> str:
    """Return `text` on one line, with control characters as backslash escapes."""
    return _CONTROL.sub(_escape, text)


class TextFormatter(logging.Formatter):
    """Formats log records: escapes control characters, and indents all lines after the first."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        own_lines = "\n" in str(record.msg) and bool(record.args)
        record.message = _indent(record.message) if own_lines else escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return "    " + _indent(super().formatException(ei))  # type: ignore[arg-type]


class RateLimit(logging.Filter):
    """Drops warnings and errors that a logger repeats too often, and counts the dropped records."""

    def __init__(self) -> None:
        super().__init__()
        # kind of record -> (monotonic second when a period began, number of records in the period)
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        kind = record.name, str(record.msg)[:200]
        since, count = self._seen.get(kind, (now, 0))
        if now - since > _LIMIT_SECONDS:
            skipped = max(0, count - _LIMIT_RECORDS)
            since, count = now, 0
            if skipped:
                record.msg = f"{record.getMessage()} (and {skipped} more of this kind before)"
                record.args = None
        if len(self._seen) >= _LIMIT_KINDS:
            self._seen.clear()
        self._seen[kind] = since, count + 1
        return count < _LIMIT_RECORDS


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error without blocking. Keeps up to `_MOST_PENDING` unwritten lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._pending: deque[bytes] = deque()
        self._num_lost = 0
        self._write = _writer_without_waiting()

    @property
    def stream(self) -> TextIO:
        """Return the current `sys.stderr`, which may have been replaced since the start."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if self._write is None:
            super().emit(record)
            return
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:
            self.handleError(record)
            return
        while len(self._pending) >= _MOST_PENDING:
            self._pending.popleft()
            self._num_lost += 1
        self._pending.append(line)
        self.flush()

    def flush(self) -> None:
        """Write as many pending lines as possible."""
        if self._write is None:
            super().flush()
            return
        with contextlib.suppress(OSError):  # The pipe is full or closed.
            if self._pending and self._num_lost:
                lost = f"({self._num_lost} log lines are lost: standard error was not read)\n"
                self._write(lost.encode())
                self._num_lost = 0
            while self._pending:
                written = self._write(self._pending[0][:_LONGEST_WRITE])
                rest = self._pending.popleft()[written:]
                if rest:
                    self._pending.appendleft(rest)


def _writer_without_waiting() -> Callable[[bytes], int] | None:
    """Return a function that writes to stderr without waiting, or None if stderr is a file."""
    try:
        fd = sys.stderr.fileno()
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            connection = socket.socket(fileno=os.dup(fd))
            return lambda line: connection.send(line, socket.MSG_DONTWAIT)
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            # Open the pipe again, because O_NONBLOCK must not affect other writers of the pipe.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            own = os.open(f"/proc/self/fd/{fd}", flags)
            return lambda line: os.write(own, line)
    except (OSError, ValueError, AttributeError):  # Stderr is closed or not a file.
        pass
    return None


def _indent(text: str) -> str:
    return _CONTROL_IN_LINES.sub(_escape, text).replace("\n", "\n    ")


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
