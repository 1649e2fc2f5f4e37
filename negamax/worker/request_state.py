"""Store the state of each running request between steps, indexed by the scheduler's slot.

Only the worker changes the state. A slot stores the known tokens, the number of computed tokens,
the block table and the sampling state. The device writes sampled tokens into the state, so the next
step can run before the host has read the tokens. The last slot is for padding.

Only the device has the exact number of computed tokens, because the device decides which draft
tokens are accepted. The host stores an upper bound, which includes all drafts until the results of
their step arrive. The bound is exact if no drafts are in flight.

If preparing, sampling or reporting a row raises an exception, `failures` stores the error and the
row stays in the batch as a no-op. The steps of all ranks keep the same shape, and the request ends
with an error.
"""

import mmap
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from negamax.base.log import get_logger
from negamax.kernels.sampling.op import CANDIDATES, RowSampling
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow, StepPlan
from negamax.worker import logit_edits
from negamax.worker.device import upload
from negamax.worker.logit_edits import ApplyEdit

logger = get_logger(__name__)

# sampling parameters that kernels read, one for each column of `RequestState.sampling`
FILTERS = ("temperature", "top_k", "top_p", "min_p")
_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


@dataclass(frozen=True)
class SlotState:
    """The part of a slot's state that is only on the host."""

    prompt_len: int
    sampling: SamplingParams
    edits: list[ApplyEdit]


class RequestState:
    """The state of `max_num_seqs` slots of `max_model_len` tokens, and of a slot for padding."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        *,
        max_blocks: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        num_draft_tokens: int = 0,
    ) -> None:
        self._device = device
        self._eos_token_ids = eos_token_ids
        self.padding_slot = max_num_seqs
        num_rows = max_num_seqs + 1
        index_dtype = torch.int64 if device.type == "cpu" else torch.int32
        # The last column stores the token that is sampled after the last position of the context.
        self.tokens = _zeros(num_rows, max_model_len + 1, dtype=index_dtype, device=device)
        # draft tokens that follow the known tokens of each slot; -1: none
        self.drafts = torch.full((num_rows, num_draft_tokens), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_rows, max_blocks, dtype=index_dtype, device=device)
        self._padding_block = 0
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        # number of tokens whose KV is in the cache; the slot's next step starts at this position
        self.num_computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_computed_bound = np.zeros(num_rows, dtype=np.int64)  # >= `num_computed`, on host.
        # `_unverified`: each slot's number of unverified drafts, included in `num_computed_bound`
        self._unverified = np.zeros(num_rows, dtype=np.int64)
        self.prompt_lens = np.zeros(num_rows, dtype=np.int64)
        # sampling parameters of each slot, [rows, len(FILTERS)] fp32
        self.sampling = torch.zeros(num_rows, len(FILTERS), dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._states: list[SlotState | None] = [None] * num_rows
        self.special_slots: set[int] = set()  # slots with logit edits (`worker.logit_edits`)
        self.drawn_slots: set[int] = set()  # slots with a temperature above 0
        self.filtered_slots: set[int] = set()  # drawn slots with top_k, top_p or min_p
        self.wide_slots: set[int] = set()  # filtered slots that DRAW_LEADING does not sample
        self.logprob_slots: set[int] = set()
        self.prompt_logprob_slots: set[int] = set()
        self.failures: dict[int, str] = {}  # failed slot -> error of its sequence
        self._new_failures: dict[int, str] = {}

    def apply(self, plan: StepPlan) -> None:
        """Apply the new rows and appended blocks of `plan`. Record failed rows in `failures`."""
        for row in plan.new_rows:
            self._assign(row)
        if appended := plan.appended_slots:
            slots = np.array(appended, dtype=np.int64)
            columns = self._num_blocks[slots]
            # several new blocks of one slot use consecutive columns of its block table
            if len(set(appended)) < len(slots):
                columns += [appended[:i].count(slot) for i, slot in enumerate(appended)]
            np.add.at(self._num_blocks, slots, 1)
            blocks = np.array(plan.appended_blocks, dtype=np.int64)
            rows, places, values = upload((slots, columns, blocks), self._device)
            self.block_tables[rows, places] = values.to(self.block_tables.dtype)

    def get_sampling(self, slots: Tensor, positions: Tensor) -> RowSampling:
        """Return the sampling inputs of `slots` at `positions`, [R] int64."""
        return RowSampling(self.sampling, self.seeds, slots, positions)

    def advance(self, slots: Tensor, counts: Tensor) -> None:
        """Add `counts` [R] int64 to the computed tokens of `slots` [R] int64 on the device."""
        self.num_computed.index_add_(0, slots, counts)

    def raise_bounds(self, plan: StepPlan, *, postponed: Sequence[int]) -> None:
        """Add launched tokens to the bounds of computed tokens, minus one in `postponed` rows."""
        self.num_computed_bound[plan.slots] += plan.num_scheduled
        self.num_computed_bound[[plan.slots[row] for row in postponed]] -= 1
        self._unverified[plan.slots] += plan.num_draft_tokens

    def lower_bounds(
        self, plan: StepPlan, num_accepted: Mapping[int, int], reassigned: Container[int] = ()
    ) -> None:
        """Lower the bounds of computed tokens by the rejected drafts of `plan`. Skip slots that now
        belong to other requests, which are `reassigned` slots and slots without unverified drafts.
        """
        for row, num_drafts in enumerate(plan.num_draft_tokens):
            slot = plan.slots[row]
            if num_drafts and self._unverified[slot] and slot not in reassigned:
                self.num_computed_bound[slot] -= num_drafts - num_accepted.get(row, 0)
                self._unverified[slot] -= num_drafts

    def are_bounds_exact(self, slots: Sequence[int]) -> bool:
        """Whether the host has the exact number of computed tokens of `slots`."""
        return not self._unverified[slots].any()

    def restore_lengths(self) -> None:
        """After a failed CPU step, reset the lengths to the bounds, which are exact on a CPU."""
        self.num_computed.copy_(torch.from_numpy(self.num_computed_bound))

    def place_drafts(self, plan: StepPlan) -> None:
        """Write the drafts of `plan` into their slots, after the known tokens."""
        counts = np.array(plan.num_draft_tokens, dtype=np.int64)
        slots = np.array(plan.slots, dtype=np.int64).repeat(counts)
        places = np.arange(len(slots)) - (counts.cumsum() - counts).repeat(counts)
        rows, drafts = upload((slots, places), self._device)
        positions = self.num_computed[rows] + 1 + drafts
        self.tokens[rows, positions] = self.drafts[rows, drafts].clamp_min(0).to(self.tokens.dtype)

    def store(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Write sampled tokens to `positions` of `slots`. All arguments are [R] int64."""
        self.tokens[slots, positions] = token_ids.clamp_min(0).to(self.tokens.dtype)

    def state(self, slot: int) -> SlotState:
        state = self._states[slot]
        assert state is not None, f"slot {slot} was never assigned"
        return state

    def needs_all_logits(self, slot: int) -> bool:
        """Whether a rank needs all logits of the row in `slot` to sample this row."""
        return slot in self.special_slots or slot in self.wide_slots or slot in self.logprob_slots

    def set_padding_block(self, block: int) -> None:
        """Set the block that padding rows read and write. No sequence may own this block."""
        self._padding_block = block
        self.block_tables[self.padding_slot] = block

    def fail(self, slot: int, error: Exception) -> None:
        """End the sequence in `slot` with `error` if the sequence has not failed before."""
        if slot not in self.failures:
            logger.error("slot %d: the request ends with an error", slot, exc_info=error)
            self.failures[slot] = f"{type(error).__name__} while this request was computed"
            self._new_failures[slot] = self.failures[slot]

    def failures_of(self, slots: Iterable[int]) -> dict[int, str]:
        if not self.failures:
            return {}
        return {i: self.failures[slot] for i, slot in enumerate(slots) if slot in self.failures}

    def take_failures(self) -> dict[int, str]:
        """Return errors of slots that failed since the last call."""
        failures, self._new_failures = self._new_failures, {}
        return failures

    def _assign(self, row: NewRow) -> None:
        """Assign a new row to its slot. A failed row uses greedy sampling and the padding block."""
        slot = row.slot
        self.failures.pop(slot, None)
        self._num_blocks[slot] = len(row.block_ids)
        self.drafts[slot] = -1
        self.num_computed[slot] = self.num_computed_bound[slot] = row.num_computed
        self._unverified[slot], self.prompt_lens[slot] = 0, row.prompt_len
        try:
            self._classify(slot, row.sampling)
            edits = [
                edit.prepare(row.sampling, self._eos_token_ids, self._device)
                for edit in logit_edits.EDITS
                if edit.applies(row.sampling, self._eos_token_ids)
            ]
            self._states[slot] = SlotState(row.prompt_len, row.sampling, edits)
            self._fill(row)
        except Exception as error:
            self.fail(slot, error)
            self._states[slot] = SlotState(row.prompt_len, _GREEDY, [])
            self.block_tables[slot] = self._padding_block
            # ranks exchange candidates of all rows with temperature > 0, and also of failed rows
            self._fill_sampling(row)

    def _classify(self, slot: int, params: SamplingParams) -> None:
        """Record how to sample the row, by `params` only, so that all ranks sample alike."""
        assert params.temperature is not None and params.top_k is not None
        edited = any(edit.applies(params, self._eos_token_ids) for edit in logit_edits.EDITS)
        is_drawn = params.temperature > 0.0
        filtered = is_drawn and (params.top_k > 0 or params.top_p != 1.0 or params.min_p != 0.0)
        _toggle(self.special_slots, slot, edited)
        _toggle(self.drawn_slots, slot, is_drawn)
        _toggle(self.filtered_slots, slot, filtered)
        _toggle(self.wide_slots, slot, filtered and not 0 < params.top_k <= CANDIDATES)
        _toggle(self.logprob_slots, slot, params.logprobs is not None)
        _toggle(self.prompt_logprob_slots, slot, params.prompt_logprobs is not None)

    def _fill(self, row: NewRow) -> None:
        """Send the row's tokens, blocks and sampling parameters to the device."""
        slot, lists = row.slot, (row.token_ids, row.block_ids, [row.sampling.seed])
        columns = [np.array(numbers, dtype=np.int64) for numbers in lists]
        tokens, blocks, seed = upload(columns, self._device)
        self.tokens[slot, : len(row.token_ids)] = tokens
        self.block_tables[slot, : len(row.block_ids)] = blocks
        # a draft model also writes KV of drafts, whose positions may be after the row's last block
        self.block_tables[slot, len(row.block_ids) :] = self._padding_block
        self.seeds[slot : slot + 1] = seed
        self._fill_sampling(row)

    def _fill_sampling(self, row: NewRow) -> None:
        values = torch.tensor([getattr(row.sampling, name) for name in FILTERS])
        if self._device.type != "cpu":
            values = values.pin_memory()
        self.sampling[row.slot].copy_(values, non_blocking=True)


def _zeros(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros [rows, columns]. On a CPU, only written pages take memory."""
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    num_bytes = rows * columns * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


def _toggle(slots: set[int], slot: int, member: bool) -> None:
    if member:
        slots.add(slot)
    else:
        slots.discard(slot)
