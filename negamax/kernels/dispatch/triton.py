"""Dispatch and combine in one launch each, through symmetric memory by the LL protocol
(`collectives/triton_ll.py`), without barriers, counters and work on the host.

    dispatch, program t   push    the ids of row t to all ranks, its data to the ranks that have
                                  one of its experts
                          poll    the ids of row t of every rank, and the data of rows that
                                  selected experts of this rank
    combine, program t    push    this rank's sum to each rank whose row t selected its experts
                          poll    the sums for the own row t; add them in rank order

A row is sent to a rank once, even if the row selected several experts of the rank. Only 4 of the 8
bytes of a word are data, so the kernels are faster than NCCL only while latency dominates. With
more than `PeerRegion.rows` rows, NCCL gathers rows and sums outputs.

`dispatch` needs only the two buffers of a `PeerRegion`, because in each epoch every rank receives
the ids of every other rank. In `combine` a rank may receive no words from another rank. Two buffers
also suffice for `combine`: before a rank writes epoch e + 2, the preceding `dispatch` waits for the
ids of all ranks. Each rank sends these ids after it has read epoch e of `combine`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.collectives.triton import sum_over_ranks
from negamax.kernels.collectives.triton_ll import add_flag, load_peer_base, load_peer_bases, poll
from negamax.kernels.dispatch import op as spec
from negamax.kernels.dispatch.op import COMBINE, DISPATCH, ExpertRanges
from negamax.kernels.launch.ptx import pack_pair
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options, triton_kernel
from negamax.kernels.launch.triton_words import as_words, make_word_indices, num_parts, sum_parts
from negamax.kernels.peers import Collective, PeerRegion, find_region


class ExchangeConstants(NamedTuple):
    """Constants of the dispatch and combine kernels, passed as one argument `C: tl.constexpr`."""

    WORLD: int
    ROWS: int  # number of rows of the `PeerRegion`
    SLOT: int  # number of words per row and sender in the `PeerRegion`
    COUNT: int  # number of experts per rank
    TOP_K: int
    BLOCK_K: int


@triton.jit
def _are_held(ids, first, C: tl.constexpr):
    """Return 1 for `ids` from first to first + C.COUNT - 1, the experts of one rank, else 0."""
    return ((ids >= first) & (ids < first + C.COUNT)).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "rank"])
def _dispatch_kernel(
    ids,  # [T, TOP_K] int32, selected experts; -1: no expert
    columns,  # tuple of tensors [T, WIDTHS[c]] of 4-byte words
    all_ids,  # [WORLD * num_rows, TOP_K], written: the `ids` of all ranks
    received,  # tuple of tensors [WORLD * num_rows, WIDTHS[c]], written: all ranks' `columns`
    firsts,  # [WORLD] int32, index of each rank's first expert
    num_tokens,
    num_rows,
    addresses,  # field of the `PeerRegion` that exchanges tokens
    flags,  # field of the `PeerRegion` that exchanges tokens
    rank,
    WIDTHS: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Exchange one row of every rank: words of ids, then words of `columns`. Grid (num_rows,)."""
    WORLD: tl.constexpr = C.WORLD
    row = tl.program_id(0)
    choice = tl.arange(0, C.BLOCK_K)
    is_choice = choice < C.TOP_K
    sender = tl.arange(0, WORLD)[:, None]
    control = addresses + WORLD
    own = load_peer_base(addresses, rank)
    bases = load_peer_bases(addresses, WORLD)
    mine = tl.load(firsts + rank)
    launch_dependents_then_wait(PDL)
    flag = tl.load(flags + row) + 1
    begin = ((flag & 1) * C.ROWS + row) * (WORLD * C.SLOT)
    chosen = tl.load(
        ids + row.to(tl.int64) * C.TOP_K + choice, mask=is_choice & (row < num_tokens), other=-1
    )
    at = begin + rank * C.SLOT
    held = ()
    for peer in tl.static_range(WORLD):
        held = held + (tl.max(_are_held(chosen, tl.load(firsts + peer), C)) != 0,)  # noqa: RUF005
        tl.store(bases[peer] + at + choice, add_flag(chosen, flag), mask=is_choice)
    at += C.TOP_K
    for column in tl.static_range(len(WIDTHS)):
        index = tl.arange(0, triton.next_power_of_2(WIDTHS[column]))
        mask = index < WIDTHS[column]
        words = as_words(columns[column]) + row.to(tl.int64) * WIDTHS[column] + index
        words = add_flag(tl.load(words, mask=mask & (row < num_tokens), other=0), flag)
        for peer in tl.static_range(WORLD):
            tl.store(bases[peer] + at + index, words, mask=mask & held[peer])
        at += WIDTHS[column]
    is_theirs = is_choice[None, :] & (sender >= 0)
    theirs = poll(own + begin, sender * C.SLOT + choice[None, :], flag, is_theirs, control)
    to = (sender * num_rows + row).to(tl.int64)
    tl.store(all_ids + to * C.TOP_K + choice[None, :], theirs, mask=is_theirs)
    hits = _are_held(tl.where(is_theirs, theirs, -1), mine, C)
    is_held = (tl.max(hits, axis=1) != 0)[:, None]
    at = begin + C.TOP_K
    for column in tl.static_range(len(WIDTHS)):
        index = tl.arange(0, triton.next_power_of_2(WIDTHS[column]))[None, :]
        mask = is_held & (index < WIDTHS[column])
        words = poll(own + at, sender * C.SLOT + index, flag, mask, control)
        tl.store(as_words(received[column]) + to * WIDTHS[column] + index, words, mask=mask)
        at += WIDTHS[column]
    tl.store(flags + row, flag)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _combine_kernel(
    out,  # [WORLD * num_rows, PARTS, 2 * WORDS], outputs of this rank's experts
    all_ids,  # [WORLD * num_rows, TOP_K], ids that `_dispatch_kernel` wrote
    sums,  # [num_rows, 2 * WORDS], written: sums of the outputs for this rank's rows
    firsts,  # [WORLD] int32, index of each rank's first expert
    num_rows,
    addresses,  # field of the `PeerRegion` that exchanges tokens
    flags,  # field of the `PeerRegion` that exchanges tokens
    rank,
    PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Send every rank the sum for one row of that rank; add the received sums. Grid (num_rows,)."""
    WORLD: tl.constexpr = C.WORLD
    dtype: tl.constexpr = sums.dtype.element_ty
    row = tl.program_id(0)
    index = make_word_indices(BLOCK)
    mask = index < WORDS
    choice = tl.arange(0, C.BLOCK_K)
    is_choice = choice < C.TOP_K
    sender = tl.arange(0, WORLD)
    own = load_peer_base(addresses, rank)
    bases = load_peer_bases(addresses, WORLD)
    mine, everyones = tl.load(firsts + rank), tl.load(firsts + sender)
    launch_dependents_then_wait(PDL)
    flag = tl.load(flags + row) + 1
    begin = ((flag & 1) * C.ROWS + row) * (WORLD * C.SLOT)
    for peer in tl.static_range(WORLD):
        source = peer * num_rows + row
        theirs = tl.load(all_ids + source.to(tl.int64) * C.TOP_K + choice, mask=is_choice, other=-1)
        is_held = mask & (tl.max(_are_held(theirs, mine, C)) != 0)
        words = sum_parts(out, source, index, is_held, PARTS, WORDS, dtype)
        tl.store(bases[peer] + begin + rank * C.SLOT + index, add_flag(words, flag), mask=is_held)
    chosen = tl.load(
        all_ids + (rank * num_rows + row).to(tl.int64) * C.TOP_K + choice, mask=is_choice, other=-1
    )
    hits = _are_held(chosen[None, :], everyones[:, None], C)
    comes = mask[None, :] & (tl.max(hits, axis=1) != 0)[:, None]
    arrived = poll(
        own + begin, sender[:, None] * C.SLOT + index[None, :], flag, comes, addresses + WORLD
    )
    even, odd = sum_over_ranks(tl.where(comes, arrived, 0), dtype)
    words = pack_pair(even, odd, dtype)
    tl.store(as_words(sums) + row.to(tl.int64) * WORDS + index, words, mask=mask)
    tl.store(flags + row, flag)


def dispatch(
    ids: Tensor,
    columns: Sequence[Tensor],
    *,
    experts: ExpertRanges,
    group: Collective,
    num_rows: int,
) -> tuple[Tensor, list[Tensor]]:
    widths = tuple(column.shape[1] * column.itemsize // 4 for column in columns)
    region = find_region(group, "tokens", num_rows, ids.shape[1] + sum(widths))
    if region is None:
        return spec.dispatch(ids, columns, experts=experts, group=group, num_rows=num_rows)
    assert all(column.is_contiguous() for column in (ids, *columns))
    all_ids, *received = (
        column.new_empty(group.size * num_rows, column.shape[1]) for column in (ids, *columns)
    )
    _dispatch_kernel[(num_rows,)](
        ids, tuple(columns), all_ids, tuple(received), experts.firsts, len(ids), num_rows,
        region.addresses, region.flags, group.rank,
        WIDTHS=widths, C=_constants(ids, region, experts, group),
        num_warps=8, **launch_options(ids.device),
    )  # fmt: skip
    return all_ids, received


def combine(out: Tensor, ids: Tensor, *, experts: ExpertRanges, group: Collective) -> Tensor:
    """Run `dispatch.combine`; the sum over ranks is fp32, in the order of ranks."""
    num_rows, width = len(out) // group.size, out.shape[-1]
    region = find_region(group, "reduce", num_rows, width // 2)
    if region is None or width % 2:  # the kernel reads rows as 4-byte words
        return spec.combine(out, ids, experts=experts, group=group)
    assert out.is_contiguous() and ids.is_contiguous()
    sums = out.new_empty(num_rows, width)
    _combine_kernel[(num_rows,)](
        out, ids, sums, experts.firsts, num_rows, region.addresses, region.flags, group.rank,
        PARTS=num_parts(out), WORDS=width // 2, BLOCK=triton.next_power_of_2(width // 2),
        C=_constants(ids, region, experts, group),
        num_warps=8, **launch_options(out.device),
    )  # fmt: skip
    return sums


def _constants(
    ids: Tensor, region: PeerRegion, experts: ExpertRanges, group: Collective
) -> ExchangeConstants:
    top_k = ids.shape[1]
    block_k = triton.next_power_of_2(top_k)
    return ExchangeConstants(group.size, region.rows, region.words, experts.count, top_k, block_k)


KERNELS = (triton_kernel(DISPATCH, dispatch), triton_kernel(COMBINE, combine))
