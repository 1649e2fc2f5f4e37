"""MiniMax-M2 (also M2.1, M2.5, M2.7): decoder-only, every layer full attention and a mixture of
experts.

h = embed(tokens)
per layer:  h += attention(rms(h));  h += moe(rms(h))
logits = head(rms(h))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from negamax.config.minimax_m2 import MiniMaxM2Spec
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.formats import ActivationFormat
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
from negamax.layers.partial import Partial
from negamax.layers.weights import WeightSlot, check_all_written, slots_by_name
from negamax.models.minimax_m2 import names
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


class MiniMaxM2:
    """One rank's part of the model. Weights are written through `weight_slots`, then
    `finish_loading` is called once.

    Between blocks flow partial sums, which the norms complete. Of a pipeline a rank holds one
    stage: its layers, the embedding on the first, the last norm and the head on the last.
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
        self.spec, self._layout = spec, layout
        self.vocab_range, vocab_shape = (
            layout.vocab(spec.vocab_size),
            (spec.vocab_size, spec.hidden_size),
        )
        shared: dict[str, Any] = {"kernels": kernels, "weights": weights}
        slots: list[WeightSlot] = []
        if layout.is_first_stage:
            self._embed = VocabEmbedding(
                names.EMBEDDING,
                vocab_shape,
                rows=self.vocab_range,
                group=context.attention_group,
                weights=weights,
            )
            slots += self._embed.slots
        self.layers = [
            DecoderLayer(spec, layer, context=context, **shared)
            for layer in layout.layers(spec.num_layers)
        ]
        kv_heads = len(layout.attention.kv_heads(spec.num_kv_heads))
        self._attention_kind = GroupedQueryKind(
            kv_heads=kv_heads,
            group=len(layout.attention.heads(spec.num_heads)) // kv_heads,
            frequencies=signed_frequencies(spec.rotary_dim, spec.rope_theta).to(weights.device),
            quantize=all(layer.attention.gives_quantized for layer in self.layers),
            kernels=kernels,
        )
        slots += [slot for layer in self.layers for slot in layer.slots]
        if layout.is_last_stage:
            self._norm = RmsNorm(
                names.NORM, spec.hidden_size, eps=spec.rms_norm_eps, activation=None, **shared
            )
            self._head = VocabHead(
                names.HEAD,
                vocab_shape,
                rows=self.vocab_range,
                group=context.attention_group,
                **shared,
            )
            slots += [*self._norm.slots, *self._head.slots]
        self._slots = slots_by_name(slots)
        for weight in names.weights(spec):  # of other stages
            for name in weight.names():
                if name not in self._slots:
                    self._slots[name] = WeightSlot(name, weight.shape, target=None)

    def forward(
        self, token_ids: Tensor, metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> Tensor:
        """token_ids [T] int64, the caches of each layer (of fewer, the first layers alone run) ->
        final hidden states [T, hidden].
        """
        x, residual = self.stage(*self.embed(token_ids), metadata, kv)
        return self.last_norm(x, residual)

    def embed(self, token_ids: Tensor) -> tuple[Partial, Tensor]:
        """token_ids [T] int64 -> what enters the first layer, and a residual [T, hidden] of
        zeros.
        """
        x = self._embed(token_ids)
        return x, torch.zeros_like(x.x)

    def stage(
        self, x: Partial, residual: Tensor, metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> tuple[Partial, Tensor]:
        """This rank's layers, as many as `kv` has caches of: from what enters the first of them
        and the residual [T, hidden] to what leaves the last and the residual there.
        """
        metadata = prepare_attention(metadata, [(self._attention_kind, kv[0])])
        for layer, caches in zip(self.layers, kv, strict=False):
            x = layer(x, residual, metadata, caches)
        return x, residual

    def last_norm(self, x: Partial, residual: Tensor) -> Tensor:
        """Final hidden states [T, hidden] from what leaves the last layer."""
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
        if self._layout.is_last_stage:
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
        self._input_norm = norm(input_norm, activation=self.attention.activation)
        self._post_norm = norm(post_norm, activation=self.moe.activation)
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
        self, x: Partial, residual: Tensor, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        """x, the block before's output, is added to `residual` [T, hidden] in place; the experts'
        output.
        """
        x = self.attention(self._input_norm(x, residual), metadata, kv)
        return self.moe(self._post_norm(x, residual), active=metadata.num_actual_tokens)


build = MiniMaxM2
