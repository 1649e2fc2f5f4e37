"""Whether the rank processes live, judged by their pipes and their heartbeats."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Protocol

from negamax.base.process import is_gone
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.silence import Silence

_EXIT_CODE_SECONDS = 1.0  # for the system to know how a process ended whose files are closed


class RankWatch(Protocol):
    """Ranks seen by one thread that looks several times a second. Single user: that thread."""

    def death(self) -> str | None:
        """How the first rank that is gone ended; None: all ranks live."""
        ...

    def longest_silence(self) -> tuple[int, float]:
        """The rank without a sign of life for the longest time, and for how many seconds."""
        ...


class LocalWatch:
    """The ranks of this machine. `beats` has a row for each rank, into which it writes the time
    again and again.
    """

    def __init__(
        self, ranks: range, processes: Sequence[subprocess.Popen[bytes]], beats: SharedNumbers
    ) -> None:
        self._ranks = ranks
        self._processes = processes
        self._beats = beats
        self._silences = [Silence() for _ in ranks]

    def death(self) -> str | None:
        """See `RankWatch`."""
        for rank, process in zip(self._ranks, self._processes, strict=False):
            if is_gone(process):
                return f"rank {rank} ended with {_how_ended(process)}"
        return None

    def longest_silence(self) -> tuple[int, float]:
        """See `RankWatch`."""
        silences = [
            silence.seconds(self._beats.row(rank)[0])
            for rank, silence in zip(self._ranks, self._silences, strict=True)
        ]
        seconds = max(silences)
        return self._ranks[silences.index(seconds)], seconds


class JointWatch:
    """The ranks of several machines."""

    def __init__(self, watches: Sequence[RankWatch]) -> None:
        self._watches = watches

    def death(self) -> str | None:
        """See `RankWatch`."""
        return next((death for watch in self._watches if (death := watch.death())), None)

    def longest_silence(self) -> tuple[int, float]:
        """See `RankWatch`."""
        return max((watch.longest_silence() for watch in self._watches), key=lambda found: found[1])


def _how_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"exit code {process.wait(_EXIT_CODE_SECONDS)}"
    except subprocess.TimeoutExpired:  # the driver still frees what it had
        return "an exit code that is not known yet"
