"""From a spec to a model on this rank. One line per architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from negamax.base.errors import ConfigError
from negamax.config.model_spec import MINIMAX_M2, ModelSpec
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import AttentionInputs, KvCaches
from negamax.layers.weights import WeightSlot
from negamax.models.minimax_m2 import MiniMaxM2
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import choose_format


class CausalModel(Protocol):
    """What the worker and the checkpoint loader see of a model."""

    spec: ModelSpec
    vocab_range: range  # token ids whose logits this rank computes

    def forward(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KvCaches]) -> Tensor:
        """token_ids [T] int64, the caches of each layer (of fewer, the first layers alone run) ->
        final hidden states [T, hidden].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32, the full vocabulary on every rank."""

    def local_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> [R, len(vocab_range)] fp32, the logits of the ids of `vocab_range`,
        in `out` where given.
        """

    def observe_routing(self, ids: Tensor | None) -> None:
        """Have every forward write the experts of its first tokens into `ids` [layers, max_tokens,
        top_k] int32 (None: stop).

        To be called before graphs are captured: a graph keeps the tensor it was captured with.
        """

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each tensor of the checkpoint goes, by its name there."""

    def finish_loading(self) -> None:
        """Called once, after every needed slot is written."""


_MODELS: dict[str, Callable[..., CausalModel]] = {MINIMAX_M2: MiniMaxM2}


def build_model(
    spec: ModelSpec,
    *,
    context: ParallelContext,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelTable,
    keep_quantized: bool | None = None,
) -> CausalModel:
    """This rank's part of the model, weights not yet written.

    `keep_quantized`: hold quantised matrices as the checkpoint stores them (None: where the device
    multiplies with them). Errors: `ConfigError` for an unknown architecture, or sizes that cannot
    be split as `context.layout` says.
    """
    if spec.architecture not in _MODELS:
        raise ConfigError(
            f"architecture {spec.architecture!r} is not supported; supported: "
            f"{', '.join(sorted(_MODELS))}"
        )
    layout = context.layout
    for name, size in (("data", layout.dp), ("pipeline", layout.pp), ("context", layout.cp)):
        if size > 1:
            raise ConfigError(
                f"{name}-parallel size is {size}; {spec.architecture} runs with 1",
                hint="use tensor or expert parallelism",
            )
    weights = choose_format(
        spec.quantization, dtype=dtype, device=device, keep_quantized=keep_quantized
    )
    return _MODELS[spec.architecture](spec, context=context, weights=weights, kernels=kernels)
