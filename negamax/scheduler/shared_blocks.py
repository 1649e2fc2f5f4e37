"""Track host blocks that other engines read, and host blocks that are read from other engines.

An engine keeps the full blocks of a computed prompt in host memory under a *lease*. The lease ends
when another engine has read the blocks, or when the lease expires. The reading engine *imports* the
blocks: it allocates host blocks, its ranks fill these blocks, and it indexes the blocks. After the
import, the prompt is a cached prefix in the reading engine's host memory.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.host_tier import HostTier
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import StepResult


def hash_prompt(request: GenerateRequest, *, block_size: int) -> bytes:
    """Return the hash of a prompt's full blocks, without salt; b"" if the prompt has no full block.
    The last token is not hashed, because it must run to sample the next token.
    """
    tokens = list(request.prompt_token_ids)
    num_blocks = (len(tokens) - 1) // block_size
    hashes = BlockHashes(tokens, block_size=block_size, salt="", images=request.images)
    return hashes[num_blocks - 1] if num_blocks else b""


@dataclass(eq=False)
class Lease:
    """The blocks of a computed prompt that another engine may read."""

    lease_id: str
    hashes: list[bytes]  # hashes of the prompt's full blocks, in order
    prompt_hash: bytes  # result of `hash_prompt`
    num_cached_tokens: int  # number of prompt tokens that were found cached
    blocks: list[int]  # KV blocks that stay allocated until host memory has all of them
    held: dict[int, int] = field(default_factory=dict)  # index in `hashes` -> allocated host block
    step_id: int = -1  # id of the plan whose copies must end before the blocks are read
    is_open: bool = False  # whether another engine has received the list of blocks
    expires: float = inf  # end of the lease in monotonic seconds, set by the caller

    @property
    def places(self) -> list[int]:
        """The host blocks of a readable lease, in the order of the prompt."""
        return [self.held[index] for index in range(len(self.hashes))]

    @property
    def is_readable(self) -> bool:
        """Whether all blocks of the lease are in host memory, or a launched plan copies them."""
        return len(self.held) == len(self.hashes)


@dataclass(frozen=True, eq=False)
class Import:
    """Host blocks that the ranks fill with blocks of another engine."""

    places: list[int]
    hashes: list[bytes]


class SharedBlocks:
    """The leases and imports of one scheduler."""

    def __init__(self, pool: BlockPool, host: HostTier, *, block_size: int) -> None:
        self.leases: dict[str, Lease] = {}
        self.last_step = -1  # step id of the last committed plan
        self.settled: list[Lease] = []  # newly readable leases; the caller clears this list
        self._pool, self._host, self._block_size = pool, host, block_size
        self._blocks = host.blocks
        self._unsettled: list[Lease] = []

    @property
    def has_new_stores(self) -> bool:
        """Whether a plan is needed to copy a lease's KV blocks to host memory."""
        return bool(self._unsettled) and self._host.has_new_stores

    @property
    def can_store(self) -> bool:
        """Whether a lease waits for copies to host memory and a host block is free."""
        return bool(self._unsettled) and self._blocks.num_free > 0

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def holds_kv_blocks(self) -> bool:
        """Whether a lease holds KV blocks that are not in host memory yet."""
        return bool(self._unsettled)

    def add_lease(self, sequence: Sequence, *, step_id: int) -> None:
        """Lease the prompt of a sequence that leaves the batch with the commit of `step_id`. A
        prompt that exceeds the host memory is not leased.
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
        prompt_hash = hash_prompt(request, block_size=size)
        lease = Lease(request.lease_id, hashes, prompt_hash, sequence.num_cached_tokens, blocks)
        self.end(request.lease_id)  # end an older lease with the same id
        self.leases[request.lease_id] = lease
        self._unsettled.append(lease)
        self._settle(step_id)

    def take_queued(self) -> None:
        """Store queued blocks and the blocks of the oldest unreadable lease with the next plan. If
        two leases stored blocks at the same time, each could wait for host blocks of the other.
        """
        for lease in self._unsettled[:1]:
            self._host.offer_hashes(lease.hashes)
        self._host.take_queued()

    def commit(self, result: StepResult) -> None:
        """Apply the copies of a plan with `HostTier.commit`, and update the leases."""
        self._host.commit(result)
        self._settle(result.step_id)

    def _settle(self, step_id: int) -> None:
        """Make each lease readable if all its blocks are in host memory after plan `step_id`. The
        oldest unreadable lease keeps its host blocks, so that no other block replaces them.
        """
        self.last_step = step_id
        for lease in self._unsettled.copy():
            is_oldest = lease is self._unsettled[0]
            if not is_oldest and any(self._blocks.find(each) is None for each in lease.hashes):
                continue
            for index, block_hash in enumerate(lease.hashes):
                if index not in lease.held and (places := self.hold([block_hash])):
                    lease.held[index] = places[0]
            if lease.is_readable:
                lease.step_id = step_id
                self._pool.release(lease.blocks)
                lease.blocks = []
                self._unsettled.remove(lease)
                self.settled.append(lease)

    def end(self, lease_id: str) -> bool:
        """End a lease and release its blocks. Return False if the lease does not exist."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self._pool.release(lease.blocks)
        self._blocks.release(list(lease.held.values()))
        if lease in self._unsettled:
            self._unsettled.remove(lease)
        return True

    def find_missing(self, hashes: Items[bytes]) -> list[int]:
        """Return the indices of `hashes` that are neither in the KV cache nor in host memory."""
        return [
            index
            for index, each in enumerate(hashes)
            if self._pool.find(each) is None and self._blocks.find(each) is None
        ]

    def begin_import(self, hashes: Items[bytes]) -> tuple[Import, list[int]] | None:
        """Allocate host blocks for the `hashes` that this engine lacks. Return an import of these
        blocks and the indices of their hashes, or None if too few host blocks are free.
        """
        missing = self.find_missing(hashes)
        if len(missing) > self._blocks.num_free:
            return None
        places = [self._blocks.allocate() for _ in missing]
        return Import(places, [hashes[index] for index in missing]), missing

    def end_import(self, blocks: Import, *, is_valid: bool) -> None:
        """Index the blocks of an import if `is_valid`, and release the blocks."""
        for place, block_hash in zip(blocks.places, blocks.hashes, strict=True):
            if is_valid:
                self._blocks.index(place, block_hash)
        self._blocks.release(blocks.places)

    def hold(self, hashes: Items[bytes]) -> list[int]:
        """Keep existing host blocks whose hash is in `hashes` allocated until `release`."""
        places = [place for each in hashes if (place := self._blocks.find(each)) is not None]
        self._blocks.share(places)
        return places

    def release(self, places: list[int]) -> None:
        self._blocks.release(places)
