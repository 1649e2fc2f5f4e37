"""Synthetic weights of MiniMax-M3: activations of realistic magnitude and even routing (what keeps
it even: `models/minimax_m2/init.py`).

SwiGLU-OAI has a mean, by `up + 1`, so that an MLP adds one vector to all tokens that pass it: what
all of them share would make them choose the same experts.
"""

from __future__ import annotations

import math

from negamax.models.family import Initializer
from negamax.models.minimax_m2.init import ATTENTION_GAIN
from negamax.models.minimax_m3.config import MiniMaxM3Spec

ROUTER_BIAS = Initializer(std=0.0005, mean=7.0)
NORM = Initializer(std=0.05)  # a norm multiplies by 1 + w
# Of the outputs of the shared expert and of dense MLPs; routed experts' are doubled afterwards.
SHARED_GAIN = 0.5


def draw(name: str, spec: MiniMaxM3Spec) -> Initializer:
    """1 / sqrt(columns) keeps the magnitude of a matrix's input; matrices that add to the residual
    stream are smaller by sqrt(2 * num_layers), so that it does not grow with depth. Embedding rows
    have unit variance.
    """
    if name.endswith("norm.weight"):
        return NORM
    if name.endswith("e_score_correction_bias"):
        return ROUTER_BIAS
    if name.endswith("embed_tokens.weight"):
        return Initializer(std=1.0)
    depth = math.sqrt(2 * spec.num_layers)
    if name.endswith("o_proj.weight"):
        return Initializer(ATTENTION_GAIN / math.sqrt(spec.num_heads * spec.head_dim) / depth)
    if name.endswith("w2.weight"):
        return Initializer(1 / spec.routed_scaling_factor / math.sqrt(spec.expert_width) / depth)
    if name.endswith("down_proj.weight"):
        width = spec.shared_width if ".shared_experts." in name else spec.dense_width
        return Initializer(SHARED_GAIN / math.sqrt(width) / depth)
    return Initializer(1 / math.sqrt(spec.hidden_size), unit_rows=name.endswith(".gate.weight"))
