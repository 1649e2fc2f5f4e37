"""Drafts to run and to count, how kernels are called with them, and what that costs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from negamax.kernels.op import AnyKernel, Case, Cost, num_bytes


def assemble_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """One token; rows with all drafts, with fewer and with none, before padding."""
    draw, cases = partial(torch.randint, generator=generator), []
    for counts, padding in (([1], 0), ([4, 2, 1, 4], 5), ([3] * 70, 0)):
        rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        starts = draw(0, 30, (len(counts),))
        places = torch.cat([torch.arange(count) for count in counts])
        none, slot = torch.zeros(padding, dtype=torch.int64), len(counts)
        tensors = {
            "token_slots": torch.cat([rows, none + slot]),
            "positions": torch.cat([starts[rows] + places, none]),
            "places": torch.cat([places, none]),
            "tokens": draw(0, 1000, (slot + 1, 40), dtype=torch.int32),
            "drafts": draw(-1, 1000, (slot + 1, 3)),
        }
        label = f"T={len(rows)} rows={slot} padding={padding}"
        cases.append(Case(label, tensors, {"padding_slot": slot}))
    return cases


def apply_assemble(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """Tokens and ends of the step, and all known tokens."""
    inputs = {**case.tensors, "tokens": case.tensors["tokens"].clone()}
    token_ids, ends = (torch.empty_like(inputs["positions"]) for _ in range(2))
    kernel.run(*inputs.values(), **case.numbers, token_ids=token_ids, ends=ends)
    return token_ids, ends, inputs["tokens"]


def assemble_cost(case: Case) -> Cost:
    """Slots, positions and places read, tokens and ends written."""
    return Cost(num_bytes=5 * num_bytes(case.tensors["positions"]), flops=0)


def count_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """All right, none, some; fewer than there is room for; missing ones; rows of padding."""
    draw, cases = partial(torch.randint, generator=generator), []
    for counts, room, padding in (([0], 1, 0), ([3, 2, 0, 3, 1], 3, 2), ([15] * 40, 15, 0)):
        num_drafts = torch.tensor([*counts, *[0] * padding])
        firsts = (num_drafts + 1).cumsum(0) - num_drafts - 1
        sampled = draw(-1, 3, (int((num_drafts + 1).sum()),))
        index = (firsts.unsqueeze(1) + torch.arange(room)).clamp_max(len(sampled) - 1)
        wrong = draw(0, 6, (len(num_drafts), room)) == 0
        tensors = {
            "sampled": sampled,
            "drafts": sampled[index].masked_fill(wrong, 7),
            "firsts": firsts,
            "num_drafts": num_drafts,
        }
        cases.append(Case(f"R={len(sampled)} rows={len(firsts)} room={room}", tensors))
    return cases


def apply_count(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """The counts."""
    return (kernel.run(*case.tensors.values()),)


def count_cost(case: Case) -> Cost:
    """Everything read, counts written."""
    written = num_bytes(case.tensors["firsts"])
    return Cost(num_bytes=num_bytes(*case.tensors.values()) + written, flops=0)
