"""MiniMax-M2 (also M2.1, M2.5, M2.7): every layer has full attention and a mixture of experts."""

from typing import Any

from negamax.kernels.registry import KernelTable
from negamax.kernels.rotary import signed_frequencies
from negamax.layers.attention import Attention, GroupedQueryKind
from negamax.layers.cache_shards import cache_kernels, cache_shard
from negamax.layers.moe import SparseMoe
from negamax.models import minimax_names as names
from negamax.models.decoder import Decoder, DecoderLayer, attention_sizes, moe_sizes
from negamax.models.minimax_m2.config import MiniMaxM2Spec
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


def build(
    spec: MiniMaxM2Spec, *, context: ParallelContext, weights: WeightFormat, kernels: KernelTable
) -> Decoder:
    """Build this rank's part of the model, without weights."""
    kernels = cache_kernels(kernels, context)
    shared: dict[str, Any] = {"context": context, "weights": weights, "kernels": kernels}
    layout, view = context.layout, context.layout.attention
    kv_heads = len(view.kv_heads(spec.num_kv_heads))
    layers = [_build_layer(spec, layer, **shared) for layer in layout.layers(spec.num_layers)]
    kind = GroupedQueryKind(
        kv_heads=kv_heads,
        group=len(view.cache_heads(spec.num_heads)) // kv_heads,
        frequencies=signed_frequencies(spec.rotary_dim, spec.rope_theta).to(weights.device),
        quantize=all(layer.attention.gives_quantized for layer in layers),
        kernels=kernels,
        cache=cache_shard(view),
    )
    eps = spec.rms_norm_eps
    return Decoder(spec, layers, [(kind, 0)], names=names.DECODER, eps=eps, **shared)


def _build_layer(
    spec: MiniMaxM2Spec, layer: int, *, context: ParallelContext, **shared: Any
) -> DecoderLayer:
    split = {"context": context, **shared}
    attention = Attention(names.attention(layer), **attention_sizes(spec), **split)
    moe = SparseMoe(names.moe(layer), layer=layer, **moe_sizes(spec), **split)
    norms, eps = names.norms(layer), spec.rms_norm_eps
    return DecoderLayer(attention, moe, spec.hidden_size, norms=norms, eps=eps, **shared)
