"""Speculative decoding on the pipeline stages before the last, which proposes the draft tokens."""

import torch

from negamax.layers.basic import VocabEmbedding
from negamax.models.decoder import Decoder
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat
from negamax.worker.config import WorkerConfig
from negamax.worker.proposer import Proposer


class DistantProposer(Proposer):
    """The proposer of all stages but the last. It receives drafts from the last stage
    (`worker/stages.py`) and sends it the residual streams that a draft model reads.
    """

    def __init__(self, config: WorkerConfig, *, dtype: torch.dtype) -> None:
        assert config.speculation is not None
        self.num_draft_tokens = config.speculation.num_speculative_tokens
        self._draft, self._dtype = config.draft, dtype
        own = config.layout.layers(config.spec.num_layers)
        layers = config.draft.spec.aux_layers if config.draft else ()
        self.capture = tuple(layer for layer in layers if layer in own)

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        if self._draft is not None and not self._draft.spec.own_embedding:
            hand_down_embedding(target, context, WeightFormat(self._dtype, device))
        return ""


def hand_down_embedding(
    target: Decoder, context: ParallelContext, weights: WeightFormat
) -> VocabEmbedding:
    """Copy this rank's rows of the first stage's embedding to the last stage's draft. Every stage
    must call it.
    """
    if target.is_first_stage:
        embedding = target.embedding
    else:
        shape = target.spec.vocab_size, target.spec.hidden_size
        rows, group = target.vocab_range, context.attention_group
        embedding = VocabEmbedding("", shape, rows=rows, group=group, weights=weights)
    context.links.hand_down(embedding.table)
    return embedding
