"""Propose draft tokens by prompt lookup (method `ngram`): find an earlier occurrence of a
sequence's last tokens, and propose the tokens after this occurrence.

The proposer uses the longest match, and the earliest of equally long matches, as vLLM does. For
each compared token, the search makes about 3 passes over the last `SEARCHED_TOKENS` tokens, so the
cost per sequence has a constant bound. On a CPU, the step's longest sequence also limits the
search. A hash table of n-grams would miss cached prefixes, because no step runs their tokens.
"""

import torch
from torch import Tensor

from negamax.options.speculation import SpeculationConfig
from negamax.worker.proposer import DraftRows, Proposer, TokenStates
from negamax.worker.request_state import RequestState

SEARCHED_TOKENS = 32768


class NgramProposer(Proposer):
    """A proposer without a model, which reads only tokens. All ranks have the same tokens."""

    has_gaps = True

    def __init__(self, config: SpeculationConfig, *, max_model_len: int) -> None:
        self.num_draft_tokens = config.num_speculative_tokens
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._num_searched = min(SEARCHED_TOKENS, max_model_len)

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        """Propose the tokens after the longest match with each row's last tokens."""
        slots, lengths, _ = rows
        tokens, width = requests.tokens, self._num_searched
        if not num_tokens:
            return lengths.new_empty(len(lengths), 0)
        lengths = lengths.clamp_max(tokens.shape[1])  # padding rows may be longer than the context
        if tokens.device.type == "cpu":  # on a GPU, the host must not wait for the lengths
            width = min(width, max([1, *lengths.tolist()]))
        begins = (lengths - width).clamp_min(0)
        # [R, width] last tokens of each sequence; if a sequence is shorter, unused tokens follow
        searched = tokens.flatten().unfold(0, width, 1)[slots * tokens.shape[1] + begins]
        # `matches`: whether a match ends at a position. The last token must not match itself.
        matches = torch.arange(width, device=tokens.device) < (lengths - 1 - begins).unsqueeze(1)
        longest = torch.zeros_like(matches, dtype=torch.uint8)
        for back in range(min(self._most, width)):
            last = tokens[slots, (lengths - 1 - back).clamp_min(0)].unsqueeze(1)
            matches[:, back:] &= searched[:, : width - back] == last
            matches[:, :back] = False
            longest += matches
        length, end = longest.max(dim=1)  # the earliest of equally long matches
        positions = (begins + end + 1).unsqueeze(1) + torch.arange(num_tokens, device=tokens.device)
        is_known = (positions < lengths.unsqueeze(1)) & (length >= self._least).unsqueeze(1)
        followed = tokens[slots.unsqueeze(1), positions.clamp_max(tokens.shape[1] - 1)]
        return followed.long().where(is_known, -1)
