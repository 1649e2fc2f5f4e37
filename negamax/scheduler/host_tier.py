"""Track the host memory that is the second level of a rank's prefix cache, and pending copies.

A host block contains the data of one KV block, and has the hash of this KV block. Plans list the
copies (`HostCopies`). The worker runs copies in plan order. On the device, a step waits for copies
of the blocks that it uses. The index of host blocks can change before the copies run:

- A full KV block is *stored* with the next plan. Requests can use the host block after the commit
  of the plan that stores it.
- A waiting request's missing blocks are *loaded* into free KV blocks. The host blocks and KV blocks
  of a load stay allocated until the worker reports the end of the load. After the load, the KV
  blocks are cached like computed blocks, and the request waits for its admission again.

A new host block replaces the least recently used host block. When a sequence leaves the batch, its
host blocks become the most recently used blocks, and its last block will be evicted first. Files
may be a third level (`FileTier`): blocks in files are read into host memory and then loaded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.cache_log import CacheLog
from negamax.scheduler.file_tier import FileRead, FileTier
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import HostCopies, StepResult
from negamax.scheduler.waiting import WaitingQueue


@dataclass(eq=False)
class _BlockLoad:
    """Blocks of waiting sequences that are being loaded from host memory."""

    sequences: list[Sequence]  # sequences that wait for this load
    held_blocks: list[int]  # KV blocks that were found in the cache or are loaded, by position
    blocks: list[int]  # KV blocks that the load writes
    hashes: list[bytes]  # hashes of `blocks`
    places: list[int]  # host blocks that the load reads
    step_id: int = -1  # id of the plan that contains the load; -1: not planned yet


@dataclass(frozen=True)
class _BlockStore:
    block_id: int
    block_hash: bytes
    place: int  # index of the host block to write


class HostTier:
    """Tracks the blocks of one data-parallel rank that are in host memory."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, waiting: WaitingQueue, log: CacheLog | None
    ) -> None:
        """`limits` contains the number of host blocks and the number of blocks in files. `pool`:
        the KV blocks. `waiting`: the queue that sequences return to after their loads. `log`
        receives the changes of the index of host blocks.
        """
        self.num_blocks = num_blocks = limits.num_host_blocks
        self.num_queries = 0  # number of tokens that were looked up in host memory
        self.num_hits = 0  # number of tokens that were found in host memory
        self.num_stored = 0  # number of blocks that were stored in host memory
        self.num_loaded = 0  # number of blocks that were loaded from host memory
        self._pool, self._waiting, self._log = pool, waiting, log
        self.blocks = BlockPool(num_blocks, log.host if log else None)
        self.files = FileTier(
            limits.num_file_blocks, self.blocks, waiting, log.files if log else None
        )
        self._queue: dict[bytes, None] = {}  # hashes of the KV blocks to store, in order
        self._new_stores: list[_BlockStore] = []  # copies to host memory that no plan contains yet
        self._stores: dict[int, list[_BlockStore]] = {}  # planned stores, by id of the plan
        self._storing: dict[bytes, int] = {}  # host blocks of all pending stores, by hash
        self._loads: list[_BlockLoad] = []  # pending loads, oldest first

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a load from host memory or a read from files."""
        return sum(len(each.sequences) for each in self._list_pending())

    @property
    def num_used(self) -> int:
        """Number of host blocks with content."""
        return self.blocks.num_indexed + len(self._storing)

    @property
    def has_loads(self) -> bool:
        """Whether requests wait for a load from host memory or a read from files."""
        return bool(self._loads) or any(read.sequences for read in self.files.reads)

    @property
    def has_new_loads(self) -> bool:
        """Whether a load from host memory or a read from files is not part of a plan yet."""
        return any(each.step_id < 0 for each in self._list_pending())

    @property
    def has_writes(self) -> bool:
        """Whether a plan is needed to write or delete files, even if no request needs a plan."""
        has_stores = bool(self._queue or self._new_stores or self._stores)
        return self.files.has_writes or (has_stores and self.files.num_blocks > 0)

    def offer(self, sequence: Sequence, first: int, stop: int) -> None:
        """Queue the cached blocks `first` to `stop` of a sequence for storing in host memory."""
        if self._log is not None and first < stop:
            self._log.chains.append((sequence.block_hashes, first, stop))
        if self.num_blocks:
            self.offer_hashes(sequence.block_hashes[index] for index in range(first, stop))

    def offer_hashes(self, hashes: Iterable[bytes]) -> None:
        """Queue KV blocks for storing. Skip blocks that are in host memory or being stored."""
        for block_hash in hashes:
            if self.blocks.find(block_hash) is None and block_hash not in self._storing:
                self._queue[block_hash] = None

    @property
    def has_new_stores(self) -> bool:
        """Whether a store is not part of a plan yet."""
        return bool(self._new_stores)

    def take_queued(self) -> None:
        """Store queued blocks with the next plan. Call this method before the plan is built."""
        for block_hash in self._queue:
            if not self.blocks.num_free:
                break
            block_id = self._pool.find(block_hash)
            if block_id is not None:
                store = _BlockStore(block_id, block_hash, self.blocks.allocate())
                self._new_stores.append(store)
                self._storing[block_hash] = store.place
        self._queue.clear()
        self.files.take_queued()

    def count_found(self, sequence: Sequence, first: int) -> int:
        """Return how many blocks of a sequence, from `first` on, are in any level of the cache."""
        return sum(1 for _ in self._match(sequence, first))

    def begin(self, sequence: Sequence) -> bool:
        """Load a waiting sequence's missing blocks, or join a pending load of the first missing
        block. Blocks in files are read into host memory first. The pool of KV blocks must have
        enough free blocks. Return False if no block is missing.
        """
        found = list(self._match(sequence))
        unread = [index for index, block in enumerate(found) if block == (None, None)]
        if unread:
            places = [place for _, place in found if place is not None]
            hashes = [sequence.block_hashes[index] for index in unread]
            if sequence.may_read and self.files.begin(sequence, hashes, places):
                return True
            del found[unread[0] :]
        missing = [index for index, (block_id, _) in enumerate(found) if block_id is None]
        for load in self._loads if missing else ():
            if sequence.block_hashes[missing[0]] in load.hashes:
                load.sequences.append(sequence)
                return True
        sequence.may_load = False
        block_size = sequence.block_hashes.block_size
        self.num_queries += len(sequence.tokens) - (len(found) - len(missing)) * block_size
        if not missing:
            return False
        self.num_hits += len(missing) * block_size
        self.num_loaded += len(missing)
        places = [place for block_id, place in found if block_id is None and place is not None]
        self.blocks.share(places)
        held = {index: block for index, (block, _) in enumerate(found) if block is not None}
        self._pool.share(list(held.values()))
        held |= {index: self._pool.allocate() for index in missing}
        self._loads.append(
            _BlockLoad(
                [sequence],
                held_blocks=[held[index] for index in range(len(found))],
                blocks=[held[index] for index in missing],
                hashes=[sequence.block_hashes[index] for index in missing],
                places=places,
            )
        )
        return True

    def detach(self, sequence: Sequence) -> bool:
        """Detach a sequence from its load or read, which continues. Return False if it has none."""
        for each in self._list_pending():
            if sequence in each.sequences:
                each.sequences.remove(sequence)
                return True
        return False

    def touch(self, sequence: Sequence) -> None:
        """Mark the blocks of a sequence that leaves the batch as recently used."""
        if not self.num_blocks:
            return
        hashes = [sequence.block_hashes[index] for index in range(sequence.num_indexed)]
        places = [place for each in hashes if (place := self.blocks.find(each)) is not None]
        self.blocks.share(places)
        self.blocks.release(places)
        for block_hash in reversed(hashes) if self.files.num_blocks else ():
            self.files.touch(block_hash)

    def take_copies(self, step_id: int, *, is_awaited: bool) -> HostCopies | None:
        """Return the copies of the plan `step_id`; None if the plan has no copies."""
        stores, self._new_stores = self._new_stores, []
        loads = [load for load in self._loads if load.step_id < 0]
        files = self.files.take_copies(step_id)
        if not (stores or loads or files or is_awaited):
            return None
        if stores:
            self._stores[step_id] = stores
        for load in loads:
            load.step_id = step_id
        return HostCopies(
            [store.block_id for store in stores],
            [store.place for store in stores],
            [place for load in loads for place in load.places],
            [block_id for load in loads for block_id in load.blocks],
            is_awaited,
            files,
        )

    def commit(self, result: StepResult) -> None:
        """Index host blocks that the step stored, and end completed loads, reads and writes."""
        for store in self._stores.get(result.step_id, ()):
            if self._storing.get(store.block_hash) == store.place:  # `evict` did not drop the store
                self.blocks.index(store.place, store.block_hash)
                self.num_stored += 1
                self.files.offer(store.block_hash)
        self._end_stores(result.step_id)
        self._end_loads([load for load in self._loads if 0 <= load.step_id <= result.loaded_step])
        if result.files is not None:
            self.files.commit(result.files)

    def fail(self, step_id: int) -> None:
        """Drop the loads and stores of a lost plan, and repeat its file copies."""
        self._end_stores(step_id)
        self.files.fail(step_id)
        lost = [load for load in self._loads if load.step_id == step_id]
        for load in lost:
            load.blocks, load.hashes = [], []
        self._end_loads(lost)

    def evict(self) -> None:
        """Drop all blocks except the blocks that are being loaded."""
        self._queue.clear()
        self._storing.clear()
        self.blocks.evict()
        self.files.evict()

    def _list_pending(self) -> list[_BlockLoad | FileRead]:
        """List the pending loads from host memory, then the pending reads from files."""
        return [*self._loads, *self.files.reads]

    def _match(self, sequence: Sequence, first: int = 0) -> Iterator[tuple[int | None, int | None]]:
        """Yield (KV block, host block) for each cached block of a waiting sequence, from `first`
        on. Yield (None, None) for a block that is only in a file. Skip the last token's block.
        """
        hashes = sequence.block_hashes
        if sequence.request.sampling.prompt_logprobs is not None:
            return
        for index in range(first, (len(sequence.tokens) - 1) // hashes.block_size):
            block_id, place = self._pool.find(hashes[index]), self.blocks.find(hashes[index])
            if block_id is None and place is None and hashes[index] not in self.files:
                return
            yield block_id, place

    def _end_stores(self, step_id: int) -> None:
        stores = self._stores.pop(step_id, [])
        self.blocks.release([store.place for store in stores])
        for store in stores:
            if self._storing.get(store.block_hash) == store.place:
                del self._storing[store.block_hash]

    def _end_loads(self, loads: list[_BlockLoad]) -> None:
        for load in loads:
            self._loads.remove(load)
            for block_id, block_hash in zip(load.blocks, load.hashes, strict=True):
                self._pool.index(block_id, block_hash)
            self._pool.release(load.held_blocks)
            self.blocks.release(load.places)
            for sequence in load.sequences:
                self._waiting.push(sequence)
