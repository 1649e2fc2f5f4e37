"""The ends of a step with drafts on the GPU, in one launch each instead of a dozen of PyTorch: a
program per token, and one per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.op import FLOAT_DTYPES, Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.signatures import ASSEMBLE_DRAFTS, COUNT_ACCEPTED


@triton.jit(do_not_specialize=["padding_slot"])
def _assemble_kernel(
    token_slots,  # [T] int64, as are positions and places
    positions,
    places,
    tokens,  # [slots, width], read and written
    drafts,  # [slots, K] int64
    token_ids,  # [T] int64, written
    ends,  # [T] int64, written
    padding_slot,
    width,
    room,  # K
):
    """Grid (T,). No program reads what another one writes, but for equal values of padding."""
    token = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(token_slots + token), tl.load(positions + token)
    place = tl.load(places + token)
    known = tokens + slot * width + position
    guess = tl.load(drafts + slot * room + tl.maximum(place - 1, 0), mask=place > 0, other=0)
    token_id = tl.load(known, mask=place == 0, other=0).to(tl.int64) + tl.maximum(guess, 0)
    tl.store(token_ids + token, token_id)
    tl.store(known, token_id.to(tokens.dtype.element_ty))
    tl.store(ends + token, tl.where(slot == padding_slot, 0, position + 1))


def assemble(
    token_slots: Tensor,
    positions: Tensor,
    places: Tensor,
    tokens: Tensor,
    drafts: Tensor,
    *,
    padding_slot: int,
    token_ids: Tensor,
    ends: Tensor,
) -> None:
    """As the definition."""
    columns = (token_slots, positions, places, tokens, drafts, token_ids, ends)
    assert all(column.is_contiguous() for column in columns)
    _assemble_kernel[(len(positions),)](
        *columns, padding_slot, tokens.shape[1], drafts.shape[1], num_warps=1
    )


@triton.jit(do_not_specialize=["num_sampled", "stride"])
def _count_accepted_kernel(
    sampled,  # [R] int64
    drafts,  # [rows, stride] int64
    firsts,  # [rows] int64
    num_drafts,  # [rows] int64
    accepted,  # [rows] int64, written
    num_sampled,
    stride,
    ROOM_POW2: tl.constexpr,
):
    """Grid (rows,). The first draft that is wrong says how many are right."""
    row = tl.program_id(0).to(tl.int64)
    count, first = tl.load(num_drafts + row), tl.load(firsts + row)
    place = tl.arange(0, ROOM_POW2)
    is_draft = place < count
    draft = tl.load(drafts + row * stride + place, mask=is_draft, other=-1)
    sample = tl.load(
        sampled + first + place, mask=is_draft & (first + place < num_sampled), other=-1
    )
    is_right = is_draft & (draft >= 0) & (draft == sample)
    tl.store(accepted + row, tl.min(tl.where(is_right, ROOM_POW2, place), axis=0).to(tl.int64))


def count_accepted(sampled: Tensor, drafts: Tensor, firsts: Tensor, num_drafts: Tensor) -> Tensor:
    """As the definition."""
    assert drafts.stride(1) == 1
    columns = (sampled, firsts, num_drafts)
    assert all(column.is_contiguous() for column in columns)
    # (zeros also where kernels are only compiled: what follows takes these as indices)
    accepted = torch.zeros_like(firsts)
    if len(firsts):
        _count_accepted_kernel[(len(firsts),)](
            sampled,
            drafts,
            firsts,
            num_drafts,
            accepted,
            len(sampled),
            drafts.stride(0),
            # one more than there is room for: a place behind the last draft, which is none
            ROOM_POW2=triton.next_power_of_2(drafts.shape[1] + 1),
            num_warps=1,
        )
    return accepted


_GPU = frozenset({Feature.TRITON})
KERNELS = (
    Kernel(ASSEMBLE_DRAFTS, "triton", assemble, requires=_GPU, dtypes=FLOAT_DTYPES),
    Kernel(COUNT_ACCEPTED, "triton", count_accepted, requires=_GPU, dtypes=FLOAT_DTYPES),
)
