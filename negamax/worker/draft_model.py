"""Define the base class of draft-model proposers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.kernels.drafts.op import RECORD_DRAFTS
from negamax.kernels.registry import KernelTable
from negamax.kernels.sampling.op import DRAW_LEADING, PICK, RowSampling
from negamax.layers.attention import KvCaches
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.drafts import DraftModel, name_draft_errors
from negamax.parallel.context import ParallelContext
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from negamax.worker.config import WorkerConfig
from negamax.worker.proposer import Proposer, broadcast_embedding
from negamax.worker.request_state import FILTERS, RequestState


class DraftModelProposer(Proposer):
    """Proposes the draft model's most likely tokens. With "probabilistic" sampling and a
    temperature, the draft's logits are sampled with the noise that the target's GPU sampler uses.
    """

    def __init__(self, config: WorkerConfig, draft: DraftModel, *, kernels: KernelTable) -> None:
        """Check the files of the draft model. Raises the errors of `plan_load`."""
        assert config.speculation is not None
        self.num_draft_tokens = config.speculation.num_speculative_tokens
        self.capture = draft.spec.aux_layers
        self._draws = config.speculation.draft_sample_method == "probabilistic"
        self._config, self._draft, self._kernels = config, draft, kernels
        self._most_rows = max(config.max_num_seqs, config.cudagraph_size)
        self._pick, self._draw_leading = kernels[PICK].run, kernels[DRAW_LEADING].run
        self._record = kernels[RECORD_DRAFTS].run
        self._plan = None
        if draft.folder is not None:
            layout = config.layout.within_stage
            slots = self._build(self._setup(ParallelContext(layout), torch.device("meta")))
            with name_draft_errors(draft.folder):
                self._plan = plan_load(slots, draft.spec, Path(draft.folder), layout)

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        spec, self._group = self._draft.spec, context.attention_group
        if not spec.own_embedding and not target.is_first_stage:
            weights = WeightFormat(self._kernels.dtype, device)
            target.embedding = broadcast_embedding(target, context, weights)
        slots = self._build(self._setup(context, device))
        if self._plan is not None:
            with name_draft_errors(self._draft.folder):
                summary = fill(slots, self._plan).summary()
                self._finish_loading(target)
        else:
            fill_synthetic(self._keep_drawn(slots), spec, self._config.seed, device=device)
            summary = "synthetic weights"
            self._finish_loading(target)
        rows = self._most_rows + 1
        self._starts = torch.arange(rows, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows * self.num_draft_tokens, dtype=torch.int64, device=device)
        self._greedy = torch.zeros(1, len(FILTERS), device=device)  # `FILTERS` of a greedy row
        return f"; draft of {self.num_draft_tokens} tokens: {summary}"

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        self._kv = caches

    def _setup(self, context: ParallelContext, device: torch.device) -> LayerSetup:
        weights = WeightFormat(self._kernels.dtype, device, detect(self._draft.spec.quantization))
        return LayerSetup(context, weights, self._kernels)

    def _build(self, setup: LayerSetup) -> dict[str, WeightSlot]:
        """Build the draft model without weights and return its weight slots."""
        raise NotImplementedError

    def _finish_loading(self, target: Decoder) -> None:
        """Prepare the written weights for the kernels. `target` supplies missing weights."""
        raise NotImplementedError

    def _keep_drawn(self, slots: Mapping[str, WeightSlot]) -> Mapping[str, WeightSlot]:
        """Write fixed values to some synthetic weights. Return the slots for random values."""
        return slots

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        requests: RequestState,
        *,
        place: int,
        first_id: int,
    ) -> Tensor:
        """Choose tokens [R] int64 from logits [R, tokens of this rank] fp32. A token is -1 if its
        row has no finite logit (see PICK). "probabilistic" sampling uses the noise that the
        target's sampler uses at positions lengths + place.
        """
        shard: dict[str, Any] = {"first_id": first_id, "group": self._group}
        if not self._draws:
            zeros = self._zeros[: len(logits)]
            rows = RowSampling(self._greedy, self._zeros, zeros, zeros)
            return self._pick(logits, rows, **shard)
        rows = requests.get_sampling(slots, lengths + place)
        picked = self._pick(logits, rows, **shard)
        drawn: Tensor = self._draw_leading(logits, rows, otherwise=picked, **shard)
        return drawn
