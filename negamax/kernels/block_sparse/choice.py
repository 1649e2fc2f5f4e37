"""Which blocks of a sequence a token attends to.

A sequence's tokens are counted off in sparse blocks of `sparse_block_size` from position 0 on; a
token sees those up to its own, the local block. Of these it attends to `topk_blocks`: the first
`init_blocks`, the last `local_blocks`, and of the others those with the highest scores; of equal
scores that of the lower block. Each KV head has a choice of its own.

A block of the cache holds one sparse block or several. A cache [num_blocks, kv_heads, block_size,
width] seen as [num_pages, 1, sparse_block_size, width] has a page for each sparse block and head:
attention of one token and one KV head is that of a sequence whose block table is the pages of the
chosen blocks in ascending order, of which the last alone is partly filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.attention.metadata import PagedShape


@dataclass(frozen=True)
class SparseShape(PagedShape):
    """Sizes that a plan depends on. `block_size` is a multiple of `sparse_block_size`, there is a
    local block at least, and `init_blocks` + `local_blocks` are `topk_blocks` at most.
    """

    sparse_block_size: int  # tokens
    topk_blocks: int
    init_blocks: int = 0
    local_blocks: int = 1

    @property
    def dense_tokens(self) -> int:
        """A token that sees so many at most attends to all of them."""
        return self.topk_blocks * self.sparse_block_size


@dataclass(frozen=True)
class BlockChoice:
    """The blocks that T tokens attend to."""

    # [T, kv_heads, topk_blocks] int32, numbers of sparse blocks of the token's sequence, ascending
    # (the local block is the last one), -1 behind them and in rows of padding
    ids: Tensor
    pages: Tensor  # [T, kv_heads, topk_blocks] int32, the pages of `ids`; 0 where these are -1

    def of(self, tokens: slice) -> BlockChoice:
        """The choice of some of the tokens."""
        return BlockChoice(self.ids[tokens], self.pages[tokens])


def choose(scores: Tensor, positions: Tensor, shape: SparseShape) -> Tensor:
    """The `ids` of a `BlockChoice` of tokens at `positions` [T]; scores [T, kv_heads, blocks] fp32
    of the blocks of their sequence, of which any behind a token's local block count for nothing.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    local = (positions // shape.sparse_block_size).view(-1, 1, 1)
    is_forced = (blocks < shape.init_blocks) | (blocks > local - shape.local_blocks)
    scores = scores.masked_fill(is_forced, torch.inf).masked_fill(blocks > local, -torch.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., : shape.topk_blocks]
    ascending = best.masked_fill(best > local, len(blocks)).sort(dim=-1).values
    ids = ascending.masked_fill(ascending == len(blocks), -1)
    return F.pad(ids, (0, shape.topk_blocks - ids.shape[-1]), value=-1).int()


def pages_of(ids: Tensor, tables: Tensor, shape: SparseShape) -> Tensor:
    """The `pages` of a `BlockChoice`'s `ids` [T, kv_heads, topk_blocks]; tables [T, blocks] of each
    token's sequence.
    """
    per_block = shape.block_size // shape.sparse_block_size
    known = ids.clamp_min(0).long()
    blocks = tables.long().gather(1, (known // per_block).flatten(1)).view_as(known)
    heads = torch.arange(shape.kv_heads, device=ids.device).unsqueeze(-1)
    pages = (blocks * shape.kv_heads + heads) * per_block + known % per_block
    return pages.masked_fill(ids < 0, 0).int()


def attended_tokens(positions: Tensor, shape: SparseShape) -> Tensor:
    """How many tokens those at `positions` [T] attend to, whatever they choose; 0 at position
    -1.
    """
    in_blocks = (positions // shape.sparse_block_size).clamp_max(shape.topk_blocks - 1)
    return in_blocks * shape.sparse_block_size + positions % shape.sparse_block_size + 1
