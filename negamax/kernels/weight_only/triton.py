"""Tiles of packed weights in the dtype of the activations, dequantised in registers.

Codes of 4 bits arrive as bytes of two, whose columns are HALF apart. A tile of BLOCK_K columns is
two tiles, `low` and `high`, of BLOCK_K / 2 columns each, and so are the activations:

    bytes     0 .. 31 | 32 .. 63      low   columns  0 .. 31 | 64 ..  95
                                      high  columns 32 .. 63 | 96 .. 127

On NVIDIA GPUs codes become bf16 in pairs, by bit operations (instructions per weight: uint4 1.5,
e2m1 2.5, e4m3 2.25, uint8 2.5, int8 2.75). The bits of e2m1 and e4m3 are put where bf16 has its
own, which makes the value a power of two too small. The scale is as much larger, but for 2^_POST,
which is left for the end, so that neither leaves the range of bf16.

A scale for all columns of a tile multiplies the tile's product, in fp32; scales of smaller groups
multiply the weights, which rounds them to the activations' dtype (0.5 instructions more).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from negamax.kernels.launch.ptx import INTERPRETED, unpack_bytes
from negamax.kernels.launch.triton import dot
from negamax.kernels.weight_only import layout

HALF = tl.constexpr(layout.HALF)
_POST = 10
_E5M3 = tl.constexpr((127 - layout.E5M3_BIAS) << 23)  # what the bits of e5m3 lack in fp32


@triton.constexpr_function
def _by_pairs(DTYPE: Any) -> bool:
    """Whether codes are converted by instructions for pairs of bf16."""
    return not INTERPRETED and bool(is_cuda()) and tl.bfloat16 == DTYPE


@triton.constexpr_function
def _exponent(P: Any, DTYPE: Any) -> int:
    """By which power of two codes are multiplied beside their scales."""
    lack = {"e2m1": 126 - _POST, "e4m3": 120 - _POST}.get(P.ELEMENT, 0)
    return lack if _by_pairs(DTYPE) else 0


@triton.constexpr_function
def _factor(P: Any, DTYPE: Any) -> float:
    """That power."""
    return 2.0 ** _exponent(P, DTYPE)


@triton.jit
def multiply(
    x_rows, valid, w, rows, inside, num_rows, start, stop, P: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] fp32: the rows `rows` [BLOCK_N], where `inside`, of the packed weight w,
    which has `num_rows`, times the rows of x that begin at `x_rows` [BLOCK_M], where `valid`; steps
    start .. stop - 1 of BLOCK_K columns.

    The weight is the tall operand of the tensor cores and comes from registers.
    """
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    EVEN: tl.constexpr = P.K % BLOCK_K == 0
    columns = _half_columns(BLOCK_K)
    x_ptrs = x_rows[None, :] + columns[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(start, stop, num_stages=NUM_STAGES):
        k = step * BLOCK_K
        scales = _load_scales(w, rows, inside, num_rows, k, P, BLOCK_N, BLOCK_K)
        low, high = _load_weight(w, rows, inside, k, scales, P, BLOCK_N, BLOCK_K, DTYPE)
        here = valid[None, :] & ((columns < P.K - k)[:, None] | EVEN)
        x_low = tl.load(x_ptrs + k, mask=here, other=0.0)
        here = valid[None, :] & ((columns + HALF < P.K - k)[:, None] | EVEN)
        x_high = tl.load(x_ptrs + HALF + k, mask=here, other=0.0)
        if _has_one_scale(P, BLOCK_K):
            product = dot(high, x_high, dot(low, x_low, tl.zeros_like(acc)))
            acc += product * _number_of_scale(scales[0], P)
        else:
            acc = dot(high, x_high, dot(low, x_low, acc))
    if _exponent(P, DTYPE) != 0:
        acc *= 1024.0  # 2^_POST
    if P.ROW_SCALE:
        acc *= tl.load(w[3] + rows, mask=inside, other=0.0)[:, None]
    return acc


@triton.jit
def _half_columns(BLOCK_K: tl.constexpr):
    """[BLOCK_K / 2] the columns of `low`; those of `high` are HALF further."""
    offs = tl.arange(0, BLOCK_K // 2)
    return offs // HALF * (2 * HALF) + offs % HALF


@triton.jit
def _in_order(q, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes as they lie in memory, [ROWS, COLUMNS], in the order of their columns."""
    q = tl.reshape(q, (ROWS, COLUMNS // HALF, 4, 2, 2, 2))
    return tl.reshape(tl.permute(q, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))


@triton.jit
def _load_scales(
    w, rows, inside, num_rows, k, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """What stands beside the columns k .. k + BLOCK_K - 1 of the rows `rows` [BLOCK_N], where
    `inside`, of a packed weight of `num_rows`: scales and zero points, as stored, of `low` and of
    `high`, [BLOCK_N, runs]. Loaded together: less than 4 bytes of a thread are not pipelined.
    """
    scale = tl.zeros((BLOCK_N, 1), tl.float32)
    zero, scale_high, zero_high = scale, scale, scale
    if P.GROUP > 0:
        GROUPS: tl.constexpr = max(1, BLOCK_K // P.GROUP)
        groups = k // P.GROUP + tl.arange(0, GROUPS)
        fits = groups * P.GROUP < P.K_PACKED
        fits = inside[:, None] & (fits | (P.K_PACKED % BLOCK_K == 0))[None, :]
        offsets = rows[:, None] + groups[None, :] * num_rows
        scale, scale_high = _halves(tl.load(w[1] + offsets, mask=fits, other=0), P)
        if P.ZEROS:
            zero, zero_high = _halves(tl.load(w[2] + offsets, mask=fits, other=0), P)
    return scale, zero, scale_high, zero_high


@triton.jit
def _halves(each, P: tl.constexpr):
    """Of scales [ROWS, groups] those of `low` and of `high`."""
    if P.GROUP < 2 * HALF:
        RUNS: tl.constexpr = HALF // P.GROUP  # of HALF columns
        ROWS: tl.constexpr = each.shape[0]
        SPANS: tl.constexpr = each.shape[1] // (2 * RUNS)
        each = tl.permute(tl.reshape(each, (ROWS, SPANS, 2, RUNS)), (0, 1, 3, 2))
        low, high = tl.split(each)
        low, high = tl.reshape(low, (ROWS, SPANS * RUNS)), tl.reshape(high, (ROWS, SPANS * RUNS))
    else:
        low, high = each, each
    return low, high


@triton.jit
def _load_weight(
    w, rows, inside, k, scales, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The same columns of the weight itself, `scales` from `_load_scales`: low and high
    [BLOCK_N, BLOCK_K / 2] in DTYPE.
    """
    EVEN: tl.constexpr = P.K_PACKED % BLOCK_K == 0
    q_ptrs = w[0] + rows.to(tl.int64)[:, None] * (P.K_PACKED // P.CODES)
    byte = k // 2 + tl.arange(0, BLOCK_K // 2) if P.CODES == 2 else k + _half_columns(BLOCK_K)
    here = inside[:, None] & ((byte < P.K_PACKED // P.CODES) | EVEN)[None, :]
    q = _in_order(tl.load(q_ptrs + byte[None, :], mask=here, other=0), BLOCK_N, BLOCK_K // 2)
    q_high = q
    if P.CODES == 1:
        q_high = tl.load(q_ptrs + HALF + byte[None, :], mask=here, other=0)
        q_high = _in_order(q_high, BLOCK_N, BLOCK_K // 2)
    low = _dequantize(q, scales[0], scales[1], P, BLOCK_N, BLOCK_K, DTYPE, HIGH=False)
    return low, _dequantize(q_high, scales[2], scales[3], P, BLOCK_N, BLOCK_K, DTYPE, HIGH=True)


@triton.constexpr_function
def _has_one_scale(P: Any, BLOCK_K: int) -> bool:
    """Whether a tile has one scale per row."""
    return P.GROUP >= BLOCK_K and P.GROUP % BLOCK_K == 0


@triton.jit
def _number_of_scale(scale, P: tl.constexpr):
    """fp32"""
    if P.SCALE == "float":
        scale = scale.to(tl.float32)
    elif P.SCALE == "e8m0":
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = ((scale.to(tl.int32) << 20) + _E5M3).to(tl.float32, bitcast=True)
    return scale


@triton.constexpr_function
def _e5m3_as_bf16(P: Any, DTYPE: Any) -> int:
    """What is added to the bits of scales in e5m3, as those of bf16, for `_factor` times them."""
    return (127 - layout.E5M3_BIAS + _exponent(P, DTYPE)) << 7


@triton.jit
def factor_of_scale(scale, P: tl.constexpr, DTYPE: tl.constexpr):
    """What codes are multiplied by, in bf16 for `unpack_bytes`, else in fp32."""
    if _by_pairs(DTYPE) and P.SCALE == "e5m3":
        bits = (scale.to(tl.int32) << 4) + _e5m3_as_bf16(P, DTYPE)
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        factor = _number_of_scale(scale, P) * _factor(P, DTYPE)
    return factor


@triton.jit
def _spread(each, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, runs] -> [ROWS, COLUMNS]"""
    RUN: tl.constexpr = COLUMNS // each.shape[1]
    if RUN == COLUMNS:
        return tl.broadcast_to(each, (ROWS, COLUMNS))
    else:
        spread = tl.broadcast_to(each[:, :, None], (ROWS, each.shape[1], RUN))
        return tl.reshape(spread, (ROWS, COLUMNS))


@triton.jit
def _dequantize(
    q, scale, zero, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """One of the two tiles; of codes of 4 bits the low nibbles, or the HIGH ones. A scale for all
    of a row is left to `multiply`.
    """
    PAIRS: tl.constexpr = _by_pairs(DTYPE)
    HELD: tl.constexpr = DTYPE if PAIRS else tl.float32
    GROUPED: tl.constexpr = P.GROUP > 0 and not _has_one_scale(P, BLOCK_K)
    SCALED: tl.constexpr = GROUPED or _exponent(P, DTYPE) != 0
    factor = tl.full((BLOCK_N, 1), _factor(P, DTYPE), tl.float32)
    if GROUPED:
        factor = factor_of_scale(scale, P, DTYPE)
    added = tl.full((BLOCK_N, 1), _offset(P, DTYPE), tl.float32)
    if P.ZEROS:
        added = _offset(P, DTYPE) - zero.to(tl.float32)
    factor = _spread(factor.to(HELD), BLOCK_N, BLOCK_K // 2)
    added = _spread(added.to(HELD), BLOCK_N, BLOCK_K // 2)
    if PAIRS:
        ELEMENT: tl.constexpr = P.ELEMENT  # Triton 3.6 takes a field for a tensor
        ZEROS: tl.constexpr = P.ZEROS
        out = unpack_bytes(q, factor, added, ELEMENT, HIGH, SCALED, ZEROS)
    elif P.CODES == 2:
        out = _number(q >> 4 if HIGH else q & 0xF, factor, added, P).to(DTYPE)
    else:
        out = _number(q, factor, added, P).to(DTYPE)
    return out


@triton.jit
def _number(code, scale, added, P: tl.constexpr):
    """What codes, one per entry, stand for: fp32."""
    if P.ELEMENT == "e2m1":
        bits = code.to(tl.int32)
        bits = ((bits & 0x8) << 28) | ((bits & 0x7) << 22)
        number = bits.to(tl.float32, bitcast=True) * 2.0**126
    elif P.ELEMENT == "e4m3":
        bits = code.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 2.0**120
    elif P.ELEMENT == "int8":
        number = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        number = code.to(tl.float32) + added
    return number * scale


@triton.constexpr_function
def _offset(P: Any, DTYPE: Any) -> float:
    """What is added to codes, less their zero points. In pairs 4 bits come as 128 and the code, 8
    bits as the code less 128.
    """
    if P.ELEMENT not in ("uint4", "uint8"):
        return 0.0
    zero = 0.0 if P.ZEROS else 8.0
    shift = {"uint4": -128.0, "uint8": 128.0}[P.ELEMENT] if _by_pairs(DTYPE) else 0.0
    return shift - zero
