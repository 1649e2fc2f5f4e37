"""MiniMax-M2 (also M2.1, M2.5, M2.7): decoder-only, every layer full attention and a mixture of
experts.

h = embed(tokens)
per layer:  h += attention(rms(h));  h += moe(rms(h))
logits = head(rms(h))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from negamax.config.minimax_m2 import MiniMaxM2Spec
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.formats import ActivationFormat
from negamax.kernels.peers import Collective
from negamax.kernels.registry import KernelTable
from negamax.kernels.rope.spec import signed_frequencies
from negamax.layers.attention import (
    Attention,
    GroupedQueryKind,
    KvCaches,
    prepare_attention,
)
from negamax.layers.basic import RmsNorm, VocabEmbedding, VocabHead
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import WeightSlot, check_all_written, slots_by_name
from negamax.models.minimax_m2 import names
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


class MiniMaxM2:
    """One rank's part of the model. Weights are written through `weight_slots`, then
    `finish_loading` is called once.

    Between blocks flow partial results of this rank; the norms sum them over the ranks.
    """

    def __init__(
        self,
        spec: MiniMaxM2Spec,
        *,
        context: ParallelContext,
        weights: WeightFormat,
        kernels: KernelTable,
    ) -> None:
        layout = context.layout
        self.spec = spec
        self.vocab_range, vocab_shape = (
            layout.vocab(spec.vocab_size),
            (spec.vocab_size, spec.hidden_size),
        )
        self._embed = VocabEmbedding(
            names.EMBEDDING, vocab_shape, rows=self.vocab_range, weights=weights
        )
        self.layers = [
            DecoderLayer(spec, layer, context=context, weights=weights, kernels=kernels)
            for layer in range(spec.num_layers)
        ]
        kv_heads = len(layout.attention.kv_heads(spec.num_kv_heads))
        self._attention_kind = GroupedQueryKind(
            kv_heads=kv_heads,
            group=len(layout.attention.heads(spec.num_heads)) // kv_heads,
            frequencies=signed_frequencies(spec.rotary_dim, spec.rope_theta).to(weights.device),
            quantize=all(layer.attention.gives_quantized for layer in self.layers),
            kernels=kernels,
        )
        self._norm = RmsNorm(
            names.NORM,
            spec.hidden_size,
            eps=spec.rms_norm_eps,
            group=context.expert_group,
            activation=None,
            kernels=kernels,
            weights=weights,
        )
        self._head = VocabHead(
            names.HEAD,
            vocab_shape,
            rows=self.vocab_range,
            group=context.attention_group,
            kernels=kernels,
            weights=weights,
        )
        per_layer = [slot for layer in self.layers for slot in layer.slots]
        self._slots = slots_by_name(
            [*self._embed.slots, *per_layer, *self._norm.slots, *self._head.slots]
        )

    def forward(
        self, token_ids: Tensor, metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> Tensor:
        """token_ids [T] int64, the caches of each layer (of fewer, the first layers alone run) ->
        final hidden states [T, hidden].
        """
        metadata = prepare_attention(metadata, [(self._attention_kind, kv[0])])
        x = self._embed(token_ids)
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, kv, strict=False):
            x = layer(x, residual, metadata, cache)
        hidden = self._norm(x, residual)
        assert isinstance(hidden, Tensor)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32, the full vocabulary on every rank."""
        return self._head(hidden)

    def local_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> [R, len(vocab_range)] fp32, the logits of the ids of `vocab_range`,
        in `out` where given.
        """
        return self._head.local(hidden, out=out)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each tensor of the checkpoint goes, by its name there."""
        return self._slots

    def finish_loading(self) -> None:
        """Put all weights into their kernels' layout. Errors: `CheckpointError` where a needed slot
        was not written.
        """
        check_all_written(self._slots)
        for layer in self.layers:
            layer.finish_loading()
        self._head.finish_loading()


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
            hidden_size=spec.hidden_size,
            width=spec.intermediate_size,
            num_experts=spec.num_experts,
            top_k=spec.experts_per_token,
            context=context,
            kernels=kernels,
            weights=weights,
        )

        def norm(name: str, *, group: Collective, activation: ActivationFormat | None) -> RmsNorm:
            return RmsNorm(
                name,
                spec.hidden_size,
                eps=spec.rms_norm_eps,
                group=group,
                activation=activation,
                kernels=kernels,
                weights=weights,
            )

        input_norm, post_norm = names.norms(layer)
        # Before the first layer comes the embedding, which is split as attention is; before the
        # others, experts.
        before = context.expert_group if layer else context.attention_group
        self._input_norm = norm(input_norm, group=before, activation=self.attention.activation)
        self._post_norm = norm(
            post_norm, group=context.attention_group, activation=self.moe.activation
        )
        self.slots = [
            *self._input_norm.slots,
            *self.attention.slots,
            *self._post_norm.slots,
            *self.moe.slots,
        ]

    def finish_loading(self) -> None:
        """Put the weights into their kernels' layout."""
        self.attention.finish_loading()
        self.moe.finish_loading()

    def __call__(
        self, x: Tensor, residual: Tensor, metadata: AttentionMetadata, kv: KvCaches
    ) -> Tensor:
        """x [T, hidden] or [T, P, hidden], the block before's output, is added to `residual` in
        place; the experts' output.
        """
        x = self.attention(self._input_norm(x, residual), metadata, kv)
        return self.moe(self._post_norm(x, residual), active=metadata.num_actual_tokens)


build = MiniMaxM2
