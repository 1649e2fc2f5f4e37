"""The thread of a rank process that shows that the rank lives, and ends waits for ranks that do not
come.
"""

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
# that a rank which lost another one waits to be ended: the executor should find that one gone, not
# this one
LOST_SECONDS = 2.0


class RankHeartbeat:
    """Beats of rank `rank` in `beats`, a table with a row for each rank and one more, which the
    executor sets to let kernels that wait for other ranks give up."""

    def __init__(self, beats: SharedNumbers, rank: int) -> None:
        self._rank = rank
        self._row, self._abort = beats.row(rank), beats.row(beats.num_rows - 1)
        self._control: PollControl | None = None
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def watch(self, control: PollControl | None) -> None:
        """Keep the clock of these waits from now on, and end the process when one of them was given
        up.
        """
        self._control = control

    @property
    def is_aborted(self) -> bool:
        """Whether waits were given up: the steps since then are void."""
        return self._control is not None and self._control.is_aborted

    def _beat(self) -> None:
        last = time.monotonic()
        while True:
            now = self._row[0] = time.monotonic()
            if self._control is not None:
                # A process that was stopped has not waited meanwhile.
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
