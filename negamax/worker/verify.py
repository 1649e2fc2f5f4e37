"""Verify draft tokens, in eager and captured steps.

The sampler runs on every row that a step verifies, with the same random key as without drafts. A
draft token is accepted if it equals the token sampled at its position and all earlier drafts are
accepted, so drafts never change the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from negamax.kernels.drafts import op as drafts_ops
from negamax.scheduler.step import StepPlan
from negamax.worker.batch import Column
from negamax.worker.device import HostTensor
from negamax.worker.proposer import DraftRows, Proposer, TokenStates
from negamax.worker.request_state import RequestState


class VerifiedRows(NamedTuple):
    """The R sampled rows of a step. All fields are [R] int64."""

    slots: Tensor
    counts: Tensor  # number of verified tokens: the last known token and the drafts; 0: padding
    seq_lens: Tensor  # number of tokens of the row's sequence, including verified tokens
    first_samples: Tensor  # index of the row's first sample in the step's samples
    first_tokens: Tensor  # index of the row's last known token among the step's tokens


@dataclass(frozen=True)
class Verifier:
    """Counts accepted drafts, sets row lengths and proposes new drafts. Eager steps use PyTorch
    ops, because Triton would compile many kernels for the many alignments of index tensors.
    """

    proposer: Proposer
    requests: RequestState
    count_accepted: Callable[..., Tensor] = drafts_ops.count_accepted
    advance_rows: Callable[..., None] = drafts_ops.advance_rows

    def __call__(
        self,
        rows: VerifiedRows,
        sampled: Tensor | None,
        drafts: Tensor | None,
        states: TokenStates,
        *,
        num_proposed: int,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Verify `drafts` [R, K] against `sampled` [S], then propose `num_proposed` tokens per row.

        `drafts` is None if the step has no drafts. `out` receives three [R] int64: accepted drafts,
        known tokens after the step, and the last accepted token's index in the step.
        """
        accepted, lengths, ends = out
        if drafts is None or sampled is None:
            lengths, ends = rows.seq_lens + 1, rows.first_tokens
        else:
            self._count(rows, sampled, drafts, accepted)
            self.advance_rows(
                accepted, rows.counts, rows.seq_lens, rows.first_tokens, rows.slots,
                num_computed=self.requests.num_computed, lengths=lengths, ends=ends,
            )  # fmt: skip
        self.requests.drafts[rows.slots, :num_proposed] = self.proposer.propose(
            states, DraftRows(rows.slots, lengths, ends), self.requests, num_proposed
        )

    def _count(self, rows: VerifiedRows, sampled: Tensor, drafts: Tensor, out: Tensor) -> None:
        schedule = self.proposer.acceptance
        if schedule is None:
            self.count_accepted(sampled, drafts, rows.first_samples, rows.counts - 1, out=out)
        else:
            num_drafts = (rows.counts - 1).clamp_min(0)
            seeds, lengths = self.requests.seeds[rows.slots], rows.seq_lens - num_drafts
            out.copy_(schedule.count(num_drafts, seeds, lengths))


class SampledRows(NamedTuple):
    """The R sampled rows of a plan, on the host. All fields are [R]."""

    rows: Column  # indices of the sampled rows in the plan
    slots: Column
    num_drafts: Column
    first_samples: Column

    @classmethod
    def of(cls, plan: StepPlan) -> SampledRows:
        """List the rows of `plan` that sample."""
        rows = np.flatnonzero(plan.needs_sampling)
        slots, num_drafts = (np.array(each)[rows] for each in (plan.slots, plan.num_draft_tokens))
        return cls(rows, slots, num_drafts, (num_drafts + 1).cumsum() - num_drafts - 1)


@dataclass(frozen=True)
class Verification:
    """The result of a verification, for the host."""

    sampled: SampledRows
    num_accepted: HostTensor  # [R] int64, number of accepted drafts of each sampled row
    drafts: HostTensor | None = None  # [R, K] int64, -1: missing draft; None: none is missing

    @classmethod
    def of(cls, plan: StepPlan, accepted: Tensor, drafts: Tensor | None = None) -> Verification:
        """Copy the result for the sampled rows of `plan` to the host."""
        host_drafts = None if drafts is None else HostTensor(drafts)
        return cls(SampledRows.of(plan), HostTensor(accepted), host_drafts)

    def accepted(self) -> dict[int, int]:
        """Wait for the device. Map each row that has drafts to its number of accepted drafts."""
        rows, _, num_drafts, _ = (column.tolist() for column in self.sampled)
        columns = zip(rows, num_drafts, self.num_accepted.read().tolist(), strict=True)
        return {row: accepted for row, drafts, accepted in columns if drafts}

    def proposed(self) -> dict[int, int]:
        """Map each row of the plan that has fewer drafts than planned to its number of drafts."""
        if self.drafts is None:
            return {}
        rows, _, num_drafts, _ = (column.tolist() for column in self.sampled)
        columns = zip(rows, num_drafts, self.drafts.read().tolist(), strict=True)
        counts = [(row, most, sum(one >= 0 for one in of[:most])) for row, most, of in columns]
        return {row: count for row, most, count in counts if count < most}

    def rejected_samples(self) -> set[int]:
        """Return the indices of samples that follow a rejected draft."""
        _, _, num_drafts, firsts = (column.tolist() for column in self.sampled)
        columns = zip(firsts, num_drafts, self.num_accepted.read().tolist(), strict=True)
        return {
            sample
            for first, drafts, accepted in columns
            for sample in range(first + accepted + 1, first + drafts + 1)
        }
