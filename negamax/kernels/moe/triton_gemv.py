"""Experts of a few tokens (*gemv*, see `kernels/moe/triton.py`). Every pair (token, choice) has its
own programs. A program loads all its rows of an expert before it uses the first value.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.launch.triton import (
    add_last_first,
    launch_options,
    wait_then_launch_dependents,
)
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe import tiles
from negamax.kernels.moe.op import SelectedExperts
from negamax.kernels.moe.triton_shared import BLOCK, PreparedExperts
from negamax.kernels.weight_only.triton_gemv import (
    load_weight,
    multiply_token,
    number_fragment_rows,
)

_VECTOR = tl.constexpr(16)  # number of neighboring columns that a thread multiplies


@triton.jit
def _load_vectors(ptrs, inside):
    """Load a tile [BLOCK_N, vectors, 16] of w and transpose it to [vectors, BLOCK_N, 16]."""
    return tl.permute(tl.load(ptrs, mask=inside, other=0.0), (1, 0, 2))


@triton.jit
def _gate_up_row(
    x_ptr, w_ptr, w_scale_ptr, expert, first_n,
    E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute gate [BLOCK_N] and up [BLOCK_N] in fp32 of the token at x_ptr, on the CUDA cores.

    Tiles of w are loaded as [BLOCK_N, BLOCK_K / 16, 16]. The threads of a warp read neighboring
    vectors of one row, and a thread uses its part of x for all its rows. All loads precede the
    first product.
    """
    EVEN: tl.constexpr = E.HIDDEN % BLOCK_K == 0 and E.WIDTH % BLOCK_N == 0
    VECTORS: tl.constexpr = BLOCK_K // _VECTOR
    STEPS: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_K)
    K_BLOCKS: tl.constexpr = E.HIDDEN // BLOCK
    UP_BLOCKS: tl.constexpr = E.WIDTH // BLOCK * K_BLOCKS  # offset of the up scales in w_scale
    offs_n = first_n + tl.arange(0, BLOCK_N)
    vector = tl.arange(0, VECTORS)
    offs_k = vector[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]
    w_ptr += expert.to(tl.int64) * (2 * E.WIDTH * E.HIDDEN)
    w_scale_ptr += (expert * (2 * E.WIDTH // BLOCK) + first_n // BLOCK) * K_BLOCKS
    xs, gates, ups, gate_scales, up_scales = (), (), (), (), ()
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + offs_k
        inside = (offs_n < E.WIDTH)[:, None, None] & (k < E.HIDDEN)[None, :, :]
        rows = w_ptr + offs_n[:, None, None] * E.HIDDEN
        w_ptrs = add_last_first(rows, k[None, :, :], _VECTOR)
        up_ptrs = add_last_first(w_ptrs, E.WIDTH * E.HIDDEN, _VECTOR)
        gates = gates + (_load_vectors(w_ptrs, inside | EVEN),)
        ups = ups + (_load_vectors(up_ptrs, inside | EVEN),)
        xs = xs + (tl.load(x_ptr + k, mask=(k < E.HIDDEN) | EVEN, other=0.0),)
        if E.FP8:
            block = (step * BLOCK_K + vector * _VECTOR) // BLOCK
            fits = block < K_BLOCKS
            gate_scales = gate_scales + (tl.load(w_scale_ptr + block, mask=fits, other=0.0),)
            scale_ptrs = w_scale_ptr + UP_BLOCKS + block
            up_scales = up_scales + (tl.load(scale_ptrs, mask=fits, other=0.0),)
    gate = tl.zeros([VECTORS, BLOCK_N], tl.float32)
    up = tl.zeros([VECTORS, BLOCK_N], tl.float32)
    for step in tl.static_range(STEPS):
        x = xs[step].to(tl.float32)[:, None, :]
        step_gate = tl.sum(gates[step].to(tl.float32) * x, 2)
        step_up = tl.sum(ups[step].to(tl.float32) * x, 2)
        if E.FP8:
            step_gate *= gate_scales[step][:, None]
            step_up *= up_scales[step][:, None]
        gate += step_gate
        up += step_up
    return tl.sum(gate, 0), tl.sum(up, 0)


@triton.jit
def _gate_up_packed_row(
    x_ptr, w, expert, num_experts, first_n,
    E: tl.constexpr, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the result of `_gate_up_row` from packed weights, on the tensor cores."""
    P: tl.constexpr = E.GATE_UP
    offs = number_fragment_rows(2 * BLOCK_N)
    rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
    rows += expert * (2 * E.WIDTH)
    loaded = load_weight(w, rows, num_experts * (2 * E.WIDTH), P, NUM_WARPS)
    tl.debug_barrier()  # ptxas moves loads down to their uses, but never past a barrier
    both = multiply_token(loaded, x_ptr, P, 2 * BLOCK_N, NUM_WARPS)
    if P.ROW_SCALE:
        offs = tl.arange(0, 2 * BLOCK_N)
        rows = tl.minimum(first_n + offs % BLOCK_N, E.WIDTH - 1) + offs // BLOCK_N * E.WIDTH
        both *= tl.load(w[3] + expert * (2 * E.WIDTH) + rows)
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N)), (1, 0)))
    return gate, up


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _gate_up_gemv_kernel(
    x_ptr,  # [M, HIDDEN], unquantized
    topk_ids_ptr,  # [M, TOP_K] int32
    w,  # [num_experts, 2 * WIDTH, HIDDEN], gate rows first; or tensors of a `PackedWeight`
    w_scale_ptr,  # [num_experts, 2 * WIDTH / 128, HIDDEN / 128] fp32, read with FP8 only
    h_ptr,  # [M * TOP_K, WIDTH], unquantized
    first_expert,
    num_experts,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of h of one pair. Grid (pairs * WIDTH / BLOCK_N,)."""
    TILES_N: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_N)
    pair, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    x_ptr += (pair // TOP_K) * E.HIDDEN
    wait_then_launch_dependents(PDL)
    expert = tl.load(topk_ids_ptr + pair) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    if E.PACKED:
        gate, up = _gate_up_packed_row(x_ptr, w, expert, num_experts, first_n,
                                       E, BLOCK_N, NUM_WARPS)  # fmt: skip
    else:
        gate, up = _gate_up_row(x_ptr, w, w_scale_ptr, expert, first_n, E, BLOCK_N, BLOCK_K)
    ACTIVATION: tl.constexpr = E.ACTIVATION
    y = swiglu(gate, up, ACTIVATION)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    tl.store(h_ptr + pair * E.WIDTH + offs_n, y.to(h_ptr.dtype.element_ty), mask=offs_n < E.WIDTH)


@triton.jit
def _down_packed_row(
    h_ptr, topk_ids_ptr, topk_weights_ptr, w, out_ptr, first_expert, num_experts, pair, first_n,
    E: tl.constexpr, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of one pair, or zeros if the pair's expert is on another rank."""
    P: tl.constexpr = E.DOWN
    offs_n = first_n + tl.arange(0, BLOCK_N)
    n_inside = offs_n < E.HIDDEN
    expert = tl.load(topk_ids_ptr + pair, cache_modifier=".cg") - first_expert
    if (expert < 0) | (expert >= num_experts):
        wait_then_launch_dependents(PDL)
        zeros = tl.zeros((BLOCK_N,), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pair * E.HIDDEN + offs_n, zeros, mask=n_inside)
        return
    rows = expert * E.HIDDEN + tl.minimum(first_n + number_fragment_rows(BLOCK_N), E.HIDDEN - 1)
    loaded = load_weight(w, rows, num_experts * E.HIDDEN, P, NUM_WARPS)
    weight = tl.load(topk_weights_ptr + pair, cache_modifier=".cg")
    wait_then_launch_dependents(PDL)
    acc = multiply_token(loaded, h_ptr + pair * E.WIDTH, P, BLOCK_N, NUM_WARPS)
    if P.ROW_SCALE:
        acc *= tl.load(w[3] + expert * E.HIDDEN + offs_n, mask=n_inside, other=0.0)
    acc *= weight
    out_ptrs = out_ptr + pair * E.HIDDEN + offs_n
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=n_inside)


@triton.jit
def _down_rows(
    h_ptr, topk_ids_ptr, topk_weights_ptr, w_ptr, w_scale_ptr, out_ptr, first_expert, num_experts,
    part, first_n,
    E: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of one token on the CUDA cores, summed over CHOICES of its experts
    with routing weights.

    w   [CHOICES experts, BLOCK_N, WIDTH]      all loaded before h is finished
    h   [CHOICES pairs, WIDTH]                 ->  out[token, part, BLOCK_N]
    """
    EVEN: tl.constexpr = E.WIDTH % BLOCK_K == 0 and E.HIDDEN % BLOCK_N == 0
    PARTS: tl.constexpr = triton.cdiv(TOP_K, CHOICES)
    VECTORS: tl.constexpr = BLOCK_K // _VECTOR  # number of _VECTOR-wide vectors per expert and step
    STEPS: tl.constexpr = triton.cdiv(E.WIDTH, BLOCK_K)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    vector = tl.arange(0, CHOICES * VECTORS)
    choice = part % PARTS * CHOICES + vector // VECTORS
    pair = part // PARTS * TOP_K + choice
    expert = tl.load(topk_ids_ptr + pair, mask=choice < TOP_K, other=-1, cache_modifier=".cg")
    expert -= first_expert
    is_local = (expert >= 0) & (expert < num_experts)
    expert = tl.where(is_local, expert, 0)
    weight = tl.load(topk_weights_ptr + pair, mask=is_local, other=0.0, cache_modifier=".cg")
    w_ptr += expert.to(tl.int64)[None, :, None] * (E.HIDDEN * E.WIDTH)
    w_ptr += offs_n[:, None, None] * E.WIDTH
    w_scale_ptr += (expert * (E.HIDDEN // BLOCK) + first_n // BLOCK) * (E.WIDTH // BLOCK)
    inner = tl.arange(0, _VECTOR)
    ws, scales, hs = (), (), ()
    for step in tl.static_range(STEPS):
        first_k = step * BLOCK_K + (vector % VECTORS) * _VECTOR
        k = first_k[:, None] + inner[None, :]
        inside = (offs_n < E.HIDDEN)[:, None, None] & (k < E.WIDTH)[None, :, :]
        inside = is_local[None, :, None] & (inside | EVEN)
        w_ptrs = add_last_first(w_ptr, k[None, :, :], _VECTOR)
        ws = ws + (_load_vectors(w_ptrs, inside),)
        if E.FP8:
            w_scale_ptrs = w_scale_ptr + first_k // BLOCK
            scale = tl.load(w_scale_ptrs, mask=is_local & (first_k < E.WIDTH), other=0.0)
            scales = scales + (scale * weight,)
        else:
            scales = scales + (weight,)
    wait_then_launch_dependents(PDL)
    for step in tl.static_range(STEPS):
        k = (step * BLOCK_K + (vector % VECTORS) * _VECTOR)[:, None] + inner[None, :]
        inside = is_local[:, None] & ((k < E.WIDTH) | EVEN)
        hs = hs + (tl.load(h_ptr + pair[:, None] * E.WIDTH + k, mask=inside, other=0.0),)
    acc = tl.zeros([CHOICES * VECTORS, BLOCK_N], tl.float32)
    for step in tl.static_range(STEPS):
        product = tl.sum(ws[step].to(tl.float32) * hs[step].to(tl.float32)[:, None, :], 2)
        acc += product * scales[step][:, None]
    out_ptrs = out_ptr + part * E.HIDDEN + offs_n
    tl.store(out_ptrs, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=offs_n < E.HIDDEN)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _down_gemv_kernel(
    h_ptr,  # [M * TOP_K, WIDTH], unquantized
    topk_ids_ptr,  # [M, TOP_K] int32
    topk_weights_ptr,  # [M, TOP_K] fp32
    w,  # [num_experts, HIDDEN, WIDTH], or tensors of a `PackedWeight`
    w_scale_ptr,  # [num_experts, HIDDEN / 128, WIDTH / 128] fp32, read with FP8 only
    out_ptr,  # [M, TOP_K / CHOICES, HIDDEN]
    first_expert,
    num_experts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # number of a token's experts per program; 1 with packed weights
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of CHOICES pairs. Grid (M * TOP_K / CHOICES * HIDDEN / BLOCK_N,).

    Kernels before the predecessor wrote `topk_ids` and `topk_weights`. A program may therefore read
    both tensors and the expert weights before it waits for the predecessor.
    """
    TILES_N: tl.constexpr = triton.cdiv(E.HIDDEN, BLOCK_N)
    part, first_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N * BLOCK_N
    if E.PACKED:
        _down_packed_row(h_ptr, topk_ids_ptr, topk_weights_ptr, w, out_ptr, first_expert,
                         num_experts, part, first_n, E, BLOCK_N, NUM_WARPS, PDL)  # fmt: skip
    else:
        _down_rows(h_ptr, topk_ids_ptr, topk_weights_ptr, w, w_scale_ptr, out_ptr, first_expert,
                   num_experts, part, first_n,
                   E, TOP_K, CHOICES, BLOCK_N, BLOCK_K, PDL)  # fmt: skip


def experts_gemv(
    x: Tensor, selected: SelectedExperts, prepared: PreparedExperts, tile: tiles.ExpertTiles
) -> Tensor:
    """Run the experts -> [M, P, hidden], where P = top_k / choices of the tile."""
    topk_ids, topk_weights, first, count = selected
    (num_tokens, top_k), E = topk_ids.shape, prepared.constants
    assert x.is_contiguous()
    gate_up, down = tile.gate_up, tile.down
    h = x.new_empty(num_tokens * top_k, E.WIDTH)
    _gate_up_gemv_kernel[(num_tokens * top_k * triton.cdiv(E.WIDTH, gate_up.block_n),)](
        x, topk_ids, prepared.gate_up, prepared.gate_up_scale, h, first, count,
        E=E, TOP_K=top_k, BLOCK_N=gate_up.block_n, BLOCK_K=gate_up.block_k,
        NUM_WARPS=gate_up.num_warps, num_warps=gate_up.num_warps,
        **launch_options(x.device, maxnreg=gate_up.maxnreg, starts_early=tile.starts_early),
    )  # fmt: skip
    choices = min(tile.choices, triton.next_power_of_2(top_k))
    parts = triton.cdiv(top_k, choices)
    out = x.new_empty(num_tokens, parts, E.HIDDEN)
    _down_gemv_kernel[(num_tokens * parts * triton.cdiv(E.HIDDEN, down.block_n),)](
        h, topk_ids, topk_weights, prepared.down, prepared.down_scale, out, first, count,
        E=E, TOP_K=top_k, CHOICES=choices, BLOCK_N=down.block_n, BLOCK_K=down.block_k,
        NUM_WARPS=down.num_warps, num_warps=down.num_warps,
        **launch_options(x.device, maxnreg=down.maxnreg),
    )  # fmt: skip
    return out
