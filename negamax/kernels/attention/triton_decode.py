"""Attention of one query per sequence over the paged cache.

The keys of all sequences are cut into tiles; a kernel of one program shares them out, once per
step, among a fixed number of programs per KV head: pieces of one sequence each where there are
programs enough, else equal runs through all of them. One sequence of 100,000 tokens keeps the whole
machine busy, and so do a hundred short ones; the lengths stay on the device. A program that holds
only a part of a sequence leaves its result in a workspace; the one with the first tile combines the
parts. At these sizes a program's own latency counts as much as its bytes: the fewest instructions
are wanted, so a cache holds finite values everywhere, and is read without masks; and what earlier
steps wrote is read before the kernel in front has ended.

    sequences      |---- A ----|-- B --|------------ C ------------|      in tiles of BLOCK_N keys
    SPLIT_KV       | 0 | 1 | 2 | 3 | 4 |  5   |  6   |  7   |  8   |      one split per program
    else           |    0    |    1    |    2    |    3    |   4   |      equal runs of tiles

A partial is the result of a split, normalised, [PARTIAL_ROWS, BLOCK_D] fp32, and the base-2
logarithm of its l_i * 2^m_i, [PARTIAL_ROWS].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.spec import PagedShape
from negamax.kernels.attention.tiles import DECODE, decode_programs, tiles_for
from negamax.kernels.attention.triton_shared import (
    LOG2_E,
    Output,
    dot_dtype,
    load_tile,
    tile_start,
    write_heads,
)
from negamax.kernels.launch.ptx import e4m3_to_fp16, launch_dependents, wait_for_predecessor
from negamax.kernels.launch.triton import launch_options

# words per program in a decode plan: first tile, end, sequence, nothing, then the sequence's record
_RECORD = 16
_SEQUENCE = 8  # words per sequence: first tile, end, tokens, table row, first program, programs
_SEQUENCES = 128  # sequences the planning program looks at together
_EMPTY = -1  # a word of the workspace that nobody has written


@dataclass(frozen=True)
class DecodePlan:
    """The shares of the programs and the room for what they leave to each other; every layer of the
    step uses them.
    """

    queries: AttentionMetadata
    shape: PagedShape
    quantize: bool
    sequences: Tensor  # [S, 8] int32
    records: Tensor  # [programs, 16] int32
    programs: int  # per KV head
    split_kv: bool  # every program has a piece of one sequence, else a run of tiles
    reduce_later: bool  # in a launch of its own
    workspaces: dict[int, Tensor] = field(default_factory=dict)  # by size; made for the first layer

    def workspace(self, words: int, device: torch.device) -> Tensor:
        """[words] int32, _EMPTY between launches."""
        if words not in self.workspaces:
            self.workspaces[words] = torch.full((words,), _EMPTY, dtype=torch.int32, device=device)
        return self.workspaces[words]


@triton.jit
def _tiles_of(seq_lens, start, num_seqs, BLOCK_N: tl.constexpr, SEQUENCES: tl.constexpr):
    """Tiles of the sequences from `start` on; an empty one has a tile too, so that it is answered
    (with zeros).
    """
    seq = start + tl.arange(0, SEQUENCES)
    live = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=live, other=0)
    return seq, live, length, tl.where(live, tl.maximum(tl.cdiv(length, BLOCK_N), 1), 0)


@triton.jit
def _share(
    seq_lens,
    num_seqs,
    programs,
    split_kv,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Tiles that a program takes at most, and how many there are: an equal share of all, or where
    sequences are cut into pieces the least for which every piece finds a program."""
    _, _, _, tiles = _tiles_of(seq_lens, 0, num_seqs, BLOCK_N, SEQUENCES)
    total, most = tl.sum(tiles, axis=0), tl.max(tiles, axis=0)
    for start in range(SEQUENCES, num_seqs, SEQUENCES):
        _, _, _, others = _tiles_of(seq_lens, start, num_seqs, BLOCK_N, SEQUENCES)
        total += tl.sum(others, axis=0)
        most = tl.maximum(most, tl.max(others, axis=0))
    low = tl.maximum(tl.cdiv(total, programs), MIN_TILES)
    high = tl.where(split_kv != 0, tl.maximum(most, low), low)
    while low < high:
        middle = (low + high) // 2
        pieces = tl.sum(tl.cdiv(tiles, middle), axis=0)
        for start in range(SEQUENCES, num_seqs, SEQUENCES):
            _, _, _, others = _tiles_of(seq_lens, start, num_seqs, BLOCK_N, SEQUENCES)
            pieces += tl.sum(tl.cdiv(others, middle), axis=0)
        fits = pieces <= programs
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low, total


@triton.jit(do_not_specialize=["num_seqs", "programs", "split_kv"])
def _plan_decode_kernel(
    seq_lens,
    block_table_indices,
    sequences,
    records,
    num_seqs,
    programs,
    # 0: each program takes a run of tiles, no matter of which sequences; 1: a piece of one sequence
    split_kv,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PADDED_PROGRAMS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEQUENCE: tl.constexpr,
    RECORD: tl.constexpr,
):
    """One program, which cuts each sequence into equal pieces, or all of them together into equal
    runs.
    """
    program = tl.arange(0, PADDED_PROGRAMS)
    for word in tl.static_range(3):
        # no work
        tl.store(records + program * RECORD + word, tl.zeros_like(program), mask=program < programs)
    tl.debug_barrier()
    share, total = _share(seq_lens, num_seqs, programs, split_kv, MIN_TILES, BLOCK_N, SEQUENCES)
    tiles_before, programs_before = 0, 0
    for start in range(0, num_seqs, SEQUENCES):
        seq, live, length, tiles = _tiles_of(seq_lens, start, num_seqs, BLOCK_N, SEQUENCES)
        table_row = tl.load(block_table_indices + seq, mask=live, other=0).to(tl.int32)
        end = tiles_before + tl.cumsum(tiles, axis=0)
        base = end - tiles
        pieces = tl.cdiv(tiles, share)
        first = programs_before + tl.cumsum(pieces, axis=0) - pieces
        tiles_before += tl.sum(tiles, axis=0)
        programs_before += tl.sum(pieces, axis=0)
        first = tl.where(split_kv != 0, first, base // share)
        count = tl.where(split_kv != 0, pieces, (end - 1) // share - first + 1)
        to = sequences + seq * SEQUENCE
        _sequence_record(to, base, end, length, table_row, first, count, live)
        # The programs that begin in a sequence; of many sequences' run of tiles, the first program
        # began before.
        begins = tl.where(split_kv != 0, first, tl.cdiv(base, share))
        number = tl.where(live, first + count - begins, 0)
        piece = tl.where(split_kv != 0, tl.cdiv(tiles, tl.maximum(pieces, 1)), share)
        offset = tl.where(split_kv != 0, base, begins * share)
        for i in range(0, tl.max(number, axis=0)):
            to = records + (begins + i) * RECORD
            tile = offset + i * piece
            last = tl.minimum(tile + piece, tl.where(split_kv != 0, end, total))
            tl.store(to, tile, mask=i < number)
            tl.store(to + 1, last, mask=i < number)
            tl.store(to + 2, seq, mask=i < number)
            _sequence_record(to + 4, base, end, length, table_row, first, count, i < number)


@triton.jit
def _sequence_record(to, base, end, length, table_row, first_program, count, mask):
    """What a program must know of a sequence."""
    tl.store(to, base, mask=mask)
    tl.store(to + 1, end, mask=mask)
    tl.store(to + 2, length, mask=mask)
    tl.store(to + 3, table_row, mask=mask)
    tl.store(to + 4, first_program, mask=mask)
    tl.store(to + 5, count, mask=mask)


@triton.jit
def _sequence(at):
    """What `_sequence_record` wrote: first tile, end, tokens, table row, first program,
    programs.
    """
    base, end, length = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return base, end, length, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _multiplied_as(x, dtype: tl.constexpr):
    """x in the dtype of the products."""
    return e4m3_to_fp16(x) if x.dtype == tl.float8e4nv and dtype == tl.float16 else x.to(dtype)


@triton.jit
def _tile_step(queries, k, v, visible, scale, m_i, l_i, acc, DOT: tl.constexpr):
    """A tile's keys are dealt out to the WARPS, each of which has its own maximum, sum and result:
    none waits for another.

    queries [WARPS, BLOCK_M, columns], k and v [WARPS, keys, columns], visible [WARPS, 1, keys]; m_i
    and l_i [WARPS, BLOCK_M].
    """
    scores = tl.where(visible, tl.dot(queries, tl.permute(k.to(DOT), (0, 2, 1))), float("-inf"))
    new = tl.maximum(m_i, tl.max(scores, axis=2) * scale)
    safe = tl.where(new == float("-inf"), 0.0, new)  # no key seen yet
    p = tl.exp2(scores * scale - safe[:, :, None])
    alpha = tl.exp2(m_i - safe)
    acc = tl.dot(p.to(DOT), _multiplied_as(v, DOT), acc * alpha[:, :, None])
    return new, l_i * alpha + tl.sum(p, axis=2), acc


@triton.jit
def _upper_half(x, BLOCK_M: tl.constexpr, PARTIAL_ROWS: tl.constexpr):
    """The first PARTIAL_ROWS, all or half, of x [WARPS, BLOCK_M, columns]; in the layout of a
    product no value moves.
    """
    if PARTIAL_ROWS < BLOCK_M:
        halves = tl.reshape(x, [x.shape[0], 2, PARTIAL_ROWS, x.shape[2]])
        x, _ = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return x


@triton.jit
def _sum_of_warps(x, WARPS: tl.constexpr):
    """x [WARPS, rows, columns] over its first dimension: halves side by side in a thread, which one
    exchange brings about.
    """
    for _ in tl.static_range(WARPS):
        if x.shape[0] > 1:
            halves = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]])
            one, other = tl.split(tl.permute(halves, (1, 2, 3, 0)))
            x = one + other
    return tl.reshape(x, [x.shape[1], x.shape[2]])


@triton.jit
def _over_warps(m_i, l_i, acc, BLOCK_M: tl.constexpr, PARTIAL_ROWS: tl.constexpr):
    """The warps' results as one: m_i and l_i [PARTIAL_ROWS], acc [PARTIAL_ROWS, columns]."""
    WARPS: tl.constexpr = acc.shape[0]
    top = tl.max(m_i, axis=0)
    share = tl.exp2(m_i - tl.where(top == float("-inf"), 0.0, top)[None, :])
    l_i = tl.sum(l_i * share, axis=0)
    acc = _sum_of_warps(_upper_half(acc * share[:, :, None], BLOCK_M, PARTIAL_ROWS), WARPS)
    top, l_i = top[None, :, None], l_i[None, :, None]
    top = tl.reshape(_upper_half(top, BLOCK_M, PARTIAL_ROWS), [PARTIAL_ROWS])
    return top, tl.reshape(_upper_half(l_i, BLOCK_M, PARTIAL_ROWS), [PARTIAL_ROWS]), acc


@triton.jit
def _with_newest(query, k, v, seen, scale, m_i, l_i, acc):
    """One more key k and value v [columns], if `seen`; query [PARTIAL_ROWS, columns]."""
    score = tl.where(seen, tl.sum(query * k[None, :], axis=1) * scale, float("-inf"))
    new = tl.maximum(m_i, score)
    safe = tl.where(new == float("-inf"), 0.0, new)
    alpha, p = tl.exp2(m_i - safe), tl.exp2(score - safe)
    return new, l_i * alpha + p, acc * alpha[:, None] + p[:, None] * v[None, :]


@triton.jit
def _store_partial(parts, slot, m_i, l_i, acc, GROUP: tl.constexpr, EMPTY: tl.constexpr):
    """A part for `_combine`: the result, and the base-2 logarithm of its sum of exponentials."""
    PARTIAL_ROWS: tl.constexpr = acc.shape[0]
    BLOCK_D: tl.constexpr = acc.shape[1]
    row, column = tl.arange(0, PARTIAL_ROWS), tl.arange(0, BLOCK_D)
    part = parts + slot * (PARTIAL_ROWS * (BLOCK_D + 4))
    result = (acc * tl.where(l_i == 0.0, 0.0, 1.0 / l_i)[:, None]).to(tl.int32, bitcast=True)
    logarithm = (m_i + tl.log2(l_i)).to(tl.int32, bitcast=True)
    at = part + row[:, None] * BLOCK_D + column[None, :]
    tl.store(at, tl.where(result == EMPTY, 0, result), mask=(row < GROUP)[:, None])
    tl.store(
        part + PARTIAL_ROWS * BLOCK_D + row,
        tl.where(logarithm == EMPTY, 0, logarithm),
        mask=row < GROUP,
    )


@triton.jit
def _incomplete(words, EMPTY: tl.constexpr):
    """Whether one of the words is EMPTY, the largest there is without a sign."""
    return tl.max(words.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True) == EMPTY


@triton.jit
def _combine(
    parts, slot, row, start, count, m_i, l_i, acc,
    GROUP: tl.constexpr, PARTIAL_ROWS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Rows `row` [rows] of a sequence, whose parts `start` to `count` lie from `slot` on, together
    with what there is of them: m_i and l_i [rows], acc [rows, columns]. Returns the sum and the
    result, still to be divided by it.

    A part is complete when none of its words is EMPTY, which no number has as its bits: no counter,
    no fence, one way through memory. What was read is made EMPTY again, for the next layer. Reading
    is all latency, so many parts are read at a time: 32 rows of all parts. Of their logarithms
    every warp reads all, one a lane, and waits for itself; so the results come first.
    """
    BLOCK_D: tl.constexpr = acc.shape[1]
    PARTS: tl.constexpr = 32 // row.shape[0]
    column = tl.arange(0, BLOCK_D)
    for first in range(start, count, PARTS):
        index = first + tl.arange(0, PARTS)
        part = parts + (slot + index) * (PARTIAL_ROWS * (BLOCK_D + 4))
        result_at = part[None, :, None] + row[:, None, None] * BLOCK_D + column[None, None, :]
        logarithm_at = part[None, :] + PARTIAL_ROWS * BLOCK_D + row[:, None]
        live = (index < count)[None, :] & (row < GROUP)[:, None]
        result = tl.load(result_at, mask=live[:, :, None], other=0, volatile=True)
        logarithm = tl.load(logarithm_at, mask=live, other=0, volatile=True)
        while _incomplete(result, EMPTY):
            result = tl.load(result_at, mask=live[:, :, None], other=0, volatile=True)
        while _incomplete(logarithm, EMPTY):
            logarithm = tl.load(logarithm_at, mask=live, other=0, volatile=True)
        tl.debug_barrier()
        tl.store(result_at, tl.full(result.shape, EMPTY, tl.int32), mask=live[:, :, None])
        tl.store(logarithm_at, tl.full(logarithm.shape, EMPTY, tl.int32), mask=live)
        logarithm = tl.where(live, logarithm.to(tl.float32, bitcast=True), float("-inf"))
        new = tl.maximum(m_i, tl.max(logarithm, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha, weight = tl.exp2(m_i - safe), tl.exp2(logarithm - safe[:, None])
        l_i = l_i * alpha + tl.sum(weight, axis=1)
        acc = acc * alpha[:, None] + tl.sum(
            weight[:, :, None] * result.to(tl.float32, bitcast=True), axis=1
        )
        m_i = new
    return l_i, acc


@triton.jit
def _attend_split(
    q, k_cache, v_cache, tables, parts, out, values, scales, qk_scale, v_scale, table_stride,
    head, program, programs, tile, until, seq, base, length, table_row, first_program, count,
    prefetched_k, prefetched_v, newest,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTIAL_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    PARALLEL_REDUCE: tl.constexpr, REDUCE_LATER: tl.constexpr, EMPTY: tl.constexpr,
    PREFETCH_KV: tl.constexpr, QUANTIZE: tl.constexpr, DOT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The tiles from `tile` to `until` of one sequence and KV head, and what it takes to make a
    result of all its pieces.

    PARALLEL_REDUCE: its programs share out the rows, so that each reads less; they wait for
    each other, so all of them must be running. Else the program with the first tiles waits for
    the others, or with REDUCE_LATER none does, and `_reduce_kernel` makes the result.
    PREFETCH_KV: the first tile is there already, and the newest key, which the kernel before
    this one wrote, goes in at last.
    """
    SHARE: tl.constexpr = BLOCK_N // WARPS
    warp = tl.arange(0, WARPS)[:, None, None]
    row3, column3 = tl.arange(0, BLOCK_M)[None, :, None], tl.arange(0, BLOCK_D)[None, None, :]
    lane = warp * SHARE + tl.arange(0, SHARE)[None, :, None]
    key = warp * SHARE + tl.arange(0, SHARE)[None, None, :]
    row, column = tl.arange(0, PARTIAL_ROWS), tl.arange(0, BLOCK_D)
    first_row = (seq * KV_HEADS + head) * GROUP
    q_mask = (row3 < GROUP) & (column3 < DIM) & (warp >= 0)
    queries = tl.load(q + (first_row + row3) * DIM + column3 + warp * 0, mask=q_mask, other=0.0).to(
        DOT
    )
    newest_k, newest_v, query = prefetched_k, prefetched_v, prefetched_k
    if PREFETCH_KV:
        mine = (tile == base) & (length > 0) & (column < DIM)
        newest_k = tl.load(
            k_cache + newest + column, mask=mine, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        newest_v = tl.load(
            v_cache + newest + column, mask=mine, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        mask = (row < GROUP)[:, None] & mine[None, :]
        query = tl.load(
            q + (first_row + row)[:, None] * DIM + column[None, :], mask=mask, other=0.0
        ).to(tl.float32)
    m_i = tl.full([WARPS, BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([WARPS, BLOCK_M], tl.float32)
    acc = tl.zeros([WARPS, BLOCK_M, BLOCK_D], tl.float32)
    old = length - 1 if PREFETCH_KV else length
    first, after = tile - base, until - base
    if PREFETCH_KV:
        m_i, l_i, acc = _tile_step(
            queries,
            prefetched_k,
            prefetched_v,
            key < old - first * BLOCK_N,
            qk_scale,
            m_i,
            l_i,
            acc,
            DOT,
        )
        first += 1
    if first < after:
        table = tables + table_row.to(tl.int64) * table_stride
        start = tile_start(table, first, lane, old, head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N)
        for t in range(first, after):
            k = load_tile(k_cache, start, lane, column3, DIM, BLOCK_SIZE, BLOCK_N)
            v = load_tile(v_cache, start, lane, column3, DIM, BLOCK_SIZE, BLOCK_N)
            # The blocks of the next tile, a tile ahead: a load that waits for another one would
            # halve the pipeline.
            start = tile_start(table, t + 1, lane, old, head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N)
            m_i, l_i, acc = _tile_step(
                queries, k, v, key < old - t * BLOCK_N, qk_scale, m_i, l_i, acc, DOT
            )
    top, total, result = _over_warps(m_i, l_i, acc, BLOCK_M, PARTIAL_ROWS)
    if PREFETCH_KV:
        seen = (tile == base) & (length > 0)
        top, total, result = _with_newest(
            query, newest_k, newest_v, seen, qk_scale, top, total, result
        )
    slot = head * programs + first_program
    if (count == 1) if (PARALLEL_REDUCE or REDUCE_LATER) else (tile == base):
        if not (PARALLEL_REDUCE or REDUCE_LATER):
            total, result = _combine(
                parts, slot, row, 1, count, top, total, result, GROUP, PARTIAL_ROWS, EMPTY
            )
        result *= tl.where(total == 0.0, 0.0, v_scale / total)[:, None]
        write_heads(
            result, first_row + row, column, row < GROUP, out, values, scales, DIM, QUANTIZE
        )
    else:
        _store_partial(parts, head * programs + program, top, total, result, GROUP, EMPTY)
        if PARALLEL_REDUCE:
            one = tl.arange(0, 1)
            for i in range(program - first_program, GROUP, count):
                none, nothing = (
                    tl.full([1], float("-inf"), tl.float32),
                    tl.zeros([1, BLOCK_D], tl.float32),
                )
                some, result_row = _combine(
                    parts, slot, one + i, 0, count, none, tl.zeros([1], tl.float32), nothing,
                    GROUP, PARTIAL_ROWS, EMPTY,
                )  # fmt: skip
                result_row *= (v_scale / some)[:, None]
                write_heads(
                    result_row, first_row + one + i, column, one + i < GROUP, out, values, scales,
                    DIM, QUANTIZE,
                )  # fmt: skip


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    sequences,
    records,
    parts,  # [kv_heads * programs, PARTIAL_ROWS * (BLOCK_D + 4)] int32: see _store_partial
    out,
    values,
    scales,
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # GROUP, padded to what a product takes
    PARTIAL_ROWS: tl.constexpr,  # GROUP, padded to what is worth passing on
    BLOCK_D: tl.constexpr,
    SEQUENCE: tl.constexpr,
    RECORD: tl.constexpr,
    EMPTY: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    PARALLEL_REDUCE: tl.constexpr,
    REDUCE_LATER: tl.constexpr,
    PREFETCH_KV: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DOT: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A run of tiles of one KV head: the end of one sequence, perhaps some whole ones, the
    beginning of another. Or, where sequences are SPLIT_KV, a piece of one.

    A program waits for parts of those after it in the plan, which therefore are launched before it:
    all of them run, or have. PREFETCH_KV: every sequence has one new key in this step, and all
    others are read before the kernel in front has ended.
    """
    head, programs = tl.program_id(0), tl.num_programs(1)
    program = programs - 1 - tl.program_id(1)
    record = records + program * RECORD
    tile, stop, seq = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    base, end, length, table_row, first_program, count = _sequence(record + 4)
    prefetched_k, prefetched_v, newest = 0, 0, 0
    launch_dependents(PDL)
    if SPLIT_KV:
        if tile >= stop:
            wait_for_predecessor(PDL)
            return
        if PREFETCH_KV:
            lane = (tl.arange(0, WARPS) * (BLOCK_N // WARPS))[:, None, None] + tl.arange(
                0, BLOCK_N // WARPS
            )[None, :, None]
            column = tl.arange(0, BLOCK_D)[None, None, :]
            table = tables + table_row.to(tl.int64) * table_stride
            start = tile_start(
                table, tile - base, lane, length - 1, head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N
            )
            prefetched_k = load_tile(k_cache, start, lane, column, DIM, BLOCK_SIZE, BLOCK_N)
            prefetched_v = load_tile(v_cache, start, lane, column, DIM, BLOCK_SIZE, BLOCK_N)
            newest = tile_start(
                table, tl.maximum(length - 1, 0), 0, length, head, KV_HEADS, DIM, BLOCK_SIZE, 1
            )
    wait_for_predecessor(PDL)  # the plan and the tables are from before this step's first layer
    if SPLIT_KV:
        _attend_split(
            q, k_cache, v_cache, tables, parts, out, values, scales, qk_scale, v_scale,
            table_stride,
            head, program, programs, tile, stop, seq, base, length, table_row, first_program, count,
            prefetched_k, prefetched_v, newest,
            KV_HEADS, GROUP, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_M, PARTIAL_ROWS, BLOCK_D,
            PARALLEL_REDUCE, REDUCE_LATER, EMPTY, PREFETCH_KV, QUANTIZE, DOT, WARPS,
        )  # fmt: skip
    else:
        while tile < stop:
            until = tl.minimum(stop, end)
            _attend_split(
                q, k_cache, v_cache, tables, parts, out, values, scales, qk_scale, v_scale,
                table_stride,
                head, program, programs, tile, until, seq, base, length, table_row, first_program,
                count,
                prefetched_k, prefetched_v, newest,
                KV_HEADS, GROUP, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_M, PARTIAL_ROWS, BLOCK_D,
                PARALLEL_REDUCE, REDUCE_LATER, EMPTY, PREFETCH_KV, QUANTIZE, DOT, WARPS,
            )  # fmt: skip
            tile = until
            if tile < stop:
                seq += 1
                base, end, length, table_row, first_program, count = _sequence(
                    sequences + seq * SEQUENCE
                )


@triton.jit
def _reduce_kernel(
    sequences, parts, out, values, scales, v_scale, programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PARTIAL_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, SEQUENCE: tl.constexpr, EMPTY: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """The result of one sequence and KV head of which several programs of the launch before have
    left parts.
    """
    head, seq = tl.program_id(0), tl.program_id(1)
    _, _, _, _, first_program, count = _sequence(sequences + seq * SEQUENCE)
    if count > 1:
        row, column = tl.arange(0, PARTIAL_ROWS), tl.arange(0, BLOCK_D)
        total, result = _combine(
            parts, head * programs + first_program, row, 0, count,
            tl.full([PARTIAL_ROWS], float("-inf"), tl.float32),
            tl.zeros([PARTIAL_ROWS], tl.float32),
            tl.zeros([PARTIAL_ROWS, BLOCK_D], tl.float32), GROUP, PARTIAL_ROWS, EMPTY,
        )  # fmt: skip
        result *= tl.where(total == 0.0, 0.0, v_scale / total)[:, None]
        first_row = (seq * KV_HEADS + head) * GROUP
        write_heads(
            result, first_row + row, column, row < GROUP, out, values, scales, DIM, QUANTIZE
        )


def _runs_all(device: torch.device) -> bool:
    """Whether all programs with a piece each run at once: up to two a multiprocessor, with 82 KB of
    shared memory each.
    """
    assert DECODE.few <= 2
    return platform.platform_of(device).shared_memory >= 2 * 84 * 1024


def plan_decode(
    queries: AttentionMetadata,
    shape: PagedShape,
    *,
    dtype: torch.dtype,
    quantize: bool = False,
    reduce_later: bool = False,
) -> DecodePlan:
    """One query per sequence, at position seq_len - 1. Reads the lengths on the device only.

    `reduce_later`: no program waits for another one; a second launch combines the parts.
    """
    num_seqs, device = queries.seq_lens.shape[0], queries.seq_lens.device
    multiprocessors = platform.platform_of(device).multiprocessors
    programs, split_kv = decode_programs(num_seqs, shape.kv_heads, multiprocessors)
    most = int(multiprocessors * DECODE.programs)
    if reduce_later:  # a program leaves one part
        programs, split_kv = max(programs, num_seqs), True
        most = max(most, programs)
    sizes = (num_seqs * _SEQUENCE, programs * _RECORD)
    sequences, records = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    if num_seqs:
        _plan_decode_kernel[(1,)](
            queries.seq_lens,
            queries.block_table_indices,
            sequences,
            records,
            num_seqs,
            programs,
            int(split_kv),
            BLOCK_N=DECODE.keys,
            MIN_TILES=DECODE.min_tiles,
            PADDED_PROGRAMS=triton.next_power_of_2(most),
            SEQUENCES=_SEQUENCES,
            SEQUENCE=_SEQUENCE,
            RECORD=_RECORD,
            num_warps=4,
        )
    return DecodePlan(
        queries, shape, quantize, sequences, records, programs, split_kv, reduce_later
    )


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: DecodePlan,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor | QuantizedActivations:
    """q [S, heads, head_dim], caches [num_blocks, kv_heads, block_size, head_dim] -> [S, heads *
    head_dim].
    """
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    output = Output.empty(q, quantize=plan.quantize)
    if q.shape[0] == 0:
        return output.result()
    head_dim, shape, tables = q.shape[2], plan.shape, plan.queries.block_tables
    rows, columns = (
        max(16, triton.next_power_of_2(shape.group)),
        triton.next_power_of_2(max(16, head_dim)),
    )
    part_rows = 8 if shape.group <= 8 else rows
    assert rows <= 32, (
        f"{shape.group} query heads per KV head: more than the 32 rows that are combined at a time"
    )
    parts = plan.workspace(shape.kv_heads * plan.programs * part_rows * (columns + 4), q.device)
    launch = tiles_for(q.device).decode_launch(k_cache.element_size(), split_kv=plan.split_kv)
    options = launch_options(q.device, maxnreg=launch.registers)
    spreads = plan.split_kv and not plan.reduce_later and options["PDL"]
    _decode_kernel[(shape.kv_heads, plan.programs)](
        q,
        k_cache,
        v_cache,
        tables,
        plan.sequences,
        plan.records,
        parts,
        output.plain,
        output.values,
        output.scales,
        head_dim**-0.5 * kv_scales[0] * LOG2_E,
        kv_scales[1],
        tables.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        BLOCK_N=DECODE.keys,
        BLOCK_M=rows,
        PARTIAL_ROWS=part_rows,
        BLOCK_D=columns,
        SEQUENCE=_SEQUENCE,
        RECORD=_RECORD,
        EMPTY=_EMPTY,
        SPLIT_KV=plan.split_kv,
        PARALLEL_REDUCE=spreads and rows == 16 and columns <= 128 and _runs_all(q.device),
        REDUCE_LATER=plan.reduce_later,
        # Without counts, that is while a graph is captured, there is one query per sequence; else a
        # step may have several, and their keys are all new.
        PREFETCH_KV=plan.split_kv and plan.queries.is_captured,
        QUANTIZE=plan.quantize,
        DOT=dot_dtype(q.dtype, k_cache.dtype),
        WARPS=launch.warps,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **options,
    )
    if plan.reduce_later:
        _reduce_kernel[(shape.kv_heads, q.shape[0])](
            plan.sequences, parts, output.plain, output.values, output.scales, kv_scales[1],
            plan.programs,
            KV_HEADS=shape.kv_heads, GROUP=shape.group, DIM=head_dim, PARTIAL_ROWS=part_rows,
            BLOCK_D=columns, SEQUENCE=_SEQUENCE, EMPTY=_EMPTY, QUANTIZE=plan.quantize, num_warps=4,
        )  # fmt: skip
    return output.result()
