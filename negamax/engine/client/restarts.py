"""How often and how soon a dead engine is started again. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_FIRST_PAUSE = 1.0  # seconds before the second of several restarts in a row; doubles
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Supervision:
    """How an engine is watched over. Seconds where nothing else is said."""

    max_restarts: int = 0  # within `restart_window`; after that the engine stays dead
    restart_window: float = 600.0
    hang_timeout: float = 300.0  # that its loop may stand still while there is work


class RestartPolicy:
    """Remembers the deaths of an engine. Single writer: its supervisor."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Note a death at monotonic second `now`; seconds to wait before the next start, or None:
        give up.
        """
        while self._deaths and self._deaths[0] <= now - self._supervision.restart_window:
            self._deaths.popleft()
        self._deaths.append(now)
        count = len(self._deaths)
        if count > self._supervision.max_restarts:
            return None
        return 0.0 if count == 1 else min(_FIRST_PAUSE * 2.0 ** (count - 2), _LONGEST_PAUSE)
