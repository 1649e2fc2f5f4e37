"""E4M3 in the form in which a GPU multiplies it: e4m3fn, as checkpoints store it, or on MI300
e4m3fnuz, in which the same bits stand for half as much and those of -0 for NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.formats.platform import Feature
from negamax.kernels import platform
from negamax.kernels.activations import GROUP


def native_e4m3(device: torch.device) -> torch.dtype:
    """The form of `device`."""
    features = platform.platform_of(device).features
    is_fnuz = Feature.FP8 in features and Feature.E4M3FN not in features
    return torch.float8_e4m3fnuz if is_fnuz else torch.float8_e4m3fn


def empty_e4m3(like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the FP8 form of `like` [T, width]: the values, and the scales [T, width / 128]."""
    num_tokens, width = like.shape
    scale = torch.empty((num_tokens, width // GROUP), dtype=torch.float32, device=like.device)
    return torch.empty_like(like, dtype=native_e4m3(like.device)), scale


def to_native(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """values e4m3fn and their multipliers -> the same numbers in the form of their device."""
    if native_e4m3(values.device) is torch.float8_e4m3fn:
        return values, scale
    bits = values.view(torch.uint8)
    is_nan = bits.bitwise_and(0x7F) == 0x7F
    bits = bits.masked_fill(bits == 0x80, 0).masked_fill_(is_nan, 0x80)
    return bits.view(torch.float8_e4m3fnuz), scale * 2.0
