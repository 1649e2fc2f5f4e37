"""Allocate GPU memory that all ranks of a group can write. Kernels exchange rows through regions of
this memory. PyTorch sums medium-sized tensors in one of the regions. The ranks map the memory
peer-to-peer, without NVLink multicast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from negamax.base.log import get_logger
from negamax.formats.platform import Feature
from negamax.kernels.collectives import tiles
from negamax.kernels.peers import PeerMemory, PeerRegion, ShardRegion
from negamax.kernels.platform import platform_of
from negamax.kernels.sampling.op import CANDIDATES
from negamax.parallel.poll_control import PollControl

logger = get_logger(__name__)

# Limits of peer memory, in rows (hidden states). NCCL transfers larger batches.
REDUCE_ROWS = 256  # Maximum number of rows that are summed through peer memory.
DISPATCH_ROWS = 128  # Maximum rows that a rank sends to experts through peer memory.
SHARED_ROWS = 2048  # Maximum rows of the shared buffer. With more, NCCL is as fast (4 H200).
SHARD_ROWS = 16384  # Maximum rows of a sharded step that uses peer memory.
BUFFERS = 2
# Longest wait of a kernel for another rank. --engine-hang-timeout should be longer.
PEER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SharedBuffer:
    """Sums bf16 tensors. Each rank sums one slice and writes this sum to every rank's buffer."""

    memory: Tensor  # [elements] bf16, the buffer of this rank
    group_name: str
    world: int

    def fits(self, tensor: Tensor) -> bool:
        size = tensor.numel()
        is_divisible = size % (8 * self.world) == 0  # each rank sums 16-byte units
        is_same = tensor.dtype == self.memory.dtype
        return is_same and is_divisible and 0 < size <= self.memory.numel()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the bf16 sum over the ranks, which is valid until the next call."""
        part = self.memory[: tensor.numel()]
        part.copy_(tensor.reshape(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self.group_name)
        return part.view(tensor.shape)


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    max_tokens: int,
    max_rows: int,
    token_words: int,
    *,
    hidden_size: int,
    control: PollControl,
) -> tuple[PeerMemory, SharedBuffer] | None:
    """Allocate peer memory for rows of `hidden_size` numbers, norm statistics of `max_tokens`
    tokens, and `max_rows` sampled tokens. A token sent to an expert is a row of `token_words` words
    (0: no tokens are sent). Every rank of `group` must call this function with the same sizes.
    Return None on all ranks if the GPUs cannot access each other, or if the number of GPUs is not a
    power of two.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world & (world - 1):
        return None
    reduce_rows = min(REDUCE_ROWS, max(max_tokens, max_rows))
    shapes = [
        (reduce_rows, -(-hidden_size // 2)),
        (max_tokens, 2),
        (max_rows, 2 * CANDIDATES),
        *([(reduce_rows, token_words)] if token_words else []),
    ]  # Per memory region: rows, 8-byte words per row.
    sizes = [BUFFERS * rows * world * words for rows, words in shapes]
    # PyTorch's all-reduce needs the start of the memory, so the shared buffer comes first.
    shared_words = _aligned(-(-min(SHARED_ROWS, max_tokens) * hidden_size // 4))
    shard_words = _shard_words(max_tokens, hidden_size, world)
    problem = _out_of_reach(group, device)
    if _all_agree(problem is None, group):
        num_words = shared_words + sum(shard_words) + sum(sizes)
        memory, bases, barrier, problem = _share(num_words, group, device)
        if _all_agree(problem is None, group):

            def addresses(word: int, *others: int) -> Tensor:
                """Return the address of word `word` on each rank, then the addresses `others`."""
                found = [*(base + 8 * word for base in bases), *others]
                return torch.tensor(found, dtype=torch.int64, device=device)

            shards, gathered = None, shared_words + shard_words[0]
            first = shared_words + sum(shard_words)
            if shard_words[1]:
                shards = ShardRegion(
                    partials=addresses(shared_words),
                    gathered=addresses(gathered),
                    own_gathered=memory[gathered:first].view(torch.uint8),
                    rows=min(max_tokens, SHARD_ROWS),
                    words=hidden_size // 2,
                    barrier=barrier,
                )
            regions = []
            for (rows, words), size in zip(shapes, sizes, strict=True):
                flags = torch.zeros(rows, dtype=torch.int32, device=device)
                regions.append(PeerRegion(addresses(first, control.address), flags, rows, words))
                first += size
            sums = memory[:shared_words].view(torch.bfloat16)
            reduce, stats, pick, *others = regions
            tokens, owner = others[0] if others else None, (memory, control)
            peers = PeerMemory(rank, world, reduce, stats, pick, shards, tokens, owner)
            return peers, SharedBuffer(sums, group.group_name, world)
    logger.warning(
        "GPUs cannot access each other's memory (%s): NCCL computes every sum over ranks",
        problem or "reported by another rank",
    )
    return None


def _aligned(words: int) -> int:
    """Round `words` of 8 bytes up to a multiple of 256 bytes."""
    return -(-words // 32) * 32


def _shard_words(max_tokens: int, hidden_size: int, world: int) -> tuple[int, int]:
    """Return the sizes of `partials` and `gathered` of a `ShardRegion`, in 8-byte words."""
    rows = min(max_tokens, SHARD_ROWS)
    if not tiles.shards(rows) or hidden_size % 2:
        return 0, 0
    return _aligned(-(-rows // world) * world * hidden_size // 4), _aligned(rows * hidden_size // 4)


def _out_of_reach(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why this GPU cannot access a GPU of the group, or None if this GPU can access all."""
    own = torch.tensor([device.index], dtype=torch.int64)
    indices = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(indices, own, group=group)
    others = {int(index) for index in indices} - {device.index}
    here = platform_of(device)
    if Feature.PEER_MEMORY not in here.features:
        return f"no kernel writes the memory of other GPUs on {here.label}"
    count, can_access = torch.cuda.device_count(), torch.cuda.can_device_access_peer
    for other in sorted(others):
        if other < count and not can_access(device.index, other):
            return f"no peer access from GPU {device.index} to GPU {other}"
    return None


def _share(
    num_words: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, list[int], Callable[[], None], str | None]:
    """Return (zeroed 8-byte words, their address on each rank, a barrier, an error or None)."""
    try:
        words = symm_mem.empty(num_words, dtype=torch.int64, device=device)
        words.zero_()
        torch.cuda.synchronize(device)  # Other ranks may write only after the words are zero.
        handle = symm_mem.rendezvous(words, group)
    except RuntimeError as error:
        return torch.empty(0), [], lambda: None, str(error).splitlines()[0]
    # All ranks allocate in the same order, so the offset of `words` is equal on all ranks.
    within = words.data_ptr() - handle.buffer_ptrs[handle.rank]
    barrier = partial(handle.barrier, timeout_ms=round(1000 * PEER_TIMEOUT_S))
    return words, [pointer + within for pointer in handle.buffer_ptrs], barrier, None


def _all_agree(is_fine: bool, group: dist.ProcessGroup) -> bool:
    """Wait for all ranks, and return whether `is_fine` is True on every rank."""
    votes = torch.tensor([is_fine], dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
