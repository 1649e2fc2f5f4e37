"""The ends of a step that verifies draft tokens, defined in PyTorch: which tokens it runs, and how
many drafts of each row are what was sampled in their places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.kernels.drafts import cases
from negamax.kernels.op import FLOAT_DTYPES, Kernel, Op, Tolerance
from negamax.kernels.signatures import ASSEMBLE_DRAFTS, COUNT_ACCEPTED


def assemble(
    token_slots: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    places: Tensor,  # [T] int64; 0: the last known token of its slot, p: draft p - 1
    tokens: Tensor,  # [slots, width] int32 or int64, written at the positions
    drafts: Tensor,  # [slots, K] int64, -1: there is none
    *,
    padding_slot: int,
    token_ids: Tensor,  # [T] int64, written: what the step runs; 0 where there is no draft
    ends: Tensor,  # [T] int64, written: positions + 1; 0 in the padding slot
) -> None:
    """Put the drafts of a step behind the known tokens of their slots."""
    torch.mul(positions + 1, token_slots != padding_slot, out=ends)
    guessed = drafts[token_slots, (places - 1).clamp_min(0)].clamp_min(0)
    token_ids.copy_(guessed.where(places > 0, tokens[token_slots, positions].long()))
    tokens[token_slots, positions] = token_ids.to(tokens.dtype)


def count_accepted(sampled: Tensor, drafts: Tensor, firsts: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts of each row are the tokens sampled in their places, up to the first that is
    not.

    Row i has the 1 + num_drafts[i] of `sampled` [R] from firsts[i] on, and the first num_drafts[i]
    of drafts[i]; drafts [rows, K], firsts, num_drafts [rows] -> [rows], int64 all.
    """
    places = torch.arange(drafts.shape[1], device=sampled.device)
    is_draft = (places < num_drafts.unsqueeze(1)) & (drafts >= 0)
    index = (firsts.unsqueeze(1) + places).clamp_max(sampled.shape[0] - 1)
    return ((sampled[index] == drafts) & is_draft).long().cumprod(dim=1).sum(dim=1)


_EXACT = dict.fromkeys(FLOAT_DTYPES, Tolerance(0.0, 0.0, "integers"))

OPS = (
    Op(
        name=ASSEMBLE_DRAFTS,
        summary="the tokens of a step with drafts",
        reference=Kernel(ASSEMBLE_DRAFTS, "reference", assemble),
        cases=cases.assemble_small,
        apply=cases.apply_assemble,
        tolerance=_EXACT,
        cost=cases.assemble_cost,
    ),
    Op(
        name=COUNT_ACCEPTED,
        summary="how many drafts of each row are right",
        reference=Kernel(COUNT_ACCEPTED, "reference", count_accepted),
        cases=cases.count_small,
        apply=cases.apply_count,
        tolerance=_EXACT,
        cost=cases.count_cost,
    ),
)
