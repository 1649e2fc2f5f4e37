"""From a spec to a model on this rank. One line per architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from negamax.base.errors import ConfigError
from negamax.config.model_spec import MINIMAX_M2, ModelSpec
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import AttentionInputs, KvView
from negamax.layers.weights import WeightSlot
from negamax.models.minimax_m2 import MiniMaxM2
from negamax.parallel.context import ParallelContext


class CausalModel(Protocol):
    """What the worker and the checkpoint loader see of a model."""

    def forward(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KvView]) -> Tensor:
        """token_ids [T] int64, one KvView per layer -> final hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32, the full vocabulary on every rank."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each tensor of the checkpoint goes, by its name there."""

    def finish_loading(self) -> None:
        """Called once, after every needed slot is written."""

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, tuple[int, int, int, int]]:
        """(layers, shape of a layer's key cache), the same for the values."""


_MODELS: dict[str, Callable[..., CausalModel]] = {MINIMAX_M2: MiniMaxM2}


def build_model(
    spec: ModelSpec, *, context: ParallelContext, dtype: torch.dtype, device: torch.device, kernels: KernelTable
) -> CausalModel:
    """This rank's part of the model, weights not yet written.

    Errors: `ConfigError` for an unknown architecture, or sizes that cannot be split as `context.layout` says.
    """
    if spec.architecture not in _MODELS:
        raise ConfigError(f"architecture {spec.architecture!r} is not supported; supported: {', '.join(sorted(_MODELS))}")
    layout = context.layout
    for name, size in (("data", layout.dp), ("pipeline", layout.pp), ("context", layout.cp)):
        if size > 1:
            raise ConfigError(
                f"{name}-parallel size is {size}; {spec.architecture} runs with 1", hint="use tensor or expert parallelism"
            )
    return _MODELS[spec.architecture](spec, context=context, dtype=dtype, device=device, kernels=kernels)
