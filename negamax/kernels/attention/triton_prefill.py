"""Attention of prefills over the paged cache. Each sequence has a run of queries after its cached
prefix.

Grid (heads, tiles). A program attends with BLOCK_M queries of one head to all keys up to their
positions, BLOCK_N keys at a time.

    q, out   [T, heads, DIM]                       keys 0 ... start ........ end
    k, v     [blocks, kv_heads, BLOCK_SIZE, DIM]   |  no mask   |  causal  |    BLOCK_M queries at
             by the sequence's block table         |            |          |    start .. end - 1

The host lists the tiles in descending order of their numbers of keys. If only the device stores the
sequence lengths, PyTorch ops on the device list the tiles. The rows of a tile with few queries,
such as one token in a captured step, can contain all query heads of a KV head. The program of
the first head then attends for all query heads of the KV head.

If a few queries follow a long prefix, there are too few tiles to fill the GPU. Several programs
then split the keys of a tile, and a second launch merges their results. The number of programs for
a tile is proportional to its number of keys. The device computes the splits, so a captured step
handles prefixes of any length.

On Hopper, tiles of 128 queries without splits run in `triton_specialized.py`, if keys have 16 bits.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention import triton_specialized
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.tiles import tiles_for
from negamax.kernels.attention.triton_shared import (
    attention_constants,
    head_outputs,
    load_tile,
    locate_key_tile,
    merge_splits,
    multiply_keys,
    place_rows,
    score_scale,
    softmax_step,
    split_queries,
    store_split,
    write_heads,
    write_lse,
)
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.quantize.native import Outputs, result

_LEAST_KEYS = tl.constexpr(512)  # minimum number of keys of a split
_WORDS = tl.constexpr(7)  # number of words in a record of `SplitTiles`


@dataclass(frozen=True)
class SplitTiles:
    """The splits of the tiles' keys, and the indices of their partial results."""

    # [programs, 7] int32: index of the split, the tile (4 words), number of splits of the tile,
    # index of the tile's first partial result; a record with 0 queries is unused
    work: Tensor
    merged: Tensor  # [tiles, 7] int32: record of the first split of each tile with several splits
    places: int  # capacity of `partials`, in partial results per head


@dataclass(frozen=True)
class PrefillPlan:
    """The prefill queries of a step, divided into tiles."""

    queries: AttentionMetadata
    shape: PagedShape
    block_m: int  # Maximum number of queries per tile.
    # `tiles` [tiles, 4] int32: first query's index, number of queries, first position, sequence.
    tiles: Tensor
    split: SplitTiles | None = None  # Splits of the tiles; None: each tile has one program.
    # `held` is `OwnBlocks.held` if block tables list only this rank's blocks, None if all blocks
    held: Tensor | None = None


def plan_prefill(queries: AttentionMetadata, shape: PagedShape) -> PrefillPlan:
    """Plan prefills; the queries of a sequence are the sequence's last tokens."""
    device, num_tokens = queries.seq_lens.device, queries.positions.shape[0]
    tiles, on_device = tiles_for(device), queries.is_captured or not queries.is_exact
    longest = num_tokens if on_device else max(queries.host_seq_lens, default=0)
    size = tiles.prefill_block_m(longest, num_tokens)
    programs = tiles.prefill_programs(size) * platform.platform_of(device).multiprocessors
    listed, split = list_query_tiles(queries, size), None
    # with more tiles, all multiprocessors are busy without splits
    if len(listed) and num_tokens // size * shape.kv_heads * shape.group < 4 * programs:
        split = _split_tiles(listed, shape, size=size, programs=programs)
    return PrefillPlan(queries, shape, size, listed, split)


def _split_tiles(tiles: Tensor, shape: PagedShape, *, size: int, programs: int) -> SplitTiles:
    """Distribute programs over tiles (at most `size` queries) in proportion to the tiles' keys."""
    places = programs // shape.kv_heads
    rows = tiles.new_zeros(len(tiles) + places + places // 2, _WORDS.value)
    work, merged = rows.split([len(tiles) + places, places // 2])
    most = max(512, triton.next_power_of_2(len(tiles)))  # up to 512 tiles need only one compilation
    _split_tiles_kernel[(1,)](
        tiles, work, merged, len(tiles), programs, shape.group, shape.kv_heads, size, most
    )
    return SplitTiles(work, merged, places)


@triton.jit
def _load_tile(record, mask=None):
    """Return a tile's first query, number of queries, position of the first query, and sequence."""
    return (
        tl.load(record, mask=mask),
        tl.load(record + 1, mask=mask),
        tl.load(record + 2, mask=mask),
        tl.load(record + 3, mask=mask),
    )


@triton.jit(
    do_not_specialize=["num_tiles", "programs", "group", "kv_heads", "size"],
    do_not_specialize_on_alignment=["merged"],  # `merged` is a slice, whose alignment varies
)
def _split_tiles_kernel(
    tiles, work, merged, num_tiles, programs, group, kv_heads, size, MOST: tl.constexpr
):
    """Write the records of `SplitTiles` for tiles [num_tiles, 4] into zeroed tensors."""
    tile = tl.arange(0, MOST)
    first, count, start, seq = _load_tile(tiles + tile * 4, tile < num_tiles)
    count = tl.where(tile < num_tiles, count, 0)
    keys = tl.where(count > 0, count + start, 0).to(tl.int64)
    heads = tl.where(count * group <= size, 1, group) * kv_heads
    share = keys * programs // tl.maximum(tl.sum(keys * heads), 1)
    splits = tl.maximum(tl.minimum(share, keys // _LEAST_KEYS), 1).to(tl.int32)
    splits = tl.where(count > 0, splits, 0)
    several = tl.where(splits > 1, splits, 0)
    work += (tl.cumsum(splits) - splits) * _WORDS
    record = first, count, start, seq, splits, tl.cumsum(several) - several
    for split in range(tl.max(splits)):
        _store_record(work + split * _WORDS, split, record, split < splits)
    is_split = (splits > 1).to(tl.int32)
    _store_record(merged + (tl.cumsum(is_split) - is_split) * _WORDS, 0, record, splits > 1)


@triton.jit
def _store_record(to, split, record, mask):
    tl.store(to, split, mask=mask)
    for i in tl.static_range(6):
        tl.store(to + 1 + i, record[i], mask=mask)


def list_query_tiles(queries: AttentionMetadata, size: int) -> Tensor:
    """List the tiles of at most `size` queries -> `PrefillPlan.tiles`."""
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
    """List the tiles [T / size + S, 4] of sequences if only the device stores their query counts.

    The last tiles may be empty. The tiles of a sequence are sorted by descending number of keys.
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
    """Return the index, among this rank's keys of the sequence, of the last key up to `position`;
    -1 if the rank has no key up to `position`.
    """
    block = position // C.BLOCK_SIZE
    until = tl.load(held + block, mask=is_row, other=0)
    before = tl.load(held + block - 1, mask=is_row & (block > 0), other=0)
    rest = tl.where(until > before, position % C.BLOCK_SIZE + 1, 0)
    return before * C.BLOCK_SIZE + rest - 1


# no specialization on alignment, because slices of a step's tensors may have any alignment
@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["block_table_indices"])
def _prefill_kernel(
    q,  # [T, KV_HEADS * GROUP, DIM]
    k_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, DIM]
    v_cache,
    tables,  # [slots, table_stride] int32, block tables
    block_table_indices,  # [S] int64, row of each sequence in `tables`
    tiles,  # [tiles, 4] int32: `PrefillPlan.tiles`; with SPLIT_KV `SplitTiles.work`
    out,  # [T, KV_HEADS * GROUP * DIM], written
    values,  # [T, KV_HEADS * GROUP * DIM] e4m3, written if QUANTIZE, else None
    scales,  # [T, KV_HEADS * GROUP] fp32, written if QUANTIZE, else None
    lse,  # [T, KV_HEADS * GROUP] fp32, written by `write_lse`, or None
    held,  # [S, held_stride] int32, `OwnBlocks.held`; None if `tables` list all blocks
    held_stride,
    partials,  # [heads, places, BLOCK_M, BLOCK_D + 2] fp32 (`store_split`); None without SPLIT_KV
    places,
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    C: tl.constexpr,
):
    """Attend with one tile of queries to one split of the keys. The tile has queries of one head,
    or few queries of all heads of a KV head.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    query_head = tl.program_id(0)
    head = query_head // C.GROUP
    if C.SPLIT_KV:
        record = tiles + tl.program_id(1) * _WORDS
        split, splits, place = tl.load(record), tl.load(record + 5), tl.load(record + 6)
        first, count, start, seq = _load_tile(record + 1)
    else:
        first, count, start, seq = _load_tile(tiles + tl.program_id(1) * 4)
    table = tables + tl.load(block_table_indices + seq).to(tl.int64) * table_stride
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    if (count * C.GROUP <= BLOCK_M) & (query_head % C.GROUP != 0):
        return
    query, out_row = place_rows(row, first, count, query_head, C)
    mask = (query < count)[:, None] & (column < C.DIM)[None, :]
    q_tile = tl.load(
        q + out_row.to(tl.int64)[:, None] * C.DIM + column[None, :], mask=mask, other=0.0
    )
    operands, scale = split_queries(q_tile, C)
    scale *= qk_scale
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
    begin, after = 0, tl.cdiv(end, C.BLOCK_N)
    if C.SPLIT_KV:
        share = tl.cdiv(after, tl.maximum(splits, 1))
        begin = split * share
        after = tl.minimum(begin + share, after)
    lane = tl.arange(0, C.BLOCK_N)[:, None]
    offset = locate_key_tile(table, begin, lane, end, head, C)
    for t in range(begin, after):
        k = load_tile(k_cache, offset, lane, column[None, :], C)
        v = load_tile(v_cache, offset, lane, column[None, :], C).to(C.DOT)
        offset = locate_key_tile(table, t + 1, lane, end, head, C)
        scores = multiply_keys(operands, k, C)
        if (t + 1) * C.BLOCK_N > start:
            visible = position - t * C.BLOCK_N
            scores = tl.where(
                tl.arange(0, C.BLOCK_N)[None, :] <= visible[:, None], scores, float("-inf")
            )
        p, alpha, m_i = softmax_step(scores, scale, m_i)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(C.DOT), v, acc * alpha[:, None])
    if C.SPLIT_KV:
        at = _locate_partials(partials, place, places, C)
        if splits > 1:
            store_split(at, split, m_i, l_i, acc, C)
            return
    if held is None:
        acc *= (v_scale / l_i)[:, None]
    else:
        acc *= tl.where(l_i == 0.0, 0.0, v_scale / l_i)[:, None]
    write_heads(acc, out_row.to(tl.int64), column, query < count, (out, values, scales), C)
    write_lse(m_i, l_i, out_row.to(tl.int64), query < count, lse)


@triton.jit
def _locate_partials(partials, place, places, C: tl.constexpr):
    """Return a pointer to partial result number `place` of this program's head."""
    at = tl.program_id(0).to(tl.int64) * places + place
    return partials + at * (C.BLOCK_M * (C.BLOCK_D + 2))


@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["merged"])
def _merge_prefill_kernel(
    partials, places, merged, out, values, scales, lse, v_scale, C: tl.constexpr
):
    """Merge the partial results of 16 rows. Grid (heads, split tiles, BLOCK_M / 16)."""
    record = merged + tl.program_id(1) * _WORDS
    first, count, _, _ = _load_tile(record + 1)
    row = tl.program_id(2) * 16 + tl.arange(0, 16)
    is_folded = count * C.GROUP <= C.BLOCK_M
    if (count == 0) | (is_folded & (tl.program_id(0) % C.GROUP != 0)):
        return
    query, out_row = place_rows(row, first, count, tl.program_id(0), C)
    at = _locate_partials(partials, tl.load(record + 6), places, C)
    m_i, l_i, acc = merge_splits(at, row, tl.load(record + 5), C)
    acc *= tl.where(l_i == 0.0, 0.0, v_scale / l_i)[:, None]
    column, is_row, out_row = tl.arange(0, C.BLOCK_D), query < count, out_row.to(tl.int64)
    write_heads(acc, out_row, column, is_row, (out, values, scales), C)
    write_lse(m_i, l_i, out_row, is_row, lse)


def prefill(q: Tensor, cache: KvCache, plan: PrefillPlan) -> Tensor | QuantizedActivations:
    """Attend with q [T, heads, head_dim] -> [T, heads * head_dim]."""
    output = head_outputs(q, quantize=plan.shape.quantize)
    launch_prefill(q, cache, plan, output)
    return result(*output)


def _uses_specialized_warps(q: Tensor, cache: KvCache, plan: PrefillPlan) -> bool:
    """Return whether `triton_specialized.py` computes the plan. Its instructions are Hopper's."""
    return (
        platform.platform_of(q.device).arch == "sm_90"
        and q.dtype == cache.k.dtype  # not FP8
        and plan.block_m == triton_specialized.BLOCK_M
        and q.shape[2] == triton_specialized.DIM
        and plan.shape.block_size % triton_specialized.PAGE == 0
        and plan.split is None
        and plan.held is None
    )


def launch_prefill(
    q: Tensor, cache: KvCache, plan: PrefillPlan, output: Outputs, *, lse: Tensor | None = None
) -> None:
    """Write the result of `prefill` to `output`, and of `write_lse` to lse [T, heads]."""
    assert q.is_contiguous() and cache.k.is_contiguous() and cache.v.is_contiguous()
    if q.shape[0] == 0:
        return
    _, heads, head_dim = q.shape
    tables, held = plan.queries.block_tables, plan.held
    indices, scale = plan.queries.block_table_indices, score_scale(head_dim, cache.scales[0])
    launch = tiles_for(q.device).prefill_launch(
        plan.block_m, cache.k.element_size(), is_shard=held is not None
    )
    constants = attention_constants(
        q, cache.k, plan.shape, block_m=plan.block_m, block_n=launch.block_n,
        SPLIT_KV=plan.split is not None,
    )  # fmt: skip
    if lse is None and _uses_specialized_warps(q, cache, plan):
        triton_specialized.launch_specialized(
            q, cache, tables, indices, plan.tiles, output, scale, constants
        )
        return
    tiles, partials, places = plan.tiles, None, 0
    if plan.split is not None:
        tiles, places = plan.split.work, plan.split.places
        size = heads * places * plan.block_m * (constants.BLOCK_D + 2)
        partials = q.new_empty(size, dtype=torch.float32)
    _prefill_kernel[(heads, len(tiles))](
        q, cache.k, cache.v, tables, indices, tiles, *output, lse, held,
        None if held is None else held.stride(0), partials, places, scale, cache.scales[1],
        tables.stride(0), constants, **launch.options,
    )  # fmt: skip
    if plan.split is not None:
        merged = plan.split.merged
        _merge_prefill_kernel[(heads, len(merged), plan.block_m // 16)](
            partials, places, merged, *output, lse, cache.scales[1], constants
        )
