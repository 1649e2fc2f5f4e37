"""Experts of prefills in Triton (*large_m*). The pairs (token, choice) are sorted by expert, and
each tile of both GEMMs has tokens of one expert (`kernels/moe/triton.py`).

    topk_ids           [M, TOP_K]      2 0 | 0 5 | 2 1 | ..    pair = token * TOP_K + choice
    sorted_token_ids   [M * TOP_K]     1 2 .. | 5 .. | 0 4 ..  pairs in the order of their experts;
                                                               pairs of other ranks' experts last
    expert_counts      [num_experts]   pairs of each expert

The pairs are not padded. A program finds its expert and its pairs from expert_counts. The grid has
one extra tile per expert, because an expert's last tile may be partly empty.

Weights, activations and products of one tile:

    plain      16-bit weights, or FP8 with a scale per 128 x 128; tokens are the tall operand
    packed     weights of 4 or 8 bits are the tall operand. Each weight is unpacked once for all
               tokens of a tile, so tiles are large. An expert's last tile has one of three sizes.
    ROUNDED    8-bit weights with a scale per row are multiplied with 8-bit x and h. x has a scale
               per token, h a scale per pair and BLOCK_N columns. The sums of gate and up are scaled
               when they are complete. The down GEMM scales and adds the product of each block of h
               in fp32.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.kernels import platform
from negamax.kernels.activations import Hidden, model_dtype, unquantized
from negamax.kernels.launch.triton import dot, launch_options, wait_then_launch_dependents
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe import tiles
from negamax.kernels.moe.op import SelectedExperts
from negamax.kernels.moe.triton_shared import (
    BLOCK,
    PreparedExperts,
    compute_group_scale,
    empty_intermediate,
    multiply_packed_down,
    multiply_packed_gate_up,
    select_operands,
)
from negamax.kernels.moe.triton_specialized import LISTED, SIDE, experts_specialized
from negamax.kernels.weight_only.triton_rounding import (
    add_product,
    round_activations,
    round_rows,
    rounded_dtype,
    scale_of_rows,
    scaled,
)


@triton.jit
def _load_local_experts(topk_ids_ptr, pairs, end, first_expert, num_experts):
    """Return the local index (0 .. num_experts - 1) of each pair's expert; -1: on another rank."""
    expert = tl.load(topk_ids_ptr + pairs, mask=pairs < end, other=-1) - first_expert
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "span", "first_expert", "num_experts"])
def _count_pairs_kernel(
    topk_ids_ptr,  # [num_pairs] int32
    counts_ptr,  # [programs, EXPERTS_POW2] int32, written: number of pairs of each expert
    num_pairs,
    span,
    first_expert,
    num_experts,
    EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write counts[p, e]: how many of program p's `span` pairs have expert first_expert + e."""
    wait_then_launch_dependents(PDL)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, num_pairs)
    counts = tl.zeros([EXPERTS_POW2], tl.int32)
    for start in range(begin, end, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        expert = _load_local_experts(topk_ids_ptr, pairs, end, first_expert, num_experts)
        counts += tl.histogram(expert, EXPERTS_POW2, mask=expert >= 0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS_POW2 + tl.arange(0, EXPERTS_POW2), counts)


@triton.jit
def _list_tiles(
    tiles_ptr, totals, own, num_programs, EXPERTS_POW2: tl.constexpr, TILE: tl.constexpr
):
    """Write the list of tiles of `totals` [EXPERTS_POW2] pairs, for `triton_specialized.py`:

    number of tiles | number of pairs | 0 | 0 | tiles, the last expert's first
    tile = expert << 40 | its first index in sorted_token_ids << 8 | number of its pairs
    """
    experts = tl.arange(0, EXPERTS_POW2)
    num_tiles = (totals + TILE - 1) // TILE
    all_tiles, begin = tl.sum(num_tiles, 0), tl.cumsum(totals, 0) - totals
    tile_ptrs = tiles_ptr + LISTED + all_tiles - tl.cumsum(num_tiles, 0)
    for tile in range(own, tl.max(num_tiles, 0), num_programs):
        size = tl.minimum(totals - tile * TILE, TILE)
        number = (experts.to(tl.int64) << 40) | ((begin + tile * TILE).to(tl.int64) << 8) | size
        tl.store(tile_ptrs + tile, number, mask=tile < num_tiles)
    if own == 0:
        offs = tl.arange(0, LISTED)
        header = tl.where(offs == 0, all_tiles, tl.where(offs == 1, tl.sum(totals, 0), 0))
        tl.store(tiles_ptr + offs, header.to(tl.int64))


@triton.jit(do_not_specialize=["num_pairs", "span", "first_expert", "num_experts"])
def _sort_pairs_kernel(
    topk_ids_ptr,  # [num_pairs] int32
    counts_ptr,  # [programs, EXPERTS_POW2] int32, result of `_count_pairs_kernel`
    sorted_token_ids_ptr,  # [num_pairs] int32, written: indices of the pairs, sorted by expert
    # written: without TILE [num_experts] int32, number of pairs of each expert; with TILE > 0
    # [LISTED + tiles] int64, the list of tiles
    tiles_ptr,
    num_pairs,
    span,
    first_expert,
    num_experts,
    EXPERTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,  # number of rows of `counts` that a program adds up at a time
    TILE: tl.constexpr,  # number of pairs per tile of the list, or 0
    PDL: tl.constexpr,
):
    """Sort the pairs by expert with a counting sort. The pairs of one expert are in the order of
    the programs that sort them.
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
    if TILE > 0:
        _list_tiles(tiles_ptr, totals, own, num_programs, EXPERTS_POW2, TILE)
    elif own == 0:
        tl.store(tiles_ptr + experts, totals, mask=experts < num_experts)
    begin = own * span
    end = tl.minimum(begin + span, num_pairs)
    next_local = tl.cumsum(totals, 0) - totals + earlier
    next_other = tl.sum(totals, 0) + begin - tl.sum(earlier, 0)
    for start in range(begin, end, CHUNK):
        pairs = start + offs
        expert = _load_local_experts(topk_ids_ptr, pairs, end, first_expert, num_experts)
        same_before = (expert[None, :] == expert[:, None]) & (offs[None, :] < offs[:, None])
        rank = tl.sum(same_before.to(tl.int32), 1)
        place = tl.where(expert < 0, next_other, tl.gather(next_local, tl.maximum(expert, 0), 0))
        place += rank
        tl.store(sorted_token_ids_ptr + place, pairs, mask=pairs < end)
        next_local += tl.histogram(expert, EXPERTS_POW2, mask=expert >= 0)
        next_other += tl.sum((expert < 0).to(tl.int32), 0)


@triton.jit
def _find_expert(
    expert_counts_ptr, tile, num_experts, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a tile's expert, the tile's first index in sorted_token_ids, the expert's end index.

    The expert is >= num_experts if the tile has pairs of other ranks or is after all pairs.
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
def _multiply(
    x_ptrs, x_scale, w, w_scale_ptr, tokens, valid, first_n, last_n,
    E: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the rows at x_ptrs with BLOCK_N rows of w from first_n to at most last_n ->
    [BLOCK_M, BLOCK_N] fp32. If ROUNDED, the caller loads the tokens' scales into `x_scale` and
    applies the scales of w. With FP8, `x_scale` is a pointer, and this function applies both.
    """
    offs_k = tl.arange(0, BLOCK_K)
    if ROUNDED:
        K: tl.constexpr = E.GATE_UP.K_PACKED
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if w.dtype == tl.int8 else tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inside = valid[:, None] & ((offs_k < K - k)[None, :] | (K % BLOCK_K == 0))
            x = tl.load(x_ptrs + k, mask=inside, other=0.0)
            acc = add_product(acc, x, tl.trans(w.load([first_n, k])), x_scale)
        acc = scaled(acc, x_scale)
    elif E.FP8:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, E.HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
            x = tl.load(x_ptrs + k, mask=valid[:, None], other=0.0)
            scale_ptrs = x_scale + tokens * (E.HIDDEN // BLOCK) + k // BLOCK
            scale = tl.load(scale_ptrs, mask=valid, other=0.0)
            product = tl.dot(x, tl.trans(w.load([first_n, k])))
            acc += product * (scale * tl.load(w_scale_ptr + k // BLOCK))[:, None]
    else:
        EVEN: tl.constexpr = E.HIDDEN % BLOCK_K == 0 and E.WIDTH % BLOCK_N == 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        w_ptrs = w + offs_n.to(tl.int64)[:, None] * E.HIDDEN + offs_k[None, :]
        for k in tl.range(0, E.HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
            k_inside = (k + offs_k < E.HIDDEN)[None, :] | EVEN
            x = tl.load(x_ptrs + k, mask=valid[:, None] & k_inside, other=0.0)
            inside = ((offs_n <= last_n)[:, None] & k_inside) | EVEN
            acc = dot(x, tl.trans(tl.load(w_ptrs + k, mask=inside, other=0.0)), acc)
    return acc


@triton.jit
def _compute_gate_up(
    x_ptr, x_scale_ptr, w, w_scale_ptr, h_ptr, h_scale_ptr, sorted_token_ids_ptr, expert, begin,
    end, first_n,
    E: tl.constexpr, ROUNDED: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute h[BLOCK_M, BLOCK_N] of pairs sorted_token_ids[begin:end], all of one expert.

    x rows of sorted_token_ids[begin ..] / TOP_K    w of the expert
    [BLOCK_M, HIDDEN]                               gate, then up: [BLOCK_N, HIDDEN]^T

    Gate is computed before up, so x is read twice. A program has one accumulator at a time, so two
    programs with long pipelines fit on a multiprocessor.
    """
    K: tl.constexpr = E.GATE_UP.K_PACKED if ROUNDED else E.HIDDEN
    H_WIDTH: tl.constexpr = E.DOWN.K_PACKED if ROUNDED else E.WIDTH
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid, n_inside = places < end, offs_n < E.WIDTH
    tokens = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    gate_row = expert * (2 * E.WIDTH)
    up_row = gate_row + E.WIDTH
    x_scale, up_scale_ptr = x_scale_ptr, w_scale_ptr
    if ROUNDED:
        x_scale = tl.load(x_scale_ptr + tokens, mask=valid, other=0.0)
    elif E.FP8:
        w_scale_ptr += (expert * (2 * E.WIDTH // BLOCK) + first_n // BLOCK) * (E.HIDDEN // BLOCK)
        up_scale_ptr = w_scale_ptr + (E.WIDTH // BLOCK) * (E.HIDDEN // BLOCK)
    gate = _multiply(x_ptrs, x_scale, w, w_scale_ptr, tokens, valid, gate_row + first_n, up_row - 1,
                     E, ROUNDED, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    up = _multiply(x_ptrs, x_scale, w, up_scale_ptr, tokens, valid, up_row + first_n,
                   up_row + E.WIDTH - 1,
                   E, ROUNDED, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    if ROUNDED:
        scale_ptrs = w_scale_ptr + gate_row + offs_n
        gate *= tl.load(scale_ptrs, mask=n_inside, other=0.0)[None, :]
        up *= tl.load(scale_ptrs + E.WIDTH, mask=n_inside, other=0.0)[None, :]
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = swiglu(gate, up, ACTIVATION)
    h_scale_ptrs = h_scale_ptr + places * TILES_N + first_n // BLOCK_N
    if ROUNDED:
        y = tl.where(n_inside[None, :], y, 0.0)
        scale = scale_of_rows(y, dtype)
        tl.store(h_scale_ptrs, scale, mask=valid)
        y = round_rows(y, scale, dtype, BLOCK_M, BLOCK_N)
    elif E.FP8:
        scale = compute_group_scale(y, 1, dtype)
        tl.store(h_scale_ptrs, scale, mask=valid)
        y = y / scale[:, None]
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * H_WIDTH + offs_n[None, :]
    tl.store(h_ptrs, y.to(dtype), mask=valid[:, None] & (offs_n < H_WIDTH)[None, :])


@triton.jit
def _compute_packed_gate_up(
    x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end, first_n,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the same tile of h as `_compute_gate_up`, from packed weights."""
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    tokens = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
    y = multiply_packed_gate_up(x_ptr, w, expert, num_experts, first_n, tokens, valid,
                                E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * E.WIDTH + offs_n[None, :]
    inside = valid[:, None] & (offs_n < E.WIDTH)[None, :]
    tl.store(h_ptrs, tl.trans(y).to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def _gate_up_large_m_kernel(
    x_ptr,  # [M, HIDDEN]; if ROUNDED (8-bit activations), HIDDEN is padded
    x_scale_ptr,  # FP8: [M, HIDDEN / 128] fp32; ROUNDED: [M] fp32; not used otherwise
    w,  # matrix [num_experts * 2 * WIDTH, HIDDEN], or the tensors of a `PackedWeight`;
    # if FP8 or ROUNDED, the TMA descriptor of the matrix with blocks [BLOCK_N, BLOCK_K]
    w_scale_ptr,  # FP8: [num_experts, 2 * WIDTH / 128, HIDDEN / 128]; ROUNDED: one scale per row
    h_ptr,  # [M * TOP_K, WIDTH] in the order of sorted_token_ids; if ROUNDED, WIDTH is padded
    h_scale_ptr,  # [M * TOP_K, WIDTH / BLOCK_N] fp32, written with FP8 or ROUNDED only
    sorted_token_ids_ptr,  # [M * TOP_K] int32, indices of the pairs, sorted by expert
    expert_counts_ptr,  # [num_experts] int32, number of pairs of each expert
    num_experts,
    E: tl.constexpr, ROUNDED: tl.constexpr, TOP_K: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute h[BLOCK_M, BLOCK_N] of one expert's pairs. Grid (pair tiles * WIDTH / BLOCK_N,)."""
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    wait_then_launch_dependents(PDL)
    expert, begin, end = _find_expert(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    if expert >= num_experts:
        return
    first_n = tl.program_id(0) % TILES_N * BLOCK_N
    if ROUNDED or not E.PACKED:
        _compute_gate_up(x_ptr, x_scale_ptr, w, w_scale_ptr, h_ptr, h_scale_ptr,
                         sorted_token_ids_ptr, expert, begin, end, first_n,
                         E, ROUNDED, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    elif end - begin > BLOCK_M // 2:
        _compute_packed_gate_up(x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin,
                                end, first_n, E, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                                NUM_WARPS)  # fmt: skip
    elif end - begin > BLOCK_M // 4:
        _compute_packed_gate_up(x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin,
                                end, first_n, E, TOP_K, BLOCK_M // 2, BLOCK_N, BLOCK_K, NUM_STAGES,
                                NUM_WARPS)  # fmt: skip
    else:
        _compute_packed_gate_up(x_ptr, w, h_ptr, sorted_token_ids_ptr, expert, num_experts, begin,
                                end, first_n, E, TOP_K, BLOCK_M // 4, BLOCK_N, BLOCK_K, NUM_STAGES,
                                NUM_WARPS)  # fmt: skip


@triton.jit
def _zero_pairs(
    sorted_token_ids_ptr, out_ptr, begin, end, first_n,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REPEAT_N: tl.constexpr,
):  # fmt: skip
    """Write zeros to REPEAT_N column tiles of the output of pairs sorted_token_ids[begin:end]."""
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    pairs = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32).to(out_ptr.dtype.element_ty)
    for tile in range(REPEAT_N):
        inside = valid[:, None] & (offs_n + tile * BLOCK_N < E.HIDDEN)[None, :]
        tl.store(out_ptrs + tile * BLOCK_N, zeros, mask=inside)


@triton.jit
def _compute_down(
    h, h_scale_ptr, topk_weights_ptr, w, w_scale_ptr, out_ptr, sorted_token_ids_ptr, expert,
    begin, end, first_n,
    E: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, REPEAT_N: tl.constexpr, RESIDENT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute out[pairs, REPEAT_N * BLOCK_N] of pairs sorted_token_ids[begin:end] of one expert.

    h [BLOCK_M, WIDTH]     w [BLOCK_N, WIDTH]^T, tile after tile     ->  rows `pairs` of out

    With RESIDENT (FP8, narrow experts) h stays in shared memory; else h is read once per tile of w.
    """
    STEPS: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_K)
    K_BLOCKS: tl.constexpr = E.WIDTH // BLOCK
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    pairs = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    topk_weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
    w_row = expert * E.HIDDEN + first_n
    if ROUNDED:
        w_scale_ptr += expert * E.HIDDEN
    elif E.FP8:
        w_scale_ptr += expert * (E.HIDDEN // BLOCK * K_BLOCKS)
    if RESIDENT or not (E.FP8 or ROUNDED):
        EVEN: tl.constexpr = E.WIDTH % BLOCK_K == 0 and E.HIDDEN % BLOCK_N == 0
        offs_k = tl.arange(0, BLOCK_K)
        h_ptrs = h + places.to(tl.int64)[:, None] * E.WIDTH + offs_k[None, :]
        w += expert.to(tl.int64) * (E.HIDDEN * E.WIDTH)
        w_ptrs = w + offs_n[:, None] * E.WIDTH + offs_k[None, :]
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
                w_tile = tl.trans(tl.load(w_ptrs + tile * (BLOCK_N * E.WIDTH) + step * BLOCK_K))
                block = (first_n + tile * BLOCK_N) // BLOCK * K_BLOCKS + step * BLOCK_K // BLOCK
                scale = h_scales[step] * tl.load(w_scale_ptr + block)
                acc += tl.dot(hs[step], w_tile) * scale[:, None]
            out = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_ptrs + tile * BLOCK_N, out, mask=valid[:, None])
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, REPEAT_N * STEPS, num_stages=NUM_STAGES):
            tile, block = step // STEPS, step % STEPS
            k = block * BLOCK_K
            n_inside = offs_n + tile * BLOCK_N < E.HIDDEN
            if E.FP8 or ROUNDED:
                h_tile, w_tile = h.load([begin, k]), tl.trans(w.load([w_row + tile * BLOCK_N, k]))
                h_scale_ptrs = h_scale_ptr + places * STEPS + block
                scale = tl.load(h_scale_ptrs, mask=valid, other=0.0) * topk_weight
                if E.FP8:
                    row_block = (first_n + tile * BLOCK_N) // BLOCK * K_BLOCKS
                    scale *= tl.load(w_scale_ptr + row_block + k // BLOCK)
                if h_tile.dtype == tl.int8:
                    product = tl.dot(h_tile, w_tile, out_dtype=tl.int32).to(tl.float32)
                else:
                    product = tl.dot(h_tile, w_tile)
                acc += product * scale[:, None]
            else:
                k_inside = (k + offs_k < E.WIDTH)[None, :] | EVEN
                h_tile = tl.load(h_ptrs + k, mask=valid[:, None] & k_inside, other=0.0)
                tile_ptrs = w_ptrs + tile * (BLOCK_N * E.WIDTH) + k
                w_mask = (n_inside[:, None] & k_inside) | EVEN
                acc = dot(h_tile, tl.trans(tl.load(tile_ptrs, mask=w_mask, other=0.0)), acc)
            if block == STEPS - 1:
                out = acc
                if ROUNDED:
                    w_scale_ptrs = w_scale_ptr + offs_n + tile * BLOCK_N
                    out *= tl.load(w_scale_ptrs, mask=n_inside, other=0.0)[None, :]
                elif not E.FP8:
                    out *= topk_weight[:, None]
                inside = valid[:, None] & n_inside[None, :]
                tl.store(out_ptrs + tile * BLOCK_N, out.to(out_ptr.dtype.element_ty), mask=inside)
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


@triton.jit
def _compute_packed_down(
    h_ptr, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert, num_experts, begin, end,
    first_n, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Compute one column tile of `_compute_down`, from packed weights."""
    places, offs_n = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    valid = places < end
    acc = multiply_packed_down(h_ptr, w, expert, num_experts, first_n, places, valid,
                               E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
    pairs = tl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    topk_weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
    out = tl.trans(acc * topk_weight[None, :]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
    tl.store(out_ptrs, out, mask=valid[:, None] & (offs_n < E.HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _down_large_m_kernel(
    h,  # result of `_gate_up_large_m_kernel`; if ROUNDED, or if FP8 and not RESIDENT, the TMA
    # descriptor of this matrix with blocks [BLOCK_M, BLOCK_K]
    h_scale_ptr,  # result of `_gate_up_large_m_kernel`
    topk_weights_ptr,  # [M, TOP_K] fp32
    w,  # [num_experts, HIDDEN, WIDTH], or the tensors of a `PackedWeight`; if ROUNDED, or if FP8
    # and not RESIDENT, the TMA descriptor of [num_experts * HIDDEN, WIDTH (padded if ROUNDED)] with
    # blocks [BLOCK_N, BLOCK_K]
    w_scale_ptr,  # FP8: [num_experts, HIDDEN / 128, WIDTH / 128] fp32; ROUNDED: one scale per row
    out_ptr,  # [M, TOP_K, HIDDEN]
    sorted_token_ids_ptr,  # [M * TOP_K] int32, indices of the pairs, sorted by expert
    expert_counts_ptr,  # [num_experts] int32, number of pairs of each expert
    num_pairs,
    num_experts,
    E: tl.constexpr, ROUNDED: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    REPEAT_N: tl.constexpr,  # number of tiles of a program; 1 with packed weights
    RESIDENT: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[pairs, REPEAT_N * BLOCK_N] times the routing weights. Outputs of pairs with
    experts of other ranks are 0. Grid (pair tiles * HIDDEN / (BLOCK_N * REPEAT_N),).
    """
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N * REPEAT_N)
    wait_then_launch_dependents(PDL)
    expert, begin, end = _find_expert(
        expert_counts_ptr, tl.program_id(0) // TILES_N, num_experts, EXPERTS_POW2, BLOCK_M
    )
    first_n = tl.program_id(0) % TILES_N * (BLOCK_N * REPEAT_N)
    if expert >= num_experts:
        if begin < num_pairs:
            _zero_pairs(sorted_token_ids_ptr, out_ptr, begin, num_pairs, first_n,
                        E, BLOCK_M, BLOCK_N, REPEAT_N)  # fmt: skip
        return
    if ROUNDED or not E.PACKED:
        _compute_down(h, h_scale_ptr, topk_weights_ptr, w, w_scale_ptr, out_ptr,
                      sorted_token_ids_ptr, expert, begin, end, first_n, E, ROUNDED, BLOCK_M,
                      BLOCK_N, BLOCK_K, REPEAT_N, RESIDENT, NUM_STAGES)  # fmt: skip
    elif end - begin > BLOCK_M // 2:
        _compute_packed_down(h, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert,
                             num_experts, begin, end, first_n, E, BLOCK_M, BLOCK_N, BLOCK_K,
                             NUM_STAGES, NUM_WARPS)  # fmt: skip
    elif end - begin > BLOCK_M // 4:
        _compute_packed_down(h, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert,
                             num_experts, begin, end, first_n, E, BLOCK_M // 2, BLOCK_N, BLOCK_K,
                             NUM_STAGES, NUM_WARPS)  # fmt: skip
    else:
        _compute_packed_down(h, topk_weights_ptr, w, out_ptr, sorted_token_ids_ptr, expert,
                             num_experts, begin, end, first_n, E, BLOCK_M // 4, BLOCK_N, BLOCK_K,
                             NUM_STAGES, NUM_WARPS)  # fmt: skip


def experts_large_m(
    x: Hidden, selected: SelectedExperts, prepared: PreparedExperts, *, rounded: bool = False
) -> Tensor:
    """Run the experts -> [M, top_k, hidden]. The next kernel sums over top_k as it reads the rows,
    which saves a launch and 2 x 2 bytes per value. With `rounded` x and h are rounded to 8 bits and
    multiplied with 8-bit weights.
    On Hopper, FP8 experts with many pairs run in `triton_specialized.py`, with equal bits.
    """
    topk_ids, topk_weights, first, count = selected
    (num_tokens, top_k), device, E = topk_ids.shape, topk_ids.device, prepared.constants
    num_pairs, sizes = num_tokens * top_k, tiles.tiles_for(device)
    w1, w2 = prepared.gate_up, prepared.down
    w1_scale, w2_scale = prepared.gate_up_scale, prepared.down_scale
    if rounded:
        tile = sizes.w8a8()
        assert tile.gate_up.block_n == tile.down.block_k, (
            f"gate_up block_n {tile.gate_up.block_n} must equal down block_k {tile.down.block_k}"
        )
        q, scale = round_activations(unquantized(x).contiguous(), E.GATE_UP)
        (w1, *_, w1_scale), (w2, *_, w2_scale) = w1, w2
        w1, w2 = (w.view(rounded_dtype(E.GATE_UP)) for w in (w1, w2))
        h, _ = empty_intermediate(num_pairs, q, E.DOWN.K_PACKED)
        h_scale = scale.new_empty(num_pairs, triton.cdiv(E.WIDTH, tile.gate_up.block_n))
    else:
        q, scale = select_operands(x, prepared)
        if E.PACKED:
            tile = sizes.packed(M=num_tokens, width=E.WIDTH, gate_up=E.GATE_UP)
        else:
            tile = sizes.large_m(width=E.WIDTH, fp8=E.FP8)
        h, h_scale = empty_intermediate(num_pairs, q, E.WIDTH)
    out = torch.empty(num_tokens, top_k, E.HIDDEN, dtype=model_dtype(x), device=device)
    if (  # Gluon's kernel uses instructions that only Hopper has.
        E.FP8
        and platform.platform_of(device).arch == "sm_90"
        and E.HIDDEN % 256 == 0
        and num_pairs >= tiles.specialized_min_pairs(E.HIDDEN) * count
    ):
        pairs = sort_pairs(topk_ids, first=first, count=count, tile=SIDE.value)
        experts_specialized(q, scale, prepared, topk_weights, pairs, h, h_scale, out)
        return out
    pairs = sort_pairs(topk_ids, first=first, count=count)
    gate_up, down = tile.gate_up, tile.down
    down_h = h
    if rounded or E.FP8:
        w1 = w1.view(-1, q.shape[1])
        w1 = TensorDescriptor.from_tensor(w1, [gate_up.block_n, gate_up.block_k])
        if not tile.resident:
            w2 = w2.view(-1, h.shape[1])
            w2 = TensorDescriptor.from_tensor(w2, [down.block_n, down.block_k])
            down_h = TensorDescriptor.from_tensor(h, [down.block_m, down.block_k])
    shared = {"E": E, "ROUNDED": rounded, "EXPERTS_POW2": triton.next_power_of_2(count)}
    # upper bound of the number of tiles: the last tile of each expert may be partly empty
    tiles_m = min(num_pairs, num_pairs // gate_up.block_m + count)
    _gate_up_large_m_kernel[(tiles_m * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        q, scale, w1, w1_scale, h, h_scale, *pairs, count, TOP_K=top_k,
        **gate_up.constants, **shared, **launch_options(device, maxnreg=gate_up.maxnreg),
    )  # fmt: skip
    # one more tile than for gate and up: the last tile of other ranks' pairs may be partly empty
    tiles_m = min(num_pairs, num_pairs // down.block_m + count + 1)
    tiles_n = triton.cdiv(E.HIDDEN, down.block_n)
    repeat_n = gcd(tile.repeat_n, tiles_n)
    _down_large_m_kernel[(tiles_m * tiles_n // repeat_n,)](
        down_h, h_scale, topk_weights, w2, w2_scale, out, *pairs, num_pairs, count,
        REPEAT_N=repeat_n, RESIDENT=tile.resident,
        **down.constants, **shared, **launch_options(device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out


def sort_pairs(topk_ids: Tensor, *, first: int, count: int, tile: int = 0) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert. Return sorted_token_ids [M * top_k] and expert_counts [count], or with
    `tile` instead of expert_counts the list of tiles of `tile` pairs (`_list_tiles`).
    """
    num_pairs = topk_ids.numel()
    span = max(1, triton.cdiv(num_pairs, tiles.SORT_PROGRAMS * tiles.SORT_CHUNK)) * tiles.SORT_CHUNK
    programs, experts_pow2 = triton.cdiv(num_pairs, span), triton.next_power_of_2(count)
    sorted_token_ids = topk_ids.new_empty(num_pairs)
    counts = topk_ids.new_empty(programs, experts_pow2)
    if tile:  # The last tile of an expert may have fewer pairs.
        most = LISTED.value + num_pairs // tile + count
        found = topk_ids.new_empty(most, dtype=torch.int64)
    else:
        found = topk_ids.new_empty(count)
    numbers = (num_pairs, span, first, count)
    shared = {"EXPERTS_POW2": experts_pow2, "num_warps": 8, **launch_options(topk_ids.device)}
    _count_pairs_kernel[(programs,)](topk_ids, counts, *numbers, CHUNK=tiles.COUNT_CHUNK, **shared)
    _sort_pairs_kernel[(programs,)](
        topk_ids, counts, sorted_token_ids, found, *numbers,
        CHUNK=tiles.SORT_CHUNK, PROGRAMS=tiles.SORT_BLOCK, TILE=tile, **shared,
    )  # fmt: skip
    return sorted_token_ids, found
