"""Persistent rows: what the worker remembers of each running sequence between steps, indexed by the scheduler's slot.

The worker is the single writer. A row is complete: tokens known so far (sampled ones are written here by the device, so the
next step can run before the host has seen them), block table, and sampling state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow, StepPlan


@dataclass(frozen=True)
class RowState:
    """What the host keeps of one row."""

    prompt_len: int
    sampling: SamplingParams
    blocked_ids: Tensor  # [n] int64, ids that may not be sampled before min_tokens outputs
    bias_ids: Tensor  # [b] int64
    bias_values: Tensor  # [b] fp32


class Rows:
    """`max_num_seqs` rows of up to `max_model_len` tokens on `device`."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        *,
        max_blocks: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._device = device
        self._eos_token_ids = eos_token_ids
        # One column more than the window: the last sampled token of a full sequence is written but never run.
        self.tokens = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int64, device=device)
        self._num_blocks = [0] * max_num_seqs
        # [max_num_seqs, 4] fp32: temperature, top_k, top_p, min_p
        self.sampling = torch.zeros(max_num_seqs, 4, dtype=torch.float32, device=device)
        self._states: list[RowState | None] = [None] * max_num_seqs
        self.special_slots: set[int] = set()  # rows with penalties, bias or blocked ids: their logits are edited
        self.logprob_slots: set[int] = set()
        self.prompt_logprob_slots: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's new rows and appended blocks."""
        for row in plan.new_rows:
            self._assign(row)
        for slot, block in zip(plan.appended_slots, plan.appended_blocks, strict=True):
            self.block_tables[slot, self._num_blocks[slot]] = block
            self._num_blocks[slot] += 1

    def state(self, slot: int) -> RowState:
        state = self._states[slot]
        assert state is not None, f"slot {slot} was never assigned"
        return state

    def _assign(self, row: NewRow) -> None:
        slot, params = row.slot, row.sampling
        self.tokens[slot, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int64)
        self.block_tables[slot, : len(row.block_ids)] = torch.tensor(row.block_ids, dtype=torch.int64)
        self._num_blocks[slot] = len(row.block_ids)
        self.sampling[slot] = torch.tensor([params.temperature, params.top_k, params.top_p, params.min_p])
        bias = params.logit_bias or {}
        blocked = sorted({*self._eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._states[slot] = RowState(
            prompt_len=row.prompt_len,
            sampling=params,
            blocked_ids=torch.tensor(blocked, dtype=torch.int64, device=self._device),
            bias_ids=torch.tensor(list(bias), dtype=torch.int64, device=self._device),
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device),
        )
        edited = bool(
            bias or blocked or params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        )
        _toggle(self.special_slots, slot, edited)
        _toggle(self.logprob_slots, slot, params.logprobs is not None)
        _toggle(self.prompt_logprob_slots, slot, params.prompt_logprobs is not None)


def _toggle(slots: set[int], slot: int, member: bool) -> None:
    if member:
        slots.add(slot)
    else:
        slots.discard(slot)
