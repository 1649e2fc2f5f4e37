"""Route tokens to experts in one launch: gate GEMM, sigmoid, top-k and renormalization.

    gate [NUM_EXPERTS, HIDDEN] fp32, stored as gate_bf16x3 [3, NUM_EXPERTS, HIDDEN]: hi + mid + lo
    x [M, HIDDEN] -> logits [M, NUM_EXPERTS] fp32 -> topk_ids, topk_weights [M, TOP_K + SHARED]

    kernel         M         grid                                            gate GEMM
    route_small_m  to 4      NUM_EXPERTS / BLOCK_N                           CUDA cores, fp32
    route_large_m  the rest  M / BLOCK_M * NUM_EXPERTS / BLOCK_N * SPLIT_K   tensor cores, bf16x3

All programs of a launch write logits. Programs that select experts wait for all router logits of
their tokens. Without spin waits the program that finishes last selects the experts.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations, ShardedActivations, unquantized
from negamax.kernels.collectives.triton import gather_rows
from negamax.kernels.collectives.triton_ll import add_flag, poll
from negamax.kernels.launch.ptx import INTERPRETED, keep_in_registers
from negamax.kernels.launch.tile import warps_of_row
from negamax.kernels.launch.triton import (
    launch_options,
    sum_over_threads,
    wait_then_launch_dependents,
)
from negamax.kernels.moe import tiles

# `_route_large_m_kernel` adds _ROUND, the maximum programs per tile, to each tile counter.
_ROUND = tl.constexpr(1024)
_GROUP = tl.constexpr(32)  # number of experts that `choose_for_token` ranks together
_VECTOR = tl.constexpr(8)  # number of bf16 values that a thread reads in one load


@triton.jit
def _choose_for_tokens(
    partials_ptr, bias, topk_ids_ptr, topk_weights_ptr, offs_m, M, num_active,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALING: tl.constexpr, SHARED: tl.constexpr,
    SPLIT_K: tl.constexpr, TOPK_M: tl.constexpr,
):  # fmt: skip
    """Sum the partial logits of TOPK_M tokens and store the top-k experts and their weights."""
    EXPERTS_POW2: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    expert = tl.arange(0, EXPERTS_POW2)
    inside = (offs_m < M)[:, None] & (expert < NUM_EXPERTS)[None, :]
    logits = tl.zeros([TOPK_M, EXPERTS_POW2], tl.float32)
    for split in tl.static_range(SPLIT_K):
        rows = partials_ptr + (split * M + offs_m)[:, None] * NUM_EXPERTS + expert[None, :]
        logits += tl.load(rows, mask=inside, other=0.0, cache_modifier=".cg")
    score = 1.0 / (1.0 + tl.exp(-logits))
    key = score + bias[None, :]
    # NaN becomes the largest key, as in torch.topk; keys are finite, so no expert is chosen twice
    key = tl.where(key == key, key, 1e30)
    key = tl.where((expert < NUM_EXPERTS)[None, :], key, float("-inf"))
    rank = tl.full([TOPK_M, EXPERTS_POW2], -1, tl.int32)
    for j in tl.static_range(TOP_K):
        best = expert[None, :] == tl.argmax(key, 1, tie_break_left=True)[:, None]
        key = tl.where(best, float("-inf"), key)
        rank = tl.where(best, j, rank)
    chosen = rank >= 0
    topk_weight = score / tl.sum(tl.where(chosen, score, 0.0), 1)[:, None]
    if SCALING != 1.0:
        topk_weight *= SCALING
    active = (offs_m < num_active)[:, None]
    offs = offs_m[:, None] * (TOP_K + SHARED) + rank
    tl.store(topk_ids_ptr + offs, tl.where(active, expert[None, :], -1), mask=chosen & inside)
    tl.store(topk_weights_ptr + offs, tl.where(active, topk_weight, 0.0), mask=chosen & inside)
    if SHARED:
        active, last = offs_m < num_active, offs_m * (TOP_K + SHARED) + TOP_K
        tl.store(topk_ids_ptr + last, tl.where(active, NUM_EXPERTS, -1), mask=offs_m < M)
        tl.store(topk_weights_ptr + last, tl.where(active, 1.0, 0.0), mask=offs_m < M)


@triton.jit
def group_experts(NUM_EXPERTS: tl.constexpr):
    """Return expert indices, padded to a power of 2, as [groups, _GROUP]: one per warp thread."""
    EXPERTS_POW2: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    GROUP: tl.constexpr = _GROUP if EXPERTS_POW2 > _GROUP else EXPERTS_POW2
    return tl.arange(0, EXPERTS_POW2 // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def choose_for_token(
    logits, bias, expert, topk_ids_ptr, topk_weights_ptr, token, num_active,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALING: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Run `_choose_for_tokens` for one token; logits, bias and expert are [groups, _GROUP].

    The rank of an expert is the number of experts with larger keys. The ranks of all experts are
    counted at once, first within each group, then among the best TOP_K_POW2 experts of all groups.
    A search for one maximum after the other is a chain of TOP_K reductions and takes twice as long.
    """
    EXPERTS_POW2: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    TOP_K_POW2: tl.constexpr = triton.next_power_of_2(TOP_K)
    NUM_GROUPS: tl.constexpr = logits.shape[0]
    score = 1.0 / (1.0 + tl.exp(-logits))
    biased = score + bias
    biased = tl.where(biased == biased, biased, 1e30)  # NaN sorts first, as in torch.topk
    biased = tl.where(expert < NUM_EXPERTS, biased, float("-inf"))
    bits = biased.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # now integers sort like the fp32 values.
    # Among experts with equal scores, the expert with the lower id has the larger key.
    key = (bits.to(tl.int64) << 32) | (EXPERTS_POW2 - 1 - expert).to(tl.int64)
    # transposed, so that the sums over the first axis add values of one thread
    key_of = tl.trans(key)[:, :, None]
    rank = tl.sum((key_of > key[None, :, :]).to(tl.int32), 0)
    has_rank = tl.trans(rank)[:, :, None] == tl.arange(0, TOP_K_POW2)[None, None, :]
    best = tl.reshape(tl.sum(tl.where(has_rank, key_of, 0), 0), [NUM_GROUPS * TOP_K_POW2])
    best_score = tl.reshape(
        tl.sum(tl.where(has_rank, tl.trans(score)[:, :, None], 0.0), 0), [NUM_GROUPS * TOP_K_POW2]
    )
    rank = tl.sum((best[:, None] > best[None, :]).to(tl.int32), 0)
    chosen = rank < TOP_K
    topk_weight = best_score / tl.sum(tl.where(chosen, best_score, 0.0), 0)
    if SCALING != 1.0:
        topk_weight *= SCALING
    offs = token * (TOP_K + SHARED) + rank
    best_expert = EXPERTS_POW2 - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    tl.store(topk_ids_ptr + offs, tl.where(token < num_active, best_expert, -1), mask=chosen)
    topk_weight = tl.where(token < num_active, topk_weight, 0.0)
    tl.store(topk_weights_ptr + offs, topk_weight, mask=chosen)
    if SHARED:
        last = token * (TOP_K + SHARED) + TOP_K
        tl.store(topk_ids_ptr + last, tl.where(token < num_active, NUM_EXPERTS, -1))
        tl.store(topk_weights_ptr + last, tl.where(token < num_active, 1.0, 0.0))


@triton.jit
def load_gate(ptrs, k, mask, GATE_SIZE: tl.constexpr):
    """Load the addends hi, mid and lo of a tile of the gate."""
    hi = tl.load(ptrs + k, mask=mask, other=0.0)
    mid = tl.load(ptrs + GATE_SIZE + k, mask=mask, other=0.0)
    return hi, mid, tl.load(ptrs + 2 * GATE_SIZE + k, mask=mask, other=0.0)


@triton.jit
def _sum_gate(parts):
    """Return the sum of the addends hi, mid and lo of the gate in fp32."""
    return (parts[0].to(tl.float32) + parts[1].to(tl.float32)) + parts[2].to(tl.float32)


@triton.jit
def store_logits(
    logits_ptr, sums, flag, first_n, M,
    NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the logits of M tokens in columns first_n .. first_n + BLOCK_N - 1, each with `flag`.
    `sums` has BLOCK_M * BLOCK_N tensors [threads], each with the partial sums of one logit.
    """
    logits = sum_over_threads(sums, BLOCK_M * BLOCK_N)
    i = tl.arange(0, BLOCK_M * BLOCK_N)
    offs_n = first_n + i % BLOCK_N
    logits_ptrs = logits_ptr + i // BLOCK_N * NUM_EXPERTS + offs_n
    inside = (i // BLOCK_N < M) & (offs_n < NUM_EXPERTS)
    tl.store(logits_ptrs, add_flag(logits.to(tl.int32, bitcast=True), flag), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _route_small_m_kernel(
    x_ptr,  # [M, HIDDEN]
    gate_ptr,  # [3, NUM_EXPERTS, HIDDEN] bf16, whose sum is the fp32 gate
    bias_ptr,  # [NUM_EXPERTS] fp32, added to the scores before the selection
    num_active_ptr,  # [1] int32, number of tokens before the padding
    logits_ptr,  # [ROUTE_SMALL_M_MAX_M, NUM_EXPERTS] int64, LL protocol: (flag << 32) | fp32 bits
    flag_ptr,  # [1] int32, the flag of the previous launch
    topk_ids_ptr,  # [M, TOP_K + SHARED] int32
    topk_weights_ptr,  # [M, TOP_K + SHARED] fp32
    M,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALING: tl.constexpr,
    SHARED: tl.constexpr,  # number of shared experts, 0 or 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # number of threads of a program * 8
    PARALLEL_TOPK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the logits of BLOCK_N experts for up to BLOCK_M tokens, in fp32 on the CUDA cores;
    then select experts. A program loads its rows of the gate before the activations exist.

        gate rows        x                 logits_ptr [M, NUM_EXPERTS]
        [BLOCK_N, K]  .  [M, K]    ->   program p writes columns p * BLOCK_N ..., data and flag in
                                        one word; program t < M reads row t

    The flag in a word shows whether this launch has written the word. Because of these flags, the
    kernel needs no counter, no fence and no reset. With PARALLEL_TOPK program t waits for the
    logits of token t and selects the token's experts. Without PARALLEL_TOPK the last program
    selects experts for all tokens. The interpreter needs PARALLEL_TOPK = False, because it runs one
    program after another.
    """
    GATE_SIZE: tl.constexpr = NUM_EXPERTS * HIDDEN
    STEPS: tl.constexpr = triton.cdiv(HIDDEN, BLOCK_K)
    first_n = tl.program_id(0) * BLOCK_N
    thread = tl.arange(0, BLOCK_K // _VECTOR)
    offs_k = (thread * _VECTOR)[:, None] + tl.arange(0, _VECTOR)[None, :]
    parts, gate, x = (), (), ()
    for step in tl.static_range(STEPS):
        k = step * BLOCK_K + offs_k
        for row in tl.static_range(BLOCK_N):
            row_ptr = gate_ptr + tl.minimum(first_n + row, NUM_EXPERTS - 1) * HIDDEN
            parts += (load_gate(row_ptr, k, k < HIDDEN, GATE_SIZE),)
    expert = group_experts(NUM_EXPERTS)
    bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    wait_then_launch_dependents(PDL)
    # the loads of flag and x are volatile, because ptxas otherwise delays a load until its use
    flag = tl.load(flag_ptr, volatile=True) + 1
    for m in tl.static_range(BLOCK_M):
        for step in tl.static_range(STEPS):
            k = step * BLOCK_K + offs_k
            inside = (k < HIDDEN) & (m < M)
            x += (tl.load(x_ptr + m * HIDDEN + k, mask=inside, other=0.0, volatile=True),)
    for i in tl.static_range(STEPS * BLOCK_N):
        gate += (_sum_gate(parts[i]),)
    sums = ()
    for m in tl.static_range(BLOCK_M):
        for row in tl.static_range(BLOCK_N):
            acc = tl.zeros((BLOCK_K // _VECTOR,), tl.float32)
            for step in tl.static_range(STEPS):
                product = gate[step * BLOCK_N + row] * x[m * STEPS + step].to(tl.float32)
                acc += tl.sum(product, axis=1)
            sums += (acc,)
    store_logits(logits_ptr, sums, flag, first_n, M, NUM_EXPERTS, BLOCK_M, BLOCK_N)
    first_m, step_m = tl.program_id(0), tl.num_programs(0)
    if not PARALLEL_TOPK:
        first_m, step_m = tl.where(first_m == step_m - 1, 0, M), 1
    for m in range(first_m, M, step_m):
        num_active = tl.load(num_active_ptr)
        payload = poll(logits_ptr, m * NUM_EXPERTS + expert, flag, expert < NUM_EXPERTS, None)
        choose_for_token(payload.to(tl.float32, bitcast=True), bias, expert, topk_ids_ptr,
                      topk_weights_ptr, m, num_active,
                      NUM_EXPERTS, TOP_K, SCALING, SHARED)  # fmt: skip
        if m == M - 1:
            tl.store(flag_ptr, flag)  # all logits have arrived, so all programs have read the flag


@triton.jit
def _multiply_gate(parts, x, acc):
    """Return acc [experts, tokens] + gate [experts, columns] x [columns, tokens]. Products of bf16
    are exact, and the tensor cores sum in fp32. If x is not bf16, and in the interpreter, the
    factors are fp32.
    """
    if INTERPRETED or x.dtype != tl.bfloat16:
        acc = tl.dot(_sum_gate(parts), x.to(tl.float32), acc, input_precision="ieee")
    else:
        small = tl.dot(parts[2], x) + tl.dot(parts[1], x)
        acc += small + tl.dot(parts[0], x)
    return acc


@triton.jit(do_not_specialize=["M"])
def _route_large_m_kernel(
    x_ptr,  # [M, HIDDEN]
    gate_ptr,  # [3, NUM_EXPERTS, HIDDEN] bf16, whose sum is the fp32 gate
    bias_ptr,  # [NUM_EXPERTS] fp32, added to the scores before the selection
    num_active_ptr,  # [1] int32, number of tokens before the padding
    partials_ptr,  # [SPLIT_K, M, NUM_EXPERTS] fp32, partial logits of the splits
    arrivals_ptr,  # [ROUTE_MAX_TILES] int32, tile counters; multiples of _ROUND between launches
    topk_ids_ptr,  # [M, TOP_K + SHARED] int32
    topk_weights_ptr,  # [M, TOP_K + SHARED] fp32
    M,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALING: tl.constexpr,
    SHARED: tl.constexpr,  # number of shared experts, 0 or 1
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    TOPK_M: tl.constexpr,  # number of tokens for which experts are selected at a time
    PARALLEL_TOPK: tl.constexpr,
    NUM_STAGES: tl.constexpr,  # 0: a program loads its part of the gate before x has been computed
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute partial logits [BLOCK_M, BLOCK_N] of one split of the columns, then select experts.

        programs of a tile of tokens        partials [SPLIT_K, M, NUM_EXPERTS]
        experts 0 ..   split 0, 1, ..  ->   +-------- BLOCK_M x BLOCK_N --------+
        experts 32 ..  split 0, 1, ..       each program counts itself in arrivals[tile]

    With PARALLEL_TOPK the programs of a tile wait until all of them have arrived, and each selects
    experts for some of the tokens, TOPK_M at a time. Without PARALLEL_TOPK the last program to
    arrive selects experts for all tokens of the tile. A launch adds _ROUND to each counter, so the
    counters need no reset. The programs of a tile have adjacent ids, so a waiting program does not
    delay the start of another program of the tile.
    """
    PROGRAMS: tl.constexpr = triton.cdiv(NUM_EXPERTS, BLOCK_N) * SPLIT_K  # per tile of tokens
    STEPS: tl.constexpr = triton.cdiv(triton.cdiv(HIDDEN, BLOCK_K), SPLIT_K)
    EVEN_K: tl.constexpr = HIDDEN % (BLOCK_K * SPLIT_K) == 0
    GATE_SIZE: tl.constexpr = NUM_EXPERTS * HIDDEN
    tile, program = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    split = program % SPLIT_K
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = program // SPLIT_K * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = split * STEPS * BLOCK_K
    offs_k = tl.arange(0, BLOCK_K)
    gate_ptrs = gate_ptr + offs_n[:, None] * HIDDEN
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if NUM_STAGES == 0:
        parts, xs = (), ()
        for step in tl.static_range(STEPS):
            k = first_k + step * BLOCK_K + offs_k
            inside = (offs_n < NUM_EXPERTS)[:, None] & (k < HIDDEN)[None, :]
            parts = parts + (load_gate(gate_ptrs, k[None, :], inside, GATE_SIZE),)
        wait_then_launch_dependents(PDL)
        for step in tl.static_range(STEPS):
            k = first_k + step * BLOCK_K + offs_k
            inside = (offs_m < M)[:, None] & (k < HIDDEN)[None, :]
            x_ptrs = x_ptr + offs_m[:, None] * HIDDEN + k[None, :]
            xs = xs + (tl.load(x_ptrs, mask=inside, other=0.0),)
        for step in tl.static_range(STEPS):
            acc = _multiply_gate(parts[step], keep_in_registers(tl.trans(xs[step])), acc)
    else:
        wait_then_launch_dependents(PDL)
        for start in tl.range(first_k, first_k + STEPS * BLOCK_K, BLOCK_K, num_stages=NUM_STAGES):
            k = start + offs_k
            k_inside = (k < HIDDEN)[None, :] | EVEN_K
            inside = (offs_n < NUM_EXPERTS)[:, None] & k_inside
            parts = load_gate(gate_ptrs, k[None, :], inside, GATE_SIZE)
            inside = (offs_m < M)[:, None] & k_inside
            x_ptrs = x_ptr + offs_m[:, None] * HIDDEN + k[None, :]
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            acc = _multiply_gate(parts, tl.trans(x), acc)
    out_ptrs = partials_ptr + (split * M + offs_m)[None, :] * NUM_EXPERTS + offs_n[:, None]
    tl.store(out_ptrs, acc, mask=(offs_n < NUM_EXPERTS)[:, None] & (offs_m < M)[None, :])
    EXPERTS_POW2: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    expert = group_experts(NUM_EXPERTS) if TOPK_M == 1 else tl.arange(0, EXPERTS_POW2)
    bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    num_active = tl.load(num_active_ptr)
    tl.debug_barrier()
    SHARE: tl.constexpr = _ROUND // PROGRAMS
    added = SHARE + tl.where(program == 0, _ROUND - SHARE * PROGRAMS, 0)
    before = tl.atomic_add(arrivals_ptr + tile, added, sem="acq_rel")
    arrived, complete = before + added, (before & -_ROUND) + _ROUND
    end_m = tl.minimum(tile * BLOCK_M + BLOCK_M, M)
    is_last = arrived == complete
    first_m = tile * BLOCK_M + (
        program * TOPK_M if PARALLEL_TOPK else tl.where(is_last, 0, BLOCK_M)
    )
    if first_m < end_m:
        while complete - arrived > 0:
            arrived = tl.load(arrivals_ptr + tile, volatile=True)
        tl.debug_barrier()
        for m in range(first_m, end_m, TOPK_M * (PROGRAMS if PARALLEL_TOPK else 1)):
            if TOPK_M == 1:
                logits = tl.zeros(expert.shape, tl.float32)
                for i in tl.static_range(SPLIT_K):
                    row_ptrs = partials_ptr + (i * M + m) * NUM_EXPERTS + expert
                    logits += tl.load(
                        row_ptrs, mask=expert < NUM_EXPERTS, other=0.0, cache_modifier=".cg"
                    )
                choose_for_token(logits, bias, expert, topk_ids_ptr, topk_weights_ptr, m,
                                 num_active, NUM_EXPERTS, TOP_K, SCALING, SHARED)  # fmt: skip
            else:
                _choose_for_tokens(partials_ptr, bias, topk_ids_ptr, topk_weights_ptr,
                                m + tl.arange(0, TOPK_M), M, num_active,
                                NUM_EXPERTS, TOP_K, SCALING, SHARED, SPLIT_K, TOPK_M)  # fmt: skip


@dataclass(frozen=True)
class PreparedGate:
    """The router's weights, and the state that the router's kernels keep between launches."""

    gate_bf16x3: Tensor  # [3, experts, hidden] bf16, whose sum is the fp32 gate
    bias: Tensor  # [experts] fp32
    arrivals: Tensor  # [ROUTE_MAX_TILES] int32, counters of `_route_large_m_kernel`, one per tile
    logits: Tensor  # [ROUTE_SMALL_M_MAX_M, experts] int64: a logit, and the flag of its launch
    flag: Tensor  # [1] int32, flag of the last launch of `_route_small_m_kernel`
    all_active: Tensor  # [1] int32, 2^31 - 1: all rows are active if the caller passes no `active`
    spin_wait: bool  # whether the platform allows spin waits between programs of a launch
    scaling: float  # factor of the routing weights
    shared: bool  # whether each token also selects the shared expert (index `experts`, weight 1)


def prepare_gate(
    gate: Tensor,
    bias: Tensor,
    *,
    scaling: float = 1.0,
    shared: bool = False,
    spin_wait: bool = True,
) -> PreparedGate:
    """Split gate [experts, hidden] fp32 exactly into three bf16 addends; keep the bias in fp32."""
    hi = gate.float().bfloat16()
    rest = gate.float() - hi.float()
    mid = rest.bfloat16()
    lo = (rest - mid.float()).bfloat16()
    arrivals = torch.zeros(tiles.ROUTE_MAX_TILES, dtype=torch.int32, device=gate.device)
    logits_shape = (tiles.ROUTE_SMALL_M_MAX_M, gate.shape[0])
    return PreparedGate(
        gate_bf16x3=torch.stack((hi, mid, lo)),
        bias=bias.float().contiguous(),
        arrivals=arrivals,
        logits=torch.zeros(logits_shape, dtype=torch.int64, device=gate.device),
        flag=torch.zeros_like(arrivals[:1]),
        all_active=torch.full((1,), 2**31 - 1, dtype=torch.int32, device=gate.device),
        spin_wait=spin_wait,
        scaling=scaling,
        shared=shared,
    )


def empty_choices(M: int, prepared: PreparedGate, *, top_k: int) -> tuple[Tensor, Tensor]:
    """Allocate topk_ids and topk_weights of M tokens."""
    assert top_k <= _GROUP.value, (
        f"the router selects at most {_GROUP.value} experts per token; top_k is {top_k}"
    )
    shape, device = (M, top_k + prepared.shared), prepared.bias.device
    return (
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def route(
    x: Tensor | QuantizedActivations,
    prepared: PreparedGate,
    *,
    top_k: int,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route x [M, hidden] -> topk_ids [M, C] int32, topk_weights [M, C] fp32, as `moe.route`.

    If the ranks shard the rows, each rank routes its own rows, and all ranks gather the results.
    """
    if isinstance(x, ShardedActivations):
        own_active = None if active is None else active - x.first
        return gather_rows(*_route_rows(x.hidden, prepared, top_k=top_k, active=own_active), x)
    return _route_rows(unquantized(x), prepared, top_k=top_k, active=active)


def _route_rows(
    x: Tensor, prepared: PreparedGate, *, top_k: int, active: Tensor | None
) -> tuple[Tensor, Tensor]:
    (M, hidden), num_experts, device = x.shape, prepared.bias.shape[0], x.device
    topk_ids, topk_weights = empty_choices(M, prepared, top_k=top_k)
    if M == 0:
        return topk_ids, topk_weights
    assert x.is_contiguous()
    inputs = (
        x,
        prepared.gate_bf16x3,
        prepared.bias,
        prepared.all_active if active is None else active,
    )
    shared = {
        "HIDDEN": hidden,
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "SCALING": prepared.scaling,
        "SHARED": int(prepared.shared),
        "PARALLEL_TOPK": prepared.spin_wait and not INTERPRETED,
        **launch_options(device),
    }
    if prepared.spin_wait and tiles.ROUTE_SMALL_M_MAX_M >= M:
        block_n = tiles.ROUTE_SMALL_M_BLOCK_N
        num_warps = warps_of_row(hidden, measured=tiles.ROUTE_SMALL_M_WARPS)
        _route_small_m_kernel[(triton.cdiv(num_experts, block_n),)](
            *inputs, prepared.logits, prepared.flag, topk_ids, topk_weights, M,
            BLOCK_M=triton.next_power_of_2(M), BLOCK_N=block_n,
            BLOCK_K=num_warps * platform.platform_of(device).warp_size * _VECTOR.value,
            num_warps=num_warps, **shared,
        )  # fmt: skip
        return topk_ids, topk_weights
    tile = tiles.tiles_for(device).route(M, hidden=hidden)
    tiles_m = triton.cdiv(M, tile.block_m)
    programs = triton.cdiv(num_experts, tile.block_n) * tile.split_k
    assert tiles_m <= tiles.ROUTE_MAX_TILES, (
        f"{M} tokens need {tiles_m} tiles; the limit of a call is {tiles.ROUTE_MAX_TILES}"
    )
    assert programs <= _ROUND.value, (
        f"{num_experts} experts need {programs} programs per tile; the limit is {_ROUND.value}"
    )
    partials = torch.empty(tile.split_k, M, num_experts, dtype=torch.float32, device=device)
    _route_large_m_kernel[(tiles_m * programs,)](
        *inputs, partials, prepared.arrivals, topk_ids, topk_weights, M,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT_K=tile.split_k,
        TOPK_M=tile.topk_m, NUM_STAGES=tile.num_stages, num_warps=tile.num_warps, **shared,
    )  # fmt: skip
    return topk_ids, topk_weights
