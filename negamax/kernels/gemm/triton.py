"""GEMMs with FP8-block and 16-bit weights in Triton: out[M, N] = x[M, K] w[N, K]^T.

M is the number of tokens. All matrices are row-major and contiguous. FP8 weights have a scale per
128 x 128 block. FP8 activations have a scale per token and 128 columns:

    x [M, K] e4m3    x_scale [M, K / 128] fp32
    w [N, K] e4m3    w_scale [ceil(N / 128), K / 128] fp32

    kernel   M on an H200     grid                                     one program
    gemv     1                N / BLOCK_N                              all of K, on the CUDA cores
    small_m  2 to 8 or 16     N / BLOCK_N                              all of K, held in registers
    split_k  to 64            N / BLOCK_N, SPLIT_K, M / BLOCK_M        1 / SPLIT_K of K
    large_m  from 65 on       M / BLOCK_M * N / BLOCK_N                all of K, through TMA
    cuBLAS   M N K over 1024 * 2048 * 3072

16-bit weights use split_k with SPLIT_K = 1 up to M = 64, and cuBLAS above. `tiles.py` has tile
sizes.

All kernels except gemv multiply FP8 weights with FP8 activations. The tensor cores add the products
of 128 columns. Each sum is multiplied by the scales of x and w and added in fp32. The measured
||error|| / ||y|| is 1.7e-3 with bf16 results (from rounding) and 2.6e-4 with fp16 results.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.formats.floats import E4M3_GROUPS, PLAIN
from negamax.formats.platform import Feature
from negamax.formats.readable import reads_e4m3_blocks
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels import platform
from negamax.kernels.activations import GROUP, QuantizedActivations, model_dtype, unquantized
from negamax.kernels.gemm import cublas, tiles, triton_packed, triton_w8a8
from negamax.kernels.gemm.op import LIKE_INPUT, LINEAR, LinearOutput
from negamax.kernels.gemm.triton_shared import locate_tile, store_split
from negamax.kernels.launch.ptx import launch_dependents, wait_for_predecessor
from negamax.kernels.launch.tile import Tile
from negamax.kernels.launch.triton import (
    add_last_first,
    dot,
    launch_dependents_then_wait,
    launch_options,
    sum_over_threads,
    triton_kernel,
    wait_then_launch_dependents,
)
from negamax.kernels.op import AnyKernel
from negamax.kernels.quantize.native import to_native
from negamax.kernels.quantize.triton import quantize

_BLOCK: tl.constexpr = tl.constexpr(GROUP)  # number of columns that share a scale
_VECTOR: tl.constexpr = tl.constexpr(16)  # number of FP8 weights that a thread loads at once


@dataclass(frozen=True)
class PreparedLinear:
    """A contiguous weight [N, K] in its stored dtype, and its scales if it is FP8."""

    weight: Tensor  # [N, K] e4m3, bf16 or fp16
    scale: Tensor | None  # [ceil(N / 128), K / 128] fp32; None for 16-bit weights
    arrivals: Tensor  # [multiprocessors] int32, number of ended splits per tile; 0 between calls


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K] e4m3
    w_scale_ptr,  # [ceil(N / 128), K / 128] fp32
    out_ptr,  # [N]
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # number of columns per step: 16 * threads of the program
    PDL: tl.constexpr,
):
    """Multiply w with one unquantized token, in fp32 on the CUDA cores. A program loads BLOCK_N
    full rows of w before it uses the first value, and before the kernel that computes x has ended.

                step 0    step 1   ..            x  [K]             read after the wait
        w   +---------+---------+-----+
    BLOCK_N | BLOCK_K | BLOCK_K | ..  |          out[BLOCK_N] = sum over K of w * w_scale * x
            +---------+---------+-----+
              a thread has 16 neighboring columns of each step and row
    """
    launch_dependents(PDL)  # launch the next kernel early, so that it can load its weight
    THREADS: tl.constexpr = BLOCK_K // _VECTOR
    STEPS: tl.constexpr = triton.cdiv(K, BLOCK_K)
    first_n = tl.program_id(0) * BLOCK_N
    thread = tl.arange(0, THREADS)
    offs_k = thread[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]
    w = ()
    for i in tl.static_range(STEPS):
        for row in tl.static_range(BLOCK_N):
            w_ptrs = w_ptr + tl.minimum(first_n + row, N - 1).to(tl.int64) * K + i * BLOCK_K
            inside = (offs_k < K - i * BLOCK_K) | (i * BLOCK_K + BLOCK_K <= K)
            w += (tl.load(w_ptrs + offs_k, mask=inside, other=0.0),)
    w_scale = ()
    for i in tl.static_range(STEPS):
        k = i * BLOCK_K + thread * _VECTOR
        w_scale_ptrs = w_scale_ptr + (first_n // _BLOCK) * (K // _BLOCK) + k // _BLOCK
        w_scale += (tl.load(w_scale_ptrs, mask=k < K, other=0.0),)
    wait_for_predecessor(PDL)
    acc = ()
    for _ in tl.static_range(BLOCK_N):
        acc += (tl.zeros((THREADS,), tl.float32),)
    for i in tl.static_range(STEPS):
        added = ()
        x = tl.load(x_ptr + i * BLOCK_K + offs_k, mask=offs_k < K - i * BLOCK_K, other=0.0)
        x = x.to(tl.float32)
        for row in tl.static_range(BLOCK_N):
            product = tl.sum(w[i * BLOCK_N + row].to(tl.float32) * x, axis=1) * w_scale[i]
            added += (acc[row] + product,)
        acc = added
    out = sum_over_threads(acc, BLOCK_N)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs_n, out.to(out_ptr.dtype.element_ty), mask=offs_n < N)


# `_small_m_kernel` loads a fragment (ROWS rows and NUM_WARPS * 128 columns of x or w) as [ROWS / 8,
# 2, NUM_WARPS, 8, 64]. A thread holds 16 neighboring columns, four threads hold 64 columns of a
# row, a warp holds 8 rows. The tensor cores expect a thread to hold columns that it did not load. A
# GEMM's result does not depend on the order of K, if x and w share the order. The kernel therefore
# renumbers the columns, so that each thread multiplies the values that it loaded.


@triton.jit
def _number_rows(ROWS: tl.constexpr):
    """Return the row numbers of a fragment, [ROWS / 8, 1, 1, 8, 1]."""
    return (tl.arange(0, ROWS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :])[:, None, None, :, None]


@triton.jit
def _number_columns(NUM_WARPS: tl.constexpr):
    """Return the column numbers of a fragment, [1, 2, NUM_WARPS, 1, 64]."""
    halves = tl.arange(0, 2)[:, None] * (_BLOCK // 2) + tl.arange(0, NUM_WARPS)[None, :] * _BLOCK
    return (halves[:, :, None] + tl.arange(0, _BLOCK // 2)[None, None, :])[None, :, :, None, :]


@triton.jit
def _point_to_rows(rows, NUM_WARPS: tl.constexpr):
    """Return pointers to the columns of step 0; `rows` are pointers to the starts of the rows."""
    return add_last_first(rows, _number_columns(NUM_WARPS), _BLOCK // 2)


@triton.jit
def _load_fragment(ptrs, i: tl.constexpr, K: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Load the columns of step i; `ptrs` is from `_point_to_rows`. Columns from K on are 0."""
    BLOCK_K: tl.constexpr = NUM_WARPS * _BLOCK
    inside = (_number_columns(NUM_WARPS) < K - i * BLOCK_K) | ((i + 1) * BLOCK_K <= K)
    # declare `ptrs` contiguous again, because Triton drops this when it folds the sum for i = 0
    ptrs = add_last_first(ptrs, i * BLOCK_K, _BLOCK // 2)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _reorder_operand(fragment, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Reorder [ROWS / 8, 2, NUM_WARPS, 8, 64] -> [NUM_WARPS, ROWS, 128] for the tensor cores."""
    split = tl.reshape(fragment, (ROWS // 8, 2, NUM_WARPS, 8, 4, 4, 4))
    return tl.reshape(tl.permute(split, (2, 0, 3, 1, 5, 4, 6)), (NUM_WARPS, ROWS, _BLOCK))


@triton.jit(do_not_specialize=["M"])
def _small_m_kernel(
    x_ptr,  # [M, K] e4m3
    x_scale_ptr,  # [M, K / 128] fp32
    w_ptr,  # [N, K] e4m3
    w_scale_ptr,  # [ceil(N / 128), K / 128] fp32
    out_ptr,  # [M, N]
    M,
    N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N = 16 rows of w, the left operand of `tl.dot`, with few tokens. The warps
    split K: the product is batched, with one batch entry per warp. A program loads its part of w
    into registers before the kernel that computes x has ended. All programs run at once, so a
    weight of up to 25 MB arrives while the GPU computes a norm or attention.

                  step 0                step 1
        w   +------+------+- -+------+------+- -         out[M, BLOCK_N]: sum of acc over the warps
    BLOCK_N |warp 0|warp 1|   |warp 0|warp 1|
            +------+------+- -+------+------+- -
              128    128
    """
    launch_dependents(PDL)  # launch the next kernel early, so that it can load its weight
    K_BLOCKS: tl.constexpr = K // _BLOCK
    STEPS: tl.constexpr = triton.cdiv(K_BLOCKS, NUM_WARPS)
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    warp = tl.arange(0, NUM_WARPS)
    w_rows = tl.minimum(first_n + _number_rows(BLOCK_N), N - 1).to(tl.int64)
    w_ptrs = _point_to_rows(w_ptr + w_rows * K, NUM_WARPS)
    w_scale_ptrs = w_scale_ptr + (first_n // _BLOCK) * K_BLOCKS + warp
    w, w_scale = (), ()
    for i in tl.static_range(STEPS):
        w += (_load_fragment(w_ptrs, i, K, NUM_WARPS),)
        has_block = warp < K_BLOCKS - i * NUM_WARPS
        w_scale += (tl.load(w_scale_ptrs + i * NUM_WARPS, mask=has_block, other=0.0),)
    wait_for_predecessor(PDL)
    # Tokens past M wrap around to valid tokens. Clamped indices would all read token M - 1, and the
    # reads would wait for each other. Masks would need registers.
    x_ptrs = _point_to_rows(x_ptr + _number_rows(BLOCK_M) % M * K, NUM_WARPS)
    x_scale_ptrs = x_scale_ptr + (offs_m % M)[None, :] * K_BLOCKS + warp[:, None]
    acc = tl.zeros((NUM_WARPS, BLOCK_N, BLOCK_M), tl.float32)
    for i in tl.static_range(STEPS):
        x = _reorder_operand(_load_fragment(x_ptrs, i, K, NUM_WARPS), BLOCK_M, NUM_WARPS)
        x = tl.permute(x, (0, 2, 1))
        has_block = (warp < K_BLOCKS - i * NUM_WARPS)[:, None]
        scale = tl.load(x_scale_ptrs + i * NUM_WARPS, mask=has_block, other=0.0)
        scale *= w_scale[i][:, None]
        acc += tl.dot(_reorder_operand(w[i], BLOCK_N, NUM_WARPS), x) * scale[:, None, :]
    out = tl.sum(acc, axis=0)
    inside = (offs_m < M)[None, :] & (offs_n < N)[:, None]
    out_ptrs = out_ptr + offs_m[None, :] * N + offs_n[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _split_k_kernel(
    x_ptr,  # [M, K], e4m3 if FP8, else the dtype of w
    x_scale_ptr,  # [M, K / 128] fp32; x_scale and w_scale are read only if FP8
    w_ptr,  # [N, K]
    w_scale_ptr,  # [ceil(N / 128), K / 128] fp32
    out_ptr,  # [M, N]
    partials_ptr,  # [tiles, SPLIT_K, BLOCK_N, BLOCK_M] fp32, used if SPLIT_K > 1
    arrivals_ptr,  # [tiles] int32, number of finished splits per tile; zero between calls
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128 if FP8
    SPLIT_K: tl.constexpr,
    FP8: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether K is a multiple of BLOCK_K
    PDL: tl.constexpr,
):
    """Multiply one split of a tile of w with BLOCK_M tokens. `tl.dot` allows fewer columns of its
    right operand than rows of its left operand, so w is the left operand and the few tokens are
    columns of the right operand. If the tiles would leave multiprocessors idle, SPLIT_K programs
    split the columns of a tile, and the last program adds up all partial sums in a fixed order.

                split 0          split 1    ..
        w   +--------------+--------------+----       x [M, K] in tiles of BLOCK_M tokens
    BLOCK_N | BLOCK_K | .. | BLOCK_K | .. |
            +--------------+--------------+----       acc [BLOCK_N, BLOCK_M] -> out transposed
    """
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = offs_m % M  # tokens past M wrap, because many reads of one row would be slow
    offs_k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(K, BLOCK_K)
    split_steps = tl.cdiv(steps, SPLIT_K)
    start = tl.program_id(1) * split_steps
    stop = tl.minimum(start + split_steps, steps)
    w_ptrs = w_ptr + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
    x_ptrs = x_ptr + x_rows[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if FP8:
        # Launching dependents before the wait gains up to 1.3 us for qkv and o_proj.
        launch_dependents_then_wait(PDL)
        w_scale_ptr += (first_n // _BLOCK) * steps
        x_scale_ptrs = x_scale_ptr + x_rows * steps
        scale = tl.load(w_scale_ptr + tl.minimum(start, steps - 1)) * tl.load(
            x_scale_ptrs + tl.minimum(start, steps - 1)
        )
    else:
        wait_then_launch_dependents(PDL)
    for step in range(start, stop):
        inside = (offs_k < K - step * BLOCK_K) | EVEN_K
        w = tl.load(w_ptrs + step * BLOCK_K, mask=inside[None, :], other=0.0)
        x = tl.load(x_ptrs + step * BLOCK_K, mask=inside[:, None], other=0.0)
        if FP8:
            # the scales of the next step arrive while this step computes
            following = tl.minimum(step + 1, steps - 1)
            next_scale = tl.load(w_scale_ptr + following) * tl.load(x_scale_ptrs + following)
            acc += tl.dot(w, x) * scale[None, :]
            scale = next_scale
        else:
            acc = dot(w, x, acc)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    store_split(acc, out_ptrs, inside, partials_ptr, arrivals_ptr, tile, BLOCK_M, BLOCK_N, SPLIT_K)


@triton.jit(do_not_specialize=["M"])
def _large_m_kernel(
    x_desc,  # descriptor of [M, K] e4m3, blocks [BLOCK_M, 128]
    x_scale_ptr,  # [M, K / 128] fp32
    w_desc,  # descriptor of [N, K] e4m3, blocks [BLOCK_N, 128]
    w_scale_ptr,  # [ceil(N / 128), K / 128] fp32
    out_ptr,  # [M, N]
    M,
    N,
    K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[BLOCK_M, BLOCK_N] over all of K with TMA loads; x is the left operand."""
    first_m, first_n = locate_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    k_blocks = K // _BLOCK
    x_scale_ptrs = x_scale_ptr + tl.minimum(offs_m, M - 1) * k_blocks
    w_scale_ptr += first_n // _BLOCK * k_blocks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    launch_dependents_then_wait(PDL)
    for block in range(k_blocks):
        x = x_desc.load([first_m, block * _BLOCK])
        w = w_desc.load([first_n, block * _BLOCK])
        scale = tl.load(x_scale_ptrs + block) * tl.load(w_scale_ptr + block)
        acc += tl.dot(x, w.T) * scale[:, None]
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def prepare(weight: StoredWeight) -> PreparedLinear:
    """Prepare a weight [N, K]: in the activations' 16-bit dtype, or E4M3 with K % 128 == 0."""
    values, scale = weight.values, None
    if weight.format is not PLAIN:
        K = values.shape[1]
        assert K % GROUP == 0, f"FP8 weights need a multiple of {GROUP} columns; they have {K}"
        values, scale = to_native(values, weight.scale.contiguous())
    multiprocessors = tiles.tiles_for(values.device).multiprocessors
    arrivals = torch.zeros(multiprocessors, dtype=torch.int32, device=values.device)
    return PreparedLinear(values.contiguous(), scale, arrivals)


def linear(
    x: Tensor | QuantizedActivations, prepared: PreparedLinear, output: LinearOutput = LIKE_INPUT
) -> Tensor:
    """Return x W^T [M, N] of x [M, K], rounded once. Only 16-bit weights support `output.out`."""
    dtype, out = output.dtype or model_dtype(x), output.out
    M = (x.q if isinstance(x, QuantizedActivations) else x).shape[0]
    if M == 0:
        return prepared.weight.new_empty((0, prepared.weight.shape[0]), dtype=dtype)
    if prepared.scale is None:
        return _linear_16bit(unquantized(x).contiguous(), prepared, dtype, out)
    assert out is None, "FP8 weights do not support `out`; pass `out` with 16-bit weights only"
    if M <= tiles.GEMV_MAX_M:
        return _gemv(unquantized(x).contiguous(), prepared.weight, prepared.scale, dtype)
    if not isinstance(x, QuantizedActivations):
        x = quantize(x.contiguous())
    if (
        dtype is torch.bfloat16
        and Feature.CUBLAS_BLOCK_FP8 in platform.platform_of(x.q.device).features
        and tiles.cublas_is_faster(M, prepared.weight.numel())
    ):
        return cublas.linear_blocks(x, prepared.weight, prepared.scale)
    return _linear_fp8(x, prepared, prepared.scale, dtype)


def _linear_16bit(
    x: Tensor, prepared: PreparedLinear, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    M, N = x.shape[0], prepared.weight.shape[0]
    if M > tiles.SPLIT_K_MAX_M:
        product = cublas.linear(x, prepared.weight, out_dtype=dtype)
        return product if out is None else out.copy_(product)
    out = x.new_empty((M, N), dtype=dtype) if out is None else out
    tile = tiles.tiles_for(x.device).split_k_16bit(M)
    _split_k(x, out, prepared.weight, out, prepared.arrivals, out, tile=tile)
    return out


def _linear_fp8(
    x: QuantizedActivations, prepared: PreparedLinear, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    weight, M = prepared.weight, x.q.shape[0]
    (N, K), device = weight.shape, weight.device
    assert x.q.is_contiguous() and x.scale.is_contiguous()
    sizes, out = tiles.tiles_for(device), weight.new_empty((M, N), dtype=dtype)
    if tile := sizes.small_m(M=M, N=N, K=K):
        _small_m_kernel[(triton.cdiv(N, tile.block_n),)](
            x.q, x.scale, weight, scale, out, M, N,
            K=K, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, NUM_WARPS=tile.num_warps,
            num_warps=tile.num_warps, **launch_options(device, maxnreg=tile.maxnreg),
        )  # fmt: skip
    elif M > tiles.SPLIT_K_MAX_M and (tile := sizes.large_m(M=M, N=N)):
        options = launch_options(device)
        if weight.numel() > tiles.PDL_MAX_WEIGHTS:
            options = {"PDL": False}
        _large_m_kernel[(triton.cdiv(N, tile.block_n) * triton.cdiv(M, tile.block_m),)](
            TensorDescriptor.from_tensor(x.q, [tile.block_m, GROUP]), x.scale,
            TensorDescriptor.from_tensor(weight, [tile.block_n, GROUP]), scale, out, M, N, K,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, GROUP_M=tiles.GROUP_M,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
        )  # fmt: skip
    else:
        tile = sizes.split_k(M=M, N=N, K=K)
        _split_k(x.q, x.scale, weight, scale, prepared.arrivals, out, tile=tile)
    return out


def _gemv(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    N, K = weight.shape
    out = weight.new_empty((1, N), dtype=dtype)
    block_n, num_warps = tiles.gemv(K)
    _gemv_kernel[(triton.cdiv(N, block_n),)](
        x, weight, scale, out, N,
        K=K, BLOCK_N=block_n,
        BLOCK_K=num_warps * platform.platform_of(x.device).warp_size * _VECTOR.value,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out


def _split_k(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    arrivals: Tensor,
    out: Tensor,
    *,
    tile: Tile,
) -> None:
    """Launch `_split_k_kernel`, which reads `x_scale` and `scale` for FP8 weights only."""
    (M, N), K = out.shape, weight.shape[1]
    grid = (triton.cdiv(N, tile.block_n), tile.split_k, triton.cdiv(M, tile.block_m))
    partials = out
    if tile.split_k > 1:
        assert grid[0] * grid[2] <= arrivals.shape[0], grid
        sizes = (grid[0] * grid[2], tile.split_k, tile.block_n, tile.block_m)
        partials = out.new_empty(sizes, dtype=torch.float32)
    _split_k_kernel[grid](
        x, x_scale, weight, scale, out, partials, arrivals, M, N, K,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT_K=tile.split_k,
        FP8=weight.itemsize == 1, EVEN_K=K % tile.block_k == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(out.device),
    )  # fmt: skip


KERNELS: tuple[AnyKernel, ...] = (
    triton_kernel(LINEAR, linear, prepare),
    triton_kernel(
        LINEAR, linear, prepare, requires={Feature.FP8}, reads=reads_e4m3_blocks,
        activation=E4M3_GROUPS, columns=GROUP,
    ),
    *triton_w8a8.KERNELS,
    *triton_packed.KERNELS,
)  # fmt: skip
