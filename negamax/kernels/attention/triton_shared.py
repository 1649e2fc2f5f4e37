"""Shared parts of attention kernels: constants, outputs, loads of cache tiles, softmax."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP
from negamax.kernels.attention.metadata import PagedShape
from negamax.kernels.kvcache.op import FP8
from negamax.kernels.launch.tile import has_h200_tiles
from negamax.kernels.launch.triton import INTERPRETED, e4m3_max
from negamax.kernels.quantize.native import Outputs, outputs

_LOG2_E = math.log2(math.e)


class AttentionConstants(NamedTuple):
    """Constants of a decode or prefill kernel, passed as one argument `C: tl.constexpr`."""

    KV_HEADS: int
    GROUP: int  # number of query heads per KV head
    DIM: int  # dimension of a head
    BLOCK_SIZE: int  # number of tokens per cache block
    BLOCK_M: int  # number of rows per tile; decodes have QUERIES * GROUP rows, padded for tl.dot
    BLOCK_N: int  # number of keys per tile
    BLOCK_D: int  # DIM, padded to a power of two
    QUANTIZE: bool  # whether to write the output also in FP8
    DOT: tl.dtype  # dtype of the operands of tl.dot
    FP8_KEYS: bool = False  # whether tl.dot multiplies FP8 keys without conversion
    SPLIT_KV: bool = False  # Whether each program attends to one split of the keys.
    # Only decodes use `WARPS` and the fields below (`triton_decode.py`).
    WARPS: int = 0
    PARTIAL_ROWS: int = 0  # number of rows of a partial result (QUERIES * GROUP, padded)
    QUERIES: int = 1  # number of queries per program
    MAX_RUN: int = 1  # maximum number of queries per sequence in the step
    PREFETCH_KV: bool = False
    PARALLEL_REDUCE: bool = False
    REDUCE_LATER: bool = False
    FEWER_KEYS: bool = False  # whether `lengths` may be below the planned sequence lengths


def attention_constants(
    q: Tensor,
    cache: Tensor,
    shape: PagedShape,
    *,
    block_m: int,
    block_n: int,
    block_size: int | None = None,
    **decode: Any,
) -> AttentionConstants:
    """Return constants for queries q [.., head_dim]; `block_size` replaces `shape.block_size`."""
    return AttentionConstants(
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        DIM=q.shape[-1],
        BLOCK_SIZE=block_size or shape.block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(max(16, q.shape[-1])),
        QUANTIZE=shape.quantize,
        DOT=dot_dtype(q.dtype, cache.dtype),
        FP8_KEYS=block_m >= 64 and multiplies_fp8_keys(q, cache),
        **decode,
    )


def score_scale(head_dim: int, scale: float) -> float:
    """Return the factor of q . k in kernels: softmax scale * `scale` of the keys * log2(e)."""
    return head_dim**-0.5 * scale * _LOG2_E


def dot_dtype(dtype: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """Return the dtype of the operands of `tl.dot`, which is fp32 in Triton's interpreter."""
    if INTERPRETED:
        return tl.float32
    return tl.float16 if FP8 in (cache, dtype) or dtype == torch.float16 else tl.bfloat16


def head_outputs(q: Tensor, *, quantize: bool) -> Outputs:
    """Allocate [T, heads * head_dim]; with `quantize` also an FP8 copy and scales [T, heads]."""
    assert not quantize or q.shape[2] == GROUP, (
        f"FP8 outputs need heads of {GROUP} columns, not {q.shape[2]}"
    )
    return outputs(q.new_empty(q.shape[0], q.shape[1] * q.shape[2]), quantize=quantize)


def multiplies_fp8_keys(q: Tensor, cache: Tensor) -> bool:
    """Return whether kernels split bf16 queries into FP8 (`split_queries`) to multiply FP8 keys."""
    is_wide = q.shape[-1] > 16  # tl.dot multiplies at least 32 columns of FP8
    return is_wide and (cache.dtype, q.dtype) == (FP8, torch.bfloat16) and has_h200_tiles(q.device)


@triton.jit
def split_queries(q, C: tl.constexpr):
    """Return operands of `multiply_keys` for queries q [rows, BLOCK_D], and a factor [rows] for its
    results. With FP8_KEYS the operands are two FP8 matrices, whose sum is q divided by the factor.

    bf16 has 8 significant bits and e4m3 has 4, so the sum is exact. Only elements below 2^-9 of the
    row's largest element are rounded, by at most 2^-17 of the largest element.
    """
    if C.FP8_KEYS:
        x = q.to(tl.float32)
        # biased exponent of the largest element, with which elements are scaled to below 256
        exponent = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 8), 253)
        x *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        high = x.to(tl.float8e4nv)
        low = (x - high.to(tl.float32)).to(tl.float8e4nv)
        if INTERPRETED:
            high, low = high.to(C.DOT), low.to(C.DOT)
        return (high, low), ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    else:
        return (q.to(C.DOT), q.to(C.DOT)), tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def multiply_keys(operands, k, C: tl.constexpr):
    """Multiply queries from `split_queries` with keys k [keys, BLOCK_D] -> [rows, keys] fp32."""
    high, low = operands
    if C.FP8_KEYS:
        if INTERPRETED:
            k = k.to(C.DOT)
        return tl.dot(high, tl.trans(k), tl.dot(low, tl.trans(k)))
    else:
        return tl.dot(high, tl.trans(k.to(C.DOT)))


@triton.jit
def place_rows(row, first, count, query_head, C: tl.constexpr):
    """Return each row's query index in the tile, and its output row (token * heads + head). The
    rows belong to one head, or to all query heads of a KV head if these heads fit into the tile.
    """
    is_folded = count * C.GROUP <= C.BLOCK_M
    query = tl.where(is_folded, row // C.GROUP, row)
    head = (first + query) * (C.KV_HEADS * C.GROUP) + query_head
    return query, head + tl.where(is_folded, row % C.GROUP, 0)


@triton.jit
def write_heads(x, row, column, mask, output, C: tl.constexpr):
    """Write x [rows, BLOCK_D] fp32 to `output`; row indices `row` are token * heads + head."""
    out, values, scales = output
    at = row[:, None] * C.DIM + column[None, :]
    inside = mask[:, None] & (column < C.DIM)[None, :]
    x = x.to(out.dtype.element_ty)
    tl.store(out + at, x, mask=inside)
    if C.QUANTIZE:
        dtype: tl.constexpr = values.dtype.element_ty
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), axis=1)
        scale = tl.where(largest == 0.0, 1.0, tl.maximum(largest * (1.0 / e4m3_max(dtype)), 1e-30))
        x = tl.minimum(tl.maximum(x * (1.0 / scale)[:, None], -e4m3_max(dtype)), e4m3_max(dtype))
        tl.store(values + at, x.to(dtype), mask=inside)
        tl.store(scales + row, scale, mask=mask)


@triton.jit
def write_lse(m_i, l_i, row, mask, lse):
    """Write m_i + log2(l_i) (-inf for rows without keys) to lse[row]; do nothing if lse is None."""
    if lse is not None:
        tl.store(lse + row, m_i + tl.log2(l_i), mask=mask)


@triton.jit
def locate_keys(table, key, length, head, C: tl.constexpr):
    """Return the offsets of keys `key` of one KV head in a cache [blocks, KV_HEADS, BLOCK_SIZE,
    DIM]; `table` lists the sequence's blocks. Keys from `length` on get offsets in block 0.
    """
    block = tl.load(table + key // C.BLOCK_SIZE, mask=key < length, other=0).to(tl.int64)
    return (block * C.KV_HEADS + head) * (C.BLOCK_SIZE * C.DIM) + (key % C.BLOCK_SIZE) * C.DIM


@triton.jit
def locate_key_tile(table, tile, lane, length, head, C: tl.constexpr):
    """Return one offset if a block contains all BLOCK_N keys of a tile, else one offset per key."""
    key = tile * C.BLOCK_N if C.BLOCK_SIZE % C.BLOCK_N == 0 else tile * C.BLOCK_N + lane
    return locate_keys(table, key, length, head, C)


@triton.jit
def load_tile(cache, offset, lane, column, C: tl.constexpr):
    """Load columns `column` of rows `lane` of the tile at `offset`; `lane` has 0 to BLOCK_N - 1 in
    any shape. Keys are not masked, because caches contain only finite values and scores are masked.
    """
    at = cache + offset + (lane * C.DIM + column if C.BLOCK_SIZE % C.BLOCK_N == 0 else column)
    if column.shape[len(column.shape) - 1] == C.DIM:
        return tl.load(at)
    return tl.load(at, mask=(column < C.DIM) & (lane >= 0), other=0.0)


@triton.jit
def clamp_empty_max(m_i):
    """Return m_i, or 0 for rows without keys, for which exp2(-inf - m_i) would be NaN."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def softmax_step(scores, scale, m_i):
    """Add the scores [..., rows, keys] of a tile, times `scale`, to a base-2 online softmax with
    maxima m_i [..., rows]; `scale` is a scalar or [..., rows]. Return the weights p of the keys,
    the factor alpha of earlier sums, and the new m_i.
    """
    axis: tl.constexpr = len(scores.shape) - 1
    new = tl.maximum(m_i, tl.max(scores, axis=axis) * scale)
    safe = clamp_empty_max(new)
    scale = tl.expand_dims(scale + tl.zeros_like(m_i), axis)
    p = tl.exp2(scores * scale - tl.expand_dims(safe, axis))
    alpha = tl.exp2(m_i - safe)
    return p, alpha, new


@triton.jit
def store_split(partials, split, m_i, l_i, acc, C: tl.constexpr):
    """Store acc, m_i and l_i of a split to partials [splits, BLOCK_M, BLOCK_D + 2] fp32."""
    row = partials + (split * C.BLOCK_M + tl.arange(0, C.BLOCK_M)) * (C.BLOCK_D + 2)
    tl.store(row[:, None] + tl.arange(0, C.BLOCK_D)[None, :], acc)
    tl.store(row + C.BLOCK_D, m_i)
    tl.store(row + C.BLOCK_D + 1, l_i)


@triton.jit
def merge_splits(partials, m, splits, C: tl.constexpr):
    """Merge all splits' partial results for rows m [16] -> m_i, l_i [16], acc [16, BLOCK_D]."""
    m_i = tl.full([16], float("-inf"), tl.float32)
    l_i = tl.full([16], 0.0, tl.float32)
    acc = tl.full([16, C.BLOCK_D], 0.0, tl.float32)
    for split in range(0, splits):
        row = partials + (split * C.BLOCK_M + m) * (C.BLOCK_D + 2)
        top = tl.load(row + C.BLOCK_D)
        new = tl.maximum(m_i, top)
        safe = clamp_empty_max(new)
        alpha, beta = tl.exp2(m_i - safe), tl.exp2(top - safe)
        l_i = l_i * alpha + tl.load(row + C.BLOCK_D + 1) * beta
        values = tl.load(row[:, None] + tl.arange(0, C.BLOCK_D)[None, :])
        acc = acc * alpha[:, None] + values * beta[:, None]
        m_i = new
    return m_i, l_i, acc
