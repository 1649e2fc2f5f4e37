"""Block-sparse attention on the GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.triton_decode import decode_kernels
from negamax.kernels.attention.triton_head_norm import IndexHeads, launch_norm_rope_write
from negamax.kernels.block_sparse.op import (
    BLOCK_SPARSE_DECODE,
    BLOCK_SPARSE_MERGE_SHARDS,
    BLOCK_SPARSE_NORM_ROPE_WRITE,
    BLOCK_SPARSE_PREFILL,
    BLOCK_SPARSE_SELECT,
    BLOCK_SPARSE_SELECT_SHARD,
    SparseHeadNorm,
)
from negamax.kernels.block_sparse.selection import BlockSelection, SparseShape
from negamax.kernels.block_sparse.triton_decode import plan_sparse_decode, sparse_decode
from negamax.kernels.block_sparse.triton_prefill import plan_sparse_prefill, sparse_prefill
from negamax.kernels.block_sparse.triton_select_decode import (
    MOST_QUERIES,
    SelectDecodePlan,
    plan_select_decode,
    select_decode,
)
from negamax.kernels.block_sparse.triton_select_prefill import (
    SelectPrefillPlan,
    plan_select_prefill,
    select_prefill,
)
from negamax.kernels.block_sparse.triton_shard import merge_shards, plan_merge_shards
from negamax.kernels.kvcache.op import KvCache, TokenPlaces
from negamax.kernels.launch.triton import triton_kernel


def sparse_norm_rope_write(
    projected: Tensor,
    norm: SparseHeadNorm,
    at: TokenPlaces,
    cache: KvCache,
    index_cache: Tensor,
    *,
    index_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `block_sparse.norm_rope_write`; tokens with negative row indices are not written."""
    index_q = projected.new_empty(len(projected), norm.index_heads, norm.index_weight.shape[1])
    index = IndexHeads(
        norm.index_weight, index_q, index_cache, norm.shard.rank, norm.shard.ranks, index_rows
    )
    own = (norm.weight, norm.eps)
    q = launch_norm_rope_write(projected, norm.heads, own, at, cache, index)
    return q, index_q


@dataclass(frozen=True)
class SelectPlan:
    """Two selection plans: one for the first `num_decodes` queries, one for the other queries."""

    shape: SparseShape
    num_decodes: int
    decode: SelectDecodePlan | None
    rest: SelectDecodePlan | SelectPrefillPlan | None


def plan_select(queries: AttentionMetadata, shape: SparseShape) -> SelectPlan:
    """Plan the selection; sequences with few queries (draft tokens) are planned like decodes."""
    decodes, prefills, rest = queries.decodes, queries.prefills, None
    if prefills:
        few = not prefills.is_captured and max(prefills.host_query_lens) <= MOST_QUERIES
        rest = (plan_select_decode if few else plan_select_prefill)(prefills, shape)
    decode = plan_select_decode(decodes, shape) if decodes else None
    return SelectPlan(shape, queries.num_decodes, decode, rest)


def select(index_q: Tensor, index_cache: Tensor, plan: SelectPlan) -> BlockSelection:
    """Run `block_sparse.select`. The result is undefined for padding tokens."""
    choice = BlockSelection.empty(len(index_q), plan.shape, index_q.device)
    _select(index_q, index_cache, plan, choice.ids, choice.pages)
    return choice


def select_shard(index_q: Tensor, index_cache: Tensor, plan: SelectPlan) -> Tensor:
    """Run `block_sparse.select_shard`. The result is undefined for padding tokens."""
    size = (1, *index_q.shape[:2], plan.shape.topk_blocks)
    keys = torch.empty(size, dtype=torch.int64, device=index_q.device)
    _select(index_q, index_cache, plan, keys[0])
    return keys


def _select(index_q: Tensor, index_cache: Tensor, plan: SelectPlan, *to: Tensor) -> None:
    assert index_q.is_contiguous() and index_cache.is_contiguous()
    for tokens, own in (
        (slice(None, plan.num_decodes), plan.decode),
        (slice(plan.num_decodes, None), plan.rest),
    ):
        out = [part[tokens] for part in to]
        if isinstance(own, SelectDecodePlan):
            select_decode(index_q[tokens], index_cache, own, *out)
        elif own is not None:
            select_prefill(index_q[tokens], index_cache, own, *out)


KERNELS = (
    triton_kernel(BLOCK_SPARSE_NORM_ROPE_WRITE, sparse_norm_rope_write, SparseHeadNorm),
    triton_kernel(BLOCK_SPARSE_SELECT, select, plan_select),
    triton_kernel(BLOCK_SPARSE_SELECT_SHARD, select_shard, plan_select),
    triton_kernel(BLOCK_SPARSE_MERGE_SHARDS, merge_shards, plan_merge_shards),
    *decode_kernels(BLOCK_SPARSE_DECODE, sparse_decode, plan_sparse_decode),
    triton_kernel(BLOCK_SPARSE_PREFILL, sparse_prefill, plan_sparse_prefill),
)
