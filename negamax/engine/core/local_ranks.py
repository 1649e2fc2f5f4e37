"""Rank processes of this machine: started, watched, ended."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from negamax.base import process
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.core.rank_watch import LocalWatch, RankWatch
from negamax.worker.config import RankAddresses, WorkerConfig


class Machine(Protocol):
    """Where some of the ranks of an executor run."""

    ranks: range

    def start(self) -> None:
        """Start the ranks, each of which connects to its endpoint."""

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        """`config` with what only this machine has, for one of its ranks."""
        ...

    @property
    def alarms(self) -> Sequence[IO[bytes]]:
        """Files on which `POLLERR` says that a rank may have ended."""
        ...

    def watch(self) -> RankWatch:
        """A watch of the ranks, for a thread of its own."""
        ...

    def abort(self) -> None:
        """Let kernels that wait for other ranks give up."""

    def expect_end(self) -> None:
        """From now on a rank that ends is not lost: all are about to be told to end."""

    def stop(self, *, timeout: float, restarts: bool) -> None:
        """End the ranks, those that still run after `timeout` seconds by force. `restarts`: others
        will be started in their place.
        """


class LocalRanks:
    """The ranks of this machine."""

    def __init__(self, ranks: range, addresses: RankAddresses) -> None:
        self.ranks = ranks
        self.processes: list[subprocess.Popen[bytes]] = []
        self._addresses = addresses
        rows = len(addresses.plans) + 1
        self._beats = SharedNumbers(1, num_rows=rows, path=Path(addresses.beats))

    def start(self) -> None:
        """See `Machine`."""
        for rank in self.ranks:
            endpoint = self._addresses.plans[rank]
            self.processes.append(process.spawn("negamax.worker.rank_process", endpoint, str(rank)))

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        """See `Machine`."""
        return replace(config, layout=config.layout.of_rank(rank), addresses=self._addresses)

    @property
    def alarms(self) -> list[IO[bytes]]:
        """The pipes to the ranks: no one reads that of a rank that is gone."""
        return [child.stdin for child in self.processes if child.stdin is not None]

    def watch(self) -> LocalWatch:
        """See `Machine`."""
        return LocalWatch(self.ranks, self.processes, self._beats)

    def abort(self) -> None:
        """See `Machine`."""
        self._beats.row(self._beats.num_rows - 1)[0] = 1

    def expect_end(self) -> None:
        """See `Machine`. Nobody asks for the death of a rank any more."""

    def stop(self, *, timeout: float, restarts: bool = False) -> None:
        """See `Machine`."""
        process.stop(*self.processes, timeout=timeout)
