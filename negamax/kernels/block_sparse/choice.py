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

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.attention.metadata import PagedShape

NO_BLOCK = 0x7FFFFFFF  # above the number of any block
NO_KEY = -(2**63)  # below the key of any block


@dataclass(frozen=True)
class IndexShard:
    """Which index keys a rank holds: those of every `ranks`-th block of the cache. Block b is block
    b // ranks of rank b % ranks, whatever it holds and wherever in a sequence that stands.
    """

    rank: int = 0
    ranks: int = 1  # 1: all keys
    # of several ranks each has the queries of the index heads of all; its own are some of them
    heads: int = 0
    first_head: int = 0


@dataclass(frozen=True)
class SparseShape(PagedShape):
    """Sizes that a plan depends on. `block_size` is a multiple of `sparse_block_size`, there is a
    local block at least, and `init_blocks` + `local_blocks` are `topk_blocks` at most.
    """

    sparse_block_size: int  # tokens
    topk_blocks: int
    init_blocks: int = 0
    local_blocks: int = 1
    shard: IndexShard = field(default_factory=IndexShard, kw_only=True)

    @property
    def index_heads(self) -> int:
        """The index heads whose queries a rank has."""
        return self.shard.heads or self.kv_heads

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


def best_keys(scores: Tensor, numbers: Tensor, positions: Tensor, shape: SparseShape) -> Tensor:
    """What a rank that holds some of the blocks contributes to a choice: the keys [T, heads,
    topk_blocks] int64 of its best ones.

    scores [T, heads, blocks] fp32 of the blocks whose numbers are `numbers` [T, blocks]; those
    behind a token's local block count for nothing. A key is the score, as an integer of the same
    order, above the block's number counted down: of equal scores that of the lower block is the
    larger key. NO_KEY where there are fewer blocks.
    """
    numbers, local = numbers.unsqueeze(1), (positions // shape.sparse_block_size).view(-1, 1, 1)
    is_forced = (numbers < shape.init_blocks) | (numbers > local - shape.local_blocks)
    bits = (scores + 0.0).masked_fill(is_forced, torch.inf).view(torch.int32)
    order = (bits ^ ((bits >> 31) & NO_BLOCK)).long()
    keys = ((order << 32) | (NO_BLOCK - numbers)).masked_fill(numbers > local, NO_KEY)
    keys = F.pad(keys, (0, max(0, shape.topk_blocks - keys.shape[-1])), value=NO_KEY)
    return keys.topk(shape.topk_blocks, dim=-1).values


def blocks_of_keys(keys: Tensor, positions: Tensor, shape: SparseShape) -> Tensor:
    """The `ids` of a `BlockChoice` of tokens at `positions` [T] from the best keys [T, kv_heads, n]
    of all blocks, which are not looked at where a token attends to all that it sees.
    """
    best = keys.topk(shape.topk_blocks, dim=-1).values
    blocks = (NO_BLOCK - (best & NO_BLOCK)).sort(dim=-1).values
    local = (positions // shape.sparse_block_size).view(-1, 1, 1)
    every = torch.arange(shape.topk_blocks, device=keys.device)
    return blocks.where(local >= shape.topk_blocks, every.where(every <= local, -1)).int()


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
