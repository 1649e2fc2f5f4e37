"""Experts of decode steps with more than a few tokens (*small_m*, see `kernels/moe/triton.py`). The
weight is the first, tall operand of tl.dot. A program finds its expert's tokens in topk_ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import Hidden, model_dtype
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

_ZERO_CHUNK = tl.constexpr(32)  # number of pairs whose results are zeroed at a time


@triton.jit
def _find_pairs(
    topk_ids_ptr, num_pairs, expert_id, begin, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return BLOCK_M pairs of expert `expert_id`, starting with its pair `begin`, and the expert's
    number of pairs. CHUNK tokens are searched at a time; a token has at most one pair of an expert.
    """
    offs = begin + tl.arange(0, BLOCK_M)
    choices = tl.arange(0, triton.next_power_of_2(TOP_K))
    found = tl.zeros([BLOCK_M], tl.int32)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, CHUNK * TOP_K):
        pairs = (start + tl.arange(0, CHUNK) * TOP_K)[:, None] + choices[None, :]
        inside = (pairs < num_pairs) & (choices < TOP_K)[None, :]
        ids = tl.load(topk_ids_ptr + pairs, mask=inside, other=-1)
        hit = tl.max(tl.where(ids == expert_id, pairs + 1, 0), 1)  # pair index + 1; 0: no pair
        is_hit = (hit > 0).to(tl.int32)
        rank = total + tl.cumsum(is_hit, 0) - 1
        match = (rank[None, :] == offs[:, None]) & (hit[None, :] > 0)
        found += tl.sum(tl.where(match, hit[None, :] - 1, 0), 1)
        total += tl.sum(is_hit, 0)
    return found, total


@triton.jit
def _load_shared_pairs(
    topk_ids_ptr, first_token, num_pairs, expert_id, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the last pair of each of BLOCK_M tokens, and whether the pair has `expert_id`."""
    pairs = (first_token + tl.arange(0, BLOCK_M)) * TOP_K + TOP_K - 1
    ids = tl.load(topk_ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    valid = ids == expert_id
    return tl.where(valid, pairs, 0), valid


@triton.jit
def _multiply_gate_up(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, expert, first_n, tokens, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the result of `multiply_packed_gate_up` from weights that are not packed."""
    EVEN: tl.constexpr = E.HIDDEN % BLOCK_K == 0 and E.WIDTH % BLOCK_N == 0
    K_BLOCKS: tl.constexpr = E.HIDDEN // BLOCK
    UP_BLOCKS: tl.constexpr = E.WIDTH // BLOCK * K_BLOCKS  # offset of the up scales in w_scale
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptr += expert.to(tl.int64) * (2 * E.WIDTH * E.HIDDEN)
    w_ptrs = w_ptr + offs_n[:, None] * E.HIDDEN + offs_k[None, :]
    w_scale_ptr += (expert * (2 * E.WIDTH // BLOCK) + first_n // BLOCK) * K_BLOCKS
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * E.HIDDEN + offs_k[None, :]
    n_inside = (offs_n < E.WIDTH)[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, E.HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
        k_inside = (k + offs_k < E.HIDDEN)[None, :] | EVEN
        inside = (n_inside & k_inside) | EVEN
        w_gate = tl.load(w_ptrs + k, mask=inside, other=0.0)
        w_up = tl.load(w_ptrs + E.WIDTH * E.HIDDEN + k, mask=inside, other=0.0)
        x = tl.trans(tl.load(x_ptrs + k, mask=valid[:, None] & k_inside, other=0.0))
        if E.FP8:
            block = k // BLOCK
            x_scale = tl.load(x_scale_ptr + tokens * K_BLOCKS + block, mask=valid, other=0.0)
            gate += tl.dot(w_gate, x) * (x_scale * tl.load(w_scale_ptr + block))[None, :]
            up += tl.dot(w_up, x) * (x_scale * tl.load(w_scale_ptr + UP_BLOCKS + block))[None, :]
        else:
            gate = dot(w_gate, x, gate)
            up = dot(w_up, x, up)
    ACTIVATION: tl.constexpr = E.ACTIVATION
    return swiglu(gate, up, ACTIVATION)


@triton.jit
def _compute_gate_up(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, h_ptr, h_scale_ptr, expert, num_experts, first_n,
    pairs, valid,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Compute columns first_n .. first_n + BLOCK_N - 1 of h for `pairs` [BLOCK_M] of one expert."""
    tokens, offs_n = pairs // TOP_K, first_n + tl.arange(0, BLOCK_N)
    if E.PACKED:
        y = multiply_packed_gate_up(x_ptr, w_ptr, expert, num_experts, first_n, tokens, valid,
                                    E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                                    NUM_WARPS)  # fmt: skip
    else:
        y = _multiply_gate_up(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, expert, first_n, tokens,
                              valid, E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    h_ptrs = h_ptr + pairs.to(tl.int64)[None, :] * E.WIDTH + offs_n[:, None]
    if E.FP8:
        scale = compute_group_scale(y, 0, h_ptr.dtype.element_ty)
        h_scale_ptrs = h_scale_ptr + pairs * (E.WIDTH // BLOCK_N)
        tl.store(h_scale_ptrs + first_n // BLOCK_N, scale, mask=valid)
        y = y / scale[None, :]
    inside = (offs_n < E.WIDTH)[:, None] & valid[None, :]
    tl.store(h_ptrs, y.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_down(
    h_ptr, h_scale_ptr, w_ptr, w_scale_ptr, expert, first_n, pairs, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the result of `multiply_packed_down` from weights that are not packed."""
    EVEN: tl.constexpr = E.WIDTH % BLOCK_K == 0 and E.HIDDEN % BLOCK_N == 0
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptr += expert.to(tl.int64) * (E.HIDDEN * E.WIDTH)
    w_ptrs = w_ptr + offs_n[:, None] * E.WIDTH + offs_k[None, :]
    w_scale_ptr += (expert * (E.HIDDEN // BLOCK) + first_n // BLOCK) * (E.WIDTH // BLOCK)
    h_ptrs = h_ptr + pairs.to(tl.int64)[:, None] * E.WIDTH + offs_k[None, :]
    n_inside = (offs_n < E.HIDDEN)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, E.WIDTH, BLOCK_K, num_stages=NUM_STAGES):
        k_inside = (k + offs_k < E.WIDTH)[None, :] | EVEN
        w = tl.load(w_ptrs + k, mask=(n_inside & k_inside) | EVEN, other=0.0)
        h = tl.trans(tl.load(h_ptrs + k, mask=valid[:, None] & k_inside, other=0.0))
        if E.FP8:
            h_scale_ptrs = h_scale_ptr + pairs * (E.WIDTH // BLOCK_K) + k // BLOCK_K
            h_scale = tl.load(h_scale_ptrs, mask=valid, other=0.0)
            acc += tl.dot(w, h) * (h_scale * tl.load(w_scale_ptr + k // BLOCK))[None, :]
        else:
            acc = dot(w, h, acc)
    return acc


@triton.jit
def _compute_down(
    h_ptr, h_scale_ptr, topk_weights_ptr, w_ptr, w_scale_ptr, out_ptr, expert, num_experts,
    first_n, pairs, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N output columns from first_n on for `pairs`, times their routing weights."""
    if E.PACKED:
        acc = multiply_packed_down(h_ptr, w_ptr, expert, num_experts, first_n, pairs, valid,
                                   E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                                   NUM_WARPS)  # fmt: skip
    else:
        acc = _multiply_down(h_ptr, h_scale_ptr, w_ptr, w_scale_ptr, expert, first_n, pairs, valid,
                             E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)  # fmt: skip
    acc *= tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)[None, :]
    offs_n = first_n + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * E.HIDDEN + offs_n[:, None]
    inside = (offs_n < E.HIDDEN)[:, None] & valid[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_experts", "per_pair"])
def _gate_up_small_m_kernel(
    x_ptr,  # [M, HIDDEN]
    x_scale_ptr,  # [M, HIDDEN / 128] fp32; kernels read scales with FP8 only
    topk_ids_ptr,  # [M, TOP_K] int32
    w_ptr,  # [num_experts, 2 * WIDTH, HIDDEN], gate rows first
    w_scale_ptr,  # [num_experts, 2 * WIDTH / 128, HIDDEN / 128] fp32
    h_ptr,  # [M * TOP_K, WIDTH] in the dtype of w
    h_scale_ptr,  # [M * TOP_K, WIDTH / 128] fp32
    expert_pairs_ptr,  # [num_experts, M] int32, the pairs of each expert
    expert_counts_ptr,  # [num_experts] int32, the number of pairs of each expert
    num_pairs,
    first_expert,
    num_experts,
    per_pair,  # 0: one program per expert; 1: one program per pair
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of h for all pairs of one expert. The program finds the pairs in
    topk_ids and stores them in expert_pairs for the down kernel.

        grid: (experts or pairs) * WIDTH / BLOCK_N
        w of an expert, the tall operand    tokens of the expert, BLOCK_M at a time
        gate [BLOCK_N, HIDDEN]              x [BLOCK_M, HIDDEN]^T  ->  h[pairs, BLOCK_N]
        up   [BLOCK_N, HIDDEN]

    With `per_pair` a program belongs to a pair, and computes the pair's expert unless an earlier
    pair has the same expert. A shared expert has one program per BLOCK_M tokens, and these programs
    start first, because one program for all tokens would end after all others.
    """
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    group, tile = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N
    wait_then_launch_dependents(PDL)
    if E.SHARED:
        shared_groups = tl.cdiv(num_pairs // TOP_K, BLOCK_M)
        if group < shared_groups:
            pairs, valid = _load_shared_pairs(
                topk_ids_ptr, group * BLOCK_M, num_pairs, first_expert + num_experts - 1,
                TOP_K, BLOCK_M,
            )  # fmt: skip
            if tl.sum(valid.to(tl.int32), 0) > 0:
                _compute_gate_up(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, h_ptr, h_scale_ptr,
                                  num_experts - 1, num_experts, tile * BLOCK_N, pairs, valid,
                                  E, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                                  NUM_WARPS)  # fmt: skip
            return
        group -= shared_groups
    expert = group
    if per_pair != 0:
        expert = tl.load(topk_ids_ptr + group) - first_expert
    if (expert < 0) | (expert >= num_experts - E.SHARED):
        return
    pairs, total = _find_pairs(
        topk_ids_ptr, num_pairs, expert + first_expert, 0, TOP_K, BLOCK_M, CHUNK
    )
    is_first = tl.arange(0, BLOCK_M) == 0
    if (per_pair != 0) & (tl.sum(tl.where(is_first, pairs, 0), 0) != group):
        return
    if tile == 0:
        tl.store(expert_counts_ptr + expert, total)
    if total == 0:
        return
    begin = 0
    while begin < total:
        offs_m = begin + tl.arange(0, BLOCK_M)
        valid = offs_m < total
        if tile == 0:
            tl.store(expert_pairs_ptr + expert * (num_pairs // TOP_K) + offs_m, pairs, mask=valid)
        _compute_gate_up(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, h_ptr, h_scale_ptr, expert,
                          num_experts, tile * BLOCK_N, pairs, valid,
                          E, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
        begin += BLOCK_M
        if begin < total:
            pairs, _ = _find_pairs(
                topk_ids_ptr, num_pairs, expert + first_expert, begin, TOP_K, BLOCK_M, CHUNK
            )


@triton.jit
def _zero_other_pairs(
    topk_ids_ptr, out_ptr, num_pairs, first_expert, num_experts, first_n,
    E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write zeros to columns first_n .. first_n + BLOCK_N - 1 of pairs of other ranks' experts."""
    offs_n = first_n + tl.arange(0, BLOCK_N)
    for start in range(0, num_pairs, _ZERO_CHUNK):
        pairs = start + tl.arange(0, _ZERO_CHUNK)
        ids = tl.load(topk_ids_ptr + pairs, mask=pairs < num_pairs, other=first_expert)
        expert = ids - first_expert
        is_other = (expert < 0) | (expert >= num_experts)
        out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * E.HIDDEN + offs_n[None, :]
        zeros = tl.zeros([_ZERO_CHUNK, BLOCK_N], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=is_other[:, None] & (offs_n < E.HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_experts", "per_pair"])
def _down_small_m_kernel(
    h_ptr,  # [M * TOP_K, WIDTH], result of `_gate_up_small_m_kernel`
    h_scale_ptr,  # [M * TOP_K, WIDTH / 128] fp32, scales of h, read with FP8 only
    topk_ids_ptr,  # [M, TOP_K] int32
    topk_weights_ptr,  # [M, TOP_K] fp32
    w_ptr,  # [num_experts, HIDDEN, WIDTH]
    w_scale_ptr,  # [num_experts, HIDDEN / 128, WIDTH / 128] fp32
    out_ptr,  # [M, TOP_K, HIDDEN]
    expert_pairs_ptr,  # [num_experts, M] int32, the pairs of each expert
    expert_counts_ptr,  # [num_experts] int32, the number of pairs of each expert
    num_pairs,
    first_expert,
    num_experts,
    per_pair,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs for all pairs of one expert from the lists that
    `_gate_up_small_m_kernel` wrote. The first HIDDEN / BLOCK_N programs write zeros for pairs with
    experts of other ranks.

        grid: (1 + experts or pairs) * HIDDEN / BLOCK_N
        w [BLOCK_N, WIDTH] of an expert    h [BLOCK_M, WIDTH]^T  ->  out[pairs, BLOCK_N]
    """
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N)
    group, tile = tl.program_id(0) // TILES_N - 1, tl.program_id(0) % TILES_N
    wait_then_launch_dependents(PDL)
    if group < 0:
        _zero_other_pairs(topk_ids_ptr, out_ptr, num_pairs, first_expert, num_experts,
                          tile * BLOCK_N, E, BLOCK_N)  # fmt: skip
        return
    if E.SHARED:
        shared_groups = tl.cdiv(num_pairs // TOP_K, BLOCK_M)
        if group < shared_groups:
            pairs, valid = _load_shared_pairs(
                topk_ids_ptr, group * BLOCK_M, num_pairs, first_expert + num_experts - 1,
                TOP_K, BLOCK_M,
            )  # fmt: skip
            if tl.sum(valid.to(tl.int32), 0) > 0:
                _compute_down(h_ptr, h_scale_ptr, topk_weights_ptr, w_ptr, w_scale_ptr, out_ptr,
                               num_experts - 1, num_experts, tile * BLOCK_N, pairs, valid,
                               E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
            return
        group -= shared_groups
    expert = group
    if per_pair != 0:
        expert = tl.load(topk_ids_ptr + group) - first_expert
    if (expert < 0) | (expert >= num_experts - E.SHARED):
        return
    offs_m = tl.arange(0, BLOCK_M)
    pair_ptrs = expert_pairs_ptr + expert * (num_pairs // TOP_K)
    pairs = tl.load(pair_ptrs + offs_m, mask=offs_m < num_pairs // TOP_K, other=0)
    total = tl.load(expert_counts_ptr + expert)
    if (per_pair != 0) & (tl.sum(tl.where(offs_m == 0, pairs, 0), 0) != group):
        return
    begin = 0
    while begin < total:
        valid = offs_m < total - begin
        _compute_down(h_ptr, h_scale_ptr, topk_weights_ptr, w_ptr, w_scale_ptr, out_ptr, expert,
                       num_experts, tile * BLOCK_N, tl.where(valid, pairs, 0), valid,
                       E, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
        begin += BLOCK_M
        pairs = tl.load(pair_ptrs + begin + offs_m, mask=offs_m < total - begin, other=0)


def experts_small_m(x: Hidden, selected: SelectedExperts, prepared: PreparedExperts) -> Tensor:
    """Run the experts -> [M, top_k, hidden]."""
    topk_ids, topk_weights, first, count = selected
    (num_tokens, top_k), device, E = topk_ids.shape, topk_ids.device, prepared.constants
    q, scale = select_operands(x, prepared)
    num_pairs = num_tokens * top_k
    sizes = tiles.tiles_for(device)
    tile = (
        sizes.packed(M=num_tokens, width=E.WIDTH, gate_up=E.GATE_UP)
        if E.PACKED
        else sizes.small_m(M=num_tokens, width=E.WIDTH, hidden=E.HIDDEN, fp8=E.FP8)
    )
    gate_up, down = tile.gate_up, tile.down
    per_pair = num_pairs < count
    groups = num_pairs if per_pair else count - E.SHARED
    h, h_scale = empty_intermediate(num_pairs, q, E.WIDTH)
    # The counts begin at a multiple of 16 bytes: another alignment would recompile the kernel.
    counts_at = -(-count * num_tokens // 4) * 4
    expert_pairs = torch.empty(counts_at + count, dtype=torch.int32, device=device)
    lists = (expert_pairs, expert_pairs[counts_at:], num_pairs, first, count, int(per_pair))
    shared_groups = triton.cdiv(num_tokens, gate_up.block_m) if E.SHARED else 0
    _gate_up_small_m_kernel[((shared_groups + groups) * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        q, scale, topk_ids, prepared.gate_up, prepared.gate_up_scale, h, h_scale, *lists,
        E=E, TOP_K=top_k, CHUNK=tiles.search_chunk(num_tokens), **gate_up.constants,
        **launch_options(device, maxnreg=gate_up.maxnreg),
    )  # fmt: skip
    out = torch.empty(num_tokens, top_k, E.HIDDEN, dtype=model_dtype(x), device=device)
    shared_groups = triton.cdiv(num_tokens, down.block_m) if E.SHARED else 0
    _down_small_m_kernel[((1 + shared_groups + groups) * triton.cdiv(E.HIDDEN, down.block_n),)](
        h, h_scale, topk_ids, topk_weights, prepared.down, prepared.down_scale, out, *lists,
        E=E, TOP_K=top_k, **down.constants, **launch_options(device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out
