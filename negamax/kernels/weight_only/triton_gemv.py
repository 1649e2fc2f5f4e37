"""Packed weights and up to TOKENS tokens: a program loads its rows in full before it uses the first
value.

The warps share the columns: in each step a warp takes SPAN of them, of all rows of the program, as
one entry of a batched product on the tensor cores. Those multiply 256 weights with eight tokens in
an instruction; the CUDA cores would take 128 instructions for each token.

A fragment, 64 bytes of each row for each warp, is [8, NUM_WARPS, ROWS / 8, 64]: a thread has 16
neighbouring bytes of every eighth row, four threads have 64. With 4 bits that is SPAN columns, with
8 bits half of them. The tensor cores give a thread the same rows but other columns. The order of
the columns does not matter as long as weight and activations share it, so they are renumbered:
every thread multiplies what it has loaded, and weights never go through shared memory.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from negamax.kernels.launch.ptx import unpack_bytes
from negamax.kernels.launch.triton import dot
from negamax.kernels.weight_only.triton import (
    _by_pairs,
    _exponent,
    _factor,
    _number,
    _number_of_scale,
    _offset,
    factor_of_scale,
)

TOKENS = tl.constexpr(8)  # the short side of the tensor cores' smallest product
SPAN = tl.constexpr(128)  # columns of a warp in a step
_BYTES = tl.constexpr(64)  # of a row in a fragment
_VECTOR = tl.constexpr(8)  # neighbouring columns of the tensor cores that a thread has


@triton.constexpr_function
def _has_one_scale(P: Any) -> bool:
    """Whether the columns of a warp in a step have one scale per row."""
    return bool(P.GROUP and P.GROUP % SPAN.value == 0)


@triton.constexpr_function
def _steps(P: Any, NUM_WARPS: int) -> int:
    return -(-P.K_PACKED // (SPAN.value * NUM_WARPS))


@triton.constexpr_function
def _fills_steps(columns: int, NUM_WARPS: int) -> bool:
    """Whether so many columns leave no warp idle."""
    return columns % (SPAN.value * NUM_WARPS) == 0


@triton.constexpr_function
def _runs(P: Any) -> int:
    """Scales for the 16 codes that a thread has of a row in a fragment."""
    return 2 if P.GROUP == 16 else 1


@triton.jit
def fragment_rows(ROWS: tl.constexpr):
    """[8, ROWS / 8]"""
    return tl.arange(0, 8)[:, None] + tl.arange(0, ROWS // 8)[None, :] * 8


@triton.jit
def load_weight(w, rows, num_rows, P: tl.constexpr, NUM_WARPS: tl.constexpr):
    """The rows `rows` [8, ROWS / 8], in the order of `fragment_rows`, of a packed weight that has
    `num_rows`: fragments, scales and zero points of all steps, as stored.
    """
    STEPS: tl.constexpr = _steps(P, NUM_WARPS)
    PARTS: tl.constexpr = 2 // P.CODES  # fragments of a step
    EVEN: tl.constexpr = _fills_steps(P.K_PACKED, NUM_WARPS)
    warp = tl.arange(0, NUM_WARPS)[None, :, None, None] * (SPAN // P.CODES)
    byte = warp + tl.arange(0, _BYTES)[None, None, None, :]
    q_ptrs = w[0] + rows.to(tl.int64)[:, None, :, None] * (P.K_PACKED // P.CODES) + byte
    # Triton lays threads, then warps, along the dimensions of the longest contiguous runs first:
    # but for the 16, which is true, the numbers say no more than that order
    q_ptrs = tl.max_contiguous(q_ptrs, [4, 2, 1, 16])
    codes, scales, zeros = (), (), ()
    for i in tl.static_range(STEPS * PARTS):
        first = (i // PARTS * NUM_WARPS * SPAN) // P.CODES + i % PARTS * _BYTES
        inside = (byte < P.K_PACKED // P.CODES - first) | EVEN
        codes = codes + (tl.load(q_ptrs + first, mask=inside, other=0, cache_modifier=".cg"),)
    if P.GROUP > 0:
        SIDES: tl.constexpr = 1 if _has_one_scale(P) else 2
        for i in tl.static_range(STEPS * SIDES):
            offsets, inside = _side_offsets(rows, num_rows, i // SIDES, i % SIDES, P, NUM_WARPS)
            scales = scales + (_load_side(w[1] + offsets, inside),)
            if P.ZEROS:
                zeros = zeros + (_load_side(w[2] + offsets, inside),)
    return codes, scales, zeros


@triton.jit
def _side_offsets(
    rows, num_rows, step: tl.constexpr, side: tl.constexpr, P: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Where scales and zero points stand, [4, 8, NUM_WARPS, ROWS / 8, runs], and whether they do:
    for each thread those of the codes that it has, so that they need not be passed on.
    """
    RUNS: tl.constexpr = _runs(P)
    k = (step * NUM_WARPS + tl.arange(0, NUM_WARPS))[None, None, :, None, None] * SPAN
    thread = tl.arange(0, 4)[:, None, None, None, None]
    if not _has_one_scale(P):
        k += thread // 2 * (32 * P.CODES) + side * (64 // P.CODES)
    k += thread * 0 + tl.arange(0, RUNS)[None, None, None, None, :] * 16
    offsets = k // P.GROUP * num_rows + rows[None, :, None, :, None]
    return offsets, (k < P.K_PACKED) | _fills_steps(P.K_PACKED, NUM_WARPS)


@triton.jit
def _load_side(ptrs, inside):
    """Scales or zero points. The order of the dimensions is said as in `load_weight`; nothing is a
    multiple of more than 1, so that no load takes several.
    """
    ptrs = tl.multiple_of(tl.max_contiguous(ptrs, [16, 8, 4, 2, 1]), [1, 1, 1, 1, 1])
    return tl.load(ptrs, mask=inside, other=0)


@triton.jit
def multiply_weight(
    loaded, x_ptr, x_rows, P: tl.constexpr, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """[ROWS, TOKENS] fp32, without the scales per row: `loaded` by `load_weight` times the rows
    `x_rows` [TOKENS] of x [any, K].
    """
    STEPS: tl.constexpr = _steps(P, NUM_WARPS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    codes, scales, zeros = loaded
    acc = tl.zeros((NUM_WARPS, ROWS, TOKENS), tl.float32)
    for i in tl.static_range(STEPS):
        x = _load_tokens(x_ptr, x_rows, i, P, NUM_WARPS)
        w = _dequantize(codes, scales, zeros, i, P, ROWS, NUM_WARPS, DTYPE)
        if P.GROUP > 0 and _has_one_scale(P):
            scale = tl.permute(_number_of_scale(scales[i], P), (2, 3, 1, 0, 4))
            product = dot(w, x, tl.zeros_like(acc))
            product = tl.reshape(product, (NUM_WARPS, ROWS // 8, 8, 4, TOKENS // 4)) * scale
            acc += tl.reshape(product, (NUM_WARPS, ROWS, TOKENS))
        else:
            acc = dot(w, x, acc)
    acc = tl.sum(acc, axis=0)
    if _exponent(P, DTYPE) != 0:
        acc *= 1024.0  # 2^_POST
    return acc


@triton.jit
def _load_tokens(x_ptr, x_rows, step: tl.constexpr, P: tl.constexpr, NUM_WARPS: tl.constexpr):
    """[NUM_WARPS, SPAN, TOKENS] for the tensor cores. A thread loads what it multiplies: bytes of a
    fragment, unpacked, hold columns in the order (thread, c, a, b, d) of `layout._pack`, where c
    and d are neighbours in x; columns of the product are numbered (side, c, thread, a, b, d).
    """
    # [TOKENS, thread, NUM_WARPS, (side, a, b), (c, d)]
    thread = tl.arange(0, 4)[None, :, None, None, None]
    warp = tl.arange(0, NUM_WARPS)[None, None, :, None, None]
    other = tl.arange(0, 8)[None, None, None, :, None]
    k = warp * SPAN + thread // 2 * (32 * P.CODES) + thread % 2 * 4
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None, None, None, None] * P.K + k
    constant = step * NUM_WARPS * SPAN + other // 4 * (64 // P.CODES) + other % 4 * 8
    constant += tl.arange(0, 4)[None, None, None, None, :]
    x_ptrs = tl.max_contiguous(x_ptrs + constant.to(tl.int64), [8, 16, 4, 1, 32])
    inside = (k + constant < P.K) | _fills_steps(P.K, NUM_WARPS)
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    x = tl.reshape(x, (TOKENS, 4, NUM_WARPS, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 3, 6, 1, 4, 5, 7, 0)), (NUM_WARPS, SPAN, TOKENS))


@triton.jit
def _dequantize(
    codes, scales, zeros, step: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[NUM_WARPS, ROWS, SPAN] in DTYPE, without a scale for all SPAN columns."""
    PARTS: tl.constexpr = 2 // P.CODES
    SIDES: tl.constexpr = 1 if _has_one_scale(P) else 2
    sides = ()
    for side in tl.static_range(2):
        q = codes[step * PARTS + side % PARTS]
        scale = scales[step * SIDES + side % SIDES] if P.GROUP > 0 else q
        zero = zeros[step * SIDES + side % SIDES] if P.ZEROS else q
        sides = sides + (_dequantize_side(q, scale, zero, side, P, ROWS, NUM_WARPS, DTYPE),)
    # [8, NUM_WARPS, ROWS / 8, thread, c, neighbouring bytes, side]
    w = tl.reshape(
        tl.join(sides[0], sides[1]), (8, NUM_WARPS, ROWS // 8, 4, 16 // _VECTOR, _VECTOR, 2)
    )
    return tl.reshape(tl.permute(w, (1, 2, 0, 6, 4, 3, 5)), (NUM_WARPS, ROWS, SPAN))


@triton.jit
def _dequantize_side(
    q, scale, zero, HIGH: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A fragment, of codes of 4 bits its low nibbles or the HIGH ones."""
    PAIRS: tl.constexpr = _by_pairs(DTYPE)
    HELD: tl.constexpr = DTYPE if PAIRS else tl.float32
    GROUPED: tl.constexpr = P.GROUP > 0 and not _has_one_scale(P)
    SCALED: tl.constexpr = GROUPED or _exponent(P, DTYPE) != 0
    factor = tl.full((4, 8, NUM_WARPS, ROWS // 8, 1), _factor(P, DTYPE), tl.float32)
    if GROUPED:
        factor = factor_of_scale(scale, P, DTYPE)
    added = tl.full((4, 8, NUM_WARPS, ROWS // 8, 1), _offset(P, DTYPE), tl.float32)
    if P.ZEROS:
        added = _offset(P, DTYPE) - zero.to(tl.float32)
    factor = _spread(factor.to(HELD), ROWS, NUM_WARPS)
    added = _spread(added.to(HELD), ROWS, NUM_WARPS)
    if PAIRS:
        ELEMENT: tl.constexpr = P.ELEMENT  # Triton 3.6 takes a field for a tensor
        ZEROS: tl.constexpr = P.ZEROS
        out = unpack_bytes(q, factor, added, ELEMENT, HIGH == 1, SCALED, ZEROS)
    elif P.CODES == 2:
        out = _number(q >> 4 if HIGH == 1 else q & 0xF, factor, added, P).to(DTYPE)
    else:
        out = _number(q, factor, added, P).to(DTYPE)
    return out


@triton.jit
def _spread(each, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """[4, 8, NUM_WARPS, ROWS / 8, runs] -> [8, NUM_WARPS, ROWS / 8, 64]"""
    RUNS: tl.constexpr = each.shape[4]
    each = tl.permute(each, (1, 2, 3, 0, 4))[:, :, :, :, None, :, None]
    each = tl.broadcast_to(each, (8, NUM_WARPS, ROWS // 8, 4, 2, RUNS, 8 // RUNS))
    return tl.reshape(each, (8, NUM_WARPS, ROWS // 8, _BYTES))
