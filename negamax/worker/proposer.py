"""The interface of everything that proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.drafts.spec import count_accepted
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.parallel.context import ParallelContext
from negamax.worker.request_state import RequestState


@dataclass(frozen=True)
class TokenStates:
    """The T tokens that a step has run, wrong drafts included, and what the model made of them."""

    metadata: AttentionMetadata  # where they stand, in the slots of the request state
    # of each layer in `Proposer.capture` [T, hidden]; see `Decoder.forward`
    residuals: list[Tensor]

    @property
    def slots(self) -> Tensor:
        """[T] int64."""
        return self.metadata.token_slots

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        return self.metadata.positions


class Proposer(Protocol):
    """Guesses what comes next. All ranks must guess the same. To be inherited from."""

    num_draft_tokens: int  # at a time, at most
    capture: tuple[int, ...] = ()  # layers whose residual stream it reads
    has_gaps: bool = False  # whether guesses may be missing

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        """Fill the weights that it has of its own, behind those of the model whose tokens it
        guesses; a line for the log, or none.
        """
        return ""

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        """The caches that `WorkerConfig.draft` declares, in the blocks of the model's own."""

    def propose(
        self,
        states: TokenStates,
        slots: Tensor,
        lengths: Tensor,
        ends: Tensor,
        requests: RequestState,
        num_tokens: int,
    ) -> Tensor:
        """What follows the first lengths[i] tokens of slots[i], all of which are known and all but
        the last of which have run; of these the last is token ends[i] of `states`.

        Called behind every step, with those of its rows that sample, also where these are none or
        `num_tokens` is 0: caches of its own get the tokens of every step. `states` is good until it
        returns. Tensor work alone, without waiting for the device, so that it can be captured; the
        host knows no lengths then (`AttentionMetadata.is_captured`).
        slots, lengths, ends [R] int64 -> [R, num_tokens] int64, -1 from where there is no guess.
        A row of padding has slot `requests.padding_slot`. Behind a slot's blocks its table leads
        to a block of nobody.
        """

    def accept(
        self,
        sampled: Tensor,
        drafts: Tensor,
        firsts: Tensor,
        num_drafts: Tensor,
        seeds: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """How many drafts of each row count as right: see `count_accepted`. The rows' requests have
        `seeds`, and `lengths` tokens in front of their drafts. [rows] int64 both
        """
        return count_accepted(sampled, drafts, firsts, num_drafts)
