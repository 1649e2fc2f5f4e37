"""How long something that shows from time to time that it lives has not done so."""

from __future__ import annotations

import time

_LONGEST_LOOK_SECONDS = 1.0  # a look that comes later says that this process stood still


class Silence:
    """The silence of one process; times in which the one that looks stood still itself do not
    count. Single writer: whoever looks, several times a second."""

    def __init__(self) -> None:
        self._sign = 0.0
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self, sign: float) -> float:
        """The silence until now. `sign` is a number that changes with every sign of life, 0 before
        the first one.
        """
        now = time.monotonic()
        self._seconds += min(now - self._last, _LONGEST_LOOK_SECONDS)
        self._last = now
        if sign != self._sign or not sign:
            self._sign, self._seconds = sign, 0.0
        return self._seconds
