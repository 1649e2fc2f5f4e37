"""Build the inputs of a forward pass from a plan and the request state. The host lays out the
tokens and sends the layout in one transfer. The device adds each slot's number of computed tokens
to the positions, because the host may not have this number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.scheduler.step import StepPlan
from negamax.worker.device import upload
from negamax.worker.request_state import RequestState

Column = NDArray[np.int64]
_NONE: Column = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class SampleInputs:
    """The R sampled rows of a step."""

    slots: list[int]  # [R] slot of each sampled row
    bounds: list[int]  # [R] upper bounds of the positions of the sampled tokens
    slots_device: Tensor  # [R] int64, `slots` on the device
    positions_device: Tensor  # [R] int64, position of each sampled token


class StepColumns(NamedTuple):
    """T tokens of S sequences, on the host. Offset 0 is the first uncomputed token of a slot."""

    token_slots: Column  # [T] slot of each token
    slots: Column  # [S] slot of each sequence
    token_offsets: Column  # [T] offset of each token from its slot's first uncomputed token
    end_offsets: Column  # [S] 1 + the token offset of each sequence's last token
    query_starts: Column  # [S + 1] index of each sequence's first token, then T

    @classmethod
    def of_decodes(cls, slots: Sequence[int], counts: Sequence[int]) -> StepColumns:
        """Describe the next counts[i] tokens of slots[i]."""
        rows, lengths = np.array(slots, dtype=np.int64), np.array(counts, dtype=np.int64)
        starts = np.concatenate(([0], lengths.cumsum()))
        offsets = np.arange(starts[-1]) - starts[:-1].repeat(lengths)
        return cls(rows.repeat(lengths), rows, offsets, lengths, starts)


@dataclass(frozen=True)
class BatchLayout:
    """T tokens of S sequences in a step, on the host. Single tokens come before prompt runs."""

    num_decodes: int
    columns: StepColumns
    seq_len_bounds: Column  # [S] upper bound of each sequence's length after this step
    prompt_starts: list[int]  # plan's row -> index in the step of the row's first prompt token
    sample_rows: Column  # [R] plan's row for each sample; a row with k drafts has k + 1 samples
    sample_slots: Column  # [R] slot of each sample
    sample_offsets: Column  # [R] offset of each sampled token, see `StepColumns.token_offsets`
    sample_tokens: Column  # [R] index, among the T tokens, of the token before each sampled one

    @classmethod
    def without_samples(
        cls, num_decodes: int, columns: StepColumns, seq_len_bounds: Column
    ) -> BatchLayout:
        """Describe the tokens of a step that samples nothing."""
        return cls(num_decodes, columns, seq_len_bounds, [], *[_NONE] * 4)

    @classmethod
    def of_decodes(cls, plan: StepPlan) -> BatchLayout:
        """Describe a captured step, which samples after each token. `seq_len_bounds` is empty."""
        columns = StepColumns.of_decodes(plan.slots, plan.num_scheduled)
        rows = np.arange(len(plan.slots)).repeat(plan.num_scheduled)
        offsets = columns.token_offsets + 1
        return cls(0, columns, _NONE, [], rows, columns.token_slots, offsets, np.arange(len(rows)))

    @property
    def num_tokens(self) -> int:
        return len(self.columns.token_slots)


@dataclass(frozen=True)
class StepInputs:
    """T tokens of S sequences, on the device. `seq_lens` and `query_starts` may be int32."""

    token_slots: Tensor  # [T] slot of each token
    slots: Tensor  # [S] slot of each sequence
    positions: Tensor  # [T] position of each token
    seq_lens: Tensor  # [S] length of each sequence after this step
    query_starts: Tensor  # [S + 1] index of each sequence's first token, then T

    @classmethod
    def of(cls, columns: Tensor, places: Tensor, num_tokens: int, num_seqs: int) -> StepInputs:
        """Build inputs from the packed `columns` and from the positions and lengths in `places`."""
        parts = [num_tokens, num_seqs]
        size = sum(parts)
        query_starts = columns[2 * size : 2 * size + num_seqs + 1]
        return cls(*columns[:size].split(parts), *places[:size].split(parts), query_starts)


def is_decode(plan: StepPlan, requests: RequestState) -> bool:
    """Whether every row is a sampled decode, so that a graph can replay the whole step."""
    return (
        bool(plan.slots)
        and all(plan.needs_sampling)
        and plan.num_scheduled == [1 + num_drafts for num_drafts in plan.num_draft_tokens]
        and bool((requests.num_computed_bound >= requests.prompt_lens)[plan.slots].all())
    )


def build_batch_layout(
    plan: StepPlan, requests: RequestState, *, generated_apart: bool, drafts_apart: bool = True
) -> BatchLayout:
    """Split `plan` into single generated tokens and runs of prompt tokens. With `generated_apart`,
    every generated token is a decode. A sequence may have several decodes in a step, because a
    layer writes the keys of all tokens before any token attends. Without `generated_apart`, all
    tokens of a resumed sequence form one run. Without `generated_apart` and `drafts_apart`, the
    tokens of a row with drafts form one run.
    """
    decodes: list[tuple[int, int, int]] = []  # (slot, offset of the first token, number of tokens)
    prefills: list[tuple[int, int, int]] = []
    num_prompt_tokens = 0
    prompt_starts: list[int] = []
    # For each row of the plan: (True, index of its last token among the tokens of all prompt runs)
    # or (False, index of its last token among all single tokens).
    last_tokens: list[tuple[bool, int]] = []
    bounds = requests.num_computed_bound[plan.slots]
    left = (requests.prompt_lens[plan.slots] - bounds).tolist()  # prompt tokens left to compute
    table = plan.slots, plan.num_scheduled, plan.num_draft_tokens, left
    for slot, count, num_drafts, num_left in zip(*table, strict=True):
        in_prompt = min(max(num_left, 0), count)
        if count > 1 + num_drafts * drafts_apart and not generated_apart:
            in_prompt = count
        prompt_starts.append(num_prompt_tokens)
        if in_prompt:
            prefills.append((slot, 0, in_prompt))
            num_prompt_tokens += in_prompt
        decodes += ((slot, offset, 1) for offset in range(in_prompt, count))
        in_run = in_prompt == count
        last_tokens.append((in_run, (num_prompt_tokens if in_run else len(decodes)) - 1))
    num_decodes = len(decodes)
    slots, offsets, counts = np.array(decodes + prefills, dtype=np.int64).reshape(-1, 3).T
    query_starts = np.concatenate(([0], counts.cumsum()))
    samples = [
        # (row of the plan, slot, offset of the sampled token, index of the token before that token)
        (row, plan.slots[row], plan.num_scheduled[row] - place, num_decodes * in_run + last - place)
        for row, is_sampled in enumerate(plan.needs_sampling)
        if is_sampled
        for in_run, last in [last_tokens[row]]
        for place in range(plan.num_draft_tokens[row], -1, -1)  # distance to the row's last token
    ]
    return BatchLayout(
        num_decodes,
        StepColumns(
            token_slots=slots.repeat(counts),
            slots=slots,
            token_offsets=np.arange(query_starts[-1])
            + (offsets - query_starts[:-1]).repeat(counts),
            end_offsets=offsets + counts,
            query_starts=query_starts,
        ),
        requests.num_computed_bound[slots] + offsets + counts,
        [num_decodes + start for start in prompt_starts],
        *np.array(samples, dtype=np.int64).reshape(-1, 4).T,
    )


def metadata_of(
    inputs: StepInputs, requests: RequestState, *, active: Tensor | None = None, **host: Any
) -> AttentionMetadata:
    """Build metadata with fields `host`. `active` [1] int32: number of tokens without padding."""
    return AttentionMetadata(
        positions=inputs.positions,
        token_slots=inputs.token_slots,
        block_tables=requests.block_tables,
        block_table_indices=inputs.slots,
        seq_lens=inputs.seq_lens.int(),
        query_starts=inputs.query_starts.int(),
        num_actual_tokens=active,
        **host,
    )


def build(
    layout: BatchLayout, requests: RequestState, *, most_tokens: int | None = None
) -> tuple[Tensor, AttentionMetadata]:
    """Gather the tokens and metadata of `layout`. `AttentionMetadata` explains `most_tokens`."""
    columns = layout.columns
    (packed,) = upload([np.concatenate(columns)], requests.tokens.device)
    num_tokens, num_seqs = len(columns.token_slots), len(columns.slots)
    size = num_tokens + num_seqs
    places = requests.num_computed[packed[:size]] + packed[size : 2 * size]
    inputs = StepInputs.of(packed, places, num_tokens, num_seqs)
    metadata = metadata_of(
        inputs,
        requests,
        num_decodes=layout.num_decodes,
        host_seq_lens=tuple(layout.seq_len_bounds.tolist()),
        host_query_lens=tuple(np.diff(columns.query_starts).tolist()),
        is_exact=requests.are_bounds_exact(columns.slots),
        most_tokens=most_tokens,
    )
    return requests.tokens[inputs.token_slots, inputs.positions].long(), metadata


def build_padding(
    requests: RequestState, *, most_tokens: int, is_share: bool
) -> tuple[Tensor, AttentionMetadata]:
    """Build one padding token as the inputs of a rank that has no tokens."""
    columns = StepColumns.of_decodes([requests.padding_slot], [1])
    layout = BatchLayout.without_samples(1, columns, columns.end_offsets)
    token_ids, metadata = build(layout, requests, most_tokens=most_tokens)
    none = torch.zeros(1, dtype=torch.int32, device=token_ids.device)
    return token_ids, replace(metadata, num_actual_tokens=none, is_share=is_share)


def sample_inputs(
    slots: Sequence[int] | Column, offsets: Sequence[int] | Column, requests: RequestState
) -> SampleInputs:
    """Return inputs to sample the tokens at `offsets` after the computed tokens of `slots`."""
    columns = np.asarray(slots, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
    slots_device, offsets_device = upload(columns, requests.tokens.device)
    return SampleInputs(
        columns[0].tolist(),
        (requests.num_computed_bound[columns[0]] + columns[1]).tolist(),
        slots_device,
        requests.num_computed[slots_device] + offsets_device,
    )
