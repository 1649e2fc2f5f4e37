"""Define block-sparse attention: every query attends to selected blocks of keys.

    score[t, h, b] = max_j index_q[t, h] . index_k[j],   j in block b, j <= position of t
    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h // group] * head_dim ** -0.5) v[j, h // group],
    over the keys j <= position of t in the blocks selected for KV head h // group

Each KV head has one index head, which selects the blocks of the KV head. All index heads share one
index key per token, which is stored in a cache with one head. Scores are fp32 without a scale,
because a scale does not change the selection. `selection.py` defines the selection.
`kernels/kvcache/op.py` defines the paged cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.op import ROPE_TOLERANCE, attention_op, head_norm, rows_of
from negamax.kernels.block_sparse.selection import (
    BlockSelection,
    IndexShard,
    SparseShape,
    best_keys,
    blocks_of_keys,
    choose,
    pages_of,
)
from negamax.kernels.kvcache.op import KvCache, TokenPlaces, store, write
from negamax.kernels.op import EXACT, Prepared, op
from negamax.kernels.peers import Collective
from negamax.kernels.rotary import half_split

# --- norms, rope, cache write --------------------------------------------------------------------


@dataclass(frozen=True)
class SparseHeadNorm:
    """Norm weights of attention heads and index heads, and this rank's numbers of heads."""

    weight: Tensor  # [2, head_dim] fp32, norm weights of queries and of keys
    index_weight: Tensor  # [2, index_dim] fp32, norm weights of index queries and of the index key
    heads: int
    kv_heads: int
    eps: float
    shard: IndexShard = field(default_factory=IndexShard)

    @property
    def index_heads(self) -> int:
        """Number of index heads: all ranks' if ranks shard the index keys, else this rank's."""
        return self.shard.heads or self.kv_heads


@dataclass(frozen=True)
class SparseHeads:
    """The parts of a projection, in fp32 and in the order of the projection's columns."""

    q: Tensor  # [T, heads, head_dim]
    k: Tensor  # [T, kv_heads, head_dim]
    v: Tensor  # [T, kv_heads, head_dim]
    index_q: Tensor  # [T, index_heads, index_dim]
    index_k: Tensor  # [T, 1, index_dim]


def split_sparse_heads(projected: Tensor, norm: SparseHeadNorm) -> SparseHeads:
    """Split a projection; replace NaN and infinity as in `attention.op.split_heads`."""
    (_, head_dim), (_, index_dim) = norm.weight.shape, norm.index_weight.shape
    counts = (norm.heads, norm.kv_heads, norm.kv_heads, norm.index_heads, 1)
    widths = (head_dim, head_dim, head_dim, index_dim, index_dim)
    finite = projected.nan_to_num().float()
    parts = finite.split([n * width for n, width in zip(counts, widths, strict=True)], dim=1)
    return SparseHeads(*(part.unflatten(1, (n, -1)) for part, n in zip(parts, counts, strict=True)))


def rows_of_index(rows: Tensor, shard: IndexShard, *, kv_heads: int, block_size: int) -> Tensor:
    """Map the keys' row indices to row indices [T] in a rank's index cache; -1: on another rank."""
    first = rows[::kv_heads]
    block = first // (kv_heads * block_size)
    own = block // shard.ranks * block_size + first % block_size
    return own.where(block % shard.ranks == shard.rank, -1)


def norm_rope_write(
    projected: Tensor,
    norm: Prepared,
    at: TokenPlaces,
    cache: KvCache,
    index_cache: Tensor,
    /,
    *,
    index_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalize and rotate q, k, index_q and index_k; write k, v and index_k to the caches.

    Returns q [T, heads, head_dim] and index_q [T, index_heads, index_dim]. `projected` has the
    parts of `SparseHeads`; a kernel may overwrite it. index_cache is [num_blocks, 1, block_size,
    index_dim]. `index_rows` [T] are the row indices of the index keys in index_cache (-1: not
    written), by default derived from the row indices of k. All arithmetic is in fp32; only the
    final results are rounded. The cache of index keys has no scale.
    """
    own = split_sparse_heads(projected, norm)
    q, k, index_q, index_k = (
        half_split(head_norm(x, weight, norm.eps), at.cos, at.sin)
        for x, weight in zip(
            (own.q, own.k, own.index_q, own.index_k),
            (*norm.weight, *norm.index_weight),
            strict=True,
        )
    )
    write(k, own.v, cache, at.rows)
    to = index_rows
    if to is None:
        to = rows_of_index(at.rows, norm.shard, kv_heads=norm.kv_heads, block_size=cache.k.shape[2])
    store(index_k[to >= 0], index_cache, to[to >= 0])
    return q.to(projected.dtype), index_q.to(projected.dtype)


# --- selection and attention ---------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSparsePlan:
    """The plan of the reference implementation: metadata of the queries, and the `SparseShape`."""

    queries: AttentionMetadata
    shape: SparseShape

    def runs(self) -> Iterator[tuple[slice, Tensor, int, Tensor]]:
        """Yield the slice of queries, block table, length and query positions of each sequence."""
        tables, counts = (
            self.queries.used_tables(self.shape.block_size), self.queries.host_query_lens
        )  # fmt: skip
        for table, length, count, end in zip(
            tables, self.queries.host_seq_lens, counts, accumulate(counts), strict=True
        ):
            positions = torch.arange(length - count, length, device=table.device)
            yield slice(end - count, end), table, length, positions


def plan(queries: AttentionMetadata, shape: SparseShape, /) -> Prepared:
    """Check that FP8 output is not requested; return `BlockSparsePlan(queries, shape)`."""
    assert not shape.quantize, "the reference has no FP8 output; set quantize=False"
    return BlockSparsePlan(queries, shape)


def select(index_q: Tensor, index_cache: Tensor, plan: Prepared, /) -> BlockSelection:
    """Select blocks for index_q [T, kv_heads, dim] by index_cache [blocks, 1, block_size, dim]."""
    ids = index_q.new_empty(*index_q.shape[:2], plan.shape.topk_blocks, dtype=torch.int32)
    pages = torch.empty_like(ids)
    for own, table, length, positions in plan.runs():
        scores = _block_scores(index_q[own], index_cache, table, length, positions, plan.shape)
        ids[own] = choose(scores, positions, plan.shape)
        pages[own] = pages_of(ids[own], table.expand(len(positions), -1), plan.shape)
    return BlockSelection(ids, pages)


def _block_scores(
    index_q: Tensor,
    index_cache: Tensor,
    table: Tensor,
    length: int,
    positions: Tensor,
    shape: SparseShape,
) -> Tensor:
    """Compute the scores [queries, heads, sparse blocks] of one sequence."""
    size = shape.sparse_block_size
    keys = rows_of(index_cache, table, length).squeeze(1)
    scores = torch.einsum("thd,jd->thj", index_q.float(), keys)
    is_later = torch.arange(length, device=keys.device) > positions.view(-1, 1, 1)
    scores = scores.masked_fill(is_later, -torch.inf)
    of_blocks = F.pad(scores, (0, -length % size), value=-torch.inf).unflatten(-1, (-1, size))
    best: Tensor = of_blocks.amax(-1)
    return best


def select_shard(index_q: Tensor, index_cache: Tensor, plan: Prepared, /) -> Tensor:
    """Find the highest-scoring blocks in this rank's shard of the index keys, for all index heads.

    index_q [T, index_heads, index_dim], index_cache [blocks of the shard, 1, block_size, index_dim]
    -> keys [1, T, index_heads, topk_blocks] int64 (`best_keys`). The result is undefined for tokens
    that attend to all blocks.
    """
    shape, shard = plan.shape, plan.shape.shard
    keys = index_q.new_zeros(1, *index_q.shape[:2], shape.topk_blocks, dtype=torch.int64)
    for own, table, length, positions in plan.runs():
        scores = _block_scores(
            index_q[own], index_cache, table // shard.ranks, length, positions, shape
        )
        numbers = torch.arange(scores.shape[-1], device=table.device)
        blocks = table[numbers * shape.sparse_block_size // shape.block_size]
        mine = numbers[blocks % shard.ranks == shard.rank]
        keys[0, own] = best_keys(scores[..., mine], mine.expand(len(scores), -1), positions, shape)
    return keys


def merge_shards(keys: Tensor, plan: Prepared, group: Collective | None, /) -> BlockSelection:
    """Select blocks for this rank's heads among the highest-scoring blocks of all shards.

    keys [shards, T, index_heads, topk_blocks] contain this rank's result of `select_shard` if
    `group` is given, else the results of all ranks.
    """
    shape, queries = plan.shape, plan.queries
    if group is not None:
        keys = group.all_gather(keys, dim=0)
    first = shape.shard.first_head
    own = keys[:, :, first : first + shape.kv_heads].permute(1, 2, 0, 3).flatten(2)
    ids = blocks_of_keys(own, queries.positions, shape)
    return BlockSelection(ids, pages_of(ids, queries.block_tables[queries.token_slots], shape))


def attend(q: Tensor, cache: KvCache, choice: BlockSelection, plan: Prepared, /) -> Hidden:
    """Attend with q [T, heads, head_dim] to the selected blocks -> [T, heads * head_dim]."""
    size, group = plan.shape.sparse_block_size, plan.shape.group
    out = torch.empty_like(q)
    for own, table, length, positions in plan.runs():
        k, v = (
            (rows_of(part, table, length) * scale).repeat_interleave(group, dim=1)
            for part, scale in zip((cache.k, cache.v), cache.scales, strict=True)
        )
        scores = torch.einsum("thd,jhd->thj", q[own].float(), k) * q.shape[-1] ** -0.5
        keys = torch.arange(length, device=q.device)
        is_chosen = (choice.ids[own].unsqueeze(-2) == (keys // size).unsqueeze(-1)).any(-1)
        is_seen = is_chosen & (keys <= positions.view(-1, 1, 1))  # [queries, kv_heads, keys]
        is_seen = is_seen.repeat_interleave(group, dim=1)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[own] = torch.einsum("thj,jhd->thd", weights, v).to(q.dtype)
    return out.flatten(1)


BLOCK_SPARSE_NORM_ROPE_WRITE = op(
    "block_sparse.norm_rope_write",
    norm_rope_write,
    SparseHeadNorm,
    "norm and rope of each head and index head; keys, values, index keys into caches",
    ROPE_TOLERANCE,
    sequence=("attention.head_norm", "rope.half_split", "kvcache.write", "kvcache.store"),
    wide_error=5e-3,
)
BLOCK_SPARSE_SELECT = op(
    "block_sparse.select", select, plan, "top-k blocks of each token, as indices and pages", EXACT
)
BLOCK_SPARSE_SELECT_SHARD = op(
    "block_sparse.select_shard", select_shard, plan, "a shard's best blocks for all heads", EXACT
)
BLOCK_SPARSE_MERGE_SHARDS = op(
    "block_sparse.merge_shards", merge_shards, plan, "top-k blocks of all shards", EXACT
)
BLOCK_SPARSE_DECODE = attention_op(
    "block_sparse.decode", attend, plan, "one query per sequence against its selected blocks"
)
BLOCK_SPARSE_PREFILL = attention_op(
    "block_sparse.prefill", attend, plan, "runs of queries, each query against its selected blocks"
)
