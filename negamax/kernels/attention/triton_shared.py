"""What decode and prefill share: the output, tiles of the paged cache, a step of the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.kvcache.spec import FP8
from negamax.kernels.quantize.native import native_e4m3
from negamax.kernels.quantize.triton import e4m3_max

LOG2_E = math.log2(math.e)
INTERPRETED = bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """What the products are made of; the interpreter multiplies fp32 only."""
    if INTERPRETED:
        return tl.float32
    return tl.float16 if FP8 in (cache, dtype) or dtype == torch.float16 else tl.bfloat16


@dataclass(frozen=True)
class Output:
    """The result of a call: in the model's dtype and, if asked for, in FP8 with a scale per token
    and head.
    """

    plain: Tensor  # [T, heads * head_dim]
    values: Tensor | None
    scales: Tensor | None  # [T, heads] fp32

    @classmethod
    def empty(cls, q: Tensor, *, quantize: bool) -> Output:
        """For q [T, heads, head_dim]."""
        num_tokens, heads, head_dim = q.shape
        plain = torch.empty(num_tokens, heads * head_dim, dtype=q.dtype, device=q.device)
        if not quantize:
            return cls(plain, None, None)
        assert head_dim == 128, "FP8 activations have a scale per 128 columns"
        scales = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
        return cls(plain, torch.empty_like(plain, dtype=native_e4m3(q.device)), scales)

    def result(self) -> Tensor | QuantizedActivations:
        if self.values is None or self.scales is None:
            return self.plain
        return QuantizedActivations(self.plain, self.values, self.scales)


@triton.jit
def write_heads(
    x, row, column, mask, out, values, scales, DIM: tl.constexpr, QUANTIZE: tl.constexpr
):
    """x [rows, columns] fp32 to the heads `row` (token * heads + head) of the output."""
    at = row[:, None] * DIM + column[None, :]
    inside = mask[:, None] & (column < DIM)[None, :]
    x = x.to(out.dtype.element_ty)
    tl.store(out + at, x, mask=inside)
    if QUANTIZE:
        dtype: tl.constexpr = values.dtype.element_ty
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), axis=1)
        scale = tl.where(largest == 0.0, 1.0, tl.maximum(largest * (1.0 / e4m3_max(dtype)), 1e-30))
        x = tl.minimum(tl.maximum(x * (1.0 / scale)[:, None], -e4m3_max(dtype)), e4m3_max(dtype))
        tl.store(values + at, x.to(dtype), mask=inside)
        tl.store(scales + row, scale, mask=mask)


@triton.jit
def tile_start(
    table,
    tile,
    lane,
    length,
    head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where a tile of BLOCK_N keys begins in a cache, of which `table` lists the sequence's blocks:
    one offset where a block holds the whole tile, else one for each key of `lane`. Keys that the
    sequence does not have are read from block 0.
    """
    key = tile * BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else tile * BLOCK_N + lane
    block = tl.load(table + key // BLOCK_SIZE, mask=key < length, other=0).to(tl.int64)
    return (block * KV_HEADS + head) * (BLOCK_SIZE * DIM) + (key % BLOCK_SIZE) * DIM


@triton.jit
def load_tile(
    cache, start, lane, column, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The tile that begins at `start`: rows `lane`, which are 0 to BLOCK_N - 1 in any shape, of
    columns `column`.

    No key is masked: a cache holds finite values everywhere, and who reads it masks the scores.
    """
    at = cache + start + (lane * DIM + column if BLOCK_SIZE % BLOCK_N == 0 else column)
    if column.shape[len(column.shape) - 1] == DIM:
        return tl.load(at)
    return tl.load(at, mask=(column < DIM) & (lane >= 0), other=0.0)


@triton.jit
def softmax_step(scores, scale, m_i, l_i):
    """A tile of scores into the running maximum (times `scale`) and sum; returns what exp2 makes of
    it, and of the old ones.
    """
    new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    p = tl.exp2(scores * scale - safe[:, None])
    alpha = tl.exp2(m_i - safe)
    return p, alpha, new, l_i * alpha + tl.sum(p, axis=1)
