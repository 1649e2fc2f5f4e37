"""The layout of the paged KV cache, and functions that write keys and values.

A layer's cache consists of two tensors [num_blocks, kv_heads, block_size, head_dim]. Token slot s
is in block s // block_size at offset s % block_size. The tokens of one head are adjacent within a
block, so gathered blocks of a sequence form one contiguous matrix [tokens, head_dim] for each head.
A cache starts as zeros and has only finite values, because kernels also read values past the end of
a sequence and multiply them by a probability of 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from negamax.formats.floats import E4M3_MAX
from negamax.kernels.op import FLOAT_DTYPES, Tolerance, op
from negamax.kernels.rotary import cos_sin

FP8 = torch.float8_e4m3fn


class KvCache(NamedTuple):
    """A layer's keys, divided by scales[0], and values, divided by scales[1]."""

    k: Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v: Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    scales: tuple[float, float] = (1.0, 1.0)

    def is_unscaled(self, dtype: torch.dtype) -> bool:
        """Return whether the caches hold keys and values in `dtype` without scales."""
        return self.scales == (1.0, 1.0) and self.k.dtype == self.v.dtype == dtype

    def as_pages(self, size: int) -> "KvCache":
        """View the caches as pages [pages, 1, size, head_dim], `size` tokens of one head each."""
        k, v = (part.view(-1, 1, size, part.shape[-1]) for part in (self.k, self.v))
        return KvCache(k, v, self.scales)


class TokenPlaces(NamedTuple):
    """Result of `LOCATE`: rope cosines, rope sines and cache row indices of a step's tokens."""

    cos: Tensor  # [T, 1, rotary_dim] fp32
    sin: Tensor
    rows: Tensor  # [T * kv_heads] int64, rows of caches viewed as [-1, head_dim]; < 0: not written


class TokenTables(NamedTuple):
    """Positions of T tokens, and the block tables of their sequences."""

    positions: Tensor  # [T] int64
    token_slots: Tensor  # [T] int64, row index in block_tables of each token's sequence
    block_tables: Tensor  # [slots, max_blocks]


def cache_rows(slots: Tensor, *, kv_heads: int, block_size: int) -> Tensor:
    """Return cache row indices [T * kv_heads] int64 of slots [T]; slot -1 gets negative indices."""
    blocks, offsets = slots // block_size, slots % block_size
    heads = torch.arange(kv_heads, device=slots.device)
    return ((blocks.unsqueeze(1) * kv_heads + heads) * block_size + offsets.unsqueeze(1)).flatten()


def locate(
    tokens: TokenTables, frequencies: Tensor, /, *, kv_heads: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cos, sin [T, 1, rotary_dim] fp32 and cache row indices [T * kv_heads] int64.

    frequencies [rotary_dim] is a result of `rotary.signed_frequencies`.
    """
    rows = cache_rows(
        slots_of(tokens, block_size=block_size), kv_heads=kv_heads, block_size=block_size
    )
    return *cos_sin(tokens.positions, frequencies), rows


def slots_of(tokens: TokenTables, *, block_size: int) -> Tensor:
    """Return the token slots [T] int64 of `tokens`."""
    positions, token_slots, block_tables = tokens
    blocks = block_tables[token_slots, positions // block_size].long()
    return blocks * block_size + positions % block_size


def write(k: Tensor, v: Tensor, cache: KvCache, rows: Tensor) -> None:
    """Divide k, v [T, kv_heads, head_dim] by the scales and write them to cache rows `rows`."""
    store(k, cache.k, rows, scale=cache.scales[0])
    store(v, cache.v, rows, scale=cache.scales[1])


def store(x: Tensor, cache: Tensor, rows: Tensor, *, scale: float = 1.0) -> None:
    """Write x [T, heads, width] to rows `rows` [T * heads] of one cache."""
    x = x.reshape(-1, x.shape[-1]).float() / scale
    cache = cache.view(-1, x.shape[-1])
    if cache.dtype == FP8:  # FP8 is copied as bytes, because index_copy_ does not support it
        x = x.clamp(-E4M3_MAX, E4M3_MAX).to(FP8).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache.index_copy_(0, rows, x.to(cache.dtype))


LOCATE = op(
    "kvcache.locate",
    locate,
    None,
    "rope angles and cache rows of a step's tokens",
    dict.fromkeys(FLOAT_DTYPES, Tolerance(2e-5, 0.0, "angles up to 1e3 in fp32, one cosine")),
)
