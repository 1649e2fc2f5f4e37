"""Residual add and RMS norm, in Triton: grid (T,), one program per row.

    x [T, PARTS, width]     partial results, summed
    residual [T, width]     += x
    out [T, width]          norm of the residual; with `quantize` also FP8, a scale per 128 columns

    a row in memory         | even odd | even odd | ...    int32 words of two 16-bit values
    in registers            even [BLOCK] and odd [BLOCK], fp32

A row is read once, and statistics stay in registers. The kernel moves 2 * width bytes per row for
each part of x, for each read and write of the residual, and for `out`. FP8 output adds width * 33 /
32 bytes per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.launch.ptx import pack_pair
from negamax.kernels.launch.triton import (
    e4m3_max,
    launch_dependents_then_wait,
    launch_options,
    triton_kernel,
)
from negamax.kernels.launch.triton_words import (
    add_parts,
    as_words,
    fetch_parts,
    make_word_indices,
    num_parts,
    unpack,
)
from negamax.kernels.norm import op as spec
from negamax.kernels.norm import tiles
from negamax.kernels.norm.op import ADD_RMS, NormWeight
from negamax.kernels.quantize.native import outputs, result

GROUP_WORDS: tl.constexpr = tl.constexpr(GROUP // 2)
# lower bound of FP8 scales, far above the numbers whose inverse overflows fp32
_TINY: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def scale_row(even, odd, inverse, weight_words, GEMMA: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply fp32 values of a row by `inverse` (1 / RMS) and by the weight -> words."""
    even, odd = even * inverse, odd * inverse
    if not GEMMA:
        even, odd = unpack(pack_pair(even, odd, DTYPE), DTYPE)
    weight_even, weight_odd = unpack(weight_words, DTYPE)
    if GEMMA:
        weight_even, weight_odd = 1.0 + weight_even, 1.0 + weight_odd
    return pack_pair(even * weight_even, odd * weight_odd, DTYPE)


@triton.jit
def normalize_words(
    words, weight_words, eps, WORDS: tl.constexpr, GEMMA: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the norm of a row of words [BLOCK], in which masked words are 0, as words."""
    even, odd = unpack(words, DTYPE)
    inverse = tl.rsqrt(tl.sum(even * even + odd * odd, axis=0) / (2 * WORDS) + eps)
    return scale_row(even, odd, inverse, weight_words, GEMMA, DTYPE)


@triton.jit
def normalize_row(
    x_even, x_odd, residual_words, weight_words, row, index, mask, residual, eps,
    WORDS: tl.constexpr, GEMMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add x [BLOCK] fp32 to a row of `residual` in place; return the row's norm as words."""
    at = row.to(tl.int64) * WORDS + index
    even, odd = unpack(residual_words, DTYPE)
    total = pack_pair(even + x_even, odd + x_odd, DTYPE)
    tl.store(as_words(residual) + at, total, mask=mask)
    return normalize_words(total, weight_words, eps, WORDS, GEMMA, DTYPE)


@triton.jit
def quantize_row(normed, BLOCK: tl.constexpr, DTYPE: tl.constexpr, E4M3: tl.constexpr):
    """Quantize words of a row -> scales [BLOCK / 64], FP8 values [2 * BLOCK] by column."""
    even, odd = unpack(normed, DTYPE)
    groups: tl.constexpr = BLOCK // GROUP_WORDS
    even = tl.reshape(even, [groups, GROUP_WORDS])
    odd = tl.reshape(odd, [groups, GROUP_WORDS])
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    scale = tl.where(largest > 0, tl.maximum(largest / e4m3_max(E4M3), _TINY), 1.0)
    factor = (1.0 / scale)[:, None]
    # Join the columns first, because the FP8 conversion takes pairs of neighbors. ptxas 12.8 loses
    # every fourth byte if code separates the two values of a converted pair.
    in_order = tl.reshape(tl.join(even * factor, odd * factor), [2 * BLOCK])
    return scale, in_order.to(E4M3)


@triton.jit
def store_quantized_row(
    values, scales, row, scale, in_order, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store a row of FP8 values [T, 2 * WORDS] and scales [T, WORDS / 64]; `row` is int64."""
    group = tl.arange(0, BLOCK // GROUP_WORDS)
    tl.store(
        scales + row * (WORDS // GROUP_WORDS) + group, scale, mask=group < WORDS // GROUP_WORDS
    )
    column = tl.max_contiguous(tl.arange(0, 2 * BLOCK), 4)
    tl.store(values + row * (2 * WORDS) + column, in_order, mask=column < 2 * WORDS)


@triton.jit
def add_and_normalize(
    x_even, x_odd, residual_words, weight_words, row, index, mask, residual, out, values, scales,
    eps,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr, GEMMA: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Run `normalize_row` and store the norm and its FP8 copy."""
    normed = normalize_row(
        x_even, x_odd, residual_words, weight_words, row, index, mask, residual, eps, WORDS, GEMMA,
        DTYPE,
    )  # fmt: skip
    tl.store(as_words(out) + row.to(tl.int64) * WORDS + index, normed, mask=mask)
    if QUANTIZE:
        scale, in_order = quantize_row(normed, BLOCK, DTYPE, values.dtype.element_ty)
        store_quantized_row(values, scales, row.to(tl.int64), scale, in_order, WORDS, BLOCK)


@triton.jit
def _add_rms_kernel(
    x,  # [T, PARTS, 2 * WORDS], PARTS partial sums per row
    residual,  # [T, 2 * WORDS], changed in place
    weight,  # [2 * WORDS], norm weight
    out,  # [T, 2 * WORDS], written
    values,  # [T, 2 * WORDS] e4m3, written if QUANTIZE, else None
    scales,  # [T, 2 * WORDS / 128] fp32, written if QUANTIZE, else None
    eps,
    PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
    GEMMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add x to one row of the residual and normalize the row. Grid (T,)."""
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0)
    index = make_word_indices(BLOCK)
    mask = index < WORDS
    weight_words = tl.load(as_words(weight) + index, mask=mask, other=0)
    launch_dependents_then_wait(PDL)
    residual_words = tl.load(
        as_words(residual) + row.to(tl.int64) * WORDS + index, mask=mask, other=0, volatile=True
    )
    fetched = fetch_parts(x, row, index, mask, PARTS, WORDS)
    if eps >= 0:  # always true; `fetch_parts` needs a branch with a condition unknown to ptxas
        x_even, x_odd = add_parts(fetched, PARTS, dtype)
        add_and_normalize(
            x_even, x_odd, residual_words, weight_words, row, index, mask,
            residual, out, values, scales, eps, WORDS, BLOCK, QUANTIZE, GEMMA, dtype,
        )  # fmt: skip


def prepare(
    weight: Tensor, eps: float, *, quantize: bool = False, gemma: bool = False
) -> NormWeight:
    """Prepare a norm with weight [width]; FP8 output (`quantize`) needs width % 128 == 0."""
    assert not quantize or weight.shape[0] % GROUP == 0, (
        f"FP8 norms need a multiple of {GROUP} columns, not {weight.shape[0]}"
    )
    return NormWeight(weight, eps, quantize, gemma)


def add_rms(x: Tensor, residual: Tensor, norm: NormWeight) -> Tensor | QuantizedActivations:
    """Add x [T, width] or parts [T, P, width] to residual in place; return the residual's norm."""
    num_tokens, width = residual.shape
    if width % 2:  # the kernel reads rows as 4-byte words
        return spec.add_rms(x, residual, norm)
    written = outputs(torch.empty_like(residual), quantize=norm.quantize)
    if num_tokens == 0:
        return result(*written)
    assert x.is_contiguous() and residual.is_contiguous(), "x and residual must be contiguous"
    _add_rms_kernel[(num_tokens,)](
        x, residual, norm.weight, *written, norm.eps,
        PARTS=num_parts(x),
        WORDS=width // 2,
        BLOCK=max(triton.next_power_of_2(width // 2), GROUP // 2),
        QUANTIZE=norm.quantize,
        GEMMA=norm.gemma,
        num_warps=tiles.num_warps(residual.device, width),
        **launch_options(residual.device),
    )  # fmt: skip
    return result(*written)


KERNELS = (triton_kernel(ADD_RMS, add_rms, prepare),)
