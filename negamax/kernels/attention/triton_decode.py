"""Attention of decodes over the paged cache with split KV. A sequence has one query, or several if
the step verifies draft tokens.

Grid (kv_heads, programs). `triton_decode_plan` assigns a run of key tiles to each program. The
program attends to these tiles with the GROUP query heads of one KV head, for one or several queries
(`triton_decode_runs`). `triton_decode_reduce` reduces the partial results of a sequence.

    q, out   [T, kv_heads * GROUP, DIM]            the GROUP heads of a KV head: rows of a tile
    k, v     [blocks, kv_heads, BLOCK_SIZE, DIM]   blocks of a sequence by its block table

                        BLOCK_N keys of a tile
                   | warp 0 | warp 1 | ...        each warp has its own slice of every tile, and its
        BLOCK_M    |        |        |            own m_i, l_i [BLOCK_M] and acc [BLOCK_M, BLOCK_D];
        rows       |        |        |            warps do not wait for each other within a split

The latency of a program matters as much as the bytes it reads, so the kernel has few instructions.
All values of a cache are finite, so the kernel reads the cache without masks. With PREFETCH_KV a
program reads its first tile, whose keys earlier steps wrote, before the predecessor kernel ends.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.formats.platform import Feature
from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.tiles import DECODE, tiles_for
from negamax.kernels.attention.triton_decode_plan import (
    SEQUENCE_WORDS,
    WORK_WORDS,
    DecodePlan,
    load_sequence,
    replace_length,
    workspace,
)
from negamax.kernels.attention.triton_decode_reduce import finish_split, reduce_kernel
from negamax.kernels.attention.triton_decode_runs import (
    MAX_ROWS,
    count_row_keys,
    is_row,
    load_run,
    locate_row,
)
from negamax.kernels.attention.triton_shared import (
    attention_constants,
    clamp_empty_max,
    head_outputs,
    load_tile,
    locate_key_tile,
    locate_keys,
    score_scale,
    softmax_step,
)
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.launch.ptx import e4m3_to_fp16, launch_dependents, wait_for_predecessor
from negamax.kernels.launch.triton import launch_options, triton_kernel
from negamax.kernels.op import AnyKernel, AnyOp
from negamax.kernels.quantize.native import Outputs, result


@triton.jit
def _to_dot_dtype(x, DOT: tl.constexpr):
    return e4m3_to_fp16(x) if x.dtype == tl.float8e4nv and tl.float16 == DOT else x.to(DOT)


@triton.jit
def _tile_step(q, k, v, visible, scale, m_i, l_i, acc, C: tl.constexpr):
    """Attend to one tile: q [WARPS, BLOCK_M, BLOCK_D], k and v [WARPS, keys, BLOCK_D], visible
    [WARPS, 1 or BLOCK_M, keys]; m_i and l_i [WARPS, BLOCK_M], acc [WARPS, BLOCK_M, BLOCK_D].
    """
    scores = tl.where(visible, tl.dot(q, tl.permute(k.to(C.DOT), (0, 2, 1))), float("-inf"))
    p, alpha, m_i = softmax_step(scores, scale, m_i)
    acc = tl.dot(p.to(C.DOT), _to_dot_dtype(v, C.DOT), acc * alpha[:, :, None])
    return m_i, l_i * alpha + tl.sum(p, axis=2), acc


@triton.jit
def _first_rows(x, ROWS: tl.constexpr):
    """Return the first ROWS (all or half) of x [WARPS, BLOCK_M, columns]; no value is moved."""
    if x.shape[1] > ROWS:
        halves = tl.reshape(x, [x.shape[0], 2, ROWS, x.shape[2]])
        x, _ = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return x


@triton.jit
def _sum_over_warps(x, WARPS: tl.constexpr):
    """Sum x [WARPS, rows, columns] over its first dimension, in steps that halve this dimension."""
    for _ in tl.static_range(WARPS):
        if x.shape[0] > 1:
            halves = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]])
            one, other = tl.split(tl.permute(halves, (1, 2, 3, 0)))
            x = one + other
    return tl.reshape(x, [x.shape[1], x.shape[2]])


@triton.jit
def _reduce_warps(m_i, l_i, acc, C: tl.constexpr):
    """Merge the warps' results: m_i and l_i [PARTIAL_ROWS], acc [PARTIAL_ROWS, BLOCK_D]."""
    ROWS: tl.constexpr = C.PARTIAL_ROWS
    top = tl.max(m_i, axis=0)
    alpha = tl.exp2(m_i - clamp_empty_max(top)[None, :])
    l_i = tl.sum(l_i * alpha, axis=0)
    acc = _sum_over_warps(_first_rows(acc * alpha[:, :, None], ROWS), C.WARPS)
    if ROWS == C.BLOCK_M:  # Triton 3.6 fails on the reshapes below if they drop no row
        return top, l_i, acc
    top, l_i = top[None, :, None], l_i[None, :, None]
    top = tl.reshape(_first_rows(top, ROWS), [ROWS])
    return top, tl.reshape(_first_rows(l_i, ROWS), [ROWS]), acc


@triton.jit
def _key_step(q, k, v, visible, scale, m_i, l_i, acc):
    """Attend with q [PARTIAL_ROWS, BLOCK_D] to one key k and value v [BLOCK_D] if `visible`."""
    score = tl.where(visible, tl.sum(q * k[None, :], axis=1) * scale, float("-inf"))
    new = tl.maximum(m_i, score)
    safe = clamp_empty_max(new)
    alpha, p = tl.exp2(m_i - safe), tl.exp2(score - safe)
    return new, l_i * alpha + p, acc * alpha[:, None] + p[:, None] * v[None, :]


@triton.jit
def _attend_split(
    q, k_cache, v_cache, tables, table_stride, partials, output, lse, qk_scale, v_scale,
    head, program, programs, tile, until, run, sequence, prefetched, C: tl.constexpr,
):  # fmt: skip
    """Attend to tiles `tile` to `until` - 1 of one sequence; write the output or `partials`.

    With PREFETCH_KV `prefetched` has k and v of the first tile, and the offset of the newest key.
    The predecessor kernel wrote the newest key, so this key is processed last.
    """
    WARPS: tl.constexpr = C.WARPS  # a copy, as Triton 3.6 accepts no struct field in a shape
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    SLICE: tl.constexpr = C.BLOCK_N // WARPS
    warp = tl.arange(0, WARPS)[:, None, None]
    row3, column3 = tl.arange(0, BLOCK_M)[None, :, None], tl.arange(0, BLOCK_D)[None, None, :]
    lane = warp * SLICE + tl.arange(0, SLICE)[None, :, None]
    key = warp * SLICE + tl.arange(0, SLICE)[None, None, :]
    row, column = tl.arange(0, C.PARTIAL_ROWS), tl.arange(0, BLOCK_D)
    first_row = (run.token * C.KV_HEADS + head) * C.GROUP
    q_mask = is_row(run, row3, C) & (column3 < C.DIM) & (warp >= 0)
    q_at = q + locate_row(run, first_row, row3, C) * C.DIM + column3 + warp * 0
    q_tile = tl.load(q_at, mask=q_mask, other=0.0).to(C.DOT)
    prefetched_k, prefetched_v, newest = prefetched
    if C.PREFETCH_KV:
        has_newest = (tile == sequence.first_tile) & (sequence.length > 0)
        mine = has_newest & (column < C.DIM)
        newest_k = tl.load(
            k_cache + newest + column, mask=mine, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        newest_v = tl.load(
            v_cache + newest + column, mask=mine, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        mask = (row < C.GROUP)[:, None] & mine[None, :]
        q_rows = tl.load(
            q + locate_row(run, first_row, row, C)[:, None] * C.DIM + column[None, :],
            mask=mask,
            other=0.0,
        ).to(tl.float32)
    m_i = tl.full([WARPS, BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([WARPS, BLOCK_M], tl.float32)
    acc = tl.zeros([WARPS, BLOCK_M, BLOCK_D], tl.float32)
    num_keys = sequence.length - 1 if C.PREFETCH_KV else sequence.length
    keys_seen = num_keys if C.QUERIES == 1 else count_row_keys(run, row3, num_keys, C)
    first, after = tile - sequence.first_tile, until - sequence.first_tile
    if C.FEWER_KEYS:
        after = tl.minimum(after, tl.cdiv(num_keys, C.BLOCK_N))
    if C.PREFETCH_KV:
        visible = key < num_keys - first * C.BLOCK_N
        m_i, l_i, acc = _tile_step(
            q_tile, prefetched_k, prefetched_v, visible, qk_scale, m_i, l_i, acc, C
        )
        first += 1
    if first < after:
        table = tables + sequence.table_index.to(tl.int64) * table_stride
        offset = locate_key_tile(table, first, lane, num_keys, head, C)
        for t in range(first, after):
            k = load_tile(k_cache, offset, lane, column3, C)
            v = load_tile(v_cache, offset, lane, column3, C)
            # Load the block numbers of the next tile one tile ahead. A load that waits for another
            # load would halve the number of pipeline stages.
            offset = locate_key_tile(table, t + 1, lane, num_keys, head, C)
            visible = key < keys_seen - t * C.BLOCK_N
            m_i, l_i, acc = _tile_step(q_tile, k, v, visible, qk_scale, m_i, l_i, acc, C)
    m_i, l_i, acc = _reduce_warps(m_i, l_i, acc, C)
    if C.PREFETCH_KV:
        m_i, l_i, acc = _key_step(q_rows, newest_k, newest_v, has_newest, qk_scale, m_i, l_i, acc)
    finish_split(
        m_i, l_i, acc, row, column, partials, output, lse, v_scale, head, program, programs,
        tile == sequence.first_tile, run, first_row, sequence, C,
    )  # fmt: skip


@triton.jit
def _prefetch(k_cache, v_cache, tables, table_stride, head, tile, sequence, C: tl.constexpr):
    """Load k and v [WARPS, BLOCK_N / WARPS, BLOCK_D] of the first tile; return them and the offset
    of the newest key.
    """
    SLICE: tl.constexpr = C.BLOCK_N // C.WARPS
    lane = (tl.arange(0, C.WARPS) * SLICE)[:, None, None] + tl.arange(0, SLICE)[None, :, None]
    column = tl.arange(0, C.BLOCK_D)[None, None, :]
    table = tables + sequence.table_index.to(tl.int64) * table_stride
    first, num_keys = tile - sequence.first_tile, sequence.length - 1
    offset = locate_key_tile(table, first, lane, num_keys, head, C)
    k = load_tile(k_cache, offset, lane, column, C)
    v = load_tile(v_cache, offset, lane, column, C)
    return k, v, locate_keys(table, tl.maximum(num_keys, 0), sequence.length, head, C)


@triton.jit
def _decode_kernel(
    q,  # [T, KV_HEADS * GROUP, DIM]
    k_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, DIM]
    v_cache,
    tables,  # [slots, table_stride] int32, block tables
    sequences,  # [S, SEQUENCE_WORDS] int32, see triton_decode_plan
    work,  # [programs, WORK_WORDS] int32, see triton_decode_plan
    partials,  # int32 workspace of partial results, see triton_decode_reduce
    out,  # [T, KV_HEADS * GROUP * DIM], written
    values,  # [T, KV_HEADS * GROUP * DIM] e4m3, written if QUANTIZE, else None
    scales,  # [T, KV_HEADS * GROUP] fp32, written if QUANTIZE, else None
    lse,  # [T, KV_HEADS * GROUP] fp32, written by `write_lse`, or None
    lengths,  # [S] int32, sequence lengths instead of the plan's if FEWER_KEYS, else None
    query_starts,  # `DecodeRuns.query_starts`; None if QUERIES is 1
    num_tokens,  # number of tokens T; None if QUERIES is 1
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one split of a sequence (SPLIT_KV) or to a run of tiles of several sequences.

    A program waits only for programs that come later in the plan. Later programs of the plan have
    smaller program ids, so they run already or have ended. PREFETCH_KV requires that every sequence
    has one new key in this step; older keys are read before the predecessor kernel has ended.
    """
    head, programs = tl.program_id(0), tl.num_programs(1)
    program = programs - 1 - tl.program_id(1)
    work += program * WORK_WORDS
    tile, end, seq = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    sequence = load_sequence(work + 4)
    prefetched = (0, 0, 0)
    launch_dependents(PDL)
    if C.SPLIT_KV:
        run = load_run(query_starts, num_tokens, seq, C)
        if tile >= end:
            wait_for_predecessor(PDL)
            return
        if C.PREFETCH_KV:
            prefetched = _prefetch(k_cache, v_cache, tables, table_stride, head, tile, sequence, C)
    # The loads above need no wait: the predecessor writes neither plan, tables nor old keys.
    wait_for_predecessor(PDL)
    output = (out, values, scales)
    if C.SPLIT_KV:
        _attend_split(
            q, k_cache, v_cache, tables, table_stride, partials, output, lse, qk_scale, v_scale,
            head, program, programs, tile, end, run, replace_length(sequence, lengths, seq, C),
            prefetched, C,
        )  # fmt: skip
    else:
        while tile < end:
            until = tl.minimum(end, sequence.end_tile)
            _attend_split(
                q, k_cache, v_cache, tables, table_stride, partials, output, lse, qk_scale,
                v_scale, head, program, programs, tile, until,
                load_run(query_starts, num_tokens, seq, C),
                replace_length(sequence, lengths, seq, C), prefetched, C,
            )  # fmt: skip
            tile = until
            if tile < end:
                seq += 1
                sequence = load_sequence(sequences + seq * SEQUENCE_WORDS)


def _all_programs_run(device: torch.device, block_m: int) -> bool:
    """Return whether two programs of one launch fit into a multiprocessor's shared memory."""
    assert DECODE.split_programs <= 2
    needed = 84 if block_m == 16 else 100
    return platform.platform_of(device).shared_memory >= 2 * needed * 1024


def has_one_new_key(plan: DecodePlan) -> bool:
    """Return whether the plan guarantees that this step writes at most one key of a split."""
    queries = plan.queries
    return plan.split_kv and queries.is_captured and queries.max_decode_run == 1


def decode_kernels(op: AnyOp, run: Any, plan: Any) -> tuple[AnyKernel, AnyKernel]:
    """Return two decode kernels: one merges splits after spin waits, one by a second launch."""
    later = partial(plan, reduce_later=True)
    return (
        triton_kernel(op, run, plan, requires={Feature.SPIN_WAIT}),
        triton_kernel(op, run, later, provider="triton_two_launches"),
    )


def decode(q: Tensor, cache: KvCache, plan: DecodePlan) -> Tensor | QuantizedActivations:
    """Attend with q [T, heads, head_dim] -> [T, heads * head_dim]."""
    output = head_outputs(q, quantize=plan.shape.quantize)
    launch_decode(q, cache, plan, output)
    return result(*output)


def launch_decode(
    q: Tensor,
    cache: KvCache,
    plan: DecodePlan,
    output: Outputs,
    *,
    lse: Tensor | None = None,
    lengths: Tensor | None = None,
) -> None:
    """Run `decode` into `output`, and write lse [T, heads]; `lengths` [S] replace `seq_lens`."""
    assert q.is_contiguous() and cache.k.is_contiguous() and cache.v.is_contiguous()
    if q.shape[0] == 0:
        return
    head_dim, shape, tables = q.shape[2], plan.shape, plan.queries.block_tables
    num_rows, runs = plan.num_queries * shape.group, plan.runs
    of_runs = (None, None) if runs is None else (runs.query_starts, q.shape[0])
    block_m = max(16, triton.next_power_of_2(num_rows))
    block_d = triton.next_power_of_2(max(16, head_dim))
    partial_rows = 8 if num_rows <= 8 else block_m
    assert block_m <= MAX_ROWS, (
        f"{num_rows} query rows per KV head; the decode kernel supports at most {MAX_ROWS}"
    )
    partials = workspace(shape.kv_heads * plan.programs * partial_rows * (block_d + 4), q.device)
    launch = tiles_for(q.device).decode_launch(
        cache.k.element_size(), block_m=block_m, split_kv=plan.split_kv
    )
    options = launch_options(q.device, maxnreg=launch.maxnreg, dependent=plan.dependent)
    parallel = plan.split_kv and not plan.reduce_later and launch_options(q.device)["PDL"]
    constants = attention_constants(
        q,
        cache.k,
        shape,
        block_m=block_m,
        block_n=DECODE.block_n,
        WARPS=launch.num_warps,
        PARTIAL_ROWS=partial_rows,
        QUERIES=plan.num_queries,
        MAX_RUN=plan.queries.max_decode_run,
        SPLIT_KV=plan.split_kv,
        PREFETCH_KV=lengths is None and has_one_new_key(plan),
        PARALLEL_REDUCE=(parallel and block_d <= 128 and _all_programs_run(q.device, block_m)),
        REDUCE_LATER=plan.reduce_later,
        FEWER_KEYS=lengths is not None,
    )
    _decode_kernel[(shape.kv_heads, plan.programs)](
        q, cache.k, cache.v, tables, plan.sequences, plan.work, partials, *output, lse, lengths,
        *of_runs, score_scale(head_dim, cache.scales[0]), cache.scales[1], tables.stride(0),
        constants, **launch.options, **options,
    )  # fmt: skip
    if plan.reduce_later:
        reduce_kernel[(shape.kv_heads, len(plan.sequences) // SEQUENCE_WORDS.value)](
            plan.sequences, partials, *output, lse, *of_runs, cache.scales[1],
            plan.programs, constants, num_warps=4,
        )  # fmt: skip
