"""From a spec to a model on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from negamax.config.families import family_of
from negamax.config.model_spec import ModelSpec
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import KvCaches
from negamax.layers.weights import WeightSlot
from negamax.parallel.context import ParallelContext
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat


class CausalModel(Protocol):
    """What the worker and the checkpoint loader see of a model."""

    spec: ModelSpec
    layers: Sequence[object]
    vocab_range: range  # token ids whose logits this rank computes

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
        *,
        capture: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """token_ids [T] int64, the caches of each layer (of fewer, the first layers alone run) ->
        final hidden states [T, hidden], and for each layer of `capture` the residual stream
        [T, hidden] that enters it, summed over the ranks; the number of layers names the stream
        that leaves the last one.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32, the full vocabulary on every rank."""

    def local_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> [R, len(vocab_range)] fp32, the logits of the ids of `vocab_range`,
        in `out` where given.
        """

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each tensor of the checkpoint goes, by its name there."""

    def finish_loading(self) -> None:
        """Called once, after every needed slot is written."""


def build_model(
    spec: ModelSpec,
    *,
    context: ParallelContext,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelTable,
    keep_quantized: bool = True,
) -> CausalModel:
    """This rank's part of the model, weights not yet written.

    `keep_quantized`: hold matrices as the checkpoint stores them where a kernel reads that; else
    all are dequantised at load. Errors: `ConfigError` for an unknown architecture, or sizes that
    cannot be split as `context.layout` says.
    """
    family = family_of(spec.architecture)
    weights = WeightFormat(dtype, device, detect(spec.quantization), keep_quantized)
    code = import_module(f"{family.package}.model")
    model: CausalModel = code.build(spec, context=context, weights=weights, kernels=kernels)
    return model
