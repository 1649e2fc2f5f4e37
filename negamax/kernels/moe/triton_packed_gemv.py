"""The experts for up to 8 tokens with packed weights: a program loads all its rows of an expert
before it uses the first value. `kernels/weight_only/triton_gemv.py` has the product.
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


@triton.jit
def _pairs_of_expert(topk_ids_ptr, expert_id, pair, num_tokens, TOP_K: tl.constexpr):
    """The pair of each token that chose the expert of `pair`, [TOKENS], else `pair`, and whether it
    did.
    """
    token = tl.arange(0, TOKENS)[:, None]
    choice = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    pairs = token * TOP_K + choice
    inside = (token < num_tokens) & (choice < TOP_K)
    ids = tl.load(topk_ids_ptr + pairs, mask=inside, other=-1, cache_modifier=".cg")
    hit = (ids == expert_id) & inside
    valid = tl.sum(hit.to(tl.int32), 1) > 0
    return tl.where(valid, tl.sum(tl.where(hit, pairs, 0), 1), pair), valid


@triton.jit(do_not_specialize=["num_tokens", "first_expert", "num_experts"])
def _packed_gate_up_gemv_kernel(
    x_ptr,  # [M, HIDDEN]
    topk_ids_ptr,  # [M, TOP_K] int32
    w,  # gate and up, tensors of a `PackedWeight`
    h_ptr,  # [M * TOP_K, WIDTH]
    num_tokens,
    first_expert,
    num_experts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    SINGLE: tl.constexpr,  # M is 1
    PDL: tl.constexpr,
):
    """BLOCK_N columns of h of all pairs of one expert; the first pair to name it works for it.

    grid: pairs * WIDTH / BLOCK_N
    """
    P: tl.constexpr = E.GATE_UP
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    pair, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    offs_m = tl.arange(0, TOKENS)
    wait_then_launch_dependents(PDL)
    expert_id = tl.load(topk_ids_ptr + pair)
    expert = expert_id - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    if SINGLE:
        pairs, valid = pair + offs_m % num_tokens, offs_m < num_tokens
    else:
        pairs, valid = _pairs_of_expert(topk_ids_ptr, expert_id, pair, num_tokens, TOP_K)
        if tl.min(pairs, 0) != pair:
            return
    offs = fragment_rows(2 * BLOCK_N)
    rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
    rows += expert * (2 * E.WIDTH)
    loaded = load_weight(w, rows, num_experts * (2 * E.WIDTH), P, NUM_WARPS)
    tl.debug_barrier()  # ptxas moves loads down to their uses, but not past it
    both = multiply_weight(loaded, x_ptr, pairs // TOP_K, P, 2 * BLOCK_N, NUM_WARPS)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if P.ROW_SCALE:
        offs = tl.arange(0, 2 * BLOCK_N)
        rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
        both *= tl.load(w[3] + expert * (2 * E.WIDTH) + rows)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, TOKENS)), (1, 2, 0)))
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = swiglu(gate, up, ACTIVATION)
    inside = (offs_n < E.WIDTH)[:, None] & valid[None, :]
    h_ptrs = h_ptr + pairs[None, :] * E.WIDTH + offs_n[:, None]
    tl.store(h_ptrs, y.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "first_expert", "num_experts"])
def _packed_down_gemv_kernel(
    h_ptr,  # [M * TOP_K, WIDTH]
    topk_ids_ptr,  # [M, TOP_K] int32
    topk_weights_ptr,  # [M, TOP_K] fp32
    w,  # down, tensors of a `PackedWeight`
    out_ptr,  # [M, TOP_K, HIDDEN]
    num_tokens,
    first_expert,
    num_experts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    SINGLE: tl.constexpr,  # M is 1
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of all pairs of one expert, or the zeros of a pair of none of this rank.

        grid: pairs * HIDDEN / BLOCK_N

    `topk_ids` and `topk_weights` are older than the kernel before this one, so they may be read
    ahead of it (past L1), and so may the weights.
    """
    P: tl.constexpr = E.DOWN
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N)
    pair, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    offs_m = tl.arange(0, TOKENS)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    n_inside = offs_n < E.HIDDEN
    expert_id = tl.load(topk_ids_ptr + pair, cache_modifier=".cg")
    expert = expert_id - first_expert
    if (expert < 0) | (expert >= num_experts):
        wait_then_launch_dependents(PDL)
        zeros = tl.zeros((BLOCK_N,), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pair * E.HIDDEN + offs_n, zeros, mask=n_inside)
        return
    if SINGLE:
        pairs, valid = pair + offs_m % num_tokens, offs_m < num_tokens
    else:
        pairs, valid = _pairs_of_expert(topk_ids_ptr, expert_id, pair, num_tokens, TOP_K)
        if tl.min(pairs, 0) != pair:
            wait_then_launch_dependents(PDL)
            return
    rows = expert * E.HIDDEN + tl.minimum(first_n + fragment_rows(BLOCK_N), E.HIDDEN - 1)
    loaded = load_weight(w, rows, num_experts * E.HIDDEN, P, NUM_WARPS)
    weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0, cache_modifier=".cg")
    wait_then_launch_dependents(PDL)
    acc = multiply_weight(loaded, h_ptr, pairs, P, BLOCK_N, NUM_WARPS)
    if P.ROW_SCALE:
        acc *= tl.load(w[3] + expert * E.HIDDEN + offs_n, mask=n_inside, other=0.0)[:, None]
    acc *= weight[None, :]
    out_ptrs = out_ptr + pairs[None, :] * E.HIDDEN + offs_n[:, None]
    inside = n_inside[:, None] & valid[None, :]
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
    """-> [M, top_k, hidden]; M at most TOKENS."""
    (M, top_k), E = topk_ids.shape, prepared.constants
    assert x.is_contiguous()
    h = x.new_empty(M * top_k, E.WIDTH)
    out = x.new_empty(M, top_k, E.HIDDEN)
    shared = {"E": E, "TOP_K": top_k, "SINGLE": M == 1}
    gate_up, down = tile.gate_up, tile.down
    _packed_gate_up_gemv_kernel[(M * top_k * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        x, topk_ids, prepared.gate_up, h, M, first, count,
        BLOCK_N=gate_up.block_n, NUM_WARPS=gate_up.num_warps, num_warps=gate_up.num_warps,
        **shared, **launch_options(x.device, maxnreg=gate_up.maxnreg),
    )  # fmt: skip
    _packed_down_gemv_kernel[(M * top_k * triton.cdiv(E.HIDDEN, down.block_n),)](
        h, topk_ids, topk_weights, prepared.down, out, M, first, count,
        BLOCK_N=down.block_n, NUM_WARPS=down.num_warps, num_warps=down.num_warps,
        **shared, **launch_options(x.device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out
