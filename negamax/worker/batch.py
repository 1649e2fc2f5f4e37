"""From a plan and the rows to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from negamax.layers.attention import AttentionInputs
from negamax.scheduler.step import StepPlan
from negamax.worker.rows import Rows


@dataclass(frozen=True)
class ForwardBatch:
    """The inputs of one step. T tokens run, R rows sampled."""

    token_ids: Tensor  # [T] int64
    attention: AttentionInputs
    sample_slots: list[int]  # [R] slot of each sampled row
    sample_slots_device: Tensor  # [R] int64
    sample_tokens: Tensor  # [R] int64, index into the T tokens whose hidden state is sampled
    sample_positions: list[int]  # [R] where the sampled token lands in its row
    sample_positions_device: Tensor  # [R] int64


def build(plan: StepPlan, rows: Rows, *, block_size: int) -> ForwardBatch:
    """Gather the tokens, positions and cache slots of `plan` from `rows` (already holding the plan's changes)."""
    device = rows.tokens.device
    slots, starts, counts = plan.slots, plan.starts, plan.counts
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    query_ends = list(accumulate(counts))
    num_decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    if num_decodes == len(counts):
        token_slots = torch.tensor(slots, device=device)
        positions = torch.tensor(starts, device=device)
        table_slots = token_slots
    else:
        table_slots = torch.tensor(slots, device=device)
        repeats = torch.tensor(counts, device=device)
        token_slots = table_slots.repeat_interleave(repeats)
        offsets = torch.tensor([start - end + count for start, end, count in zip(starts, query_ends, counts, strict=True)])
        positions = torch.arange(query_ends[-1], device=device) + offsets.to(device).repeat_interleave(repeats)
    blocks_used = -(-max(ends) // block_size)
    block_tables = rows.block_tables[table_slots, :blocks_used]
    blocks = rows.block_tables[token_slots, positions // block_size]
    sampled = [i for i, sample in enumerate(plan.samples) if sample]
    sample_slots = [slots[i] for i in sampled]
    sample_positions = [ends[i] for i in sampled]
    return ForwardBatch(
        token_ids=rows.tokens[token_slots, positions],
        attention=AttentionInputs(
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            block_tables=block_tables,
            query_starts=(0, *query_ends),
            seq_lens=tuple(ends),
            num_decodes=num_decodes,
        ),
        sample_slots=sample_slots,
        sample_slots_device=torch.tensor(sample_slots, dtype=torch.int64, device=device),
        sample_tokens=torch.tensor([query_ends[i] - 1 for i in sampled], dtype=torch.int64, device=device),
        sample_positions=sample_positions,
        sample_positions_device=torch.tensor(sample_positions, dtype=torch.int64, device=device),
    )
