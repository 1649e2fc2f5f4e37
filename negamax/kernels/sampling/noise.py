"""Random numbers that depend only on (seed, position, token id), not on the batch or the rank.

The SplitMix64 finalizer (public domain) turns `seed + golden * (position + 1)` into a row's 64-bit
key. A token's bits begin as the token's id times a constant, plus one half of the row's key. A
32-bit finalizer mixes these bits, and XORs them with the other half of the key between two rounds.
The multipliers come from MurmurHash3's finalizer and from Knuth's multiplicative hash. Arithmetic
is modulo 2^32 or 2^64, so the Triton kernel computes the same bits.
"""

import torch
from torch import Tensor

GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)  # 64-bit constants are stored as signed numbers
MIX64_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX64_B = 0x94D049BB133111EB - (1 << 64)
MIX32_ID = 0x9E3779B1
MIX32_A = 0x85EBCA6B
MIX32_B = 0xC2B2AE35
LARGEST_UNIFORM = 1 - 2.0**-24
# For v below this number, a series gives -log(1 - v), because 1 - v would lose bits.
SMALL_UNIFORM = 2.0**-7
LARGEST_SCORE = 3e38  # logit / temperature may overflow, so it is clamped to this maximum


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 32-bit halves of each row's key, [R] int64, from seeds and positions [R] int64."""
    x = seeds + GOLDEN64 * (positions + 1)
    x = (x ^ _shift64(x, 30)) * MIX64_A
    x = (x ^ _shift64(x, 27)) * MIX64_B
    x = x ^ _shift64(x, 31)
    return x & 0xFFFFFFFF, _shift64(x, 32)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) per row, [R] fp32: the leading 24 bits of the row's key."""
    return (row_keys(seeds, positions)[1] >> 8).float() * 2.0**-24


def token_bits(keys: tuple[Tensor, Tensor], token_ids: Tensor) -> Tensor:
    """Return 32 random bits per token, as int64; `keys` and `token_ids` are broadcast."""
    x = (token_ids * MIX32_ID + keys[0]) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * MIX32_A) & 0xFFFFFFFF
    x = ((x ^ (x >> 13) ^ keys[1]) * MIX32_B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def exponentials(bits: Tensor) -> Tensor:
    """Return exponential random numbers, fp32: -log(1 - v), v = (bits + 1/2) / 2^32 <= 1 - 2^-24.

    The smallest number is 2^-33, so tokens with a probability below about 2^-33 are never drawn.
    """
    v = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_max(LARGEST_UNIFORM)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return torch.where(v < SMALL_UNIFORM, series, -torch.log(1 - v))


def _shift64(x: Tensor, bits: int) -> Tensor:
    """Shift 64-bit numbers right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
