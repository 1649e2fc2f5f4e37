"""Counts drafts as right by a schedule, whatever they are. So a step's cost and gain at a given
acceptance can be measured with weights that mean nothing. Texts mean nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.parallel.context import ParallelContext
from negamax.worker.proposer import Proposer, TokenStates
from negamax.worker.request_state import RequestState

# seeds that follow each other, as those of a request's choices, begin far from each other
_DRAWS, _SEED_STEP = 2**16, 40503
# of SplitMix64 (Steele, Lea, Flood 2014), as signed numbers
_STEP, _MIX = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


class SyntheticAcceptance(Proposer):
    """Another proposer, which does its work, with `rates` of acceptance: by place in the draft, the
    share of drafts that are right up to there.
    """

    def __init__(self, proposer: Proposer, rates: Sequence[float]) -> None:
        self._proposer, self._rates = proposer, torch.tensor(rates, dtype=torch.float64)
        self.num_draft_tokens, self.capture = proposer.num_draft_tokens, proposer.capture

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        """See `Proposer`."""
        numbers = torch.arange(_DRAWS)
        counts = (uniform(numbers, numbers).unsqueeze(1) < self._rates).sum(dim=1)
        self._counts = counts.to(device)
        length = 1.0 + float(self._rates.sum())
        return (
            f"{self._proposer.load(target, context, device)}; SYNTHETIC ACCEPTANCE of {length:.2f} "
            f"tokens per row, whatever the drafts are: texts mean nothing"
        )

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        """See `Proposer`."""
        self._proposer.use_caches(caches)

    def propose(
        self,
        states: TokenStates,
        slots: Tensor,
        lengths: Tensor,
        ends: Tensor,
        requests: RequestState,
        num_tokens: int,
    ) -> Tensor:
        """See `Proposer`."""
        return self._proposer.propose(states, slots, lengths, ends, requests, num_tokens)

    def accept(
        self,
        sampled: Tensor,
        drafts: Tensor,
        firsts: Tensor,
        num_drafts: Tensor,
        seeds: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """As many as a number from 0 to 1 is below rates, which all ranks draw alike: of a table,
        from the seed of a request and where it stands.
        """
        places = (seeds * _SEED_STEP + lengths) & (_DRAWS - 1)
        return torch.minimum(self._counts[places], num_drafts)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers from 0 to 1 without 1, by a hash. [R] int64 both -> [R] fp64."""
    bits = _mixed(_mixed(seeds) + positions)
    return (_shifted(bits, 11)).double() * 2.0**-53


def _mixed(numbers: Tensor) -> Tensor:
    bits = numbers + _STEP
    for shift, factor in zip((30, 27), _MIX, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """The bits shifted to the right, as an unsigned number."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
