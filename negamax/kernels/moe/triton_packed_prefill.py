"""The experts for prefills with packed weights of 4 and 8 bits: *large_m* (`triton_prefill.py`)
with a tile of the weight as the tall operand and the tokens as the short one.

Each weight is unpacked once for all tokens of a tile. So tiles are large, and the last one of an
expert, which has what is left, is as small as fits, of three sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, unquantized
from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_packed import packed_down, packed_gate_up
from negamax.kernels.moe.triton_prefill import _expert_of_tile, _zero_pairs, sort_pairs
from negamax.kernels.moe.triton_shared import PreparedExperts


@triton.jit
def _gate_up_tile(
    x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end, first_n,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """h[BLOCK_M, BLOCK_N] of the pairs at places begin .. end - 1, all of one expert."""
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    tokens = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
    y = packed_gate_up(x_ptr, w, expert, num_experts, first_n, tokens, valid,
                       E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * E.WIDTH + offs_n[None, :]
    inside = valid[:, None] & (offs_n < E.WIDTH)[None, :]
    tl.store(h_ptrs, tl.trans(y).to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def _gate_up_packed_kernel(
    x_ptr,  # [M, HIDDEN]
    w,  # tensors of a `PackedWeight`
    h_ptr,  # [M * TOP_K, WIDTH], in the order of sorted_token_ids
    sorted_token_ids_ptr,  # [M * TOP_K] int32
    expert_counts_ptr,  # [num_experts] int32
    num_experts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[BLOCK_M, BLOCK_N] of one expert's pairs: silu(x gate^T) * (x up^T).

    grid: tiles of pairs * WIDTH / BLOCK_N
    """
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    wait_then_launch_dependents(PDL)
    expert, begin, end = _expert_of_tile(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    if expert >= num_experts:
        return
    first_n = tl.program_id(0) % TILES_N * BLOCK_N
    if end - begin > BLOCK_M // 2:
        _gate_up_tile(x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end,
                      first_n, E, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                      NUM_WARPS)  # fmt: skip
    elif end - begin > BLOCK_M // 4:
        _gate_up_tile(x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end,
                      first_n, E, TOP_K, BLOCK_M // 2, BLOCK_N, BLOCK_K, NUM_STAGES,
                      NUM_WARPS)  # fmt: skip
    else:
        _gate_up_tile(x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end,
                      first_n, E, TOP_K, BLOCK_M // 4, BLOCK_N, BLOCK_K, NUM_STAGES,
                      NUM_WARPS)  # fmt: skip


@triton.jit
def _down_tile(
    h_ptr, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end,
    first_n, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """out[pairs, BLOCK_N] of the pairs at places begin .. end - 1, BLOCK_M at most, of one expert,
    times their routing weights.
    """
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    acc = packed_down(h_ptr, w, expert, num_experts, first_n, places, valid,
                      E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
    pairs = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    topk_weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
    out = tl.trans(acc * topk_weight[None, :]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
    tl.store(out_ptrs, out, mask=valid[:, None] & (offs_n < E.HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _down_packed_kernel(
    h_ptr,  # [M * TOP_K, WIDTH], in the order of sorted_token_ids
    topk_weights_ptr,  # [M, TOP_K] fp32
    w,  # tensors of a `PackedWeight`
    out_ptr,  # [M, TOP_K, HIDDEN]
    sorted_token_ids_ptr,  # [M * TOP_K] int32
    expert_counts_ptr,  # [num_experts] int32
    num_pairs,
    num_experts,
    E: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pairs, BLOCK_N] of BLOCK_M pairs of one expert, times their routing weights; zeros for
    the pairs of other ranks.

        grid: tiles of pairs * HIDDEN / BLOCK_N
    """
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N)
    wait_then_launch_dependents(PDL)
    expert, begin, end = _expert_of_tile(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    first_n = tl.program_id(0) % TILES_N * BLOCK_N
    if expert >= num_experts:
        if begin < num_pairs:
            _zero_pairs(sorted_token_ids_ptr, out_ptr, begin, num_pairs, first_n,
                        E, BLOCK_M, BLOCK_N, 1)  # fmt: skip
        return
    if end - begin > BLOCK_M // 2:
        _down_tile(h_ptr, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert, num_experts,
                   begin, end, first_n, E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                   NUM_WARPS)  # fmt: skip
    elif end - begin > BLOCK_M // 4:
        _down_tile(h_ptr, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert, num_experts,
                   begin, end, first_n, E, BLOCK_M // 2, BLOCK_N, BLOCK_K, NUM_STAGES,
                   NUM_WARPS)  # fmt: skip
    else:
        _down_tile(h_ptr, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert, num_experts,
                   begin, end, first_n, E, BLOCK_M // 4, BLOCK_N, BLOCK_K, NUM_STAGES,
                   NUM_WARPS)  # fmt: skip


def experts_packed_large_m(
    x: Tensor | QuantizedActivations,
    topk_ids: Tensor,
    topk_weights: Tensor,
    prepared: PreparedExperts,
    *,
    first: int,
    count: int,
) -> Tensor:
    """-> [M, top_k, hidden], to be summed over the choices."""
    (num_tokens, top_k), device, E = topk_ids.shape, topk_ids.device, prepared.constants
    x = unquantized(x)
    assert x.is_contiguous() and E.GATE_UP is not None
    num_pairs = num_tokens * top_k
    tile = tiles.tiles_for(device).packed(M=num_tokens, width=E.WIDTH, gate_up=E.GATE_UP)
    gate_up, down = tile.gate_up, tile.down
    sorted_token_ids, expert_counts = sort_pairs(topk_ids, first=first, count=count)
    h = x.new_empty(num_pairs, E.WIDTH)
    shared = {"E": E, "EXPERTS_POW2": triton.next_power_of_2(count)}
    # an upper bound: each expert may waste one tile
    tiles_m = min(num_pairs, num_pairs // gate_up.block_m + count)
    _gate_up_packed_kernel[(tiles_m * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        x, prepared.gate_up, h, sorted_token_ids, expert_counts, count,
        TOP_K=top_k, BLOCK_M=gate_up.block_m, BLOCK_N=gate_up.block_n, BLOCK_K=gate_up.block_k,
        NUM_STAGES=gate_up.num_stages, NUM_WARPS=gate_up.num_warps, num_warps=gate_up.num_warps,
        **shared, **launch_options(device, maxnreg=gate_up.maxnreg),
    )  # fmt: skip
    out = torch.empty(num_tokens, top_k, E.HIDDEN, dtype=x.dtype, device=device)
    # and so may the pairs of other ranks
    tiles_m = min(num_pairs, num_pairs // down.block_m + count + 1)
    _down_packed_kernel[(tiles_m * triton.cdiv(E.HIDDEN, down.block_n),)](
        h, topk_weights, prepared.down, out, sorted_token_ids, expert_counts, num_pairs, count,
        BLOCK_M=down.block_m, BLOCK_N=down.block_n, BLOCK_K=down.block_k,
        NUM_STAGES=down.num_stages, NUM_WARPS=down.num_warps, num_warps=down.num_warps, **shared,
        **launch_options(device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out
