"""Top-k block selection for decodes, in one launch.

A sequence has several queries if the step verifies draft tokens. A program scores these queries
together, so it reads each index key once for all queries and index heads. Each program has a run of
blocks (`attention/triton_decode_plan`): blocks of several sequences, or part of one long sequence.
Each program writes the scores of its blocks. The program that finishes a sequence last selects the
blocks of the sequence.

    blocks of a sequence     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | ... |
    programs                 |  program 7  |  program 8  | ...       -> scores [T * HEADS, width]
    the last program                                                 -> ids, pages

If a sequence has few blocks, the kernel sorts the scores. For more blocks the kernel finds the
TOPK-th highest score by bisection. For many blocks the kernel first finds the groups of blocks with
the highest scores. Sequences of at most TOPK blocks are not scored.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.triton_decode_plan import (
    SEQUENCE_WORDS,
    WORK_WORDS,
    Splits,
    load_sequence,
    plan_splits,
)
from negamax.kernels.attention.triton_own_blocks import OwnBlocks, plan_own_blocks
from negamax.kernels.block_sparse.selection import SparseShape
from negamax.kernels.block_sparse.tiles import tiles_for
from negamax.kernels.block_sparse.triton_selection import (
    NO_BLOCK,
    NO_KEY,
    NO_SCORE,
    find_highest,
    find_last_block,
    find_scored_block,
    load_index_queries,
    make_key,
    multiply_index_keys,
    order_scores,
    selection_constants,
    store_all_blocks,
    store_best,
    store_highest,
)
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options

MOST_QUERIES = 8  # maximum number of queries of a sequence that are scored together
# maxima of one comparison: number of blocks per index query, number of scores of all queries
MOST_COMPARED, MOST_SCORES = 2048, 4096
_FEW = tl.constexpr(256)  # up to this number of scored blocks, all scores are sorted
_NUM_GROUPS = tl.constexpr(512)  # number of groups of blocks if not all blocks are compared at once
_MOST_ROWS = tl.constexpr(4)  # maximum number of index queries processed at a time
_MOST_MEMBERS = tl.constexpr(16)  # maximum number of index queries * blocks per group in a load


class Queries(NamedTuple):
    """A record of the queries of one sequence."""

    first: tl.tensor  # index of the first query among the T tokens
    count: tl.tensor  # number of queries; 0: the record of an earlier sequence includes the queries
    length: tl.tensor  # number of tokens of the sequence up to the last query


@dataclass(frozen=True)
class SelectDecodePlan:
    """The work of each selection program of a step, and score buffers. All layers use the plan."""

    metadata: AttentionMetadata
    shape: SparseShape
    most_queries: int  # maximum number of queries per sequence
    queries: Tensor  # [S, 4] int32, a `Queries` for each sequence
    arrivals: Tensor  # [S] int32, number of finished programs of each sequence; 0 between launches
    splits: Splits
    own: OwnBlocks | None  # the blocks that this rank scores; None: all blocks are scored
    # number of elements -> buffer of scores; the first layer allocates the buffer
    scores: dict[int, Tensor] = field(default_factory=dict)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _follows(seq_lens, block_table_indices, seq, num_seqs):
    """Return whether the query of sequence `seq` is the next token of the sequence before it."""
    mask = (seq > 0) & (seq < num_seqs)
    grown = tl.load(seq_lens + seq, mask=mask, other=0) - tl.load(
        seq_lens + seq - 1, mask=mask, other=0
    )
    table = tl.load(block_table_indices + seq, mask=mask, other=0)
    return (
        mask & (grown == 1) & (table == tl.load(block_table_indices + seq - 1, mask=mask, other=0))
    )


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=[
        "seq_lens",
        "block_table_indices",
        "query_starts",
        "scored",
        "arrivals",
    ],
)
def _plan_queries_kernel(
    seq_lens,  # [S] int32, sequence lengths with this step's tokens
    block_table_indices,  # [S] int64, row of each sequence in the block tables
    query_starts,  # [S + 1] int32, index of each sequence's first query
    queries,  # [S, 4] int32, written: a `Queries` for each sequence
    scored,  # [S] int32, written: number of tokens whose blocks are scored
    arrivals,  # [S] int32, written: 0
    num_seqs,
    DENSE_TOKENS: tl.constexpr,
    MERGE: tl.constexpr,  # maximum number of single-query "sequences" that are merged into one
    SEQS_POW2: tl.constexpr,
):
    """Write the `Queries` of each sequence and the number of its scored tokens. Grid (1,)."""
    seq = tl.arange(0, SEQS_POW2)
    live = seq < num_seqs
    first = tl.load(query_starts + seq, mask=live, other=0)
    count = tl.load(query_starts + seq + 1, mask=live, other=0) - first
    length = tl.load(seq_lens + seq, mask=live, other=0)
    if MERGE > 1:
        follows = _follows(seq_lens, block_table_indices, seq, num_seqs)
        start = tl.associative_scan(tl.where(follows, 0, seq), 0, _larger)
        follows = live
        for i in tl.static_range(1, MERGE):
            follows = follows & _follows(seq_lens, block_table_indices, seq + i, num_seqs)
            count += follows.to(tl.int32)
            length += follows.to(tl.int32)
        count = tl.where((seq - start) % MERGE == 0, count, 0)
    tl.store(queries + seq * 4, first, mask=live)
    tl.store(queries + seq * 4 + 1, count, mask=live)
    tl.store(queries + seq * 4 + 2, length, mask=live)
    tl.store(arrivals + seq, tl.zeros_like(seq), mask=live)
    tl.store(scored + seq, tl.where((count > 0) & (length > DENSE_TOKENS), length, 0), mask=live)


def plan_select_decode(metadata: AttentionMetadata, shape: SparseShape) -> SelectDecodePlan:
    """Plan 1 to MOST_QUERIES queries per sequence. Only the device reads the sequence lengths."""
    num_seqs, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    # The queries of one sequence may be listed as several "sequences" of one query each. The limit
    # of the number of these "sequences" is known only while a graph is captured.
    is_single = metadata.positions.shape[0] == num_seqs
    unknown = MOST_QUERIES if num_seqs > 1 else 1
    longest = metadata.max_decode_run if metadata.is_captured else unknown
    merge = min(MOST_QUERIES, longest) if is_single else 1
    queries = torch.empty(num_seqs, 4, dtype=torch.int32, device=device)
    scored, arrivals = torch.empty(2, num_seqs, dtype=torch.int32, device=device).unbind()
    if num_seqs:
        _plan_queries_kernel[(1,)](
            metadata.seq_lens, metadata.block_table_indices, metadata.query_starts, queries, scored,
            arrivals, num_seqs, DENSE_TOKENS=shape.dense_tokens, MERGE=merge,
            SEQS_POW2=triton.next_power_of_2(num_seqs), num_warps=4,
        )  # fmt: skip
    own = None
    if shape.shard.ranks > 1:
        own = plan_own_blocks(
            metadata,
            scored,
            rank=shape.shard.rank,
            ranks=shape.shard.ranks,
            block_size=shape.block_size,
        )
        scored = own.tokens
    splits = plan_splits(
        scored, metadata.block_table_indices, kv_heads=1, block_n=shape.sparse_block_size
    )
    most = merge if is_single else max(metadata.host_query_lens)
    return SelectDecodePlan(metadata, shape, most, queries, arrivals, splits, own)


@triton.jit
def _score_blocks(
    index_q, cache, table, numbers, scores, width, queries, first, until, C: tl.constexpr
):
    """Compute the scores of scored blocks first to until - 1 for all index queries of `queries`."""
    row, key = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK)
    is_row = row < queries.count * C.HEADS
    first_row = queries.first.to(tl.int64) * C.HEADS
    q = load_index_queries(index_q, first_row, is_row, C)
    position = queries.length - queries.count + row // C.HEADS
    score_at = scores + (first_row + row) * width
    cache_block = tl.load(table + first // C.PER_BLOCK)
    next_number = find_scored_block(numbers, first, C)
    for i in range(first, until):
        block = i if C.RANKS == 1 else next_number
        products, cache_block, next_number = multiply_index_keys(
            q, cache, table, numbers, i, until, cache_block, C
        )
        is_seen = block * C.BLOCK + key[None, :] <= position[:, None]
        score = tl.max(tl.where(is_seen, products, float("-inf")), axis=1)
        tl.store(score_at + i, score, mask=is_row)


@triton.jit
def _load_order(
    scores, row, i, numbers, num_scored, last, width, C: tl.constexpr, IN_RUNS: tl.constexpr = False
):
    """Return `order_scores` of the scored blocks at the indices `i` for the index queries `row`,
    and the block numbers; indices from `num_scored` on give NO_BLOCK. `row` and `i` are broadcast.
    With IN_RUNS `i` consists of runs of adjacent indices, each of which one load reads.
    """
    block = i
    if C.RANKS > 1:
        is_block = i < num_scored
        block = tl.load(numbers + i // C.PER_BLOCK, mask=is_block, other=0)
        block = tl.where(is_block, block * C.PER_BLOCK + i % C.PER_BLOCK, NO_BLOCK)
    mask = (i < width) & (last >= 0) if IN_RUNS else block <= last
    # The load bypasses L1, because other programs wrote the scores.
    score_at = scores + row.to(tl.int64) * width + i
    score = tl.load(score_at, mask=mask, other=0.0, cache_modifier=".cg")
    return order_scores(score, block, last, C), block


@triton.jit
def _locate_rows(queries, start, ROWS: tl.constexpr, C: tl.constexpr):
    """Return indices of ROWS index queries, whether they exist, and their last visible blocks."""
    row = start + tl.arange(0, ROWS)
    is_there = row < queries.count * C.HEADS
    position = queries.length - queries.count + row // C.HEADS
    last = tl.where(is_there, find_last_block(position, C.BLOCK), -1)
    return row + queries.first * C.HEADS, is_there, last


@triton.jit
def _choose_of_few(
    scores, table, numbers, num_scored, width, queries, ids, pages, start, ROWS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Select blocks for ROWS index queries among up to _FEW blocks."""
    row, is_there, last = _locate_rows(queries, start, ROWS, C)
    i = tl.arange(0, _FEW)[None, :] + row[:, None] * 0
    order, block = _load_order(
        scores, row[:, None], i, numbers, num_scored, last[:, None], width, C
    )
    best = tl.topk(make_key(order, block), C.TOPK_POW2)
    store_best(best, row, row % C.HEADS, table, is_there, ids, pages, C)


@triton.jit
def _choose_of_some(
    scores, table, numbers, num_scored, width, queries, ids, pages, num_rows, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Select blocks, ROWS index queries at a time, if BLOCKS is `num_scored` rounded up to a power
    of two; else do nothing.
    """
    if (num_scored > BLOCKS // 2) & (num_scored <= BLOCKS):
        for start in range(0, num_rows, ROWS):
            row, is_there, last = _locate_rows(queries, start, ROWS, C)
            i = tl.arange(0, BLOCKS)[None, :] + row[:, None] * 0
            order, block = _load_order(
                scores, row[:, None], i, numbers, num_scored, last[:, None], width, C, IN_RUNS=True
            )
            store_highest(order, block, row, row % C.HEADS, table, is_there, ids, pages, C)


@triton.jit
def _choose_of_many(
    scores, table, numbers, num_scored, width, queries, ids, pages, start, ROWS: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Select blocks for ROWS index queries among any number of blocks. GROUP adjacent blocks form a
    group. The TOPK best blocks are in the TOPK groups with the highest maximum scores.
    """
    row, is_there, last = _locate_rows(queries, start, ROWS, C)
    group, member = tl.arange(0, _NUM_GROUPS)[None, :], tl.arange(0, GROUP)[None, None, :]
    if ROWS == 1:
        order, _ = _load_order(
            scores, row[:, None, None], group[:, :, None] * GROUP + member, numbers, num_scored,
            last[:, None, None], width, C,
        )  # fmt: skip
        best = tl.max(order, axis=2)
    else:
        MEMBERS: tl.constexpr = min(GROUP, _MOST_MEMBERS // ROWS)
        part = tl.arange(0, MEMBERS)[None, None, :]
        best = tl.full([ROWS, _NUM_GROUPS], NO_SCORE, tl.int32)
        for begin in range(0, GROUP, MEMBERS):
            order, _ = _load_order(
                scores, row[:, None, None], group[:, :, None] * GROUP + begin + part, numbers,
                num_scored, last[:, None, None], width, C, IN_RUNS=True,
            )  # fmt: skip
            best = tl.maximum(best, tl.max(order, axis=2))
    chosen = find_highest(best, C.TOPK)
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    first = ids + row.to(tl.int64)[:, None] * C.TOPK  # `ids` first stores the selected groups
    tl.store(first + place, group.to(ids.dtype.element_ty), mask=chosen)
    tl.debug_barrier()
    column = tl.arange(0, C.TOPK_POW2)[None, :]
    is_group = column < tl.sum(chosen.to(tl.int32), axis=1)[:, None]
    group = tl.load(first + column, mask=is_group, other=0, cache_modifier=".cg").to(tl.int32)
    tl.debug_barrier()
    i = tl.where(is_group[:, :, None], group[:, :, None] * GROUP + member, NO_BLOCK)
    i = tl.reshape(i, [ROWS, C.TOPK_POW2 * GROUP])
    order, block = _load_order(
        scores, row[:, None], i, numbers, num_scored, last[:, None], width, C, IN_RUNS=ROWS > 1
    )
    store_highest(order, block, row, row % C.HEADS, table, is_there, ids, pages, C)


@triton.jit
def _choose(
    scores, table, numbers, num_scored, width, queries, ids, pages, ROWS: tl.constexpr,
    COMPARED: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Select blocks for all index queries of `queries`; the number of blocks decides the method."""
    num_rows = queries.count * C.HEADS
    if num_scored <= _FEW:
        for start in range(0, num_rows, ROWS):
            _choose_of_few(
                scores, table, numbers, num_scored, width, queries, ids, pages, start, ROWS, C
            )
    elif num_scored <= COMPARED:
        for level in tl.static_range(1, 4):
            if (_FEW << level) <= COMPARED:
                _choose_of_some(
                    scores, table, numbers, num_scored, width, queries, ids, pages, num_rows, ROWS,
                    _FEW << level, C,
                )  # fmt: skip
    elif GROUP > 0:
        # in measurements, only 4 index queries together were faster than one at a time
        MANY: tl.constexpr = ROWS if ROWS == _MOST_ROWS else 1
        for start in range(0, num_rows, MANY):
            _choose_of_many(
                scores, table, numbers, num_scored, width, queries, ids, pages, start, MANY, GROUP,
                C,
            )  # fmt: skip


# no specialization on alignment, because a slice of a buffer may have any alignment
@triton.jit(do_not_specialize_on_alignment=["arrivals"])
def _select_decode_kernel(
    index_q,  # [T, HEADS, DIM]
    cache,  # [blocks, 1, PER_BLOCK * BLOCK, DIM], index keys
    tables,  # [slots, table_stride] int32, block tables
    queries,  # [S, 4] int32, a `Queries` for each sequence
    sequences,  # [S, SEQUENCE_WORDS] int32, see attention/triton_decode_plan
    work,
    scores,  # [T * HEADS, width] fp32, written: scores of the blocks
    arrivals,  # [S] int32, number of finished programs; 0 between launches
    ids,  # [T, HEADS, TOPK], written: int32 block numbers; if RANKS > 1 int64 sort keys
    pages,  # [T, HEADS, TOPK] int32, written: pages of the selected blocks
    own_blocks,  # [S, 2, own_width] as `OwnBlocks`, read only if RANKS > 1
    own_width,
    table_stride,
    width,
    ROWS: tl.constexpr,  # number of index queries that are processed at a time
    COMPARED: tl.constexpr,  # maximum number of blocks that are compared at once
    GROUP: tl.constexpr,  # number of blocks per group; 0 if at most COMPARED blocks are possible
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the scores of one program's run of blocks, which may belong to several sequences.
    Then select blocks for each sequence whose last scores this program wrote.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    work += tl.program_id(0) * WORK_WORDS
    tile, end, seq = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    launch_dependents_then_wait(PDL)
    while tile < end:
        sequence = load_sequence(sequences + seq * SEQUENCE_WORDS)
        until = tl.minimum(end, sequence.end_tile)
        own = queries + seq * 4
        query = Queries(tl.load(own), tl.load(own + 1), tl.load(own + 2))
        table = tables + sequence.table_index.to(tl.int64) * table_stride
        if sequence.length == 0:
            row = tl.arange(0, BLOCK_M)
            position = query.length - query.count + row // C.HEADS
            is_there = row < query.count * C.HEADS
            first_row = query.first * C.HEADS
            if C.RANKS == 1:
                store_all_blocks(
                    position, first_row + row, row % C.HEADS, table, is_there, ids, pages, C
                )
            else:  # the sequence has few blocks, or this rank holds none of its blocks
                none = tl.full([BLOCK_M, C.TOPK_POW2], NO_KEY, tl.int64)
                store_best(none, first_row + row, row, table, is_there, ids, pages, C)
        else:
            first = tile - sequence.first_tile
            after = until - sequence.first_tile
            num_scored = sequence.end_tile - sequence.first_tile
            if C.RANKS == 1:
                numbers, blocks = table, table
            else:
                numbers = own_blocks + seq.to(tl.int64) * 2 * own_width
                blocks = numbers + own_width
            _score_blocks(index_q, cache, blocks, numbers, scores, width, query, first, after, C)
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + seq, 1, sem="acq_rel")
            if before == sequence.num_splits - 1:
                tl.debug_barrier()
                tl.store(arrivals + seq, 0)
                _choose(
                    scores, table, numbers, num_scored, width, query, ids, pages, ROWS, COMPARED,
                    GROUP, C,
                )  # fmt: skip
        tile = until
        seq += 1


def select_decode(
    index_q: Tensor,
    index_cache: Tensor,
    plan: SelectDecodePlan,
    ids: Tensor,
    pages: Tensor | None = None,
) -> None:
    """Select blocks and store their numbers and pages; for a shard store sort keys to `ids`."""
    (num_tokens, heads, dim), shape = index_q.shape, plan.shape
    device, tables = index_q.device, plan.metadata.block_tables
    if num_tokens == 0:
        return
    per_block = shape.block_size // shape.sparse_block_size
    width = tables.shape[1] * per_block
    size = num_tokens * heads * width
    if size not in plan.scores:
        plan.scores[size] = torch.empty(size, dtype=torch.float32, device=device)
    most_rows = plan.most_queries * heads
    launch = tiles_for(device).select_decode(index_cache.element_size())
    rows = min(_MOST_ROWS.value, triton.next_power_of_2(most_rows))
    compared = min(MOST_COMPARED, MOST_SCORES // rows, triton.next_power_of_2(width))
    group = triton.next_power_of_2(triton.cdiv(width, _NUM_GROUPS.value))
    _select_decode_kernel[(plan.splits.programs,)](
        index_q, index_cache, tables, plan.queries, plan.splits.sequences, plan.splits.work,
        plan.scores[size], plan.arrivals, ids, pages, None if plan.own is None else plan.own.blocks,
        tables.shape[1], tables.stride(0), width, ROWS=rows, COMPARED=compared,
        GROUP=group if width > compared else 0,
        C=selection_constants(shape, dim, index_q.dtype, index_cache.dtype, rows=most_rows),
        **launch.options, **launch_options(device),
    )  # fmt: skip
