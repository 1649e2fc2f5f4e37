"""Propose draft tokens with an EAGLE3 draft model (`models/eagle3`), which stores its caches in the
KV blocks of the target model.

The first pass runs every token of the step. For each token, this pass reads the target's residual
streams and the next token. The draft model's caches contain the same tokens as the target's, also
after prompt chunks and prefix-cache hits. Later steps overwrite keys and values of rejected drafts.
Each further pass runs one token per row, and reads the hidden state of the previous pass.

The draft model's keys of a token depend on the next token. If two sequences share a block, the last
keys of the block depend on the next token of the sequence that filled the block. Shared blocks may
lower acceptance, but never change the output.

At positions of image tokens, the draft model embeds the image token's id, as vLLM does, and not the
image embeddings, as SGLang does. The draft model sees images only in the target's residual streams.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from negamax.checkpoint.quarot import read_rotation
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.registry import KernelTable
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.drafts import DraftModel
from negamax.models.eagle3 import names
from negamax.models.eagle3.config import Eagle3Spec
from negamax.models.eagle3.model import Eagle3Draft, build
from negamax.parallel.collectives import Partial, SingleRank
from negamax.worker.batch import StepInputs, metadata_of
from negamax.worker.config import WorkerConfig
from negamax.worker.draft_model import DraftModelProposer
from negamax.worker.proposer import DraftRows, TokenStates
from negamax.worker.request_state import RequestState


class Eagle3Proposer(DraftModelProposer):
    """Proposes draft tokens one by one, with a pass of the draft model for each token."""

    _model: Eagle3Draft

    def __init__(self, config: WorkerConfig, draft: DraftModel, *, kernels: KernelTable) -> None:
        """Check the files of the draft model. Raises errors of `plan_load` and `read_rotation`."""
        self._rotation = None
        if draft.spec.is_rotated_back and config.folder is not None:
            self._rotation = read_rotation(Path(config.folder))
        super().__init__(config, draft, kernels=kernels)

    def _build(self, setup: LayerSetup) -> dict[str, WeightSlot]:
        self._model = build(self._draft.spec, setup)
        return self._model.weight_slots()

    def _keep_drawn(self, slots: Mapping[str, WeightSlot]) -> Mapping[str, WeightSlot]:
        spec = self._model.spec
        if spec.is_pruned:
            slots[names.D2T].write(_spread(spec))
        ids = (names.D2T, names.T2D)
        return {name: slot for name, slot in slots.items() if name not in ids}

    def _finish_loading(self, target: Decoder) -> None:
        self._model.finish_loading(target, self._rotation if self._draft.folder else None)
        self._target_ids = self._model.target_ids
        if self._draws:  # logits for drawing have one column per target token id
            size = self._model.spec.vocab_size
            self._target_ids = torch.arange(size + 1, device=self._target_ids.device)
            self._target_ids[size] = -1

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        slots, lengths, ends = rows
        model, kv = self._model, self._kv
        following = requests.tokens[states.slots, states.positions + 1]
        combined = model.combine(states.residuals)
        drafts = slots.new_empty(len(slots), num_tokens)
        if not num_tokens or not len(slots):
            model.fill_caches(combined, following, states.metadata, kv)
            return drafts
        hidden, recurrent = model.forward(combined, following, states.metadata, kv)
        hidden, recurrent = hidden[ends], recurrent[ends]
        # Drafts past the context length are written at this position, which no step reads.
        last = requests.tokens.shape[1] - 2
        for place in range(num_tokens):
            picked = self._pick_drafts(hidden, slots, lengths, requests, place=place)
            token_ids, positions, seq_lens = self._record(
                picked, self._target_ids, slots, lengths, place=place,
                padding_slot=requests.padding_slot, last=last, drafts=drafts,
            )  # fmt: skip
            if place + 1 < num_tokens:
                metadata = self._single_tokens(slots, positions, seq_lens, requests)
                recurrent = Partial(recurrent, SingleRank())
                hidden, recurrent = model.forward(recurrent, token_ids, metadata, kv)
        return drafts

    def _pick_drafts(
        self, hidden: Tensor, slots: Tensor, lengths: Tensor, requests: RequestState, *, place: int
    ) -> Tensor:
        """From hidden [R, hidden], choose each row's token at position lengths + place. Return its
        index in `_target_ids`, [R] int64, or -1 if no logit is finite.
        """
        model = self._model
        logits, first_id = model.local_logits(hidden), model.vocab_range.start
        if self._draws:  # the sampling noise depends on the target's token ids
            logits, first_id = model.scatter_logits(logits), 0
        return self._choose(logits, slots, lengths, requests, place=place, first_id=first_id)

    def _single_tokens(
        self, slots: Tensor, positions: Tensor, seq_lens: Tensor, requests: RequestState
    ) -> AttentionMetadata:
        """Return metadata of one token per slot. `seq_lens` is [R] int32, and others are int64."""
        # the host has the sequence lengths only if the device is a CPU
        host = tuple(seq_lens.tolist()) if slots.device.type == "cpu" else ()
        lengths = {"host_seq_lens": host, "host_query_lens": (1,) * len(host)}
        inputs = StepInputs(slots, slots, positions, seq_lens, self._starts[: len(slots) + 1])
        return metadata_of(inputs, requests, num_decodes=len(slots), **lengths)


def _spread(spec: Eagle3Spec) -> Tensor:
    """Return a synthetic d2t [draft vocab] that maps draft ids to evenly spaced target ids."""
    ids = torch.arange(spec.draft_vocab_size)
    return ids * spec.vocab_size // spec.draft_vocab_size - ids
