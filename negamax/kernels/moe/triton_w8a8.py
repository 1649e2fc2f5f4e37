"""The experts for prefills with int8 or E4M3 on both sides: weights with a scale per row in the
layout of packed weights, x with a scale per token, h with one per pair and BLOCK_N of its columns.

The way is that of *large_m* (`triton_prefill.py`): pairs sorted by expert, two products over tiles
of one expert's tokens. Gate and up need no scale before their sums are complete. Those of down add
up in fp32, block by block of h: a scale per pair for all its columns would need a pass of its own.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_prefill import _expert_of_tile, _zero_pairs, sort_pairs
from negamax.kernels.moe.triton_shared import PreparedExperts
from negamax.kernels.weight_only.triton_rounding import (
    add_product,
    round_activations,
    round_rows,
    rounded_dtype,
    scale_of_rows,
    scaled,
)


@triton.jit
def _product(
    x_ptrs, x_scale, valid, w_desc, first_row, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] fp32, without the scales of w: the rows at x_ptrs times rows first_row ..
    first_row + BLOCK_N - 1 of w.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if w_desc.dtype == tl.int8 else tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        inside = valid[:, None] & ((offs_k < K - k)[None, :] | (K % BLOCK_K == 0))
        x = tl.load(x_ptrs + k, mask=inside, other=0.0)
        acc = add_product(acc, x, tl.trans(w_desc.load([first_row, k])), x_scale)
    return scaled(acc, x_scale)


@triton.jit(do_not_specialize=["num_experts"])
def _gate_up_w8a8_kernel(
    x_ptr,  # [M, K]
    x_scale_ptr,  # [M] fp32
    w_desc,  # descriptor of [num_experts * 2 * WIDTH, K], blocks [BLOCK_N, BLOCK_K]
    w_scale_ptr,  # [num_experts * 2 * WIDTH] fp32
    h_ptr,  # [M * TOP_K, WIDTH filled up], in the order of sorted_token_ids
    h_scale_ptr,  # [M * TOP_K, WIDTH / BLOCK_N] fp32
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
    PDL: tl.constexpr,
):
    """h[BLOCK_M, BLOCK_N] of one expert's pairs: silu(x gate^T) * (x up^T), rounded.

    grid: tiles of pairs * WIDTH / BLOCK_N
    """
    K: tl.constexpr = E.GATE_UP.K_PACKED
    H_WIDTH: tl.constexpr = E.DOWN.K_PACKED
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    wait_then_launch_dependents(PDL)
    expert, begin, end = _expert_of_tile(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    if expert >= num_experts:
        return
    tile_n = tl.program_id(0) % TILES_N
    places = begin + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid, inside = places < end, offs_n < E.WIDTH
    tokens = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    row = expert * (2 * E.WIDTH) + tile_n * BLOCK_N
    x_scale = tl.load(x_scale_ptr + tokens, mask=valid, other=0.0)
    gate = _product(x_ptrs, x_scale, valid, w_desc, row,
                    K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    up = _product(x_ptrs, x_scale, valid, w_desc, row + E.WIDTH,
                  K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    w_scale_ptrs = w_scale_ptr + expert * (2 * E.WIDTH) + offs_n
    gate *= tl.load(w_scale_ptrs, mask=inside, other=0.0)[None, :]
    up *= tl.load(w_scale_ptrs + E.WIDTH, mask=inside, other=0.0)[None, :]
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = tl.where(inside[None, :], swiglu(gate, up, ACTIVATION), 0.0)
    scale = scale_of_rows(y, dtype)
    tl.store(h_scale_ptr + places * TILES_N + tile_n, scale, mask=valid)
    h = round_rows(y, scale, dtype, BLOCK_M, BLOCK_N)
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * H_WIDTH + offs_n[None, :]
    tl.store(h_ptrs, h, mask=valid[:, None] & (offs_n < H_WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _down_w8a8_kernel(
    h_ptr,  # [M * TOP_K, WIDTH filled up], in the order of sorted_token_ids
    h_scale_ptr,  # [M * TOP_K, WIDTH / BLOCK_K] fp32
    topk_weights_ptr,  # [M, TOP_K] fp32
    w_desc,  # descriptor of [num_experts * HIDDEN, WIDTH filled up], blocks [BLOCK_N, BLOCK_K]
    w_scale_ptr,  # [num_experts * HIDDEN] fp32
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
    REPEAT_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pairs, REPEAT_N * BLOCK_N] of BLOCK_M pairs of one expert, times their routing weights;
    zeros for the pairs of other ranks.

        grid: tiles of pairs * HIDDEN / (BLOCK_N * REPEAT_N)
    """
    K: tl.constexpr = E.DOWN.K_PACKED
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N * REPEAT_N)
    STEPS: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_K)
    wait_then_launch_dependents(PDL)
    expert, begin, end = _expert_of_tile(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    first_n = tl.program_id(0) % TILES_N * (BLOCK_N * REPEAT_N)
    if expert >= num_experts:
        if begin < num_pairs:
            _zero_pairs(sorted_token_ids_ptr, out_ptr, begin, num_pairs, first_n,
                        E, BLOCK_M, BLOCK_N, REPEAT_N)  # fmt: skip
        return
    places, offs_k = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    pairs = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    topk_weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * K + offs_k[None, :]
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, REPEAT_N * STEPS, num_stages=NUM_STAGES):
        tile, block = step // STEPS, step % STEPS
        inside = valid[:, None] & ((offs_k < K - block * BLOCK_K)[None, :] | (K % BLOCK_K == 0))
        h = tl.load(h_ptrs + block * BLOCK_K, mask=inside, other=0.0)
        row = expert * E.HIDDEN + first_n + tile * BLOCK_N
        w = tl.trans(w_desc.load([row, block * BLOCK_K]))
        scale = tl.load(h_scale_ptr + places * STEPS + block, mask=valid, other=0.0) * topk_weight
        if w_desc.dtype == tl.int8:
            acc += tl.dot(h, w, out_dtype=tl.int32).to(tl.float32) * scale[:, None]
        else:
            acc += tl.dot(h, w) * scale[:, None]
        if block == STEPS - 1:
            n_inside = offs_n + tile * BLOCK_N < E.HIDDEN
            w_scale_ptrs = w_scale_ptr + expert * E.HIDDEN + offs_n + tile * BLOCK_N
            out = acc * tl.load(w_scale_ptrs, mask=n_inside, other=0.0)[None, :]
            inside = valid[:, None] & n_inside[None, :]
            tl.store(out_ptrs + tile * BLOCK_N, out.to(out_ptr.dtype.element_ty), mask=inside)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


def experts_w8a8(
    x: Hidden,
    topk_ids: Tensor,
    topk_weights: Tensor,
    prepared: PreparedExperts,
    *,
    first: int,
    count: int,
) -> Tensor:
    """-> [M, top_k, hidden], to be summed over the choices."""
    (num_tokens, top_k), device, E = topk_ids.shape, topk_ids.device, prepared.constants
    assert E.GATE_UP is not None and E.DOWN is not None
    x = unquantized(x).contiguous()
    q, scale = round_activations(x, E.GATE_UP)
    num_pairs = num_tokens * top_k
    tile = tiles.tiles_for(device).w8a8()
    gate_up, down = tile.gate_up, tile.down
    assert gate_up.block_n == down.block_k, "the columns of h that share a scale"
    (w1, *_, w1_scale), (w2, *_, w2_scale) = prepared.gate_up, prepared.down
    dtype = rounded_dtype(E.GATE_UP)
    sorted_token_ids, expert_counts = sort_pairs(topk_ids, first=first, count=count)
    h = q.new_empty(num_pairs, E.DOWN.K_PACKED)
    h_scale = scale.new_empty(num_pairs, triton.cdiv(E.WIDTH, gate_up.block_n))
    shared = {"E": E, "EXPERTS_POW2": triton.next_power_of_2(count), **launch_options(device)}
    # an upper bound: each expert may waste one tile
    tiles_m = min(num_pairs, num_pairs // gate_up.block_m + count)
    _gate_up_w8a8_kernel[(tiles_m * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        q, scale,
        TensorDescriptor.from_tensor(w1.view(dtype), [gate_up.block_n, gate_up.block_k]), w1_scale,
        h, h_scale, sorted_token_ids, expert_counts, count,
        TOP_K=top_k, BLOCK_M=gate_up.block_m, BLOCK_N=gate_up.block_n, BLOCK_K=gate_up.block_k,
        NUM_STAGES=gate_up.num_stages, num_warps=gate_up.num_warps, **shared,
    )  # fmt: skip
    out = torch.empty(num_tokens, top_k, E.HIDDEN, dtype=x.dtype, device=device)
    # and so may the pairs of other ranks
    tiles_m = min(num_pairs, num_pairs // down.block_m + count + 1)
    tiles_n = triton.cdiv(E.HIDDEN, down.block_n)
    repeat_n = gcd(tile.repeat_n, tiles_n)
    _down_w8a8_kernel[(tiles_m * tiles_n // repeat_n,)](
        h, h_scale, topk_weights,
        TensorDescriptor.from_tensor(w2.view(dtype), [down.block_n, down.block_k]), w2_scale,
        out, sorted_token_ids, expert_counts, num_pairs, count,
        BLOCK_M=down.block_m, BLOCK_N=down.block_n, BLOCK_K=down.block_k, REPEAT_N=repeat_n,
        NUM_STAGES=down.num_stages, num_warps=down.num_warps, **shared,
    )  # fmt: skip
    return out
