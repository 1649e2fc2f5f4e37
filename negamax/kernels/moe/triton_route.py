"""Routing in one launch: gate product, sigmoid, top-k and renormalisation.

Two kernels by the number of tokens: `_route_few` on the CUDA cores for up to MAX_ROUTE_FEW,
`_route` on the tensor cores.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations, ShardedActivations, unquantized
from negamax.kernels.collectives.triton import gather_rows, poll, tagged
from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_shared import INTERPRETED, dot

# what one launch of `_route` adds to a counter; at least the programs of a token tile
_ROUND = tl.constexpr(1024)
_CHOICE_GROUP = tl.constexpr(32)  # experts whose places are found together
_VECTOR = tl.constexpr(8)  # bf16 values of one load of a thread


@triton.jit
def _choose(
    partial, biases, ids, weights, tokens, num_tokens, num_active,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Sum the partial logits of COUNT `tokens`, then sigmoid, top-k of score + bias (lower id
    first) and renormalisation.
    """
    expert = tl.arange(0, EXPERTS_2)
    inside = (tokens < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    logits = tl.zeros([COUNT, EXPERTS_2], tl.float32)
    for split in tl.static_range(SPLITS):
        rows = partial + (split * num_tokens + tokens)[:, None] * EXPERTS + expert[None, :]
        logits += tl.load(rows, mask=inside, other=0.0, cache_modifier=".cg")
    score = 1.0 / (1.0 + tl.exp(-logits))
    rank = score + biases[None, :]
    # NaN first, as in torch.topk, and each expert once all the same
    rank = tl.where(rank == rank, rank, 1e30)
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
def _in_groups(EXPERTS_2: tl.constexpr):
    """0 .. EXPERTS_2 - 1 in groups of one per thread of a warp, where there are as many."""
    GROUP: tl.constexpr = _CHOICE_GROUP if EXPERTS_2 > _CHOICE_GROUP else EXPERTS_2
    return tl.arange(0, EXPERTS_2 // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _choose_one(
    logits, biases, expert, ids, weights, token, num_active,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """`_choose` for one token, its experts in groups: logits, biases and `expert` [groups, of a
    group].

    An expert's place is the number of those ahead of it: all are found at once, in its group first
    and then among the best PLACES of all groups. A search for one maximum after the other is a
    chain of TOP_K reductions, twice as long.
    """
    GROUPS: tl.constexpr = logits.shape[0]
    score = 1.0 / (1.0 + tl.exp(-logits))
    rank = score + biases
    rank = tl.where(rank == rank, rank, 1e30)  # NaN first, as in torch.topk
    rank = tl.where(expert < EXPERTS, rank, float("-inf"))
    bits = rank.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # in the order of the fp32 values
    # among equals the lower id first
    key = (bits.to(tl.int64) << 32) | (EXPERTS_2 - 1 - expert).to(tl.int64)
    # the axis summed over is first: each thread then adds up its own
    key_of = tl.trans(key)[:, :, None]
    place = tl.sum((key_of > key[None, :, :]).to(tl.int32), 0)
    here = tl.trans(place)[:, :, None] == tl.arange(0, PLACES)[None, None, :]
    best = tl.reshape(tl.sum(tl.where(here, key_of, 0), 0), [GROUPS * PLACES])
    share = tl.reshape(
        tl.sum(tl.where(here, tl.trans(score)[:, :, None], 0.0), 0), [GROUPS * PLACES]
    )
    place = tl.sum((best[:, None] > best[None, :]).to(tl.int32), 0)
    chosen = place < TOP_K
    share /= tl.sum(tl.where(chosen, share, 0.0), 0)
    out = token * TOP_K + place
    best_expert = EXPERTS_2 - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    tl.store(ids + out, tl.where(token < num_active, best_expert, -1), mask=chosen)
    tl.store(weights + out, tl.where(token < num_active, share, 0.0), mask=chosen)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_few(
    x, pieces, bias, active, words, epoch, ids, weights, num_tokens,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    THREADS: tl.constexpr,
    SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All columns of ROWS experts for a handful of tokens, in fp32 on the CUDA cores; then the
    choice.

    A program has its rows of the gate in flight before the activations exist, and leaves its logits
    in `words`, each beside the tag of this launch: whoever reads a word knows whether it is there,
    without a counter or a fence, and nothing has to be set back. With SPREAD each token has a
    program that waits for its logits and chooses, while the rest end; in the interpreter, which
    runs one program after another, the last one chooses for all.
    """
    PIECE: tl.constexpr = EXPERTS * HIDDEN
    SPAN: tl.constexpr = THREADS * _VECTOR
    STEPS: tl.constexpr = (HIDDEN + SPAN - 1) // SPAN
    first = tl.program_id(0) * ROWS
    columns = (tl.arange(0, THREADS) * _VECTOR)[:, None] + tl.arange(0, _VECTOR)[None, :]
    his, mids, los, gates, xs = (), (), (), (), ()
    for step in tl.static_range(STEPS):
        k = step * SPAN + columns
        for row in tl.static_range(ROWS):
            at = pieces + tl.minimum(first + row, EXPERTS - 1) * HIDDEN + k
            his += (tl.load(at, mask=k < HIDDEN, other=0.0),)
            mids += (tl.load(at + PIECE, mask=k < HIDDEN, other=0.0),)
            los += (tl.load(at + 2 * PIECE, mask=k < HIDDEN, other=0.0),)
    expert = _in_groups(EXPERTS_2)
    biases = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    wait_then_launch_dependents(PDL)
    # volatile, as x is: else ptxas puts it off until it is needed
    tag = tl.load(epoch, volatile=True) + 1
    for t in tl.static_range(TOKENS):
        for step in tl.static_range(STEPS):
            k = step * SPAN + columns
            xs += (
                tl.load(
                    x + t * HIDDEN + k,
                    mask=(k < HIDDEN) & (t < num_tokens),
                    other=0.0,
                    volatile=True,
                ),
            )
    for i in tl.static_range(STEPS * ROWS):
        gates += ((his[i].to(tl.float32) + mids[i].to(tl.float32)) + los[i].to(tl.float32),)
    sums = ()
    for t in tl.static_range(TOKENS):
        for row in tl.static_range(ROWS):
            acc = tl.zeros((THREADS,), tl.float32)
            for step in tl.static_range(STEPS):
                acc += tl.sum(
                    gates[step * ROWS + row] * xs[t * STEPS + step].to(tl.float32), axis=1
                )
            sums += (acc,)
    # one reduction over the threads for all sums: [threads, 2, 2, ...]
    for level in tl.static_range(LEVELS):
        more = ()
        for i in tl.static_range((TOKENS * ROWS) >> (level + 1)):
            more += (tl.join(sums[i], sums[i + ((TOKENS * ROWS) >> (level + 1))]),)
        sums = more
    logits = tl.sum(tl.reshape(sums[0], (THREADS, TOKENS * ROWS)), axis=0)
    pair = tl.arange(0, TOKENS * ROWS)
    rows = first + pair % ROWS
    at = words + pair // ROWS * EXPERTS + rows
    tl.store(
        at,
        tagged(logits.to(tl.int32, bitcast=True), tag),
        mask=(pair // ROWS < num_tokens) & (rows < EXPERTS),
    )
    token, step = tl.program_id(0), tl.num_programs(0)
    if not SPREAD:
        token, step = tl.where(token == step - 1, 0, num_tokens), 1
    for t in range(token, num_tokens, step):
        num_active = tl.load(active)
        payload = poll(words, t * EXPERTS + expert, tag, expert < EXPERTS, None)
        _choose_one(payload.to(tl.float32, bitcast=True), biases, expert, ids, weights, t,
            num_active,
                    EXPERTS, EXPERTS_2, TOP_K, PLACES)  # fmt: skip
        if t == num_tokens - 1:
            tl.store(epoch, tag)  # all programs have read it: their words have arrived


@triton.jit
def _gate_product(hi, mid, lo, xs, acc, WIDE: tl.constexpr):
    """acc [experts, tokens] + (hi + mid + lo) [experts, columns] . xs [tokens, columns]."""
    if WIDE:
        acc = dot(
            (hi.to(tl.float32) + mid.to(tl.float32)) + lo.to(tl.float32), tl.trans(xs), acc, WIDE
        )
    else:
        small = tl.dot(lo, tl.trans(xs)) + tl.dot(mid, tl.trans(xs))
        acc += small + tl.dot(hi, tl.trans(xs))
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    x, pieces, bias, active, partial, arrived, ids, weights, num_tokens,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHOOSE: tl.constexpr,
    SPREAD: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Partial logits of one (token tile, expert tile, split of the columns), then the choice of the
    experts.

    The gate comes as three bf16 addends, hi + mid + lo, which hold all 24 bits of its fp32; their
    products with bf16 activations are exact, and the tensor cores add up in fp32. With STAGES = 0 a
    program has its part of the gate in flight before the activations exist. The programs of a token
    tile count themselves in; with SPREAD those that have tokens to choose for wait for the others,
    else the last one chooses for all. A launch adds _ROUND to each tile's counter in `arrived`, so
    nothing has to be set back; the programs of a tile are launched one after another, so those
    waiting keep no other out.
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
        wait_then_launch_dependents(PDL)
        for step in tl.static_range(STEPS):
            k = first_column + step * COLUMNS + columns
            inside = (tokens < num_tokens)[:, None] & (k < HIDDEN)[None, :]
            xs = xs + (tl.load(x + tokens[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0),)
        for step in tl.static_range(STEPS):
            acc = _gate_product(his[step], mids[step], los[step], xs[step], acc, WIDE)
    else:
        wait_then_launch_dependents(PDL)
        for start in tl.range(
            first_column, first_column + STEPS * COLUMNS, COLUMNS, num_stages=STAGES
        ):
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
    expert = _in_groups(EXPERTS_2) if CHOOSE == 1 else tl.arange(0, EXPERTS_2)
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
            if CHOOSE == 1:
                logits = tl.zeros(expert.shape, tl.float32)
                for part_of_columns in tl.static_range(SPLITS):
                    at = partial + (part_of_columns * num_tokens + begin) * EXPERTS + expert
                    logits += tl.load(at, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
                _choose_one(
                    logits,
                    biases,
                    expert,
                    ids,
                    weights,
                    begin,
                    num_active,
                    EXPERTS,
                    EXPERTS_2,
                    TOP_K,
                    PLACES,
                )
            else:
                _choose(partial, biases, ids, weights, begin + tl.arange(0, CHOOSE), num_tokens,
                    num_active,
                        EXPERTS, EXPERTS_2, TOP_K, SPLITS, CHOOSE)  # fmt: skip


@dataclass(frozen=True)
class PreparedGate:
    """The router's weights as `_route` reads them."""

    pieces: Tensor  # [3, experts, hidden] bf16, whose sum is the fp32 gate
    bias: Tensor  # [experts] fp32
    arrived: Tensor  # [token tiles] int32, whole rounds between launches; `_route` alone writes it
    # [MAX_ROUTE_FEW, experts] int64, logits beside the tag of the launch of `_route_few` that wrote
    # them
    words: Tensor
    epoch: Tensor  # [1] int32, that tag
    everything: Tensor  # [1] int32, the number of active rows where the caller names none
    waits: bool  # programs of a launch may wait for each other


def prepare_gate(gate: Tensor, bias: Tensor, *, waits: bool = True) -> PreparedGate:
    """gate [experts, hidden] fp32, bias [experts] fp32. Splitting fp32 into three bf16 addends is
    exact. Without `waits` the last program of a tile of tokens chooses for all of them.
    """
    hi = gate.float().bfloat16()
    rest = gate.float() - hi.float()
    mid = rest.bfloat16()
    lo = (rest - mid.float()).bfloat16()
    arrived = torch.zeros(tiles.MAX_ROUTE_TILES, dtype=torch.int32, device=gate.device)
    everything = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=gate.device)
    words = torch.zeros(tiles.MAX_ROUTE_FEW, gate.shape[0], dtype=torch.int64, device=gate.device)
    return PreparedGate(
        pieces=torch.stack((hi, mid, lo)), bias=bias.float().contiguous(), arrived=arrived,
        words=words, epoch=torch.zeros_like(arrived[:1]), everything=everything,
        waits=waits,
    )  # fmt: skip


def route(
    x: Tensor | QuantizedActivations,
    prepared: PreparedGate,
    *,
    top_k: int,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> ids [T, top_k] int32, weights [T, top_k] fp32; rows from active[0] on get -1
    and 0.

    Where the ranks share out the rows, each routes its own and has the others' from them.
    """
    if isinstance(x, ShardedActivations):
        mine = _route_rows(
            x.hidden, prepared, top_k=top_k, active=None if active is None else active - x.first
        )
        return gather_rows(*mine, x)
    return _route_rows(unquantized(x), prepared, top_k=top_k, active=active)


def _route_rows(
    x: Tensor, prepared: PreparedGate, *, top_k: int, active: Tensor | None
) -> tuple[Tensor, Tensor]:
    num_tokens, hidden = x.shape
    experts = prepared.bias.shape[0]
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return ids, weights
    assert x.is_contiguous()
    assert top_k <= _CHOICE_GROUP.value, f"top {top_k}: a group of experts is smaller"
    active = prepared.everything if active is None else active
    shared = {
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "EXPERTS_2": triton.next_power_of_2(experts),
        "TOP_K": top_k,
    }
    shared |= {
        "PLACES": triton.next_power_of_2(top_k),
        "SPREAD": prepared.waits and not INTERPRETED,
        **launch_options(x.device),
    }
    if prepared.waits and num_tokens <= tiles.MAX_ROUTE_FEW:
        tokens, rows, warps = (
            triton.next_power_of_2(num_tokens),
            tiles.ROUTE_FEW_ROWS,
            tiles.ROUTE_FEW_WARPS,
        )
        _route_few[(triton.cdiv(experts, rows),)](
            x, prepared.pieces, prepared.bias, active, prepared.words, prepared.epoch, ids, weights,
            num_tokens,
            TOKENS=tokens, ROWS=rows, LEVELS=(tokens * rows).bit_length() - 1,
            THREADS=warps * platform.platform_of(x.device).warp_size,
            num_warps=warps, **shared,
        )  # fmt: skip
        return ids, weights
    tile = tiles.tiles_for(x.device).route(num_tokens)
    token_tiles, programs = (
        triton.cdiv(num_tokens, tile.tokens),
        triton.cdiv(experts, tile.rows) * tile.splits,
    )
    assert token_tiles <= tiles.MAX_ROUTE_TILES, f"{num_tokens} tokens in one call"
    assert programs <= _ROUND.value, f"{experts} experts"
    partial = torch.empty(tile.splits, num_tokens, experts, dtype=torch.float32, device=x.device)
    _route[(token_tiles * programs,)](
        x, prepared.pieces, prepared.bias, active, partial, prepared.arrived, ids, weights,
        num_tokens,
        SPLITS=tile.splits, TOKENS=tile.tokens, ROWS=tile.rows, COLUMNS=tile.columns,
        CHOOSE=tile.choose,
        WIDE=INTERPRETED or x.dtype != torch.bfloat16,
        EVEN=hidden % (tile.columns * tile.splits) == 0, STAGES=tile.stages,
        num_warps=tile.warps, **shared,
    )  # fmt: skip
    return ids, weights
