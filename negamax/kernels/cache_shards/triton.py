"""Attention to a rank's own blocks on the GPU. The kernels of ordinary attention read the caches
through a list of the blocks that the rank stores.

A query attends to all tokens of the rank's earlier blocks. If the rank stores the block that
contains the query, the query also attends to this block up to its position. A decode therefore runs
like a decode of a shorter sequence. For several queries of a sequence, the kernel finds the last
visible key of each query. `filter_selection` reduces a block selection to the rank's blocks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.triton_decode import decode_kernels, launch_decode
from negamax.kernels.attention.triton_decode_plan import DecodePlan, plan_decode
from negamax.kernels.attention.triton_own_blocks import OwnBlocks, plan_own_blocks
from negamax.kernels.attention.triton_prefill import PrefillPlan, launch_prefill, plan_prefill
from negamax.kernels.block_sparse.selection import BlockSelection
from negamax.kernels.block_sparse.triton_decode import SparseDecodePlan, plan_sparse_decode
from negamax.kernels.block_sparse.triton_prefill import (
    SparsePrefillPlan,
    launch_sparse_prefill,
    plan_chosen_prefill,
)
from negamax.kernels.cache_shards.op import (
    MERGE_PARTIALS,
    OWN_ROWS,
    PARTIAL_DECODE,
    PARTIAL_PREFILL,
    PARTIAL_SPARSE_DECODE,
    PARTIAL_SPARSE_PREFILL,
    PartialResults,
)
from negamax.kernels.cache_shards.triton_merge import merge_partials
from negamax.kernels.cache_shards.triton_own_selection import filter_selection
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.kvcache.triton import own_rows
from negamax.kernels.launch.triton import triton_kernel


def _list_own_blocks(queries: AttentionMetadata, shape: PagedShape) -> OwnBlocks:
    return plan_own_blocks(
        queries,
        queries.seq_lens,
        rank=shape.cache.rank,
        ranks=shape.cache.ranks,
        block_size=shape.block_size,
        first=1,
    )


def _replace_tables(queries: AttentionMetadata, own: OwnBlocks) -> AttentionMetadata:
    """Return `queries` with block tables that list only the rank's blocks."""
    num_seqs, device = own.keys.shape[0], own.keys.device
    rows = torch.arange(num_seqs, dtype=torch.int64, device=device)
    return replace(queries, block_tables=own.blocks[:, 1], block_table_indices=rows)


def plan_partial_decode(
    queries: AttentionMetadata, shape: PagedShape, *, reduce_later: bool = False
) -> DecodePlan:
    """Plan each query as a separate sequence. Only the device reads the sequence lengths."""
    own = _list_own_blocks(queries, shape)
    local = replace(_replace_tables(queries, own), seq_lens=own.keys, decode_runs=None)
    return plan_decode(local, shape, reduce_later=reduce_later)


def partial_decode(q: Tensor, cache: KvCache, plan: DecodePlan) -> PartialResults:
    found = PartialResults.empty(q)
    launch_decode(q, cache, plan, (found.out, None, None), lse=found.lse)
    return found


def plan_partial_prefill(queries: AttentionMetadata, shape: PagedShape) -> PrefillPlan:
    """Plan prefills; the queries of a sequence are the sequence's last tokens."""
    own = _list_own_blocks(queries, shape)
    plan = plan_prefill(queries, shape)
    return replace(plan, queries=_replace_tables(queries, own), held=own.held)


def partial_prefill(q: Tensor, cache: KvCache, plan: PrefillPlan) -> PartialResults:
    found = PartialResults.empty(q)
    launch_prefill(q, cache, plan, (found.out, None, None), lse=found.lse)
    return found


def partial_sparse_decode(
    q: Tensor, cache: KvCache, choice: BlockSelection, plan: SparseDecodePlan
) -> PartialResults:
    """Run `cache_shards.sparse_decode`; sequence lengths count only keys in this rank's blocks."""
    found, shape, head_dim = PartialResults.empty(q), plan.shape, q.shape[2]
    own, lengths = filter_selection(choice, shape, bounds=plan.paged.queries.seq_lens)
    queries = replace(plan.paged.queries, block_tables=own.pages.flatten(0, 1))
    launch_decode(
        q.view(-1, shape.group, head_dim),
        cache.as_pages(shape.sparse_block_size),
        replace(plan.paged, queries=queries),
        (found.out, None, None),
        lse=found.lse,
        lengths=lengths,
    )
    return found


def partial_sparse_prefill(
    q: Tensor, cache: KvCache, choice: BlockSelection, plan: SparsePrefillPlan
) -> PartialResults:
    found = PartialResults.empty(q)
    own, _ = filter_selection(choice, plan.shape)
    launch_sparse_prefill(q, cache, own, plan, (found.out, None, None), lse=found.lse)
    return found


KERNELS = (
    triton_kernel(OWN_ROWS, own_rows),
    *decode_kernels(PARTIAL_DECODE, partial_decode, plan_partial_decode),
    *decode_kernels(PARTIAL_SPARSE_DECODE, partial_sparse_decode, plan_sparse_decode),
    triton_kernel(PARTIAL_PREFILL, partial_prefill, plan_partial_prefill),
    triton_kernel(PARTIAL_SPARSE_PREFILL, partial_sparse_prefill, plan_chosen_prefill),
    triton_kernel(MERGE_PARTIALS, merge_partials),
)
