"""Define the interface of proposers of draft tokens, and select a proposer (`load_proposer`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import KvCaches
from negamax.layers.basic import VocabEmbedding
from negamax.models.decoder import Decoder
from negamax.options.speculation import EAGLE3, NGRAM
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat
from negamax.worker.config import WorkerConfig
from negamax.worker.request_state import RequestState
from negamax.worker.synthetic_acceptance import SyntheticAcceptance


@dataclass(frozen=True)
class TokenStates:
    """The T tokens that a step has run, including rejected drafts, and their residual streams."""

    metadata: AttentionMetadata  # positions, slots and lengths of the T tokens
    residuals: list[Tensor]  # residual stream [T, hidden] into each layer in `Proposer.capture`

    @property
    def slots(self) -> Tensor:
        """[T] int64."""
        return self.metadata.token_slots

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        return self.metadata.positions


class DraftRows(NamedTuple):
    """R rows that need drafts. The last of a row's `lengths` known tokens has no KV yet."""

    slots: Tensor  # [R] int64, slot of each row
    lengths: Tensor  # [R] int64, number of tokens of each row including the bonus token
    ends: Tensor  # [R] int64, index of each row's last token among the T tokens


class Proposer:
    """Proposes draft tokens. All ranks must propose the same tokens."""

    num_draft_tokens: int  # maximum draft tokens that a row has in a step
    capture: tuple[int, ...] = ()  # target layers whose input residual streams the proposer reads
    has_gaps: bool = False  # whether a proposal may have fewer tokens than requested
    acceptance: SyntheticAcceptance | None = None  # None: the target verifies drafts.
    # `confidences[i, j]` fp32: estimated probability that draft j of row i is accepted if drafts 0
    # to j - 1 are accepted. If a row has only k drafts, entry k estimates the draft that
    # would follow. `confidences` is None if the proposer estimates nothing.
    confidences: Tensor | None = None

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        """Load the proposer's weights after the target is loaded. Return a text for the log."""
        return ""

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        """Set the draft model's caches, which use the same block ids as the target's caches."""
        return

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        """Return draft tokens [R, num_tokens] int64 for R `rows`. If a row gets fewer tokens, the
        rest of the row is -1. `propose` runs after every step, so that the proposer's caches
        receive every token. `propose` must not wait for the device, because graphs capture the
        call. During a capture, the host does not have the sequence lengths
        (`AttentionMetadata.is_captured`). `states` is valid until the call returns. Padding rows
        have slot `requests.padding_slot`. A slot's block table ends with padding blocks.
        """
        raise NotImplementedError


class DistantProposer(Proposer):
    """The proposer on earlier pipeline stages, which send residual streams and receive drafts."""

    def __init__(self, config: WorkerConfig, *, dtype: torch.dtype) -> None:
        assert config.speculation is not None
        self.num_draft_tokens = config.speculation.num_speculative_tokens
        self._draft, self._dtype = config.draft, dtype
        own = config.layout.layers(config.spec.num_layers)
        layers = config.draft.spec.aux_layers if config.draft else ()
        self.capture = tuple(layer for layer in layers if layer in own)

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        if self._draft is not None and not self._draft.spec.own_embedding:
            broadcast_embedding(target, context, WeightFormat(self._dtype, device))
        return ""


def broadcast_embedding(
    target: Decoder, context: ParallelContext, weights: WeightFormat
) -> VocabEmbedding:
    """Copy embedding rows from the first to all stages. Every stage must call this function."""
    if target.is_first_stage:
        embedding = target.embedding
    else:
        shape = target.spec.vocab_size, target.spec.hidden_size
        rows, group = target.vocab_range, context.attention_group
        embedding = VocabEmbedding("", shape, rows=rows, group=group, weights=weights)
    context.links.broadcast(embedding.table)
    return embedding


def load_proposer(config: WorkerConfig, *, kernels: KernelTable) -> Proposer | None:
    """Return the proposer of `config`, or None. Raises `CheckpointError` for invalid files."""
    speculation = config.speculation
    if speculation is None:
        return None
    if not config.layout.is_last_stage:
        return DistantProposer(config, dtype=kernels.dtype)
    proposer: Proposer
    if speculation.method == NGRAM:
        from negamax.worker.ngram import NgramProposer

        proposer = NgramProposer(speculation, max_model_len=config.max_model_len)
    elif config.draft is None:
        return None
    elif speculation.method == EAGLE3:
        from negamax.worker.eagle3 import Eagle3Proposer

        proposer = Eagle3Proposer(config, config.draft, kernels=kernels)
    else:
        from negamax.worker.block_drafts import BlockProposer

        proposer = BlockProposer(config, config.draft, kernels=kernels)
    if speculation.synthetic_acceptance_rates is not None:
        proposer.acceptance = SyntheticAcceptance(speculation.synthetic_acceptance_rates)
        proposer.has_gaps = False  # synthetic acceptance also counts missing drafts
    return proposer
