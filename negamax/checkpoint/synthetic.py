"""Synthetic weights: a model of any size without a checkpoint, with activations of realistic magnitude.

Each tensor depends on the seed and its own name only and is made in full before a rank takes its part, so that every
tensor-parallel degree gets the same model.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from negamax.checkpoint.loader import HasWeightSlots
from negamax.config.model_spec import ModelSpec

# MiniMax's own selection biases are 4.7 to 9.5; a narrow spread keeps the load of the experts even.
ROUTER_BIAS_MEAN = 7.0
ROUTER_BIAS_STD = 0.02
NORM_STD = 0.05


def fill_synthetic(model: HasWeightSlots, spec: ModelSpec, seed: int) -> None:
    """Write every slot of `model` that this rank needs. The caller packs the model afterwards."""
    for name, slot in model.weight_slots().items():
        if slot.needed:
            slot.write(synthetic_tensor(name, slot.shape, num_layers=spec.num_layers, seed=seed))


def synthetic_tensor(name: str, shape: tuple[int, ...], *, num_layers: int, seed: int) -> Tensor:  # shape, fp32
    """The weights of checkpoint tensor `name`.

    Matrices have standard deviation 1 / sqrt(columns), so that they keep the magnitude of their input; those that add to the
    residual stream are smaller by sqrt(2 * num_layers), so that it does not grow with depth. Embedding rows have unit variance,
    norm weights are near 1.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return noise.mul_(ROUTER_BIAS_STD).add_(ROUTER_BIAS_MEAN)
    if len(shape) == 1:
        return noise.mul_(NORM_STD).add_(1.0)
    if name.endswith("embed_tokens.weight"):
        return noise
    noise.mul_(1 / math.sqrt(shape[-1]))
    return noise.mul_(1 / math.sqrt(2 * num_layers)) if name.endswith(("o_proj.weight", "w2.weight")) else noise
