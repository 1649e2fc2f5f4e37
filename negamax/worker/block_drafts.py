"""Propose draft tokens with a block draft model (`models/dspark`), which stores its context in the
KV blocks of the target model.

Every step computes the draft model's keys and values from the residual streams of the target model.
The keys and values of a token depend only on this token and earlier tokens, so prefix-cache hits
reuse the keys and values. Keys and values of rejected drafts are overwritten when their positions
run again. A proposal runs a block of the trained size, discards its keys and values, and returns as
many tokens as requested. A confidence head may estimate how likely each draft token is accepted.
"""

import torch
from torch import Tensor

from negamax.kernels.drafts.op import BlockContext
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.dspark.model import BlockDraft, build
from negamax.worker.draft_model import DraftModelProposer
from negamax.worker.proposer import DraftRows, TokenStates
from negamax.worker.request_state import RequestState


class BlockProposer(DraftModelProposer):
    """Proposes several tokens in one pass of the draft model, with a Markov bias of the logits."""

    _model: BlockDraft

    def _build(self, setup: LayerSetup) -> dict[str, WeightSlot]:
        self._model = build(self._draft.spec, setup)
        if self._model.spec.confidence_width:
            shape = self._most_rows + 1, self.num_draft_tokens
            self.confidences = torch.zeros(shape, device=setup.weights.device)
        return self._model.weight_slots()

    def _finish_loading(self, target: Decoder) -> None:
        self._model.finish_loading(target, most_blocks=self._most_rows)

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        slots, lengths, _ = rows
        model, num_rows = self._model, len(slots)
        model.write_context(states.residuals, states.metadata, self._kv)
        if not num_tokens or not num_rows:
            return slots.new_empty(num_rows, num_tokens)
        # the length of an ended sequence may exceed the context length
        before = (lengths - 1).clamp(0, requests.tokens.shape[1] - 1)
        anchors = requests.tokens[slots, before].long()
        seen = before.masked_fill(slots == requests.padding_slot, 0).int()
        context = BlockContext(requests.block_tables, slots, seen)
        hidden = model.run_blocks(anchors, context, states.metadata, self._kv)
        first = int(not model.spec.samples_anchor)
        of_tokens = hidden[:, first : first + num_tokens].flatten(0, 1)
        logits, first_id = model.local_logits(of_tokens), model.vocab_range.start
        if not model.spec.markov_rank:
            every = slots.unsqueeze(1).expand(-1, num_tokens).flatten()
            places = torch.arange(num_tokens, device=slots.device)
            ends = (lengths.unsqueeze(1) + places).flatten()
            chosen = self._choose(logits, every, ends, requests, place=0, first_id=first_id)
            return chosen.view(num_rows, num_tokens)
        logits, drafts = logits.unflatten(0, (num_rows, num_tokens)), [anchors]
        for place in range(num_tokens):
            of_place = logits[:, place] + model.local_bias(drafts[-1])
            at = {"place": place, "first_id": first_id}
            drafts.append(self._choose(of_place, slots, lengths, requests, **at))
        if self.confidences is not None:
            count = min(num_tokens + 1, self.num_draft_tokens)
            previous = torch.stack(drafts[:count], dim=1)
            estimated = model.estimate_acceptance(hidden[:, :count], previous)
            self.confidences[:num_rows, :count] = estimated
        return torch.stack(drafts[1:], dim=1)
