"""Map the selected experts of tokens to the slots that compute these experts; count selections."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_T = 32  # number of tokens per program


@triton.jit(do_not_specialize=["T"])
def _place_experts_kernel(
    ids,  # [T, C] int32, selected experts; -1: no expert
    positions,  # [T] int64
    slots,  # [E, MOST] int32, slots of each expert's copies
    copies,  # [E] int32, number of copies of each expert
    counts,  # [E] int64, increased by the number of selections of each expert
    out,  # [T, C] int32, written: slots of the selected copies; -1: no expert
    T,
    C: tl.constexpr, MOST: tl.constexpr, BLOCK_T: tl.constexpr, C_POW2: tl.constexpr,
):  # fmt: skip
    """Map the selected experts of BLOCK_T tokens to slots. Grid (T / BLOCK_T,)."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    choice = tl.arange(0, C_POW2)
    inside = (token < T)[:, None] & (choice < C)[None, :]
    pair = token[:, None] * C + choice[None, :]
    expert = tl.load(ids + pair, mask=inside, other=-1)
    is_chosen = inside & (expert >= 0)
    # the sum of the ids of a padding token is negative and is not used
    total = tl.sum(tl.where(inside, expert, 0), 1).to(tl.int64)
    turn = (tl.load(positions + token, mask=token < T, other=0) + total)[:, None]
    num_copies = tl.load(copies + expert, mask=is_chosen, other=1)
    place = (tl.where(is_chosen, turn, 0) % num_copies).to(tl.int32)
    slot = tl.load(slots + expert * MOST + place, mask=is_chosen, other=-1)
    tl.store(out + pair, slot, mask=inside)
    ones = tl.full([BLOCK_T, C_POW2], 1, tl.int64)
    tl.atomic_add(counts + expert, ones, mask=is_chosen, sem="relaxed")


def place(ids: Tensor, positions: Tensor, slots: Tensor, copies: Tensor, counts: Tensor) -> Tensor:
    columns = (ids, positions, slots, copies, counts)
    assert all(column.is_contiguous() for column in columns)
    num_tokens, num_choices = ids.shape
    out = torch.empty_like(ids)
    if num_tokens:
        _place_experts_kernel[(triton.cdiv(num_tokens, _BLOCK_T),)](
            *columns, out, num_tokens, C=num_choices, MOST=slots.shape[1], BLOCK_T=_BLOCK_T,
            C_POW2=triton.next_power_of_2(num_choices), num_warps=4,
        )  # fmt: skip
    return out
