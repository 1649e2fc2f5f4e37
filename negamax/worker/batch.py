"""From a plan and the rows to the inputs of one forward pass: laid out on the host, then sent to
the device at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.scheduler.step import StepPlan
from negamax.worker.device import upload
from negamax.worker.request_state import RequestState

Column = NDArray[np.int64]


@dataclass(frozen=True)
class SampleInputs:
    """Which rows of a step are sampled. R rows."""

    slots: list[int]  # [R] slot of each sampled row
    positions: list[int]  # [R] where the sampled token lands in its row
    slots_device: Tensor  # [R] int64
    positions_device: Tensor  # [R] int64


class StepColumns(NamedTuple):
    """Where T tokens of S sequences stand, on the host."""

    token_slots: Column  # [T]
    token_positions: Column  # [T]
    slots: Column  # [S]
    seq_lens: Column  # [S] tokens including this step
    query_starts: Column  # [S + 1]

    @classmethod
    def empty(cls) -> StepColumns:
        """No tokens of no sequence."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, nothing, np.zeros(1, dtype=np.int64))

    @classmethod
    def of_decodes(cls, plan: StepPlan, rows: RequestState) -> StepColumns:
        """One token of each row of `plan`."""
        slots = np.array(plan.slots, dtype=np.int64)
        positions = rows.num_computed[slots]
        return cls(slots, positions, slots, positions + 1, np.arange(len(slots) + 1))


@dataclass(frozen=True)
class BatchLayout:
    """A step on the host: T tokens of S sequences, first the generated tokens, each a sequence of
    its own, then runs of prompt tokens."""

    num_decodes: int
    columns: StepColumns
    # per row of the plan: index of its first prompt token among the T (meaningless without any)
    prompt_starts: list[int]
    sample_rows: list[int]  # [R] row of the plan: one sample, and one for each of its draft tokens
    sample_slots: list[int]  # [R]
    sample_positions: list[int]  # [R]
    sample_tokens: list[int]  # [R] index among the T of the token whose hidden state is sampled

    @property
    def longest_decode(self) -> int:
        """Tokens of the longest sequence that runs a generated one."""
        return int(self.columns.seq_lens[: self.num_decodes].max(initial=0))


@dataclass(frozen=True)
class ForwardBatch:
    """The inputs of one step on the device."""

    token_ids: Tensor  # [T] int64
    attention: AttentionMetadata


def is_decode(plan: StepPlan, rows: RequestState) -> bool:
    """Every row runs one generated token and samples the next: the step that a captured graph can
    replay.
    """
    return (
        bool(plan.slots)
        and all(plan.needs_sampling)
        and max(plan.num_scheduled) == 1
        and bool((rows.num_computed >= rows.prompt_lens)[plan.slots].all())
    )


def build_batch_layout(plan: StepPlan, rows: RequestState, *, generated_apart: bool) -> BatchLayout:
    """Cut `plan` into single generated tokens and runs of prompt tokens.

    `generated_apart`: generated tokens run one by one as decodes, prompt tokens as prefills,
    however the scheduler cut them into steps (a preempted sequence runs both again). Several
    decodes of one step may belong to one sequence: a layer writes all keys and values before it
    attends, and each sees only its own. Without it a resumed sequence is one run of tokens.
    """
    decodes: list[tuple[int, int, int]] = []  # slot, first position, tokens
    prefills: list[tuple[int, int, int]] = []
    # of a row that ends in its prompt: minus the prompt tokens up to its last one
    last_tokens: list[int] = []
    prompt_starts: list[int] = []
    num_prompt_tokens = 0
    num_computed = rows.num_computed[plan.slots].tolist()
    for slot, start, count in zip(plan.slots, num_computed, plan.num_scheduled, strict=True):
        end = start + count
        split = min(max(rows.state(slot).prompt_len, start), end)
        if count > 1 and not generated_apart:
            split = end
        prompt_starts.append(num_prompt_tokens)
        if split > start:
            prefills.append((slot, start, split - start))
            num_prompt_tokens += split - start
        decodes += ((slot, position, 1) for position in range(split, end))
        last_tokens.append(len(decodes) - 1 if split < end else -num_prompt_tokens)
    num_decodes = len(decodes)
    slots, starts, counts = np.array(decodes + prefills, dtype=np.int64).T
    ends = counts.cumsum()
    query_starts = np.concatenate(([0], ends))
    samples = [
        (row, place)  # tokens from the row's last one back
        for row, is_sampled in enumerate(plan.needs_sampling)
        if is_sampled
        for place in range(plan.num_draft_tokens[row], -1, -1)
    ]
    return BatchLayout(
        num_decodes=num_decodes,
        columns=StepColumns(
            token_slots=slots.repeat(counts),
            token_positions=np.arange(ends[-1]) + (starts - query_starts[:-1]).repeat(counts),
            slots=slots,
            seq_lens=starts + counts,
            query_starts=query_starts,
        ),
        prompt_starts=[num_decodes + start for start in prompt_starts],
        sample_rows=[row for row, _ in samples],
        sample_slots=[plan.slots[row] for row, _ in samples],
        sample_positions=[
            num_computed[row] + plan.num_scheduled[row] - place for row, place in samples
        ],
        sample_tokens=[
            (last if (last := last_tokens[row]) >= 0 else num_decodes - last - 1) - place
            for row, place in samples
        ],
    )


def build(layout: BatchLayout, rows: RequestState) -> ForwardBatch:
    """The tokens, positions and cache slots of `layout`, gathered from `rows` (already holding the
    plan's changes).
    """
    columns = layout.columns
    token_slots, positions, slots, seq_lens, query_starts = upload(columns, rows.tokens.device)
    return ForwardBatch(
        token_ids=rows.tokens[token_slots, positions].long(),
        attention=AttentionMetadata(
            positions=positions,
            token_slots=token_slots,
            block_tables=rows.block_tables,
            block_table_indices=slots,
            seq_lens=seq_lens.int(),
            query_starts=query_starts.int(),
            num_decodes=layout.num_decodes,
            host_seq_lens=tuple(columns.seq_lens.tolist()),
            host_query_lens=tuple(np.diff(columns.query_starts).tolist()),
        ),
    )


def sample_inputs(slots: list[int], positions: list[int], *, device: torch.device) -> SampleInputs:
    """The sampled rows `slots`, whose new tokens land at `positions`."""
    columns = upload((np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64)), device)
    return SampleInputs(slots, positions, slots_device=columns[0], positions_device=columns[1])
