"""Proposers with known outputs, for tests that draft tokens do not change the text."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, full

from negamax import SamplingParams
from negamax.worker.config import WorkerConfig
from negamax.worker.proposer import DraftRows, Proposer, TokenStates
from negamax.worker.request_state import RequestState

ACCEPTED, REJECTED, RANDOM = KINDS = ("accepted", "rejected", "random")
NUM_DRAFT_TOKENS = 3

Key = tuple[int, tuple[int, ...]]  # seed and prompt of a request


class ScriptedProposer(Proposer):
    """Propose the output of a run without drafts. `kind` selects whether no, all or random tokens
    are wrong. Unknown requests get no draft tokens.
    """

    num_draft_tokens = NUM_DRAFT_TOKENS
    capture: tuple[int, ...] = ()
    is_checked = True  # Rows must hold the known text.

    def __init__(self, kind: str, outputs: dict[Key, list[int]]) -> None:
        self._kind, self._outputs = kind, outputs

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        slots, lengths, ends = rows
        real = slots != requests.padding_slot
        assert torch.equal(states.slots[ends], slots)
        assert torch.equal(states.positions[ends][real], lengths[real] - 2)
        drafts = full((len(slots), num_tokens), -1)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            if slot == requests.padding_slot:
                continue
            prompt_len = requests.state(slot).prompt_len
            prompt = tuple(requests.tokens[slot, :prompt_len].tolist())
            output = self._outputs.get((int(requests.seeds[slot]), prompt), [])
            known = requests.tokens[slot, prompt_len:length].tolist()
            # A row in flight continues after its end. A captured step samples again when it has all
            # logits.
            is_first = not self.is_checked or requests.needs_all_logits(slot)
            assert is_first or known[: len(output)] == output[: len(known)], "an accepted draft"
            for place, token in enumerate(output[length - prompt_len :][:num_tokens]):
                drafts[row, place] = self._draft(token, random.Random(f"{length} {token} {place}"))
        return drafts

    def _draft(self, token: int, rng: random.Random) -> int:
        other = (token + 1) % 50
        if self._kind == RANDOM:
            return rng.choice((token, token, token, other, -1))
        return token if self._kind == ACCEPTED else other


def outputs_of(
    params: Iterable[SamplingParams], prompts: Iterable[list[int]], outputs: Iterable[list[int]]
) -> dict[Key, list[int]]:
    return {
        (one.seed or 0, tuple(prompt)): output
        for one, prompt, output in zip(params, prompts, outputs, strict=True)
        if one.grammar is None
    }


def install(patch: Callable[[object, str, Any], None], proposer: Proposer) -> None:
    """Let the workers of this process verify the draft tokens of `proposer`."""
    from negamax.worker import runner

    def load(_config: WorkerConfig, **_options: object) -> Proposer:
        return proposer

    patch(runner, "load_proposer", load)
