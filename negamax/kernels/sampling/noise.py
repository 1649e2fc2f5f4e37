"""Random numbers that are a function of (seed, position, token id): whoever holds a token's logit,
in whatever batch and on however many ranks, gives it the same noise.

A row's key is 64 bits of `seed + golden * (position + 1)` put through the SplitMix64 finaliser
(public domain); a token's number is its id, multiplied, offset by one half of the key, and put
through a 32-bit finaliser of three multiplications with the other half between its rounds. The
multipliers are those of MurmurHash3's finaliser and of Knuth's multiplicative hash. Everything is
integer arithmetic modulo 2^32 or 2^64, so the Triton kernel computes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)  # as signed 64-bit numbers
MIX64_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX64_B = 0x94D049BB133111EB - (1 << 64)
MIX32_ID = 0x9E3779B1
MIX32_A = 0x85EBCA6B
MIX32_B = 0xC2B2AE35
LARGEST_UNIFORM = 1 - 2.0**-24
# below, -log(1 - v) is taken from its series, which keeps the bits that 1 - v would drop
SMALL_UNIFORM = 2.0**-7
LARGEST_SCORE = 3e38  # for quotients that overflow


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of each row's key, [R] int64 holding 32 bits. seeds, positions [R] int64."""
    x = seeds + GOLDEN64 * (positions + 1)
    x = (x ^ _shift64(x, 30)) * MIX64_A
    x = (x ^ _shift64(x, 27)) * MIX64_B
    x = x ^ _shift64(x, 31)
    return x & 0xFFFFFFFF, _shift64(x, 32)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each row, [R] fp32: the leading 24 bits of its key. seeds, positions
    [R] int64.
    """
    return (row_keys(seeds, positions)[1] >> 8).float() * 2.0**-24


def token_bits(keys: tuple[Tensor, Tensor], token_ids: Tensor) -> Tensor:
    """32 random bits of each token, as int64. Keys and ids of shapes that broadcast."""
    x = (token_ids * MIX32_ID + keys[0]) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * MIX32_A) & 0xFFFFFFFF
    x = ((x ^ (x >> 13) ^ keys[1]) * MIX32_B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def exponentials(bits: Tensor) -> Tensor:
    """Exponentially distributed numbers above 0, fp32: -log(1 - v) of v = (bits + 1/2) / 2^32 up to
    1 - 2^-24.

    The smallest is 2^-33, so a token is never drawn whose probability is below about that.
    """
    v = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_max(LARGEST_UNIFORM)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return torch.where(v < SMALL_UNIFORM, series, -torch.log(1 - v))


def _shift64(x: Tensor, bits: int) -> Tensor:
    """x >> bits of 64-bit numbers without sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
