"""Show the progress of long work on standard error: redraw a line on a terminal, or log lines."""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from negamax.base import log

logger = log.get_logger(__name__)

ShowProgress = Callable[[int, int], None]  # Arguments: amount done, total amount.

PATIENCE_SECONDS = 0.5  # Time until a terminal shows the first line of progress.
REDRAW_SECONDS = 0.2
LOG_SECONDS = 5.0
CLEAR_LINE = "\r\x1b[K"


class Progress(AbstractContextManager["Progress"]):
    """Shows the progress of long work. Callers pass the completed amount and the total amount.

    As a context manager, `Progress` clears its line at the end. Without a terminal, or with a JSON
    log, `Progress` logs a line every 5 s. At log level warning, `Progress` prints the line instead.
    """

    def __init__(
        self, what: str, *, unit: Callable[[int], str] = str, enabled: bool = True,
        rank: int | None = None,
    ) -> None:  # fmt: skip
        """`what` describes the work. `unit` formats an amount. Only rank 0 draws on a terminal."""
        self._what = what if rank is None else f"rank {rank}: {what}"
        self._unit = unit
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._on_terminal = is_terminal and not log.settings().endswith("json")
        self._enabled = enabled and sys.stderr is not None and not (self._on_terminal and rank)
        self._began = time.monotonic()
        self._next = self._began + (PATIENCE_SECONDS if self._on_terminal else LOG_SECONDS)
        self._is_drawn = False

    def __exit__(self, *error: object) -> None:
        if self._is_drawn:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._enabled or now < self._next or not done:
            return
        rate = done / (now - self._began)
        line = f"{self._what}: {self._unit(done)} of {self._unit(total)}"
        if self._unit is not str:
            line += f", {self._unit(int(rate))}/s"
        line += f", {(total - done) / rate:.0f} s left"
        self._next = now + (REDRAW_SECONDS if self._on_terminal else LOG_SECONDS)
        if self._on_terminal:
            self._is_drawn = True
            print(f"{CLEAR_LINE}{line}", end="", file=sys.stderr, flush=True)
        elif logger.isEnabledFor(logging.INFO):
            logger.info("%s", line)
        elif logger.isEnabledFor(logging.WARNING):
            print(line, file=sys.stderr, flush=True)


def format_bytes(count: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
