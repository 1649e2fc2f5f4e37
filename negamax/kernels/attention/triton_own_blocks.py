"""List a rank's blocks of each sequence, if ranks shard the blocks of a cache:

    blocks of a sequence    | 0 | 1 | 2 | 3 | 4 | 5 | ...     7  2  9  4  1  6   in the pool
    of rank 1 of 2          | 0 |   | 2 |   | 4 |   |         3     4     0      of this rank

The device makes the lists once per step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata

_CHUNK = 1024  # number of blocks that the planning program loads at a time


@dataclass(frozen=True)
class OwnBlocks:
    """The blocks of each of S sequences that a rank stores, in ascending order."""

    blocks: Tensor  # [S, 2, max_blocks] int32: indices in the sequence, then in the rank's cache
    held: Tensor  # [S, max_blocks] int32; entry i counts this rank's blocks among blocks 0 to i
    tokens: Tensor  # [S] int32, number of this rank's blocks * block size
    keys: Tensor  # [S] int32, number of the sequence's keys in this rank's blocks


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(
    do_not_specialize=["rank"], do_not_specialize_on_alignment=["block_table_indices", "lengths"]
)
def _own_blocks_kernel(
    tables,  # [slots, table_stride] int32, block tables
    block_table_indices,  # [S] int64, row of each sequence in `tables`
    lengths,  # [S] int32, sequence lengths in tokens
    blocks,  # the kernel writes this and the next three tensors, fields of `OwnBlocks`
    held,
    tokens,
    keys,
    table_stride,
    width,
    rank,
    RANKS: tl.constexpr,
    FIRST: tl.constexpr,  # index of the first sharded block in a rank's cache
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the blocks of one sequence. Grid (S,)."""
    seq = tl.program_id(0).to(tl.int64)
    table = tables + tl.load(block_table_indices + seq) * table_stride
    length = tl.load(lengths + seq)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    numbers = blocks + seq * 2 * width
    count = 0
    for start in range(0, num_blocks, CHUNK):
        number = start + tl.arange(0, CHUNK)
        is_block = number < num_blocks
        block = tl.load(table + number, mask=is_block, other=0).to(tl.int32)
        is_mine = is_block & (block % RANKS == rank)
        until = count + tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(held + seq * width + number, until, mask=is_block)
        tl.store(numbers + until - 1, number, mask=is_mine)
        tl.store(numbers + width + until - 1, block // RANKS + FIRST, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), axis=0)
    tl.store(tokens + seq, count * BLOCK_SIZE)
    last = tl.load(table + num_blocks - 1, mask=num_blocks > 0, other=rank + 1)
    beyond = tl.where(last % RANKS == rank, num_blocks * BLOCK_SIZE - length, 0)
    tl.store(keys + seq, tl.where(count > 0, count * BLOCK_SIZE - beyond, 0))


def plan_own_blocks(
    metadata: AttentionMetadata,
    lengths: Tensor,
    *,
    rank: int,
    ranks: int,
    block_size: int,
    first: int = 0,
) -> OwnBlocks:
    """List a rank's blocks. Pool block b has index b // ranks + first in the rank's cache."""
    num_seqs, tables = lengths.shape[0], metadata.block_tables
    width = tables.shape[1]
    blocks = torch.empty(num_seqs, 2, width, dtype=torch.int32, device=tables.device)
    held, tokens = torch.empty_like(blocks[:, 0]), torch.empty_like(lengths)
    keys = torch.empty_like(lengths)
    if num_seqs:
        _own_blocks_kernel[(num_seqs,)](
            tables, metadata.block_table_indices, lengths, blocks, held, tokens, keys,
            tables.stride(0), width, rank,
            RANKS=ranks, FIRST=first, BLOCK_SIZE=block_size, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
    return OwnBlocks(blocks, held, tokens, keys)
