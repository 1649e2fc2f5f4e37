"""Changes of a rank's prefix cache, for `engine.core.kv_events`.

The block pools append each change. The chains of blocks that are indexed, and of blocks that an
admitted sequence shares, tell a reader of the log which tokens a hash stands for. The chain of a
block that comes from elsewhere follows its change.
"""

from dataclasses import dataclass, field
from typing import Any

from negamax.scheduler.prefix_cache import BlockHashes

Change = tuple[bytes, bool]  # hash of a block; whether it is cached from now on


@dataclass(frozen=True)
class CacheChanges:
    """Changes in their order, by level."""

    chains: list[tuple[BlockHashes, int, int]]  # blocks: from, to
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
        """Return the changes and forget them; None: there were none."""
        logs: tuple[list[Any], ...] = (self.chains, self.kv, self.host, self.files)
        if not any(logs):
            return None
        found = CacheChanges(*(log.copy() for log in logs))
        for log in logs:
            log.clear()
        return found
