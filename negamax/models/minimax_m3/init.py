"""Synthetic weights of MiniMax-M3. All except norms, MLPs and vision are drawn as in MiniMax-M2.

The term `up + 1` gives SwiGLU-OAI a nonzero mean, so an MLP adds nearly the same vector to all
tokens. A large common vector would make all tokens select the same experts.
"""

import math

from negamax.models.family import Initializer
from negamax.models.minimax_m2 import init as minimax_m2
from negamax.models.minimax_m3 import names
from negamax.models.minimax_m3.config import MiniMaxM3Spec

NORM = Initializer(std=0.05)  # Norms multiply by 1 + weight.
SHARED_GAIN = 0.5  # factor for outputs of the shared expert and dense MLPs; 1 for routed experts


def draw(name: str, spec: MiniMaxM3Spec) -> Initializer:
    if spec.vision is not None and (shape := names.vision_shapes(spec.vision).get(name)):
        return _draw_vision(name, shape, num_layers=spec.vision.num_layers)
    depth = math.sqrt(2 * spec.num_layers)
    if name.endswith("norm.weight"):
        return NORM
    if name.endswith("w2.weight"):
        return Initializer(1 / spec.routed_scaling_factor / math.sqrt(spec.expert_width) / depth)
    if name.endswith("down_proj.weight"):
        width = spec.shared_width if ".shared_experts." in name else spec.dense_width
        return Initializer(SHARED_GAIN / math.sqrt(width) / depth)
    return minimax_m2.draw(name, spec)


def _draw_vision(name: str, shape: tuple[int, ...], *, num_layers: int) -> Initializer:
    if len(shape) == 1:
        is_norm = name.endswith(".weight")
        return minimax_m2.NORM if is_norm else Initializer(std=0.02)
    depth = math.sqrt(2 * num_layers) if ".out_proj." in name or ".fc2." in name else 1.0
    # gelu multiplies the norm of a vector with unit variance by 0.65
    gain = 1 / 0.65 if "linear_2." in name else 1.0
    return Initializer(gain / math.sqrt(math.prod(shape[1:])) / depth)
