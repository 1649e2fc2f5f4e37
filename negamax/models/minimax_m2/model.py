"""MiniMax-M2 (also M2.1, M2.5, M2.7): every layer full attention and a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from negamax.formats.tensor_format import ActivationFormat
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.registry import KernelTable
from negamax.kernels.rope.spec import signed_frequencies
from negamax.layers.attention import Attention, GroupedQueryKind, KvCaches
from negamax.layers.basic import RmsNorm
from negamax.layers.cache_shards import cache_kernels, cache_shard
from negamax.layers.moe import SparseMoe
from negamax.layers.partial import Partial
from negamax.models.decoder import Decoder
from negamax.models.minimax_m2 import names
from negamax.models.minimax_m2.config import MiniMaxM2Spec
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


class DecoderLayer:
    """Attention and experts, each behind a norm; both add to the residual stream."""

    def __init__(
        self,
        spec: MiniMaxM2Spec,
        layer: int,
        *,
        context: ParallelContext,
        weights: WeightFormat,
        kernels: KernelTable,
    ) -> None:
        self.attention = Attention(
            names.attention(layer),
            hidden_size=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
            context=context,
            kernels=kernels,
            weights=weights,
        )
        self.moe = SparseMoe(
            names.moe(layer),
            layer=layer,
            hidden_size=spec.hidden_size,
            width=spec.intermediate_size,
            num_experts=spec.num_experts,
            top_k=spec.experts_per_token,
            context=context,
            kernels=kernels,
            weights=weights,
        )

        def norm(name: str, *, activation: ActivationFormat | None) -> RmsNorm:
            return RmsNorm(
                name,
                spec.hidden_size,
                eps=spec.rms_norm_eps,
                activation=activation,
                kernels=kernels,
                weights=weights,
            )

        input_norm, post_norm = names.norms(layer)
        self.input_norm = norm(input_norm, activation=self.attention.activation)
        self._post_norm = norm(post_norm, activation=self.moe.activation)
        self.slots = [
            *self.input_norm.slots,
            *self.attention.slots,
            *self._post_norm.slots,
            *self.moe.slots,
        ]

    def finish_loading(self) -> None:
        """Put the weights into their kernels' layout."""
        self.attention.finish_loading()
        self.moe.finish_loading()

    def __call__(
        self,
        hidden: Tensor | QuantizedActivations,
        residual: Tensor,
        metadata: AttentionMetadata,
        kv: KvCaches,
    ) -> Partial:
        """hidden [T, hidden] from `input_norm`. The attention's output is added to `residual`
        [T, hidden] in place; the experts' output.
        """
        x = self.attention(hidden, metadata, kv)
        return self.moe.behind(self._post_norm, x, residual, metadata.step_tokens)


def build(
    spec: MiniMaxM2Spec, *, context: ParallelContext, weights: WeightFormat, kernels: KernelTable
) -> Decoder:
    """This rank's part of the model, weights not yet written."""
    kernels = cache_kernels(kernels, context)
    shared: dict[str, Any] = {"context": context, "weights": weights, "kernels": kernels}
    layout, view = context.layout, context.layout.attention
    kv_heads = len(view.kv_heads(spec.num_kv_heads))
    layers = [DecoderLayer(spec, layer, **shared) for layer in layout.layers(spec.num_layers)]
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
