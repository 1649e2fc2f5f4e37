"""Block-sparse attention of decodes with the dense decode kernel (`attention/triton_decode`). Each
token and KV head is a separate sequence, whose block table lists the pages of the selected blocks.

A sequence's length depends only on its token's position, so all layers use one plan.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import Hidden, QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.triton_decode import decode
from negamax.kernels.attention.triton_decode_plan import DecodePlan, plan_decode
from negamax.kernels.block_sparse.selection import BlockSelection, SparseShape
from negamax.kernels.block_sparse.tiles import tiles_for
from negamax.kernels.kvcache.op import KvCache

_TOKENS = 128  # number of tokens per program of `_count_keys_kernel`


@dataclass(frozen=True)
class SparseDecodePlan:
    """The plan of paged decode attention; each layer adds block tables of selected blocks."""

    shape: SparseShape
    paged: DecodePlan


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs"],
    do_not_specialize_on_alignment=["positions", "seq_lens", "query_starts"],
)
def _count_keys_kernel(
    positions,  # [T] int64
    seq_lens,  # [S] int32, sequence lengths with this step's tokens
    query_starts,  # [S + 1] int32, index of each sequence's first query
    lengths,  # [T * HEADS] int32, written: number of attended keys per token and head
    rows,  # [T * HEADS] int64, written: 0, 1, ...
    num_tokens,
    num_seqs,
    IS_SINGLE: tl.constexpr,  # whether every sequence has one query
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Count the keys that each token attends to; write 0 for padding tokens. Grid (T / TOKENS,)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if IS_SINGLE:
        seen = tl.load(seq_lens + token, mask=token < num_tokens, other=0)
    else:
        end = tl.load(query_starts + num_seqs)
        position = tl.load(positions + token, mask=token < num_tokens, other=0)
        seen = tl.where(token < end, position.to(tl.int32) + 1, 0)
    full = tl.minimum((seen + BLOCK - 1) // BLOCK, TOPK) - 1
    length = tl.where(seen > 0, full * BLOCK + (seen - 1) % BLOCK + 1, 0)
    for head in tl.static_range(HEADS):
        row = token * HEADS + head
        tl.store(lengths + row, length, mask=token < num_tokens)
        tl.store(rows + row, row.to(tl.int64), mask=token < num_tokens)


def plan_sparse_decode(
    queries: AttentionMetadata, shape: SparseShape, *, reduce_later: bool = False
) -> SparseDecodePlan:
    """Plan decodes of one or several queries per sequence; only the device reads the lengths."""
    num_tokens, device = queries.positions.shape[0], queries.positions.device
    num_seqs, num_rows = queries.seq_lens.shape[0], num_tokens * shape.kv_heads
    lengths = torch.empty(num_rows, dtype=torch.int32, device=device)
    rows = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_tokens:
        _count_keys_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            queries.positions, queries.seq_lens, queries.query_starts, lengths, rows, num_tokens,
            num_seqs, IS_SINGLE=num_tokens == num_seqs, HEADS=shape.kv_heads,
            BLOCK=shape.sparse_block_size, TOPK=shape.topk_blocks, TOKENS=_TOKENS, num_warps=4,
        )  # fmt: skip
    each = replace(
        queries,
        block_table_indices=rows,
        seq_lens=lengths,
        num_decodes=num_rows,
        max_decode_run=1,  # each row is a sequence with its own keys
        decode_runs=None,
        # without upper bounds, kernels would prefetch keys before the selection ends
        host_seq_lens=(shape.dense_tokens,) * num_rows,
        host_query_lens=(1,) * num_rows,
        is_exact=False,
    )
    paged = plan_decode(
        each,
        PagedShape(1, shape.group, shape.sparse_block_size, quantize=shape.quantize),
        reduce_later=reduce_later,
    )
    dependent = tiles_for(device).decode_is_dependent(num_tokens, kv_heads=shape.kv_heads)
    return SparseDecodePlan(shape, replace(paged, dependent=dependent))


def sparse_decode(
    q: Tensor, cache: KvCache, choice: BlockSelection, plan: SparseDecodePlan
) -> Hidden:
    """Run `block_sparse.decode` on the pages of the selected blocks."""
    num_tokens, heads, head_dim = q.shape
    size, tables = plan.shape.sparse_block_size, choice.pages.flatten(0, 1)
    out = decode(
        q.view(-1, plan.shape.group, head_dim),
        cache.as_pages(size),
        replace(plan.paged, queries=replace(plan.paged.queries, block_tables=tables)),
    )
    if isinstance(out, QuantizedActivations):
        parts = (part.view(num_tokens, -1) for part in (out.hidden, out.q, out.scale))
        return QuantizedActivations(*parts)
    return out.view(num_tokens, heads * head_dim)
