"""Top-k block selection for decodes, in one launch.

A sequence has several queries if the step verifies draft tokens. A program scores a sequence's
queries together, so it reads each index key once for all queries and index heads. Each program has
a run of blocks (`attention/triton_decode_plan`): blocks of several sequences, or part of one long
sequence. Each program writes the scores of its blocks. The program that finishes a sequence last
selects the blocks of the sequence.

    blocks of a sequence     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | ... |
    programs                 |  program 7  |  program 8  | ...       -> scores [T * HEADS, width]
    the last program                                                 -> ids, pages

The last program finds the TOPK-th highest score by bisection. If a sequence has many blocks,
adjacent blocks form groups. The TOPK best blocks are in the TOPK groups with the highest maxima, so
the last program compares the maxima, and then only the blocks of these groups. Sequences of at most
TOPK blocks are not scored.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.tiles import DecodeSplit
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
    store_blocks,
)
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options

MOST_QUERIES = 8  # maximum number of queries of a sequence that are scored together
MOST_ROWS = 4  # maximum number of index queries for which a program selects blocks at a time
MOST_ENTRIES = 512  # maximum number of blocks or groups that a program ranks at a time.
# `Launch.maxnreg` limits the registers of a program, so that four programs fit on a multiprocessor.
_CONSTANTS = DecodeSplit(programs=4, split_programs=4)


class Queries(NamedTuple):
    """A record of the queries of one sequence."""

    first: tl.tensor  # index of the first query among the step's T tokens
    count: tl.tensor  # number of queries; 0: an earlier sequence's record has these queries
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
    own: OwnBlocks | None  # the blocks that this rank scores; None: all blocks.
    # `scores`: number of elements -> score buffer; the first layer allocates the buffer. The group
    # maxima in score buffers are NO_SCORE between launches.
    scores: dict[int, Tensor] = field(default_factory=dict)


@triton.jit
def _load_queries(queries, seq):
    at = queries + seq * 4
    return Queries(tl.load(at), tl.load(at + 1), tl.load(at + 2))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _follows(seq_lens, block_table_indices, seq, num_seqs):
    """Return whether the query of `seq` follows the query of seq - 1 in the same block table."""
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
    """Write each sequence's `Queries` and number of tokens with scored blocks. Grid (1,)."""
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
    # A step may list the queries of one sequence as several "sequences" of one query each. During
    # graph capture (only then), `max_decode_run` limits the number of these "sequences".
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
            SEQS_POW2=max(128, triton.next_power_of_2(num_seqs)), num_warps=4,
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
        scored,
        metadata.block_table_indices,
        kv_heads=1,
        block_n=shape.sparse_block_size,
        constants=_CONSTANTS,
    )
    most = merge if is_single else max(metadata.host_query_lens)
    return SelectDecodePlan(metadata, shape, most, queries, arrivals, splits, own)


@triton.jit
def _score_blocks(
    index_q, cache, table, numbers, scores, stride, width, queries, first, until,
    GROUP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Score blocks first to until - 1 for all index queries of `queries`. Store the results of
    `order_scores`, and the maximum result of each group of blocks.
    """
    row, key = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK)
    is_row = row < queries.count * C.HEADS
    first_row = queries.first.to(tl.int64) * C.HEADS
    q = load_index_queries(index_q, first_row, is_row, C)
    position = queries.length - queries.count + row // C.HEADS
    last = find_last_block(position, C.BLOCK)
    of_groups = scores + (first_row + row) * stride
    of_blocks = of_groups + (stride - width)
    cache_block = tl.load(table + first // C.PER_BLOCK)
    next_number = find_scored_block(numbers, first, C)
    for i in range(first, until):
        block = i if C.RANKS == 1 else next_number
        products, cache_block, next_number = multiply_index_keys(
            q, cache, table, numbers, i, until, cache_block, C
        )
        is_seen = block * C.BLOCK + key[None, :] <= position[:, None]
        score = tl.max(tl.where(is_seen, products, float("-inf")), axis=1)
        order = order_scores(score, block, last, C)
        tl.store(of_blocks + i, order, mask=is_row)
        if GROUP > 1:
            tl.atomic_max(of_groups + i // GROUP, order, mask=is_row, sem="relaxed")


@triton.jit
def _choose(
    scores, stride, width, numbers, table, num_scored, queries, ids, pages, ROWS: tl.constexpr,
    ENTRIES: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Select blocks for all index queries of `queries`, ROWS index queries at a time.

    If there are more than ENTRIES blocks, the first level selects groups of blocks, and the second
    level selects blocks of these groups.
    """
    entry, column = tl.arange(0, ENTRIES)[None, :], tl.arange(0, C.TOPK_POW2)[None, :]
    num_rows = queries.count * C.HEADS
    first_level = 1
    if GROUP > 1:
        first_level = (num_scored <= ENTRIES).to(tl.int32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        is_there = (row < num_rows)[:, None]
        row += queries.first * C.HEADS
        of_groups = scores + row.to(tl.int64)[:, None] * stride
        of_blocks = of_groups + (stride - width)
        chosen_at = ids + row.to(tl.int64)[:, None] * C.TOPK  # buffers selected entries first
        i = entry + tl.zeros([ROWS, 1], tl.int32)
        count = tl.zeros([ROWS], tl.int32)
        for level in range(first_level, 2):
            num_entries = tl.where(level == 0, tl.cdiv(num_scored, GROUP), num_scored)
            at = tl.where(level == 0, of_groups, of_blocks) + i
            is_entry = is_there & (i < num_entries)
            # The load bypasses L1, because other programs wrote the scores.
            order = tl.load(at, mask=is_entry, other=NO_SCORE, cache_modifier=".cg")
            chosen = find_highest(order, C.TOPK)
            place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
            count = tl.sum(chosen.to(tl.int32), axis=1)
            tl.store(chosen_at + place, i.to(ids.dtype.element_ty), mask=chosen)
            tl.debug_barrier()
            if GROUP > 1:  # noqa: SIM102  Triton evaluates this condition at compile time
                if level == 0:
                    tl.store(at, tl.full([ROWS, ENTRIES], NO_SCORE, tl.int32), mask=is_entry)
                    is_member = entry // GROUP < count[:, None]
                    group = tl.load(
                        chosen_at + entry // GROUP, mask=is_member, other=0, cache_modifier=".cg"
                    )
                    i = group.to(tl.int32) * GROUP + entry % GROUP
                    i = tl.where(is_member, i, NO_BLOCK)
                    tl.debug_barrier()
        is_block = column < count[:, None]
        i = tl.load(chosen_at + column, mask=is_block, other=0, cache_modifier=".cg").to(tl.int32)
        tl.debug_barrier()
        if C.RANKS == 1:
            block = tl.where(is_block, i, NO_BLOCK)
            mask = is_there & (column < C.TOPK)
            store_blocks(block, column, row, row % C.HEADS, table, mask, ids, pages, C)
        else:
            order = tl.load(of_blocks + i, mask=is_block, other=NO_SCORE, cache_modifier=".cg")
            key = make_key(order, find_scored_block(numbers, i, C))
            key = tl.where(is_block, key, NO_KEY)
            tl.store(chosen_at + column, key, mask=is_there & (column < C.TOPK))


# no specialization on alignment, because a slice of a buffer may have any alignment
@triton.jit(do_not_specialize_on_alignment=["arrivals"])
def _select_decode_kernel(
    index_q,  # [T, HEADS, DIM]
    cache,  # [blocks, 1, PER_BLOCK * BLOCK, DIM], index keys
    tables,  # [slots, table_stride] int32, block tables
    queries,  # [S, 4] int32, a `Queries` for each sequence
    sequences,  # [S, SEQUENCE_WORDS] int32, a `PlannedSequence` for each sequence
    work,
    scores,  # [T * HEADS, stride] int32, written: group maxima (if GROUP > 1), then `width` scores
    arrivals,  # [S] int32, number of finished programs; 0 between launches
    ids,  # [T, HEADS, TOPK], written: int32 block numbers; if RANKS > 1 int64 sort keys
    pages,  # [T, HEADS, TOPK] int32, written: pages of the selected blocks
    own_blocks,  # `OwnBlocks.blocks` [S, 2, own_width], used if RANKS > 1
    own_width,
    table_stride,
    stride,
    width,
    ROWS: tl.constexpr,  # number of index queries for which a program selects at a time
    ENTRIES: tl.constexpr,  # number of blocks or groups that a program ranks at a time
    GROUP: tl.constexpr,  # number of adjacent blocks per group; 1: blocks have no groups
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the scores of one program's run of blocks, which may belong to several sequences.
    Then select blocks for each sequence whose last scores this program wrote.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    work += tl.program_id(0) * WORK_WORDS
    tile, end, seq = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    sequence, query = load_sequence(work + 4), _load_queries(queries, seq)
    launch_dependents_then_wait(PDL)  # No predecessor writes the plan loaded above.
    while tile < end:
        until = tl.minimum(end, sequence.end_tile)
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
            _score_blocks(
                index_q, cache, blocks, numbers, scores, stride, width, query, first, after, GROUP,
                C,
            )  # fmt: skip
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + seq, 1, sem="acq_rel")
            if before == sequence.num_splits - 1:
                tl.debug_barrier()
                tl.store(arrivals + seq, 0)
                _choose(
                    scores, stride, width, numbers, table, num_scored, query, ids, pages, ROWS,
                    ENTRIES, GROUP, C,
                )  # fmt: skip
        tile = until
        if tile < end:
            seq += 1
            sequence = load_sequence(sequences + seq * SEQUENCE_WORDS)
            query = _load_queries(queries, seq)


def select_decode(
    index_q: Tensor,
    index_cache: Tensor,
    plan: SelectDecodePlan,
    ids: Tensor,
    pages: Tensor | None = None,
) -> None:
    """Store the selected blocks' numbers and pages, or sort keys if ranks shard index keys."""
    (num_tokens, heads, dim), shape = index_q.shape, plan.shape
    device, tables = index_q.device, plan.metadata.block_tables
    if num_tokens == 0:
        return
    per_block = shape.block_size // shape.sparse_block_size
    width, most_rows = tables.shape[1] * per_block, plan.most_queries * heads
    rows = min(MOST_ROWS, triton.next_power_of_2(most_rows))
    constants = selection_constants(shape, dim, index_q.dtype, index_cache.dtype, rows=most_rows)
    entries = max(constants.TOPK_POW2, min(MOST_ENTRIES, triton.next_power_of_2(width)))
    while constants.TOPK_POW2 * triton.next_power_of_2(triton.cdiv(width, entries)) > entries:
        entries *= 2  # all blocks of TOPK groups must fit into ENTRIES
    group = triton.next_power_of_2(triton.cdiv(width, entries))
    stride = width + (entries if group > 1 else 0)
    size = num_tokens * heads * stride
    if size not in plan.scores:
        plan.scores[size] = torch.full((size,), NO_SCORE.value, dtype=torch.int32, device=device)
    launch = tiles_for(device).select_decode(index_cache.element_size())
    _select_decode_kernel[(plan.splits.programs,)](
        index_q, index_cache, tables, plan.queries, plan.splits.sequences, plan.splits.work,
        plan.scores[size], plan.arrivals, ids, pages, None if plan.own is None else plan.own.blocks,
        tables.shape[1], tables.stride(0), stride, width, ROWS=rows, ENTRIES=entries, GROUP=group,
        C=constants, **launch.options, **launch_options(device, maxnreg=launch.maxnreg),
    )  # fmt: skip
