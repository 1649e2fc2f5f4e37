"""Prompt lookup (method `ngram`): finds the last tokens of a sequence earlier in it, and guesses
that what followed them there will follow again.

The longest match counts, of matches of one length the earliest, as in vLLM. Only the last
`SEARCHED_TOKENS` are searched, on a CPU no more than the longest sequence of the step has: the work
is then the same for every sequence, and one of a million tokens costs no more than its neighbours.
A table of n-grams by their hash would search all, but would have to take in what the prefix cache
brings without a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.options.speculation import SpeculationConfig
from negamax.worker.proposer import Proposer, TokenStates
from negamax.worker.request_state import RequestState

SEARCHED_TOKENS = 32768


class NgramProposer(Proposer):
    """A proposer without a model. It reads tokens only, which all ranks have."""

    has_gaps = True

    def __init__(self, config: SpeculationConfig, *, max_model_len: int) -> None:
        self.num_draft_tokens = config.num_speculative_tokens
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._num_searched = min(SEARCHED_TOKENS, max_model_len)

    def propose(
        self,
        states: TokenStates,
        slots: Tensor,
        lengths: Tensor,
        ends: Tensor,
        requests: RequestState,
        num_tokens: int,
    ) -> Tensor:
        """See `Proposer.propose`. About 3 passes over the searched tokens per token compared."""
        tokens, width = requests.tokens, self._num_searched
        if not num_tokens:
            return lengths.new_empty(len(lengths), 0)
        lengths = lengths.clamp_max(tokens.shape[1])  # of a row of padding it may be any
        if tokens.device.type == "cpu":  # a GPU alone knows them
            width = min(width, max([1, *lengths.tolist()]))
        begins = (lengths - width).clamp_min(0)
        # [R, width] of the tokens before lengths; where a sequence is shorter, others behind them
        searched = tokens.flatten().unfold(0, width, 1)[slots * tokens.shape[1] + begins]
        places = torch.arange(width, device=tokens.device)
        # Does a match that ends at a place go on, and how long is it? The last token is none.
        matches = places < (lengths - 1 - begins).unsqueeze(1)
        longest = torch.zeros_like(matches, dtype=torch.uint8)
        for back in range(min(self._most, width)):
            last = tokens[slots, (lengths - 1 - back).clamp_min(0)].unsqueeze(1)
            matches[:, back:] &= searched[:, : width - back] == last
            matches[:, :back] = False
            longest += matches
        length, end = longest.max(dim=1)  # the first of several
        positions = (begins + end + 1).unsqueeze(1) + torch.arange(num_tokens, device=tokens.device)
        is_known = (positions < lengths.unsqueeze(1)) & (length >= self._least).unsqueeze(1)
        followed = tokens[slots.unsqueeze(1), positions.clamp_max(tokens.shape[1] - 1)]
        return followed.long().where(is_known, -1)
