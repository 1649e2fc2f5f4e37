"""Runs the model over one batch, and scores prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from negamax.base.errors import EngineDeadError
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.scheduler.step import StepPlan
from negamax.worker.batch import BatchLayout, ForwardBatch
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import LogprobEntries

# Prompt log-probabilities need logits of every prompt token; this many positions at a time bound
# the memory.
PROMPT_LOGPROB_TILE = 256


class Runner:
    """The model, its cache, and nothing else."""

    def __init__(self, model: Decoder, kv: Sequence[KvCaches]) -> None:
        self._model = model
        self._kv = kv

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden] of the batch; keys and values land in the cache."""
        hidden, _ = self._model.forward(batch.token_ids, batch.attention, self._kv)
        return hidden

    def prompt_logprobs(
        self, plan: StepPlan, hidden: Tensor, *, layout: BatchLayout, rows: RequestState
    ) -> dict[int, list[LogprobEntries]]:
        """For each row that asked: entries of the prompt tokens that this step's tokens predict, by
        row index, in tiles.
        """
        if not rows.prompt_logprob_slots:
            return {}
        found: dict[int, list[LogprobEntries]] = {}
        columns = zip(plan.slots, plan.num_scheduled, layout.prompt_starts, strict=True)
        for row, (slot, count, first) in enumerate(columns):
            state, start = rows.state(slot), int(rows.num_computed_bound[slot])
            predicted = min(start + count, state.prompt_len - 1) - start
            if slot in rows.prompt_logprob_slots and predicted > 0:
                try:
                    found[row] = self._entries(
                        hidden[first : first + predicted],
                        rows.tokens[slot, start + 1 : start + 1 + predicted].long(),
                        num_top=state.sampling.prompt_logprobs or 0,
                    )
                except EngineDeadError:  # another rank is gone, which is no fault of the row
                    raise
                except Exception as error:
                    rows.fail(slot, error)
        return found

    def _entries(self, hidden: Tensor, token_ids: Tensor, *, num_top: int) -> list[LogprobEntries]:
        entries = []
        for tile, ids in zip(
            hidden.split(PROMPT_LOGPROB_TILE), token_ids.split(PROMPT_LOGPROB_TILE), strict=True
        ):
            logprobs = torch.log_softmax(self._model.logits(tile), dim=-1)
            entries.append(LogprobEntries(logprobs, ids, num_top=[num_top] * ids.shape[0]))
        return entries
