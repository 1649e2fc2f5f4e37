"""The interface of all proposers of draft tokens, and the selection of one."""

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
    """The T tokens that a step has run, rejected drafts included, and their residual streams."""

    metadata: AttentionMetadata  # their positions, in the slots of the request state
    # of each layer in `Proposer.capture` [T, hidden]; see `Decoder.forward`
    residuals: list[Tensor]

    @property
    def slots(self) -> Tensor:
        """[T] int64."""
        return self.metadata.token_slots

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        return self.metadata.positions


class DraftRows(NamedTuple):
    """R rows to propose for. Their first `lengths` tokens are known; all but the last have run."""

    slots: Tensor  # [R] int64
    lengths: Tensor  # [R] int64
    ends: Tensor  # [R] int64, index in the step of the last token that has run


class Proposer:
    """Proposes draft tokens. All ranks must propose the same."""

    num_draft_tokens: int  # per row and step, at most
    capture: tuple[int, ...] = ()  # layers whose residual stream it reads
    has_gaps: bool = False  # whether proposed tokens may be missing
    acceptance: SyntheticAcceptance | None = None  # accepts by a schedule instead of by comparison
    # of the latest proposal [rows, num_draft_tokens] fp32, also of the place after its last token:
    # estimated chance that a draft is accepted, given that those before it are; None: no estimate
    confidences: Tensor | None = None

    def load(self, target: Decoder, context: ParallelContext, device: torch.device) -> str:
        """Load the proposer's own weights, after the target model's; return text for the log."""
        return ""

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        """Set the caches that `WorkerConfig.draft` declares, in the blocks of the target's own."""
        return

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        """Propose draft tokens for R `rows` -> [R, num_tokens] int64, -1 from a missing token on.
        Runs after every step, so that the proposer's caches receive every token. It must not wait
        for the device, so that it can be captured (`AttentionMetadata.is_captured`: the host has no
        lengths). `states` is valid until it returns. Padding rows have slot
        `requests.padding_slot`; after a slot's own blocks, its table refers to the padding block.
        """
        raise NotImplementedError


class DistantProposer(Proposer):
    """The proposer of earlier stages: gets the last one's drafts, sends residual streams."""

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
    """Copy this rank's embedding rows from the first stage to the last. All must call it."""
    if target.is_first_stage:
        embedding = target.embedding
    else:
        shape = target.spec.vocab_size, target.spec.hidden_size
        rows, group = target.vocab_range, context.attention_group
        embedding = VocabEmbedding("", shape, rows=rows, group=group, weights=weights)
    context.links.hand_down(embedding.table)
    return embedding


def load_proposer(config: WorkerConfig, *, kernels: KernelTable) -> Proposer | None:
    """Create the proposer of `config`, if any. Errors: `CheckpointError` for invalid files."""
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
        proposer.has_gaps = False  # even a missing token may be accepted
    return proposer
