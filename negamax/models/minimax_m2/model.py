"""MiniMax-M2 (also M2.1, M2.5, M2.7): every layer has full attention and a mixture of experts."""

from dataclasses import replace

from negamax.kernels.rotary import signed_frequencies
from negamax.layers.attention import Attention, GroupedQueryKind
from negamax.layers.cache_shards import cache_kernels
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import LayerSetup
from negamax.models import minimax_names as names
from negamax.models.decoder import Decoder, DecoderLayer, attention_sizes, moe_sizes, paged_shape
from negamax.models.minimax_m2.config import MiniMaxM2Spec


def build(spec: MiniMaxM2Spec, setup: LayerSetup) -> Decoder:
    """Build this rank's part of the model, without weights."""
    setup = replace(setup, kernels=cache_kernels(setup.kernels, setup.context))
    layout = setup.context.layout
    layers = [_build_layer(spec, layer, setup) for layer in layout.layers(spec.num_layers)]
    shape = paged_shape(spec, layers, layout.attention)
    frequencies = signed_frequencies(spec.rotary_dim, spec.rope_theta).to(setup.weights.device)
    kind = GroupedQueryKind(shape, frequencies=frequencies, kernels=setup.kernels)
    eps = spec.rms_norm_eps
    return Decoder(spec, layers, [(kind, 0)], names=names.DECODER, eps=eps, setup=setup)


def _build_layer(spec: MiniMaxM2Spec, layer: int, setup: LayerSetup) -> DecoderLayer:
    attention = Attention(names.attention(layer), attention_sizes(spec), setup=setup)
    moe = SparseMoe(names.moe(layer), layer=layer, **moe_sizes(spec), setup=setup)
    norms, eps = names.norms(layer), spec.rms_norm_eps
    return DecoderLayer(attention, moe, spec.hidden_size, norms=norms, eps=eps, setup=setup)
