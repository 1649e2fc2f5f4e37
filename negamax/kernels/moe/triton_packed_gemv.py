"""The experts for one token with packed weights: a program loads all its rows of an expert before
it uses the first value. `kernels/weight_only/triton_gemv.py` has the product.
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
    TOKENS,
    fragment_rows,
    load_weight,
    multiply_weight,
)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _packed_gate_up_gemv_kernel(
    x_ptr,  # [1, HIDDEN]
    topk_ids_ptr,  # [1, TOP_K] int32
    w,  # gate and up, tensors of a `PackedWeight`
    h_ptr,  # [TOP_K, WIDTH]
    first_expert,
    num_experts,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of h of one choice.

    grid: TOP_K * WIDTH / BLOCK_N
    """
    P: tl.constexpr = E.GATE_UP
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    choice, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    offs_m = tl.arange(0, TOKENS)  # the first one counts
    wait_then_launch_dependents(PDL)
    expert = tl.load(topk_ids_ptr + choice) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    offs = fragment_rows(2 * BLOCK_N)
    rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
    rows += expert * (2 * E.WIDTH)
    loaded = load_weight(w, rows, num_experts * (2 * E.WIDTH), P, NUM_WARPS)
    tl.debug_barrier()  # ptxas moves loads down to their uses, but not past it
    both = multiply_weight(loaded, x_ptr, offs_m * 0, P, 2 * BLOCK_N, NUM_WARPS)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if P.ROW_SCALE:
        offs = tl.arange(0, 2 * BLOCK_N)
        rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
        both *= tl.load(w[3] + expert * (2 * E.WIDTH) + rows)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, TOKENS)), (1, 2, 0)))
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = swiglu(gate, up, ACTIVATION)
    inside = (offs_n < E.WIDTH)[:, None] & (offs_m == 0)[None, :]
    h_ptrs = h_ptr + choice * E.WIDTH + offs_n[:, None] + offs_m[None, :]
    tl.store(h_ptrs, y.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _packed_down_gemv_kernel(
    h_ptr,  # [TOP_K, WIDTH]
    topk_ids_ptr,  # [1, TOP_K] int32
    topk_weights_ptr,  # [1, TOP_K] fp32
    w,  # down, tensors of a `PackedWeight`
    out_ptr,  # [1, TOP_K, HIDDEN]
    first_expert,
    num_experts,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of one choice, or zeros where its expert is none of this rank's.

        grid: TOP_K * HIDDEN / BLOCK_N

    `topk_ids` and `topk_weights` are older than the kernel before this one, so they may be read
    ahead of it (past L1), and so may the weights.
    """
    P: tl.constexpr = E.DOWN
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N)
    choice, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    offs_m = tl.arange(0, TOKENS)
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
    acc = multiply_weight(loaded, h_ptr + choice * E.WIDTH, offs_m * 0, P, BLOCK_N, NUM_WARPS)
    if P.ROW_SCALE:
        acc *= tl.load(w[3] + expert * E.HIDDEN + offs_n, mask=n_inside, other=0.0)[:, None]
    acc *= weight
    out_ptrs = out_ptr + choice * E.HIDDEN + offs_n[:, None] + offs_m[None, :]
    inside = n_inside[:, None] & (offs_m == 0)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


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
    """x [1, hidden] -> [1, top_k, hidden]."""
    (_, top_k), E = topk_ids.shape, prepared.constants
    assert len(x) == 1 and x.is_contiguous()
    h = x.new_empty(top_k, E.WIDTH)
    out = x.new_empty(1, top_k, E.HIDDEN)
    gate_up, down = tile.gate_up, tile.down
    _packed_gate_up_gemv_kernel[(top_k * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        x, topk_ids, prepared.gate_up, h, first, count, E=E,
        BLOCK_N=gate_up.block_n, NUM_WARPS=gate_up.num_warps, num_warps=gate_up.num_warps,
        **launch_options(x.device, maxnreg=gate_up.maxnreg),
    )  # fmt: skip
    _packed_down_gemv_kernel[(top_k * triton.cdiv(E.HIDDEN, down.block_n),)](
        h, topk_ids, topk_weights, prepared.down, out, first, count, E=E,
        BLOCK_N=down.block_n, NUM_WARPS=down.num_warps, num_warps=down.num_warps,
        **launch_options(x.device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out
