"""Proposes draft tokens by an EAGLE3 draft model (`models/eagle3`), which keeps its own caches in
the blocks of the target model.

The first pass runs over every token of the step, from the target's residual streams and the
following token. So its caches cover the same tokens as the target's, also for prompt chunks and
prefix-cache hits. Entries of rejected drafts are overwritten. Each further pass runs one token per
row, from the hidden state of the pass before.

A draft's keys of a position depend on the following token. So the last keys of a block that two
sequences share belong to the sequence that filled it. This may lower acceptance, but never changes
the output.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.quarot import read_rotation
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.drafts.op import RECORD_DRAFTS
from negamax.kernels.registry import KernelTable
from negamax.kernels.sampling.op import DRAW_LEADING, PICK, RowSampling
from negamax.layers.attention import KvCaches
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.eagle3 import names
from negamax.models.eagle3.config import DraftModel, Eagle3Spec, name_draft_errors
from negamax.models.eagle3.model import Eagle3Draft, build
from negamax.parallel.collectives import Partial, SingleRank
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from negamax.worker.config import WorkerConfig
from negamax.worker.proposer import DraftRows, Proposer, TokenStates, hand_down_embedding
from negamax.worker.request_state import FILTERS, RequestState


class Eagle3Proposer(Proposer):
    """Proposes the draft's most likely tokens. With "probabilistic" and a temperature, it instead
    samples the draft's logits with the target's noise, as on a GPU.
    """

    def __init__(self, config: WorkerConfig, draft: DraftModel, *, kernels: KernelTable) -> None:
        """Check the draft's files. Errors: those of `plan_load` and `read_rotation`."""
        assert config.speculation is not None
        self.num_draft_tokens = config.speculation.num_speculative_tokens
        self.capture = draft.spec.aux_layers
        self._draws = config.speculation.draft_sample_method == "probabilistic"
        self._config, self._draft, self._kernels = config, draft, kernels
        self._pick, self._draw_leading = kernels[PICK].run, kernels[DRAW_LEADING].run
        self._record = kernels[RECORD_DRAFTS].run
        self._plan, self._rotation = None, None
        if draft.spec.is_rotated_back and config.folder is not None:
            self._rotation = read_rotation(Path(config.folder))
        if draft.folder is not None:
            layout = config.layout.within_stage
            slots = build_empty_slots(draft.spec, layout, kernels=kernels)
            with name_draft_errors(draft.folder):
                self._plan = plan_load(slots, draft.spec, Path(draft.folder), layout)

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        spec, self._group = self._draft.spec, context.attention_group
        if not spec.own_embedding and not target.is_first_stage:
            weights = WeightFormat(self._kernels.dtype, device)
            target.embedding = hand_down_embedding(target, context, weights)
        self._model = _build(spec, context, device=device, kernels=self._kernels)
        slots = self._model.weight_slots()
        if self._plan is not None:
            with name_draft_errors(self._draft.folder):
                summary = fill(slots, self._plan).summary()
                self._model.finish_loading(target, self._rotation)
        else:
            if spec.is_pruned:
                slots[names.D2T].write(_spread(spec))
            ids = (names.D2T, names.T2D)
            drawn = {name: slot for name, slot in slots.items() if name not in ids}
            fill_synthetic(drawn, spec, self._config.seed, device=device)
            summary = "synthetic weights"
            self._model.finish_loading(target)
        self._target_ids = self._model.target_ids
        if self._draws:  # by the target's ids
            size = spec.vocab_size
            self._target_ids = torch.arange(size + 1, device=device)
            self._target_ids[size] = -1
        rows = max(self._config.max_num_seqs, self._config.cudagraph_size) + 1
        self._starts = torch.arange(rows, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        self._greedy = torch.zeros(1, len(FILTERS), device=device)  # filters of all rows
        return f"; draft of {self.num_draft_tokens} tokens: {summary}"

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        self._kv = caches

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
        # Writes past the context length are clamped and never read.
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
        """Sample the token at lengths + place from hidden [R, hidden] -> [R] int64, an index of
        `_target_ids`; -1 without a finite logit.
        """
        model, logits = self._model, self._model.local_logits(hidden)
        if not self._draws:
            zeros = self._zeros[: len(slots)]
            rows = RowSampling(self._greedy, self._zeros, zeros, zeros)
            return self._pick(logits, rows, first_id=model.vocab_range.start, group=self._group)
        # noise is keyed by the target's ids
        logits = model.scatter_logits(logits)
        rows = requests.get_sampling(slots, lengths + place)
        whole: dict[str, Any] = {"first_id": 0, "group": self._group}
        picked = self._pick(logits, rows, **whole)
        drawn: Tensor = self._draw_leading(logits, rows, otherwise=picked, **whole)
        return drawn

    def _single_tokens(
        self, slots: Tensor, positions: Tensor, seq_lens: Tensor, requests: RequestState
    ) -> AttentionMetadata:
        """Describe one token of each of `slots`, [R] int64 each but seq_lens [R] int32."""
        # only a GPU has them
        host = tuple(seq_lens.tolist()) if slots.device.type == "cpu" else ()
        return AttentionMetadata(
            positions=positions,
            token_slots=slots,
            block_tables=requests.block_tables,
            block_table_indices=slots,
            seq_lens=seq_lens,
            query_starts=self._starts[: len(slots) + 1],
            num_decodes=len(slots),
            host_seq_lens=host,
            host_query_lens=(1,) * len(host),
        )


def build_empty_slots(
    spec: Eagle3Spec, layout: ParallelLayout, *, kernels: KernelTable
) -> dict[str, WeightSlot]:
    """Return the weight slots of a draft on the rank `layout`, without memory."""
    context, device = ParallelContext(layout), torch.device("meta")
    return _build(spec, context, device=device, kernels=kernels).weight_slots()


def _build(
    spec: Eagle3Spec, context: ParallelContext, *, device: torch.device, kernels: KernelTable
) -> Eagle3Draft:
    weights = WeightFormat(kernels.dtype, device, detect(spec.quantization))
    return build(spec, LayerSetup(context, weights, kernels))


def _spread(spec: Eagle3Spec) -> Tensor:
    """Spread a synthetic draft's tokens evenly over the target's: its d2t [draft vocab]."""
    ids = torch.arange(spec.draft_vocab_size)
    return ids * spec.vocab_size // spec.draft_vocab_size - ids
