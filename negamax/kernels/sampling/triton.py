"""Sampling from logits that are split over ranks, in Triton.

`pick` is two launches: programs over tiles of each row find the tile's best score, with noise made where it is used; then one
program per row takes the best tile and exchanges (score, token) with the other ranks through `PeerRegion`s. Both read what
they need once: 4 bytes per logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from negamax.kernels.collectives.spec import Collective
from negamax.kernels.collectives.triton import copy_of, poll, push
from negamax.kernels.launch.triton import launch_options, wait_for_inputs
from negamax.kernels.op import Kernel
from negamax.kernels.sampling import noise, spec, tiles

_INFINITY = tl.constexpr(float("inf"))
_NO_ID = tl.constexpr(2**31 - 1)
_GOLDEN64 = tl.constexpr(noise.GOLDEN64)
_MIX64_A = tl.constexpr(noise.MIX64_A)
_MIX64_B = tl.constexpr(noise.MIX64_B)
_MIX32_ID = tl.constexpr(noise.MIX32_ID)
_MIX32_A = tl.constexpr(noise.MIX32_A)
_MIX32_B = tl.constexpr(noise.MIX32_B)
_LARGEST_UNIFORM = tl.constexpr(noise.LARGEST_UNIFORM)
_SMALL_UNIFORM = tl.constexpr(noise.SMALL_UNIFORM)
_LARGEST_SCORE = tl.constexpr(noise.LARGEST_SCORE)


@triton.jit
def row_keys(seed, position):
    """The halves of a row's key as uint32; the same bits as `noise.row_keys`. seed, position: int64."""
    x = (seed + (position + 1) * _GOLDEN64).to(tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([], _MIX64_A, tl.int64).to(tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], _MIX64_B, tl.int64).to(tl.uint64)
    x = x ^ (x >> 31)
    return (x & 0xFFFFFFFF).to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def token_bits(low_key, high_key, token_ids):
    """32 random bits per token as uint32; the same as `noise.token_bits`. token_ids: uint32."""
    x = token_ids * _MIX32_ID + low_key
    x = (x ^ (x >> 16)) * _MIX32_A
    x = (x ^ (x >> 13) ^ high_key) * _MIX32_B
    return x ^ (x >> 16)


@triton.jit
def logarithm(x, ON_CUDA: tl.constexpr):
    """log x; on NVIDIA GPUs the hardware's, good to 2^-22 beside a logarithm of 1 or less."""
    return libdevice.fast_logf(x) if ON_CUDA else tl.log(x)


@triton.jit
def exponentials(bits, ON_CUDA: tl.constexpr):
    """As `noise.exponentials`, to the last bits of the logarithm. bits: uint32."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST_UNIFORM)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return tl.where(v < _SMALL_UNIFORM, series, -logarithm(1 - v, ON_CUDA))


@triton.jit
def _best_of_tiles(
    logits,  # [R, V] fp32, rows `stride` apart
    temperature,  # [R] fp32
    seeds,  # [R] int64
    positions,  # [R] int64
    scores,  # [R, tiles] fp32, written: the best of each tile,
    ids,  # [R, tiles] int32, and its token
    stride,
    vocab,
    first_id,
    TILE: tl.constexpr,
    ON_CUDA: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    wait_for_inputs(PDL)
    heat = tl.load(temperature + row)
    score = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=-_INFINITY)
    broken = (score != score) | (score == _INFINITY)
    if heat > 0:
        low_key, high_key = row_keys(tl.load(seeds + row), tl.load(positions + row))
        bits = token_bits(low_key, high_key, (first_id + column).to(tl.uint32))
        score = tl.minimum(score * (1 / heat), _LARGEST_SCORE) - logarithm(exponentials(bits, ON_CUDA), ON_CUDA)
    score = tl.where(broken, _INFINITY, score)
    best = tl.max(score, axis=0)
    slot = row * tl.num_programs(0) + tile
    tl.store(scores + slot, best)
    tl.store(ids + slot, tl.min(tl.where(score == best, first_id + column, _NO_ID), axis=0))


@triton.jit(do_not_specialize=["rank"])
def _best_of_row(
    scores,  # [R, count] fp32
    ids,  # [R, count] int32
    out,  # [R] int64, written
    count,
    addresses,  # of the region, as `PeerRegion` has them; not touched where WORLD is 1
    epochs,
    rank,  # no constant, so that all ranks run one compiled kernel
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,  # of the region
    SLOT: tl.constexpr,  # words per row and sender in the region
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    score = tl.load(scores + row * count + tile, mask=tile < count, other=-_INFINITY)
    token = tl.load(ids + row * count + tile, mask=tile < count, other=_NO_ID)
    best = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == best, token, _NO_ID), axis=0)
    if WORLD > 1:
        tag = tl.load(epochs + row) + 1
        offset = ((tag & 1) * ROWS + row) * (WORLD * SLOT)
        word = tl.arange(0, 2)
        payload = tl.where(word == 0, best.to(tl.int32, bitcast=True), chosen)
        push(addresses, offset + rank * SLOT, word, payload, tag, word < 2, WORLD)
        index = tl.arange(0, WORLD)[:, None] * SLOT + word[None, :]
        arrived = poll(copy_of(addresses, rank) + offset, index, tag, index >= 0)  # [WORLD, 2]
        is_score = word[None, :] == 0
        score = tl.sum(tl.where(is_score, arrived, 0), axis=1).to(tl.float32, bitcast=True)
        token = tl.sum(tl.where(is_score, 0, arrived), axis=1)
        best = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == best, token, _NO_ID), axis=0)
        tl.store(epochs + row, tag)
    is_finite = (best > -_INFINITY) & (best < _INFINITY)
    tl.store(out + row, tl.where(is_finite, chosen, -1).to(tl.int64))


def pick(
    logits: Tensor,  # [R, V of this rank] fp32, the last dimension contiguous
    *,
    first_id: int,
    temperature: Tensor,  # [R] fp32
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64
    group: Collective | None = None,
) -> Tensor:  # [R] int64
    """As the definition; logits / T and the noise may differ in their last bits, and so may a choice between near equals."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    assert logits.stride(1) == 1 and all(column.is_contiguous() for column in (temperature, seeds, positions))
    num_tiles = triton.cdiv(vocab, tiles.PICK_TILE)
    scores = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    options = launch_options(logits.device)
    _best_of_tiles[(num_tiles, num_rows)](
        logits, temperature, seeds, positions, scores, ids, logits.stride(0), vocab, first_id,
        TILE=tiles.PICK_TILE, ON_CUDA=logits.is_cuda and torch.version.hip is None, num_warps=tiles.PICK_WARPS, **options,
    )  # fmt: skip
    peers = None if group is None or group.size == 1 else group.peers
    if group is not None and group.size > 1 and (peers is None or num_rows > peers.pick.rows):
        best = scores.max(dim=1).values
        chosen = torch.where(scores == best.unsqueeze(1), ids, _NO_ID.value).min(dim=1).values
        return spec.best_of_ranks(best, chosen.to(torch.int64), group)
    region = None if peers is None else peers.pick
    _best_of_row[(num_rows,)](
        scores, ids, out, num_tiles,
        out if region is None else region.addresses,
        ids if region is None else region.epochs,
        0 if peers is None else peers.rank,
        WORLD=1 if peers is None else peers.world,
        ROWS=1 if region is None else region.rows,
        SLOT=2 if region is None else region.words,
        BLOCK=triton.next_power_of_2(num_tiles),
        num_warps=1, **options,
    )  # fmt: skip
    return out


@triton.jit
def _leading_of_tiles(
    logits,  # [R, V] fp32, rows `stride` apart
    keys,  # [R, tiles, COUNT] int64, written: the leading keys of each tile in falling order
    stride,
    vocab,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    wait_for_inputs(PDL)
    bits = tl.load((logits + row.to(tl.int64) * stride).to(tl.pointer_type(tl.int32)) + column, mask=column < vocab, other=0)
    # Ordered as the numbers are, lower columns first among equals; what is no logit comes last.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    key = tl.where(column < vocab, key, -(2**63))
    slot = (row * tl.num_programs(0) + tile) * COUNT + tl.arange(0, COUNT)
    tl.store(keys + slot, tl.topk(key, COUNT))


@triton.jit
def _leading_of_row(
    keys,  # [R, count] int64
    values,  # [R, COUNT] fp32, written in falling order
    ids,  # [R, COUNT] int64, written
    count,
    first_id,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    key = tl.topk(tl.load(keys + row * count + index, mask=index < count, other=-(2**63)), COUNT)
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    slot = row * COUNT + tl.arange(0, COUNT)
    tl.store(values + slot, bits.to(tl.float32, bitcast=True))
    tl.store(ids + slot, (first_id + 0x7FFFFFFF - key.to(tl.int32)).to(tl.int64))


def candidates(
    logits: Tensor,  # [R, V of this rank] fp32, the last dimension contiguous
    *,
    first_id: int,
    count: int,
    group: Collective | None = None,
) -> tuple[Tensor, Tensor]:  # [R, count] fp32 in falling order, [R, count] int64
    """Few rows: as the definition, through two rounds of partial sorting, of tiles, then of what they left. More rows: with
    torch.topk, which takes equal logits in any order."""
    num_rows, vocab = logits.shape
    if num_rows > tiles.SORT_ROWS:
        values, columns = torch.topk(logits, count, dim=-1)
        return spec.candidates_of_ranks(values, columns + first_id, count, group)
    found = triton.next_power_of_2(count)
    assert found <= spec.CANDIDATES and logits.stride(1) == 1
    values = torch.empty((num_rows, found), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, found), dtype=torch.int64, device=logits.device)
    if num_rows:
        num_tiles = triton.cdiv(vocab, tiles.SORT_TILE)
        keys = torch.empty((num_rows, num_tiles * found), dtype=torch.int64, device=logits.device)
        options = launch_options(logits.device)
        _leading_of_tiles[(num_tiles, num_rows)](
            logits, keys, logits.stride(0), vocab,
            TILE=tiles.SORT_TILE, COUNT=found, num_warps=tiles.SORT_WARPS, **options,
        )  # fmt: skip
        _leading_of_row[(num_rows,)](
            keys, values, ids, num_tiles * found, first_id,
            COUNT=found, BLOCK=triton.next_power_of_2(num_tiles * found), num_warps=tiles.MERGE_WARPS, **options,
        )  # fmt: skip
    return spec.candidates_of_ranks(values[:, :count], ids[:, :count], count, group)


KERNELS = tuple(
    Kernel(op, "triton", run, platforms=("cuda",), dtypes=(torch.bfloat16, torch.float16))
    for op, run in (("sampling.pick", pick), ("sampling.candidates", candidates))
)
