"""Sum over ranks, residual add and norm on GPUs. The number of rows and the symmetric memory of the
ranks select the function:

    rows                      with symmetric memory                  without
    as many as its region     `_in_one_launch`, by the LL protocol   all-reduce by NCCL, then a norm
    more                      all-reduce by NCCL, then a norm        all-reduce by NCCL, then a norm
    from SHARD_ROWS on        `_sharded`                             `_sharded_by_group`, by NCCL

`_in_one_launch` has a program per row and no barrier. No program waits for another program of its
own rank, so a launch may have any number of programs. Loads that do not depend on the sum precede
the poll of the sum's words.

    one-shot    push the row to all ranks; sum WORLD rows
    two-shot    push slice r of the row to rank r; sum a slice; push the sum to all ranks

`_sharded` is a reduce-scatter, the norm of the own rows, and an all-gather:

    rank r      owns rows r * shard .. (r + 1) * shard - 1, shard = ceil(T / WORLD)
    launch 1    sum each row of x over its parts and write it to the rank that owns it; barrier
    launch 2    own rows: sum over ranks, add the residual, write the norm to all ranks; barrier

The norm is sent in FP8 if possible: a value takes 2 bytes for the sum and 1 for the norm. Only the
owner of a row normalizes it and has the unquantized row. The bits of a row do not depend on the
number of rows. Only the number of rows and the group decide whether rows are sharded. If rows are
sharded, a rank's residual has only the rank's own rows in all calls of a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, ShardedActivations
from negamax.kernels.collectives import op as spec
from negamax.kernels.collectives import tiles
from negamax.kernels.collectives.op import ALL_REDUCE_ADD_RMS, COMPLETE_RESIDUAL
from negamax.kernels.collectives.triton_ll import (
    add_flag,
    load_peer_base,
    load_peer_bases,
    poll,
    push,
)
from negamax.kernels.launch.ptx import pack_pair
from negamax.kernels.launch.tile import warps_of_row
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options, triton_kernel
from negamax.kernels.launch.triton_words import (
    as_words,
    make_word_indices,
    num_parts,
    sum_parts,
    unpack,
)
from negamax.kernels.norm import triton as norm_kernels
from negamax.kernels.norm.op import NormWeight
from negamax.kernels.norm.triton import (
    add_and_normalize,
    normalize_row,
    quantize_row,
    store_quantized_row,
)
from negamax.kernels.peers import Collective, PeerMemory, ShardRegion
from negamax.kernels.quantize.native import outputs, result


@triton.jit
def sum_over_ranks(words, DTYPE: tl.constexpr):
    """Sum words [WORLD, N] over ranks in fp32; return rounded even and odd columns, fp32 [N]."""
    even, odd = unpack(words, DTYPE)
    return unpack(pack_pair(tl.sum(even, axis=0), tl.sum(odd, axis=0), DTYPE), DTYPE)


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_add_rms_kernel(
    x,  # [T, PARTS, 2 * WORDS], PARTS partial sums per row
    residual,  # [T, 2 * WORDS], changed in place
    weight,  # [2 * WORDS], norm weight
    out,  # [T, 2 * WORDS], written
    values,  # [T, 2 * WORDS] e4m3, written if QUANTIZE, else None
    scales,  # [T, 2 * WORDS / 128] fp32, written if QUANTIZE, else None
    eps,
    addresses,  # field of the `PeerRegion` that exchanges the rows
    flags,
    rank,  # a run-time argument, so that all ranks run one compiled kernel
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,  # number of rows of the `PeerRegion`
    SLOT: tl.constexpr,  # number of words per row and sender in the `PeerRegion`
    TWO_SHOT: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr, GEMMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum and normalize one row. Grid (T,). The region of every rank is [2 buffers, ROWS, WORLD
    senders, SLOT] words. With TWO_SHOT a slot contains the sender's words of the slice that the
    receiver sums (WORDS / WORLD words), then the sum of the slice that the sender sums.
    """
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0)
    index = make_word_indices(BLOCK)
    mask = index < WORDS
    sender = tl.arange(0, WORLD)[:, None]
    weight_words = tl.load(as_words(weight) + index, mask=mask, other=0)
    own = load_peer_base(addresses, rank)
    launch_dependents_then_wait(PDL)
    flag = tl.load(flags + row) + 1
    offset = ((flag & 1) * ROWS + row) * (WORLD * SLOT)
    if TWO_SHOT:
        slice_words: tl.constexpr = WORDS // WORLD
        block: tl.constexpr = BLOCK // WORLD
        slice_index = make_word_indices(block)
        slice_mask = slice_index < slice_words
        bases = load_peer_bases(addresses, WORLD)
        slices = ()
        for peer in tl.static_range(WORLD):  # issue all loads first, so that they overlap
            words = sum_parts(
                x, row, peer * slice_words + slice_index, slice_mask, PARTS, WORDS, dtype
            )
            slices = slices + (add_flag(words, flag),)  # noqa: RUF005
        for peer in tl.static_range(WORLD):
            tl.store(
                bases[peer] + offset + rank * SLOT + slice_index, slices[peer], mask=slice_mask
            )
        arrived = poll(
            own + offset,
            sender * SLOT + slice_index[None, :],
            flag,
            slice_mask[None, :] & (sender >= 0),
            addresses + WORLD,
        )
        even, odd = sum_over_ranks(arrived, dtype)
        push(
            addresses,
            offset + rank * SLOT + slice_words,
            slice_index,
            pack_pair(even, odd, dtype),
            flag,
            slice_mask,
            WORLD,
        )
        residual_words = tl.load(
            as_words(residual) + row.to(tl.int64) * WORDS + index, mask=mask, other=0
        )
        total = poll(
            own + offset,
            (index // slice_words) * SLOT + slice_words + index % slice_words,
            flag,
            mask,
            addresses + WORLD,
        )
        x_even, x_odd = unpack(tl.where(mask, total, 0), dtype)
    else:
        words = sum_parts(x, row, index, mask, PARTS, WORDS, dtype)
        push(addresses, offset + rank * SLOT, index, words, flag, mask, WORLD)
        residual_words = tl.load(
            as_words(residual) + row.to(tl.int64) * WORDS + index, mask=mask, other=0
        )
        arrived = poll(
            own + offset,
            sender * SLOT + index[None, :],
            flag,
            mask[None, :] & (sender >= 0),
            addresses + WORLD,
        )
        x_even, x_odd = sum_over_ranks(arrived, dtype)
    add_and_normalize(
        x_even, x_odd, residual_words, weight_words, row, index, mask,
        residual, out, values, scales, eps, WORDS, BLOCK, QUANTIZE, GEMMA, dtype,
    )  # fmt: skip
    tl.store(flags + row, flag)


@triton.jit
def _sum_parts_kernel(
    x,  # [T, PARTS, 2 * WORDS], PARTS partial sums per row
    out,  # [T, 2 * WORDS], written
    PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of one row. Grid (T,)."""
    row = tl.program_id(0)
    index = make_word_indices(BLOCK)
    mask = index < WORDS
    launch_dependents_then_wait(PDL)
    words = sum_parts(x, row, index, mask, PARTS, WORDS, out.dtype.element_ty)
    tl.store(as_words(out) + row.to(tl.int64) * WORDS + index, words, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "shard", "rank"])
def _push_partials_kernel(
    x,  # [T, PARTS, 2 * WORDS], PARTS partial sums per row
    partials,  # addresses of `ShardRegion.partials`, written
    num_rows,
    shard,
    rank,
    WORLD: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Send a row to its owner; adjacent programs send to different ranks. Grid (shard * WORLD,)."""
    launch_dependents_then_wait(PDL)
    owner = (tl.program_id(0) + rank) % WORLD
    place = tl.program_id(0) // WORLD
    row = owner * shard + place
    if row < num_rows:
        index = tl.arange(0, BLOCK)
        mask = index < WORDS
        words = sum_parts(x, row, index, mask, PARTS, WORDS, x.dtype.element_ty)
        at = (rank * shard + place).to(tl.int64) * WORDS + index
        tl.store(as_words(load_peer_base(partials, owner)) + at, words, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "shard", "rank"])
def _add_rms_all_gather_kernel(
    partials,  # addresses of `ShardRegion.partials`
    gathered,  # addresses of `ShardRegion.gathered`, written
    residual,  # [rows of this rank, 2 * WORDS], changed in place
    weight,  # [2 * WORDS], norm weight
    out,  # [rows of this rank, 2 * WORDS], written if QUANTIZE
    eps,
    num_rows,  # number of rows of all ranks
    shard,
    rank,
    WORLD: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
    GEMMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum and normalize one row; write it to every rank, in FP8 if QUANTIZE. Grid (own rows,)."""
    dtype: tl.constexpr = residual.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    index = make_word_indices(BLOCK)
    mask = index < WORDS
    weight_words = tl.load(as_words(weight) + index, mask=mask, other=0)
    own = as_words(load_peer_base(partials, rank)) + place * WORDS + index
    bases = load_peer_bases(gathered, WORLD)
    launch_dependents_then_wait(PDL)
    residual_words = tl.load(as_words(residual) + place * WORDS + index, mask=mask, other=0)
    even, odd = unpack(tl.load(own, mask=mask, other=0, cache_modifier=".cg"), dtype)
    for sender in tl.static_range(1, WORLD):
        sent = own + (sender * shard).to(tl.int64) * WORDS
        more_even, more_odd = unpack(tl.load(sent, mask=mask, other=0, cache_modifier=".cg"), dtype)
        even += more_even
        odd += more_odd
    even, odd = unpack(pack_pair(even, odd, dtype), dtype)
    normed = normalize_row(
        even, odd, residual_words, weight_words, place, index, mask, residual, eps, WORDS, GEMMA,
        dtype,
    )  # fmt: skip
    row = place + rank * shard
    if QUANTIZE:
        tl.store(as_words(out) + place * WORDS + index, normed, mask=mask)
        scale, in_order = quantize_row(normed, BLOCK, dtype, tl.float8e4nv)
        for peer in tl.static_range(WORLD):
            values = bases[peer].to(tl.pointer_type(tl.float8e4nv), bitcast=True)
            scales = bases[peer].to(tl.pointer_type(tl.float32), bitcast=True) + num_rows.to(
                tl.int64
            ) * (WORDS // 2)
            store_quantized_row(values, scales, row, scale, in_order, WORDS, BLOCK)
    else:
        for peer in tl.static_range(WORLD):
            tl.store(as_words(bases[peer]) + row * WORDS + index, normed, mask=mask)


@triton.jit(do_not_specialize=["first_at", "second_at", "num_words"])
def _all_gather_kernel(
    first,  # [num_words] of 4 bytes, copied to word `first_at` of every rank's `gathered`
    second,  # [num_words] of 4 bytes, copied to word `second_at` of every rank's `gathered`
    gathered,  # addresses of `ShardRegion.gathered`, written
    first_at,
    second_at,
    num_words,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK words of `first` and of `second` to every rank. Grid (num_words / BLOCK,)."""
    launch_dependents_then_wait(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    one = tl.load(as_words(first) + index, mask=mask, other=0)
    other = tl.load(as_words(second) + index, mask=mask, other=0)
    for peer in tl.static_range(WORLD):
        to = as_words(load_peer_base(gathered, peer)) + index
        tl.store(to + first_at, one, mask=mask)
        tl.store(to + second_at, other, mask=mask)


def all_reduce_add_rms(
    # this rank's partial result [T, width], or P summands [T, P, width]; undefined afterwards
    x: Tensor,
    # [T, width], changed in place; if rows are sharded, only the rows of this rank change
    residual: Tensor,
    norm: NormWeight,
    group: Collective | None,
) -> Tensor | QuantizedActivations:  # [T, width]
    """Add the partial sums x of all ranks to the residual in place; return the residual's norm.

    With sharded rows and `norm.quantize` the result is `ShardedActivations`. With sharded rows the
    next call may overwrite the memory of the result.
    """
    if group is None or group.size == 1:
        return norm_kernels.add_rms(x, residual, norm)
    if residual.shape[1] % 2:  # the kernels read rows as 4-byte words
        return spec.all_reduce_add_rms(x, residual, norm, group)
    peers = group.peers
    if peers is not None and len(residual) and _fits_region(residual, peers):
        return _in_one_launch(x, residual, norm, peers)
    region = _shard_region(residual, group)
    if region is not None:
        return _sharded(x, residual, norm, group, region)
    if _is_sharded(residual, group):
        return _sharded_by_group(x, residual, norm, group)
    return norm_kernels.add_rms(group.all_reduce(_summed(x)), residual, norm)


def complete_residual(
    residual: Tensor, group: Collective | None, *, copy: bool = True, out: Tensor | None = None
) -> Tensor:
    if group is None or group.size == 1 or not _is_sharded(residual, group):
        return spec.complete_residual(residual, group, copy=copy, out=out)
    num_tokens, width = residual.shape
    shard = triton.cdiv(num_tokens, group.size)
    own = residual.new_zeros(shard, width)
    rows = residual[group.rank * shard : (group.rank + 1) * shard]
    own[: len(rows)] = rows
    whole = group.all_gather(own, dim=0)[:num_tokens]
    return spec.complete_residual(whole, None, out=out)


def _is_sharded(residual: Tensor, group: Collective) -> bool:
    """Return whether the residual on a rank contains only the rows that the rank owns."""
    num_tokens, width = residual.shape
    if width % 2 or not tiles.shards(num_tokens) or _fits_region(residual, group.peers):
        return False
    return _shard_region(residual, group) is not None or num_tokens % group.size == 0


def _shard_region(residual: Tensor, group: Collective) -> ShardRegion | None:
    """Return the symmetric memory through which ranks shard `residual`, or None."""
    num_tokens, width = residual.shape
    region = None if group.peers is None else group.peers.shards
    if region is None or not tiles.shards(num_tokens):
        return None
    return region if num_tokens <= region.rows and width == 2 * region.words else None


def _fits_region(residual: Tensor, peers: PeerMemory | None) -> bool:
    """Return whether the rows of `residual` fit into the region `peers.reduce`."""
    num_tokens, width = residual.shape
    return peers is not None and num_tokens <= peers.reduce.rows and width <= 2 * peers.reduce.words


def _in_one_launch(
    x: Tensor, residual: Tensor, norm: NormWeight, peers: PeerMemory
) -> Tensor | QuantizedActivations:
    """Launch `_all_reduce_add_rms_kernel`."""
    assert x.is_contiguous() and residual.is_contiguous(), "x and residual must be contiguous"
    num_tokens, words = residual.shape[0], residual.shape[1] // 2
    region = peers.reduce
    written = outputs(torch.empty_like(residual), quantize=norm.quantize)
    _all_reduce_add_rms_kernel[(num_tokens,)](
        x, residual, norm.weight, *written, norm.eps, region.addresses, region.flags, peers.rank,
        WORLD=peers.world,
        ROWS=region.rows,
        SLOT=region.words,
        TWO_SHOT=tiles.two_shot(num_tokens, world=peers.world, words=words),
        PARTS=num_parts(x),
        WORDS=words,
        BLOCK=max(triton.next_power_of_2(words), GROUP // 2),
        QUANTIZE=norm.quantize,
        GEMMA=norm.gemma,
        num_warps=warps_of_row(
            2 * words, measured=tiles.tiles_for(residual.device).row_warps
        ),
        **launch_options(residual.device),
    )  # fmt: skip
    return result(*written)


def _sharded(
    x: Tensor, residual: Tensor, norm: NormWeight, group: Collective, region: ShardRegion
) -> Tensor | QuantizedActivations:
    assert x.is_contiguous() and residual.is_contiguous(), "x and residual must be contiguous"
    (num_tokens, width), world = residual.shape, group.size
    shard = triton.cdiv(num_tokens, world)
    first = group.rank * shard
    # the last rank has fewer rows if T is not a multiple of the number of ranks
    rows = residual[first : first + shard]
    sizes = tiles.tiles_for(residual.device)
    shared = {
        "WORLD": world,
        "WORDS": width // 2,
        "BLOCK": max(triton.next_power_of_2(width // 2), GROUP // 2),
        **launch_options(residual.device),
    }
    _push_partials_kernel[(shard * world,)](
        x, region.partials, num_tokens, shard, group.rank,
        PARTS=num_parts(x), num_warps=warps_of_row(width, measured=sizes.push_warps), **shared,
    )  # fmt: skip
    region.barrier()
    out = torch.empty_like(rows) if norm.quantize else rows
    if len(rows):
        _add_rms_all_gather_kernel[(len(rows),)](
            region.partials, region.gathered, rows, norm.weight, out, norm.eps, num_tokens,
            shard, group.rank,
            QUANTIZE=norm.quantize, GEMMA=norm.gemma,
            num_warps=warps_of_row(width, measured=sizes.shard_warps), **shared,
        )  # fmt: skip
    region.barrier()
    if not norm.quantize:
        return region.own(0, (num_tokens, width), residual.dtype)
    return ShardedActivations(
        out,
        region.own(0, (num_tokens, width), torch.float8_e4m3fn),
        region.own(num_tokens * width, (num_tokens, width // GROUP), torch.float32),
        group,
        first,
    )


def _sharded_by_group(
    x: Tensor, residual: Tensor, norm: NormWeight, group: Collective
) -> Tensor | QuantizedActivations:
    """Compute the result of `_sharded` by collectives of the group, without symmetric memory."""
    shard = len(residual) // group.size
    first = group.rank * shard
    out = norm_kernels.add_rms(
        group.reduce_scatter(_summed(x)), residual[first : first + shard], norm
    )
    if not isinstance(out, QuantizedActivations):
        return group.all_gather(out, dim=0)
    values = group.all_gather(out.q.view(torch.uint8), dim=0).view(out.q.dtype)
    return ShardedActivations(out.hidden, values, group.all_gather(out.scale, dim=0), group, first)


def _summed(x: Tensor) -> Tensor:
    """Add up the partial sums x [T, P, width] -> [T, width]."""
    if x.dim() == 2 or x.shape[1] == 1:
        return x.flatten(1)
    num_tokens, _, width = x.shape
    out = x.new_empty(num_tokens, width)
    if num_tokens:
        assert x.is_contiguous(), "x must be contiguous"
        _sum_parts_kernel[(num_tokens,)](
            x, out, PARTS=num_parts(x), WORDS=width // 2,
            BLOCK=triton.next_power_of_2(width // 2), num_warps=4, **launch_options(x.device),
        )  # fmt: skip
    return out


def gather_rows(first: Tensor, second: Tensor, x: ShardedActivations) -> tuple[Tensor, Tensor]:
    """Gather the rows of two tensors [rows of this rank, width] of 4-byte values -> [T, width].

    The results are valid until the group's next sum over ranks. Call this function at most once
    between two sums over ranks.
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
    # bytes of x's values and scales, rounded up to a multiple of 16, which compiled kernels require
    begin = -(-(x.q.numel() + 4 * x.scale.numel()) // 16) * 16
    size = -(-4 * num_tokens * width // 16) * 16
    assert begin + 2 * size <= 2 * x.q.numel(), (
        f"{width} values per row do not fit into the region after rows of {x.q.shape[1]} columns"
    )
    at = begin // 4 + x.first * width
    if first.numel():
        block = tiles.tiles_for(first.device).gather_block
        _all_gather_kernel[(triton.cdiv(first.numel(), block),)](
            first, second, region.gathered, at, at + size // 4, first.numel(),
            WORLD=x.group.size, BLOCK=block, num_warps=4, **launch_options(first.device),
        )  # fmt: skip
    region.barrier()
    shape = (num_tokens, width)
    return region.own(begin, shape, first.dtype), region.own(begin + size, shape, second.dtype)


KERNELS = (
    triton_kernel(ALL_REDUCE_ADD_RMS, all_reduce_add_rms, norm_kernels.prepare),
    triton_kernel(COMPLETE_RESIDUAL, complete_residual),
)
