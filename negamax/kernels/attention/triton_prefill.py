"""Attention of runs of queries, each on top of its cached prefix.

One program per tile of queries and query head, over the paged keys; the tiles are listed on the
host, those with the most keys first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.spec import PagedShape
from negamax.kernels.attention.tiles import tiles_for
from negamax.kernels.attention.triton_shared import (
    LOG2_E,
    Output,
    dot_dtype,
    load_tile,
    softmax_step,
    tile_start,
    write_heads,
)


@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of queries of a step."""

    queries: AttentionMetadata
    shape: PagedShape
    quantize: bool
    tile_queries: int  # per tile at most
    # [tiles, 4] int32: first query among the T, queries, position of the first, sequence
    tiles: Tensor


def plan_prefill(
    queries: AttentionMetadata, shape: PagedShape, *, dtype: torch.dtype, quantize: bool = False
) -> PrefillPlan:
    """A run of queries per sequence, each at the last positions of its sequence."""
    device = queries.seq_lens.device
    tiles_here = tiles_for(device)
    if queries.is_captured:
        size = tiles_here.prefill_queries(queries.positions.shape[0])
        return PrefillPlan(queries, shape, quantize, size, _tiles_on_device(queries, size))
    rows, first, size = (
        [np.empty((0, 4), dtype=np.int32)],
        0,
        tiles_here.prefill_queries(max(queries.host_seq_lens, default=0)),
    )
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
    tiles = torch.from_numpy(tiles[np.argsort(-(tiles[:, 1] + tiles[:, 2]), kind="stable")])
    if device.type == "cuda":
        tiles = tiles.pin_memory().to(device, non_blocking=True)
    return PrefillPlan(queries, shape, quantize, size, tiles)


def _tiles_on_device(queries: AttentionMetadata, size: int) -> Tensor:
    """The tiles [T / size + S, 4] of sequences whose counts only the device knows; the
    last ones may be empty.

    They are numbered from the end, so that within a sequence those with the most keys come first.
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
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    block_table_indices,
    tiles,
    out,
    values,
    scales,
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of queries of one head. Program 0 is the query head, so that the heads of a KV head
    run side by side.
    """
    query_head = tl.program_id(0)
    head = query_head // GROUP
    record = tiles + tl.program_id(1) * 4
    first, count, start, seq = (
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
    )
    table = tables + tl.load(block_table_indices + seq).to(tl.int64) * table_stride
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    out_row = (first + row) * (KV_HEADS * GROUP) + query_head
    mask = (row < count)[:, None] & (column < DIM)[None, :]
    queries = tl.load(
        q + out_row.to(tl.int64)[:, None] * DIM + column[None, :], mask=mask, other=0.0
    ).to(DOT)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position, end = start + row, start + count
    lane = tl.arange(0, BLOCK_N)[:, None]
    key_start = tile_start(table, 0, lane, end, head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N)
    for t in range(0, tl.cdiv(end, BLOCK_N)):
        k = load_tile(k_cache, key_start, lane, column[None, :], DIM, BLOCK_SIZE, BLOCK_N).to(DOT)
        v = load_tile(v_cache, key_start, lane, column[None, :], DIM, BLOCK_SIZE, BLOCK_N).to(DOT)
        key_start = tile_start(table, t + 1, lane, end, head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N)
        scores = tl.dot(queries, tl.trans(k))
        if (t + 1) * BLOCK_N > start:
            visible = position - t * BLOCK_N
            scores = tl.where(
                tl.arange(0, BLOCK_N)[None, :] <= visible[:, None], scores, float("-inf")
            )
        p, alpha, m_i, l_i = softmax_step(scores, qk_scale, m_i, l_i)
        acc = tl.dot(p.to(DOT), v, acc * alpha[:, None])
    result = acc * (v_scale / l_i)[:, None]
    write_heads(
        result, out_row.to(tl.int64), column, row < count, out, values, scales, DIM, QUANTIZE
    )


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: PrefillPlan,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor | QuantizedActivations:
    """q [T, heads, head_dim], caches [num_blocks, kv_heads, block_size, head_dim] -> [T, heads *
    head_dim].
    """
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    output = Output.empty(q, quantize=plan.quantize)
    if q.shape[0] == 0:
        return output.result()
    _, heads, head_dim = q.shape
    shape, tables = plan.shape, plan.queries.block_tables
    launch = tiles_for(q.device).prefill_launch(plan.tile_queries, k_cache.element_size())
    _prefill_kernel[(heads, plan.tiles.shape[0])](
        q,
        k_cache,
        v_cache,
        tables,
        plan.queries.block_table_indices,
        plan.tiles,
        output.plain,
        output.values,
        output.scales,
        head_dim**-0.5 * kv_scales[0] * LOG2_E,
        kv_scales[1],
        tables.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        BLOCK_M=plan.tile_queries,
        BLOCK_N=launch.keys,
        BLOCK_D=triton.next_power_of_2(max(16, head_dim)),
        QUANTIZE=plan.quantize,
        DOT=dot_dtype(q.dtype, k_cache.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return output.result()
