"""Draft tokens: who guesses them, and how many of them a step's samples confirm.

Verification samples and compares. The ordinary sampler runs on every row that a step verifies, with
the ordinary key of its position; a draft is accepted where it is the token sampled in its place. So
the output is that of a run without drafts, whatever the drafts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from negamax.worker.config import WorkerConfig
from negamax.worker.device import HostTensor, upload
from negamax.worker.request_state import RequestState


class Proposer(Protocol):
    """Guesses what comes next. All ranks must guess the same."""

    num_draft_tokens: int  # at a time

    def propose(self, slots: Tensor, lengths: Tensor, requests: RequestState) -> Tensor:
        """What follows the first lengths[i] tokens of slots[i], all of which are known. slots,
        lengths [R] int64 -> [R, num_draft_tokens] int64, -1 from where there is no guess.
        """


def load_proposer(config: WorkerConfig) -> Proposer | None:
    """The proposer that `config` asks for; None: tokens are generated one by one."""
    return None


@dataclass(frozen=True)
class Verification:
    """What became of the drafts of a step. D rows of the plan have any."""

    rows: list[int]  # [D] of the plan
    num_drafts: list[int]  # [D]
    first_samples: list[int]  # [D] index of each row's first sample among all of the step
    num_accepted: HostTensor  # [D] int64

    def accepted(self) -> dict[int, int]:
        """By row of the plan, how many of its drafts were right. Waits for the device."""
        return dict(zip(self.rows, self.num_accepted.read().tolist(), strict=True))

    def dropped(self) -> set[int]:
        """The samples of the step that follow a wrong draft."""
        accepted = self.num_accepted.read().tolist()
        columns = zip(self.first_samples, self.num_drafts, accepted, strict=True)
        return {
            sample
            for first, drafts, right in columns
            for sample in range(first + right + 1, first + drafts + 1)
        }


def count_accepted(sampled: Tensor, drafts: Tensor, num_drafts: Sequence[int]) -> Tensor:
    """How many drafts of each row are the tokens sampled in their places, up to the first that is
    not.

    Row i has the next 1 + num_drafts[i] of `sampled` [R] int64, and the first num_drafts[i] of
    drafts[i]; drafts [rows, K] int64 -> [rows] int64.
    """
    counts = np.array(num_drafts, dtype=np.int64)
    firsts = (counts + 1).cumsum() - counts - 1
    first, count = upload((firsts, counts), sampled.device)
    places = torch.arange(drafts.shape[1], device=sampled.device)
    is_draft = (places < count.unsqueeze(1)) & (drafts >= 0)
    index = (first.unsqueeze(1) + places).clamp_max(sampled.shape[0] - 1)
    return ((sampled[index] == drafts) & is_draft).long().cumprod(dim=1).sum(dim=1)
