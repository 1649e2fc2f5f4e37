"""Top-k block selection: select the blocks of a sequence that a token attends to.

A sequence is divided into sparse blocks of `sparse_block_size` tokens. A token sees the blocks up
to the local block, which contains the token. The token attends to `topk_blocks` of the blocks that
it sees: the first `init_blocks`, the last `local_blocks`, and the other blocks with the highest
scores. Among blocks with equal scores the block with the lower number is selected. Each KV head has
its own selection.

A cache block contains one or more sparse blocks. A cache [num_blocks, kv_heads, block_size, width]
viewed as [num_pages, 1, sparse_block_size, width] has one page per sparse block and head. Kernels
treat each pair of a token and a KV head as a sequence. The block table of a pair (token, KV head)
lists the pages of the selected blocks in ascending order. Only the last page may be partly filled.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.attention.metadata import PagedShape

NO_BLOCK = 0x7FFFFFFF  # larger than the number of any block
NO_KEY = -(2**63)  # smaller than the sort key of any block


@dataclass(frozen=True)
class IndexShard:
    """A rank's index keys: rank b % ranks stores block b of the pool at index b // ranks."""

    rank: int = 0
    ranks: int = 1  # number of ranks that shard the index keys; 1: each rank holds all index keys
    heads: int = 0  # number of index heads of all ranks if ranks shard the index keys, else 0
    first_head: int = 0  # first index head of this rank


@dataclass(frozen=True)
class SparseShape(PagedShape):
    """Sizes that determine the plan of a block-sparse attention kernel.

    `block_size` is a multiple of `sparse_block_size`. There is at least one local block, and
    `init_blocks` + `local_blocks` <= `topk_blocks`.
    """

    sparse_block_size: int  # number of tokens per sparse block
    topk_blocks: int
    init_blocks: int = 0
    local_blocks: int = 1
    shard: IndexShard = field(default_factory=IndexShard, kw_only=True)

    @property
    def index_heads(self) -> int:
        """The number of index heads whose queries a rank computes."""
        return self.shard.heads or self.kv_heads

    @property
    def dense_tokens(self) -> int:
        """A token that sees at most this number of tokens attends to all of them."""
        return self.topk_blocks * self.sparse_block_size


@dataclass(frozen=True)
class BlockSelection:
    """The selected blocks of T tokens."""

    # [T, kv_heads, topk_blocks] int32, ascending block numbers in the token's sequence; the local
    # block is last; unused entries and padding tokens have -1
    ids: Tensor
    pages: Tensor  # [T, kv_heads, topk_blocks] int32, cache pages of the blocks; 0 where ids is -1

    @classmethod
    def empty(cls, num_tokens: int, shape: SparseShape, device: torch.device) -> "BlockSelection":
        size = (2, num_tokens, shape.kv_heads, shape.topk_blocks)
        return cls(*torch.empty(size, dtype=torch.int32, device=device).unbind())

    def select(self, tokens: slice) -> "BlockSelection":
        return BlockSelection(self.ids[tokens], self.pages[tokens])


def choose(scores: Tensor, positions: Tensor, shape: SparseShape) -> Tensor:
    """Select the `ids` of a `BlockSelection` for tokens at `positions` [T].

    scores [T, kv_heads, blocks] fp32; blocks after a token's local block are ignored.
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
    """Return sort keys [T, heads, topk_blocks] int64 of the best blocks among `numbers`.

    scores [T, heads, blocks] fp32 are the scores of a rank's blocks, whose block numbers are
    `numbers` [T, blocks]; blocks after a token's local block are ignored. The upper half of a sort
    key is the score as an integer that sorts in the same order. The lower half of a sort key is the
    negated block number. Empty entries are NO_KEY.
    """
    numbers, local = numbers.unsqueeze(1), (positions // shape.sparse_block_size).view(-1, 1, 1)
    is_forced = (numbers < shape.init_blocks) | (numbers > local - shape.local_blocks)
    bits = (scores + 0.0).masked_fill(is_forced, torch.inf).view(torch.int32)
    order = (bits ^ ((bits >> 31) & NO_BLOCK)).long()
    keys = ((order << 32) | (NO_BLOCK - numbers)).masked_fill(numbers > local, NO_KEY)
    keys = F.pad(keys, (0, max(0, shape.topk_blocks - keys.shape[-1])), value=NO_KEY)
    return keys.topk(shape.topk_blocks, dim=-1).values


def blocks_of_keys(keys: Tensor, positions: Tensor, shape: SparseShape) -> Tensor:
    """Return the `ids` of a `BlockSelection`: the blocks of the highest sort keys.

    `keys` [T, kv_heads, n] are results of `best_keys`. The function ignores the sort keys of a
    token that attends to all blocks up to its position in `positions` [T].
    """
    best = keys.topk(shape.topk_blocks, dim=-1).values
    blocks = (NO_BLOCK - (best & NO_BLOCK)).sort(dim=-1).values
    local = (positions // shape.sparse_block_size).view(-1, 1, 1)
    every = torch.arange(shape.topk_blocks, device=keys.device)
    return blocks.where(local >= shape.topk_blocks, every.where(every <= local, -1)).int()


def pages_of(ids: Tensor, tables: Tensor, shape: SparseShape) -> Tensor:
    """Return the pages of blocks `ids` [T, kv_heads, topk_blocks] in block tables [T, blocks]."""
    per_block = shape.block_size // shape.sparse_block_size
    known = ids.clamp_min(0).long()
    blocks = tables.long().gather(1, (known // per_block).flatten(1)).view_as(known)
    heads = torch.arange(shape.kv_heads, device=ids.device).unsqueeze(-1)
    pages = (blocks * shape.kv_heads + heads) * per_block + known % per_block
    return pages.masked_fill(ids < 0, 0).int()


def attended_tokens(positions: Tensor, shape: SparseShape) -> Tensor:
    """Return the number of keys that tokens at `positions` [T] attend to; 0 for position -1."""
    in_blocks = (positions // shape.sparse_block_size).clamp_max(shape.topk_blocks - 1)
    return in_blocks * shape.sparse_block_size + positions % shape.sparse_block_size + 1
