"""Track the files that are the third level of a rank's prefix cache, and the pending copies.

A file contains the data of one host block, and the file's name is the block's hash. The index may
list files that are damaged or that other engines have deleted. If one rank fails to read a file,
all ranks treat the block as missing.

- A block in host memory is *written* to a file when the number of pending writes allows it.
- A waiting request's missing blocks are *read* into free host blocks. After the read, the request
  waits for its admission again, and `HostTier` loads the blocks into the KV cache.

The host block of a write or read stays allocated until all ranks have reported the end of the copy.
If a plan is lost, the next plan repeats the lost plan's file copies.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import FileCopies, FileProgress
from negamax.scheduler.waiting import WaitingQueue

MOST_WRITES = 64  # largest number of blocks that are being written at the same time
_NO_PROGRESS = FileProgress(0)


@dataclass(eq=False)
class FileRead:
    """Blocks of waiting sequences that are being read from files."""

    sequences: list[Sequence]  # sequences that wait for this read
    hashes: list[bytes]
    places: list[int]  # indices of the host blocks to fill, one for each hash
    held_places: list[int]  # host blocks that are not read, but stay allocated for the sequences
    step_id: int = -1  # id of the plan that contains the read; -1: not planned yet


@dataclass(eq=False)
class _FileWrite:
    block_hash: bytes
    place: int  # index of the host block to write to a file
    step_id: int = -1  # id of the plan that contains the write; -1: not planned yet
    is_kept: bool = True  # False: the cache was cleared during the write, so do not index the block


class FileTier:
    """Tracks the blocks of one data-parallel rank that are in files. Used only by `HostTier`."""

    def __init__(
        self,
        num_blocks: int,
        host: BlockPool,
        waiting: WaitingQueue,
        changes: list[tuple[bytes, bool]] | None = None,
    ) -> None:
        """`num_blocks`: largest number of blocks in files; 0 means no files. `host`: the blocks in
        host memory. `waiting`: the queue that sequences return to after their reads. `changes`:
        list that receives (block hash, True if indexed or False if discarded).
        """
        self.num_blocks = num_blocks
        self.num_hits = 0  # number of blocks that were read from files
        self.num_written = 0  # number of blocks that were written to files
        self.progress = _NO_PROGRESS  # latest progress of file copies, over all ranks
        self._host, self._waiting, self._changes = host, waiting, changes
        self._most_writes = max(1, min(MOST_WRITES, host.num_blocks // 4))
        self._index: OrderedDict[bytes, int] = OrderedDict()  # hash -> `_time` of the last use
        self._time = 0  # number of block uses so far, which is the time in `_index`
        self._used: list[bytes] = []  # hashes of used blocks, which the next plan reports
        self._queue: dict[bytes, None] = {}  # hashes of the host blocks to write, in order
        self._writes: dict[bytes, _FileWrite] = {}
        self.reads: list[FileRead] = []  # pending reads, oldest first
        self._missing: set[bytes] = set()  # hashes of pending reads that failed on a rank
        self._deletes_all = False
        self._emptied_at = -1  # step id of the plan that deletes all files

    @property
    def num_used(self) -> int:
        """Number of blocks in the index of files."""
        return len(self._index)

    @property
    def has_writes(self) -> bool:
        """Whether a plan is needed to write or delete files, even if no request needs a plan."""
        is_needed = bool(self._queue or self._writes or self._deletes_all)
        return is_needed and self.num_blocks > 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._index

    def add_found(self, hashes: Iterable[bytes]) -> None:
        """Index files of earlier engines. `hashes`: hashes of blocks, least recently used first."""
        for block_hash in hashes:
            self._insert(block_hash)

    def offer(self, block_hash: bytes) -> None:
        """Queue a block in host memory for writing to a file."""
        if self.num_blocks and block_hash not in self._index and block_hash not in self._writes:
            self._queue[block_hash] = None

    def touch(self, block_hash: bytes) -> None:
        """Record a use of a block. A plan lists the use only if the file may be deleted soon."""
        used_at = self._index.get(block_hash)
        if used_at is not None:
            if self._time - used_at > self.num_blocks // 4:
                self._used.append(block_hash)
            self._insert(block_hash)
        elif self._host.find(block_hash) is not None:
            self.offer(block_hash)

    def take_queued(self) -> None:
        """Let the next plan write queued blocks to files, up to the limit of pending writes."""
        while self._queue and len(self._writes) < self._most_writes:
            block_hash = next(iter(self._queue))
            del self._queue[block_hash]
            place = self._host.find(block_hash)
            if place is not None and block_hash not in self._writes:
                self._host.share([place])
                self._writes[block_hash] = _FileWrite(block_hash, place)

    def begin(self, sequence: Sequence, hashes: list[bytes], held_places: list[int]) -> bool:
        """Plan to read blocks for a waiting sequence, or wait for a pending read of the first
        block. `hashes`: hashes of blocks that are not in host memory. `held_places`: host blocks of
        the sequence that need no read. Return False if no host block is free.
        """
        for read in self.reads:
            if hashes[0] in read.hashes:
                read.sequences.append(sequence)
                return True
        self._host.share(held_places)
        most = min(self._host.num_free, (self._host.num_blocks + 1) // 2)
        under_way = {block_hash for read in self.reads for block_hash in read.hashes}
        hashes = [block_hash for block_hash in hashes[:most] if block_hash not in under_way]
        if not hashes:
            self._host.release(held_places)
            return False
        places = [self._host.allocate() for _ in hashes]
        self.reads.append(FileRead([sequence], hashes, places, held_places))
        return True

    def take_copies(self, step_id: int) -> FileCopies | None:
        """Return the copies of the plan `step_id`; None if the plan has no copies."""
        writes = [write for write in self._writes.values() if write.step_id < 0]
        reads = [read for read in self.reads if read.step_id < 0]
        used, self._used = self._used, []
        deletes_all, self._deletes_all = self._deletes_all, False
        if not (writes or reads or used or deletes_all):
            return None
        copies: list[_FileWrite | FileRead] = [*writes, *reads]
        for copy in copies:
            copy.step_id = step_id
        if deletes_all:
            self._emptied_at = step_id
        return FileCopies(
            [write.place for write in writes],
            [write.block_hash for write in writes],
            [block_hash for read in reads for block_hash in read.hashes],
            [place for read in reads for place in read.places],
            used,
            deletes_all,
        )

    def commit(self, progress: FileProgress) -> None:
        """Process the reads and writes that all ranks have ended, according to `progress`."""
        self.progress = progress
        self._missing.update(progress.missing)
        for write in list(self._writes.values()):
            if 0 <= write.step_id <= progress.written_step:
                del self._writes[write.block_hash]
                self._host.release([write.place])
                if write.is_kept and self.num_blocks:
                    self._insert(write.block_hash)
                    self.num_written += 1
        for read in [read for read in self.reads if 0 <= read.step_id <= progress.read_step]:
            self._end_read(read)
        if progress.is_off:  # keep the host blocks of pending copies; the copies may never end
            self.num_blocks = 0
            self._discard_all()
            for read in self.reads:
                self._return_sequences(read)

    def fail(self, step_id: int) -> None:
        """Repeat the copies of a lost plan with the next plan."""
        copies: list[_FileWrite | FileRead] = [*self._writes.values(), *self.reads]
        for copy in copies:
            if copy.step_id == step_id:
                copy.step_id = -1
        self._deletes_all |= self._emptied_at == step_id

    def evict(self) -> None:
        """Drop all blocks and delete their files."""
        self._deletes_all = self.num_blocks > 0
        self._discard_all()
        for write in self._writes.values():
            write.is_kept = False

    def _insert(self, block_hash: bytes) -> None:
        """Index a block as the most recently used one. Drop the least recently used blocks beyond
        `num_blocks`. The ranks delete the files of dropped blocks.
        """
        self._time += 1
        if self._changes is not None and block_hash not in self._index:
            self._changes.append((block_hash, True))
        self._index[block_hash] = self._time
        self._index.move_to_end(block_hash)
        while len(self._index) > self.num_blocks:
            self._discard(next(iter(self._index)))

    def _discard(self, block_hash: bytes) -> None:
        if self._index.pop(block_hash, None) is not None and self._changes is not None:
            self._changes.append((block_hash, False))

    def _discard_all(self) -> None:
        self._queue.clear()
        for block_hash in list(self._index):
            self._discard(block_hash)

    def _end_read(self, read: FileRead) -> None:
        self.reads.remove(read)
        for block_hash, place in zip(read.hashes, read.places, strict=True):
            if block_hash in self._missing:
                self._missing.remove(block_hash)
                self._discard(block_hash)
            else:
                self._host.index(place, block_hash)
                self.num_hits += 1
        self._host.release(read.places)
        self._host.release(read.held_places)
        self._return_sequences(read)

    def _return_sequences(self, read: FileRead) -> None:
        """Return the sequences of a read to the queue for admission."""
        for sequence in read.sequences:
            sequence.may_read = False
            self._waiting.push(sequence)
        read.sequences.clear()
