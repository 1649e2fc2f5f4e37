"""Filter selected blocks: keep the blocks that a rank stores, and list their pages in its caches. A
program filters several rows (token, KV head).

    ids      | 0 | 3 | 7 | 9 |    of the sequence      | 3 | 9 | -1 | -1 |    of rank 1 of 2
    pages    | 7 | 2 | 4 | 1 |    of the pool          ...
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.block_sparse.selection import BlockSelection, SparseShape

_ROWS = 8  # number of rows per program; other values were not measured


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _own_selection_kernel(
    ids,  # [rows, TOPK] int32, numbers of the selected blocks
    pages,  # [rows, TOPK] int32, pages of the selected blocks
    bounds,  # [rows] int32, number of tokens in each row's selected blocks, or None
    own_ids,  # [rows, TOPK] int32, written: numbers of selected blocks that this rank holds
    own_pages,  # [rows, TOPK] int32, written: pages of the blocks `own_ids` in the rank's cache
    lengths,  # [rows] int32, written: number of tokens in the rank's blocks; None without `bounds`
    num_rows,
    rank,
    RANKS: tl.constexpr,
    PAGES: tl.constexpr,  # number of pages per cache block
    BLOCK: tl.constexpr,  # number of tokens per sparse block
    TOPK: tl.constexpr, TOPK_POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TOPK_POW2)[None, :]
    is_row = row < num_rows
    at = row.to(tl.int64)[:, None] * TOPK
    mask = is_row[:, None] & (column < TOPK)
    number = tl.load(ids + at + column, mask=mask, other=-1)
    page = tl.load(pages + at + column, mask=mask, other=0)
    is_mine = (number >= 0) & (page // PAGES % RANKS == rank)
    if bounds is not None:  # ids of padding tokens are undefined; their bounds are 0
        bound = tl.load(bounds + row, mask=is_row, other=0)
        num_chosen = tl.cdiv(bound, BLOCK)[:, None]
        is_mine = is_mine & (column < num_chosen)
    mine = is_mine.to(tl.int32)
    count = tl.sum(mine, axis=1)
    others = count[:, None] + tl.cumsum(1 - mine, axis=1)
    place = tl.where(is_mine, tl.cumsum(mine, axis=1), others) - 1
    to = is_row[:, None] & (place < TOPK)
    own_page = (page // PAGES // RANKS + 1) * PAGES + page % PAGES
    tl.store(own_ids + at + place, tl.where(is_mine, number, -1), mask=to)
    tl.store(own_pages + at + place, tl.where(is_mine, own_page, 0), mask=to)
    if bounds is not None:
        has_last = tl.sum(tl.where(column == num_chosen - 1, mine, 0), axis=1)
        beyond = tl.where(has_last > 0, tl.cdiv(bound, BLOCK) * BLOCK - bound, 0)
        tl.store(lengths + row, count * BLOCK - beyond, mask=is_row)


def filter_selection(
    choice: BlockSelection, shape: SparseShape, *, bounds: Tensor | None = None
) -> tuple[BlockSelection, Tensor | None]:
    """Return the rank's blocks of `choice`, then -1. If `bounds` [T * kv_heads] int32, the token
    counts of all selected blocks, is given, also return the token counts of the rank's blocks.
    """
    ids = choice.ids
    own = BlockSelection(torch.empty_like(ids), torch.empty_like(choice.pages))
    lengths = None if bounds is None else torch.empty_like(bounds)
    num_rows = ids.shape[0] * ids.shape[1]
    if num_rows:
        assert ids.is_contiguous() and choice.pages.is_contiguous()
        _own_selection_kernel[(triton.cdiv(num_rows, _ROWS),)](
            ids, choice.pages, bounds, own.ids, own.pages, lengths, num_rows, shape.cache.rank,
            RANKS=shape.cache.ranks,
            PAGES=shape.kv_heads * (shape.block_size // shape.sparse_block_size),
            BLOCK=shape.sparse_block_size, TOPK=shape.topk_blocks,
            TOPK_POW2=triton.next_power_of_2(shape.topk_blocks), ROWS=_ROWS, num_warps=1,
        )  # fmt: skip
    return own, lengths
