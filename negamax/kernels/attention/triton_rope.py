"""Rope of queries and keys that are not cached, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.triton_heads import (
    load_angles,
    load_heads,
    rotate,
    split_columns,
    store_heads,
)


@triton.jit
def _rope_kernel(
    q,  # [T, HEADS * DIM], rotated in place
    k,  # [T, HEADS * DIM], rotated in place
    cos,  # [T, 2 * HALF] fp32
    sin,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    columns, masks = split_columns(head < HEADS, DIM, HALF, BLOCK_HALF, 0)
    angles = load_angles(cos + token * (2 * HALF), sin + token * (2 * HALF), HALF, BLOCK_HALF)
    for part in tl.static_range(2):
        # Declare the alignment of the second half also for the first half. Otherwise a thread gets
        # eight adjacent values of the first half, and the mask makes it use eight strided stores.
        rows = tl.multiple_of((q, k)[part] + (token * HEADS + head) * DIM, 2)
        heads = load_heads(rows[:, None], columns, masks, HALF)
        store_heads(rotate(heads, angles), columns, masks, rows, head < HEADS, 1.0, HALF)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Run `attention.rope` in place. On GPUs the results are bit-identical to the reference."""
    assert all(tensor.is_contiguous() for tensor in (q, k, cos, sin)) and q.shape == k.shape
    (num_tokens, heads, head_dim), half = q.shape, cos.shape[-1] // 2
    if num_tokens:
        _rope_kernel[(num_tokens,)](
            q, k, cos, sin, HEADS=heads, DIM=head_dim, HALF=half,
            BLOCK_H=triton.next_power_of_2(heads), BLOCK_HALF=triton.next_power_of_2(half),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k
