"""Rotary position embedding, half-split: dimension i of a head is paired with i + rotary_dim / 2.

    angle = position * theta ** (-2 i / rotary_dim), i < half
    out[i]        = x[i] * cos - x[i + half] * sin
    out[i + half] = x[i + half] * cos + x[i] * sin

Dimensions from rotary_dim on are not rotated. Angles are computed in fp32 without a table.
"""

import torch
from torch import Tensor


def signed_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """Return [rotary_dim] fp32: the negated frequencies, then the frequencies."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / theta**exponents
    return torch.cat([-frequencies, frequencies])


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos, sin [T, 1, rotary_dim] fp32 of positions [T] int64.

    The frequencies come from `signed_frequencies`, so the sines of the first half are negative.
    """
    angles = positions.view(-1, 1, 1) * frequencies
    return angles.cos(), angles.sin()


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x [T, heads, head_dim]; cos, sin [T, 1, rotary_dim]."""
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((rotated * cos + rotated.roll(rotary_dim // 2, -1) * sin, rest), dim=-1)
