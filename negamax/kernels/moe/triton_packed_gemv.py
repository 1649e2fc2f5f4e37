"""The experts for few tokens with packed weights: each choice of a token runs on its own, and a
program loads all its rows of an expert before it uses the first value.
`kernels/weight_only/triton_gemv.py` has the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_shared import PreparedExperts
from negamax.kernels.weight_only.triton_gemv import (
    fragment_rows,
    load_weight,
    multiply_token,
)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _packed_gate_up_gemv_kernel(
    x_ptr,  # [M, HIDDEN]
    topk_ids_ptr,  # [M, TOP_K] int32
    w,  # gate and up, tensors of a `PackedWeight`
    h_ptr,  # [M, TOP_K, WIDTH]
    first_expert,
    num_experts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of h of one choice.

    grid: M * TOP_K * WIDTH / BLOCK_N
    """
    P: tl.constexpr = E.GATE_UP
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    choice, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    wait_then_launch_dependents(PDL)
    expert = tl.load(topk_ids_ptr + choice) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    offs = fragment_rows(2 * BLOCK_N)
    rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
    rows += expert * (2 * E.WIDTH)
    loaded = load_weight(w, rows, num_experts * (2 * E.WIDTH), P, NUM_WARPS)
    tl.debug_barrier()  # ptxas moves loads down to their uses, but not past it
    x_ptr += choice // TOP_K * E.HIDDEN
    both = multiply_token(loaded, x_ptr, P, 2 * BLOCK_N, NUM_WARPS)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if P.ROW_SCALE:
        offs = tl.arange(0, 2 * BLOCK_N)
        rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
        both *= tl.load(w[3] + expert * (2 * E.WIDTH) + rows)
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N)), (1, 0)))
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = swiglu(gate, up, ACTIVATION)
    h_ptrs = h_ptr + choice * E.WIDTH + offs_n
    tl.store(h_ptrs, y.to(h_ptr.dtype.element_ty), mask=offs_n < E.WIDTH)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _packed_down_gemv_kernel(
    h_ptr,  # [M, TOP_K, WIDTH]
    topk_ids_ptr,  # [1, TOP_K] int32
    topk_weights_ptr,  # [1, TOP_K] fp32
    w,  # down, tensors of a `PackedWeight`
    out_ptr,  # [M, TOP_K, HIDDEN]
    first_expert,
    num_experts,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of one choice, or zeros where its expert is none of this rank's.

        grid: M * TOP_K * HIDDEN / BLOCK_N

    `topk_ids` and `topk_weights` are older than the kernel before this one, so they may be read
    ahead of it (past L1), and so may the weights.
    """
    P: tl.constexpr = E.DOWN
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N)
    choice, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    n_inside = offs_n < E.HIDDEN
    expert = tl.load(topk_ids_ptr + choice, cache_modifier=".cg") - first_expert
    if (expert < 0) | (expert >= num_experts):
        wait_then_launch_dependents(PDL)
        zeros = tl.zeros((BLOCK_N,), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + choice * E.HIDDEN + offs_n, zeros, mask=n_inside)
        return
    rows = expert * E.HIDDEN + tl.minimum(first_n + fragment_rows(BLOCK_N), E.HIDDEN - 1)
    loaded = load_weight(w, rows, num_experts * E.HIDDEN, P, NUM_WARPS)
    weight = tl.load(topk_weights_ptr + choice, cache_modifier=".cg")
    wait_then_launch_dependents(PDL)
    acc = multiply_token(loaded, h_ptr + choice * E.WIDTH, P, BLOCK_N, NUM_WARPS)
    if P.ROW_SCALE:
        acc *= tl.load(w[3] + expert * E.HIDDEN + offs_n, mask=n_inside, other=0.0)
    acc *= weight
    out_ptrs = out_ptr + choice * E.HIDDEN + offs_n
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=n_inside)


def experts_packed_gemv(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    prepared: PreparedExperts,
    tile: tiles.ExpertTiles,
    *,
    first: int,
    count: int,
) -> Tensor:
    """x [M, hidden] -> [M, top_k, hidden]."""
    (M, top_k), E = topk_ids.shape, prepared.constants
    assert x.is_contiguous()
    h = x.new_empty(M, top_k, E.WIDTH)
    out = x.new_empty(M, top_k, E.HIDDEN)
    gate_up, down = tile.gate_up, tile.down
    _packed_gate_up_gemv_kernel[(M * top_k * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        x, topk_ids, prepared.gate_up, h, first, count, E=E, TOP_K=top_k,
        BLOCK_N=gate_up.block_n, NUM_WARPS=gate_up.num_warps, num_warps=gate_up.num_warps,
        **launch_options(x.device, maxnreg=gate_up.maxnreg, starts_early=tile.starts_early),
    )  # fmt: skip
    _packed_down_gemv_kernel[(M * top_k * triton.cdiv(E.HIDDEN, down.block_n),)](
        h, topk_ids, topk_weights, prepared.down, out, first, count, E=E,
        BLOCK_N=down.block_n, NUM_WARPS=down.num_warps, num_warps=down.num_warps,
        **launch_options(x.device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out
