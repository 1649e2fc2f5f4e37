"""The experts for prefills: pairs are put in expert order, then tiles over many tokens (`kernels/moe/triton.py`)."""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, Activations, model_dtype
from negamax.kernels.launch.triton import launch_options, wait_then_start_next
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_shared import BLOCK, E4M3_MAX, INTERPRETED, SMALLEST, PreparedExperts, dot, even, operands


@triton.jit(do_not_specialize=["num_pairs", "first", "count"])
def _count_pairs(ids, table, num_pairs, first, count, EXPERTS_2: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """table[c, e]: how many of the CHUNK pairs of program c chose expert first + e."""
    wait_then_start_next(PDL)
    pairs, experts = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, EXPERTS_2)
    named = tl.load(ids + pairs, mask=pairs < num_pairs, other=first - 1) - first
    hits = tl.histogram(named, EXPERTS_2, mask=(named >= 0) & (named < count))
    tl.store(table + tl.program_id(0) * EXPERTS_2 + experts, hits, mask=experts < count)


@triton.jit(do_not_specialize=["chunks", "count"])
def _add_up_counts(
    table, counts, chunks, count, EXPERTS_2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Turn the table's numbers into those of all chunks before, and leave the sums in `counts`; ROWS experts a program."""
    wait_then_start_next(PDL)
    experts = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.int32)
    for start in tl.range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        known = (chunk < chunks)[:, None] & (experts < count)[None, :]
        where = table + chunk[:, None] * EXPERTS_2 + experts[None, :]
        hits = tl.load(where, mask=known, other=0)
        tl.store(where, total[None, :] + tl.cumsum(hits, 0) - hits, mask=known)
        total += tl.sum(hits, 0)
    tl.store(counts + experts, total, mask=experts < count)


@triton.jit(do_not_specialize=["num_pairs", "first", "count"])
def _sort_pairs(
    ids, table, order, counts, num_pairs, first, count, EXPERTS_2: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Put the pairs of one chunk in their places in `order`: by expert, then by number."""
    wait_then_start_next(PDL)
    experts, slots = tl.arange(0, EXPERTS_2), tl.arange(0, CHUNK)
    sizes = tl.load(counts + experts, mask=experts < count, other=0)
    before = tl.load(table + tl.program_id(0) * EXPERTS_2 + experts, mask=experts < count, other=0)
    base = tl.cumsum(sizes, 0) - sizes + before
    pairs = tl.program_id(0) * CHUNK + slots
    named = tl.load(ids + pairs, mask=pairs < num_pairs, other=first - 1) - first
    rank = tl.sum(((named[None, :] == named[:, None]) & (slots[None, :] < slots[:, None])).to(tl.int32), 1)
    at = tl.sum(tl.where(named[:, None] == experts[None, :], base[None, :], 0), 1) + rank
    tl.store(order + at, pairs, mask=(named >= 0) & (named < count))


@triton.jit
def _sorted_tile(counts, tile, count, EXPERTS_2: tl.constexpr, TOKENS: tl.constexpr):
    """Which expert token tile number `tile` belongs to (>= count: none), its first place in the order, and the place behind."""
    experts = tl.arange(0, EXPERTS_2)
    sizes = tl.load(counts + experts, mask=experts < count, other=0)
    ends = tl.cumsum((sizes + TOKENS - 1) // TOKENS, 0)
    done = (ends <= tile).to(tl.int32)
    expert = tl.sum(done, 0)
    begin = tl.sum(sizes * done, 0)
    inside = (tile - tl.max(ends * done, 0)) * TOKENS
    end = begin + tl.sum(tl.where(experts == expert, sizes, 0), 0)
    return expert, begin + inside, end


@triton.jit(do_not_specialize=["count"])
def _gate_up_sorted(
    x, x_scale, weight, scale, h, h_scale, order, counts, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS_2: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (token tile of an expert, ROWS columns); h in sorted order. Here the tokens are the tall operand."""
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    wait_then_start_next(PDL)
    expert, begin, end = _sorted_tile(counts, tl.program_id(0) // TILES, count, EXPERTS_2, TOKENS)
    if expert >= count:
        return
    column = tl.program_id(0) % TILES * ROWS
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    places, rows, ks = begin + tl.arange(0, TOKENS), column + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    valid = places < end
    tokens = tl.load(order + places, mask=valid, other=0) // TOP_K
    xs = x + tokens.to(tl.int64)[:, None] * HIDDEN + ks[None, :]
    w = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + rows[:, None] * HIDDEN + ks[None, :]
    scale += (expert * (2 * WIDTH // BLOCK) + column // BLOCK) * BLOCKS
    gate = tl.zeros([TOKENS, ROWS], tl.float32)
    up = tl.zeros([TOKENS, ROWS], tl.float32)
    for k in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        fits = (k + ks < HIDDEN)[None, :] | EVEN
        xt = tl.load(xs + k, mask=valid[:, None] & fits, other=0.0)
        w_fits = ((rows < WIDTH)[:, None] & fits) | EVEN
        w_gate = tl.trans(tl.load(w + k, mask=w_fits, other=0.0))
        w_up = tl.trans(tl.load(w + WIDTH * HIDDEN + k, mask=w_fits, other=0.0))
        if FP8:
            block = k // BLOCK
            s = tl.load(x_scale + tokens * BLOCKS + block, mask=valid, other=0.0)
            gate += tl.dot(xt, w_gate) * (s * tl.load(scale + block))[:, None]
            up += tl.dot(xt, w_up) * (s * tl.load(scale + (WIDTH // BLOCK) * BLOCKS + block))[:, None]
        else:
            gate = dot(xt, w_gate, gate, WIDE)
            up = dot(xt, w_up, up, WIDE)
    y = gate / (1.0 + tl.exp(-gate)) * up
    if FP8:
        s = tl.maximum(tl.max(tl.abs(y), 1) / E4M3_MAX, SMALLEST)
        tl.store(h_scale + places * (WIDTH // ROWS) + column // ROWS, s, mask=valid)
        y = y / s[:, None]
    out = h + places.to(tl.int64)[:, None] * WIDTH + rows[None, :]
    tl.store(out, y.to(h.dtype.element_ty), mask=valid[:, None] & (rows < WIDTH)[None, :])


@triton.jit(do_not_specialize=["count"])
def _down_sorted(
    h, h_scale, weights, weight, scale, out, order, counts, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS_2: tl.constexpr, ROWS: tl.constexpr, REPEAT: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, RESIDENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token tile of an expert times REPEAT row tiles; the results go to the pairs' own rows.

    RESIDENT (FP8, narrow experts): the tokens' h stays in shared memory; else it is read again for every row tile.
    """
    TILES: tl.constexpr = (HIDDEN + ROWS * REPEAT - 1) // (ROWS * REPEAT)
    STEPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    wait_then_start_next(PDL)
    expert, begin, end = _sorted_tile(counts, tl.program_id(0) // TILES, count, EXPERTS_2, TOKENS)
    if expert >= count:
        return
    places, ks = begin + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    row = tl.program_id(0) % TILES * (ROWS * REPEAT)
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
            wt = tl.trans(tl.load(w + tile * (ROWS * WIDTH) + k, mask=(row_fits[:, None] & fits) | EVEN, other=0.0))
            if FP8:
                s = tl.load(h_scale + places * (WIDTH // COLUMNS) + k // COLUMNS, mask=valid, other=0.0) * share
                s *= tl.load(scale + (row + tile * ROWS) // BLOCK * BLOCKS + k // BLOCK)
                acc += tl.dot(ht, wt) * s[:, None]
            else:
                acc = dot(ht, wt, acc, WIDE)
            if step % STEPS == STEPS - 1:
                y = acc if FP8 else acc * share[:, None]
                tl.store(to + tile * ROWS, y.to(out.dtype.element_ty), mask=valid[:, None] & row_fits[None, :])
                acc = tl.zeros([TOKENS, ROWS], tl.float32)


@triton.jit(do_not_specialize=["first", "count"])
def _sum_choices(
    parts, ids, out, first, count, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out[t] = the sum of parts[t, j] over the choices j of our experts, in order, in fp32."""
    wait_then_start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + j) - first
        ours = (expert >= 0) & (expert < count)
        acc += tl.load(parts + (token * TOP_K + j) * HIDDEN + k, mask=(k < HIDDEN) & ours, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + k, acc.to(out.dtype.element_ty), mask=k < HIDDEN)


# --- host side ------------------------------------------------------------------------------------------------------------


def experts_sorted(
    x: Tensor | Activations, ids: Tensor, weights: Tensor, prepared: PreparedExperts, *, first: int, count: int
) -> Tensor:
    (num_tokens, top_k), (hidden, width), device = ids.shape, prepared.down.shape[1:], ids.device
    values, scales = operands(x, prepared)
    num_pairs = num_tokens * top_k
    tile = tiles.sort(width=width, num_tokens=num_tokens, fp8=prepared.fp8)
    options = launch_options(device)
    order, counts = expert_order(ids, first=first, count=count)
    columns = GROUP if prepared.fp8 else tile.down_columns
    even_gate_up, even_down = even(prepared, tile, columns)
    h = torch.empty(num_pairs, width, dtype=values.dtype, device=device)
    h_scale = torch.empty(num_pairs, triton.cdiv(width, GROUP), dtype=torch.float32, device=device)
    shared = {"HIDDEN": hidden, "WIDTH": width, "EXPERTS_2": triton.next_power_of_2(count)}
    shared |= {"FP8": prepared.fp8, "WIDE": INTERPRETED, **options}
    token_tiles = min(num_pairs, num_pairs // tile.tokens + count)  # an upper bound: each expert may waste one
    _gate_up_sorted[(token_tiles * triton.cdiv(width, tile.gate_up_rows),)](
        values, scales, prepared.gate_up, prepared.gate_up_scale, h, h_scale, order, counts, count,
        TOP_K=top_k, ROWS=tile.gate_up_rows, TOKENS=tile.tokens, COLUMNS=tile.gate_up_columns, EVEN=even_gate_up,
        STAGES=tile.gate_up_stages, num_warps=tile.gate_up_warps, **shared,
    )  # fmt: skip
    parts = torch.empty(num_tokens, top_k, hidden, dtype=model_dtype(x), device=device)
    token_tiles = min(num_pairs, num_pairs // tile.down_tokens + count)
    row_tiles = triton.cdiv(hidden, tile.down_rows)
    repeat = gcd(tile.down_repeat, row_tiles)  # without a rest
    _down_sorted[(token_tiles * row_tiles // repeat,)](
        h, h_scale, weights, prepared.down, prepared.down_scale, parts, order, counts, count,
        ROWS=tile.down_rows, REPEAT=repeat, RESIDENT=tile.down_resident, TOKENS=tile.down_tokens,
        COLUMNS=columns, EVEN=even_down, STAGES=tile.down_stages, num_warps=tile.down_warps, **shared,
    )  # fmt: skip
    out = torch.empty(num_tokens, 1, hidden, dtype=model_dtype(x), device=device)
    grid = (num_tokens, triton.cdiv(hidden, tiles.SUM_COLUMNS))
    _sum_choices[grid](parts, ids, out, first, count, HIDDEN=hidden, TOP_K=top_k, COLUMNS=tiles.SUM_COLUMNS, **options)
    return out


def expert_order(ids: Tensor, *, first: int, count: int) -> tuple[Tensor, Tensor]:
    """ids [T, top_k] -> the pairs in expert order [T * top_k] int32 (those of other experts left out), counts [count] int32."""
    num_pairs, device, options = ids.numel(), ids.device, launch_options(ids.device)
    experts_2, chunks = triton.next_power_of_2(count), triton.cdiv(num_pairs, tiles.SORT_CHUNK)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    table = torch.empty(chunks, experts_2, dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    sizes = {"EXPERTS_2": experts_2, "CHUNK": tiles.SORT_CHUNK, **options}
    _count_pairs[(chunks,)](ids, table, num_pairs, first, count, **sizes)
    rows = min(tiles.SORT_ROWS, experts_2)
    grid = (triton.cdiv(count, rows),)
    _add_up_counts[grid](table, counts, chunks, count, EXPERTS_2=experts_2, ROWS=rows, BLOCK=tiles.SORT_BLOCK, **options)
    _sort_pairs[(chunks,)](ids, table, order, counts, num_pairs, first, count, num_warps=8, **sizes)
    return order, counts
