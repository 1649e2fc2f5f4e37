"""What changes in a rank's prefix cache, for `engine.core.kv_events`.

The block pools append each change. The chains of blocks that are indexed, and of blocks that an
admitted sequence shares, tell a reader of the log which tokens a hash stands for. The chain of a
block that comes from elsewhere follows its change.
"""

from dataclasses import dataclass

from negamax.scheduler.prefix_cache import BlockHashes

Change = tuple[bytes, bool]  # hash of a block; whether it is cached from now on


@dataclass(frozen=True)
class CacheChanges:
    """Changes in their order, by level."""

    chains: list[tuple[BlockHashes, int, int]]  # blocks: from, to
    kv: list[Change]  # KV cache
    host: list[Change]  # host memory


class CacheLog:
    """Changes since the last `take`. Single writer: the rank's scheduler."""

    def __init__(self) -> None:
        self.chains: list[tuple[BlockHashes, int, int]] = []
        self.kv: list[Change] = []
        self.host: list[Change] = []

    def take(self) -> CacheChanges | None:
        """Return the changes and forget them; None: there were none."""
        if not (self.chains or self.kv or self.host):
            return None
        found = CacheChanges(self.chains.copy(), self.kv.copy(), self.host.copy())
        for entries in (self.chains, self.kv, self.host):
            entries.clear()
        return found
