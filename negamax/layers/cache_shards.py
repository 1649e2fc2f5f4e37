"""Decode context parallelism (DCP): ranks with the same KV head split the blocks of its cache.

Every rank attends to its own blocks with the query heads of all ranks that share the KV head. Each
rank then merges the partial results of its own heads. Attention layers need no code for DCP,
because their kernel table contains ops that split and merge.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.metadata import AttentionMetadata, CacheShard, PagedShape
from negamax.kernels.attention.op import DECODE, PREFILL
from negamax.kernels.block_sparse.op import BLOCK_SPARSE_DECODE, BLOCK_SPARSE_PREFILL
from negamax.kernels.cache_shards import op as shards
from negamax.kernels.kvcache.op import LOCATE, KvCache, TokenTables
from negamax.kernels.op import AnyKernel, Kernel, Op
from negamax.kernels.peers import Collective
from negamax.kernels.registry import KernelTable
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import AttentionView

_PARTIAL: dict[Op[Any, Any], Op[Any, Any]] = {
    DECODE: shards.PARTIAL_DECODE,
    PREFILL: shards.PARTIAL_PREFILL,
    BLOCK_SPARSE_DECODE: shards.PARTIAL_SPARSE_DECODE,
    BLOCK_SPARSE_PREFILL: shards.PARTIAL_SPARSE_PREFILL,
}


def cache_shard(view: AttentionView) -> CacheShard:
    """Return which blocks of the cache this rank stores."""
    return CacheShard(view.cache_rank, view.cache_size)


def cache_kernels(kernels: KernelTable, context: ParallelContext) -> KernelTable:
    """Return `kernels` with ops for sharded caches, or unchanged if a rank has all blocks."""
    view, group = context.layout.attention, context.cache_group
    if view.cache_size == 1:
        return kernels
    merge = kernels[shards.MERGE_PARTIALS].run
    replaced: dict[Op[Any, Any], tuple[AnyKernel, ...]] = {}
    for op, part in _PARTIAL.items():
        merged = _Merged(kernels[part], merge, group)
        replaced[op] = (Kernel(op, kernels[part].provider, merged.run, merged.prepare),)
    locate, own_rows, shard = kernels[LOCATE].run, kernels[shards.OWN_ROWS].run, cache_shard(view)

    def locate_own(
        tokens: TokenTables, frequencies: Tensor, *, kv_heads: int, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map tokens in other ranks' blocks to the padding block."""
        sizes = {"heads": kv_heads, "block_size": block_size}
        cos, sin, _ = locate(tokens, frequencies, kv_heads=kv_heads, block_size=block_size)
        rows = own_rows(tokens, rank=shard.rank, ranks=shard.ranks, first=1, **sizes)
        return cos, sin, rows.clamp_min_(0)

    replaced[LOCATE] = (replace(kernels[LOCATE], run=locate_own),)
    return replace(kernels, candidates={**kernels.candidates, **replaced})


@dataclass(frozen=True)
class _Plan:
    """The plan of the partial op `part`, and whether the merge also writes FP8."""

    part: Any
    quantize: bool


@dataclass(frozen=True)
class _Merged:
    """An attention op that runs a partial op on this rank's blocks and merges the results."""

    part: AnyKernel
    merge: Callable[..., Hidden]
    group: Collective

    def prepare(self, queries: AttentionMetadata, shape: PagedShape) -> _Plan:
        return _Plan(self.part.prepare(queries, replace(shape, quantize=False)), shape.quantize)

    def run(self, q: Tensor, cache: KvCache, *rest: Any) -> Hidden:
        """Map q [T, group's heads, head_dim] to [T, own heads * head_dim]; rest[-1] is the plan."""
        *choice, plan = rest
        own = self.part.run(q, cache, *choice, plan.part)
        count = q.shape[1] // self.group.size
        first = self.group.rank * count
        return self.merge(own, self.group, first=first, count=count, quantize=plan.quantize)
