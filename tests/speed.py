"""Check speed on machines of any speed and load, relative to other work."""

import math
import time
from collections.abc import Callable

_TRIES = 10
_HOPELESS = 60.0  # limit in seconds for attempts that are all too slow
_LOOP_SECONDS = 0.003  # time of `_loop` on a quiet core of 2025


def is_linear(seconds: Callable[[int], float], size: int) -> bool:
    """Return whether `size` takes less than 9 times as long as a quarter of `size`.

    A linear function takes 4 times as long, a quadratic one 16 times. The shortest attempts count.
    """
    whole, quarter, spent = math.inf, math.inf, 0.0
    for _ in range(_TRIES):
        whole = min(whole, took := seconds(size))
        quarter = min(quarter, seconds(size // 4))
        if whole < 9 * quarter:
            return True
        spent += took
        if spent > _HOPELESS:
            break
    return False


def is_quick(work: Callable[[], object], limit: float) -> bool:
    """Return whether `work` takes less than `limit` CPU seconds, scaled to a core of 2025.

    The shortest of several attempts counts.
    """
    for _ in range(_TRIES):
        spent = cpu_seconds(work)
        if spent < limit or spent < limit * slowness():
            return True
    return False


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def slowness() -> float:
    """Return the time of a loop divided by its time on a quiet core of 2025, at least 1."""
    return max(1.0, cpu_seconds(_loop) / _LOOP_SECONDS)


def _loop() -> int:
    return sum(number % 7 for number in range(100_000))
