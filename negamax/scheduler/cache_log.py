"""Changes of a rank's prefix cache, for `engine.core.kv_events`.

The block pools append each change. A chain holds the tokens of consecutive block hashes. The log
contains chains of blocks that are indexed or that an admitted sequence shares. If a block is loaded
or imported, its chain is logged after the change.
"""

from dataclasses import dataclass, field
from typing import Any

from negamax.scheduler.prefix_cache import BlockHashes

Change = tuple[bytes, bool]  # (hash of a block, True if it is cached or False if it is evicted)


@dataclass
class CacheLog:
    """Ordered changes of each cache level since the last `take`, appended by a rank's scheduler."""

    # (hashes of a sequence, index of the first block, index after the last block)
    chains: list[tuple[BlockHashes, int, int]] = field(default_factory=list)
    kv: list[Change] = field(default_factory=list)  # KV cache
    host: list[Change] = field(default_factory=list)  # host memory
    files: list[Change] = field(default_factory=list)

    def take(self) -> "CacheLog | None":
        """Return the changes and clear this log; return None if there are no changes."""
        logs: tuple[list[Any], ...] = (self.chains, self.kv, self.host, self.files)
        if not any(logs):
            return None
        found = CacheLog(*(log.copy() for log in logs))
        for log in logs:
            log.clear()
        return found
