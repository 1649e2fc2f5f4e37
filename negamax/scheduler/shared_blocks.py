"""Blocks in host memory that other engines read, or that are read from other engines.

An engine that has computed a prompt keeps its full blocks in host memory under a *lease*, until
another engine has read them or the lease expires. That engine *imports* the blocks: it allocates
host blocks, lets its ranks fill them, and indexes them like blocks it has stored itself. So a
request of another engine becomes a request with a prefix in host memory.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.host_tier import HostTier
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import StepResult


def hash_prompt(tokens: Items[int], *, block_size: int) -> bytes:
    """Return the hash of the tokens before the last full block's end that needs no salt; at least
    one token stays outside, to be sampled from. b"" without a full block.
    """
    num_blocks = (len(tokens) - 1) // block_size
    hashes = BlockHashes(list(tokens), block_size=block_size, salt="")
    return hashes[num_blocks - 1] if num_blocks else b""


@dataclass(eq=False)
class Lease:
    """The blocks of a computed prompt that another engine may read."""

    lease_id: str
    hashes: list[bytes]  # of its full blocks, in order
    prompt_hash: bytes  # `hash_prompt`
    num_cached_tokens: int  # prompt tokens that were not computed for it
    blocks: list[int]  # KV blocks, held until all are in host memory
    held: dict[int, int] = field(default_factory=dict)  # host blocks by index, held from now on
    step_id: int = -1  # the plan whose copies must be complete before a read
    is_open: bool = False  # whether a reader knows its blocks
    expires: float = inf  # monotonic seconds; set by the owner of the clock

    @property
    def places(self) -> list[int]:
        """The host blocks of a readable lease, in order."""
        return [self.held[index] for index in range(len(self.hashes))]

    @property
    def is_readable(self) -> bool:
        """Whether all blocks are in host memory, or a launched plan copies them there."""
        return len(self.held) == len(self.hashes)


@dataclass(frozen=True, eq=False)
class Import:
    """Host blocks to be filled with another engine's blocks."""

    places: list[int]
    hashes: list[bytes]


class SharedBlocks:
    """The leases and imports of one scheduler."""

    def __init__(self, pool: BlockPool, host: HostTier, *, block_size: int) -> None:
        self.leases: dict[str, Lease] = {}
        self.last_step = -1  # step id of the last committed plan
        self.settled: list[Lease] = []  # leases that became readable; the owner empties it
        self._pool, self._host, self._block_size = pool, host, block_size
        self._unsettled: list[Lease] = []

    @property
    def has_new_stores(self) -> bool:
        """Whether a plan should carry stores for a lease."""
        return bool(self._unsettled) and self._host.has_new_stores

    @property
    def can_store(self) -> bool:
        """Whether a lease waits for stores, and host memory has room for one."""
        return bool(self._unsettled) and self._host.has_room

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def lacks_room(self) -> bool:
        """Whether a lease holds KV blocks because host memory is full."""
        return bool(self._unsettled) and not self._host.has_room

    @property
    def holds_kv_blocks(self) -> bool:
        return bool(self._unsettled)

    def lend(self, sequence: Sequence, *, step_id: int) -> None:
        """Lease the prompt of a sequence that is about to leave the batch, after the commit of
        `step_id`. Nothing is leased of a prompt that exceeds the host memory.
        """
        request, size = sequence.request, self._block_size
        num_blocks = (sequence.prompt_len - 1) // size
        if num_blocks > self._host.num_blocks:
            return
        hashes = [sequence.block_hashes[index] for index in range(num_blocks)]
        blocks = [block for each in hashes if (block := self._pool.find(each)) is not None]
        if len(blocks) < num_blocks:
            return
        self._pool.share(blocks)
        prompt_hash = hash_prompt(request.prompt_token_ids, block_size=size)
        lease = Lease(request.lease_id, hashes, prompt_hash, sequence.num_cached_tokens, blocks)
        self.end(request.lease_id)  # a second request with the same id replaces the first
        self.leases[request.lease_id] = lease
        self._unsettled.append(lease)
        self._settle(step_id)

    def take_queued(self) -> None:
        """Store queued blocks with the next plan, and those of the oldest unsettled lease. Several
        leases at once could each wait for the room that others hold.
        """
        for lease in self._unsettled[:1]:
            self._host.offer_hashes(lease.hashes)
        self._host.take_queued()

    def commit(self, result: StepResult) -> None:
        """Apply the copies of a plan, as of `HostTier.commit`, and settle leases."""
        self._host.commit(result)
        self._settle(result.step_id)

    def _settle(self, step_id: int) -> None:
        """Make leases readable whose blocks are all in host memory after plan `step_id`. The oldest
        other one holds those that are, so that they make no room for the rest.
        """
        self.last_step = step_id
        for lease in self._unsettled.copy():
            is_oldest = lease is self._unsettled[0]
            if not is_oldest and not all(map(self._host.is_stored, lease.hashes)):
                continue
            for index, block_hash in enumerate(lease.hashes):
                if index not in lease.held and (found := self._host.hold([block_hash])):
                    lease.held[index] = found[0]
            if lease.is_readable:
                lease.step_id = step_id
                self._pool.release(lease.blocks)
                lease.blocks = []
                self._unsettled.remove(lease)
                self.settled.append(lease)

    def end(self, lease_id: str) -> bool:
        """Release the blocks of a lease. False if there is none."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self._pool.release(lease.blocks)
        self._host.release(list(lease.held.values()))
        if lease in self._unsettled:
            self._unsettled.remove(lease)
        return True

    def find_missing(self, hashes: Items[bytes]) -> list[int]:
        """Return the indices of `hashes` whose blocks are not here."""
        return [
            index
            for index, each in enumerate(hashes)
            if self._pool.find(each) is None and not self._host.is_stored(each)
        ]

    def begin_import(self, hashes: Items[bytes]) -> tuple[Import, list[int]] | None:
        """Allocate host blocks for those of `hashes` that are missing here. Return them with their
        indices in `hashes`; None without enough room.
        """
        missing = self.find_missing(hashes)
        places = self._host.allocate(len(missing))
        if places is None:
            return None
        return Import(places, [hashes[index] for index in missing]), missing

    def end_import(self, blocks: Import, *, is_valid: bool) -> None:
        """Index the blocks of an import, if their content is valid, and release them."""
        self._host.insert(blocks.places, blocks.hashes if is_valid else [])

    def hold(self, hashes: Items[bytes]) -> list[int]:
        """Hold the host blocks with these hashes that exist, until `release`."""
        return [place for each in hashes for place in self._host.hold([each]) or ()]

    def release(self, places: list[int]) -> None:
        self._host.release(places)
