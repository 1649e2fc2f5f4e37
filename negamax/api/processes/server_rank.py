"""Define the rank of a server process, and the files that all processes share."""

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from negamax.api.http.lifecycle import Lifecycle
from negamax.api.measurements import NUM_COLUMNS as METRIC_COLUMNS
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.engine_client import SharedQueue

_MARK_DIGITS = 2  # Number of hexadecimal digits at the end of an id, which identify the process.
_MARK = re.compile(rf"[0-9a-f]{{{_MARK_DIGITS}}}")


@dataclass(frozen=True)
class ServerRank:
    """The server process `index` of `count`. Process 0 supervises the other processes."""

    index: int
    count: int
    folder: Path  # Folder of shared files, which only this user can open.
    queue: SharedQueue  # Requests that wait for the engines.
    metrics: SharedNumbers
    pulses: SharedNumbers  # Monotonic time of each process's last heartbeat, or 0.

    @classmethod
    def of(cls, index: int, count: int, folder: Path, *, num_replicas: int = 1) -> Self:
        return cls(
            index=index,
            count=count,
            folder=folder,
            queue=SharedQueue.of(num_replicas, num_servers=count, folder=folder),
            metrics=SharedNumbers(METRIC_COLUMNS, num_rows=count, path=folder / "metrics"),
            pulses=SharedNumbers(1, num_rows=count, path=folder / "pulses"),
        )

    def socket_of(self, index: int) -> Path:
        return self.folder / f"server-{index}"

    def new_id(self, prefix: str, *, num_bytes: int) -> str:
        random = secrets.token_hex(num_bytes - _MARK_DIGITS // 2)
        return f"{prefix}_{random}{self.index:0{_MARK_DIGITS}x}"

    def owner_of(self, name: str | None) -> int:
        """Return the index of the process that made `name`, or `self.index` if none made `name`."""
        mark = (name or "")[-_MARK_DIGITS:]
        if not _MARK.fullmatch(mark) or int(mark, 16) >= self.count:
            return self.index
        return int(mark, 16)

    @property
    def supervisor_pulse(self) -> Path:
        """The file of all processes' heartbeats; the first process's heartbeat comes first."""
        return self.folder / "pulses"

    def clear(self, index: int) -> None:
        """Reset the shared state of process `index` after its end, but keep its counters."""
        self.queue.clear(index)
        self.metrics.clear(index, num_columns=Lifecycle.NUM_COLUMNS)
        self.pulses.clear(index)
