"""GEMMs of int8 with int8 and of E4M3 with E4M3 in Triton: out[M, N] = x[M, K] w[N, K]^T, with a
scale per row of w. These kernels round activations to 8 bits with a scale per token.

The kernels are used if M is so large that arithmetic is the bottleneck: tensor cores multiply 8
bits at twice the rate of 16 bits. For smaller M, `triton_packed.py` dequantizes the weights. The
tile sizes in `tiles.py` are the sizes for FP8 blocks; no other sizes were measured.
"""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.formats.floats import E4M3
from negamax.formats.platform import Feature
from negamax.formats.readable import reads_w8a8
from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.gemm import tiles, triton_packed
from negamax.kernels.gemm.op import LIKE_INPUT, LINEAR, LinearOutput
from negamax.kernels.gemm.triton_packed import PreparedPackedLinear
from negamax.kernels.gemm.triton_shared import locate_tile
from negamax.kernels.launch.triton import launch_options, triton_kernel, wait_then_launch_dependents
from negamax.kernels.op import W8A8
from negamax.kernels.weight_only.triton_rounding import (
    add_product,
    round_activations,
    rounded_dtype,
    scaled,
)


@triton.jit(do_not_specialize=["M"])
def _w8a8_linear_kernel(
    x_desc,  # descriptor of [M, K], blocks [BLOCK_M, BLOCK_K]
    x_scale_ptr,  # [M] fp32
    w_desc,  # descriptor of [N, K], blocks [BLOCK_N, BLOCK_K]
    w_scale_ptr,  # [N] fp32
    out_ptr,  # [M, N]
    M,
    N,
    K: tl.constexpr,  # padded number of columns of x and w
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[BLOCK_M, BLOCK_N] over all of K; x is the left operand. Grid (tiles,)."""
    first_m, first_n = locate_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    wait_then_launch_dependents(PDL)
    x_scale = tl.load(x_scale_ptr + offs_m, mask=offs_m < M, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if x_desc.dtype == tl.int8 else tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        acc = add_product(acc, x_desc.load([first_m, k]), w_desc.load([first_n, k]).T, x_scale)
    w_scale = tl.load(w_scale_ptr + offs_n, mask=offs_n < N, other=0.0)
    out = scaled(acc, x_scale) * w_scale[None, :]
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: Hidden, prepared: PreparedPackedLinear, output: LinearOutput = LIKE_INPUT) -> Tensor:
    """Multiply x [M, K] -> [M, N]; round x to 8 bits if M is above tiles.SPLIT_K_MAX_M."""
    x, weight = unquantized(x).contiguous(), prepared.weight
    M, N = x.shape[0], weight.num_rows
    if M <= tiles.SPLIT_K_MAX_M:
        return triton_packed.linear(x, prepared, output)
    out = output.out
    if out is None:
        out = x.new_empty((M, N), dtype=output.dtype or x.dtype)
    q, scale = round_activations(x, weight.packing)
    w = weight.qweight.view(rounded_dtype(weight.packing))
    tile = tiles.tiles_for(x.device).w8a8(M=M, N=N)
    _w8a8_linear_kernel[(triton.cdiv(N, tile.block_n) * triton.cdiv(M, tile.block_m),)](
        TensorDescriptor.from_tensor(q, [tile.block_m, tile.block_k]), scale,
        TensorDescriptor.from_tensor(w, [tile.block_n, tile.block_k]), weight.row_scale, out, M, N,
        K=weight.packing.K_PACKED, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, GROUP_M=tiles.GROUP_M, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out


KERNELS = tuple(
    triton_kernel(
        LINEAR, linear, triton_packed.prepare, provider=W8A8, requires=needs,
        reads=partial(reads_w8a8, element=element),
    )
    for element, needs in (("int8", {Feature.INT8}), (E4M3, {Feature.FP8, Feature.E4M3FN}))
)  # fmt: skip
