"""MiniMax-M3: layers with full or block-sparse attention, and with dense MLPs or experts."""

from typing import Any

from negamax.kernels.activations import SwiGlu
from negamax.kernels.block_sparse.selection import IndexShard, SparseShape
from negamax.kernels.registry import KernelTable
from negamax.kernels.rotary import signed_frequencies
from negamax.layers.attention import Attention, AttentionKind, GroupedQueryKind
from negamax.layers.block_sparse_attention import BlockSparseAttention, BlockSparseKind
from negamax.layers.cache_shards import cache_kernels, cache_shard
from negamax.layers.mlp import Mlp
from negamax.layers.moe import SparseMoe
from negamax.models import minimax_names
from negamax.models.decoder import Decoder, DecoderLayer, attention_sizes, moe_sizes
from negamax.models.minimax_m3 import names
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


def build(
    spec: MiniMaxM3Spec, *, context: ParallelContext, weights: WeightFormat, kernels: KernelTable
) -> Decoder:
    """Build this rank's part of the model, without weights."""
    kernels = cache_kernels(kernels, context)
    shared: dict[str, Any] = {"context": context, "weights": weights, "kernels": kernels}
    numbers = context.layout.layers(spec.num_layers)
    layers = [_build_layer(spec, layer, **shared) for layer in numbers]
    norm: dict[str, Any] = {"eps": spec.rms_norm_eps, "gemma": True}
    kinds = _build_kinds(spec, layers, **shared)
    return Decoder(spec, layers, kinds, names=minimax_names.DECODER, **norm, **shared)


def _build_layer(
    spec: MiniMaxM3Spec, layer: int, *, context: ParallelContext, **shared: Any
) -> DecoderLayer:
    return DecoderLayer(
        _build_attention(spec, layer, context=context, **shared),
        _build_mlp(spec, layer, context=context, **shared),
        spec.hidden_size,
        norms=minimax_names.norms(layer),
        eps=spec.rms_norm_eps,
        gemma=True,
        **shared,
    )


def _build_attention(
    spec: MiniMaxM3Spec, layer: int, *, context: ParallelContext, **shared: Any
) -> Attention | BlockSparseAttention:
    heads = {**attention_sizes(spec), "gemma_norm": True, "context": context}
    attention = minimax_names.attention(layer)
    if spec.sparse is None or not spec.sparse.layers[layer]:
        return Attention(attention, norm_per_head=True, **heads, **shared)
    return BlockSparseAttention(
        attention,
        names.indexer(layer),
        index_dim=spec.sparse.index_dim,
        shard=_shard_index(spec, context),
        **heads,
        **shared,
    )


def _build_mlp(spec: MiniMaxM3Spec, layer: int, **shared: Any) -> SparseMoe | Mlp:
    swiglu = SwiGlu(alpha=spec.swiglu_alpha, limit=spec.swiglu_limit, beta=1.0)
    if not spec.moe_layers[layer]:
        sizes = {"hidden_size": spec.hidden_size, "width": spec.dense_width}
        return Mlp(names.mlp(layer), activation=swiglu, **sizes, **shared)
    return SparseMoe(
        names.moe(layer),
        layer=layer,
        activation=swiglu,
        routed_scaling=spec.routed_scaling_factor,
        shared_width=spec.shared_width,
        **moe_sizes(spec),
        **shared,
    )


def _shard_index(spec: MiniMaxM3Spec, context: ParallelContext) -> IndexShard:
    """Return this rank's part of the index keys."""
    if spec.sparse is None or not spec.sparse.is_sharded:
        return IndexShard()
    view, heads = context.layout.attention, spec.sparse.index_heads
    return IndexShard(view.rank, view.size, heads, view.kv_heads(heads).start)


def _build_kinds(
    spec: MiniMaxM3Spec,
    layers: list[DecoderLayer],
    *,
    context: ParallelContext,
    weights: WeightFormat,
    kernels: KernelTable,
) -> list[tuple[AttentionKind, int]]:
    """Return the attention kinds of `layers`, each with the first layer of its kind."""
    view = context.layout.attention
    kv_heads = len(view.kv_heads(spec.num_kv_heads))
    group, cache = len(view.cache_heads(spec.num_heads)) // kv_heads, cache_shard(view)
    common: dict[str, Any] = {
        "frequencies": signed_frequencies(spec.rotary_dim, spec.rope_theta).to(weights.device),
        "quantize": all(layer.attention.gives_quantized for layer in layers),
        "kernels": kernels,
    }
    sparse, kinds = spec.sparse, list[tuple[AttentionKind, int]]()
    at = [isinstance(layer.attention, BlockSparseAttention) for layer in layers]
    if False in at:
        kind = GroupedQueryKind(kv_heads=kv_heads, group=group, cache=cache, **common)
        kinds.append((kind, at.index(False)))
    if sparse is not None and True in at:
        sizes = (sparse.block_size, sparse.block_size, sparse.topk_blocks, sparse.init_blocks)
        shard = _shard_index(spec, context)
        shape = SparseShape(kv_heads, group, *sizes, sparse.local_blocks, shard=shard, cache=cache)
        kinds.append((BlockSparseKind(shape, **common), at.index(True)))
    return kinds
