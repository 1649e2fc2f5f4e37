"""Triton kernels of the mixture of experts: routing in one launch, the experts in two (six for long prefills).

Three ways through the experts, by the number of tokens T (`tiles.py`):

- *token* (a handful): one program per (choice, few rows), products on the CUDA cores, FP8 weights against plain activations.
- *scan* (decode): one program per (expert, rows). It finds the expert's tokens by looking through `ids`, and multiplies W8A8
  with the weights as the tall operand, so that few tokens waste no tensor-core rows. No sorting launch.
- *sorted* (prefill): the pairs (token, choice) are first put in expert order; then the same tiles over many tokens.

The intermediate h = silu(gate x) * (up x) is kept per pair, in FP8 with one scale per GROUP columns where the weights are FP8.
A pair is numbered token * top_k + choice.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, Activations, ShardedActivations, model_dtype, plain
from negamax.kernels.collectives.triton import gather_rows
from negamax.kernels.launch.triton import launch_options, wait_then_start_next
from negamax.kernels.moe import tiles
from negamax.kernels.op import Kernel

_FP8 = torch.float8_e4m3fn
_UNIT = tl.constexpr(16)  # neighbouring columns one thread multiplies in the token kernels
_BLOCK = tl.constexpr(GROUP)
_E4M3_MAX = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-30)
_ROUND = tl.constexpr(1024)  # what one launch of `_route` adds to a counter; at least the programs of a token tile


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    """acc + a b; WIDE multiplies in fp32 on the CUDA cores, for what the tensor cores (or the interpreter) cannot do."""
    if WIDE:  # noqa: SIM108  (the other branch must not be compiled)
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


# --- routing --------------------------------------------------------------------------------------------------------------


@triton.jit
def _choose(
    partial, biases, ids, weights, tokens, num_tokens, num_active,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Sum the partial logits of COUNT `tokens`, then sigmoid, top-k of score + bias (lower id first) and renormalisation."""
    expert = tl.arange(0, EXPERTS_2)
    inside = (tokens < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    logits = tl.zeros([COUNT, EXPERTS_2], tl.float32)
    for split in tl.static_range(SPLITS):
        rows = partial + (split * num_tokens + tokens)[:, None] * EXPERTS + expert[None, :]
        logits += tl.load(rows, mask=inside, other=0.0, cache_modifier=".cg")
    score = 1.0 / (1.0 + tl.exp(-logits))
    rank = score + biases[None, :]
    rank = tl.where(rank == rank, rank, 1e30)  # NaN first, as in torch.topk, and each expert once all the same
    rank = tl.where((expert < EXPERTS)[None, :], rank, float("-inf"))
    place = tl.full([COUNT, EXPERTS_2], -1, tl.int32)
    for j in tl.static_range(TOP_K):
        here = expert[None, :] == tl.argmax(rank, 1, tie_break_left=True)[:, None]
        rank = tl.where(here, float("-inf"), rank)
        place = tl.where(here, j, place)
    chosen = place >= 0
    share = score / tl.sum(tl.where(chosen, score, 0.0), 1)[:, None]
    real = (tokens < num_active)[:, None]
    out = tokens[:, None] * TOP_K + place
    tl.store(ids + out, tl.where(real, expert[None, :], -1), mask=chosen & inside)
    tl.store(weights + out, tl.where(real, share, 0.0), mask=chosen & inside)


@triton.jit
def _gate_product(hi, mid, lo, xs, acc, WIDE: tl.constexpr):
    """acc [experts, tokens] + (hi + mid + lo) [experts, columns] . xs [tokens, columns]."""
    if WIDE:
        acc = _dot((hi.to(tl.float32) + mid.to(tl.float32)) + lo.to(tl.float32), tl.trans(xs), acc, WIDE)
    else:
        small = tl.dot(lo, tl.trans(xs)) + tl.dot(mid, tl.trans(xs))
        acc += small + tl.dot(hi, tl.trans(xs))
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    x, pieces, bias, active, partial, arrived, ids, weights, num_tokens,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOOSE: tl.constexpr, SPREAD: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Partial logits of one (token tile, expert tile, split of the columns), then the choice of the experts.

    The gate comes as three bf16 addends, hi + mid + lo, which hold all 24 bits of its fp32; their products with bf16
    activations are exact, and the tensor cores add up in fp32. With STAGES = 0 a program has its part of the gate in flight
    before the activations exist. The programs of a token tile count themselves in; with SPREAD those that have tokens to choose
    for wait for the others, else the last one chooses for all. A launch adds _ROUND to each tile's counter in `arrived`, so
    nothing has to be set back; the programs of a tile are launched one after another, so those waiting keep no other out.
    """
    PROGRAMS: tl.constexpr = ((EXPERTS + ROWS - 1) // ROWS) * SPLITS
    STEPS: tl.constexpr = ((HIDDEN + COLUMNS - 1) // COLUMNS + SPLITS - 1) // SPLITS
    tile, part = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    split = part % SPLITS
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    rows = part // SPLITS * ROWS + tl.arange(0, ROWS)
    first_column = split * STEPS * COLUMNS
    columns = tl.arange(0, COLUMNS)
    gate = pieces + rows[:, None] * HIDDEN
    PIECE: tl.constexpr = EXPERTS * HIDDEN
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    if STAGES == 0:
        his, mids, los, xs = (), (), (), ()
        for step in tl.static_range(STEPS):
            k = first_column + step * COLUMNS + columns
            inside = (rows < EXPERTS)[:, None] & (k < HIDDEN)[None, :]
            his = his + (tl.load(gate + k[None, :], mask=inside, other=0.0),)
            mids = mids + (tl.load(gate + PIECE + k[None, :], mask=inside, other=0.0),)
            los = los + (tl.load(gate + 2 * PIECE + k[None, :], mask=inside, other=0.0),)
        wait_then_start_next(PDL)
        for step in tl.static_range(STEPS):
            k = first_column + step * COLUMNS + columns
            inside = (tokens < num_tokens)[:, None] & (k < HIDDEN)[None, :]
            xs = xs + (tl.load(x + tokens[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0),)
        for step in tl.static_range(STEPS):
            acc = _gate_product(his[step], mids[step], los[step], xs[step], acc, WIDE)
    else:
        wait_then_start_next(PDL)
        for start in tl.range(first_column, first_column + STEPS * COLUMNS, COLUMNS, num_stages=STAGES):
            k = start + columns
            fits = (k < HIDDEN)[None, :] | EVEN
            inside = (rows < EXPERTS)[:, None] & fits
            hi = tl.load(gate + k[None, :], mask=inside, other=0.0)
            mid = tl.load(gate + PIECE + k[None, :], mask=inside, other=0.0)
            lo = tl.load(gate + 2 * PIECE + k[None, :], mask=inside, other=0.0)
            inside = (tokens < num_tokens)[:, None] & fits
            xt = tl.load(x + tokens[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0)
            acc = _gate_product(hi, mid, lo, xt, acc, WIDE)
    out = partial + (split * num_tokens + tokens)[None, :] * EXPERTS + rows[:, None]
    tl.store(out, acc, mask=(rows < EXPERTS)[:, None] & (tokens < num_tokens)[None, :])
    expert = tl.arange(0, EXPERTS_2)
    biases = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    num_active = tl.load(active)
    tl.debug_barrier()
    SHARE: tl.constexpr = _ROUND // PROGRAMS
    mine = SHARE + tl.where(part == 0, _ROUND - SHARE * PROGRAMS, 0)
    before = tl.atomic_add(arrived + tile, mine, sem="acq_rel")
    seen, complete = before + mine, (before & -_ROUND) + _ROUND
    end = tl.minimum(tile * TOKENS + TOKENS, num_tokens)
    group = tile * TOKENS + (part * CHOOSE if SPREAD else tl.where(seen == complete, 0, TOKENS))
    if group < end:
        while complete - seen > 0:
            seen = tl.load(arrived + tile, volatile=True)
        tl.debug_barrier()
        for begin in range(group, end, CHOOSE * (PROGRAMS if SPREAD else 1)):
            _choose(partial, biases, ids, weights, begin + tl.arange(0, CHOOSE), num_tokens, num_active,
                    EXPERTS, EXPERTS_2, TOP_K, SPLITS, CHOOSE)  # fmt: skip


# --- experts, a handful of tokens -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "count"])
def _gate_up_token(
    x, ids, weight, scale, h, first, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h of ROWS intermediate columns of one pair: silu(gate x) * (up x). All its weights are in flight at once."""
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = (HIDDEN + _BLOCK - 1) // _BLOCK
    pair, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tile * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, COLUMNS // _UNIT)
    at = unit[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    x += (pair // TOP_K) * HIDDEN
    wait_then_start_next(PDL)
    expert = tl.load(ids + pair) - first
    if (expert < 0) | (expert >= count):
        return
    weight += expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
    scale += (expert * (2 * WIDTH // _BLOCK) + tile * ROWS // _BLOCK) * BLOCKS
    xs, gates, ups, gate_scales, up_scales = (), (), (), (), ()
    for start in tl.static_range(0, HIDDEN, COLUMNS):
        k = start + at
        inside = (rows < WIDTH)[:, None, None] & (k < HIDDEN)[None, :, :]
        where = weight + rows[:, None, None] * HIDDEN + k[None, :, :]
        gates = gates + (tl.load(where, mask=inside | EVEN, other=0.0),)
        ups = ups + (tl.load(where + WIDTH * HIDDEN, mask=inside | EVEN, other=0.0),)
        xs = xs + (tl.load(x + k, mask=(k < HIDDEN) | EVEN, other=0.0),)
        if FP8:
            block = (start + unit * _UNIT) // _BLOCK
            gate_scales = gate_scales + (tl.load(scale + block, mask=block < BLOCKS, other=0.0),)
            up_scales = up_scales + (tl.load(scale + (WIDTH // _BLOCK) * BLOCKS + block, mask=block < BLOCKS, other=0.0),)
    gate = tl.zeros([ROWS, COLUMNS // _UNIT], tl.float32)
    up = tl.zeros([ROWS, COLUMNS // _UNIT], tl.float32)
    for step in tl.static_range((HIDDEN + COLUMNS - 1) // COLUMNS):
        wide = xs[step].to(tl.float32)[None, :, :]
        part_gate = tl.sum(gates[step].to(tl.float32) * wide, 2)
        part_up = tl.sum(ups[step].to(tl.float32) * wide, 2)
        if FP8:
            part_gate *= gate_scales[step][None, :]
            part_up *= up_scales[step][None, :]
        gate += part_gate
        up += part_up
    g, u = tl.sum(gate, 1), tl.sum(up, 1)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(h + pair * WIDTH + rows, y.to(h.dtype.element_ty), mask=rows < WIDTH)


@triton.jit(do_not_specialize=["first", "count"])
def _down_token(
    h, ids, weights, weight, scale, out, first, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of one token: the weighted sum over its experts. The weights are in flight before h is finished.

    `ids` and `weights` are older than the kernel before this one, so they may be read ahead of it (past L1).
    """
    TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
    UNITS: tl.constexpr = COLUMNS // _UNIT  # of one choice in one step
    STEPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    token, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tile * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, CHOICES * UNITS)
    choice = unit // UNITS
    pair = token * TOP_K + choice
    expert = tl.load(ids + pair, mask=choice < TOP_K, other=-1, cache_modifier=".cg") - first
    known = (expert >= 0) & (expert < count)
    expert = tl.where(known, expert, 0)
    share = tl.load(weights + pair, mask=known, other=0.0, cache_modifier=".cg")
    w_base = weight + expert.to(tl.int64)[None, :, None] * (HIDDEN * WIDTH) + rows[:, None, None] * WIDTH
    s_base = scale + (expert * ((HIDDEN + _BLOCK - 1) // _BLOCK) + tile * ROWS // _BLOCK) * BLOCKS
    inner = tl.arange(0, _UNIT)
    ws, scales, hs = (), (), ()
    for step in tl.static_range(STEPS):
        first_k = step * COLUMNS + (unit % UNITS) * _UNIT
        k = first_k[:, None] + inner[None, :]
        inside = (rows < HIDDEN)[:, None, None] & (known[:, None] & ((k < WIDTH) | EVEN))[None, :, :]
        ws = ws + (tl.load(w_base + k[None, :, :], mask=inside, other=0.0),)
        if FP8:
            scales = scales + (tl.load(s_base + first_k // _BLOCK, mask=known & (first_k < WIDTH), other=0.0) * share,)
        else:
            scales = scales + (share,)
    wait_then_start_next(PDL)
    for step in tl.static_range(STEPS):
        k = (step * COLUMNS + (unit % UNITS) * _UNIT)[:, None] + inner[None, :]
        hs = hs + (tl.load(h + pair[:, None] * WIDTH + k, mask=known[:, None] & ((k < WIDTH) | EVEN), other=0.0),)
    acc = tl.zeros([ROWS, CHOICES * UNITS], tl.float32)
    for step in tl.static_range(STEPS):
        part = tl.sum(ws[step].to(tl.float32) * hs[step].to(tl.float32)[None, :, :], 2)
        acc += part * scales[step][None, :]
    tl.store(out + token * HIDDEN + rows, tl.sum(acc, 1).to(out.dtype.element_ty), mask=rows < HIDDEN)


# --- experts, tiles of tokens ---------------------------------------------------------------------------------------------


@triton.jit
def _gate_up_tile(
    x, x_scale, weight, scale, h, h_scale, expert, column, tokens, places, valid,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Intermediate columns column .. column + ROWS - 1 of `expert` for the rows `tokens` of x, into the rows `places` of h."""
    rows = column + tl.arange(0, ROWS)
    ks = tl.arange(0, COLUMNS)
    BLOCKS: tl.constexpr = (HIDDEN + _BLOCK - 1) // _BLOCK
    w = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + rows[:, None] * HIDDEN + ks[None, :]
    scale += (expert * (2 * WIDTH // _BLOCK) + column // _BLOCK) * BLOCKS
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
            block = k // _BLOCK
            s = tl.load(x_scale + tokens * BLOCKS + block, mask=valid, other=0.0)
            gate += tl.dot(w_gate, xt) * (s * tl.load(scale + block))[None, :]
            up += tl.dot(w_up, xt) * (s * tl.load(scale + (WIDTH // _BLOCK) * BLOCKS + block))[None, :]
        else:
            gate = _dot(w_gate, xt, gate, WIDE)
            up = _dot(w_up, xt, up, WIDE)
    y = gate / (1.0 + tl.exp(-gate)) * up
    out = h + places.to(tl.int64)[None, :] * WIDTH + rows[:, None]
    if FP8:
        largest = tl.max(tl.abs(y), 0)
        s = tl.maximum(largest / _E4M3_MAX, _SMALLEST)
        tl.store(h_scale + places * (WIDTH // ROWS) + column // ROWS, s, mask=valid)
        y = y / s[None, :]
    tl.store(out, y.to(h.dtype.element_ty), mask=row_fits & valid[None, :])


@triton.jit
def _down_tile(
    h, h_scale, weights, weight, scale, out, expert, row, places, pairs, valid,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs row .. row + ROWS - 1 of `expert` for the rows `places` of h, times the routing weight, into rows `pairs`.

    FP8: COLUMNS is the group of columns that share a scale in h.
    """
    rows = row + tl.arange(0, ROWS)
    ks = tl.arange(0, COLUMNS)
    BLOCKS: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
    w = weight + expert.to(tl.int64) * (HIDDEN * WIDTH) + rows[:, None] * WIDTH + ks[None, :]
    scale += (expert * ((HIDDEN + _BLOCK - 1) // _BLOCK) + row // _BLOCK) * BLOCKS
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
            acc += tl.dot(ws, ht) * (s * tl.load(scale + k // _BLOCK))[None, :]
        else:
            acc = _dot(ws, ht, acc, WIDE)
    acc *= tl.load(weights + pairs, mask=valid, other=0.0)[None, :]
    to = out + pairs.to(tl.int64)[None, :] * HIDDEN + rows[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=row_fits & valid[None, :])


@triton.jit
def _find_pairs(ids, num_pairs, wanted, begin, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """The pairs that chose expert `wanted`, in order: number begin .. begin + TOKENS - 1 of them, and how many there are."""
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
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One (expert, ROWS columns), over all tokens that chose it. Leaves the expert's pairs in `lists` for the down kernel.

    With `by_pair` a program stands for a pair and works for its expert if it is the first to name it; else for an expert.
    """
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    who, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    wait_then_start_next(PDL)
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
        _gate_up_tile(x, x_scale, weight, scale, h, h_scale, expert, tile * ROWS, pairs // TOP_K, pairs, valid,
                      HIDDEN, WIDTH, ROWS, TOKENS, COLUMNS, FP8, EVEN, WIDE, STAGES)  # fmt: skip
        begin += TOKENS
        if begin < total:
            pairs, _ = _find_pairs(ids, num_pairs, expert + first, begin, TOKENS, CHUNK)


@triton.jit
def _clear(ids, out, num_pairs, first, count, row, HIDDEN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
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
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One (expert, ROWS outputs) over the pairs that `_gate_up_scan` listed; the first programs write the zeros."""
    TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    who, tile = tl.program_id(0) // TILES - 1, tl.program_id(0) % TILES
    wait_then_start_next(PDL)
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
        _down_tile(h, h_scale, weights, weight, scale, out, expert, tile * ROWS, pairs, pairs, valid,
                   HIDDEN, WIDTH, ROWS, TOKENS, COLUMNS, FP8, EVEN, WIDE, STAGES)  # fmt: skip
        begin += TOKENS


# --- experts, long prefills -----------------------------------------------------------------------------------------------


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
    BLOCKS: tl.constexpr = (HIDDEN + _BLOCK - 1) // _BLOCK
    places, rows, ks = begin + tl.arange(0, TOKENS), column + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    valid = places < end
    tokens = tl.load(order + places, mask=valid, other=0) // TOP_K
    xs = x + tokens.to(tl.int64)[:, None] * HIDDEN + ks[None, :]
    w = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + rows[:, None] * HIDDEN + ks[None, :]
    scale += (expert * (2 * WIDTH // _BLOCK) + column // _BLOCK) * BLOCKS
    gate = tl.zeros([TOKENS, ROWS], tl.float32)
    up = tl.zeros([TOKENS, ROWS], tl.float32)
    for k in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        fits = (k + ks < HIDDEN)[None, :] | EVEN
        xt = tl.load(xs + k, mask=valid[:, None] & fits, other=0.0)
        w_fits = ((rows < WIDTH)[:, None] & fits) | EVEN
        w_gate = tl.trans(tl.load(w + k, mask=w_fits, other=0.0))
        w_up = tl.trans(tl.load(w + WIDTH * HIDDEN + k, mask=w_fits, other=0.0))
        if FP8:
            block = k // _BLOCK
            s = tl.load(x_scale + tokens * BLOCKS + block, mask=valid, other=0.0)
            gate += tl.dot(xt, w_gate) * (s * tl.load(scale + block))[:, None]
            up += tl.dot(xt, w_up) * (s * tl.load(scale + (WIDTH // _BLOCK) * BLOCKS + block))[:, None]
        else:
            gate = _dot(xt, w_gate, gate, WIDE)
            up = _dot(xt, w_up, up, WIDE)
    y = gate / (1.0 + tl.exp(-gate)) * up
    if FP8:
        s = tl.maximum(tl.max(tl.abs(y), 1) / _E4M3_MAX, _SMALLEST)
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
    BLOCKS: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
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
    scale += expert * ((HIDDEN + _BLOCK - 1) // _BLOCK * BLOCKS)
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
                block = (row + tile * ROWS) // _BLOCK * BLOCKS + step * COLUMNS // _BLOCK
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
                s *= tl.load(scale + (row + tile * ROWS) // _BLOCK * BLOCKS + k // _BLOCK)
                acc += tl.dot(ht, wt) * s[:, None]
            else:
                acc = _dot(ht, wt, acc, WIDE)
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

_INTERPRETED = not isinstance(_route, triton.JITFunction)


@dataclass(frozen=True)
class PreparedGate:
    """The router's weights as `_route` reads them."""

    pieces: Tensor  # [3, experts, hidden] bf16, whose sum is the fp32 gate
    bias: Tensor  # [experts] fp32
    arrived: Tensor  # [token tiles] int32, whole rounds between launches; `_route` alone writes it
    everything: Tensor  # [1] int32, the number of active rows where the caller names none


@dataclass(frozen=True)
class PreparedExperts:
    """The stacked weights, in FP8 with scales per 128 x 128 or in the model's dtype."""

    gate_up: Tensor  # [experts, 2 * width, hidden], gate rows first
    down: Tensor  # [experts, hidden, width]
    gate_up_scale: Tensor  # [experts, 2 * width / 128, hidden / 128] fp32; without FP8 anything, it is not read
    down_scale: Tensor  # [experts, hidden / 128, width / 128] fp32; likewise
    fp8: bool


def prepare_gate(gate: Tensor, bias: Tensor) -> PreparedGate:
    """gate [experts, hidden] fp32, bias [experts] fp32. Splitting fp32 into three bf16 addends is exact."""
    hi = gate.float().bfloat16()
    rest = gate.float() - hi.float()
    mid = rest.bfloat16()
    lo = (rest - mid.float()).bfloat16()
    arrived = torch.zeros(tiles.MAX_ROUTE_TILES, dtype=torch.int32, device=gate.device)
    everything = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=gate.device)
    return PreparedGate(torch.stack((hi, mid, lo)), bias.float().contiguous(), arrived, everything)


def route(
    x: Tensor | Activations, prepared: PreparedGate, *, top_k: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> ids [T, top_k] int32, weights [T, top_k] fp32; rows from active[0] on get -1 and 0.

    Where the ranks share out the rows, each routes its own and has the others' from them.
    """
    if isinstance(x, ShardedActivations):
        mine = _route_rows(x.plain, prepared, top_k=top_k, active=None if active is None else active - x.first)
        return gather_rows(*mine, x)
    return _route_rows(plain(x), prepared, top_k=top_k, active=active)


def _route_rows(x: Tensor, prepared: PreparedGate, *, top_k: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
    num_tokens, hidden = x.shape
    experts = prepared.bias.shape[0]
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return ids, weights
    assert x.is_contiguous()
    tile = tiles.route(num_tokens)
    token_tiles, programs = triton.cdiv(num_tokens, tile.tokens), triton.cdiv(experts, tile.rows) * tile.splits
    assert token_tiles <= tiles.MAX_ROUTE_TILES, f"{num_tokens} tokens in one call"
    assert programs <= _ROUND.value, f"{experts} experts"
    partial = torch.empty(tile.splits, num_tokens, experts, dtype=torch.float32, device=x.device)
    active = prepared.everything if active is None else active
    _route[(token_tiles * programs,)](
        x, prepared.pieces, prepared.bias, active, partial, prepared.arrived, ids, weights, num_tokens,
        HIDDEN=hidden, EXPERTS=experts, EXPERTS_2=triton.next_power_of_2(experts), TOP_K=top_k,
        SPLITS=tile.splits, TOKENS=tile.tokens, ROWS=tile.rows, COLUMNS=tile.columns, CHOOSE=tile.choose,
        SPREAD=not _INTERPRETED, WIDE=_INTERPRETED or x.dtype != torch.bfloat16, EVEN=hidden % tile.columns == 0,
        STAGES=tile.stages, num_warps=tile.warps, **launch_options(x.device),
    )  # fmt: skip
    return ids, weights


def prepare_experts(
    gate_up: Tensor, down: Tensor, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None
) -> PreparedExperts:
    """The stacked weights stay as they are; scales [experts, rows / 128, columns / 128] fp32 come with FP8."""
    assert gate_up.is_contiguous() and down.is_contiguous()
    if gate_up_scale is None or down_scale is None:
        assert gate_up.dtype != _FP8, "FP8 experts need scales"
        return PreparedExperts(gate_up, down, gate_up, down, fp8=False)
    hidden, width = down.shape[1:]
    assert gate_up.dtype == _FP8 and down.dtype == _FP8
    assert hidden % GROUP == 0 and width % GROUP == 0, f"FP8 experts of hidden {hidden}, width {width}: not whole blocks"
    assert gate_up_scale.shape[1:] == (2 * width // GROUP, hidden // GROUP)
    assert down_scale.shape[1:] == (hidden // GROUP, width // GROUP)
    return PreparedExperts(gate_up, down, gate_up_scale.float().contiguous(), down_scale.float().contiguous(), fp8=True)


def experts(
    x: Tensor | Activations, ids: Tensor, weights: Tensor, prepared: PreparedExperts, *, first: int, count: int
) -> Tensor:
    """x [T, hidden], ids [T, top_k] int32, weights [T, top_k] fp32 -> [T, P, hidden], to be summed over P."""
    num_tokens, width = ids.shape[0], prepared.down.shape[2]
    assert ids.is_contiguous() and weights.is_contiguous() and ids.dtype == torch.int32
    if num_tokens == 0:
        return plain(x).unsqueeze(1)
    if num_tokens <= tiles.max_token(width):
        return _experts_token(plain(x), ids, weights, prepared, first=first, count=count)
    if num_tokens <= tiles.MAX_SCAN:
        return _experts_scan(x, ids, weights, prepared, first=first, count=count)
    return _experts_sorted(x, ids, weights, prepared, first=first, count=count)


def _experts_token(x: Tensor, ids: Tensor, weights: Tensor, prepared: PreparedExperts, *, first: int, count: int) -> Tensor:
    (num_tokens, hidden), top_k, width = x.shape, ids.shape[1], prepared.down.shape[2]
    assert x.is_contiguous()
    tile = tiles.token(width)
    shared = {"HIDDEN": hidden, "WIDTH": width, "TOP_K": top_k, "FP8": prepared.fp8, **launch_options(x.device)}
    h = x.new_empty(num_tokens * top_k, width)
    _gate_up_token[(num_tokens * top_k * triton.cdiv(width, tile.gate_up_rows),)](
        x, ids, prepared.gate_up, prepared.gate_up_scale, h, first, count,
        ROWS=tile.gate_up_rows, COLUMNS=tile.gate_up_columns, num_warps=tile.gate_up_warps,
        EVEN=hidden % tile.gate_up_columns == 0 and width % tile.gate_up_rows == 0, **shared,
    )  # fmt: skip
    out = x.new_empty(num_tokens, 1, hidden)
    _down_token[(num_tokens * triton.cdiv(hidden, tile.down_rows),)](
        h, ids, weights, prepared.down, prepared.down_scale, out, first, count,
        CHOICES=triton.next_power_of_2(top_k), ROWS=tile.down_rows, COLUMNS=tile.down_columns,
        num_warps=tile.down_warps, EVEN=width % tile.down_columns == 0, **shared,
    )  # fmt: skip
    return out


def _operands(x: Tensor | Activations, prepared: PreparedExperts) -> tuple[Tensor, Tensor]:
    """What the tile kernels multiply: values and scales, or the plain activations (twice; the second is not read)."""
    if not prepared.fp8:
        values = scales = plain(x)
    else:
        assert isinstance(x, Activations), "experts in FP8 need activations that carry FP8"
        values, scales = x.values, x.scales
    assert values.is_contiguous() and scales.is_contiguous()
    return values, scales


def _even(prepared: PreparedExperts, tile: tiles.Tile, columns: int) -> tuple[bool, bool]:
    """Whether tiles cover the weights without a rest: gate and up, down (`columns` at a time)."""
    hidden, width = prepared.down.shape[1:]
    gate_up = hidden % tile.gate_up_columns == 0 and width % tile.gate_up_rows == 0
    return gate_up, width % columns == 0 and hidden % tile.down_rows == 0


def _experts_scan(
    x: Tensor | Activations, ids: Tensor, weights: Tensor, prepared: PreparedExperts, *, first: int, count: int
) -> Tensor:
    (num_tokens, top_k), (hidden, width), device = ids.shape, prepared.down.shape[1:], ids.device
    values, scales = _operands(x, prepared)
    num_pairs = num_tokens * top_k
    tile = tiles.scan(width=width, num_tokens=num_tokens, fp8=prepared.fp8)
    by_pair = num_pairs < count
    who = num_pairs if by_pair else count
    columns = tile.gate_up_rows if prepared.fp8 else tile.down_columns
    even_gate_up, even_down = _even(prepared, tile, columns)
    h = torch.empty(num_pairs, width, dtype=values.dtype, device=device)
    h_scale = torch.empty(num_pairs, triton.cdiv(width, tile.gate_up_rows), dtype=torch.float32, device=device)
    lists = torch.empty(count * (num_tokens + 1), dtype=torch.int32, device=device)
    counts = lists[count * num_tokens :]
    shared = {"HIDDEN": hidden, "WIDTH": width, "TOP_K": top_k, "TOKENS": tile.tokens, "CHUNK": tiles.SCAN_CHUNK}
    shared |= {"FP8": prepared.fp8, "WIDE": _INTERPRETED, **launch_options(device)}
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


def _experts_sorted(
    x: Tensor | Activations, ids: Tensor, weights: Tensor, prepared: PreparedExperts, *, first: int, count: int
) -> Tensor:
    (num_tokens, top_k), (hidden, width), device = ids.shape, prepared.down.shape[1:], ids.device
    values, scales = _operands(x, prepared)
    num_pairs = num_tokens * top_k
    tile = tiles.sort(width=width, num_tokens=num_tokens, fp8=prepared.fp8)
    options = launch_options(device)
    order, counts = _expert_order(ids, first=first, count=count)
    columns = GROUP if prepared.fp8 else tile.down_columns
    even_gate_up, even_down = _even(prepared, tile, columns)
    h = torch.empty(num_pairs, width, dtype=values.dtype, device=device)
    h_scale = torch.empty(num_pairs, triton.cdiv(width, GROUP), dtype=torch.float32, device=device)
    shared = {"HIDDEN": hidden, "WIDTH": width, "EXPERTS_2": triton.next_power_of_2(count)}
    shared |= {"FP8": prepared.fp8, "WIDE": _INTERPRETED, **options}
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


def _expert_order(ids: Tensor, *, first: int, count: int) -> tuple[Tensor, Tensor]:
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


_WHERE: dict[str, Any] = {
    "platforms": ("cuda",),
    "dtypes": (torch.bfloat16, torch.float16),
    "available": torch.cuda.is_available,
}
KERNELS = (
    Kernel("moe.route", "triton", route, prepare_gate, **_WHERE),
    Kernel("moe.experts", "triton", experts, prepare_experts, **_WHERE),
)
