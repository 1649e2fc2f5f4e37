"""Synthetic weights for EAGLE3 drafts, which keep activations at a realistic magnitude."""

import math

from negamax.models.eagle3.config import Eagle3Spec
from negamax.models.family import Initializer


def draw(name: str, spec: Eagle3Spec) -> Initializer:
    """Return a slot's distribution; a std of 1 / sqrt(columns) preserves the activations' scale."""
    if "norm" in name:
        return Initializer(std=0.05, mean=1.0)
    columns = {
        "fc": spec.num_aux * spec.target_hidden_size,
        "o_proj": spec.num_heads * spec.head_dim,
        "down_proj": spec.intermediate_size,
    }
    if name == "embed_tokens.weight":
        return Initializer(std=1.0)
    if name.endswith(".bias"):
        return Initializer(std=0.1)
    module = name.removesuffix(".weight").rpartition(".")[2]
    return Initializer(1 / math.sqrt(columns.get(module, spec.hidden_size)))
