"""Select top-k blocks for prefills. Tensor cores compute scores; registers hold the best blocks.

A program has a tile of neighboring queries of a sequence, with all index heads. The program
computes the scores of all blocks up to the queries' positions. If there are few tiles, several
programs split the blocks of a tile. Scores are not written to memory. After every TOPK_POW2 blocks
the program merges the sort keys of these blocks into the highest sort keys of each row.

    index keys    | block 0 | block 1 | ...            -> products [BLOCK_M, BLOCK], their maximum
    TOPK_POW2 blocks                                    -> keys [BLOCK_M, TOPK_POW2]
    so far                                              -> best [BLOCK_M, TOPK_POW2]

A program's memory therefore does not grow with the context length. Queries with at most TOPK blocks
up to their position are not scored.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.triton_own_blocks import OwnBlocks, plan_own_blocks
from negamax.kernels.attention.triton_prefill import list_query_tiles
from negamax.kernels.attention.triton_shared import multiplies_fp8_keys
from negamax.kernels.block_sparse.selection import SparseShape
from negamax.kernels.block_sparse.tiles import tiles_for
from negamax.kernels.block_sparse.triton_selection import (
    NO_KEY,
    NO_SCORE,
    find_last_block,
    find_scored_block,
    load_index_queries,
    make_key,
    multiply_index_keys,
    order_scores,
    selection_constants,
    store_all_blocks,
    store_best,
)

_MOST_SPLITS = 16
_MERGED_ROWS = 16  # number of index queries for which one program merges the splits


@dataclass(frozen=True)
class SelectPrefillPlan:
    """The prefill queries of a step, divided into tiles."""

    metadata: AttentionMetadata
    shape: SparseShape
    block_m: int  # maximum number of index queries per tile
    tiles: Tensor  # [tiles, 4] int32, in the format of `attention.triton_prefill.PrefillPlan.tiles`
    splits: int  # number of programs that split the blocks of a tile
    own: OwnBlocks | None  # the blocks that this rank scores; None: all blocks are scored


def plan_select_prefill(metadata: AttentionMetadata, shape: SparseShape) -> SelectPrefillPlan:
    """Plan prefills; the queries of a sequence are the sequence's last tokens."""
    num_tokens, device = metadata.positions.shape[0], metadata.positions.device
    heads = shape.index_heads
    block_m = max(tiles_for(device).select_block_m(num_tokens * heads), heads)
    size = block_m // heads
    multiprocessors = platform.platform_of(device).multiprocessors
    splits = multiprocessors // triton.cdiv(max(1, num_tokens), size)
    splits = 2 ** max(0, min(splits, _MOST_SPLITS).bit_length() - 1)
    if not metadata.is_captured and max(metadata.host_seq_lens) <= shape.dense_tokens:
        splits = 1  # no query has more than TOPK blocks, so nothing is scored
    own = None
    if shape.shard.ranks > 1:
        own = plan_own_blocks(
            metadata,
            metadata.seq_lens,
            rank=shape.shard.rank,
            ranks=shape.shard.ranks,
            block_size=shape.block_size,
        )
    return SelectPrefillPlan(
        metadata, shape, block_m, list_query_tiles(metadata, size), splits, own
    )


@triton.jit
def _merge(best, order, numbers, C: tl.constexpr):
    """Merge `best` with the sort keys of blocks `numbers` [1, TOPK_POW2]; keep TOPK_POW2 keys."""
    BLOCK_M: tl.constexpr = C.BLOCK_M  # a copy, as Triton 3.6 accepts no struct field in a shape
    TOPK_POW2: tl.constexpr = C.TOPK_POW2
    key = make_key(order, numbers)
    both = tl.reshape(tl.join(best, key), [BLOCK_M, 2 * TOPK_POW2])
    return tl.topk(both, TOPK_POW2)


@triton.jit
def _best_blocks(index_q, cache, table, numbers, tile, begin, end, C: tl.constexpr):
    """Return each row's highest sort keys [BLOCK_M, TOPK_POW2] of scored blocks [begin, end)."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    TOPK_POW2: tl.constexpr = C.TOPK_POW2
    first, count, start = tile
    row, key = tl.arange(0, BLOCK_M), tl.arange(0, C.BLOCK)
    is_row = row < count * C.HEADS
    q = load_index_queries(index_q, first.to(tl.int64) * C.HEADS, is_row, C)
    position = start + row // C.HEADS
    last = find_last_block(position, C.BLOCK)
    slot = tl.arange(0, TOPK_POW2)[None, :]
    best = tl.full([BLOCK_M, TOPK_POW2], NO_KEY, tl.int64)
    order = tl.full([BLOCK_M, TOPK_POW2], NO_SCORE, tl.int32)
    slot_block = begin + slot
    cache_block = tl.load(table + begin // C.PER_BLOCK)
    next_number = find_scored_block(numbers, begin, C)
    for i in range(begin, end):
        block = i if C.RANKS == 1 else next_number
        products, cache_block, next_number = multiply_index_keys(
            q, cache, table, numbers, i, end, cache_block, C
        )
        if (block + 1) * C.BLOCK > start:
            is_seen = block * C.BLOCK + key[None, :] <= position[:, None]
            products = tl.where(is_seen, products, float("-inf"))
        of_block = order_scores(tl.max(products, axis=1), block, last, C)
        at = (i - begin) % TOPK_POW2
        order = tl.where(slot == at, of_block[:, None], order)
        slot_block = tl.where(slot == at, block, slot_block)
        if at == TOPK_POW2 - 1:
            best = _merge(best, order, slot_block, C)
            order = tl.full([BLOCK_M, TOPK_POW2], NO_SCORE, tl.int32)
    return _merge(best, order, slot_block, C)


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(do_not_specialize_on_alignment=["block_table_indices"])
def _select_prefill_kernel(
    index_q,  # [T, HEADS, DIM]
    cache,  # [blocks, 1, PER_BLOCK * BLOCK, DIM], index keys
    tables,  # [slots, table_stride] int32, block tables
    block_table_indices,  # [S] int64, row of each sequence in `tables`
    tiles,  # [tiles, 4] int32, `SelectPrefillPlan.tiles`
    keys,  # [T * HEADS, SPLITS, TOPK_POW2] int64 sort keys, written if SPLITS > 1
    ids,  # `ids` of `_merge_splits_kernel`, written if SPLITS is 1 or all blocks are selected
    pages,  # [T, HEADS, TOPK] int32, written together with `ids`
    own_blocks,  # `OwnBlocks.blocks`; own_blocks, held and width are used if RANKS > 1
    held,
    width,
    table_stride,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
):
    """Process one split of the blocks of a tile. Grid (SPLITS, tiles)."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    split, record = tl.program_id(0), tiles + tl.program_id(1) * 4
    first, count, start = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    sequence = tl.load(block_table_indices + tl.load(record + 3)).to(tl.int64)
    table = tables + sequence * table_stride
    row = tl.arange(0, BLOCK_M)
    is_there = row < count * C.HEADS
    num_blocks = find_last_block(start + count - 1, C.BLOCK) + 1
    if num_blocks <= C.TOPK:
        if C.RANKS == 1:  # noqa: SIM102  Triton evaluates this condition at compile time
            if split == 0:
                store_all_blocks(
                    start + row // C.HEADS, first * C.HEADS + row, row % C.HEADS, table, is_there,
                    ids, pages, C,
                )  # fmt: skip
    else:
        if C.RANKS == 1:
            numbers, blocks, num_scored = table, table, num_blocks
        else:
            seq = tl.load(record + 3).to(tl.int64)
            numbers = own_blocks + seq * 2 * width
            blocks = numbers + width
            last_held = held + seq * width + (num_blocks - 1) // C.PER_BLOCK
            num_scored = tl.load(last_held) * C.PER_BLOCK
        size = tl.cdiv(num_scored, SPLITS)
        begin = tl.minimum(split * size, num_scored)
        end = tl.minimum(begin + size, num_scored)
        best = _best_blocks(index_q, cache, blocks, numbers, (first, count, start), begin, end, C)
        column = tl.arange(0, C.TOPK_POW2)[None, :]
        if SPLITS == 1:
            store_best(best, first * C.HEADS + row, row % C.HEADS, table, is_there, ids, pages, C)
        else:
            at = (first * C.HEADS + row).to(tl.int64)[:, None] * SPLITS + split
            tl.store(keys + at * C.TOPK_POW2 + column, best, mask=is_there[:, None])


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(do_not_specialize_on_alignment=["block_table_indices"])
def _merge_splits_kernel(
    tables,
    block_table_indices,
    tiles,
    keys,  # [T * HEADS, SPLITS, TOPK_POW2] int64, sort keys of the splits' best blocks
    ids,  # [T, HEADS, TOPK], written: int32 block numbers; if RANKS > 1 int64 sort keys
    pages,  # [T, HEADS, TOPK] int32, written: pages of the selected blocks
    table_stride,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Select blocks for ROWS queries from the best of all splits. Grid (BLOCK_M / ROWS, tiles)."""
    record = tiles + tl.program_id(1) * 4
    first, count, start = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = row < count * C.HEADS
    if find_last_block(start + count - 1, C.BLOCK) >= C.TOPK:
        sequence = tl.load(block_table_indices + tl.load(record + 3)).to(tl.int64)
        row_at = (first * C.HEADS + row).to(tl.int64)[:, None] * (SPLITS * C.TOPK_POW2)
        at = row_at + tl.arange(0, SPLITS * C.TOPK_POW2)[None, :]
        best = tl.topk(tl.load(keys + at, mask=is_there[:, None], other=NO_KEY), C.TOPK_POW2)
        store_best(
            best, first * C.HEADS + row, row % C.HEADS, tables + sequence * table_stride,
            is_there, ids, pages, C,
        )  # fmt: skip


def select_prefill(
    index_q: Tensor,
    index_cache: Tensor,
    plan: SelectPrefillPlan,
    ids: Tensor,
    pages: Tensor | None = None,
) -> None:
    """Store the selected blocks' numbers and pages, or sort keys if ranks shard index keys."""
    (num_tokens, heads, dim), shape, splits = index_q.shape, plan.shape, plan.splits
    device, tables = index_q.device, plan.metadata.block_tables
    if num_tokens == 0:
        return
    constants = selection_constants(
        shape,
        dim,
        index_q.dtype,
        index_cache.dtype,
        rows=plan.block_m,
        fp8_keys=multiplies_fp8_keys(index_q, index_cache),
    )
    keys = None
    if splits > 1:
        of_row = splits * constants.TOPK_POW2
        keys = torch.empty(num_tokens * heads, of_row, dtype=torch.int64, device=device)
    launch = tiles_for(device).select_prefill(plan.block_m, index_cache.element_size())
    where = (tables, plan.metadata.block_table_indices, plan.tiles, keys, ids, pages)
    own = (None, None, 0) if plan.own is None else (plan.own.blocks, plan.own.held, tables.shape[1])
    _select_prefill_kernel[(splits, plan.tiles.shape[0])](
        index_q, index_cache, *where, *own, tables.stride(0), SPLITS=splits, C=constants,
        **launch.options,
    )  # fmt: skip
    if splits > 1:
        rows = min(_MERGED_ROWS, constants.BLOCK_M)
        _merge_splits_kernel[(constants.BLOCK_M // rows, plan.tiles.shape[0])](
            *where, tables.stride(0), ROWS=rows, SPLITS=splits, C=constants, num_warps=4
        )
