"""Top-k block selection from scores: functions that decode and prefill share.

The upper half of a block's sort key is the score as an integer that sorts in the same order. The
lower half of a sort key is the negated block number. Among blocks with equal scores the block with
the lower number therefore has the larger key, and no two keys are equal. A bitonic sort (`tl.topk`)
finds the largest keys, and a second sort orders their block numbers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from negamax.kernels.attention.triton_shared import dot_dtype, multiply_keys, split_queries
from negamax.kernels.block_sparse.selection import SparseShape

NO_SCORE = tl.constexpr(-0x80000000)  # score of blocks that must not be selected (`order_scores`)
NO_BLOCK = tl.constexpr(0x7FFFFFFF)
NO_KEY = tl.constexpr(-0x80000000 << 32)


class SelectionConstants(NamedTuple):
    """Constants of the selection kernels, passed as one argument `C: tl.constexpr`."""

    HEADS: int  # number of index heads of this rank; of all ranks if ranks shard the keys
    DIM: int  # dimension of an index head
    BLOCK: int  # number of tokens per sparse block
    PER_BLOCK: int  # number of sparse blocks per cache block
    TOPK: int
    TOPK_POW2: int
    INIT: int  # number of first blocks that are always selected
    LOCAL: int  # number of last blocks that are always selected
    BLOCK_M: int  # number of index queries (token, head) per tile
    BLOCK_D: int  # DIM, padded to a power of two
    DOT: tl.dtype  # dtype of the operands of tl.dot
    RANKS: int  # number of shards of the index keys; each rank holds one shard
    FP8_KEYS: bool = False  # as `AttentionConstants.FP8_KEYS`


def selection_constants(
    shape: SparseShape,
    dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    rows: int,
    fp8_keys: bool = False,
) -> SelectionConstants:
    """Return the constants for index heads of dimension `dim` and tiles of `rows` index queries."""
    return SelectionConstants(
        HEADS=shape.index_heads,
        DIM=dim,
        BLOCK=shape.sparse_block_size,
        PER_BLOCK=shape.block_size // shape.sparse_block_size,
        TOPK=shape.topk_blocks,
        TOPK_POW2=max(2, triton.next_power_of_2(shape.topk_blocks)),
        INIT=shape.init_blocks,
        LOCAL=shape.local_blocks,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_D=triton.next_power_of_2(max(16, dim)),
        DOT=dot_dtype(dtype, cache_dtype),
        FP8_KEYS=fp8_keys,
        RANKS=shape.shard.ranks,
    )


@triton.jit
def find_last_block(position, BLOCK: tl.constexpr):
    """Return the number of the block that holds `position`; -1 for position -1."""
    return (position + BLOCK) // BLOCK - 1


@triton.jit
def order_scores(score, block, last, C: tl.constexpr):
    """Convert scores of the blocks `block` to int32 that sort in the same order. NaN sorts below
    realistic scores. Blocks that are always selected sort above all others. Blocks after `last` get
    NO_SCORE.
    """
    score = tl.where(score == score, score, -1e30)
    is_forced = (block < C.INIT) | (block > last - C.LOCAL)
    score = tl.where(is_forced, float("inf"), tl.where(score == 0.0, 0.0, score))
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(block <= last, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_SCORE)


@triton.jit
def make_key(order, number):
    """Make int64 sort keys from results of `order_scores` and block numbers."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def read_number(key):
    """Return the block number of a key as int64; NO_BLOCK if the key has no score."""
    number = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    return tl.where((key >> 32).to(tl.int32) == NO_SCORE, NO_BLOCK, number)


@triton.jit
def store_selection(block, row, head, table, is_there, ids, pages, C: tl.constexpr):
    """Store `block` [rows, TOPK_POW2], the blocks that the index queries `row` (token * HEADS +
    head) [rows] selected, to ids and pages [T, HEADS, TOPK]. The blocks may be in any order and
    include NO_BLOCK. `table` is the sequence's block table.
    """
    # Sort int64, because LLVM for AMD cannot sort the 32-bit halves of sorted int64 keys.
    block = tl.sort(block.to(tl.int64)).to(tl.int32)
    column = tl.arange(0, C.TOPK_POW2)[None, :]
    mask = is_there[:, None] & (column < C.TOPK)
    store_blocks(block, column, row, head, table, mask, ids, pages, C)


@triton.jit
def store_blocks(block, place, row, head, table, mask, ids, pages, C: tl.constexpr):
    """Where `mask` is true, store `block` [rows, n] at index `place` of the selection of `row`."""
    at = row.to(tl.int64)[:, None] * C.TOPK + place
    is_block = block != NO_BLOCK
    cache_block = tl.load(table + block // C.PER_BLOCK, mask=mask & is_block, other=0).to(tl.int32)
    page = (cache_block * C.HEADS + head[:, None]) * C.PER_BLOCK + block % C.PER_BLOCK
    tl.store(ids + at, tl.where(is_block, block, -1), mask=mask)
    tl.store(pages + at, tl.where(is_block, page, 0), mask=mask)


@triton.jit
def find_scored_block(numbers, i, C: tl.constexpr):
    """Return the number of scored block i: i itself, or computed from `numbers` if RANKS > 1."""
    if C.RANKS == 1:
        return i
    else:
        return tl.load(numbers + i // C.PER_BLOCK) * C.PER_BLOCK + i % C.PER_BLOCK


@triton.jit
def load_index_queries(index_q, first_row, is_row, C: tl.constexpr):
    """Load index queries [BLOCK_M, BLOCK_D] from `first_row` on; load 0 if `is_row` is false."""
    row, column = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK_D)
    at = index_q + (first_row + row)[:, None] * C.DIM + column[None, :]
    mask = is_row[:, None] & (column < C.DIM)[None, :]
    operands, _ = split_queries(tl.load(at, mask=mask, other=0.0), C)
    return operands


@triton.jit
def multiply_index_keys(q, cache, blocks, numbers, i, end, cache_block, C: tl.constexpr):
    """Multiply q with the keys of scored block i, which is in block `cache_block` of the cache.

    Return the products [BLOCK_M, BLOCK]. Also return the cache block and the block number of the
    next scored block: i + 1, or end - 1 if i + 1 is larger.
    """
    column, key = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK)
    page = cache_block.to(tl.int64) * C.PER_BLOCK + i % C.PER_BLOCK
    k_at = cache + page * (C.BLOCK * C.DIM) + key[:, None] * C.DIM + column[None, :]
    if C.DIM == C.BLOCK_D:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(column < C.DIM)[None, :] & (key >= 0)[:, None], other=0.0)
    # Load block numbers one block ahead: a load that waits for another halves the pipeline stages.
    next_i = tl.minimum(i + 1, end - 1)
    cache_block = tl.load(blocks + next_i // C.PER_BLOCK)
    next_number = find_scored_block(numbers, next_i, C)
    return multiply_keys(q, k, C), cache_block, next_number


@triton.jit
def store_best(best, row, head, table, is_there, ids, pages, C: tl.constexpr):
    """Store the blocks of the sort keys `best` [rows, TOPK_POW2] by `store_selection`. If ranks
    shard the index keys, store the sort keys to `ids` [T, HEADS, TOPK] int64.
    """
    column = tl.arange(0, C.TOPK_POW2)[None, :]
    if C.RANKS == 1:
        block = tl.where(column < C.TOPK, read_number(best), NO_BLOCK)
        store_selection(block, row, head, table, is_there, ids, pages, C)
    else:
        at = row.to(tl.int64)[:, None] * C.TOPK + column
        tl.store(ids + at, best, mask=is_there[:, None] & (column < C.TOPK))


@triton.jit
def find_highest(order, TOPK: tl.constexpr):
    """Return whether each entry of `order` [rows, N] int32 is among the TOPK highest of its row.
    NO_SCORE is never selected. Among equal entries the first entries are selected.

    The search finds the TOPK-th value two bits at a time, and ends when each row has at most TOPK
    entries that reach this value. An unrolled sort would need thousands of instructions.
    """
    # one int holds three counts of BITS bits each, so that one `tl.sum` adds all three
    BITS: tl.constexpr = 10 if order.shape[1] < 1024 else 20
    COUNTS: tl.constexpr = tl.int32 if BITS == 10 else tl.int64
    MASK: tl.constexpr = (1 << BITS) - 1
    least = tl.full([order.shape[0]], NO_SCORE, tl.int32)
    count = tl.sum((order != NO_SCORE).to(COUNTS), axis=1)  # scored entries; later those >= `least`
    i = 0
    while (tl.max(count, axis=0) > TOPK) & (i < 16):
        bit = tl.full([1], 1 << 30, tl.int32) >> (2 * i)
        first, second = least ^ bit, least ^ (bit << 1)
        third = second ^ bit
        counts = (order >= first[:, None]).to(COUNTS)
        counts += (order >= second[:, None]).to(COUNTS) << BITS
        counts += (order >= third[:, None]).to(COUNTS) << (2 * BITS)
        counts = tl.sum(counts, axis=1)
        for j in tl.static_range(3):
            found = (counts >> (j * BITS)) & MASK
            value = (first, second, third)[j]
            least = tl.where(found >= TOPK, value, least)
            count = tl.where(found >= TOPK, found, count)
        i += 1
    higher = order > least[:, None]
    equal = (order == least[:, None]) & (order != NO_SCORE)
    left = TOPK - tl.sum(higher.to(tl.int32), axis=1)
    return higher | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= left[:, None]))


@triton.jit
def store_all_blocks(position, row, head, table, is_there, ids, pages, C: tl.constexpr):
    """Select all blocks for index queries with at most TOPK blocks up to their position."""
    column = tl.arange(0, C.TOPK_POW2)[None, :]
    is_seen = column <= find_last_block(position, C.BLOCK)[:, None]
    mask = is_there[:, None] & (column < C.TOPK)
    store_blocks(tl.where(is_seen, column, NO_BLOCK), column, row, head, table, mask, ids, pages, C)
