"""A parent process whose event loop stands still: noticed and ended by its children."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from negamax.base.log import get_logger
from negamax.base.process import exit_now
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.silence import Silence

logger = get_logger(__name__)

_LOOK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 1.0  # for the children to tell their clients, before one ends the parent


@dataclass(frozen=True)
class ParentPulse:
    """Where process `pid` shows that its event loop goes round, and how long it may fail to."""

    pid: int
    path: str  # of `SharedNumbers`; the first one changes several times a second; 0: not yet
    hang_seconds: float


def watch_parent(parent: ParentPulse, *, tell: Callable[[str], object] | None = None) -> None:
    """Watch the parent from now on, in a thread of its own. Where it stands still for too long
    `tell` gets the reason, and one second later the parent is killed and this process ends.

    As process 1 of a container the parent cannot be killed from inside; its children end all the
    same.
    """
    pulse = SharedNumbers(1, path=Path(parent.path)).row(0)

    def watch() -> None:
        silence = Silence()
        while silence.seconds(pulse[0]) <= parent.hang_seconds:
            time.sleep(_LOOK_SECONDS)
        reason = f"the first server process gives no sign of life for {parent.hang_seconds:g} s"
        logger.error("%s and is killed", reason)
        if tell is not None:
            tell(reason)
        time.sleep(_LAST_WORDS_SECONDS)
        if os.getppid() == parent.pid:
            os.kill(parent.pid, signal.SIGKILL)
        exit_now(1)

    threading.Thread(target=watch, name="parent-pulse", daemon=True).start()
