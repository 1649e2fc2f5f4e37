"""Speculative decoding: which proposer runs, and how many draft tokens a step's samples confirm.

Verification samples and compares. The ordinary sampler runs on every row that a step verifies, with
the ordinary key of its position; a draft token is accepted where it equals the token sampled in its
place. So the output is that of a run without drafts, whatever the drafts are.
"""

from __future__ import annotations

from dataclasses import dataclass

from negamax.kernels.registry import KernelTable
from negamax.options.speculation import NGRAM, SpeculationConfig
from negamax.worker.config import WorkerConfig
from negamax.worker.device import HostTensor
from negamax.worker.proposer import Proposer


def load_proposer(config: WorkerConfig, *, kernels: KernelTable) -> Proposer | None:
    """The proposer that `config` asks for, by the name of its method; None: tokens are generated
    one by one. Errors: `CheckpointError` for files that are not those of a draft.
    """
    speculation = config.speculation
    if speculation is None:
        return None
    if not config.layout.is_last_stage:
        from negamax.worker.distant_proposer import DistantProposer

        return DistantProposer(config, dtype=kernels.dtype)
    proposer = _proposer(config, speculation, kernels=kernels)
    rates = speculation.synthetic_acceptance_rates
    if proposer is None or rates is None:
        return proposer
    from negamax.worker.synthetic_acceptance import SyntheticAcceptance

    return SyntheticAcceptance(proposer, rates)


def _proposer(
    config: WorkerConfig, speculation: SpeculationConfig, *, kernels: KernelTable
) -> Proposer | None:
    if speculation.method == NGRAM:
        from negamax.worker.ngram import NgramProposer

        return NgramProposer(speculation, max_model_len=config.max_model_len)
    if config.draft is not None:
        from negamax.worker.eagle3 import Eagle3Proposer

        return Eagle3Proposer(config, config.draft, kernels=kernels)
    return None


@dataclass(frozen=True)
class Verification:
    """The outcome for the drafts of a step that samples S rows."""

    rows: list[int]  # [S] of the plan
    num_drafts: list[int]  # [S]
    first_samples: list[int]  # [S] index of each row's first sample among all of the step
    num_accepted: HostTensor  # [S] int64
    drafts: HostTensor | None = None  # [S, K] int64, -1: missing; None: none is

    def accepted(self) -> dict[int, int]:
        """How many drafts were right, by row of the plan with drafts. Waits for the device."""
        columns = zip(self.rows, self.num_drafts, self.num_accepted.read().tolist(), strict=True)
        return {row: right for row, num_drafts, right in columns if num_drafts}

    def guessed(self) -> dict[int, int]:
        """How many drafts there were, by row of the plan, where some are missing."""
        if self.drafts is None:
            return {}
        columns = zip(self.rows, self.num_drafts, self.drafts.read().tolist(), strict=True)
        counts = [(row, most, sum(one >= 0 for one in of[:most])) for row, most, of in columns]
        return {row: count for row, most, count in counts if count < most}

    def dropped(self) -> set[int]:
        """The samples of the step that follow a wrong draft."""
        accepted = self.num_accepted.read().tolist()
        columns = zip(self.first_samples, self.num_drafts, accepted, strict=True)
        return {
            sample
            for first, drafts, right in columns
            for sample in range(first + right + 1, first + drafts + 1)
        }
