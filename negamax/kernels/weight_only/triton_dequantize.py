"""Dequantize a packed weight to a matrix in the activations' dtype. With many tokens it is faster
to unpack each weight once and multiply by cuBLAS than to unpack weights in every tile of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.weight_only.layout import SIDE_COLUMNS, PackedWeight, Packing
from negamax.kernels.weight_only.triton import (
    BYTES,
    COLUMNS,
    POST_FACTOR,
    compute_load_order,
    convert_sides,
    exponent,
    load_side,
    load_words,
    split_by_product,
    unpack_operand,
)

_BLOCK_N, _BLOCK_K, _WARPS = 64, SIDE_COLUMNS, 4


@triton.jit
def _dequantize_kernel(
    w,  # tensors of a `PackedWeight`
    out_ptr,  # [N, K]
    N,
    P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Dequantize out[BLOCK_N, BLOCK_K], rounded once. Grid (N / BLOCK_N, K / BLOCK_K)."""
    CODES: tl.constexpr = P.CODES  # a copy, because Triton 3.6 treats `P.CODES` as a tensor
    SPAN: tl.constexpr = BYTES * CODES
    GROUPED: tl.constexpr = P.GROUP > 0
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first_n, first_k = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_K
    rows, columns = tl.arange(0, BLOCK_N), tl.arange(0, COLUMNS)
    inside = rows < N - first_n
    order = compute_load_order(BLOCK_N, NUM_WARPS)
    q_inside = order < N - first_n
    out_ptrs = out_ptr + (first_n + rows).to(tl.int64)[:, None] * P.K + columns[None, :]
    wait_then_launch_dependents(PDL)
    scale, zero = None, None
    if GROUPED:
        scale = load_side(w[1], first_n, order, q_inside, N, first_k, P, BLOCK_K, P.IN_WORDS)
    if P.ZEROS:
        zero = load_side(w[2], first_n, order, q_inside, N, first_k, P, BLOCK_K, False)
    for i in tl.static_range(BLOCK_K // SPAN):
        k = first_k + i * SPAN
        q = split_by_product(load_words(w, first_n, order, q_inside, N, k, P), P)
        factors, added = convert_sides(scale, zero, i, BLOCK_K // SPAN, P, DTYPE, GROUPED)
        for j in tl.static_range(CODES):
            number = unpack_operand(
                q[j], factors[j], added[j], P, DTYPE, GROUPED, BLOCK_N, NUM_WARPS
            )
            if exponent(P, DTYPE) != 0 or P.ROW_SCALE:
                number = number.to(tl.float32)
            if exponent(P, DTYPE) != 0:
                number *= POST_FACTOR
            if P.ROW_SCALE:
                number *= tl.load(w[3] + first_n + rows, mask=inside, other=0.0)[:, None]
            here = inside[:, None] & (columns < P.K - k - j * COLUMNS)[None, :]
            tl.store(out_ptrs + k + j * COLUMNS, number.to(DTYPE), mask=here)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight to a matrix [N, K] in `dtype` (bf16, fp16). Integers with group scales
    are rounded twice, as in GEMM tiles; other values are rounded once.
    """
    packing: Packing = weight.packing
    N, device = weight.num_rows, weight.qweight.device
    out = torch.empty(N, packing.K, dtype=dtype, device=device)
    _dequantize_kernel[(triton.cdiv(N, _BLOCK_N), triton.cdiv(packing.K, _BLOCK_K))](
        weight.tensors, out, N,
        P=packing, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, NUM_WARPS=_WARPS, num_warps=_WARPS,
        **launch_options(device),
    )  # fmt: skip
    return out
