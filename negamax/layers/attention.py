"""Grouped-query attention with QK norm over a paged cache; heads are split over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, concatenate
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.op import DECODE, PREFILL, split_heads
from negamax.kernels.kvcache.op import LOCATE, KvCache, TokenPlaces, write
from negamax.kernels.op import Op
from negamax.kernels.registry import KernelTable
from negamax.kernels.rotary import half_split
from negamax.layers.context_exchange import KeyExchange
from negamax.layers.heads import AttentionSizes
from negamax.layers.kv_scales import KvScales
from negamax.layers.linear import ColumnParallel
from negamax.layers.names import AttentionNames
from negamax.layers.qk_norm import FullWidthNorm, PerHeadNorm
from negamax.layers.weights import LayerSetup
from negamax.parallel.collectives import Partial

# The caches of one layer on this rank, by name. A cache is [num_blocks, heads, block_size, width]:
# within a block, the tokens of a head are adjacent (`kernels/kvcache/op.py`).
KvCaches = Mapping[str, Tensor]


class AttentionKind(Protocol):
    """Prepares the state that all layers of one attention kind share in a step."""

    name: str

    def prepare(self, metadata: AttentionMetadata, kv: KvCaches) -> Any:
        """Prepare the attention state of a step. `kv`: caches of a layer of this attention kind."""


def prepare_attention(
    metadata: AttentionMetadata, kinds: Sequence[tuple[AttentionKind, KvCaches]]
) -> AttentionMetadata:
    """Return the step's metadata with the prepared state of each kind of attention."""
    return replace(metadata, prepared={kind.name: kind.prepare(metadata, kv) for kind, kv in kinds})


@dataclass(frozen=True)
class GroupedQueryStep:
    """Rope angles, cache rows and kernel plans for the tokens of a step."""

    cos: Tensor  # [T, 1, rotary_dim] fp32
    sin: Tensor  # [T, 1, rotary_dim] fp32
    slot_mapping: Tensor  # [T * kv_heads] int64, cache row of each token's keys and values.
    # `decode`: plan of attention.decode for the first num_decodes tokens; None if num_decodes is 0
    decode: Any
    # plan of attention.prefill for the tokens after the decodes; None if all tokens are decodes
    prefill: Any
    exchange: KeyExchange | None  # exchanges new keys and values; None: tokens are not sharded


class PagedKind:
    """Rotary attention over a paged cache, with separate kernels for decode and prefill."""

    ops: tuple[Op[Any, Any], Op[Any, Any]]

    def __init__(self, shape: PagedShape, *, frequencies: Tensor, kernels: KernelTable) -> None:
        """The dtype of `kernels` and the block size of each step replace those of `shape`."""
        self._shape = replace(shape, dtype=kernels.dtype)
        self._frequencies, self._locate = frequencies, kernels[LOCATE].run
        self._plan_decode, self._plan_prefill = (kernels[op].prepare for op in self.ops)

    def prepare_step(
        self, metadata: AttentionMetadata, kv: KvCaches, heads: tuple[int, ...]
    ) -> GroupedQueryStep:
        """Compute angles and cache rows, and plan kernels. `heads`: the head counts of caches."""
        block_size = kv["k"].shape[2]
        shape, tables = replace(self._shape, block_size=block_size), metadata.token_tables
        cos, sin, slot_mapping = self._locate(
            tables, self._frequencies, kv_heads=shape.kv_heads, block_size=block_size
        )
        decodes, prefills = metadata.decodes, metadata.prefills
        decode = self._plan_decode(decodes, shape) if decodes else None
        prefill = self._plan_prefill(prefills, shape) if prefills else None
        exchange = None
        if metadata.shared_tokens is not None:
            exchange = KeyExchange(metadata, block_size=block_size, heads=heads)
        return GroupedQueryStep(cos, sin, slot_mapping, decode, prefill, exchange)


class GroupedQueryKind(PagedKind):
    """Grouped-query attention over all earlier tokens."""

    name = "grouped query"
    ops = DECODE, PREFILL

    def prepare(self, metadata: AttentionMetadata, kv: KvCaches) -> GroupedQueryStep:
        return self.prepare_step(metadata, kv, (self._shape.kv_heads,))


class Attention:
    """Grouped-query attention from q, k, v projection to output projection, with QK norm and rope.

    RMS norm runs over all heads together or, with `norm_per_head`, over each head. With
    `gemma_norm` the norm scales by 1 + the weights. A rank has `heads / tp` query heads and
    `kv_heads / tp` KV heads. If there are more ranks than KV heads, adjacent ranks have copies of
    one KV head. If ranks shard a KV head's cache by blocks (DCP), each rank also projects the query
    heads of the ranks that share the KV head.
    """

    def __init__(
        self,
        names: AttentionNames,
        sizes: AttentionSizes,
        *,
        norm_per_head: bool = False,
        gemma_norm: bool = False,
        setup: LayerSetup,
    ) -> None:
        view, kernels = setup.context.layout.attention, setup.kernels
        own_kv, queried = view.kv_heads(sizes.kv_heads), view.cache_heads(sizes.heads)
        group = setup.context.attention_group
        self._group = group if group.size > 1 else None
        self._decode, self._prefill = (kernels[DECODE].run, kernels[PREFILL].run)
        qkv = sizes.qkv(names.qkv, queried, own_kv)
        self._qkv = ColumnParallel(qkv, sizes.hidden_size, setup=setup)
        self._out = sizes.out(names.out, setup)
        self.activation = self._qkv.activation  # quantized format of x that the layer also accepts.
        # All attention kernels but the reference can quantize their output with one scale per head.
        given = self._out.activation if kernels[PREFILL].provider != "reference" else None
        self.gives_quantized = given is not None and given.group == sizes.head_dim
        self._heads, self._kv_heads = len(queried), len(own_kv)
        norm: type[FullWidthNorm | PerHeadNorm] = PerHeadNorm if norm_per_head else FullWidthNorm
        self._qk_norm = norm(names, sizes, gemma=gemma_norm, setup=setup)
        # a fused kernel, or None if norm, rope and cache write are separate kernels
        self.norm_kernel = kernels.fusion(self._qk_norm.op, "rope.half_split", "kvcache.write")
        self.kv_scales = KvScales(names)
        self.slots = [
            *self._qkv.slots, *self._out.slots, *self._qk_norm.slots, *self.kv_scales.slots,
        ]  # fmt: skip

    def finish_loading(self) -> None:
        """Pack the weights for kernels. Raises `CheckpointError` for invalid KV scales."""
        self.kv_scales.finish_loading()
        self._qk_norm.finish_loading()
        self._qkv.finish_loading()
        self._out.finish_loading()

    def __call__(
        self, x: Tensor | QuantizedActivations, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        """Map x [T, hidden] to partial sums [T, hidden] or [T, P, hidden]; cache k and v."""
        step: GroupedQueryStep = metadata.prepared[GroupedQueryKind.name]
        qkv, cache = self._qkv(x), self.kv_scales.scale(kv)
        if self.norm_kernel is not None:  # norm, rope and cache write in one launch
            q = self.norm_kernel.run(
                qkv, self._qk_norm.norm, TokenPlaces(step.cos, step.sin, step.slot_mapping), cache,
                group=self._group,
            )  # fmt: skip
        else:
            q, k, v = split_heads(qkv, heads=self._heads, kv_heads=self._kv_heads)
            q, k = self._qk_norm(q, k)
            q, k = half_split(q, step.cos, step.sin), half_split(k, step.cos, step.sin)
            write(k, v, cache, step.slot_mapping)
            q = q.to(qkv.dtype)
        if step.exchange is not None:
            step.exchange((cache.k, cache.v))
        attended = self._attend(q, step, cache, num_decodes=metadata.num_decodes)
        return self._out(attended, in_parts=True)

    def _attend(
        self, q: Tensor, step: GroupedQueryStep, cache: KvCache, *, num_decodes: int
    ) -> Tensor | QuantizedActivations:
        """Attend with q [T, heads, head_dim] -> [T, heads * head_dim]."""
        parts = []
        if step.decode is not None:
            parts.append(self._decode(q[:num_decodes], cache, step.decode))
        if step.prefill is not None:
            parts.append(self._prefill(q[num_decodes:], cache, step.prefill))
        return concatenate(parts)
