"""Block-sparse attention on the GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.triton_head_norm import sparse_norm_rope_write
from negamax.kernels.block_sparse.choice import BlockChoice, SparseShape
from negamax.kernels.block_sparse.spec import SparseHeadNorm
from negamax.kernels.block_sparse.triton_decode import plan_sparse_decode, sparse_decode
from negamax.kernels.block_sparse.triton_select_decode import (
    MOST_QUERIES,
    SelectDecodePlan,
    plan_select_decode,
    select_decode,
)
from negamax.kernels.block_sparse.triton_select_prefill import (
    SelectPrefillPlan,
    plan_select_prefill,
    select_prefill,
)
from negamax.kernels.op import Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.signatures import (
    BLOCK_SPARSE_DECODE,
    BLOCK_SPARSE_NORM_ROPE_WRITE,
    BLOCK_SPARSE_SELECT,
)

_GPU = frozenset({Feature.TRITON})
_DTYPES = (torch.bfloat16, torch.float16)


SelectPlan = SelectDecodePlan | SelectPrefillPlan


def plan_select(
    queries: AttentionMetadata, shape: SparseShape, *, dtype: torch.dtype, quantize: bool = False
) -> SelectPlan:
    """Sequences of few queries each, as they decode or verify drafts, or of any number."""
    is_decode = queries.num_decodes == queries.seq_lens.shape[0] or (
        not queries.is_captured and max(queries.host_query_lens) <= MOST_QUERIES
    )
    return (plan_select_decode if is_decode else plan_select_prefill)(queries, shape)


def select(index_q: Tensor, index_cache: Tensor, plan: SelectPlan) -> BlockChoice:
    """As the definition; of tokens behind the last query it says nothing."""
    if isinstance(plan, SelectDecodePlan):
        return select_decode(index_q, index_cache, plan)
    return select_prefill(index_q, index_cache, plan)


KERNELS = (
    Kernel(
        BLOCK_SPARSE_NORM_ROPE_WRITE,
        "triton",
        sparse_norm_rope_write,
        SparseHeadNorm,
        requires=_GPU,
        dtypes=_DTYPES,
    ),
    Kernel(
        BLOCK_SPARSE_SELECT,
        "triton",
        select,
        plan_select,
        requires=_GPU,
        dtypes=_DTYPES,
    ),
    Kernel(
        BLOCK_SPARSE_DECODE,
        "triton",
        sparse_decode,
        plan_sparse_decode,
        requires=_GPU | {Feature.SPIN_WAIT},
        dtypes=_DTYPES,
    ),
    Kernel(
        BLOCK_SPARSE_DECODE,
        "triton_two_launches",
        sparse_decode,
        partial(plan_sparse_decode, reduce_later=True),
        requires=_GPU,
        dtypes=_DTYPES,
    ),
)
