"""Run a rank's heartbeat thread, which also aborts waits for unresponsive ranks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from negamax.base.log import get_logger
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.supervision import exit_now

if TYPE_CHECKING:
    from negamax.parallel.poll_control import PollControl

logger = get_logger(__name__)

BEAT_SECONDS = 0.1
# A rank exits this many seconds after it finds a dead rank, which the executor must detect first.
LOST_SECONDS = 2.0


class RankHeartbeat:
    """Writes the rank's row of `beats`. All waits end if the last row of `beats` is not 0."""

    def __init__(self, beats: SharedNumbers, rank: int) -> None:
        self._rank = rank
        self._row, self._abort = beats.row(rank), beats.row(beats.num_rows - 1)
        self._control: PollControl | None = None
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def watch(self, control: PollControl | None) -> None:
        """Advance the clock of waiting kernels, and end the process when a wait times out."""
        self._control = control

    @property
    def is_aborted(self) -> bool:
        """Whether waits were aborted, so that results of later steps are invalid."""
        return self._control is not None and self._control.is_aborted

    def _beat(self) -> None:
        last = time.monotonic()
        while True:
            now = self._row[0] = time.monotonic()
            if self._control is not None:
                # a wait for another rank does not count the time in which this process was stopped
                self._control.tick(min(now - last, 2 * BEAT_SECONDS))
                if self._abort[0]:
                    self._control.abort()
                elif self._control.is_aborted:
                    logger.error(
                        "rank %d has waited too long for another rank's part of a step", self._rank
                    )
                    time.sleep(LOST_SECONDS)
                    exit_now(1)
            last = now
            time.sleep(BEAT_SECONDS)
