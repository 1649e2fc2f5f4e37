"""Sample from logits that are sharded over ranks, in Triton. Each op has two launches, reads the
logits once and sorts nothing.

    pick            launch 1 (tiles, R): find the best score of each tile; noise is computed inline
                    launch 2 (R,): find the best score of the row's tiles, then of all ranks
    draw_leading    launch 1 (tiles, R): find the maximum of every strip of STRIP logits
                    launch 2 (R,): find the row's COUNT leading logits in the COUNT strips with the
                    largest maxima, exchange them with the other ranks, and draw a token

    logits [R, V of this rank]    |    tile    |    tile    | ...
                                  |st|st|st|st||st| ...

Ranks exchange pairs (score, token) or (leading logit, token) by the LL protocol.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.collectives.triton_ll import load_peer_base, poll, push
from negamax.kernels.launch.ptx import fast_log
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options, triton_kernel
from negamax.kernels.peers import Collective
from negamax.kernels.sampling import noise, tiles
from negamax.kernels.sampling import op as spec
from negamax.kernels.sampling.op import DRAW_LEADING, PICK, RowSampling

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
# These arguments have one value per row. Triton does not specialize kernels on the alignment of
# these arguments, because a slice with a new alignment would cause a compilation during serving.
_ROW_VALUES = ("slots", "positions", "otherwise")


@triton.jit
def row_keys(seed, position):
    """Return the halves of a row's key as uint32 (`noise.row_keys`); inputs are int64."""
    x = (seed + (position + 1) * _GOLDEN64).to(tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([], _MIX64_A, tl.int64).to(tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], _MIX64_B, tl.int64).to(tl.uint64)
    x = x ^ (x >> 31)
    return (x & 0xFFFFFFFF).to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def token_bits(low_key, high_key, token_ids):
    """Return the 32 random bits of `noise.token_bits` per token as uint32; ids are uint32."""
    x = token_ids * _MIX32_ID + low_key
    x = (x ^ (x >> 16)) * _MIX32_A
    x = (x ^ (x >> 13) ^ high_key) * _MIX32_B
    return x ^ (x >> 16)


@triton.jit
def exponentials(bits):
    """Return `noise.exponentials` of uint32 bits; the logarithm may differ in its last bits."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST_UNIFORM)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return tl.where(v < _SMALL_UNIFORM, series, -fast_log(1 - v))


@triton.jit(do_not_specialize_on_alignment=_ROW_VALUES)
def _tile_argmax_kernel(
    logits,  # [R, V] fp32, row stride `stride`
    filters,  # [slots, 4] fp32, `RowSampling.filters`
    seeds,  # [slots] int64, the seed of each slot's request
    slots,  # [R] int64, the slot of each row
    positions,  # [R] int64, positions in the sequences, which select the noise
    scores,  # [R, tiles] fp32, written: the best score of each tile
    ids,  # [R, tiles] int32, written: the best token of each tile
    stride,
    vocab,
    first_id,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best score of BLOCK_V logits of a row. Grid (tiles, R)."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots + row)
    temp, seed = tl.load(filters + slot * 4), tl.load(seeds + slot)
    launch_dependents_then_wait(PDL)
    score = tl.load(
        logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=-_INFINITY
    )
    broken = (score != score) | (score == _INFINITY)
    if temp > 0:
        low_key, high_key = row_keys(seed, tl.load(positions + row))
        bits = token_bits(low_key, high_key, (first_id + column).to(tl.uint32))
        score = tl.minimum(score * (1 / temp), _LARGEST_SCORE) - fast_log(exponentials(bits))
    score = tl.where(broken, _INFINITY, score)
    best = tl.max(score, axis=0)
    to = row * tl.num_programs(0) + tile
    tl.store(scores + to, best)
    tl.store(ids + to, tl.min(tl.where(score == best, first_id + column, _NO_ID), axis=0))


@triton.jit(do_not_specialize=["rank"])
def _row_argmax_kernel(
    scores,  # [R, count] fp32, the best score of each tile
    ids,  # [R, count] int32, the best token of each tile
    out,  # [R] int64, written: the token with the best score; -1 if that score is not finite
    count,
    addresses,  # `PeerRegion.addresses`, used only if WORLD > 1
    flags,
    rank,  # no constexpr, so that all ranks run one compiled kernel
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,  # number of rows of the `PeerRegion`
    SLOT: tl.constexpr,  # number of words per row and sender in the `PeerRegion`
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the token with the best score of one row. Grid (R,)."""
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    launch_dependents_then_wait(PDL)
    score = tl.load(scores + row * count + tile, mask=tile < count, other=-_INFINITY)
    token = tl.load(ids + row * count + tile, mask=tile < count, other=_NO_ID)
    best = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == best, token, _NO_ID), axis=0)
    if WORLD > 1:
        flag = tl.load(flags + row) + 1
        offset = ((flag & 1) * ROWS + row) * (WORLD * SLOT)
        word = tl.arange(0, 2)
        data = tl.where(word == 0, best.to(tl.int32, bitcast=True), chosen)
        push(addresses, offset + rank * SLOT, word, data, flag, word < 2, WORLD)
        index = tl.arange(0, WORLD)[:, None] * SLOT + word[None, :]
        # [WORLD, 2]: best score (bits of fp32) and token of each rank
        arrived = poll(
            load_peer_base(addresses, rank) + offset, index, flag, index >= 0, addresses + WORLD
        )
        is_score = word[None, :] == 0
        score = tl.sum(tl.where(is_score, arrived, 0), axis=1).to(tl.float32, bitcast=True)
        token = tl.sum(tl.where(is_score, 0, arrived), axis=1)
        best = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == best, token, _NO_ID), axis=0)
        tl.store(flags + row, flag)
    is_finite = (best > -_INFINITY) & (best < _INFINITY)
    tl.store(out + row, tl.where(is_finite, chosen, -1).to(tl.int64))


def pick(
    logits: Tensor,  # [R, V of this rank] fp32, the last dimension contiguous
    rows: RowSampling,
    *,
    first_id: int,
    group: Collective | None = None,
) -> Tensor:  # [R] int64
    """Run `sampling.pick`; last bits of scaled logits and noise may differ from the reference."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    assert logits.stride(1) == 1 and all(column.is_contiguous() for column in rows)
    sizes = tiles.tiles_for(logits.device)
    num_tiles = triton.cdiv(vocab, sizes.pick_block)
    scores = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    options = launch_options(logits.device)
    _tile_argmax_kernel[(num_tiles, num_rows)](
        logits, *rows, scores, ids, logits.stride(0), vocab, first_id, BLOCK_V=sizes.pick_block,
        num_warps=4, **options,
    )  # fmt: skip
    peers = None if group is None or group.size == 1 else group.peers
    if group is not None and group.size > 1 and (peers is None or num_rows > peers.pick.rows):
        best = scores.max(dim=1).values
        chosen = torch.where(scores == best.unsqueeze(1), ids, _NO_ID.value).min(dim=1).values
        return spec.best_of_ranks(best, chosen.to(torch.int64), group)
    region = None if peers is None else peers.pick
    _row_argmax_kernel[(num_rows,)](
        scores, ids, out, num_tiles,
        out if region is None else region.addresses,
        ids if region is None else region.flags,
        0 if peers is None else peers.rank,
        WORLD=1 if peers is None else peers.world,
        ROWS=1 if region is None else region.rows,
        SLOT=2 if region is None else region.words,
        BLOCK=triton.next_power_of_2(num_tiles),
        num_warps=1, **options,
    )  # fmt: skip
    return out


@triton.jit
def _make_sortable(value):
    """Convert fp32 to uint32 keys > 0 that sort in the same order; NaN becomes the largest key."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (tl.where(value == value, ordered, 0x7FFFFFFF) ^ -(2**31)).to(tl.uint32, bitcast=True)


@triton.jit
def _restore_sortable(key):
    """Convert a result of `_make_sortable` back to fp32; key 0 becomes minus infinity."""
    ordered = key.to(tl.int32, bitcast=True) ^ -(2**31)
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == 0, -_INFINITY, value)


@triton.jit
def _find_top_places(key, COUNT: tl.constexpr):
    """Give the COUNT largest of the uint32 keys [N] the numbers 0 to COUNT - 1, by ascending index.
    Each smaller key gets COUNT. If keys are equal, the first keys are selected. N <= 2^15.

    The COUNT-th largest key is found two bits at a time, by counting the keys above a threshold.
    """
    threshold = tl.full([], 0, tl.uint32)
    for step in range(16):
        shift = 30 - 2 * step
        one = threshold | (tl.full([], 1, tl.uint32) << shift)
        two = threshold | (tl.full([], 2, tl.uint32) << shift)
        three = one | two
        reach = (
            (key >= one).to(tl.int64)
            + ((key >= two).to(tl.int64) << 16)
            + ((key >= three).to(tl.int64) << 32)
        )
        reach = tl.sum(reach, axis=0)
        threshold = tl.where(reach & 0xFFFF >= COUNT, one, threshold)
        threshold = tl.where((reach >> 16) & 0xFFFF >= COUNT, two, threshold)
        threshold = tl.where(reach >> 32 >= COUNT, three, threshold)
    is_above, is_equal = key > threshold, key == threshold
    both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    before = tl.cumsum(both, axis=0) - both
    room = COUNT - (tl.sum(both, axis=0) & 0xFFFF)  # number of selected keys equal to `threshold`
    place = (before & 0xFFFF) + tl.minimum(before >> 16, room)
    return tl.where(is_above | (is_equal & (before >> 16 < room)), place, COUNT)


@triton.jit
def _draws_from_leading(filters, slot, COUNT: tl.constexpr):
    """Return whether the COUNT leading tokens suffice to sample the row of `slot`."""
    temp, top_k = tl.load(filters + slot * 4), tl.load(filters + slot * 4 + 1)
    return (temp > 0) & (top_k >= 1) & (top_k <= COUNT)


@triton.jit(do_not_specialize_on_alignment=_ROW_VALUES)
def _strip_max_kernel(
    logits,  # [R, V] fp32, row stride `stride`
    filters,  # [slots, 4] fp32, `RowSampling.filters`
    slots,  # [R] int64, the slot of each row
    largest,  # [R, strips] int32, written: the largest `_make_sortable` key of every STRIP logits
    stride,
    vocab,
    strips,
    BLOCK_V: tl.constexpr, STRIP: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the maximum of each strip in BLOCK_V logits of a row. Grid (tiles, R)."""
    tile, row = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots + row)
    launch_dependents_then_wait(PDL)
    if _draws_from_leading(filters, slot, COUNT):
        value = tl.load(
            logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=-_INFINITY
        )
        strip = tile * (BLOCK_V // STRIP) + tl.arange(0, BLOCK_V // STRIP)
        best = tl.max(tl.reshape(_make_sortable(value), [BLOCK_V // STRIP, STRIP]), axis=1)
        tl.store(
            largest + row * strips + strip, best.to(tl.int32, bitcast=True), mask=strip < strips
        )


@triton.jit
def _exchange_leading(
    key, token, place, addresses, flags, row, rank,
    WORLD: tl.constexpr, ROWS: tl.constexpr, SLOT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Send this rank's keys and tokens to all ranks, to entries `place` of this rank's slot. Return
    the keys and tokens [WORLD * COUNT] of all ranks, in rank order.
    """
    flag = tl.load(flags + row) + 1
    offset = ((flag & 1) * ROWS + row) * (WORLD * SLOT)
    mine = offset + rank * SLOT
    push(addresses, mine, place, key.to(tl.int32, bitcast=True), flag, place < COUNT, WORLD)
    push(addresses, mine + COUNT, place, token, flag, place < COUNT, WORLD)
    entry = tl.arange(0, WORLD * COUNT)
    at = (entry // COUNT) * SLOT + entry % COUNT
    own = load_peer_base(addresses, rank) + offset
    key = poll(own, at, flag, entry >= 0, addresses + WORLD).to(tl.uint32, bitcast=True)
    token = poll(own + COUNT, at, flag, entry >= 0, addresses + WORLD)
    tl.debug_barrier()
    tl.store(flags + row, flag)
    return key, token


@triton.jit
def _draw(key, filters, uniform, COUNT: tl.constexpr):
    """Draw from the leading tokens of one row as `spec.draw_from` does. Return the index of the
    drawn token, or -1 if the largest logit is not finite. Tokens with equal logits must be in the
    order of their ids; other tokens may be in any order.
    """
    temp, top_k = tl.load(filters), tl.load(filters + 1)
    top_p, min_p = tl.load(filters + 2), tl.load(filters + 3)
    place = tl.arange(0, COUNT)
    value = _restore_sortable(key)
    best = tl.max(tl.where(value == value, value, _INFINITY), axis=0)
    # [token, other token]: whether the other token is more likely
    leads = (key[None, :] > key[:, None]) | (
        (key[None, :] == key[:, None]) & (place[None, :] < place[:, None])
    )
    rank = tl.sum(leads.to(tl.int32), axis=1)
    probs = tl.exp((value - best) / temp)
    probs = tl.where((rank < top_k) & (probs >= min_p), probs, 0.0)
    before = tl.sum(tl.where(leads, probs[None, :], 0.0), axis=1)
    probs = tl.where(before < top_p * tl.sum(probs, axis=0), probs, 0.0)
    before = tl.sum(tl.where(leads, probs[None, :], 0.0), axis=1)
    passed = (probs > 0) & (before <= uniform * tl.sum(probs, axis=0))
    drawn = tl.max(tl.where(passed, rank, -1), axis=0)
    drawn = tl.sum(tl.where(rank == drawn, place, 0), axis=0)
    return tl.where((best > -_INFINITY) & (best < _INFINITY), drawn, -1)


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=_ROW_VALUES)
def _draw_leading_kernel(
    logits,  # [R, V] fp32, row stride `stride`
    largest,  # [R, strips] int32, the largest sort key of every strip of logits
    filters,  # [slots, 4] fp32, `RowSampling.filters`
    seeds,  # [slots] int64, the seed of each slot's request
    slots,  # [R] int64, the slot of each row
    positions,  # [R] int64, positions in the sequences, which select the noise
    otherwise,  # [R] int64, results for rows that this call does not draw
    chosen,  # [R, 3, COUNT] int32, written: leading strips, leading keys, their tokens
    out,  # [R] int64, written: drawn tokens, or `otherwise` for rows that this call does not draw
    stride,
    vocab,
    strips,
    first_id,
    addresses,  # `PeerRegion.addresses`, used only if WORLD > 1
    flags,
    rank,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,  # number of rows of the `PeerRegion`
    SLOT: tl.constexpr,  # number of words per row and sender in the `PeerRegion`
    BLOCK: tl.constexpr, STRIP: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw a token for one row from the COUNT strips with the largest maxima. Grid (R,)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    launch_dependents_then_wait(PDL)
    drawn = tl.load(otherwise + row)
    if _draws_from_leading(filters, slot, COUNT):
        entry = tl.arange(0, COUNT)
        chosen += row * (3 * COUNT)
        strip = tl.arange(0, BLOCK)
        best = tl.load(largest + row * strips + strip, mask=strip < strips, other=0).to(
            tl.uint32, bitcast=True
        )
        place = _find_top_places(best, COUNT)
        tl.store(chosen + place, strip, mask=place < COUNT)
        tl.debug_barrier()
        leading = tl.load(chosen + entry, cache_modifier=".cg")
        column = tl.reshape(
            leading[:, None] * STRIP + tl.arange(0, STRIP)[None, :], [COUNT * STRIP]
        )
        value = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=0.0)
        key, token = tl.where(column < vocab, _make_sortable(value), 0), first_id + column
        place = _find_top_places(key, COUNT)
        if WORLD > 1:
            key, token = _exchange_leading(
                key, token, place, addresses, flags, row, rank, WORLD, ROWS, SLOT, COUNT
            )
            place = _find_top_places(key, COUNT)
        tl.store(chosen + COUNT + place, key.to(tl.int32, bitcast=True), mask=place < COUNT)
        tl.store(chosen + 2 * COUNT + place, token, mask=place < COUNT)
        tl.debug_barrier()
        key = tl.load(chosen + COUNT + entry, cache_modifier=".cg").to(tl.uint32, bitcast=True)
        _, high_key = row_keys(tl.load(seeds + slot), tl.load(positions + row))
        winner = _draw(key, filters + slot * 4, (high_key >> 8).to(tl.float32) * (2.0**-24), COUNT)
        token = tl.load(chosen + 2 * COUNT + tl.maximum(winner, 0), cache_modifier=".cg")
        drawn = tl.where(winner < 0, -1, token).to(tl.int64)
    tl.store(out + row, drawn)


def draw_leading(
    logits: Tensor,  # [R, V of this rank] fp32, the last dimension contiguous
    rows: RowSampling,
    *,
    first_id: int,
    otherwise: Tensor,  # [R] int64, results for rows that this call does not draw
    group: Collective | None = None,
) -> Tensor:  # [R] int64
    """Run `sampling.draw_leading`; last bits of probabilities may differ from the reference."""
    num_rows, vocab = logits.shape
    peers = None if group is None or group.size == 1 else group.peers
    if (
        group is not None
        and group.size > 1
        and (peers is None or num_rows > peers.pick.rows or peers.pick.words < 2 * spec.CANDIDATES)
    ):
        return spec.draw_leading(logits, rows, first_id=first_id, otherwise=otherwise, group=group)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    columns = (*rows, otherwise)
    assert logits.stride(1) == 1 and all(column.is_contiguous() for column in columns)
    sizes, strip = tiles.tiles_for(logits.device), tiles.strip(vocab)
    strips = triton.cdiv(vocab, strip)
    largest = torch.empty((num_rows, strips), dtype=torch.int32, device=logits.device)
    chosen = torch.empty((num_rows, 3, spec.CANDIDATES), dtype=torch.int32, device=logits.device)
    shared = {"STRIP": strip, "COUNT": spec.CANDIDATES, **launch_options(logits.device)}
    _strip_max_kernel[(triton.cdiv(vocab, sizes.strip_block), num_rows)](
        logits, rows.filters, rows.slots, largest, logits.stride(0), vocab, strips,
        BLOCK_V=sizes.strip_block, num_warps=4, **shared,
    )  # fmt: skip
    region = None if peers is None else peers.pick
    _draw_leading_kernel[(num_rows,)](
        logits, largest, *columns, chosen, out, logits.stride(0), vocab, strips, first_id,
        out if region is None else region.addresses,
        out if region is None else region.flags,
        0 if peers is None else peers.rank,
        WORLD=1 if peers is None else peers.world,
        ROWS=1 if region is None else region.rows,
        SLOT=1 if region is None else region.words,
        BLOCK=max(triton.next_power_of_2(strips), spec.CANDIDATES),
        num_warps=sizes.draw_warps, **shared,
    )  # fmt: skip
    return out


KERNELS = (triton_kernel(PICK, pick), triton_kernel(DRAW_LEADING, draw_leading))
