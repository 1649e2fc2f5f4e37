"""Attention of prefills over the paged cache: runs of queries, each on top of its cached prefix.

Grid (heads, tiles): a program attends with BLOCK_M queries of one head to all keys that they see,
BLOCK_N at a time.

    q, out   [T, heads, DIM]                       keys 0 ... start ........ end
    k, v     [blocks, kv_heads, BLOCK_SIZE, DIM]   |  no mask   |  causal  |    BLOCK_M queries at
             by the sequence's block table         |            |          |    start .. end - 1

The host lists the tiles, those with the most keys first; the device does if only it holds the
lengths. If the queries of all heads of a KV head fit into one tile, as for a generated token in a
captured step, the program of the first head attends for all of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.tiles import tiles_for
from negamax.kernels.attention.triton_shared import (
    Outputs,
    attention_constants,
    load_tile,
    locate_key_tile,
    outputs,
    result,
    score_scale,
    softmax_step,
    write_heads,
    write_lse,
)
from negamax.kernels.kvcache.op import KvCache


@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of queries of a step."""

    queries: AttentionMetadata
    shape: PagedShape
    block_m: int  # queries of a tile at most
    # [tiles, 4] int32: first query among the T, queries, position of the first, sequence
    tiles: Tensor


def plan_prefill(queries: AttentionMetadata, shape: PagedShape) -> PrefillPlan:
    """Plan a run of queries per sequence, each at the last positions of its sequence."""
    on_device = queries.is_captured or not queries.is_exact
    longest = max(queries.host_seq_lens, default=0)
    size = tiles_for(queries.seq_lens.device).prefill_block_m(
        queries.positions.shape[0] if on_device else longest
    )
    return PrefillPlan(queries, shape, size, list_query_tiles(queries, size))


def list_query_tiles(queries: AttentionMetadata, size: int) -> Tensor:
    """List the tiles of at most `size` queries, as `PrefillPlan.tiles`."""
    if queries.is_captured or not queries.is_exact:
        return _list_tiles_on_device(queries, size)
    rows, first = [np.empty((0, 4), dtype=np.int32)], 0
    for seq, (length, count) in enumerate(
        zip(queries.host_seq_lens, queries.host_query_lens, strict=True)
    ):
        offsets = np.arange(0, count, size, dtype=np.int32)
        sizes = np.minimum(size, count - offsets)
        rows.append(
            np.stack(
                (first + offsets, sizes, length - count + offsets, np.full_like(offsets, seq)),
                axis=1,
            )
        )
        first += count
    tiles = np.concatenate(rows)
    on_host = torch.from_numpy(tiles[np.argsort(-(tiles[:, 1] + tiles[:, 2]), kind="stable")])
    device = queries.seq_lens.device
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def _list_tiles_on_device(queries: AttentionMetadata, size: int) -> Tensor:
    """List the tiles [T / size + S, 4] of sequences whose counts only the device holds.

    The last ones may be empty. In a sequence those with the most keys come first.
    """
    starts, num_seqs = queries.query_starts, queries.block_table_indices.shape[0]
    counts = starts.diff()
    tiles = (counts + (size - 1)) // size
    ends = tiles.cumsum(0)
    number = (
        ends[-1]
        - 1
        - torch.arange(queries.positions.shape[0] // size + num_seqs, device=starts.device)
    )
    seq = torch.searchsorted(ends, number, right=True)
    offset = (number - (ends - tiles)[seq]) * size
    left = (counts[seq] - offset).clamp_max_(size)
    columns = (starts[seq] + offset, left, queries.seq_lens[seq] - counts[seq] + offset, seq)
    return torch.where((number >= 0)[:, None], torch.stack(columns, dim=1), 0).int()


@triton.jit
def _find_last_own_key(held, position, is_row, C: tl.constexpr):
    """Return the number of the last key up to `position` in a rank's blocks; -1: none."""
    block = position // C.BLOCK_SIZE
    until = tl.load(held + block, mask=is_row, other=0)
    before = tl.load(held + block - 1, mask=is_row & (block > 0), other=0)
    rest = tl.where(until > before, position % C.BLOCK_SIZE + 1, 0)
    return before * C.BLOCK_SIZE + rest - 1


# columns of a part of a step have any alignment
@triton.jit(do_not_specialize_on_alignment=["block_table_indices"])
def _prefill_kernel(
    q,  # [T, KV_HEADS * GROUP, DIM]
    k_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, DIM]
    v_cache,
    tables,  # [slots, table_stride] int32, blocks
    block_table_indices,  # [S] int64
    tiles,  # [tiles, 4] int32: `PrefillPlan.tiles`
    out,  # [T, KV_HEADS * GROUP * DIM], written; likewise
    values,  # e4m3 and
    scales,  # [T, KV_HEADS * GROUP] fp32, None unless QUANTIZE
    lse,  # likewise, written: `write_lse`
    held,  # [S, held_stride] int32, as `OwnBlocks` of the blocks in `tables`; None: all blocks
    held_stride,
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    C: tl.constexpr,
):
    """Attend with one tile of queries of one head, or with few of all heads of a KV head."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    query_head = tl.program_id(0)
    head = query_head // C.GROUP
    record = tiles + tl.program_id(1) * 4
    first, count, start, seq = (
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
    )
    table = tables + tl.load(block_table_indices + seq).to(tl.int64) * table_stride
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_folded = count * C.GROUP <= BLOCK_M
    if is_folded & (query_head % C.GROUP != 0):
        return
    query = tl.where(is_folded, row // C.GROUP, row)
    out_row = (first + query) * (C.KV_HEADS * C.GROUP) + query_head
    out_row += tl.where(is_folded, row % C.GROUP, 0)
    mask = (query < count)[:, None] & (column < C.DIM)[None, :]
    q_tile = tl.load(
        q + out_row.to(tl.int64)[:, None] * C.DIM + column[None, :], mask=mask, other=0.0
    ).to(C.DOT)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position, end = start + query, start + count
    if held is not None:
        position = _find_last_own_key(
            held + seq.to(tl.int64) * held_stride, position, query < count, C
        )
        start = tl.min(tl.where(query < count, position, 0x7FFFFFFF))
        end = tl.max(tl.where(query < count, position, -1)) + 1
    lane = tl.arange(0, C.BLOCK_N)[:, None]
    offset = locate_key_tile(table, 0, lane, end, head, C)
    for t in range(0, tl.cdiv(end, C.BLOCK_N)):
        k = load_tile(k_cache, offset, lane, column[None, :], C).to(C.DOT)
        v = load_tile(v_cache, offset, lane, column[None, :], C).to(C.DOT)
        offset = locate_key_tile(table, t + 1, lane, end, head, C)
        scores = tl.dot(q_tile, tl.trans(k))
        if (t + 1) * C.BLOCK_N > start:
            visible = position - t * C.BLOCK_N
            scores = tl.where(
                tl.arange(0, C.BLOCK_N)[None, :] <= visible[:, None], scores, float("-inf")
            )
        p, alpha, m_i = softmax_step(scores, qk_scale, m_i)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(C.DOT), v, acc * alpha[:, None])
    if held is None:
        acc *= (v_scale / l_i)[:, None]
    else:
        acc *= tl.where(l_i == 0.0, 0.0, v_scale / l_i)[:, None]
    write_heads(acc, out_row.to(tl.int64), column, query < count, (out, values, scales), C)
    write_lse(m_i, l_i, out_row.to(tl.int64), query < count, lse)


def prefill(q: Tensor, cache: KvCache, plan: PrefillPlan) -> Tensor | QuantizedActivations:
    """Attend with q [T, heads, head_dim] -> [T, heads * head_dim]."""
    output = outputs(q, quantize=plan.shape.quantize)
    launch_prefill(q, cache, plan, output)
    return result(*output)


def launch_prefill(
    q: Tensor,
    cache: KvCache,
    plan: PrefillPlan,
    output: Outputs,
    *,
    lse: Tensor | None = None,
    held: Tensor | None = None,
) -> None:
    """Run `prefill` into `output` and lse [T, heads]; `held`: tables list a rank's blocks."""
    assert q.is_contiguous() and cache.k.is_contiguous() and cache.v.is_contiguous()
    if q.shape[0] == 0:
        return
    _, heads, head_dim = q.shape
    tables = plan.queries.block_tables
    launch = tiles_for(q.device).prefill_launch(plan.block_m, cache.k.element_size())
    constants = attention_constants(
        q, cache.k, plan.shape, block_m=plan.block_m, block_n=launch.block_n
    )
    _prefill_kernel[(heads, plan.tiles.shape[0])](
        q, cache.k, cache.v, tables, plan.queries.block_table_indices, plan.tiles, *output, lse,
        held, None if held is None else held.stride(0), score_scale(head_dim, cache.scales[0]),
        cache.scales[1], tables.stride(0), constants,
        **launch.options,
    )  # fmt: skip
