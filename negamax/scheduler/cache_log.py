"""Log the changes of a rank's prefix cache. `engine.core.kv_events` publishes the logged changes.

The block pools append each indexed or evicted block to the log. A chain lists the hashes and tokens
of consecutive blocks of a sequence. The log contains chains of blocks that were indexed or that an
admitted sequence reuses. A loaded block is logged first as a change and later in a chain.
"""

from dataclasses import dataclass, field
from typing import Any

from negamax.scheduler.prefix_cache import BlockHashes

Change = tuple[bytes, bool]  # (hash of a block, True if it was cached or False if evicted)


@dataclass
class CacheLog:
    """Changes of each cache level since the last `take`, oldest first."""

    # (hashes of a sequence, index of the first block, index after the last block)
    chains: list[tuple[BlockHashes, int, int]] = field(default_factory=list)
    kv: list[Change] = field(default_factory=list)  # changes of the KV cache
    host: list[Change] = field(default_factory=list)  # changes of host memory
    files: list[Change] = field(default_factory=list)  # changes of the files

    def take(self) -> "CacheLog | None":
        """Return the changes and clear this log; return None if there are no changes."""
        logs: tuple[list[Any], ...] = (self.chains, self.kv, self.host, self.files)
        if not any(logs):
            return None
        found = CacheLog(*(log.copy() for log in logs))
        for log in logs:
            log.clear()
        return found
