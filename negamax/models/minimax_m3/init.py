"""Synthetic weights of MiniMax-M3. Only the weights of norms and MLPs differ from MiniMax-M2.

The term `up + 1` gives SwiGLU-OAI a nonzero mean, so an MLP adds nearly the same vector to all
tokens. A large common vector would make all tokens select the same experts.
"""

import math

from negamax.models.family import Initializer
from negamax.models.minimax_m2 import init as minimax_m2
from negamax.models.minimax_m3.config import MiniMaxM3Spec

NORM = Initializer(std=0.05)  # Norms multiply by 1 + weight.
# Factor for outputs of the shared expert and dense MLPs. Routed outputs have factor 1.
SHARED_GAIN = 0.5


def draw(name: str, spec: MiniMaxM3Spec) -> Initializer:
    """Choose the distribution of a slot."""
    depth = math.sqrt(2 * spec.num_layers)
    if name.endswith("norm.weight"):
        return NORM
    if name.endswith("w2.weight"):
        return Initializer(1 / spec.routed_scaling_factor / math.sqrt(spec.expert_width) / depth)
    if name.endswith("down_proj.weight"):
        width = spec.shared_width if ".shared_experts." in name else spec.dense_width
        return Initializer(SHARED_GAIN / math.sqrt(width) / depth)
    return minimax_m2.draw(name, spec)
