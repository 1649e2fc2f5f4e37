"""MiniMax-M3: layers with full or block-sparse attention, and with dense MLPs or experts."""

from dataclasses import replace
from typing import Any

from negamax.kernels.activations import SwiGlu
from negamax.kernels.block_sparse.selection import IndexShard, SparseShape
from negamax.kernels.rotary import signed_frequencies
from negamax.layers.attention import Attention, AttentionKind, GroupedQueryKind
from negamax.layers.block_sparse_attention import BlockSparseAttention, BlockSparseKind
from negamax.layers.cache_shards import cache_kernels
from negamax.layers.mlp import Mlp
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import LayerSetup
from negamax.models import minimax_names
from negamax.models.decoder import Decoder, DecoderLayer, attention_sizes, moe_sizes, paged_shape
from negamax.models.minimax_m3 import names
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.minimax_m3.vision import VisionTower
from negamax.parallel.layout import ParallelLayout


def build(spec: MiniMaxM3Spec, setup: LayerSetup) -> Decoder:
    """Build this rank's part of the model, without weights."""
    setup = replace(setup, kernels=cache_kernels(setup.kernels, setup.context))
    numbers = setup.context.layout.layers(spec.num_layers)
    layers = [_build_layer(spec, layer, setup) for layer in numbers]
    own: dict[str, Any] = {"eps": spec.rms_norm_eps, "gemma": True, "setup": setup}
    kinds = _build_kinds(spec, layers, setup)
    tower = None
    if spec.vision is not None and setup.context.layout.is_first_stage:
        tower = VisionTower(spec.vision, setup.weights, setup.kernels)
    return Decoder(spec, layers, kinds, names=minimax_names.DECODER, vision=tower, **own)


def _build_layer(spec: MiniMaxM3Spec, layer: int, setup: LayerSetup) -> DecoderLayer:
    return DecoderLayer(
        _build_attention(spec, layer, setup),
        _build_mlp(spec, layer, setup),
        spec.hidden_size,
        norms=minimax_names.norms(layer),
        eps=spec.rms_norm_eps,
        gemma=True,
        setup=setup,
    )


def _build_attention(
    spec: MiniMaxM3Spec, layer: int, setup: LayerSetup
) -> Attention | BlockSparseAttention:
    own: dict[str, Any] = {"gemma_norm": True, "setup": setup}
    attention, sizes = minimax_names.attention(layer), attention_sizes(spec)
    if spec.sparse is None or not spec.sparse.layers[layer]:
        return Attention(attention, sizes, norm_per_head=True, **own)
    index_dim, shard = spec.sparse.index_dim, _shard_index(spec, setup.context.layout)
    return BlockSparseAttention(
        attention, names.indexer(layer), sizes, index_dim=index_dim, shard=shard, **own
    )


def _build_mlp(spec: MiniMaxM3Spec, layer: int, setup: LayerSetup) -> SparseMoe | Mlp:
    swiglu = SwiGlu(alpha=spec.swiglu_alpha, limit=spec.swiglu_limit, beta=1.0)
    if not spec.moe_layers[layer]:
        sizes = {"hidden_size": spec.hidden_size, "width": spec.dense_width}
        return Mlp(names.mlp(layer), activation=swiglu, **sizes, setup=setup)
    return SparseMoe(
        names.moe(layer),
        layer=layer,
        activation=swiglu,
        routed_scaling=spec.routed_scaling_factor,
        shared_width=spec.shared_width,
        **moe_sizes(spec),
        setup=setup,
    )


def _shard_index(spec: MiniMaxM3Spec, layout: ParallelLayout) -> IndexShard:
    """Return which index keys this rank stores."""
    if spec.sparse is None or not spec.sparse.is_sharded:
        return IndexShard()
    view, heads = layout.attention, spec.sparse.index_heads
    return IndexShard(view.rank, view.size, heads, view.kv_heads(heads).start)


def _build_kinds(
    spec: MiniMaxM3Spec, layers: list[DecoderLayer], setup: LayerSetup
) -> list[tuple[AttentionKind, int]]:
    """Return each kind of attention in `layers`, with the index of the first layer of this kind."""
    layout, frequencies = setup.context.layout, signed_frequencies(spec.rotary_dim, spec.rope_theta)
    shape = paged_shape(spec, layers, layout.attention)
    common: dict[str, Any] = {
        "frequencies": frequencies.to(setup.weights.device),
        "kernels": setup.kernels,
    }
    sparse, kinds = spec.sparse, list[tuple[AttentionKind, int]]()
    at = [isinstance(layer.attention, BlockSparseAttention) for layer in layers]
    if False in at:
        kinds.append((GroupedQueryKind(shape, **common), at.index(False)))
    if sparse is not None and True in at:
        own = SparseShape(
            **vars(shape),
            sparse_block_size=sparse.block_size,
            topk_blocks=sparse.topk_blocks,
            init_blocks=sparse.init_blocks,
            local_blocks=sparse.local_blocks,
            shard=_shard_index(spec, layout),
        )
        kinds.append((BlockSparseKind(own, **common), at.index(True)))
    return kinds
