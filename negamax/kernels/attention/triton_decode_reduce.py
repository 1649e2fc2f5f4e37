"""Store and reduce the partial results of the splits of a sequence.

The program of a split writes a normalized partial result and the log2-sum-exp2 of the scores:

    partials [kv_heads, programs, PARTIAL_ROWS * (BLOCK_D + 4)] int32, of which a program writes
        acc / l_i         [PARTIAL_ROWS, BLOCK_D]   bits of fp32
        m_i + log2(l_i)   [PARTIAL_ROWS]            bits of fp32; 3 of the 4 columns are not used

A reader polls each word until it is no longer EMPTY, as in NCCL's LL protocol, so the kernel needs
no counters and fences. The reader then sets the words to EMPTY for the next layer.

The program of a sequence's first tile waits for the sequence's other programs and reduces all
splits. With PARALLEL_REDUCE each program of the sequence reduces some query rows, so each program
reads less. With REDUCE_LATER `reduce_kernel` reduces the splits, and no program waits.
"""

import triton
import triton.language as tl

from negamax.kernels.attention.triton_decode_plan import EMPTY, SEQUENCE_WORDS, load_sequence
from negamax.kernels.attention.triton_decode_runs import is_row, load_run, locate_row
from negamax.kernels.attention.triton_shared import clamp_empty_max, write_heads, write_lse
from negamax.kernels.launch.triton import add_last_first


@triton.jit
def store_partial(partials, slot, m_i, l_i, acc, C: tl.constexpr):
    """Store m_i and l_i [PARTIAL_ROWS], acc [PARTIAL_ROWS, BLOCK_D] as partial result `slot`."""
    row, column = tl.arange(0, C.PARTIAL_ROWS), tl.arange(0, C.BLOCK_D)
    partial = partials + slot * (C.PARTIAL_ROWS * (C.BLOCK_D + 4))
    result = (acc * tl.where(l_i == 0.0, 0.0, 1.0 / l_i)[:, None]).to(tl.int32, bitcast=True)
    lse = (m_i + tl.log2(l_i)).to(tl.int32, bitcast=True)
    at = partial + row[:, None] * C.BLOCK_D + column[None, :]
    mask = row < C.QUERIES * C.GROUP
    tl.store(at, tl.where(result == EMPTY, 0, result), mask=mask[:, None])
    tl.store(partial + C.PARTIAL_ROWS * C.BLOCK_D + row, tl.where(lse == EMPTY, 0, lse), mask=mask)


@triton.jit
def _is_incomplete(words):
    """Return whether one of the words is EMPTY, the largest unsigned value."""
    return tl.max(words.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True) == EMPTY


@triton.jit
def _reduce(partials, slot, row, start, count, m_i, l_i, acc, C: tl.constexpr):
    """Merge rows `row` [rows] of the partial results number slot + start to slot + count - 1 into
    the caller's m_i, l_i [rows] and acc [rows, BLOCK_D]. The caller divides acc by l_i.

    Reads are bound by latency, so 32 rows of partial results are read at a time. The rows of acc
    are read before the lse values, because each warp waits for all 32 lse values, one per thread.
    """
    PARTIALS: tl.constexpr = 32 // row.shape[0]
    column = tl.arange(0, C.BLOCK_D)
    for first in range(start, count, PARTIALS):
        index = first + tl.arange(0, PARTIALS)
        partial = partials + (slot + index) * (C.PARTIAL_ROWS * (C.BLOCK_D + 4))
        result_at = row[None, :, None] * C.BLOCK_D + column[None, None, :]
        # a warp loads whole query rows: for each row, all columns of all partial results
        result_at = add_last_first(partial[:, None, None], result_at, C.BLOCK_D)
        lse_at = partial[None, :] + C.PARTIAL_ROWS * C.BLOCK_D + row[:, None]
        live = (index < count)[None, :] & (row < C.QUERIES * C.GROUP)[:, None]
        has_result = ((index < count)[:, None] & (row < C.QUERIES * C.GROUP)[None, :])[:, :, None]
        result = tl.load(result_at, mask=has_result, other=0, volatile=True)
        lse = tl.load(lse_at, mask=live, other=0, volatile=True)
        while _is_incomplete(result):
            result = tl.load(result_at, mask=has_result, other=0, volatile=True)
        while _is_incomplete(lse):
            lse = tl.load(lse_at, mask=live, other=0, volatile=True)
        tl.debug_barrier()
        tl.store(result_at, tl.full(result.shape, EMPTY, tl.int32), mask=has_result)
        tl.store(lse_at, tl.full(lse.shape, EMPTY, tl.int32), mask=live)
        lse = tl.where(live, lse.to(tl.float32, bitcast=True), float("-inf"))
        new = tl.maximum(m_i, tl.max(lse, axis=1))
        safe = clamp_empty_max(new)
        alpha, weight = tl.exp2(m_i - safe), tl.exp2(lse - safe[:, None])
        l_i = l_i * alpha + tl.sum(weight, axis=1)
        result = tl.permute(result.to(tl.float32, bitcast=True), (1, 0, 2))
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * result, axis=1)
        m_i = new
    return m_i, l_i, acc


@triton.jit
def finish_split(
    m_i, l_i, acc, row, column, partials, output, lse, v_scale, head, program, programs, is_first,
    run, first_row, sequence, C: tl.constexpr,
):  # fmt: skip
    """Write the output from m_i, l_i [PARTIAL_ROWS] and acc [PARTIAL_ROWS, BLOCK_D] if this program
    completes its sequence. A program that does not complete its sequence stores m_i, l_i and acc to
    `partials`. With PARALLEL_REDUCE the program then reduces some query rows.
    """
    BLOCK_D: tl.constexpr = C.BLOCK_D
    slot = head * programs + sequence.first_program
    if (sequence.num_splits == 1) if (C.PARALLEL_REDUCE or C.REDUCE_LATER) else is_first:
        if not (C.PARALLEL_REDUCE or C.REDUCE_LATER):
            m_i, l_i, acc = _reduce(partials, slot, row, 1, sequence.num_splits, m_i, l_i, acc, C)
        acc *= tl.where(l_i == 0.0, 0.0, v_scale / l_i)[:, None]
        at = locate_row(run, first_row, row, C)
        write_heads(acc, at, column, is_row(run, row, C), output, C)
        write_lse(m_i, l_i, at, is_row(run, row, C), lse)
    else:
        store_partial(partials, head * programs + program, m_i, l_i, acc, C)
        if C.PARALLEL_REDUCE:
            one = tl.arange(0, 1)
            num_rows = C.QUERIES * C.GROUP
            for i in range(program - sequence.first_program, num_rows, sequence.num_splits):
                m_row, acc_row = (
                    tl.full([1], float("-inf"), tl.float32),
                    tl.zeros([1, BLOCK_D], tl.float32),
                )
                m_row, l_row, acc_row = _reduce(
                    partials, slot, one + i, 0, sequence.num_splits, m_row,
                    tl.zeros([1], tl.float32), acc_row, C,
                )  # fmt: skip
                if C.QUERIES > 1 or C.FEWER_KEYS:  # l_row is 0 if the row attends to no key
                    l_row = tl.where(l_row == 0.0, 1.0, l_row)
                acc_row *= (v_scale / l_row)[:, None]
                at = locate_row(run, first_row, one + i, C)
                write_heads(acc_row, at, column, is_row(run, one + i, C), output, C)
                write_lse(m_row, l_row, at, is_row(run, one + i, C), lse)


@triton.jit
def reduce_kernel(
    sequences,  # [S, SEQUENCE_WORDS] int32, see triton_decode_plan
    partials,
    out,  # [T, kv_heads * GROUP * DIM], written
    values,  # [T, kv_heads * GROUP * DIM] e4m3, written if QUANTIZE, else None
    scales,  # [T, kv_heads * GROUP] fp32, written if QUANTIZE, else None
    lse,  # [T, kv_heads * GROUP] fp32, written by `write_lse`, or None
    query_starts,  # `DecodeRuns.query_starts`; None if QUERIES is 1
    num_tokens,  # number of tokens T; None if QUERIES is 1
    v_scale,
    programs,
    C: tl.constexpr,
):
    """Reduce the partial results of one sequence and KV head. Grid (kv_heads, S)."""
    ROWS: tl.constexpr = C.PARTIAL_ROWS
    BLOCK_D: tl.constexpr = C.BLOCK_D
    head, seq = tl.program_id(0), tl.program_id(1)
    sequence = load_sequence(sequences + seq * SEQUENCE_WORDS)
    if sequence.num_splits > 1:
        row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        m_i, l_i, acc = _reduce(
            partials, head * programs + sequence.first_program, row, 0, sequence.num_splits,
            tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, BLOCK_D], tl.float32), C,
        )  # fmt: skip
        acc *= tl.where(l_i == 0.0, 0.0, v_scale / l_i)[:, None]
        run = load_run(query_starts, num_tokens, seq, C)
        first_row = (run.token * C.KV_HEADS + head) * C.GROUP
        at = locate_row(run, first_row, row, C)
        write_heads(acc, at, column, is_row(run, row, C), (out, values, scales), C)
        write_lse(m_i, l_i, at, is_row(run, row, C), lse)
