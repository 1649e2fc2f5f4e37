"""GEMMs with packed weights of 4 and 8 bits in Triton: out[M, N] = x[M, K] w[N, K]^T.

`triton_packed_gemv.py` has the GEMMs of few tokens. For many tokens, cuBLAS multiplies the whole
dequantized weight. For medium token counts, the kernel below dequantizes tiles of w in registers. A
tile of w is the left operand of `tl.dot`, so a weight is unpacked once for up to 128 tokens.
`kernels/weight_only/triton.py` describes unpacking and its cost. `tiles.py` has the tile sizes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.formats.readable import reads_packed
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.gemm import tiles
from negamax.kernels.gemm.op import LIKE_INPUT, LINEAR, LinearOutput
from negamax.kernels.gemm.triton_packed_gemv import gemv
from negamax.kernels.gemm.triton_shared import locate_tile, store_split
from negamax.kernels.launch.triton import launch_options, triton_kernel, wait_then_launch_dependents
from negamax.kernels.op import WEIGHT_ONLY
from negamax.kernels.weight_only.layout import PackedWeight, Packing, pack
from negamax.kernels.weight_only.triton import multiply
from negamax.kernels.weight_only.triton_dequantize import dequantize


@dataclass(frozen=True)
class PreparedPackedLinear:
    """A weight [N, K] in the layout of `pack`."""

    weight: PackedWeight
    # [multiprocessors] int32, number of finished splits of each tile; zero between calls
    arrivals: Tensor


@triton.jit(do_not_specialize=["M"])
def _packed_linear_kernel(
    x_ptr,  # [M, K]
    w,  # tensors of a `PackedWeight`
    out_ptr,  # [M, N]
    partials_ptr,  # [tiles, SPLIT_K, BLOCK_N, BLOCK_M] fp32, used if SPLIT_K > 1
    arrivals_ptr,  # [tiles] int32, number of finished splits per tile; zero between calls
    M,
    N,
    P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[BLOCK_M, BLOCK_N]. Grid (tiles, SPLIT_K).

    SPLIT_K programs split the columns of a tile if the tiles would leave multiprocessors idle.
    """
    STEPS: tl.constexpr = triton.cdiv(P.K, BLOCK_K)
    first_m, first_n = locate_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + offs_m.to(tl.int64) * P.K
    start = tl.program_id(1) * tl.cdiv(STEPS, SPLIT_K)
    stop = tl.minimum(start + tl.cdiv(STEPS, SPLIT_K), STEPS)
    wait_then_launch_dependents(PDL)
    acc = multiply(x_rows, offs_m < M, w, first_n, N - first_n, N, start, stop,
                   P, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tile = tl.program_id(0)
    store_split(acc, out_ptrs, inside, partials_ptr, arrivals_ptr, tile, BLOCK_M, BLOCK_N, SPLIT_K)


def prepare(weight: StoredWeight) -> PreparedPackedLinear:
    """Prepare a weight [N, K], in a format that `reads_packed` accepts."""
    device = weight.values.device
    multiprocessors = tiles.tiles_for(device).multiprocessors
    arrivals = torch.zeros(multiprocessors, dtype=torch.int32, device=device)
    return PreparedPackedLinear(pack(weight), arrivals)


def linear(x: Hidden, prepared: PreparedPackedLinear, output: LinearOutput = LIKE_INPUT) -> Tensor:
    """Return x W^T [M, N], rounded once; with `in_parts` it may be P partial sums [M, P, N]."""
    x, weight = unquantized(x).contiguous(), prepared.weight
    packing: Packing = weight.packing
    (dtype, out, in_parts), M, N = output, x.shape[0], weight.num_rows
    sizes = tiles.tiles_for(x.device)
    few = sizes.packed_gemv(M=M, N=N, packing=packing, in_parts=in_parts and out is None)
    if out is None:
        shape = (M, few.split_k, N) if few and few.split_k > 1 else (M, N)
        out = x.new_empty(shape, dtype=dtype or x.dtype)
    if M == 0:
        return out
    if few:
        gemv(x, weight, out, few)
        return out
    if sizes.dequantized_min_m(packing) <= M and out.dtype == x.dtype:
        return torch.mm(x, dequantize(weight, x.dtype).t(), out=out)
    tile = sizes.packed(M=M, N=N, K=packing.K)
    grid = (triton.cdiv(N, tile.block_n) * triton.cdiv(M, tile.block_m), tile.split_k)
    partials = out
    if tile.split_k > 1:
        assert grid[0] <= prepared.arrivals.shape[0], grid
        sizes = (*grid, tile.block_n, tile.block_m)
        partials = x.new_empty(sizes, dtype=torch.float32)
    _packed_linear_kernel[grid](
        x, weight.tensors, out, partials, prepared.arrivals, M, N,
        P=packing, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLIT_K=tile.split_k, GROUP_M=tiles.GROUP_M,
        NUM_STAGES=tile.num_stages, NUM_WARPS=tile.num_warps, num_warps=tile.num_warps,
        **launch_options(x.device, starts_early=False),
    )  # fmt: skip
    return out


KERNELS = (triton_kernel(LINEAR, linear, prepare, provider=WEIGHT_ONLY, reads=reads_packed),)
