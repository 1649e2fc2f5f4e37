"""The signature of each op that the kernel table offers: what a layer may call, and what every
provider of the op is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from negamax.kernels.op import OpName

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from negamax.formats.tensor_format import StoredWeight
    from negamax.kernels.activations import Hidden, QuantizedActivations, SwiGlu
    from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
    from negamax.kernels.block_sparse.choice import BlockChoice, IndexShard, SparseShape
    from negamax.kernels.cache_shards.partials import PartialResults
    from negamax.kernels.dispatch.expert_ranges import ExpertRanges
    from negamax.kernels.peers import Collective

Prepared = Any  # what a provider's `prepare` made: for its own `run` alone
# Rows with 1 <= top_k <= CANDIDATES are drawn from this many leading tokens; all others from the
# sorted vocabulary.
CANDIDATES = 64


class PrepareLinear(Protocol):
    def __call__(self, weight: StoredWeight, /) -> Prepared: ...


class Linear(Protocol):
    def __call__(
        self,
        x: Hidden,
        weight: Prepared,
        /,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        in_parts: bool = False,
    ) -> Tensor: ...


class PrepareExperts(Protocol):
    def __call__(
        self,
        gate_up: StoredWeight,
        down: StoredWeight,
        /,
        *,
        activation: SwiGlu = ...,
        shared: bool = False,
    ) -> ExpertWeights: ...


class Experts(Protocol):
    def __call__(
        self,
        x: Hidden,
        ids: Tensor,
        weights: Tensor,
        experts: Any,
        /,
        *,
        first: int,
        count: int,
    ) -> Tensor: ...


class Dispatch(Protocol):
    def __call__(
        self,
        ids: Tensor,
        columns: Sequence[Tensor],
        /,
        *,
        experts: ExpertRanges,
        group: Collective,
        num_rows: int,
    ) -> tuple[Tensor, list[Tensor]]: ...


class Combine(Protocol):
    def __call__(
        self, out: Tensor, ids: Tensor, /, *, experts: ExpertRanges, group: Collective
    ) -> Tensor: ...


class ExpertWeights(Protocol):
    """What `PrepareExperts` makes, for the `Experts` of its provider alone, but for this: the
    weights of an expert can be read, and others put in their place.
    """

    def tensors(self, expert: int) -> list[Tensor]:
        """All that belongs to an expert, by its place among those here: copies, or views of any
        strides.
        """

    def replace(self, expert: int, tensors: Sequence[Tensor]) -> None:
        """Copy what `tensors` gave of another expert, of these or of a rank's with the same sizes,
        into the place of this one.
        """


class PlaceExperts(Protocol):
    def __call__(
        self, ids: Tensor, positions: Tensor, slots: Tensor, copies: Tensor, counts: Tensor, /
    ) -> Tensor: ...


class PrepareRouter(Protocol):
    def __call__(
        self, gate: Tensor, bias: Tensor, /, *, scaling: float = 1.0, shared: bool = False
    ) -> Prepared: ...


class Route(Protocol):
    def __call__(
        self, x: Hidden, router: Prepared, /, *, top_k: int, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class PrepareNormRoute(Protocol):
    def __call__(
        self,
        weight: Tensor,
        eps: float,
        gate: Tensor,
        bias: Tensor,
        /,
        *,
        quantize: bool = False,
        gemma: bool = False,
        scaling: float = 1.0,
        shared: bool = False,
    ) -> tuple[Prepared, Prepared]: ...


class NormRoute(Protocol):
    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Prepared,
        router: Prepared,
        /,
        *,
        top_k: int,
        active: Tensor | None = None,
    ) -> tuple[Hidden, Tensor, Tensor]: ...


class PrepareNorm(Protocol):
    def __call__(
        self, weight: Tensor, eps: float, /, *, quantize: bool = False, gemma: bool = False
    ) -> Prepared: ...


class AddRms(Protocol):
    def __call__(self, x: Tensor, residual: Tensor, norm: Prepared, /) -> Hidden: ...


class AllReduceAddRms(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, norm: Prepared, group: Collective | None, /
    ) -> Hidden: ...


class CompleteResidual(Protocol):
    def __call__(
        self,
        residual: Tensor,
        group: Collective | None,
        /,
        *,
        copy: bool = True,
        out: Tensor | None = None,
    ) -> Tensor: ...


class PrepareAttention(Protocol):
    def __call__(
        self,
        queries: AttentionMetadata,
        shape: PagedShape,
        /,
        *,
        dtype: torch.dtype,
        quantize: bool = False,
    ) -> Prepared: ...


class Attend(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Prepared,
        /,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Hidden: ...


class PrepareQkNorm(Protocol):
    def __call__(
        self, weight: Tensor, /, *, heads: int, kv_heads: int, eps: float, ranks: int
    ) -> Prepared: ...


class QkNormRopeWrite(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        norm: Prepared,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        /,
        *,
        group: Collective | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor: ...


class RopeWrite(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        /,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor: ...


class PrepareHeadNorm(Protocol):
    def __call__(self, weight: Tensor, /, *, heads: int, kv_heads: int, eps: float) -> Prepared: ...


class PrepareSparseHeadNorm(Protocol):
    def __call__(
        self,
        weight: Tensor,
        index_weight: Tensor,
        /,
        *,
        heads: int,
        kv_heads: int,
        eps: float,
        shard: IndexShard = ...,
    ) -> Prepared: ...


class SparseNormRopeWrite(Protocol):
    def __call__(
        self,
        projected: Tensor,
        norm: Prepared,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index_cache: Tensor,
        slot_mapping: Tensor,
        /,
        *,
        index_rows: Tensor | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[Tensor, Tensor]: ...


class PrepareBlockSparse(Protocol):
    def __call__(
        self,
        queries: AttentionMetadata,
        shape: SparseShape,
        /,
        *,
        dtype: torch.dtype,
        quantize: bool = False,
    ) -> Prepared: ...


class SelectBlocks(Protocol):
    def __call__(self, index_q: Tensor, index_cache: Tensor, plan: Prepared, /) -> BlockChoice: ...


class SelectShard(Protocol):
    def __call__(self, index_q: Tensor, index_cache: Tensor, plan: Prepared, /) -> Tensor: ...


class MergeShards(Protocol):
    def __call__(
        self, keys: Tensor, plan: Prepared, group: Collective | None, /
    ) -> BlockChoice: ...


class AttendToBlocks(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        choice: BlockChoice,
        plan: Prepared,
        /,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Hidden: ...


class Locate(Protocol):
    def __call__(
        self,
        positions: Tensor,
        token_slots: Tensor,
        block_tables: Tensor,
        frequencies: Tensor,
        /,
        *,
        kv_heads: int,
        block_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class OwnRows(Protocol):
    def __call__(
        self,
        positions: Tensor,
        token_slots: Tensor,
        block_tables: Tensor,
        /,
        *,
        rank: int,
        ranks: int,
        first: int,
        heads: int,
        block_size: int,
    ) -> Tensor: ...


class AttendToOwn(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Prepared,
        /,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> PartialResults: ...


class AttendToOwnBlocks(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        choice: BlockChoice,
        plan: Prepared,
        /,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> PartialResults: ...


class MergePartials(Protocol):
    def __call__(
        self,
        parts: PartialResults,
        group: Collective | None,
        /,
        *,
        first: int,
        count: int,
        quantize: bool = False,
    ) -> Hidden: ...


class PlaceTokens(Protocol):
    def __call__(
        self,
        columns: Tensor,
        num_computed: Tensor,
        tokens: Tensor,
        drafts: Tensor | None,
        /,
        *,
        padding_slot: int,
        places: Tensor,
        token_ids: Tensor,
        ends: Tensor,
        words: Tensor,
    ) -> None: ...


class EmbedTokens(Protocol):
    def __call__(
        self, token_ids: Tensor, table: Tensor, /, *, first_id: int
    ) -> tuple[Tensor, Tensor]: ...


class StoreTokens(Protocol):
    def __call__(
        self,
        token_ids: Tensor,
        slots: Tensor,
        ends: Tensor,
        /,
        *,
        tokens: Tensor,
        num_computed: Tensor | None,
        out: Tensor,
    ) -> None: ...


class CountAccepted(Protocol):
    def __call__(
        self,
        sampled: Tensor,
        drafts: Tensor,
        firsts: Tensor,
        num_drafts: Tensor,
        /,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...


class AdvanceRows(Protocol):
    def __call__(
        self,
        accepted: Tensor,
        counts: Tensor,
        seq_lens: Tensor,
        firsts: Tensor,
        slots: Tensor,
        /,
        *,
        num_computed: Tensor,
        lengths: Tensor,
        ends: Tensor,
    ) -> None: ...


class RecordGuess(Protocol):
    def __call__(
        self,
        picked: Tensor,
        ids: Tensor,
        slots: Tensor,
        lengths: Tensor,
        /,
        *,
        place: int,
        padding_slot: int,
        last: int,
        drafts: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class EmbedNorms(Protocol):
    def __call__(
        self,
        token_ids: Tensor,
        table: Tensor,
        hidden: Tensor,
        embedding_weight: Tensor,
        hidden_weight: Tensor | None,
        /,
        *,
        eps: float,
    ) -> Tensor: ...


class Pick(Protocol):
    def __call__(
        self,
        logits: Tensor,
        /,
        *,
        first_id: int,
        filters: Tensor,
        seeds: Tensor,
        slots: Tensor,
        positions: Tensor,
        group: Collective | None = None,
    ) -> Tensor: ...


class DrawLeading(Protocol):
    def __call__(
        self,
        logits: Tensor,
        /,
        *,
        first_id: int,
        filters: Tensor,
        seeds: Tensor,
        slots: Tensor,
        positions: Tensor,
        otherwise: Tensor,
        group: Collective | None = None,
    ) -> Tensor: ...


class ActivateMlp(Protocol):
    def __call__(
        self, gate_up: Tensor, /, *, activation: SwiGlu, quantize: bool = False
    ) -> Hidden: ...


class Quantize(Protocol):
    def __call__(self, x: Tensor, /) -> QuantizedActivations: ...


LINEAR: OpName[PrepareLinear, Linear] = OpName("gemm.linear")
EXPERTS: OpName[PrepareExperts, Experts] = OpName("moe.experts")
PLACE: OpName[None, PlaceExperts] = OpName("moe.place")
ROUTE: OpName[PrepareRouter, Route] = OpName("moe.route")
NORM_ROUTE: OpName[PrepareNormRoute, NormRoute] = OpName("moe.norm_route")
DISPATCH: OpName[None, Dispatch] = OpName("dispatch.dispatch")
COMBINE: OpName[None, Combine] = OpName("dispatch.combine")
SWIGLU: OpName[None, ActivateMlp] = OpName("mlp.swiglu")
ADD_RMS: OpName[PrepareNorm, AddRms] = OpName("norm.add_rms")
ALL_REDUCE_ADD_RMS: OpName[PrepareNorm, AllReduceAddRms] = OpName("collectives.all_reduce_add_rms")
COMPLETE_RESIDUAL: OpName[None, CompleteResidual] = OpName("collectives.complete_residual")
DECODE: OpName[PrepareAttention, Attend] = OpName("attention.decode")
PREFILL: OpName[PrepareAttention, Attend] = OpName("attention.prefill")
QK_NORM_ROPE_WRITE: OpName[PrepareQkNorm, QkNormRopeWrite] = OpName("attention.qk_norm_rope_write")
ROPE_WRITE: OpName[None, RopeWrite] = OpName("attention.rope_write")
HEAD_NORM_ROPE_WRITE: OpName[PrepareHeadNorm, QkNormRopeWrite] = OpName(
    "attention.head_norm_rope_write"
)
BLOCK_SPARSE_NORM_ROPE_WRITE: OpName[PrepareSparseHeadNorm, SparseNormRopeWrite] = OpName(
    "block_sparse.norm_rope_write"
)
BLOCK_SPARSE_SELECT: OpName[PrepareBlockSparse, SelectBlocks] = OpName("block_sparse.select")
BLOCK_SPARSE_SELECT_SHARD: OpName[PrepareBlockSparse, SelectShard] = OpName(
    "block_sparse.select_shard"
)
BLOCK_SPARSE_MERGE_SHARDS: OpName[PrepareBlockSparse, MergeShards] = OpName(
    "block_sparse.merge_shards"
)
BLOCK_SPARSE_DECODE: OpName[PrepareBlockSparse, AttendToBlocks] = OpName("block_sparse.decode")
BLOCK_SPARSE_PREFILL: OpName[PrepareBlockSparse, AttendToBlocks] = OpName("block_sparse.prefill")
OWN_ROWS: OpName[None, OwnRows] = OpName("cache_shards.own_rows")
PARTIAL_DECODE: OpName[PrepareAttention, AttendToOwn] = OpName("cache_shards.decode")
PARTIAL_PREFILL: OpName[PrepareAttention, AttendToOwn] = OpName("cache_shards.prefill")
PARTIAL_SPARSE_DECODE: OpName[PrepareBlockSparse, AttendToOwnBlocks] = OpName(
    "cache_shards.sparse_decode"
)
PARTIAL_SPARSE_PREFILL: OpName[PrepareBlockSparse, AttendToOwnBlocks] = OpName(
    "cache_shards.sparse_prefill"
)
MERGE_PARTIALS: OpName[None, MergePartials] = OpName("cache_shards.merge")
LOCATE: OpName[None, Locate] = OpName("kvcache.locate")
QUANTIZE: OpName[None, Quantize] = OpName("quantize.activations")
PLACE_TOKENS: OpName[None, PlaceTokens] = OpName("steps.place")
EMBED_TOKENS: OpName[None, EmbedTokens] = OpName("steps.embed")
STORE_TOKENS: OpName[None, StoreTokens] = OpName("steps.store")
COUNT_ACCEPTED: OpName[None, CountAccepted] = OpName("drafts.count_accepted")
ADVANCE_ROWS: OpName[None, AdvanceRows] = OpName("drafts.advance_rows")
RECORD_GUESS: OpName[None, RecordGuess] = OpName("drafts.record_guess")
EMBED_NORMS: OpName[None, EmbedNorms] = OpName("drafts.embed_norms")
PICK: OpName[None, Pick] = OpName("sampling.pick")
DRAW_LEADING: OpName[None, DrawLeading] = OpName("sampling.draw_leading")
