"""GEMMs of up to 8 tokens with packed weights. A program loads all its rows of w before the kernel
that computes the activations has ended. `weight_only/triton_gemv.py` computes the product.
"""

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.launch.ptx import launch_dependents, wait_for_predecessor
from negamax.kernels.launch.tile import Tile
from negamax.kernels.launch.triton import launch_options
from negamax.kernels.weight_only.layout import PackedWeight
from negamax.kernels.weight_only.triton_gemv import (
    TOKENS,
    load_weight,
    multiply_token,
    multiply_weight,
    number_fragment_rows,
)


@triton.jit(do_not_specialize=["M"])
def _packed_gemv_kernel(
    x_ptr,  # [M, K]
    w,  # tensors of a `PackedWeight`
    out_ptr,  # [M, SPLIT_K, N]
    M,
    N,
    P: tl.constexpr, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr, SPLIT_K: tl.constexpr,
    ONE_TOKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of out[:, split]. Grid (N / BLOCK_N, SPLIT_K)."""
    launch_dependents(PDL)  # launch the next kernel early, so that it can load its weight
    first_n, split = tl.program_id(0) * BLOCK_N, tl.program_id(1) if SPLIT_K > 1 else 0
    rows = tl.minimum(first_n + number_fragment_rows(BLOCK_N), N - 1)
    loaded = load_weight(w, rows, N, P, NUM_WARPS, split, SPLIT_K)
    wait_for_predecessor(PDL)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if ONE_TOKEN:
        acc = multiply_token(loaded, x_ptr, P, BLOCK_N, NUM_WARPS, split, SPLIT_K)
        out_ptrs, inside = out_ptr + split * N + offs_n, offs_n < N
        if P.ROW_SCALE:
            acc *= tl.load(w[3] + offs_n, mask=offs_n < N, other=0.0)
    else:
        offs_m = tl.arange(0, TOKENS)
        acc = multiply_weight(loaded, x_ptr, offs_m % M, P, BLOCK_N, NUM_WARPS, split, SPLIT_K)
        out_ptrs = out_ptr + (offs_m[None, :] * SPLIT_K + split) * N + offs_n[:, None]
        inside = (offs_m < M)[None, :] & (offs_n < N)[:, None]
        if P.ROW_SCALE:
            acc *= tl.load(w[3] + offs_n, mask=offs_n < N, other=0.0)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def gemv(x: Tensor, weight: PackedWeight, out: Tensor, tile: Tile) -> None:
    """Multiply x [M <= TOKENS, K] -> out [M, N], or rounded partial sums [M, split_k, N]."""
    M, N = len(out), weight.num_rows
    _packed_gemv_kernel[(triton.cdiv(N, tile.block_n), tile.split_k)](
        x, weight.tensors, out, M, N,
        P=weight.packing, BLOCK_N=tile.block_n, NUM_WARPS=tile.num_warps, SPLIT_K=tile.split_k,
        ONE_TOKEN=M == 1, num_warps=tile.num_warps,
        **launch_options(x.device, maxnreg=tile.maxnreg),
    )  # fmt: skip
