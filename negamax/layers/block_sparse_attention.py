"""Block-sparse attention over a paged cache.

Index heads score the blocks of earlier tokens. An index head per KV head selects the blocks to
which the query heads of the KV head attend. Heads are split over the attention group. All index
heads share the index keys, which are replicated or sharded by blocks (`selection.IndexShard`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, concatenate
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.block_sparse import op as sparse
from negamax.kernels.block_sparse.selection import BlockSelection, IndexShard, SparseShape
from negamax.kernels.cache_shards.op import OWN_ROWS
from negamax.kernels.kvcache.op import TokenPlaces
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import GroupedQueryStep, KvCaches, PagedKind
from negamax.layers.heads import AttentionSizes
from negamax.layers.kv_scales import KvScales
from negamax.layers.linear import ColumnParallels, ProjectionPart
from negamax.layers.names import AttentionNames, IndexerNames
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.parallel.collectives import Partial


@dataclass(frozen=True)
class BlockSparseStep(GroupedQueryStep):
    index_rows: Tensor | None  # [T] int64, cache row of each index key; None: use slot_mapping
    select: Any  # plan of the kernel that selects blocks for all tokens
    merge: Any  # plan of the kernel that merges selections of shards; None: one shard


class BlockSparseKind(PagedKind):
    """Prepares the state that `BlockSparseAttention` layers share in a step."""

    name = "block sparse"
    ops = sparse.BLOCK_SPARSE_DECODE, sparse.BLOCK_SPARSE_PREFILL

    def __init__(self, shape: SparseShape, *, frequencies: Tensor, kernels: KernelTable) -> None:
        super().__init__(shape, frequencies=frequencies, kernels=kernels)
        self._shape: SparseShape
        self._own_rows = kernels[OWN_ROWS].run
        self._plan_select = kernels[sparse.BLOCK_SPARSE_SELECT].prepare
        self._plan_select_shard = kernels[sparse.BLOCK_SPARSE_SELECT_SHARD].prepare
        self._plan_merge = kernels[sparse.BLOCK_SPARSE_MERGE_SHARDS].prepare

    def prepare(self, metadata: AttentionMetadata, kv: KvCaches) -> BlockSparseStep:
        block_size, tables = kv["k"].shape[2], metadata.token_tables
        shape = replace(self._shape, block_size=block_size, quantize=False)
        shard, index_rows = shape.shard, None
        if shape.cache.ranks > 1:
            index_rows = self._own_rows(
                tables, rank=shard.rank, ranks=shard.ranks, first=0, heads=1, block_size=block_size
            )
        if shard.ranks == 1:
            select, merge = self._plan_select(metadata, shape), None
        else:
            select = self._plan_select_shard(metadata, shape)
            merge = self._plan_merge(metadata, shape)
        # number of heads of the K and V caches, and of the index-key cache
        step = self.prepare_step(metadata, kv, (shape.kv_heads, 1))
        return BlockSparseStep(**vars(step), index_rows=index_rows, select=select, merge=merge)


class BlockSparseAttention:
    """Attention to the KV blocks that index heads select, from projections to output projection.

    Heads are split as in `Attention`. If the index keys are sharded, every rank computes the index
    queries of all heads. If the index keys are replicated, a rank computes only the index heads of
    its own KV heads. RMS norm is applied to each head of q, k, index q and index k. With
    `gemma_norm` the norms scale by 1 + the stored weights.
    """

    def __init__(
        self,
        names: AttentionNames,
        index: IndexerNames,
        sizes: AttentionSizes,
        *,
        index_dim: int,
        shard: IndexShard,
        gemma_norm: bool,
        setup: LayerSetup,
    ) -> None:
        view, kernels = setup.context.layout.attention, setup.kernels
        own_kv, queried = view.kv_heads(sizes.kv_heads), view.cache_heads(sizes.heads)
        index_heads = range(shard.heads) if shard.heads else own_kv
        index_rows = range(index_heads.start * index_dim, index_heads.stop * index_dim)
        self._group = setup.context.attention_group
        parts = [
            *sizes.qkv(names.qkv, queried, own_kv),
            ProjectionPart(index.q, sizes.kv_heads * index_dim, index_rows),
            ProjectionPart(index.k, index_dim, range(index_dim)),
        ]
        self._projection = ColumnParallels(parts, sizes.hidden_size, setup=setup)
        self._out = sizes.out(names.out, setup)
        self.activation = self._projection.activation
        # all attention kernels but the reference can quantize their output with one scale per head
        has_fp8 = kernels[sparse.BLOCK_SPARSE_PREFILL].provider != "reference"
        given = self._out.activation if has_fp8 else None
        self.gives_quantized = given is not None and given.group == sizes.head_dim
        self._select = kernels[sparse.BLOCK_SPARSE_SELECT].run
        self._select_shard = kernels[sparse.BLOCK_SPARSE_SELECT_SHARD].run
        self._merge_shards = kernels[sparse.BLOCK_SPARSE_MERGE_SHARDS].run
        self._decode = kernels[sparse.BLOCK_SPARSE_DECODE].run
        self._prefill = kernels[sparse.BLOCK_SPARSE_PREFILL].run
        write = kernels[sparse.BLOCK_SPARSE_NORM_ROPE_WRITE]
        self.norm_kernel, self._write, self._gemma = write, write.run, gemma_norm
        self._norm_weights = [
            torch.empty(2, width, dtype=torch.float32, device=setup.weights.device)
            for width in (sizes.head_dim, index_dim)
        ]
        own_norm, index_norm = self._norm_weights
        counts = len(queried), len(own_kv)
        self._norm = write.prepare(own_norm, index_norm, *counts, sizes.eps, shard)
        norms = names.q_norm, names.k_norm, index.q_norm, index.k_norm
        norm_slots = [
            WeightSlot(name, (len(target),), target=target)
            for name, target in zip(norms, (*own_norm, *index_norm), strict=True)
        ]
        self.kv_scales = KvScales(names)
        self.slots = [*self._projection.slots, *self._out.slots, *norm_slots, *self.kv_scales.slots]

    def finish_loading(self) -> None:
        """Pack the weights for kernels. Raises `CheckpointError` for invalid KV scales."""
        if self._gemma:
            for weight in self._norm_weights:
                weight.add_(1)
        self.kv_scales.finish_loading()
        self._projection.finish_loading()
        self._out.finish_loading()

    def __call__(
        self, x: Tensor | QuantizedActivations, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        """Map x [T, hidden] to partial sums [T, hidden] or [T, P, hidden]; cache k and v."""
        step: BlockSparseStep = metadata.prepared[BlockSparseKind.name]
        cache, index = self.kv_scales.scale(kv), kv["index"]
        at = TokenPlaces(step.cos, step.sin, step.slot_mapping)
        q, index_q = self._write(
            self._projection(x), self._norm, at, cache, index, index_rows=step.index_rows
        )  # fmt: skip
        if step.exchange is not None:
            step.exchange((cache.k, cache.v, index))
        choice, count, parts = self._choose(index_q, index, step), metadata.num_decodes, []
        for attend, plan, tokens in (
            (self._decode, step.decode, slice(None, count)),
            (self._prefill, step.prefill, slice(count, None)),
        ):
            if plan is not None:
                parts.append(attend(q[tokens], cache, choice.select(tokens), plan))
        return self._out(concatenate(parts), in_parts=True)

    def _choose(self, index_q: Tensor, index: Tensor, step: BlockSparseStep) -> BlockSelection:
        if step.merge is None:
            return self._select(index_q, index, step.select)
        keys = self._select_shard(index_q, index, step.select)
        return self._merge_shards(keys, step.merge, self._group)
