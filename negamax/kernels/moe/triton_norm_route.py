"""Run the router and the norm before the router in one launch, for one or two tokens.

    residual [M, 2 * WORDS] += sum of x [M, PARTS, 2 * WORDS] over its parts
    norm of the residual [M, 2 * WORDS], with `quantize` also in FP8
    logits of the norm -> topk_ids, topk_weights, as in `triton_route.py`

Every program of the router reads all tokens. In this kernel each program reads the inputs of the
norm and normalizes them itself, which saves a launch and a pass through memory. One program changes
the residual, after the logits of all programs have arrived.

All rows, including rows of the gate, are read as words of two columns (`launch/triton_words.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.activations import Hidden
from negamax.kernels.collectives.triton_ll import poll
from negamax.kernels.launch.ptx import INTERPRETED, pack_pair
from negamax.kernels.launch.tile import warps_of_row
from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.launch.triton_words import add_parts, as_words, fetch_parts, num_parts, unpack
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_route import (
    PreparedGate,
    choose_for_token,
    empty_choices,
    group_experts,
    load_gate,
    route,
    store_logits,
)
from negamax.kernels.norm.op import NormWeight
from negamax.kernels.norm.triton import (
    GROUP_WORDS,
    add_rms,
    quantize_row,
    scale_row,
    store_quantized_row,
)
from negamax.kernels.quantize.native import outputs, result


@triton.jit
def _sum_gate_words(parts):
    """Return the even and odd columns of the gate in fp32."""
    hi_even, hi_odd = unpack(parts[0], tl.bfloat16)
    mid_even, mid_odd = unpack(parts[1], tl.bfloat16)
    low_even, low_odd = unpack(parts[2], tl.bfloat16)
    return (hi_even + mid_even) + low_even, (hi_odd + mid_odd) + low_odd


@triton.jit
def _add_over_threads(rows, NUM: tl.constexpr):
    """Sum NUM (1 or 2) tensors [threads] -> a tuple of sums, by one reduction."""
    if NUM == 1:
        sums = (tl.sum(rows[0], 0),)
    else:
        first, second = tl.split(tl.sum(tl.join(rows[0], rows[1]), 0))
        sums = (first, second)
    return sums


@triton.jit
def _select_row(words, m, step: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return words[m * STEPS + step] for a row index m that is known only at run time."""
    found = words[step]
    for row in tl.static_range(1, BLOCK_M):
        found = tl.where(m == row, words[row * STEPS + step], found)
    return found


@triton.jit(do_not_specialize=["M"])
def _norm_route_kernel(
    x_ptr,  # [M, PARTS, 2 * WORDS], PARTS partial sums per row
    residual_ptr,  # [M, 2 * WORDS], changed in place
    weight_ptr,  # [2 * WORDS], norm weight
    out_ptr,  # [M, 2 * WORDS], written
    values_ptr,  # [M, 2 * WORDS] e4m3, written only if QUANTIZE
    scales_ptr,  # [M, 2 * WORDS / 128] fp32, written only if QUANTIZE
    eps,
    gate_ptr,  # this pointer and all later pointers are as in `_route_small_m_kernel`
    bias_ptr,
    num_active_ptr,
    logits_ptr,
    flag_ptr,
    topk_ids_ptr,
    topk_weights_ptr,
    M,
    PARTS: tl.constexpr, WORDS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SCALING: tl.constexpr,
    SHARED: tl.constexpr,  # number of shared experts, 0 or 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # number of words per step: threads of a program * THREAD_WORDS
    THREAD_WORDS: tl.constexpr,  # number of words that a thread reads in one load
    QUANTIZE: tl.constexpr, GEMMA: tl.constexpr, PARALLEL_TOPK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize the rows in every program, then route as in `_route_small_m_kernel`.

        program    all                             NUM_PROGRAMS - 1 - m    m, once all logits are
        writes     logits of its BLOCK_N experts   the norm of row m       there: residual row m,
                                                                           the experts of token m

    A program writes its logits after it has read the rows. When all logits have arrived, no program
    still reads the rows, so the residual may change. In the interpreter the last program changes
    the residual and selects the experts of all rows.
    """
    GATE_SIZE: tl.constexpr = NUM_EXPERTS * WORDS
    STEPS: tl.constexpr = triton.cdiv(WORDS, BLOCK_K)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    first_n = program * BLOCK_N
    thread = tl.arange(0, BLOCK_K // THREAD_WORDS)
    offs_k = (thread * THREAD_WORDS)[:, None] + tl.arange(0, THREAD_WORDS)[None, :]
    parts, weight, gate = (), (), ()
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + offs_k
        for row in tl.static_range(BLOCK_N):
            row_ptr = as_words(gate_ptr) + tl.minimum(first_n + row, NUM_EXPERTS - 1) * WORDS
            parts += (load_gate(row_ptr, k, k < WORDS, GATE_SIZE),)
        weight += (tl.load(as_words(weight_ptr) + k, mask=k < WORDS, other=0),)
    expert = group_experts(NUM_EXPERTS)
    bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    wait_then_launch_dependents(PDL)
    # the load is volatile, because ptxas would otherwise delay it (`fetch_parts`)
    flag = tl.load(flag_ptr, volatile=True) + 1
    x, residual = (), ()
    for m in tl.static_range(BLOCK_M):
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + offs_k
            at, inside = m * WORDS + k, (k < WORDS) & (m < M)
            x += (fetch_parts(x_ptr, tl.full((), m, tl.int64), k, inside, PARTS, WORDS),)
            residual += (tl.load(as_words(residual_ptr) + at, mask=inside, other=0, volatile=True),)
    for i in tl.static_range(STEPS * BLOCK_N):
        gate += (_sum_gate_words(parts[i]),)
    totals, squares = (), ()
    for m in tl.static_range(BLOCK_M):
        acc = tl.zeros((BLOCK_K // THREAD_WORDS,), tl.float32)
        for step in tl.static_range(STEPS):
            x_even, x_odd = add_parts(x[m * STEPS + step], PARTS, dtype)
            even, odd = unpack(residual[m * STEPS + step], dtype)
            total = pack_pair(even + x_even, odd + x_odd, dtype)
            totals += (total,)
            even, odd = unpack(total, dtype)
            acc += tl.sum(even * even + odd * odd, axis=1)
        squares += (acc,)
    squares = _add_over_threads(squares, BLOCK_M)
    normed, sums = (), ()
    for m in tl.static_range(BLOCK_M):
        inverse = tl.rsqrt(squares[m] / (2 * WORDS) + eps)
        for step in tl.static_range(STEPS):
            even, odd = unpack(totals[m * STEPS + step], dtype)
            normed += (scale_row(even, odd, inverse, weight[step], GEMMA, dtype),)
        for row in tl.static_range(BLOCK_N):
            acc = tl.zeros((BLOCK_K // THREAD_WORDS,), tl.float32)
            for step in tl.static_range(STEPS):
                even, odd = unpack(normed[m * STEPS + step], dtype)
                values = gate[step * BLOCK_N + row]
                acc += tl.sum(values[0] * even + values[1] * odd, axis=1)
            sums += (acc,)
    store_logits(logits_ptr, sums, flag, first_n, M, NUM_EXPERTS, BLOCK_M, BLOCK_N)
    for m in range(num_programs - 1 - program, M, num_programs):
        for step in tl.static_range(STEPS):
            words = _select_row(normed, m, step, STEPS, BLOCK_M)
            k = step * BLOCK_K + offs_k
            tl.store(as_words(out_ptr) + m * WORDS + k, words, mask=k < WORDS)
            if QUANTIZE:
                first = m * WORDS + step * BLOCK_K
                scale, in_order = quantize_row(
                    tl.reshape(words, [BLOCK_K]), BLOCK_K, dtype, values_ptr.dtype.element_ty
                )
                store_quantized_row(
                    values_ptr + 2 * first, scales_ptr + first // GROUP_WORDS, 0, scale, in_order,
                    WORDS - step * BLOCK_K, BLOCK_K,
                )  # fmt: skip
    first_m, step_m = program, num_programs
    if not PARALLEL_TOPK:
        first_m, step_m = tl.where(program == num_programs - 1, 0, M), 1
    for m in range(first_m, M, step_m):
        num_active = tl.load(num_active_ptr)
        payload = poll(logits_ptr, m * NUM_EXPERTS + expert, flag, expert < NUM_EXPERTS, None)
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + offs_k
            words = _select_row(totals, m, step, STEPS, BLOCK_M)
            tl.store(as_words(residual_ptr) + m * WORDS + k, words, mask=k < WORDS)
        choose_for_token(payload.to(tl.float32, bitcast=True), bias, expert, topk_ids_ptr,
                      topk_weights_ptr, m, num_active,
                      NUM_EXPERTS, TOP_K, SCALING, SHARED)  # fmt: skip
        if m == M - 1:
            tl.store(flag_ptr, flag)  # all logits have arrived, so all programs have read the flag


def norm_route(
    x: Tensor,
    residual: Tensor,
    norm: NormWeight,
    router: PreparedGate,
    *,
    top_k: int,
    active: Tensor | None = None,
) -> tuple[Hidden, Tensor, Tensor]:
    """Add x (or its partial sums) to the residual in place. Return the norm of the residual,
    topk_ids and topk_weights.

    The function needs two launches for many tokens or parts, for rows whose size is not a
    multiple of 4 bytes, and on platforms that forbid spin waits.
    """
    (M, hidden), parts = residual.shape, num_parts(x)
    is_few = 0 < M <= tiles.NORM_ROUTE_MAX_M and 0 < parts <= tiles.NORM_ROUTE_MAX_PARTS
    if not (is_few and router.spin_wait) or hidden % 2:
        normed = add_rms(x, residual, norm)
        return normed, *route(normed, router, top_k=top_k, active=active)
    num_experts, device = router.bias.shape[0], x.device
    topk_ids, topk_weights = empty_choices(M, router, top_k=top_k)
    written = outputs(torch.empty_like(residual), quantize=norm.quantize)
    assert x.is_contiguous() and residual.is_contiguous(), "x and residual must be contiguous"
    block_n = tiles.ROUTE_SMALL_M_BLOCK_N
    num_warps = warps_of_row(hidden, measured=tiles.NORM_ROUTE_WARPS)
    thread_words = tiles.NORM_ROUTE_THREAD_WORDS
    _norm_route_kernel[(triton.cdiv(num_experts, block_n),)](
        x, residual, norm.weight, *written, norm.eps,
        router.gate_bf16x3, router.bias, router.all_active if active is None else active,
        router.logits, router.flag, topk_ids, topk_weights, M,
        PARTS=parts, WORDS=hidden // 2, NUM_EXPERTS=num_experts, TOP_K=top_k,
        SCALING=router.scaling, SHARED=int(router.shared), BLOCK_M=triton.next_power_of_2(M),
        BLOCK_N=block_n,
        BLOCK_K=num_warps * platform.platform_of(device).warp_size * thread_words,
        THREAD_WORDS=thread_words, QUANTIZE=norm.quantize, GEMMA=norm.gemma,
        PARALLEL_TOPK=not INTERPRETED, num_warps=num_warps, **launch_options(device),
    )  # fmt: skip
    return result(*written), topk_ids, topk_weights
