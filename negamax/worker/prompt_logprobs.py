"""Compute log-probabilities of prompt tokens from the hidden states of a step."""

import torch
from torch import Tensor

from negamax.base.errors import EngineDeadError
from negamax.models.decoder import Decoder
from negamax.scheduler.step import StepPlan
from negamax.worker.batch import BatchLayout
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import LogprobEntries

TILE = 256  # Number of positions whose logits are computed at a time, to bound the memory.


def score_prompts(
    model: Decoder, plan: StepPlan, hidden: Tensor, *, layout: BatchLayout, requests: RequestState
) -> dict[int, list[LogprobEntries]]:
    """From `hidden` [T, hidden], compute the prompt log-probabilities that requests ask for."""
    if not requests.prompt_logprob_slots:
        return {}
    found: dict[int, list[LogprobEntries]] = {}
    columns = zip(plan.slots, plan.num_scheduled, layout.prompt_starts, strict=True)
    for row, (slot, count, first) in enumerate(columns):
        state, start = requests.state(slot), int(requests.num_computed_bound[slot])
        predicted = min(start + count, state.prompt_len - 1) - start
        if slot in requests.prompt_logprob_slots and predicted > 0:
            try:
                found[row] = _entries(
                    model,
                    hidden[first : first + predicted],
                    requests.tokens[slot, start + 1 : start + 1 + predicted].long(),
                    num_top=state.sampling.prompt_logprobs or 0,
                )
            except EngineDeadError:  # a lost rank caused this error, not the row
                raise
            except Exception as error:
                requests.fail(slot, error)
    return found


def _entries(
    model: Decoder, hidden: Tensor, token_ids: Tensor, *, num_top: int
) -> list[LogprobEntries]:
    entries = []
    for tile, ids in zip(hidden.split(TILE), token_ids.split(TILE), strict=True):
        logprobs = torch.log_softmax(model.logits(tile), dim=-1)
        entries.append(LogprobEntries(logprobs, ids, num_top=[num_top] * ids.shape[0]))
    return entries
