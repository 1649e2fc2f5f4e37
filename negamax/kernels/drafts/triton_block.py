"""Attention of a draft block, whose rows attend to the paged context and to each other.

Grid (blocks * tiles of rows, kv_heads, splits). A program computes attention of BLOCK_M rows to a
split of the context's tiles. The rows belong to one block and one KV head (row = token of the block
* GROUP + query head of the group). The last split also attends to the block's own keys. If there
are several splits, each program writes a partial result, and a second launch merges the partial
results. The number of splits depends only on shapes, so a graph may capture the launches.

    context tiles of BLOCK_N, from the window's start   | split 0 | split 1 | ... | last | own keys
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.attention.triton_shared import (
    dot_dtype,
    load_tile,
    locate_key_tile,
    merge_splits,
    score_scale,
    softmax_step,
    store_split,
)
from negamax.kernels.drafts.op import BlockContext
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options

_BLOCK_N, _MOST_SPLITS = 64, 32  # keys per tile, maximum KV splits; other values were not measured


class BlockConstants(NamedTuple):
    """Constants of the attention and merge kernels, passed as one argument `C: tl.constexpr`."""

    ROWS: int  # number of rows (query tokens) per block of draft tokens
    KV_HEADS: int
    GROUP: int  # number of query heads per KV head
    DIM: int  # dimension of a head
    BLOCK_SIZE: int  # number of tokens per cache block
    WINDOW: int  # number of tokens in the sliding window; 0: the window is the whole context
    CAUSAL: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_OWN: int  # ROWS, padded for tl.dot
    TILES: int  # number of row tiles per block
    SPLIT_KV: bool
    DOT: tl.dtype


@triton.jit
def _step(q, k, v, visible, scale, m_i, l_i, acc, C: tl.constexpr):
    """Attend with q [BLOCK_M, BLOCK_D] to k and v [keys, BLOCK_D]; visible [BLOCK_M, keys]."""
    scores = tl.where(visible, tl.dot(q, tl.trans(k.to(C.DOT))), float("-inf"))
    p, alpha, m_i = softmax_step(scores, scale, m_i)
    return (
        m_i,
        l_i * alpha + tl.sum(p, axis=1),
        tl.dot(p.to(C.DOT), v.to(C.DOT), acc * alpha[:, None]),
    )


@triton.jit
def _store_rows(out, acc, block, head, m, C: tl.constexpr):
    """Write acc [BLOCK_M, BLOCK_D] to the rows m of `block`; out [R * ROWS, heads * DIM]."""
    column = tl.arange(0, C.BLOCK_D)
    token = block * C.ROWS + m // C.GROUP
    at = (token * C.KV_HEADS + head) * C.GROUP + m % C.GROUP
    mask = (m < C.ROWS * C.GROUP)[:, None] & (column < C.DIM)[None, :]
    tl.store(out + at[:, None] * C.DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend_block_kernel(
    q,  # [R * ROWS, KV_HEADS * GROUP, DIM]
    own_k,  # [R, KV_HEADS, ROWS, DIM]
    own_v,
    k_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, DIM]
    v_cache,
    tables,  # [slots, table_stride], block tables
    slots,  # [R] int64, index in `tables` of each block's row
    lengths,  # [R] int32, number of cached tokens before each block
    out,  # [R * ROWS, KV_HEADS * GROUP * DIM], written without SPLIT_KV.
    # If SPLIT_KV, `partials` [R * TILES, KV_HEADS, splits, BLOCK_M, BLOCK_D + 2] has acc, m_i, l_i
    partials,
    scale,  # softmax scale * log2(e)
    table_stride,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with one tile of rows to one split of the context keys."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    block = (tile // C.TILES).to(tl.int64)
    m = (tile % C.TILES) * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    column, own = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_OWN)
    place, inside = m // C.GROUP, column < C.DIM
    token = block * C.ROWS + place
    at = (token * C.KV_HEADS + head) * C.GROUP + m % C.GROUP
    launch_dependents_then_wait(PDL)
    q_mask = (m < C.ROWS * C.GROUP)[:, None] & inside[None, :]
    q_at = q + at[:, None] * C.DIM + column[None, :]
    q_tile = tl.load(q_at, mask=q_mask, other=0.0).to(C.DOT)
    length = tl.load(lengths + block)
    table = tables + tl.load(slots + block) * table_stride
    first = 0
    if C.WINDOW > 0:
        first = tl.maximum(length - C.WINDOW + 1, 0) // C.BLOCK_N
    after = tl.cdiv(length, C.BLOCK_N)
    share = tl.cdiv(after - first, splits)
    start = first + split * share
    end = tl.minimum(start + share, after)
    m_i = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.full([C.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    lane = tl.arange(0, C.BLOCK_N)
    for t in range(start, end):
        offset = locate_key_tile(table, t, lane[:, None], length, head, C)
        k = load_tile(k_cache, offset, lane[:, None], column[None, :], C)
        v = load_tile(v_cache, offset, lane[:, None], column[None, :], C)
        key = t * C.BLOCK_N + lane[None, :]
        visible = (key < length) & (place[:, None] >= 0)
        if C.WINDOW > 0:
            visible = visible & (key > length + place[:, None] - C.WINDOW)
        m_i, l_i, acc = _step(q_tile, k, v, visible, scale, m_i, l_i, acc, C)
    if split == splits - 1:
        own_at = ((block * C.KV_HEADS + head) * C.ROWS + own)[:, None] * C.DIM + column[None, :]
        own_mask = (own < C.ROWS)[:, None] & inside[None, :]
        k = tl.load(own_k + own_at, mask=own_mask, other=0.0)
        v = tl.load(own_v + own_at, mask=own_mask, other=0.0)
        visible = (own < C.ROWS)[None, :] & (place[:, None] >= 0)
        if C.CAUSAL:
            visible = visible & (own[None, :] <= place[:, None])
        m_i, l_i, acc = _step(q_tile, k, v, visible, scale, m_i, l_i, acc, C)
    if not C.SPLIT_KV:
        _store_rows(out, acc / l_i[:, None], block, head, m, C)
    else:
        size = splits * C.BLOCK_M * (C.BLOCK_D + 2)
        at = partials + (tile.to(tl.int64) * C.KV_HEADS + head) * size
        store_split(at, split, m_i, l_i, acc, C)


@triton.jit(do_not_specialize=["splits"])
def _merge_block_kernel(partials, out, splits, C: tl.constexpr, PDL: tl.constexpr):
    """Merge the partial results of 16 rows. Grid (R * TILES, KV_HEADS, BLOCK_M / 16)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    m = tl.program_id(2) * 16 + tl.arange(0, 16)
    at = partials + (tile.to(tl.int64) * C.KV_HEADS + head) * splits * C.BLOCK_M * (C.BLOCK_D + 2)
    launch_dependents_then_wait(PDL)
    _, l_i, acc = merge_splits(at, m, splits, C)
    block = (tile // C.TILES).to(tl.int64)
    _store_rows(out, acc / l_i[:, None], block, head, (tile % C.TILES) * C.BLOCK_M + m, C)


def attend_block(
    q: Tensor,
    own: KvCache,
    cache: KvCache,
    context: BlockContext,
    *,
    sliding_window: int,
    is_causal: bool,
) -> Tensor:
    num_blocks, kv_heads, rows, head_dim = own.k.shape
    assert cache.scales == (1.0, 1.0), f"draft caches need scales of 1, not {cache.scales}"
    assert all(each.is_contiguous() for each in (q, *own[:2], *cache[:2], *context[1:]))
    out = q.new_empty(q.shape[0], q.shape[1] * head_dim)
    if not num_blocks:
        return out
    group, device = q.shape[1] // kv_heads, q.device
    found = platform.platform_of(device)
    most_rows = 128 if found.shared_memory > 100 * 1024 else 64
    block_m = min(most_rows, max(16, triton.next_power_of_2(rows * group)))
    tiles = triton.cdiv(rows * group, block_m)
    free = found.multiprocessors // (num_blocks * tiles * kv_heads)
    splits = 1 << max(0, min(free, _MOST_SPLITS).bit_length() - 1)
    block_d = triton.next_power_of_2(max(16, head_dim))
    constants = BlockConstants(
        ROWS=rows,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=head_dim,
        BLOCK_SIZE=cache.k.shape[2],
        WINDOW=sliding_window,
        CAUSAL=is_causal,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_D=block_d,
        BLOCK_OWN=max(16, triton.next_power_of_2(rows)),
        TILES=tiles,
        SPLIT_KV=splits > 1,
        DOT=dot_dtype(q.dtype, cache.k.dtype),
    )
    programs, options = (num_blocks * tiles, kv_heads), launch_options(device)
    partials = out
    if splits > 1:
        size = programs[0] * kv_heads * splits * block_m * (block_d + 2)
        partials = torch.empty(size, dtype=torch.float32, device=device)
    _attend_block_kernel[(*programs, splits)](
        q,
        own.k,
        own.v,
        cache.k,
        cache.v,
        context.tables,
        context.slots,
        context.lengths,
        out,
        partials,
        score_scale(head_dim, 1.0),
        context.tables.stride(0),
        constants,
        num_warps=4 if block_m <= 64 else 8,
        num_stages=2,
        **options,
    )
    if splits > 1:
        _merge_block_kernel[(*programs, block_m // 16)](
            partials, out, splits, constants, num_warps=4, **options
        )
    return out
