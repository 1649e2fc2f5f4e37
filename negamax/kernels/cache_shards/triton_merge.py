"""The results of all ranks that hold the keys of a head as one: grid (T,), a program for a rank's
own heads of a token. Ranks are added in their order, so that a result does not depend on who was
first.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.triton_shared import nonempty_max, outputs, result, write_heads


class MergeConstants(NamedTuple):
    """Constants of `_merge_partials_kernel`, one argument `C: tl.constexpr`."""

    RANKS: int
    HEADS: int  # of all ranks together
    COUNT: int  # of this rank
    COUNT_POW2: int
    DIM: int  # of a head
    BLOCK_D: int  # DIM, padded to a power of two
    QUANTIZE: bool


@triton.jit(do_not_specialize=["first"])
def _merge_partials_kernel(
    parts,  # [RANKS, T, HEADS * DIM], a rank's `part_stride` behind the one before
    lse,  # [RANKS, T, HEADS] fp32, likewise `lse_stride`
    out,  # [T, COUNT * DIM], written; likewise
    values,  # e4m3 and
    scales,  # [T, COUNT] fp32, None unless QUANTIZE
    part_stride,
    lse_stride,
    first,  # of the heads of this rank
    C: tl.constexpr,
):
    RANKS: tl.constexpr = C.RANKS  # Triton 3.6 takes no field of a struct there
    HEADS_POW2: tl.constexpr = C.COUNT_POW2
    BLOCK_D: tl.constexpr = C.BLOCK_D
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS_POW2), tl.arange(0, BLOCK_D)
    is_head = head < C.COUNT
    mask = is_head[:, None] & (column < C.DIM)[None, :]
    lse += token * C.HEADS + first + head
    parts += (token * C.HEADS + first + head)[:, None] * C.DIM + column[None, :]
    top = tl.full([HEADS_POW2], float("-inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        top = tl.maximum(top, tl.load(lse + rank * lse_stride, mask=is_head, other=0.0))
    safe = nonempty_max(top)
    divisor = tl.zeros([HEADS_POW2], tl.float32)
    total = tl.zeros([HEADS_POW2, BLOCK_D], tl.float32)
    for rank in tl.static_range(RANKS):
        weight = tl.exp2(tl.load(lse + rank * lse_stride, mask=is_head, other=0.0) - safe)
        part = tl.load(parts + rank * part_stride, mask=mask, other=0.0).to(tl.float32)
        divisor += weight
        total += part * weight[:, None]
    total *= tl.where(divisor == 0.0, 0.0, 1.0 / divisor)[:, None]
    write_heads(total, token * C.COUNT + head, column, is_head, (out, values, scales), C)


def merge_partials(
    out: Tensor, lse: Tensor, *, first: int, count: int, quantize: bool = False
) -> Hidden:
    """As the definition, in FP8 too if asked for."""
    (ranks, num_tokens, heads), width = lse.shape, out.shape[2]
    head_dim = width // heads
    assert out[0].is_contiguous() and lse[0].is_contiguous()
    output = outputs(out.new_empty(num_tokens, count, head_dim), quantize=quantize)
    if num_tokens:
        _merge_partials_kernel[(num_tokens,)](
            out,
            lse,
            *output,
            out.stride(0),
            lse.stride(0),
            first,
            MergeConstants(
                RANKS=ranks,
                HEADS=heads,
                COUNT=count,
                COUNT_POW2=triton.next_power_of_2(count),
                DIM=head_dim,
                BLOCK_D=triton.next_power_of_2(max(16, head_dim)),
                QUANTIZE=quantize,
            ),
            num_warps=4,
        )
    return result(*output)
