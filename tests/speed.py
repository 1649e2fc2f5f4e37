"""Whether work is fast enough, on a machine of any speed that has other work too: against less of
the same work, or against a loop of Python's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_TRIES = 10
_HOPELESS = 60.0  # seconds of tries that were all too slow
_LOOP_SECONDS = 0.003  # of `_loop` on a quiet core of 2025


def is_linear(seconds: Callable[[int], float], size: int) -> bool:
    """Whether `seconds` of `size` are less than 9 times those of a quarter of it: 4 times what is
    linear, 16 times what is quadratic. The shortest of several tries count.
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
    """Whether `work` takes less than `limit` seconds of the processor on a core of 2025, and as
    many more as this one is slower; the shortest of several tries counts.
    """
    for _ in range(_TRIES):
        spent = cpu_seconds(work)
        if spent < limit or spent < limit * slowness():
            return True
    return False


def cpu_seconds(work: Callable[[], object]) -> float:
    """The processor's time for `work`, in all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def slowness() -> float:
    """How many times as long as on a quiet core of 2025 a loop takes now, 1 at least."""
    return max(1.0, cpu_seconds(_loop) / _LOOP_SECONDS)


def _loop() -> int:
    return sum(number % 7 for number in range(100_000))
