"""Assign the keys of a decode step to programs, once per step, on the device.

The keys of every sequence are divided into tiles of BLOCK_N. The tiles of all sequences are
numbered consecutively. All KV heads have equally many programs. A program has a run of tiles:

    sequences    |----- A -----|-- B --|---------- C ----------|    num_splits: A 3, B 1, C 4
    SPLIT_KV     |  0 |  1 | 2 |   3   |  4  |  5  |  6  |  7  |    one split of one sequence each
    else         |     0     |     1     |     2     |    3    |    equal runs of all tiles

SPLIT_KV is used if there are enough programs for several splits of each sequence. Splits are as
short as the number of programs allows. One sequence of 100,000 tokens occupies all multiprocessors,
and so do a hundred short sequences. The host does not read the sequence lengths.

    sequences [S, SEQUENCE_WORDS] int32    the fields of `PlannedSequence`
    work [programs, WORK_WORDS] int32      first tile, end tile (0: no work), number of the first
                                           sequence, unused, fields of the first sequence
"""

import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.attention.metadata import AttentionMetadata, DecodeRuns, PagedShape
from negamax.kernels.attention.tiles import DECODE, DecodeSplit, choose_decode_programs
from negamax.kernels.attention.triton_decode_runs import choose_queries_per_program
from negamax.kernels.launch.ptx import wait_for_predecessor
from negamax.kernels.launch.triton import launch_options

SEQUENCE_WORDS = tl.constexpr(8)
WORK_WORDS = tl.constexpr(16)
_BLOCK_S = tl.constexpr(128)  # number of sequences that the planning program loads at a time
EMPTY = tl.constexpr(-1)  # value of a workspace word that holds no partial result


@dataclass(frozen=True)
class DecodePlan:
    """The work of each program of a decode step. All layers of the step share the plan."""

    queries: AttentionMetadata
    shape: PagedShape
    sequences: Tensor  # [S, SEQUENCE_WORDS] int32, one `PlannedSequence` per row
    work: Tensor  # [programs, WORK_WORDS] int32: first tile, end tile, first sequence, its fields
    programs: int  # number of programs per KV head
    split_kv: bool
    reduce_later: bool  # whether a second launch reduces the partial results
    runs: DecodeRuns | None  # queries by sequence; None: each program has one query
    num_queries: int  # maximum number of queries per program, all of one sequence
    dependent: bool = True  # whether the kernel may start before its predecessor ends


# (thread, device, size) -> workspace; never released, because captured graphs write to it
WORKSPACES: dict[tuple[int, torch.device, int], Tensor] = {}


def workspace(words: int, device: torch.device) -> Tensor:
    """Return this thread's buffer for partial results, int32 [words], EMPTY between launches."""
    key = threading.get_ident(), device, triton.next_power_of_2(words)
    if key not in WORKSPACES:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not capturing, "run a step of this size before graph capture"
        WORKSPACES[key] = torch.full((key[2],), EMPTY.value, dtype=torch.int32, device=device)
    return WORKSPACES[key][:words]


class PlannedSequence(NamedTuple):
    """Data about one sequence for the programs that process the sequence."""

    first_tile: tl.tensor
    end_tile: tl.tensor
    length: tl.tensor  # sequence length in tokens
    table_index: tl.tensor  # index of the sequence's row in the block tables
    first_program: tl.tensor
    num_splits: tl.tensor


@triton.jit
def _store_sequence(to, sequence, mask):
    for i in tl.static_range(6):
        tl.store(to + i, sequence[i], mask=mask)


@triton.jit
def load_sequence(at):
    """Load a `PlannedSequence` that `_store_sequence` wrote."""
    first_tile, end_tile, length = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return PlannedSequence(
        first_tile, end_tile, length, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    )


@triton.jit
def replace_length(sequence, lengths, seq, C: tl.constexpr):
    """Return `sequence`; if FEWER_KEYS is set, replace its length by lengths[seq]."""
    if C.FEWER_KEYS:
        sequence = PlannedSequence(
            sequence.first_tile, sequence.end_tile, tl.load(lengths + seq), sequence.table_index,
            sequence.first_program, sequence.num_splits,
        )  # fmt: skip
    return sequence


@triton.jit
def _load_tiles(seq_lens, start, num_seqs, BLOCK_N: tl.constexpr):
    """Return the indices of _BLOCK_S sequences from `start` on, whether they exist, their lengths,
    and their numbers of tiles. A sequence without keys has one tile, whose program writes zeros.
    """
    seq = start + tl.arange(0, _BLOCK_S)
    live = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=live, other=0)
    return seq, live, length, tl.where(live, tl.maximum(tl.cdiv(length, BLOCK_N), 1), 0)


@triton.jit
def _find_program_tiles(
    seq_lens, num_seqs, programs, split_kv, MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the maximum number of tiles of a program, and the number of tiles of all sequences.
    With `split_kv`, bisection finds the smallest maximum for which `programs` programs suffice.
    """
    _, _, _, tiles = _load_tiles(seq_lens, 0, num_seqs, BLOCK_N)
    total, most = tl.sum(tiles, axis=0), tl.max(tiles, axis=0)
    for start in range(_BLOCK_S, num_seqs, _BLOCK_S):
        _, _, _, others = _load_tiles(seq_lens, start, num_seqs, BLOCK_N)
        total += tl.sum(others, axis=0)
        most = tl.maximum(most, tl.max(others, axis=0))
    low = tl.maximum(tl.cdiv(total, programs), MIN_TILES)
    high = tl.where(split_kv != 0, tl.maximum(most, low), low)
    while low < high:
        middle = (low + high) // 2
        splits = tl.sum(tl.cdiv(tiles, middle), axis=0)
        for start in range(_BLOCK_S, num_seqs, _BLOCK_S):
            _, _, _, others = _load_tiles(seq_lens, start, num_seqs, BLOCK_N)
            splits += tl.sum(tl.cdiv(others, middle), axis=0)
        fits = splits <= programs
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low, total


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(
    do_not_specialize=["num_seqs", "programs", "split_kv"],
    do_not_specialize_on_alignment=["seq_lens", "block_table_indices"],
)
def _plan_decode_kernel(
    seq_lens,  # [S] int32, sequence lengths with this step's tokens
    block_table_indices,  # [S] int64, row of each sequence in the block tables
    sequences,  # [S, SEQUENCE_WORDS] int32, written: one `PlannedSequence` per row
    work,  # [programs, WORK_WORDS] int32, written: tiles (first, end), first sequence, fields
    num_seqs,
    programs,
    split_kv,  # 1 if each program processes one split of one sequence, else 0
    BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, PROGRAMS_POW2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `sequences` and `work` in one program, _BLOCK_S sequences at a time. Grid (1,)."""
    wait_for_predecessor(PDL)  # Later kernels read `work` before they wait: no `launch_dependents`
    program = tl.arange(0, PROGRAMS_POW2)
    for word in tl.static_range(3):
        # a program without work has 0 as its end tile
        tl.store(
            work + program * WORK_WORDS + word, tl.zeros_like(program), mask=program < programs
        )
    tl.debug_barrier()
    most, total = _find_program_tiles(seq_lens, num_seqs, programs, split_kv, MIN_TILES, BLOCK_N)
    tiles_before, programs_before = 0, 0
    for start in range(0, num_seqs, _BLOCK_S):
        seq, live, length, tiles = _load_tiles(seq_lens, start, num_seqs, BLOCK_N)
        table_index = tl.load(block_table_indices + seq, mask=live, other=0).to(tl.int32)
        end = tiles_before + tl.cumsum(tiles, axis=0)
        first = end - tiles
        splits = tl.cdiv(tiles, most)
        first_program = programs_before + tl.cumsum(splits, axis=0) - splits
        tiles_before += tl.sum(tiles, axis=0)
        programs_before += tl.sum(splits, axis=0)
        first_program = tl.where(split_kv != 0, first_program, first // most)
        num_splits = tl.where(split_kv != 0, splits, (end - 1) // most - first_program + 1)
        sequence = PlannedSequence(first, end, length, table_index, first_program, num_splits)
        _store_sequence(sequences + seq * SEQUENCE_WORDS, sequence, live)
        # Write the `work` of all programs whose first tile is in the sequence. Without SPLIT_KV, a
        # program that begins in an earlier sequence may process the first tiles.
        begins = tl.where(split_kv != 0, first_program, tl.cdiv(first, most))
        number = tl.where(live, first_program + num_splits - begins, 0)
        size = tl.where(split_kv != 0, tl.cdiv(tiles, tl.maximum(splits, 1)), most)
        offset = tl.where(split_kv != 0, first, begins * most)
        for i in range(0, tl.max(number, axis=0)):
            to = work + (begins + i) * WORK_WORDS
            tile = offset + i * size
            last = tl.minimum(tile + size, tl.where(split_kv != 0, end, total))
            tl.store(to, tile, mask=i < number)
            tl.store(to + 1, last, mask=i < number)
            tl.store(to + 2, seq, mask=i < number)
            _store_sequence(to + 4, sequence, i < number)


class Splits(NamedTuple):
    """The work of each program of a kernel that splits sequences."""

    sequences: Tensor  # [S, SEQUENCE_WORDS] int32, one `PlannedSequence` per row
    work: Tensor  # [programs, WORK_WORDS] int32: first tile, end tile, first sequence, its fields
    programs: int  # number of programs per KV head
    split_kv: bool


def plan_splits(
    seq_lens: Tensor,
    block_table_indices: Tensor,
    *,
    kv_heads: int,
    block_n: int,
    num_rows: int = 1,
    min_splits: int = 1,
    reduce_later: bool = False,
    constants: DecodeSplit = DECODE,
) -> Splits:
    """Plan tiles of `block_n` keys for sequences of seq_lens [S] int32 tokens.

    block_table_indices [S] int64 are the indices of the sequences' rows in the block tables. A tile
    has `num_rows` query rows. `choose_decode_programs` defines `min_splits`.
    """
    num_seqs, device = seq_lens.shape[0], seq_lens.device
    multiprocessors = platform.platform_of(device).multiprocessors
    programs, split_kv = choose_decode_programs(
        num_seqs,
        kv_heads,
        multiprocessors,
        num_rows=num_rows,
        min_splits=min_splits,
        constants=constants,
    )
    most = int(multiprocessors * constants.programs)
    if reduce_later:  # each program stores one partial result, so it processes one sequence
        programs, split_kv = max(programs, num_seqs), True
        most = max(most, programs)
    sizes = (num_seqs * SEQUENCE_WORDS.value, programs * WORK_WORDS.value)
    sequences, work = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    if num_seqs:
        _plan_decode_kernel[(1,)](
            seq_lens, block_table_indices, sequences, work, num_seqs, programs, int(split_kv),
            BLOCK_N=block_n, MIN_TILES=constants.min_tiles,
            PROGRAMS_POW2=triton.next_power_of_2(most), num_warps=4, **launch_options(device),
        )  # fmt: skip
    return Splits(sequences, work, programs, split_kv)


def plan_decode(
    queries: AttentionMetadata, shape: PagedShape, *, reduce_later: bool = False
) -> DecodePlan:
    """Plan decodes of one or several queries per sequence; only the device reads the lengths.

    With `reduce_later` programs do not wait for each other; a second launch reduces the partial
    results.
    """
    num_queries, runs = 1, queries.decode_runs
    if runs is not None and len(runs.seq_lens) >= DECODE.min_runs:
        num_queries = choose_queries_per_program(shape.group, queries.max_decode_run)
    if runs is None or num_queries == 1:
        runs, columns = None, (queries.seq_lens, queries.block_table_indices)
    else:
        parts = triton.cdiv(queries.max_decode_run, num_queries)
        columns = runs.seq_lens, runs.block_table_indices
        if parts > 1:
            seq_lens, indices = (
                column.unsqueeze(1).expand(-1, parts).flatten() for column in columns
            )
            columns = seq_lens, indices
    num_rows = num_queries * shape.group
    splits = plan_splits(
        *columns,
        kv_heads=shape.kv_heads,
        block_n=DECODE.block_n,
        num_rows=num_rows,
        min_splits=DECODE.min_splits if num_rows <= 16 else 1,
        reduce_later=reduce_later,
    )
    return DecodePlan(queries, shape, *splits, reduce_later, runs, num_queries)
