"""The pool of KV blocks: reference counts, cached content and the order of reuse."""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Reference counts of KV blocks, and an index from content hash to block.

    A block is *held* (reference count above 0) or free. A free block is *blank* or *cached*.
    `BlockPool.share` turns a cached block into a held block. Blank blocks are allocated first, then
    cached blocks, least recently released first.
    """

    def __init__(self, num_blocks: int, changes: list[tuple[bytes, bool]] | None = None) -> None:
        """`changes`: list that receives (block hash, True if indexed or False if evicted)."""
        self.num_blocks = num_blocks
        self._changes = changes
        # number of blocks freed or indexed; a refused admission is tried again if this number grows
        self.gain_count = 0
        self.eviction_count = 0  # number of cached blocks that were evicted for other content
        self._ref_counts = [0] * num_blocks
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # stack of free blocks without content
        self._cached: OrderedDict[int, None] = OrderedDict()  # free cached blocks, oldest first

    @property
    def num_free(self) -> int:
        """Number of free blocks, including cached blocks."""
        return len(self._blank) + len(self._cached)

    @property
    def num_indexed(self) -> int:
        """Number of blocks with indexed content, held or free."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """Return the held or free block with the hash `block_hash`, or None."""
        return self._block_of.get(block_hash)

    def allocate(self) -> int:
        """Allocate a free block and drop its cached content. `num_free` must be above 0."""
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._drop(block_id)
            self.eviction_count += 1
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_ids: Sequence[int]) -> None:
        """Increment the reference counts of indexed blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Release blocks, given in the order of their positions. The last block is reused first."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self.gain_count += 1
                if self._block_hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def evict(self) -> None:
        """Drop the content of every free block from the index."""
        for block_id in self._cached:
            self._drop(block_id)
        self._blank += reversed(self._cached)
        self._cached.clear()

    def index(self, block_id: int, block_hash: bytes) -> None:
        """Index a held, complete block, unless another block has the same content."""
        assert self._ref_counts[block_id] > 0 and self._block_hashes[block_id] is None
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block_id
            self._block_hashes[block_id] = block_hash
            self.gain_count += 1
            if self._changes is not None:
                self._changes.append((block_hash, True))

    def _drop(self, block_id: int) -> None:
        """Remove a block's content from the index."""
        block_hash = self._block_hashes[block_id]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._block_hashes[block_id] = None
        if self._changes is not None:
            self._changes.append((block_hash, False))
