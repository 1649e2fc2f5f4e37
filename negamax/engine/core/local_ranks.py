"""The rank processes of one machine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from negamax.base.shared_numbers import SharedNumbers
from negamax.base.supervision import Supervised, stop_children
from negamax.worker.config import RankAddresses, WorkerConfig


class RankHost(Protocol):
    """Some of an executor's ranks, which run on the same machine."""

    ranks: range

    def start(self) -> None:
        """Start the ranks, each of which connects to its endpoint."""

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        """Complete `config` for one rank with this machine's settings."""
        ...

    @property
    def alarms(self) -> Sequence[IO[bytes]]:
        """Files on which `POLLERR` reports that a rank may have ended."""
        ...

    def death(self) -> str | None:
        """How the first dead rank ended; None: all ranks run. Any thread may ask."""
        ...

    def longest_silence(self) -> tuple[int, float]:
        """Return the rank without a heartbeat for the longest time, and the seconds. Single user: a
        thread that polls several times a second.
        """
        ...

    def abort(self) -> None:
        """Abort kernels that wait for other ranks."""

    def expect_end(self) -> None:
        """Do not count ranks that end from here on as dead: all will be asked to end."""

    def stop(self, *, timeout: float, restarts: bool) -> None:
        """End the ranks; kill those that still run after `timeout` seconds. `restarts`: whether
        others will replace them.
        """


class LocalRanks:
    def __init__(self, ranks: range, addresses: RankAddresses) -> None:
        self.ranks = ranks
        self.processes: list[Supervised] = []
        self._addresses = addresses
        rows = len(addresses.plans) + 1
        self._beats = SharedNumbers(1, num_rows=rows, path=Path(addresses.beats))

    def start(self) -> None:
        for rank in self.ranks:
            self.processes.append(
                Supervised(
                    "negamax.worker.rank_process",
                    self._addresses.plans[rank],
                    str(rank),
                    heartbeat=self._beats.row(rank),
                )
            )

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        return replace(config, layout=config.layout.replace_rank(rank), addresses=self._addresses)

    @property
    def alarms(self) -> list[IO[bytes]]:
        return [process.pipe for process in self.processes]

    def death(self) -> str | None:
        for rank, process in zip(self.ranks, self.processes, strict=False):
            if process.is_gone:
                return f"rank {rank} ended with {process.describe_end()}"
        return None

    def longest_silence(self) -> tuple[int, float]:
        silences = [process.silence() for process in self.processes]
        seconds = max(silences)
        return self.ranks[silences.index(seconds)], seconds

    def abort(self) -> None:
        self._beats.row(self._beats.num_rows - 1)[0] = 1

    def expect_end(self) -> None:
        pass

    def stop(self, *, timeout: float, restarts: bool = False) -> None:
        stop_children(self.processes, timeout=timeout)
