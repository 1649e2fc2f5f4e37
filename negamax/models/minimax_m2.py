"""MiniMax-M2 (also M2.1, M2.5, M2.7): decoder-only, every layer full attention and a mixture of experts.

h = embed(tokens)
per layer:  h += attention(rms(h));  h += moe(rms(h))
logits = head(rms(h))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from negamax.config.model_spec import ModelSpec
from negamax.kernels.attention.spec import PagedShape
from negamax.kernels.registry import KernelTable
from negamax.kernels.rope.spec import signed_frequencies
from negamax.layers.attention import AttentionInputs, AttentionStep, KvView, QkNormAttention, begin_step, kv_cache_shape
from negamax.layers.basic import RmsNorm, VocabEmbedding, VocabHead
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import WeightSlot, check_all_written, slots_by_name
from negamax.parallel.context import ParallelContext


class MiniMaxM2:
    """One rank's part of the model. Weights are written through `weight_slots`, then `finish_loading` is called once."""

    def __init__(
        self, spec: ModelSpec, *, context: ParallelContext, dtype: torch.dtype, device: torch.device, kernels: KernelTable
    ) -> None:
        layout = context.layout
        self._spec, self._kernels = spec, kernels
        self._kv_heads = layout.attention.kv_heads(spec.num_kv_heads)
        self._group = len(layout.attention.heads(spec.num_heads)) // len(self._kv_heads)
        self._frequencies = signed_frequencies(spec.rotary_dim, spec.rope_theta).to(device)
        vocab, vocab_shape = layout.vocab(spec.vocab_size), (spec.vocab_size, spec.hidden_size)
        self._embed = VocabEmbedding(
            "model.embed_tokens.weight", vocab_shape, rows=vocab, group=context.attention_group, dtype=dtype, device=device
        )
        self._layers = [
            DecoderLayer(spec, layer, context=context, dtype=dtype, device=device, kernels=kernels)
            for layer in range(spec.num_layers)
        ]
        self._norm = RmsNorm(
            "model.norm.weight", spec.hidden_size, eps=spec.rms_norm_eps, kernels=kernels, dtype=dtype, device=device
        )
        self._head = VocabHead(
            "lm_head.weight",
            vocab_shape,
            rows=vocab,
            group=context.attention_group,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        per_layer = [slot for layer in self._layers for slot in layer.slots]
        self._slots = slots_by_name([*self._embed.slots, *per_layer, *self._norm.slots, *self._head.slots])

    def forward(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KvView]) -> Tensor:
        """token_ids [T] int64, one KvView per layer -> final hidden states [T, hidden]."""
        shape = PagedShape(kv_heads=len(self._kv_heads), group=self._group, block_size=kv[0].k.shape[2])
        step = begin_step(inputs, frequencies=self._frequencies, shape=shape, kernels=self._kernels)
        residual = self._embed(token_ids)
        x = torch.zeros_like(residual)
        for layer, cache in zip(self._layers, kv, strict=True):
            x = layer(x, residual, step, cache)
        return self._norm(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32, the full vocabulary on every rank."""
        return self._head(hidden)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each tensor of the checkpoint goes, by its name there."""
        return self._slots

    def finish_loading(self) -> None:
        """Put all weights into their kernels' layout. Errors: `CheckpointError` where a needed slot was not written."""
        check_all_written(self._slots)
        for layer in self._layers:
            layer.finish_loading()
        self._head.finish_loading()

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, tuple[int, int, int, int]]:
        """(layers, shape of a layer's key cache), the same for the values."""
        shape = kv_cache_shape(num_blocks, block_size, kv_heads=self._kv_heads, head_dim=self._spec.head_dim)
        return self._spec.num_layers, shape


class DecoderLayer:
    """Attention and experts, each behind a norm; both add to the residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        prefix = f"model.layers.{layer}"
        self._attention = QkNormAttention(
            f"{prefix}.self_attn",
            hidden_size=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
            context=context,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        self._moe = SparseMoe(
            f"{prefix}.block_sparse_moe",
            hidden_size=spec.hidden_size,
            width=spec.intermediate_size,
            num_experts=spec.num_experts,
            top_k=spec.experts_per_token,
            context=context,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        self._input_norm, self._post_norm = (
            RmsNorm(
                f"{prefix}.{name}.weight", spec.hidden_size, eps=spec.rms_norm_eps, kernels=kernels, dtype=dtype, device=device
            )
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.slots = [*self._input_norm.slots, *self._attention.slots, *self._post_norm.slots, *self._moe.slots]

    def finish_loading(self) -> None:
        """Put the weights into their kernels' layout."""
        self._attention.finish_loading()
        self._moe.finish_loading()

    def __call__(self, x: Tensor, residual: Tensor, step: AttentionStep, kv: KvView) -> Tensor:
        """x [T, hidden], the previous block's output, is added to `residual` in place; returns the experts' output."""
        x = self._attention(self._input_norm(x, residual), step, kv)
        return self._moe(self._post_norm(x, residual))
