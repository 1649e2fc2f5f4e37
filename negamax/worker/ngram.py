"""Prompt lookup (method `ngram`): finds the last tokens of a sequence earlier in it, and proposes
the tokens that followed them there.

The longest match wins, then the earliest, as in vLLM. Only the last `SEARCHED_TOKENS` are searched,
and on a CPU no more than the longest sequence of the step has. So the cost per sequence is
constant, and a long one does not slow the others. A hash table of n-grams would search all tokens,
but would also need the tokens of the prefix cache, which no step runs.
"""

import torch
from torch import Tensor

from negamax.options.speculation import SpeculationConfig
from negamax.worker.proposer import DraftRows, Proposer, TokenStates
from negamax.worker.request_state import RequestState

SEARCHED_TOKENS = 32768


class NgramProposer(Proposer):
    """A proposer without a model. It reads only tokens, which all ranks have."""

    has_gaps = True

    def __init__(self, config: SpeculationConfig, *, max_model_len: int) -> None:
        self.num_draft_tokens = config.num_speculative_tokens
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._num_searched = min(SEARCHED_TOKENS, max_model_len)

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        """About 3 passes over the searched tokens per token compared."""
        slots, lengths, _ = rows
        tokens, width = requests.tokens, self._num_searched
        if not num_tokens:
            return lengths.new_empty(len(lengths), 0)
        lengths = lengths.clamp_max(tokens.shape[1])  # any value in a padding row
        if tokens.device.type == "cpu":  # only a GPU has them
            width = min(width, max([1, *lengths.tolist()]))
        begins = (lengths - width).clamp_min(0)
        # [R, width] of the tokens before lengths; in shorter sequences also tokens after these
        searched = tokens.flatten().unfold(0, width, 1)[slots * tokens.shape[1] + begins]
        # Extend matches that end at each place. The last token is no match of itself.
        matches = torch.arange(width, device=tokens.device) < (lengths - 1 - begins).unsqueeze(1)
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
