"""Rotary position embedding, half-split: dimension i of a head is paired with i + rotary_dim / 2.

    out[i]        = x[i] * cos - x[i + half] * sin        angle = position * theta ** (-2 i /
    rotary_dim), i < half out[i + half] = x[i + half] * cos + x[i] * sin

Dimensions from rotary_dim up pass through. Angles are computed in fp32 from the position, so there
is no table to size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.rowwise import apply, padded_rows


def signed_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """[rotary_dim] fp32: minus the frequencies for the first half of the dimensions, plus the
    frequencies for the second.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / theta**exponents
    return torch.cat([-frequencies, frequencies])


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T] int64, frequencies from `signed_frequencies` -> cos, sin [T, 1, rotary_dim]
    fp32.

    The sign of the first half rides on the frequency: cos(-a) = cos(a) and sin(-a) = -sin(a).
    """
    num_tokens, rotary_dim = positions.shape[0], frequencies.shape[0]
    rows = padded_rows(num_tokens, width=rotary_dim)
    if rows > num_tokens:
        positions = F.pad(positions, (0, rows - num_tokens))
    angles = positions.view(-1, 1, 1) * frequencies
    cos, sin = apply(torch.cos, angles), apply(torch.sin, angles)
    return (cos, sin) if rows == num_tokens else (cos[:num_tokens], sin[:num_tokens])


def half_split_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim dimensions of x [T, heads, head_dim] in place; cos, sin [T, 1,
    rotary_dim] fp32.
    """
    rotary_dim = cos.shape[-1]
    rotated = x[..., :rotary_dim]
    swapped = rotated.roll(rotary_dim // 2, -1)
    torch.addcmul(rotated * cos, swapped, sin, out=rotated)
    return x
