"""Logging set-up: one line per event, time, level, process role, message; to standard error, so that stdout stays data."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup(level: str = "info") -> None:
    """Configure the root logger of this process at `level` (debug, info, warning, error)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("negamax").setLevel(level.upper())


def get_logger(name: str) -> logging.Logger:
    """The logger of module `name` (pass `__name__`)."""
    return logging.getLogger(name)
