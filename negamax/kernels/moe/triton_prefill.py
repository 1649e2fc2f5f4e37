"""The experts for prefills, *large_m*: the pairs (token, choice) are sorted by expert, then both
products run over tiles of one expert's tokens (`kernels/moe/triton.py`).

    topk_ids           [M, TOP_K]      2 0 | 0 5 | 2 1 | ..    pair = token * TOP_K + choice
    sorted_token_ids   [M * TOP_K]     1 2 .. | 5 .. | 0 4 ..  pairs, expert by expert, those of
                                                               other ranks' experts last
    expert_counts      [num_experts]   pairs of each expert

Nothing is padded: a program finds its expert and its pairs from expert_counts, and the grid has one
tile more per expert than the pairs would fill.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.kernels.activations import QuantizedActivations, model_dtype
from negamax.kernels.launch.triton import dot, launch_options, wait_then_launch_dependents
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_shared import (
    BLOCK,
    PreparedExperts,
    empty_intermediate,
    group_scale,
    operands,
)


@triton.jit
def _local_experts(topk_ids_ptr, pairs, end, first_expert, num_experts):
    """Which of this rank's experts each pair chose: 0 .. num_experts - 1; -1: none of them."""
    expert = tl.load(topk_ids_ptr + pairs, mask=pairs < end, other=-1) - first_expert
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "span", "first_expert", "num_experts"])
def _count_pairs_kernel(
    topk_ids_ptr,  # [num_pairs] int32
    counts_ptr,  # [programs, EXPERTS_POW2] int32
    num_pairs,
    span,
    first_expert,
    num_experts,
    EXPERTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts[p, e]: how many of the `span` pairs of program p chose expert first_expert + e."""
    wait_then_launch_dependents(PDL)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, num_pairs)
    counts = tl.zeros([EXPERTS_POW2], tl.int32)
    for start in range(begin, end, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        expert = _local_experts(topk_ids_ptr, pairs, end, first_expert, num_experts)
        counts += tl.histogram(expert, EXPERTS_POW2, mask=expert >= 0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS_POW2 + tl.arange(0, EXPERTS_POW2), counts)


@triton.jit(do_not_specialize=["num_pairs", "span", "first_expert", "num_experts"])
def _sort_pairs_kernel(
    topk_ids_ptr,  # [num_pairs] int32
    counts_ptr,  # [programs, EXPERTS_POW2] int32
    sorted_token_ids_ptr,  # [num_pairs] int32
    expert_counts_ptr,  # [num_experts] int32
    num_pairs,
    span,
    first_expert,
    num_experts,
    EXPERTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,  # whose counts are added up at a time
    PDL: tl.constexpr,
):
    """A counting sort: the places of program p's pairs of an expert begin behind all pairs of
    smaller experts and those of the programs before p.
    """
    wait_then_launch_dependents(PDL)
    experts, offs = tl.arange(0, EXPERTS_POW2), tl.arange(0, CHUNK)
    own, num_programs = tl.program_id(0), tl.num_programs(0)
    all_counts = tl.zeros([PROGRAMS, EXPERTS_POW2], tl.int32)
    earlier_counts = tl.zeros([PROGRAMS, EXPERTS_POW2], tl.int32)
    for first in range(0, num_programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)[:, None]
        counts = tl.load(
            counts_ptr + program * EXPERTS_POW2 + experts[None, :],
            mask=program < num_programs,
            other=0,
        )
        all_counts += counts
        earlier_counts += tl.where(program < own, counts, 0)
    totals, earlier = tl.sum(all_counts, 0), tl.sum(earlier_counts, 0)
    if own == 0:
        tl.store(expert_counts_ptr + experts, totals, mask=experts < num_experts)
    begin = own * span
    end = tl.minimum(begin + span, num_pairs)
    next_local = tl.cumsum(totals, 0) - totals + earlier
    next_other = tl.sum(totals, 0) + begin - tl.sum(earlier, 0)
    for start in range(begin, end, CHUNK):
        pairs = start + offs
        expert = _local_experts(topk_ids_ptr, pairs, end, first_expert, num_experts)
        same_before = (expert[None, :] == expert[:, None]) & (offs[None, :] < offs[:, None])
        rank = tl.sum(same_before.to(tl.int32), 1)
        place = tl.where(expert < 0, next_other, tl.gather(next_local, tl.maximum(expert, 0), 0))
        place += rank
        tl.store(sorted_token_ids_ptr + place, pairs, mask=pairs < end)
        next_local += tl.histogram(expert, EXPERTS_POW2, mask=expert >= 0)
        next_other += tl.sum((expert < 0).to(tl.int32), 0)


@triton.jit
def _expert_of_tile(
    expert_counts_ptr, tile, num_experts, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of tile number `tile`, the tile's first place in sorted_token_ids, and the place
    behind the expert's last.

    An expert >= num_experts: the tile is one of other ranks' pairs, or lies behind all pairs.
    """
    experts = tl.arange(0, EXPERTS_POW2)
    counts = tl.load(expert_counts_ptr + experts, mask=experts < num_experts, other=0)
    tile_ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0)
    is_before = (tile_ends <= tile).to(tl.int32)
    expert = tl.sum(is_before, 0)
    begin = tl.sum(counts * is_before, 0)
    offset = (tile - tl.max(tile_ends * is_before, 0)) * BLOCK_M
    end = begin + tl.sum(tl.where(experts == expert, counts, 0), 0)
    return expert, begin + offset, end


@triton.jit
def _product(
    x_ptrs, x_scale_ptr, w, w_scale_ptr, tokens, valid, first_n, last_n,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] fp32: the rows at x_ptrs times rows first_n .. first_n + BLOCK_N - 1 of w,
    up to last_n.
    """
    EVEN: tl.constexpr = E.HIDDEN % BLOCK_K == 0 and E.WIDTH % BLOCK_N == 0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if E.FP8:
        for k in tl.range(0, E.HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
            x = tl.load(x_ptrs + k, mask=valid[:, None], other=0.0)
            x_scale_ptrs = x_scale_ptr + tokens * (E.HIDDEN // BLOCK) + k // BLOCK
            x_scale = tl.load(x_scale_ptrs, mask=valid, other=0.0)
            product = tl.dot(x, tl.trans(w.load([first_n, k])))
            acc += product * (x_scale * tl.load(w_scale_ptr + k // BLOCK))[:, None]
    else:
        offs_n, offs_k = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        w_ptrs = w + offs_n.to(tl.int64)[:, None] * E.HIDDEN + offs_k[None, :]
        for k in tl.range(0, E.HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
            k_inside = (k + offs_k < E.HIDDEN)[None, :] | EVEN
            x = tl.load(x_ptrs + k, mask=valid[:, None] & k_inside, other=0.0)
            inside = ((offs_n <= last_n)[:, None] & k_inside) | EVEN
            acc = dot(x, tl.trans(tl.load(w_ptrs + k, mask=inside, other=0.0)), acc)
    return acc


@triton.jit(do_not_specialize=["num_experts"])
def _gate_up_large_m_kernel(
    x_ptr,  # [M, HIDDEN]
    x_scale_ptr,  # [M, HIDDEN / 128] fp32; scales are read and written with FP8 only
    w,  # [num_experts * 2 * WIDTH, HIDDEN]; FP8: a descriptor of it, blocks [BLOCK_N, BLOCK_K]
    w_scale_ptr,  # [num_experts, 2 * WIDTH / 128, HIDDEN / 128] fp32
    h_ptr,  # [M * TOP_K, WIDTH] in the dtype of w, in the order of sorted_token_ids
    h_scale_ptr,  # [M * TOP_K, WIDTH / 128] fp32
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
    """h[BLOCK_M, BLOCK_N] of one expert's pairs: silu(x gate^T) * (x up^T). The tokens are the tall
    operand; FP8 weights come through TMA.

        grid: tiles of pairs * WIDTH / BLOCK_N
        x rows of sorted_token_ids[begin ..] / TOP_K    w of the expert
        [BLOCK_M, HIDDEN]                               gate, then up: [BLOCK_N, HIDDEN]^T

    Gate and up one after the other: x is read twice, but a multiprocessor holds two programs with
    long pipelines.
    """
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    wait_then_launch_dependents(PDL)
    expert, begin, end = _expert_of_tile(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    if expert >= num_experts:
        return
    first_n = tl.program_id(0) % TILES_N * BLOCK_N
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    tokens = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * E.HIDDEN + tl.arange(0, BLOCK_K)[None, :]
    row = expert * (2 * E.WIDTH)
    w_scale_ptr += (expert * (2 * E.WIDTH // BLOCK) + first_n // BLOCK) * (E.HIDDEN // BLOCK)
    gate = _product(x_ptrs, x_scale_ptr, w, w_scale_ptr, tokens, valid,
                    row + first_n, row + E.WIDTH - 1,
                    E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    row += E.WIDTH
    w_scale_ptr += (E.WIDTH // BLOCK) * (E.HIDDEN // BLOCK)
    up = _product(x_ptrs, x_scale_ptr, w, w_scale_ptr, tokens, valid,
                  row + first_n, row + E.WIDTH - 1,
                  E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = swiglu(gate, up, ACTIVATION)
    if E.FP8:
        scale = group_scale(y, 1, h_ptr.dtype.element_ty)
        h_scale_ptrs = h_scale_ptr + places * (E.WIDTH // BLOCK_N) + first_n // BLOCK_N
        tl.store(h_scale_ptrs, scale, mask=valid)
        y = y / scale[:, None]
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * E.WIDTH + offs_n[None, :]
    inside = valid[:, None] & (offs_n < E.WIDTH)[None, :]
    tl.store(h_ptrs, y.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _zero_pairs(
    sorted_token_ids_ptr, out_ptr, begin, end, first_n,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REPEAT_N: tl.constexpr,
):  # fmt: skip
    """Zeros in the results of the pairs at places begin .. end - 1, REPEAT_N tiles of columns."""
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    pairs = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32).to(out_ptr.dtype.element_ty)
    for tile in range(REPEAT_N):
        inside = valid[:, None] & (offs_n + tile * BLOCK_N < E.HIDDEN)[None, :]
        tl.store(out_ptrs + tile * BLOCK_N, zeros, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _down_large_m_kernel(
    h_ptr,  # [M * TOP_K, WIDTH], in the order of sorted_token_ids
    h_scale_ptr,  # [M * TOP_K, WIDTH / 128] fp32
    topk_weights_ptr,  # [M, TOP_K] fp32
    w_ptr,  # [num_experts, HIDDEN, WIDTH]
    w_scale_ptr,  # [num_experts, HIDDEN / 128, WIDTH / 128] fp32
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
    RESIDENT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pairs, REPEAT_N * BLOCK_N] of BLOCK_M pairs of one expert, times their routing weights;
    zeros for the pairs of other ranks.

        grid: tiles of pairs * HIDDEN / (BLOCK_N * REPEAT_N)
        h [BLOCK_M, WIDTH]     w [BLOCK_N, WIDTH]^T, tile after tile     ->  rows `pairs` of out

    RESIDENT (FP8, narrow experts): h stays in shared memory; else it is read again for every tile
    of w.
    """
    EVEN: tl.constexpr = E.WIDTH % BLOCK_K == 0 and E.HIDDEN % BLOCK_N == 0
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N * REPEAT_N)
    STEPS: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_K)
    K_BLOCKS: tl.constexpr = E.WIDTH // BLOCK
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
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * E.WIDTH + offs_k[None, :]
    w_ptr += expert.to(tl.int64) * (E.HIDDEN * E.WIDTH)
    w_ptrs = w_ptr + offs_n[:, None] * E.WIDTH + offs_k[None, :]
    w_scale_ptr += expert * (E.HIDDEN // BLOCK * K_BLOCKS)
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
    if RESIDENT:
        hs, h_scales = (), ()
        for step in tl.static_range(STEPS):
            hs = hs + (tl.load(h_ptrs + step * BLOCK_K, mask=valid[:, None], other=0.0),)
            h_scale = tl.load(h_scale_ptr + places * STEPS + step, mask=valid, other=0.0)
            h_scales = h_scales + (h_scale * topk_weight,)
        for tile in tl.range(0, REPEAT_N, num_stages=NUM_STAGES):
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for step in tl.static_range(STEPS):
                w = tl.trans(tl.load(w_ptrs + tile * (BLOCK_N * E.WIDTH) + step * BLOCK_K))
                block = (first_n + tile * BLOCK_N) // BLOCK * K_BLOCKS + step * BLOCK_K // BLOCK
                acc += (
                    tl.dot(hs[step], w) * (h_scales[step] * tl.load(w_scale_ptr + block))[:, None]
                )
            tl.store(
                out_ptrs + tile * BLOCK_N, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None]
            )
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, REPEAT_N * STEPS, num_stages=NUM_STAGES):
            tile = step // STEPS
            k = step % STEPS * BLOCK_K
            k_inside = (k + offs_k < E.WIDTH)[None, :] | EVEN
            n_inside = offs_n + tile * BLOCK_N < E.HIDDEN
            h = tl.load(h_ptrs + k, mask=valid[:, None] & k_inside, other=0.0)
            tile_ptrs = w_ptrs + tile * (BLOCK_N * E.WIDTH) + k
            w = tl.trans(tl.load(tile_ptrs, mask=(n_inside[:, None] & k_inside) | EVEN, other=0.0))
            if E.FP8:
                h_scale_ptrs = h_scale_ptr + places * STEPS + k // BLOCK_K
                scale = tl.load(h_scale_ptrs, mask=valid, other=0.0) * topk_weight
                row_block = (first_n + tile * BLOCK_N) // BLOCK * K_BLOCKS
                scale *= tl.load(w_scale_ptr + row_block + k // BLOCK)
                acc += tl.dot(h, w) * scale[:, None]
            else:
                acc = dot(h, w, acc)
            if step % STEPS == STEPS - 1:
                out = acc if E.FP8 else acc * topk_weight[:, None]
                inside = valid[:, None] & n_inside[None, :]
                tl.store(out_ptrs + tile * BLOCK_N, out.to(out_ptr.dtype.element_ty), mask=inside)
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


# --- host side -----------------------------------------------------------------------------------


def experts_large_m(
    x: Tensor | QuantizedActivations,
    topk_ids: Tensor,
    topk_weights: Tensor,
    prepared: PreparedExperts,
    *,
    first: int,
    count: int,
) -> Tensor:
    """-> [M, top_k, hidden]. Whoever reads that next adds up the choices on the way: a launch and 2
    x 2 bytes a value less.
    """
    (num_tokens, top_k), device, E = topk_ids.shape, topk_ids.device, prepared.constants
    q, scale = operands(x, prepared)
    num_pairs = num_tokens * top_k
    sizes = tiles.tiles_for(device)
    tile = sizes.large_m(width=E.WIDTH, fp8=E.FP8)
    gate_up, down = tile.gate_up, tile.down
    sorted_token_ids, expert_counts = sort_pairs(topk_ids, first=first, count=count)
    h, h_scale = empty_intermediate(num_pairs, q, E.WIDTH)
    shared = {"E": E, "EXPERTS_POW2": triton.next_power_of_2(count), **launch_options(device)}
    w: Tensor | TensorDescriptor = prepared.gate_up
    if E.FP8:
        w = TensorDescriptor.from_tensor(w.view(-1, E.HIDDEN), [gate_up.block_n, gate_up.block_k])
    # an upper bound: each expert may waste one tile
    tiles_m = min(num_pairs, num_pairs // gate_up.block_m + count)
    _gate_up_large_m_kernel[(tiles_m * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        q, scale, w, prepared.gate_up_scale, h, h_scale, sorted_token_ids, expert_counts, count,
        TOP_K=top_k, BLOCK_M=gate_up.block_m, BLOCK_N=gate_up.block_n, BLOCK_K=gate_up.block_k,
        NUM_STAGES=gate_up.num_stages, NUM_WARPS=gate_up.num_warps, num_warps=gate_up.num_warps,
        **shared,
    )  # fmt: skip
    out = torch.empty(num_tokens, top_k, E.HIDDEN, dtype=model_dtype(x), device=device)
    # and so may the pairs of other ranks
    tiles_m = min(num_pairs, num_pairs // down.block_m + count + 1)
    tiles_n = triton.cdiv(E.HIDDEN, down.block_n)
    repeat_n = gcd(tile.repeat_n, tiles_n)
    _down_large_m_kernel[(tiles_m * tiles_n // repeat_n,)](
        h, h_scale, topk_weights, prepared.down, prepared.down_scale, out, sorted_token_ids,
        expert_counts, num_pairs, count,
        BLOCK_M=down.block_m, BLOCK_N=down.block_n, BLOCK_K=down.block_k, REPEAT_N=repeat_n,
        RESIDENT=tile.resident, NUM_STAGES=down.num_stages, NUM_WARPS=down.num_warps,
        num_warps=down.num_warps, **shared,
    )  # fmt: skip
    return out


def sort_pairs(topk_ids: Tensor, *, first: int, count: int) -> tuple[Tensor, Tensor]:
    """topk_ids [M, top_k] -> sorted_token_ids [M * top_k] int32, expert_counts [count] int32."""
    num_pairs = topk_ids.numel()
    span = max(1, triton.cdiv(num_pairs, tiles.SORT_PROGRAMS * tiles.SORT_CHUNK)) * tiles.SORT_CHUNK
    programs, experts_pow2 = triton.cdiv(num_pairs, span), triton.next_power_of_2(count)
    sorted_token_ids = topk_ids.new_empty(num_pairs)
    counts = topk_ids.new_empty(programs, experts_pow2)
    expert_counts = topk_ids.new_empty(count)
    numbers = (num_pairs, span, first, count)
    shared = {"EXPERTS_POW2": experts_pow2, "num_warps": 8, **launch_options(topk_ids.device)}
    _count_pairs_kernel[(programs,)](topk_ids, counts, *numbers, CHUNK=tiles.COUNT_CHUNK, **shared)
    _sort_pairs_kernel[(programs,)](
        topk_ids, counts, sorted_token_ids, expert_counts, *numbers,
        CHUNK=tiles.SORT_CHUNK, PROGRAMS=tiles.SORT_BLOCK, **shared,
    )  # fmt: skip
    return sorted_token_ids, expert_counts
