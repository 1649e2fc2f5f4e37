"""Triton kernels that exchange rows with other ranks through memory that all of them can write
(protocols: `kernels/peers.py`).

Few rows (`PeerRegion`): a row is one program. It writes its words straight into the memory of every
peer, each with a tag beside it, and waits until the words of all peers have arrived in its own
memory. There is no barrier and no second kernel; what the sum does not depend on is loaded before
the wait. No program waits for another one of its own rank, so any number of rows may run.

Many rows (`ShardRegion`): each rank sends its part of every row to the one rank that completes and
normalises the row, and that rank sends the norm, in FP8 where it can, to all. The links carry 2 + 1
bytes a value instead of 2 + 2, the norm and what is computed from plain rows are done once and not
on every rank, and bits do not depend on the number of rows. A rank's residual holds only its own
rows then; so it does in all calls of a step, for whether rows are shared out depends on their
number and the group alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, ShardedActivations
from negamax.kernels.collectives import spec, tiles
from negamax.kernels.launch.ptx import pack_pair
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.norm import triton as norm_kernels
from negamax.kernels.norm.spec import NormWeight
from negamax.kernels.norm.triton import (
    add_and_normalise,
    normalise,
    quantise,
    store_quantised,
    sum_parts,
    unpack,
    word_indices,
    words_of,
)
from negamax.kernels.op import Kernel
from negamax.kernels.peers import Collective, PeerMemory, ShardRegion
from negamax.kernels.platform import Feature
from negamax.kernels.signatures import ALL_REDUCE_ADD_RMS, COMPLETE_RESIDUAL

# between two looks at the abort flag, which is host memory: about a millisecond
_SPINS = tl.constexpr(1024)


@triton.jit
def copy_of(addresses, rank):
    """Where the copy of a region begins that `rank` reads."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def copies(addresses, WORLD: tl.constexpr):
    """`copy_of` every rank, fetched at once. (Triton adds tuples; it cannot unpack them.)"""
    bases = ()
    for peer in tl.static_range(WORLD):
        bases = bases + (copy_of(addresses, peer),)  # noqa: RUF005
    return bases


@triton.jit
def tagged(payload, tag):
    """`payload` (int32 words) with `tag`, as they are stored."""
    return (tag.to(tl.int64) << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def push(addresses, offset, index, payload, tag, mask, WORLD: tl.constexpr):
    """Store `payload` (int32 words) with `tag` at words `offset + index` of every rank's copy, the
    own one included.
    """
    word = tagged(payload, tag)
    bases = copies(addresses, WORLD)
    for peer in tl.static_range(WORLD):
        tl.store(bases[peer] + offset + index, word, mask=mask)


@triton.jit
def _missing(word, tag, mask):
    """Whether some of the words do not carry `tag`: in which bits their tags differ from it, the
    largest (two instructions a word, and this is what a rank does last before it goes on)."""
    differs = tl.where(mask, (word >> 32).to(tl.int32) ^ tag.to(tl.int32), 0)
    return tl.max(differs.to(tl.uint32, bitcast=True)) != 0


@triton.jit
def _gives_up(control, since, is_first):
    """Whether to wait no longer, and since when the program waits. Sets the abort flag where the
    time is up.
    """
    clock = tl.load(control, volatile=True)
    since = tl.where(is_first, clock, since)
    if clock - since > tl.load(control + 1):
        tl.store(control + 2, 1)
    return tl.load(control + 2, volatile=True) != 0, since


@triton.jit
def poll(base, index, tag, mask, control):
    """The payloads (int32 words) at `base + index` of this rank's copy, once all of them carry
    `tag`; whatever is there where the wait was given up.

    `control`: where the address of `PollControl.words` is kept; None: the words are those of this
    rank's own launch, whose programs all run, and always come.
    """
    word = tl.load(base + index, mask=mask, other=0, volatile=True)
    is_missing = _missing(word, tag, mask)
    spins = 0
    since = tl.full((), 0, tl.int64)
    while is_missing:
        word = tl.load(base + index, mask=mask, other=0, volatile=True)
        is_missing = _missing(word, tag, mask)
        if control is not None:
            spins += 1
            if spins % _SPINS == 0:
                gives_up, since = _gives_up(copy_of(control, 0), since, spins == _SPINS)
                is_missing = is_missing & (gives_up == 0)
    return word.to(tl.int32)


@triton.jit
def _sum_over_ranks(words, DTYPE: tl.constexpr):
    """[WORLD, N] words of every rank's values summed in fp32 and rounded once, as two fp32 [N]."""
    even, odd = unpack(words, DTYPE)
    return unpack(pack_pair(tl.sum(even, axis=0), tl.sum(odd, axis=0), DTYPE), DTYPE)


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_add_rms(
    x,  # [T, PARTS, 2 * WORDS]
    residual,  # [T, 2 * WORDS], changed in place
    weight,  # [2 * WORDS]
    out,  # [T, 2 * WORDS]
    values,  # [T, 2 * WORDS] e4m3 and
    scales,  # [T, 2 * WORDS / 128] fp32; not touched unless QUANTIZE
    eps,
    addresses,  # of the region, as `PeerRegion` has them
    epochs,
    rank,  # no constant, so that all ranks run one compiled kernel
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,  # of the region
    SLOT: tl.constexpr,  # words per row and sender in the region
    TWO_SHOT: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0)
    index = word_indices(BLOCK)
    mask = index < WORDS
    sender = tl.arange(0, WORLD)[:, None]
    weight_words = tl.load(words_of(weight) + index, mask=mask, other=0)
    own = copy_of(addresses, rank)
    launch_dependents_then_wait(PDL)
    tag = tl.load(epochs + row) + 1
    offset = ((tag & 1) * ROWS + row) * (WORLD * SLOT)
    if TWO_SHOT:
        share: tl.constexpr = WORDS // WORLD  # words of the row that each rank sums
        block: tl.constexpr = BLOCK // WORLD
        part_index = word_indices(block)
        part_mask = part_index < share
        bases = copies(addresses, WORLD)
        slices = ()
        for peer in tl.static_range(WORLD):  # all loads before the first store
            words = sum_parts(x, row, peer * share + part_index, part_mask, PARTS, WORDS, dtype)
            slices = slices + (tagged(words, tag),)  # noqa: RUF005
        for peer in tl.static_range(WORLD):
            tl.store(bases[peer] + offset + rank * SLOT + part_index, slices[peer], mask=part_mask)
        arrived = poll(
            own + offset,
            sender * SLOT + part_index[None, :],
            tag,
            part_mask[None, :] & (sender >= 0),
            addresses + WORLD,
        )
        part_even, part_odd = _sum_over_ranks(arrived, dtype)
        # The sums travel in the second part of the slots.
        push(
            addresses,
            offset + rank * SLOT + share,
            part_index,
            pack_pair(part_even, part_odd, dtype),
            tag,
            part_mask,
            WORLD,
        )
        residual_words = tl.load(
            words_of(residual) + row.to(tl.int64) * WORDS + index, mask=mask, other=0
        )
        total = poll(
            own + offset,
            (index // share) * SLOT + share + index % share,
            tag,
            mask,
            addresses + WORLD,
        )
        x_even, x_odd = unpack(tl.where(mask, total, 0), dtype)
    else:
        words = sum_parts(x, row, index, mask, PARTS, WORDS, dtype)
        push(addresses, offset + rank * SLOT, index, words, tag, mask, WORLD)
        residual_words = tl.load(
            words_of(residual) + row.to(tl.int64) * WORDS + index, mask=mask, other=0
        )
        arrived = poll(
            own + offset,
            sender * SLOT + index[None, :],
            tag,
            mask[None, :] & (sender >= 0),
            addresses + WORLD,
        )
        x_even, x_odd = _sum_over_ranks(arrived, dtype)
    add_and_normalise(
        x_even, x_odd, residual_words, weight_words, row, index, mask,
        residual, out, values, scales, eps, WORDS, BLOCK, QUANTIZE, dtype,
    )  # fmt: skip
    tl.store(epochs + row, tag)


@triton.jit
def _sum_parts(
    x, out, PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    index = word_indices(BLOCK)
    mask = index < WORDS
    launch_dependents_then_wait(PDL)
    words = sum_parts(x, row, index, mask, PARTS, WORDS, out.dtype.element_ty)
    tl.store(words_of(out) + row.to(tl.int64) * WORDS + index, words, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "shard", "rank"])
def _scatter_rows(
    x,  # [T, PARTS, 2 * WORDS]
    to,  # addresses of `ShardRegion.parts`
    num_rows,
    shard,
    rank,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send one row, summed over its parts, to the rank that completes it: neighbouring programs to
    different ones, and the ranks too, so that all links are busy at all times."""
    launch_dependents_then_wait(PDL)
    owner = (tl.program_id(0) + rank) % WORLD
    place = tl.program_id(0) // WORLD
    row = owner * shard + place
    if row < num_rows:
        index = tl.arange(0, BLOCK)
        mask = index < WORDS
        words = sum_parts(x, row, index, mask, PARTS, WORDS, x.dtype.element_ty)
        at = (rank * shard + place).to(tl.int64) * WORDS + index
        tl.store(
            copy_of(to, owner).to(tl.pointer_type(tl.int32), bitcast=True) + at, words, mask=mask
        )


@triton.jit(do_not_specialize=["num_rows", "shard", "rank"])
def _complete_rows(
    parts,  # addresses of `ShardRegion.parts`
    gathered,  # and of `ShardRegion.gathered`
    residual,  # [rows of this rank, 2 * WORDS], changed in place
    weight,  # [2 * WORDS]
    out,  # [rows of this rank, 2 * WORDS], not touched unless QUANTIZE
    eps,
    num_rows,  # of all ranks
    shard,
    rank,
    WORLD: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of this rank: the sum of what arrived, the residual and the norm, sent to every rank
    in FP8, else plain.
    """
    dtype: tl.constexpr = residual.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    index = word_indices(BLOCK)
    mask = index < WORDS
    weight_words = tl.load(words_of(weight) + index, mask=mask, other=0)
    own = copy_of(parts, rank).to(tl.pointer_type(tl.int32), bitcast=True) + place * WORDS + index
    bases = copies(gathered, WORLD)
    launch_dependents_then_wait(PDL)
    residual_words = tl.load(words_of(residual) + place * WORDS + index, mask=mask, other=0)
    even, odd = unpack(tl.load(own, mask=mask, other=0, cache_modifier=".cg"), dtype)
    for sender in tl.static_range(1, WORLD):
        sent = own + (sender * shard).to(tl.int64) * WORDS
        more_even, more_odd = unpack(tl.load(sent, mask=mask, other=0, cache_modifier=".cg"), dtype)
        even += more_even
        odd += more_odd
    even, odd = unpack(pack_pair(even, odd, dtype), dtype)
    normed = normalise(
        even, odd, residual_words, weight_words, place, index, mask, residual, eps, WORDS, dtype
    )
    row = place + rank * shard
    if QUANTIZE:
        tl.store(words_of(out) + place * WORDS + index, normed, mask=mask)
        scale, in_order = quantise(normed, BLOCK, dtype, tl.float8e4nv)
        for peer in tl.static_range(WORLD):
            values = bases[peer].to(tl.pointer_type(tl.float8e4nv), bitcast=True)
            scales = bases[peer].to(tl.pointer_type(tl.float32), bitcast=True) + num_rows.to(
                tl.int64
            ) * (WORDS // 2)
            store_quantised(values, scales, row, scale, in_order, WORDS, BLOCK)
    else:
        for peer in tl.static_range(WORLD):
            tl.store(
                bases[peer].to(tl.pointer_type(tl.int32), bitcast=True) + row * WORDS + index,
                normed,
                mask=mask,
            )


@triton.jit(do_not_specialize=["first_at", "second_at", "num_words"])
def _send_words(
    first,  # [num_words] of 4 bytes, to words `first_at` .. of every rank's copy,
    second,  # [num_words] likewise, to words `second_at` ..
    gathered,  # addresses of `ShardRegion.gathered`
    first_at,
    second_at,
    num_words,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents_then_wait(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    one = tl.load(first.to(tl.pointer_type(tl.int32), bitcast=True) + index, mask=mask, other=0)
    other = tl.load(second.to(tl.pointer_type(tl.int32), bitcast=True) + index, mask=mask, other=0)
    for peer in tl.static_range(WORLD):
        to = copy_of(gathered, peer).to(tl.pointer_type(tl.int32), bitcast=True) + index
        tl.store(to + first_at, one, mask=mask)
        tl.store(to + second_at, other, mask=mask)


def all_reduce_add_rms(
    # [T, width] or [T, P, width], this rank's partial result; its content is undefined afterwards
    x: Tensor,
    # [T, width], changed in place: from tiles.SHARD_ROWS rows on only the rows of this rank
    residual: Tensor,
    norm: NormWeight,
    group: Collective | None,
) -> Tensor | QuantizedActivations:  # [T, width]
    """residual += the sum of x over its parts and the ranks of `group`, in place; the norm of the
    residual.

    With many rows and `norm.quantize` the result is `ShardedActivations`; either way it then may
    lie in memory that the next call overwrites.
    """
    if group is None or group.size == 1:
        return norm_kernels.add_rms(x, residual, norm)
    num_tokens, width = residual.shape
    if width % 2:  # no whole words
        return spec.all_reduce_add_rms(x, residual, norm, group)
    peers = group.peers
    if (
        num_tokens
        and peers is not None
        and num_tokens <= peers.reduce.rows
        and width // 2 <= peers.reduce.words
    ):
        return _through_peers(x, residual, norm, peers)
    region = _shard_region(residual, group)
    if region is not None:
        return _through_shards(x, residual, norm, group, region)
    if _are_shared_out(residual, group):
        return _through_group(x, residual, norm, group)
    return norm_kernels.add_rms(group.all_reduce(_summed(x)), residual, norm)


def complete_residual(residual: Tensor, group: Collective | None) -> Tensor:
    """A copy of the residual [T, width] with all rows on every rank."""
    if group is None or group.size == 1 or not _are_shared_out(residual, group):
        return residual.clone()
    num_tokens, width = residual.shape
    shard = triton.cdiv(num_tokens, group.size)
    own = residual.new_zeros(shard, width)
    rows = residual[group.rank * shard : (group.rank + 1) * shard]
    own[: len(rows)] = rows
    return group.all_gather(own, dim=0)[:num_tokens].clone()


def _are_shared_out(residual: Tensor, group: Collective) -> bool:
    """Whether a rank's residual holds only its own rows."""
    num_tokens, width = residual.shape
    peers = group.peers
    if width % 2 or not tiles.shards(num_tokens):
        return False
    if peers is not None and num_tokens <= peers.reduce.rows and width // 2 <= peers.reduce.words:
        return False
    return _shard_region(residual, group) is not None or num_tokens % group.size == 0


def _shard_region(residual: Tensor, group: Collective) -> ShardRegion | None:
    """The memory through which the ranks share out the residual's rows; None: they do not, or
    through the group.
    """
    num_tokens, width = residual.shape
    region = None if group.peers is None else group.peers.shards
    if region is None or not tiles.shards(num_tokens):
        return None
    return region if num_tokens <= region.rows and width == 2 * region.words else None


def _through_peers(
    x: Tensor, residual: Tensor, norm: NormWeight, peers: PeerMemory
) -> Tensor | QuantizedActivations:
    assert x.is_contiguous() and residual.is_contiguous(), "rows are read as they lie in memory"
    num_tokens, words = residual.shape[0], residual.shape[1] // 2
    region = peers.reduce
    out, values, scales = norm_kernels.outputs(residual, norm)
    _all_reduce_add_rms[(num_tokens,)](
        x, residual, norm.weight, out, values, scales, norm.eps, region.addresses,
        region.epochs, peers.rank,
        WORLD=peers.world,
        ROWS=region.rows,
        SLOT=region.words,
        TWO_SHOT=tiles.two_shot(num_tokens, world=peers.world, words=words),
        PARTS=x.shape[1] if x.dim() == 3 else 1,
        WORDS=words,
        BLOCK=max(triton.next_power_of_2(words), GROUP // 2),
        QUANTIZE=norm.quantize,
        num_warps=tiles.WARPS,
        **launch_options(residual.device),
    )  # fmt: skip
    return norm_kernels.result(out, values, scales, norm)


def _through_shards(
    x: Tensor, residual: Tensor, norm: NormWeight, group: Collective, region: ShardRegion
) -> Tensor | QuantizedActivations:
    assert x.is_contiguous() and residual.is_contiguous(), "rows are read as they lie in memory"
    (num_tokens, width), world = residual.shape, group.size
    shard = triton.cdiv(num_tokens, world)
    first = group.rank * shard
    # fewer on the last rank where T is no multiple of the ranks
    rows = residual[first : first + shard]
    block = max(triton.next_power_of_2(width // 2), GROUP // 2)
    shared = {
        "WORLD": world,
        "WORDS": width // 2,
        "BLOCK": block,
        **launch_options(residual.device),
    }
    _scatter_rows[(shard * world,)](
        x, region.parts, num_tokens, shard, group.rank,
        PARTS=x.shape[1] if x.dim() == 3 else 1, num_warps=tiles.SCATTER_WARPS, **shared,
    )  # fmt: skip
    region.barrier()
    out = torch.empty_like(rows) if norm.quantize else rows
    if len(rows):
        _complete_rows[(len(rows),)](
            region.parts, region.gathered, rows, norm.weight, out, norm.eps, num_tokens,
            shard, group.rank,
            QUANTIZE=norm.quantize, num_warps=tiles.SHARD_WARPS, **shared,
        )  # fmt: skip
    region.barrier()
    if not norm.quantize:
        return (
            region.own_gathered[: 2 * num_tokens * width]
            .view(residual.dtype)
            .view(num_tokens, width)
        )
    values, rest = (
        region.own_gathered[: num_tokens * width],
        region.own_gathered[num_tokens * width :],
    )
    groups = width // GROUP
    return ShardedActivations(
        out,
        values.view(torch.float8_e4m3fn).view(num_tokens, width),
        rest[: 4 * num_tokens * groups].view(torch.float32).view(num_tokens, groups),
        group,
        first,
    )


def _through_group(
    x: Tensor, residual: Tensor, norm: NormWeight, group: Collective
) -> Tensor | QuantizedActivations:
    """The same by collectives of the group, where the ranks have no memory in common or too little
    of it.
    """
    shard = len(residual) // group.size
    first = group.rank * shard
    out = norm_kernels.add_rms(
        group.reduce_scatter(_summed(x)), residual[first : first + shard], norm
    )
    if not isinstance(out, QuantizedActivations):
        return group.all_gather(out, dim=0)
    values = group.all_gather(out.q.view(torch.uint8), dim=0).view(out.q.dtype)
    return ShardedActivations(out.hidden, values, group.all_gather(out.scale, dim=0), group, first)


def gather_rows(first: Tensor, second: Tensor, x: ShardedActivations) -> tuple[Tensor, Tensor]:
    """What each rank has made of its rows of x, [rows of the rank, width] of 4-byte values each ->
    all rows of it, [T, width].

    Valid until the group's next sum over ranks; once between two of them.
    """
    assert first.shape == second.shape and first.is_contiguous() and second.is_contiguous()
    num_tokens, width, peers = x.q.shape[0], first.shape[1], x.group.peers
    region = None if peers is None else peers.shards
    if (
        region is None
        or x.q.untyped_storage().data_ptr() != region.own_gathered.untyped_storage().data_ptr()
    ):
        packed = torch.cat((first.view(torch.int32), second.view(torch.int32)), dim=1)
        one, other = x.group.all_gather(packed, dim=0).split(width, dim=1)
        return one.contiguous().view(first.dtype), other.contiguous().view(second.dtype)
    # behind values and scales, in bytes
    begin = -(-(x.q.numel() + 4 * x.scale.numel()) // 16) * 16
    size = 4 * num_tokens * width
    assert begin + 2 * size <= 2 * x.q.numel(), (
        f"{width} values a row find no room behind {x.q.shape[1]} columns"
    )
    at = begin // 4 + x.first * width
    if first.numel():
        _send_words[(triton.cdiv(first.numel(), tiles.PUSH_WORDS),)](
            first, second, region.gathered, at, at + num_tokens * width, first.numel(),
            WORLD=x.group.size, BLOCK=tiles.PUSH_WORDS, num_warps=4, **launch_options(first.device),
        )  # fmt: skip
    region.barrier()
    one, other = (
        region.own_gathered[begin : begin + size],
        region.own_gathered[begin + size : begin + 2 * size],
    )
    return one.view(first.dtype).view(num_tokens, width), other.view(second.dtype).view(
        num_tokens, width
    )


def _summed(x: Tensor) -> Tensor:
    """x summed over its parts, [T, width]."""
    if x.dim() == 2 or x.shape[1] == 1:
        return x.flatten(1)
    num_tokens, parts, width = x.shape
    out = x.new_empty(num_tokens, width)
    if num_tokens:
        assert x.is_contiguous(), "rows are read as they lie in memory"
        _sum_parts[(num_tokens,)](
            x, out, PARTS=parts, WORDS=width // 2, BLOCK=triton.next_power_of_2(width // 2),
            num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out


KERNELS = (
    Kernel(
        ALL_REDUCE_ADD_RMS,
        "triton",
        all_reduce_add_rms,
        norm_kernels.prepare,
        requires=frozenset({Feature.TRITON}),
        dtypes=(torch.bfloat16, torch.float16),
    ),
    Kernel(
        COMPLETE_RESIDUAL,
        "triton",
        complete_residual,
        requires=frozenset({Feature.TRITON}),
        dtypes=(torch.bfloat16, torch.float16),
    ),
)
