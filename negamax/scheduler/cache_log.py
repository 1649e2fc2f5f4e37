"""Changes of a rank's prefix cache, for `engine.core.kv_events`.

The block pools append each change. A chain gives the tokens of consecutive block hashes. The log
has the chains of blocks that are indexed and of blocks that an admitted sequence shares. For a
block that is loaded or imported, the chain is logged after the change.
"""

from dataclasses import dataclass, field
from typing import Any

from negamax.scheduler.prefix_cache import BlockHashes

Change = tuple[bytes, bool]  # hash of a block; True: cached, False: evicted


@dataclass(frozen=True)
class CacheChanges:
    """Changes of each cache level, in order."""

    chains: list[tuple[BlockHashes, int, int]]  # hashes of a sequence, first block, end block
    kv: list[Change]  # KV cache
    host: list[Change]  # host memory
    files: list[Change] = field(default_factory=list)


class CacheLog:
    """Changes since the last `take`. Single writer: the rank's scheduler."""

    def __init__(self) -> None:
        self.chains: list[tuple[BlockHashes, int, int]] = []
        self.kv: list[Change] = []
        self.host: list[Change] = []
        self.files: list[Change] = []

    def take(self) -> CacheChanges | None:
        """Return and clear the changes; None if there are no changes."""
        logs: tuple[list[Any], ...] = (self.chains, self.kv, self.host, self.files)
        if not any(logs):
            return None
        found = CacheChanges(*(log.copy() for log in logs))
        for log in logs:
            log.clear()
        return found
