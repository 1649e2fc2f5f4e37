"""The experts for prefills: pairs are put in expert order, then tiles over many tokens
(`kernels/moe/triton.py`).
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.kernels.activations import GROUP, QuantizedActivations, model_dtype
from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_shared import (
    BLOCK,
    INTERPRETED,
    SMALLEST,
    PreparedExperts,
    dot,
    even,
    operands,
)
from negamax.kernels.quantize.triton import e4m3_max


@triton.jit
def _experts_of(ids, pairs, end, first, count):
    """Which of our experts each pair chose: 0 .. count - 1, or -1 for one of another rank or none
    at all.
    """
    named = tl.load(ids + pairs, mask=pairs < end, other=-1) - first
    return tl.where((named >= 0) & (named < count), named, -1)


@triton.jit(do_not_specialize=["num_pairs", "span", "first", "count"])
def _count_pairs(
    ids, table, num_pairs, span, first, count, EXPERTS_2: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """table[p, e]: how many of the `span` pairs of program p chose expert first + e."""
    wait_then_launch_dependents(PDL)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, num_pairs)
    hits = tl.zeros([EXPERTS_2], tl.int32)
    for start in range(begin, end, CHUNK):
        named = _experts_of(ids, start + tl.arange(0, CHUNK), end, first, count)
        hits += tl.histogram(named, EXPERTS_2, mask=named >= 0)
    tl.store(table + tl.program_id(0) * EXPERTS_2 + tl.arange(0, EXPERTS_2), hits)


@triton.jit(do_not_specialize=["num_pairs", "span", "first", "count"])
def _sort_pairs(
    ids, table, order, counts, num_pairs, span, first, count,
    EXPERTS_2: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put `span` pairs in their places in `order`: by expert, then by number, those that chose none
    of ours last.
    """
    wait_then_launch_dependents(PDL)
    experts, slots = tl.arange(0, EXPERTS_2), tl.arange(0, CHUNK)
    mine, programs = tl.program_id(0), tl.num_programs(0)
    all_hits = tl.zeros([BLOCK, EXPERTS_2], tl.int32)
    hits_before = tl.zeros([BLOCK, EXPERTS_2], tl.int32)  # those of the programs before this one
    for program in range(0, programs, BLOCK):
        others = program + tl.arange(0, BLOCK)[:, None]
        hits = tl.load(
            table + others * EXPERTS_2 + experts[None, :], mask=others < programs, other=0
        )
        all_hits += hits
        hits_before += tl.where(others < mine, hits, 0)
    sizes, before = tl.sum(all_hits, 0), tl.sum(hits_before, 0)
    if mine == 0:
        tl.store(counts + experts, sizes, mask=experts < count)
    begin = mine * span
    end = tl.minimum(begin + span, num_pairs)
    base = tl.cumsum(sizes, 0) - sizes + before
    rest = tl.sum(sizes, 0) + begin - tl.sum(before, 0)
    for start in range(begin, end, CHUNK):
        pairs = start + slots
        named = _experts_of(ids, pairs, end, first, count)
        rank = tl.sum(
            ((named[None, :] == named[:, None]) & (slots[None, :] < slots[:, None])).to(tl.int32), 1
        )
        at = tl.where(named < 0, rest, tl.gather(base, tl.maximum(named, 0), 0)) + rank
        tl.store(order + at, pairs, mask=pairs < end)
        base += tl.histogram(named, EXPERTS_2, mask=named >= 0)
        rest += tl.sum((named < 0).to(tl.int32), 0)


@triton.jit
def _sorted_tile(counts, tile, count, EXPERTS_2: tl.constexpr, TOKENS: tl.constexpr):
    """Which expert token tile number `tile` belongs to, its first place in the order, and the place
    behind that expert's.

    An expert >= count: the tile is one of the pairs that chose none of ours, or lies behind all
    pairs.
    """
    experts = tl.arange(0, EXPERTS_2)
    sizes = tl.load(counts + experts, mask=experts < count, other=0)
    ends = tl.cumsum((sizes + TOKENS - 1) // TOKENS, 0)
    done = (ends <= tile).to(tl.int32)
    expert = tl.sum(done, 0)
    begin = tl.sum(sizes * done, 0)
    inside = (tile - tl.max(ends * done, 0)) * TOKENS
    end = begin + tl.sum(tl.where(experts == expert, sizes, 0), 0)
    return expert, begin + inside, end


@triton.jit
def _product(
    xs, x_scale, weight, scale, tokens, valid, row, last_row,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[TOKENS, ROWS] fp32: the rows at xs times rows row .. row + ROWS - 1 (up to last_row) of the
    weight.
    """
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    if FP8:
        for k in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
            xt = tl.load(xs + k, mask=valid[:, None], other=0.0)
            s = tl.load(x_scale + tokens * (HIDDEN // BLOCK) + k // BLOCK, mask=valid, other=0.0)
            acc += (
                tl.dot(xt, tl.trans(weight.load([row, k])))
                * (s * tl.load(scale + k // BLOCK))[:, None]
            )
    else:
        rows, ks = row + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        w = weight + rows.to(tl.int64)[:, None] * HIDDEN + ks[None, :]
        for k in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
            fits = (k + ks < HIDDEN)[None, :] | EVEN
            xt = tl.load(xs + k, mask=valid[:, None] & fits, other=0.0)
            wt = tl.trans(
                tl.load(w + k, mask=((rows <= last_row)[:, None] & fits) | EVEN, other=0.0)
            )
            acc = dot(xt, wt, acc, WIDE)
    return acc


@triton.jit(do_not_specialize=["count"])
def _gate_up_sorted(
    x,  # [T, HIDDEN]
    x_scale,
    weight,  # [count * 2 * WIDTH, HIDDEN]; in FP8 a descriptor of it, blocks [ROWS, COLUMNS]
    scale,
    h,  # [T * TOP_K, WIDTH], in sorted order
    h_scale,
    order,
    counts,
    count,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (token tile of an expert, ROWS columns of h). Here the tokens are the tall operand.

    Gate and up one after the other: x is read twice, but a multiprocessor holds two programs with
    long pipelines.
    """
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    wait_then_launch_dependents(PDL)
    expert, begin, end = _sorted_tile(counts, tl.program_id(0) // TILES, count, EXPERTS_2, TOKENS)
    if expert >= count:
        return
    column = tl.program_id(0) % TILES * ROWS
    places, columns = begin + tl.arange(0, TOKENS), column + tl.arange(0, ROWS)
    valid = places < end
    tokens = tl.load(order + places, mask=valid, other=0) // TOP_K
    xs = x + tokens.to(tl.int64)[:, None] * HIDDEN + tl.arange(0, COLUMNS)[None, :]
    row = expert * (2 * WIDTH)
    scale += (expert * (2 * WIDTH // BLOCK) + column // BLOCK) * BLOCKS
    gate = _product(xs, x_scale, weight, scale, tokens, valid, row + column, row + WIDTH - 1,
                    HIDDEN, ROWS, TOKENS, COLUMNS, FP8, EVEN, WIDE, STAGES)  # fmt: skip
    row += WIDTH
    up = _product(xs, x_scale, weight, scale + (WIDTH // BLOCK) * BLOCKS, tokens, valid,
        row + column, row + WIDTH - 1,
                  HIDDEN, ROWS, TOKENS, COLUMNS, FP8, EVEN, WIDE, STAGES)  # fmt: skip
    y = gate / (1.0 + tl.exp(-gate)) * up
    if FP8:
        s = tl.maximum(tl.max(tl.abs(y), 1) / e4m3_max(h.dtype.element_ty), SMALLEST)
        tl.store(h_scale + places * (WIDTH // ROWS) + column // ROWS, s, mask=valid)
        y = y / s[:, None]
    out = h + places.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out, y.to(h.dtype.element_ty), mask=valid[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _clear(
    order,
    out,
    begin,
    end,
    row,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    REPEAT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Zeros in the results of the pairs at places begin .. of the order, REPEAT row tiles."""
    places, rows = begin + tl.arange(0, TOKENS), row + tl.arange(0, ROWS)
    valid = places < end
    to = (
        out
        + tl.load(order + places, mask=valid, other=0).to(tl.int64)[:, None] * HIDDEN
        + rows[None, :]
    )
    zeros = tl.zeros([TOKENS, ROWS], tl.float32).to(out.dtype.element_ty)
    for tile in range(REPEAT):
        tl.store(
            to + tile * ROWS, zeros, mask=valid[:, None] & (rows + tile * ROWS < HIDDEN)[None, :]
        )


@triton.jit(do_not_specialize=["num_pairs", "count"])
def _down_sorted(
    h, h_scale, weights, weight, scale, out, order, counts, num_pairs, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS_2: tl.constexpr, ROWS: tl.constexpr,
    REPEAT: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr, RESIDENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token tile of an expert times REPEAT row tiles; the results go to the pairs' own rows.
    Zeros for those of no expert.

    RESIDENT (FP8, narrow experts): the tokens' h stays in shared memory; else it is read again for
    every row tile.
    """
    TILES: tl.constexpr = (HIDDEN + ROWS * REPEAT - 1) // (ROWS * REPEAT)
    STEPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    wait_then_launch_dependents(PDL)
    expert, begin, end = _sorted_tile(counts, tl.program_id(0) // TILES, count, EXPERTS_2, TOKENS)
    row = tl.program_id(0) % TILES * (ROWS * REPEAT)
    if expert >= count:
        if begin < num_pairs:
            _clear(order, out, begin, num_pairs, row, HIDDEN, ROWS, REPEAT, TOKENS)
        return
    places, ks = begin + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    rows = row + tl.arange(0, ROWS)
    valid = places < end
    pairs = tl.load(order + places, mask=valid, other=0)
    share = tl.load(weights + pairs, mask=valid, other=0.0)
    hs = h + places.to(tl.int64)[:, None] * WIDTH + ks[None, :]
    w = weight + expert.to(tl.int64) * (HIDDEN * WIDTH) + rows[:, None] * WIDTH + ks[None, :]
    scale += expert * ((HIDDEN + BLOCK - 1) // BLOCK * BLOCKS)
    to = out + pairs.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    if RESIDENT:
        hts, shares = (), ()
        for step in tl.static_range(STEPS):
            hts = hts + (tl.load(hs + step * COLUMNS, mask=valid[:, None], other=0.0),)
            s = tl.load(h_scale + places * (WIDTH // COLUMNS) + step, mask=valid, other=0.0)
            shares = shares + (s * share,)
        for tile in tl.range(0, REPEAT, num_stages=STAGES):
            y = tl.zeros([TOKENS, ROWS], tl.float32)
            for step in tl.static_range(STEPS):
                wt = tl.trans(tl.load(w + tile * (ROWS * WIDTH) + step * COLUMNS))
                block = (row + tile * ROWS) // BLOCK * BLOCKS + step * COLUMNS // BLOCK
                y += tl.dot(hts[step], wt) * (shares[step] * tl.load(scale + block))[:, None]
            tl.store(to + tile * ROWS, y.to(out.dtype.element_ty), mask=valid[:, None])
    else:
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
        for step in tl.range(0, REPEAT * STEPS, num_stages=STAGES):
            tile = step // STEPS
            k = step % STEPS * COLUMNS
            fits = (k + ks < WIDTH)[None, :] | EVEN
            row_fits = rows + tile * ROWS < HIDDEN
            ht = tl.load(hs + k, mask=valid[:, None] & fits, other=0.0)
            wt = tl.trans(
                tl.load(
                    w + tile * (ROWS * WIDTH) + k, mask=(row_fits[:, None] & fits) | EVEN, other=0.0
                )
            )
            if FP8:
                s = (
                    tl.load(
                        h_scale + places * (WIDTH // COLUMNS) + k // COLUMNS, mask=valid, other=0.0
                    )
                    * share
                )
                s *= tl.load(scale + (row + tile * ROWS) // BLOCK * BLOCKS + k // BLOCK)
                acc += tl.dot(ht, wt) * s[:, None]
            else:
                acc = dot(ht, wt, acc, WIDE)
            if step % STEPS == STEPS - 1:
                y = acc if FP8 else acc * share[:, None]
                tl.store(
                    to + tile * ROWS,
                    y.to(out.dtype.element_ty),
                    mask=valid[:, None] & row_fits[None, :],
                )
                acc = tl.zeros([TOKENS, ROWS], tl.float32)


# --- host side -----------------------------------------------------------------------------------


def experts_sorted(
    x: Tensor | QuantizedActivations,
    ids: Tensor,
    weights: Tensor,
    prepared: PreparedExperts,
    *,
    first: int,
    count: int,
) -> Tensor:
    """-> [T, top_k, hidden]. Whoever reads that next adds up the choices on the way: a launch and 2
    x 2 bytes a value less.
    """
    (num_tokens, top_k), (hidden, width), device = ids.shape, prepared.down.shape[1:], ids.device
    values, scales = operands(x, prepared)
    num_pairs = num_tokens * top_k
    tile = tiles.tiles_for(device).sort(width=width, num_tokens=num_tokens, fp8=prepared.fp8)
    options = launch_options(device)
    order, counts = expert_order(ids, first=first, count=count)
    columns = GROUP if prepared.fp8 else tile.down_columns
    even_gate_up, even_down = even(prepared, tile, columns)
    h = torch.empty(num_pairs, width, dtype=values.dtype, device=device)
    h_scale = torch.empty(num_pairs, triton.cdiv(width, GROUP), dtype=torch.float32, device=device)
    shared = {"HIDDEN": hidden, "WIDTH": width, "EXPERTS_2": triton.next_power_of_2(count)}
    shared |= {"FP8": prepared.fp8, "WIDE": INTERPRETED, **options}
    weight = prepared.gate_up.view(-1, hidden)
    # an upper bound: each expert may waste one
    token_tiles = min(num_pairs, num_pairs // tile.tokens + count)
    _gate_up_sorted[(token_tiles * triton.cdiv(width, tile.gate_up_rows),)](
        values, scales,
        TensorDescriptor.from_tensor(weight, [tile.gate_up_rows,
            tile.gate_up_columns]) if prepared.fp8 else weight,
        prepared.gate_up_scale, h, h_scale, order, counts, count,
        TOP_K=top_k, ROWS=tile.gate_up_rows, TOKENS=tile.tokens, COLUMNS=tile.gate_up_columns,
        EVEN=even_gate_up,
        STAGES=tile.gate_up_stages, num_warps=tile.gate_up_warps, **shared,
    )  # fmt: skip
    out = torch.empty(num_tokens, top_k, hidden, dtype=model_dtype(x), device=device)
    # and so may the pairs that chose none of ours
    token_tiles = min(num_pairs, num_pairs // tile.down_tokens + count + 1)
    row_tiles = triton.cdiv(hidden, tile.down_rows)
    repeat = gcd(tile.down_repeat, row_tiles)  # without a rest
    _down_sorted[(token_tiles * row_tiles // repeat,)](
        h, h_scale, weights, prepared.down, prepared.down_scale, out, order, counts, num_pairs,
        count,
        ROWS=tile.down_rows, REPEAT=repeat, RESIDENT=tile.down_resident, TOKENS=tile.down_tokens,
        COLUMNS=columns, EVEN=even_down, STAGES=tile.down_stages, num_warps=tile.down_warps,
        **shared,
    )  # fmt: skip
    return out


def expert_order(ids: Tensor, *, first: int, count: int) -> tuple[Tensor, Tensor]:
    """ids [T, top_k] -> the pairs in expert order [T * top_k] int32 (those of other experts last),
    counts [count] int32.
    """
    num_pairs, device = ids.numel(), ids.device
    span = max(1, triton.cdiv(num_pairs, tiles.SORT_PROGRAMS * tiles.SORT_CHUNK)) * tiles.SORT_CHUNK
    programs, experts_2 = triton.cdiv(num_pairs, span), triton.next_power_of_2(count)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    table = torch.empty(programs, experts_2, dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    shared = {"EXPERTS_2": experts_2, "num_warps": 8, **launch_options(device)}
    _count_pairs[(programs,)](
        ids, table, num_pairs, span, first, count, CHUNK=tiles.COUNT_CHUNK, **shared
    )
    _sort_pairs[(programs,)](
        ids,
        table,
        order,
        counts,
        num_pairs,
        span,
        first,
        count,
        CHUNK=tiles.SORT_CHUNK,
        BLOCK=tiles.SORT_BLOCK,
        **shared,
    )
    return order, counts
