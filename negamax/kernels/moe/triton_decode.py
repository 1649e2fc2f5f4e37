"""The experts for a decode step's tokens: *token* for a handful, *scan* for the rest
(`kernels/moe/triton.py`).
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, model_dtype
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

_UNIT = tl.constexpr(16)  # neighbouring columns one thread multiplies in the token kernels


# --- experts, a handful of tokens ----------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "count"])
def _gate_up_token(
    x, ids, weight, scale, h, first, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h of ROWS intermediate columns of one pair: silu(gate x) * (up x).

    Tiles of the weights are [units, rows, _UNIT], not rows first: Triton lays the threads of a warp
    along the axis that comes first, so they read neighbouring units of one row, and a thread uses
    what it has of x for all its rows.
    """
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    pair, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tile * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, COLUMNS // _UNIT)
    at = unit[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    x += (pair // TOP_K) * HIDDEN
    wait_then_launch_dependents(PDL)
    expert = tl.load(ids + pair) - first
    if (expert < 0) | (expert >= count):
        return
    weight += expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
    scale += (expert * (2 * WIDTH // BLOCK) + tile * ROWS // BLOCK) * BLOCKS
    xs, gates, ups, gate_scales, up_scales = (), (), (), (), ()
    for start in tl.static_range(0, HIDDEN, COLUMNS):
        k = start + at
        inside = (rows < WIDTH)[None, :, None] & (k < HIDDEN)[:, None, :]
        where = weight + rows[None, :, None] * HIDDEN + k[:, None, :]
        gates = gates + (tl.load(where, mask=inside | EVEN, other=0.0),)
        ups = ups + (tl.load(where + WIDTH * HIDDEN, mask=inside | EVEN, other=0.0),)
        xs = xs + (tl.load(x + k, mask=(k < HIDDEN) | EVEN, other=0.0),)
        if FP8:
            block = (start + unit * _UNIT) // BLOCK
            gate_scales = gate_scales + (tl.load(scale + block, mask=block < BLOCKS, other=0.0),)
            up_scales = up_scales + (
                tl.load(scale + (WIDTH // BLOCK) * BLOCKS + block, mask=block < BLOCKS, other=0.0),
            )
    gate = tl.zeros([COLUMNS // _UNIT, ROWS], tl.float32)
    up = tl.zeros([COLUMNS // _UNIT, ROWS], tl.float32)
    for step in tl.static_range((HIDDEN + COLUMNS - 1) // COLUMNS):
        wide = xs[step].to(tl.float32)[:, None, :]
        part_gate = tl.sum(gates[step].to(tl.float32) * wide, 2)
        part_up = tl.sum(ups[step].to(tl.float32) * wide, 2)
        if FP8:
            part_gate *= gate_scales[step][:, None]
            part_up *= up_scales[step][:, None]
        gate += part_gate
        up += part_up
    g, u = tl.sum(gate, 0), tl.sum(up, 0)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(h + pair * WIDTH + rows, y.to(h.dtype.element_ty), mask=rows < WIDTH)


@triton.jit(do_not_specialize=["first", "count"])
def _down_token(
    h, ids, weights, weight, scale, out, first, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of one token: the weighted sum over CHOICES of its experts. The weights are in
    flight before h is finished.

    `ids` and `weights` are older than the kernel before this one, so they may be read ahead of it
    (past L1).
    """
    TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    PARTS: tl.constexpr = (TOP_K + CHOICES - 1) // CHOICES
    UNITS: tl.constexpr = COLUMNS // _UNIT  # of one choice in one step
    STEPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    slot, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tile * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, CHOICES * UNITS)
    choice = slot % PARTS * CHOICES + unit // UNITS
    pair = slot // PARTS * TOP_K + choice
    expert = tl.load(ids + pair, mask=choice < TOP_K, other=-1, cache_modifier=".cg") - first
    known = (expert >= 0) & (expert < count)
    expert = tl.where(known, expert, 0)
    share = tl.load(weights + pair, mask=known, other=0.0, cache_modifier=".cg")
    w_base = (
        weight + expert.to(tl.int64)[:, None, None] * (HIDDEN * WIDTH) + rows[None, :, None] * WIDTH
    )
    s_base = scale + (expert * ((HIDDEN + BLOCK - 1) // BLOCK) + tile * ROWS // BLOCK) * BLOCKS
    inner = tl.arange(0, _UNIT)
    ws, scales, hs = (), (), ()
    for step in tl.static_range(STEPS):
        first_k = step * COLUMNS + (unit % UNITS) * _UNIT
        k = first_k[:, None] + inner[None, :]
        inside = known[:, None, None] & (
            ((rows < HIDDEN)[None, :, None] & (k < WIDTH)[:, None, :]) | EVEN
        )
        ws = ws + (tl.load(w_base + k[:, None, :], mask=inside, other=0.0),)
        if FP8:
            scales = scales + (
                tl.load(s_base + first_k // BLOCK, mask=known & (first_k < WIDTH), other=0.0)
                * share,
            )
        else:
            scales = scales + (share,)
    wait_then_launch_dependents(PDL)
    for step in tl.static_range(STEPS):
        k = (step * COLUMNS + (unit % UNITS) * _UNIT)[:, None] + inner[None, :]
        hs = hs + (
            tl.load(
                h + pair[:, None] * WIDTH + k, mask=known[:, None] & ((k < WIDTH) | EVEN), other=0.0
            ),
        )
    acc = tl.zeros([CHOICES * UNITS, ROWS], tl.float32)
    for step in tl.static_range(STEPS):
        part = tl.sum(ws[step].to(tl.float32) * hs[step].to(tl.float32)[:, None, :], 2)
        acc += part * scales[step][:, None]
    tl.store(
        out + slot * HIDDEN + rows, tl.sum(acc, 0).to(out.dtype.element_ty), mask=rows < HIDDEN
    )


# --- experts, tiles of tokens --------------------------------------------------------------------


@triton.jit
def _gate_up_tile(
    x, x_scale, weight, scale, h, h_scale, expert, column, tokens, places, valid,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Intermediate columns column .. column + ROWS - 1 of `expert` for the rows `tokens` of x, into
    the rows `places` of h.
    """
    rows = column + tl.arange(0, ROWS)
    ks = tl.arange(0, COLUMNS)
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    w = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + rows[:, None] * HIDDEN + ks[None, :]
    scale += (expert * (2 * WIDTH // BLOCK) + column // BLOCK) * BLOCKS
    xs = x + tokens.to(tl.int64)[:, None] * HIDDEN + ks[None, :]
    row_fits = (rows < WIDTH)[:, None]
    gate = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        if EVEN:
            w_gate, w_up = tl.load(w + k), tl.load(w + WIDTH * HIDDEN + k)
            xt = tl.trans(tl.load(xs + k, mask=valid[:, None], other=0.0))
        else:
            fits = (k + ks < HIDDEN)[None, :]
            w_gate = tl.load(w + k, mask=row_fits & fits, other=0.0)
            w_up = tl.load(w + WIDTH * HIDDEN + k, mask=row_fits & fits, other=0.0)
            xt = tl.trans(tl.load(xs + k, mask=valid[:, None] & fits, other=0.0))
        if FP8:
            block = k // BLOCK
            s = tl.load(x_scale + tokens * BLOCKS + block, mask=valid, other=0.0)
            gate += tl.dot(w_gate, xt) * (s * tl.load(scale + block))[None, :]
            up += (
                tl.dot(w_up, xt) * (s * tl.load(scale + (WIDTH // BLOCK) * BLOCKS + block))[None, :]
            )
        else:
            gate = dot(w_gate, xt, gate, WIDE)
            up = dot(w_up, xt, up, WIDE)
    y = gate / (1.0 + tl.exp(-gate)) * up
    out = h + places.to(tl.int64)[None, :] * WIDTH + rows[:, None]
    if FP8:
        largest = tl.max(tl.abs(y), 0)
        s = tl.maximum(largest / e4m3_max(h.dtype.element_ty), SMALLEST)
        tl.store(h_scale + places * (WIDTH // ROWS) + column // ROWS, s, mask=valid)
        y = y / s[None, :]
    tl.store(out, y.to(h.dtype.element_ty), mask=row_fits & valid[None, :])


@triton.jit
def _down_tile(
    h, h_scale, weights, weight, scale, out, expert, row, places, pairs, valid,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs row .. row + ROWS - 1 of `expert` for the rows `places` of h, times the routing
    weight, into rows `pairs`.

    FP8: COLUMNS is the group of columns that share a scale in h.
    """
    rows = row + tl.arange(0, ROWS)
    ks = tl.arange(0, COLUMNS)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    w = weight + expert.to(tl.int64) * (HIDDEN * WIDTH) + rows[:, None] * WIDTH + ks[None, :]
    scale += (expert * ((HIDDEN + BLOCK - 1) // BLOCK) + row // BLOCK) * BLOCKS
    hs = h + places.to(tl.int64)[:, None] * WIDTH + ks[None, :]
    row_fits = (rows < HIDDEN)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        if EVEN:
            ws = tl.load(w + k)
            ht = tl.trans(tl.load(hs + k, mask=valid[:, None], other=0.0))
        else:
            fits = (k + ks < WIDTH)[None, :]
            ws = tl.load(w + k, mask=row_fits & fits, other=0.0)
            ht = tl.trans(tl.load(hs + k, mask=valid[:, None] & fits, other=0.0))
        if FP8:
            s = tl.load(h_scale + places * (WIDTH // COLUMNS) + k // COLUMNS, mask=valid, other=0.0)
            acc += tl.dot(ws, ht) * (s * tl.load(scale + k // BLOCK))[None, :]
        else:
            acc = dot(ws, ht, acc, WIDE)
    acc *= tl.load(weights + pairs, mask=valid, other=0.0)[None, :]
    to = out + pairs.to(tl.int64)[None, :] * HIDDEN + rows[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=row_fits & valid[None, :])


@triton.jit
def _find_pairs(ids, num_pairs, wanted, begin, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """The pairs that chose expert `wanted`, in order: number begin .. begin + TOKENS - 1 of them,
    and how many there are.
    """
    slots = begin + tl.arange(0, TOKENS)
    found = tl.zeros([TOKENS], tl.int32)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        hit = (tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) == wanted).to(tl.int32)
        here = tl.sum(hit, 0)
        if here > 0:
            rank = total + tl.cumsum(hit, 0) - hit
            match = (rank[None, :] == slots[:, None]) & (hit[None, :] > 0)
            found += tl.sum(tl.where(match, pairs[None, :], 0), 1)
            total += here
    return found, total


@triton.jit(do_not_specialize=["num_pairs", "first", "count", "by_pair"])
def _gate_up_scan(
    x, x_scale, ids, weight, scale, h, h_scale, lists, counts, num_pairs, first, count, by_pair,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One (expert, ROWS columns), over all tokens that chose it. Leaves the expert's pairs in
    `lists` for the down kernel.

    With `by_pair` a program stands for a pair and works for its expert if it is the first to name
    it; else for an expert.
    """
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    who, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    wait_then_launch_dependents(PDL)
    expert = who
    if by_pair != 0:
        expert = tl.load(ids + who) - first
    if (expert < 0) | (expert >= count):
        return
    pairs, total = _find_pairs(ids, num_pairs, expert + first, 0, TOKENS, CHUNK)
    if (by_pair != 0) & (tl.sum(tl.where(tl.arange(0, TOKENS) == 0, pairs, 0), 0) != who):
        return
    if tile == 0:
        tl.store(counts + expert, total)
    if total == 0:
        return
    begin = 0
    while begin < total:
        slots = begin + tl.arange(0, TOKENS)
        valid = slots < total
        if tile == 0:
            tl.store(lists + expert * (num_pairs // TOP_K) + slots, pairs, mask=valid)
        _gate_up_tile(x, x_scale, weight, scale, h, h_scale, expert, tile * ROWS, pairs // TOP_K,
            pairs, valid,
                      HIDDEN, WIDTH, ROWS, TOKENS, COLUMNS, FP8, EVEN, WIDE, STAGES)  # fmt: skip
        begin += TOKENS
        if begin < total:
            pairs, _ = _find_pairs(ids, num_pairs, expert + first, begin, TOKENS, CHUNK)


@triton.jit
def _clear(
    ids,
    out,
    num_pairs,
    first,
    count,
    row,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Zeros for columns row .. row + ROWS - 1 of the pairs that name no expert of ours."""
    rows = row + tl.arange(0, ROWS)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        expert = tl.load(ids + pairs, mask=pairs < num_pairs, other=first) - first
        empty = (expert < 0) | (expert >= count)
        to = out + pairs.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
        zeros = tl.zeros([CHUNK, ROWS], tl.float32).to(out.dtype.element_ty)
        tl.store(to, zeros, mask=empty[:, None] & (rows < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "first", "count", "by_pair"])
def _down_scan(
    h, h_scale, ids, weights, weight, scale, out, lists, counts, num_pairs, first, count, by_pair,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One (expert, ROWS outputs) over the pairs that `_gate_up_scan` listed; the first programs
    write the zeros.
    """
    TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    who, tile = tl.program_id(0) // TILES - 1, tl.program_id(0) % TILES
    wait_then_launch_dependents(PDL)
    if who < 0:
        _clear(ids, out, num_pairs, first, count, tile * ROWS, HIDDEN, ROWS, 32)
        return
    expert = who
    if by_pair != 0:
        expert = tl.load(ids + who) - first
    if (expert < 0) | (expert >= count):
        return
    entries = lists + expert * (num_pairs // TOP_K)
    total = tl.load(counts + expert)
    if (by_pair != 0) & (tl.load(entries) != who):
        return
    begin = 0
    while begin < total:
        slots = begin + tl.arange(0, TOKENS)
        valid = slots < total
        pairs = tl.load(entries + slots, mask=valid, other=0)
        _down_tile(h, h_scale, weights, weight, scale, out, expert, tile * ROWS, pairs, pairs,
            valid,
                   HIDDEN, WIDTH, ROWS, TOKENS, COLUMNS, FP8, EVEN, WIDE, STAGES)  # fmt: skip
        begin += TOKENS


# --- host side -----------------------------------------------------------------------------------


def token(
    x: Tensor, ids: Tensor, weights: Tensor, prepared: PreparedExperts, *, first: int, count: int
) -> Tensor:
    (num_tokens, hidden), top_k, width = x.shape, ids.shape[1], prepared.down.shape[2]
    assert x.is_contiguous()
    tile = tiles.tiles_for(x.device).token(width)
    shared = {
        "HIDDEN": hidden,
        "WIDTH": width,
        "TOP_K": top_k,
        "FP8": prepared.fp8,
        **launch_options(x.device),
    }
    h = x.new_empty(num_tokens * top_k, width)
    _gate_up_token[(num_tokens * top_k * triton.cdiv(width, tile.gate_up_rows),)](
        x, ids, prepared.gate_up, prepared.gate_up_scale, h, first, count,
        ROWS=tile.gate_up_rows, COLUMNS=tile.gate_up_columns, num_warps=tile.gate_up_warps,
        EVEN=hidden % tile.gate_up_columns == 0 and width % tile.gate_up_rows == 0, **shared,
    )  # fmt: skip
    choices = min(tile.down_choices, triton.next_power_of_2(top_k))
    parts = triton.cdiv(top_k, choices)
    out = x.new_empty(num_tokens, parts, hidden)
    _down_token[(num_tokens * parts * triton.cdiv(hidden, tile.down_rows),)](
        h, ids, weights, prepared.down, prepared.down_scale, out, first, count,
        CHOICES=choices, ROWS=tile.down_rows, COLUMNS=tile.down_columns, num_warps=tile.down_warps,
        EVEN=width % tile.down_columns == 0 and hidden % tile.down_rows == 0, **shared,
    )  # fmt: skip
    return out


def scan(
    x: Tensor | QuantizedActivations,
    ids: Tensor,
    weights: Tensor,
    prepared: PreparedExperts,
    *,
    first: int,
    count: int,
) -> Tensor:
    (num_tokens, top_k), (hidden, width), device = ids.shape, prepared.down.shape[1:], ids.device
    values, scales = operands(x, prepared)
    num_pairs = num_tokens * top_k
    tile = tiles.tiles_for(device).scan(width=width, num_tokens=num_tokens, fp8=prepared.fp8)
    by_pair = num_pairs < count
    who = num_pairs if by_pair else count
    columns = tile.gate_up_rows if prepared.fp8 else tile.down_columns
    even_gate_up, even_down = even(prepared, tile, columns)
    h = torch.empty(num_pairs, width, dtype=values.dtype, device=device)
    h_scale = torch.empty(
        num_pairs, triton.cdiv(width, tile.gate_up_rows), dtype=torch.float32, device=device
    )
    lists = torch.empty(count * (num_tokens + 1), dtype=torch.int32, device=device)
    counts = lists[count * num_tokens :]
    shared = {
        "HIDDEN": hidden,
        "WIDTH": width,
        "TOP_K": top_k,
        "TOKENS": tile.tokens,
        "CHUNK": tiles.SCAN_CHUNK,
    }
    shared |= {"FP8": prepared.fp8, "WIDE": INTERPRETED, **launch_options(device)}
    _gate_up_scan[(who * triton.cdiv(width, tile.gate_up_rows),)](
        values, scales, ids, prepared.gate_up, prepared.gate_up_scale, h, h_scale, lists, counts,
        num_pairs, first, count, int(by_pair), ROWS=tile.gate_up_rows, COLUMNS=tile.gate_up_columns,
        EVEN=even_gate_up, STAGES=tile.gate_up_stages, num_warps=tile.gate_up_warps, **shared,
    )  # fmt: skip
    out = torch.empty(num_tokens, top_k, hidden, dtype=model_dtype(x), device=device)
    _down_scan[((who + 1) * triton.cdiv(hidden, tile.down_rows),)](
        h, h_scale, ids, weights, prepared.down, prepared.down_scale, out, lists, counts,
        num_pairs, first, count, int(by_pair), ROWS=tile.down_rows, COLUMNS=columns,
        EVEN=even_down, STAGES=tile.down_stages, num_warps=tile.down_warps, **shared,
    )  # fmt: skip
    return out
