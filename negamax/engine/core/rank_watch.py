"""Whether the rank processes live: what their descriptors and their beats say."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from negamax.base.process import is_gone
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.silence import Silence

_EXIT_CODE_SECONDS = 1.0  # for the system to know how a process ended whose files are closed


class RankWatch:
    """The ranks of one executor, seen by one thread that looks several times a second. Single user:
    that thread.

    `beats` has a row for each rank, into which it writes the time again and again.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], beats: SharedNumbers) -> None:
        self._processes = processes
        self._beats = beats
        self._silences = [Silence() for _ in processes]

    def death(self) -> str | None:
        """What became of the first rank that has ended; None: all run."""
        for rank, process in enumerate(self._processes):
            if is_gone(process):
                return f"rank {rank} ended with {_how_ended(process)}"
        return None

    def longest_silence(self) -> tuple[int, float]:
        """The rank without a sign of life for the longest time, and for how many seconds."""
        silences = [
            silence.seconds(self._beats.row(rank)[0]) for rank, silence in enumerate(self._silences)
        ]
        seconds = max(silences)
        return silences.index(seconds), seconds


def _how_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"exit code {process.wait(_EXIT_CODE_SECONDS)}"
    except subprocess.TimeoutExpired:  # the driver still frees what it had
        return "an exit code that is not known yet"
