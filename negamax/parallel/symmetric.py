"""Memory of every GPU of a group that all its ranks can write: the regions through which kernels
exchange rows, and a buffer in which tensors of middling size are summed.

Plain peer-to-peer mappings; NVLink multicast is not used.
"""

from __future__ import annotations

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

REDUCE_ROWS = 256  # rows of hidden states summed through peers; more go through NCCL
# rows of a rank that go to experts and back through peers; more go through NCCL
DISPATCH_ROWS = 128
# rows of hidden states that the buffer holds; from there on NCCL is as fast (H200, four GPUs)
SHARED_ROWS = 2048
SHARD_ROWS = 16384  # rows of hidden states that ranks shard through peers; more go through NCCL
BUFFERS = 2
# that a kernel waits for another rank: shorter than the engine may stand still, longer than any
# skew
PEER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SharedBuffer:
    """Sums bf16 tensors up to its own size: every rank sums a slice of all ranks' buffers and
    writes it to all of them.
    """

    memory: Tensor  # [elements] bf16, on every rank of the group
    group_name: str
    world: int

    def fits(self, tensor: Tensor) -> bool:
        whole_slices = tensor.numel() % (8 * self.world) == 0  # of 16 bytes
        return (
            tensor.dtype == self.memory.dtype
            and whole_slices
            and 0 < tensor.numel() <= self.memory.numel()
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in the buffer: valid until the next call. Added up in bf16, as
        NCCL does.
        """
        part = self.memory[: tensor.numel()]
        part.copy_(tensor.reshape(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self.group_name)
        return part.view(tensor.shape)


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    hidden_size: int,
    max_tokens: int,
    max_rows: int,
    control: PollControl,
    token_words: int = 0,
) -> tuple[PeerMemory, SharedBuffer] | None:
    """Regions for rows `hidden_size` wide, the norm statistics of `max_tokens` tokens and
    `max_rows` sampled tokens; with `token_words`, one for as many words of each row that is on its
    way to experts.

    `control`: how kernels wait for words of other ranks. Every rank of `group`, which speaks gloo
    and NCCL, must call this with the same sizes. None, on all of them alike, where the GPUs cannot
    reach each other's memory, or are not a power of two in number (kernels take ranks as one tile).
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
    ]  # rows, words
    sizes = [BUFFERS * rows * world * words for rows, words in shapes]
    # first, since torch's sums want the buffer at the start of its memory
    shared_words = _aligned(-(-min(SHARED_ROWS, max_tokens) * hidden_size // 4))
    shard_words = _shard_words(max_tokens, hidden_size, world)
    problem = _out_of_reach(group, device)
    if _all_agree(problem is None, group):
        memory, bases, barrier, problem = _share(
            shared_words + sum(shard_words) + sum(sizes), group, device
        )
        if _all_agree(problem is None, group):

            def addresses(word: int, *others: int) -> Tensor:
                """Where `word` lies in each rank's memory; `others` behind them."""
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
            shared = SharedBuffer(
                memory[:shared_words].view(torch.bfloat16), group.group_name, world
            )
            reduce, stats, pick, *tokens = regions
            peers = PeerMemory(
                rank,
                world,
                reduce,
                stats,
                pick,
                shards=shards,
                tokens=tokens[0] if tokens else None,
                owner=(memory, control),
            )
            return peers, shared
    logger.warning(
        "GPUs share no memory (%s): every sum over ranks goes through NCCL",
        problem or "so another rank says",
    )
    return None


def _aligned(words: int) -> int:
    """`words` of 8 bytes, and as many more as end at a multiple of 256 bytes."""
    return -(-words // 32) * 32


def _shard_words(max_tokens: int, hidden_size: int, world: int) -> tuple[int, int]:
    """Words of 8 bytes that the two parts of a `ShardRegion` take; none where there are never as
    many rows.
    """
    rows = min(max_tokens, SHARD_ROWS)
    if not tiles.shards(rows) or hidden_size % 2:
        return 0, 0
    return _aligned(-(-rows // world) * world * hidden_size // 4), _aligned(rows * hidden_size // 4)


def _out_of_reach(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Which GPU of the group this one cannot reach, if any. GPUs that are not visible here show
    when memory is shared.
    """
    own = torch.tensor([device.index], dtype=torch.int64)
    indices = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(indices, own, group=group)
    others = {int(index) for index in indices} - {device.index}
    here = platform_of(device)
    if Feature.PEER_MEMORY not in here.features:
        return f"no kernel writes the memory of other GPUs on {here.label}"
    for other in sorted(others):
        if other < torch.cuda.device_count() and not torch.cuda.can_device_access_peer(
            device.index, other
        ):
            return f"no peer access from GPU {device.index} to GPU {other}"
    return None


def _share(
    num_words: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, list[int], Callable[[], None], str | None]:
    """`num_words` zeroed words of 8 bytes: this rank's, where every rank's lie for this one, a
    barrier of the ranks on the current stream, what went wrong."""
    try:
        words = symm_mem.empty(num_words, dtype=torch.int64, device=device)
        words.zero_()
        torch.cuda.synchronize(device)  # zeroed before any rank passes the meeting below
        handle = symm_mem.rendezvous(words, group)
    except RuntimeError as error:
        return torch.empty(0), [], lambda: None, str(error).splitlines()[0]
    # the same everywhere: all ranks allocate alike
    within = words.data_ptr() - handle.buffer_ptrs[handle.rank]
    barrier = partial(handle.barrier, timeout_ms=round(1000 * PEER_TIMEOUT_S))
    return words, [pointer + within for pointer in handle.buffer_ptrs], barrier, None


def _all_agree(is_fine: bool, group: dist.ProcessGroup) -> bool:
    """Whether `is_fine` holds on every rank; none returns before all have come."""
    votes = torch.tensor([is_fine], dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
