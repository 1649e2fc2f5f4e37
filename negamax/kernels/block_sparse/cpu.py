"""Block-sparse attention on the CPU, batch-invariant.

Prefill tokens with at most `topk_blocks` blocks up to their position use dense attention, in the
tiles of `attention/cpu.py`. All decodes, and prefill tokens with more than `topk_blocks` blocks,
use dense decode attention, which treats each pair (token, KV head) as a sequence. The block table
of a pair lists the pages of the pair's selected blocks; the pair's sequence length depends only on
the token's position. A query's result therefore does not depend on the batch or on chunk borders.

Scores need no masks: all keys of the blocks before a token's local block are visible, and the local
block is selected without a score.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.attention import cpu as dense
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape, attention_metadata
from negamax.kernels.block_sparse.op import (
    BLOCK_SPARSE_DECODE,
    BLOCK_SPARSE_PREFILL,
    BLOCK_SPARSE_SELECT,
    BLOCK_SPARSE_SELECT_SHARD,
)
from negamax.kernels.block_sparse.selection import (
    NO_BLOCK,
    BlockSelection,
    SparseShape,
    attended_tokens,
    best_keys,
    choose,
    pages_of,
)
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.op import AnyKernel, Kernel
from negamax.kernels.rowwise import SAFE_ROWS_MULTIPLE

_SCORES = 2**21  # maximum number of scores that are computed at a time, which limits memory

# --- selection -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens that need scores, because they have more than `topk_blocks` blocks up to their
    position. The sequences of these tokens are padded to the same number of blocks.
    """

    rows: Tensor  # [S, n] int64, indices of each sequence's n scored tokens among all tokens
    tables: Tensor  # [S, blocks] int64, block table of each sequence
    positions: Tensor  # [S * n] int64, position of each token in its sequence
    before: Tensor  # [S * n] int64, number of sparse blocks before each token's local block


@dataclass(frozen=True)
class ScoredShard:
    """Scored tokens, with tables that list only blocks whose index keys this rank stores."""

    tokens: ScoredTokens  # `tokens.tables` are block tables for the rank's own cache.
    # `numbers`: [S, sparse blocks] int64, the rank's block numbers, ascending; padding is NO_BLOCK.
    numbers: Tensor


@dataclass(frozen=True)
class PartialSelection:
    """The selection of the tokens that need no scores, and the tokens that need scores."""

    choice: BlockSelection
    scored: tuple[ScoredTokens, ...]
    shape: SparseShape


@dataclass(frozen=True)
class SelectShardPlan:
    """The tokens for which a rank scores the blocks of its shard."""

    scored: tuple[ScoredShard, ...]
    shape: SparseShape


def plan_select(queries: AttentionMetadata, shape: SparseShape) -> PartialSelection:
    """Select all blocks for tokens that need no scores; plan the scores of the scored tokens."""
    positions = queries.positions.view(-1, 1, 1)
    blocks = torch.arange(shape.topk_blocks)
    ids = blocks.where(blocks <= positions // shape.sparse_block_size, -1).int()
    ids = ids.expand(-1, shape.kv_heads, -1)
    tables = queries.used_tables(shape.block_size)
    of_tokens = tables.repeat_interleave(torch.tensor(queries.host_query_lens), dim=0)
    choice = BlockSelection(ids, pages_of(ids, of_tokens, shape))
    return PartialSelection(choice, tuple(_scored(queries, tables, shape)), shape)


def plan_select_shard(queries: AttentionMetadata, shape: SparseShape) -> SelectShardPlan:
    """Plan the scores of the scored tokens for the blocks of this rank's shard."""
    scored = _scored(queries, queries.used_tables(shape.block_size), shape)
    return SelectShardPlan(tuple(_own_blocks(tokens, shape) for tokens in scored), shape)


def _own_blocks(tokens: ScoredTokens, shape: SparseShape) -> ScoredShard:
    """List each sequence's blocks in the shard. Padding entries have the number NO_BLOCK."""
    shard, per_block = shape.shard, shape.block_size // shape.sparse_block_size
    is_mine = tokens.tables % shard.ranks == shard.rank
    counts = is_mine.sum(1, keepdim=True)
    first = is_mine.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, counts.max())]
    tables = tokens.tables.gather(1, first) // shard.ranks
    numbers = first.where(torch.arange(first.shape[1]) < counts, NO_BLOCK // per_block)
    numbers = (numbers.unsqueeze(-1) * per_block + torch.arange(per_block)).flatten(1)
    local = (tokens.positions // shape.sparse_block_size).view(tokens.rows.shape)
    before = torch.searchsorted(numbers, local).flatten()
    return ScoredShard(replace(tokens, tables=tables, before=before), numbers)


def _scored(
    queries: AttentionMetadata, tables: Tensor, shape: SparseShape
) -> Iterator[ScoredTokens]:
    """Group the scored tokens: decodes by their padded number of blocks, prefills by sequence."""
    lengths, counts = queries.host_seq_lens, queries.host_query_lens
    decodes: dict[int, list[tuple[int, int]]] = {}
    ends = list(accumulate(counts))
    for sequence, (length, count, end) in enumerate(zip(lengths, counts, ends, strict=True)):
        first = max(length - count, shape.dense_tokens)
        if length <= first:
            continue
        num_blocks = _padded_blocks(length, shape.block_size)
        if count == 1:
            decodes.setdefault(num_blocks, []).append((sequence, end - 1))
            continue
        step = max(1, _SCORES // (num_blocks * shape.block_size * shape.kv_heads))
        for start in range(first, length, step):
            stop = min(start + step, length)
            used = tables[sequence : sequence + 1, : -(-stop // shape.block_size)]
            rows = torch.arange(end - length + start, end - length + stop)
            positions = torch.arange(start, stop)
            before = positions // shape.sparse_block_size
            yield ScoredTokens(rows.unsqueeze(0), used, positions, before)
    for num_blocks, members in decodes.items():
        step = max(1, _SCORES // (num_blocks * shape.block_size * SAFE_ROWS_MULTIPLE))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            own = [lengths[sequence] for sequence, _ in part]
            used = tables[[sequence for sequence, _ in part], : -(-max(own) // shape.block_size)]
            tokens, positions = torch.tensor([[token] for _, token in part]), torch.tensor(own) - 1
            yield ScoredTokens(tokens, used, positions, positions // shape.sparse_block_size)


def _padded_blocks(length: int, block_size: int) -> int:
    """Round the number of blocks of `length` tokens up to at most 8 times a power of two."""
    blocks, step = -(-length // block_size), 1
    while blocks > 8 * step:
        step *= 2
    return -(-blocks // step) * step


# Arguments: index_q [S, n, heads, dim], the index cache, the tokens, the size of a sparse block.
# Result: scores [S, n, heads, sparse blocks] fp32; scores of local and later blocks are undefined.
Score = Callable[[Tensor, Tensor, ScoredTokens, int], Tensor]


def select_kernels(score: Score, provider: str, **properties: Any) -> tuple[AnyKernel, AnyKernel]:
    """Make two kernels that select blocks by `score`: one for all blocks, one for a shard."""

    def scores_of(
        index_q: Tensor, index_cache: Tensor, tokens: ScoredTokens, shape: SparseShape
    ) -> Tensor:
        queries = index_q[tokens.rows.flatten()].view(*tokens.rows.shape, *index_q.shape[1:])
        return score(queries, index_cache, tokens, shape.sparse_block_size).flatten(0, 1)

    def select(index_q: Tensor, index_cache: Tensor, plan: PartialSelection) -> BlockSelection:
        if not plan.scored:
            return plan.choice
        shape, ids, pages = plan.shape, plan.choice.ids.clone(), plan.choice.pages.clone()
        for tokens in plan.scored:
            rows = tokens.rows.flatten()
            scores = scores_of(index_q, index_cache, tokens, shape)
            ids[rows] = chosen = choose(scores, tokens.positions, shape)
            tables = tokens.tables.repeat_interleave(tokens.rows.shape[1], dim=0)
            pages[rows] = pages_of(chosen, tables, shape)
        return BlockSelection(ids, pages)

    def select_shard(index_q: Tensor, index_cache: Tensor, plan: SelectShardPlan) -> Tensor:
        shape = plan.shape
        keys = torch.zeros(1, *index_q.shape[:2], shape.topk_blocks, dtype=torch.int64)
        for own in plan.scored:
            scores = scores_of(index_q, index_cache, own.tokens, shape)
            numbers = own.numbers.repeat_interleave(own.tokens.rows.shape[1], dim=0)
            rows = own.tokens.rows.flatten()
            keys[0, rows] = best_keys(scores, numbers, own.tokens.positions, shape)
        return keys

    return (
        Kernel(BLOCK_SPARSE_SELECT, provider, select, plan_select, **properties),
        Kernel(BLOCK_SPARSE_SELECT_SHARD, provider, select_shard, plan_select_shard, **properties),
    )


def products(index_q: Tensor, index_cache: Tensor, tokens: ScoredTokens, size: int) -> Tensor:
    """Compute scores [S, n, heads, sparse blocks] of blocks by one GEMM per sequence."""
    (sequences, count, heads, dim), tables = index_q.shape, tokens.tables
    stored = index_cache.view(torch.uint8)  # index_select does not support FP8
    keys = stored.index_select(0, tables.flatten()).view(index_cache.dtype).float()
    queries = index_q.float().view(sequences, count * heads, dim)
    queries = F.pad(queries, (0, 0, 0, -queries.shape[1] % SAFE_ROWS_MULTIPLE))
    scores = queries @ keys.view(sequences, -1, dim).transpose(1, 2)
    of_blocks: Tensor = scores[:, : count * heads].unflatten(-1, (-1, size)).amax(-1)
    return of_blocks.view(sequences, count, heads, -1)


# --- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedDecode:
    """Dense decode attention for sequences whose block tables change in each layer."""

    plan: Callable[[Tensor, SparseShape], Any]  # Makes the plan for sequence lengths [rows] int64.
    # `run` takes q [rows, group, head_dim], pages, block tables [rows, topk_blocks] int64 and the
    # plan, and returns [rows, group * head_dim].
    run: Callable[[Tensor, KvCache, Tensor, Any], Tensor]


def _attend_to_pages(
    decode: PagedDecode, q: Tensor, cache: KvCache, pages: Tensor, plan: Any, *, shape: SparseShape
) -> Tensor:
    """Attend with q [T, heads, head_dim] to the keys in pages [T, kv_heads, topk_blocks]."""
    num_tokens, _, head_dim = q.shape
    rows, paged = q.reshape(-1, shape.group, head_dim), cache.as_pages(shape.sparse_block_size)
    return decode.run(rows, paged, pages.flatten(0, 1).long(), plan).reshape(num_tokens, -1)


@dataclass(frozen=True)
class BlockSparseDecodePlan:
    """Result of `PagedDecode.plan`, and the layer's `SparseShape`."""

    paged: Any
    shape: SparseShape


@dataclass(frozen=True)
class BlockSparsePrefillPlan:
    """The tokens of a step, divided into a dense and a paged part; an empty part has plan None."""

    dense: tuple[dense.PrefillRun, ...] | None
    dense_rows: Tensor  # [n] int64, index (0 to T - 1) of each token of the dense part
    paged: Any
    paged_rows: Tensor  # [T - n] int64, index (0 to T - 1) of each token of the paged part
    shape: SparseShape


def attention_kernels(
    decode: PagedDecode, provider: str, **properties: Any
) -> tuple[AnyKernel, AnyKernel]:

    def plan_decode(queries: AttentionMetadata, shape: SparseShape) -> BlockSparseDecodePlan:
        assert not shape.quantize, "CPU kernels have no FP8 output; set quantize=False"
        lengths = attended_tokens(torch.tensor(queries.host_seq_lens) - 1, shape)
        lengths = lengths.repeat_interleave(shape.kv_heads)
        return BlockSparseDecodePlan(decode.plan(lengths, shape), shape)

    def run_decode(
        q: Tensor, cache: KvCache, choice: BlockSelection, plan: BlockSparseDecodePlan
    ) -> Tensor:
        assert cache.is_unscaled(q.dtype), "CPU kernels cannot read caches with KV scales"
        return _attend_to_pages(decode, q, cache, choice.pages, plan.paged, shape=plan.shape)

    def plan_prefill(queries: AttentionMetadata, shape: SparseShape) -> BlockSparsePrefillPlan:
        assert not shape.quantize, "CPU kernels have no FP8 output; set quantize=False"
        positions = queries.positions
        is_dense = positions < shape.dense_tokens
        dense_rows, paged_rows = (rows.nonzero().flatten() for rows in (is_dense, ~is_dense))
        paged = None
        if len(paged_rows):
            lengths = attended_tokens(positions[paged_rows], shape)
            paged = decode.plan(lengths.repeat_interleave(shape.kv_heads), shape)
        return BlockSparsePrefillPlan(
            _plan_dense(queries, shape) if len(dense_rows) else None,
            dense_rows,
            paged,
            paged_rows,
            shape,
        )

    def run_prefill(
        q: Tensor, cache: KvCache, choice: BlockSelection, plan: BlockSparsePrefillPlan
    ) -> Tensor:
        assert cache.is_unscaled(q.dtype), "CPU kernels cannot read caches with KV scales"
        if plan.paged is None and plan.dense is not None:
            return dense.prefill(q, cache, plan.dense)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if plan.dense is not None:
            out[plan.dense_rows] = dense.prefill(q[plan.dense_rows], cache, plan.dense)
        if plan.paged is not None:
            out[plan.paged_rows] = _attend_to_pages(
                decode, q[plan.paged_rows], cache, choice.pages[plan.paged_rows],
                plan.paged, shape=plan.shape,
            )  # fmt: skip
        return out

    return (
        Kernel(BLOCK_SPARSE_DECODE, provider, run_decode, plan_decode, **properties),
        Kernel(BLOCK_SPARSE_PREFILL, provider, run_prefill, plan_prefill, **properties),
    )


def _plan_dense(queries: AttentionMetadata, shape: SparseShape) -> tuple[dense.PrefillRun, ...]:
    """Plan dense attention of tokens that attend to all blocks up to their position."""
    runs = [
        (sequence, min(length, shape.dense_tokens), length - count)
        for sequence, (length, count) in enumerate(
            zip(queries.host_seq_lens, queries.host_query_lens, strict=True)
        )
        if length - count < shape.dense_tokens
    ]
    sequences, ends, starts = zip(*runs, strict=True)
    return dense.plan_prefill(
        attention_metadata(
            queries.used_tables(shape.block_size)[list(sequences)],
            ends,
            [end - start for end, start in zip(ends, starts, strict=True)],
        ),
        shape,
    )


# --- decode over PyTorch's attention -------------------------------------------------------------


def _plan_buckets(lengths: Tensor, shape: SparseShape) -> tuple[dense.DecodeBucket, ...]:
    """Plan decodes whose block tables index the flattened page tables [rows, topk_blocks]."""
    rows = len(lengths)
    pages = PagedShape(1, shape.group, shape.sparse_block_size, dtype=shape.dtype)
    places = torch.arange(rows * shape.topk_blocks).view(rows, -1)
    queries = attention_metadata(places, lengths.tolist(), [1] * rows, num_decodes=rows)
    return dense.plan_decode(queries, pages)


def _decode_buckets(
    q: Tensor, cache: KvCache, tables: Tensor, plan: tuple[dense.DecodeBucket, ...]
) -> Tensor:
    pages = tables.flatten()
    buckets = tuple(replace(bucket, blocks=pages[bucket.blocks]) for bucket in plan)
    return dense.decode(q, cache, buckets)


KERNELS: tuple[AnyKernel, ...] = (
    *select_kernels(products, "cpu"),
    *attention_kernels(PagedDecode(_plan_buckets, _decode_buckets), "bucketed"),
)
