"""The only door to the process environment: variables and cores."""

from __future__ import annotations

import os
import sys


def get(name: str) -> str | None:
    """The value of environment variable `name`, or None where it is unset or empty."""
    return os.environ.get(name) or None


def set_default(name: str, value: str) -> None:
    """Set environment variable `name` of this process (and its children) unless somebody has set it."""
    os.environ.setdefault(name, value)


def usable_cores() -> int:
    """CPU cores this process may run on (its affinity where the platform tells, else all)."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
