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
    prompt_starts: list[int]  # per row of the plan: index of its first prompt token among the T (meaningless without any)
    sample_slots: list[int]  # [R] slot of each sampled row
    sample_slots_device: Tensor  # [R] int64
    sample_tokens: Tensor  # [R] int64, index into the T tokens whose hidden state is sampled
    sample_positions: list[int]  # [R] where the sampled token lands in its row
    sample_positions_device: Tensor  # [R] int64


def build(plan: StepPlan, rows: Rows, *, block_size: int) -> ForwardBatch:
    """Gather the tokens, positions and cache slots of `plan` from `rows` (already holding the plan's changes).

    Generated tokens run one by one as decodes, prompt tokens as prefills, however the scheduler cut them into steps (a
    preempted sequence runs both again): which kernel computes a token never depends on what else was running. Several decodes
    of one step may belong to one sequence: a layer writes all keys and values before it attends, and each sees only its own.
    """
    device = rows.tokens.device
    slots: list[int] = []  # of each token, decodes first
    positions: list[int] = []
    prefills: list[tuple[int, int, int]] = []  # slot, first position, tokens
    last_tokens: list[int] = []  # per row: index of its last token; prompt tokens are counted from the end of the decodes
    prompt_starts: list[int] = []
    num_prompt_tokens = 0
    for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
        end = start + count
        split = min(max(rows.state(slot).prompt_len, start), end)
        prompt_starts.append(num_prompt_tokens)
        if split > start:
            prefills.append((slot, start, split - start))
            num_prompt_tokens += split - start
        if split < end:
            slots += [slot] * (end - split)
            positions += range(split, end)
        last_tokens.append(len(positions) - 1 if split < end else -num_prompt_tokens)
    num_decodes = len(positions)
    sequence_slots = slots + [slot for slot, _, _ in prefills]
    seq_lens = [position + 1 for position in positions] + [start + count for _, start, count in prefills]
    query_lens = [1] * num_decodes + [count for _, _, count in prefills]
    for slot, start, count in prefills:
        slots += [slot] * count
        positions += range(start, start + count)
    token_slots, token_positions = torch.tensor(slots, device=device), torch.tensor(positions, device=device)
    blocks = rows.block_tables[token_slots, token_positions // block_size]
    table_slots = token_slots if not prefills else torch.tensor(sequence_slots, device=device)
    sampled = [i for i, sample in enumerate(plan.samples) if sample]
    # A row that ends in its prompt: its last token is the last of its prefill.
    sample_tokens = [last_tokens[i] if last_tokens[i] >= 0 else num_decodes - last_tokens[i] - 1 for i in sampled]
    sample_slots = [plan.slots[i] for i in sampled]
    sample_positions = [plan.starts[i] + plan.counts[i] for i in sampled]
    return ForwardBatch(
        token_ids=rows.tokens[token_slots, token_positions],
        attention=AttentionInputs(
            positions=token_positions,
            slot_mapping=blocks * block_size + token_positions % block_size,
            block_tables=rows.block_tables[table_slots, : -(-max(seq_lens) // block_size)],
            query_starts=(0, *accumulate(query_lens)),
            seq_lens=tuple(seq_lens),
            num_decodes=num_decodes,
        ),
        prompt_starts=[num_decodes + start for start in prompt_starts],
        sample_slots=sample_slots,
        sample_slots_device=torch.tensor(sample_slots, dtype=torch.int64, device=device),
        sample_tokens=torch.tensor(sample_tokens, dtype=torch.int64, device=device),
        sample_positions=sample_positions,
        sample_positions_device=torch.tensor(sample_positions, dtype=torch.int64, device=device),
    )
