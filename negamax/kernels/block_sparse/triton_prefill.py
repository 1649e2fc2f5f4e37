"""Block-sparse attention of prefills. For several neighboring queries, a program attends with the
GROUP query heads of a KV head to the union of the queries' selected blocks. A bit mask per block
states which queries selected the block.

    q, out   [T, KV_HEADS * GROUP, DIM]     rows of a tile: (query, head of the group)
    unions   per tile and KV head           | block 0, 0011 | block 4, 1111 | ...

Neighboring queries select nearly the same blocks, so a key is read once for most queries of a tile.
Four queries of 16 heads fill the 64 rows of a tensor-core instruction. If every query attends to
all tokens of its sequence, the dense prefill runs instead.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.triton_prefill import (
    PrefillPlan,
    list_query_tiles,
    plan_prefill,
    prefill,
)
from negamax.kernels.attention.triton_shared import (
    attention_constants,
    head_outputs,
    load_tile,
    multiply_keys,
    score_scale,
    softmax_step,
    split_queries,
    write_heads,
    write_lse,
)
from negamax.kernels.block_sparse.selection import BlockSelection, SparseShape
from negamax.kernels.block_sparse.tiles import tiles_for
from negamax.kernels.block_sparse.triton_selection import NO_BLOCK
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.quantize.native import Outputs, result

_UNION = 128  # maximum number of different blocks that the queries of a tile select
_MOST_QUERIES = 16  # Maximum number of queries per tile.
# A union has `_WORDS` per block: block number, mask of queries, page, scratch of `_unite_kernel`.
_WORDS = tl.constexpr(4)


@dataclass(frozen=True)
class SparsePrefillPlan:
    """The prefill queries of a step, divided into tiles, and workspaces for all layers."""

    queries: AttentionMetadata
    shape: SparseShape
    size: int  # maximum number of queries per tile
    tiles: Tensor  # [tiles, 4] int32, in the format of `attention.triton_prefill.PrefillPlan.tiles`
    workspaces: dict[str, Tensor] = field(default_factory=dict)  # filled by the first layer


def plan_sparse_prefill(
    queries: AttentionMetadata, shape: SparseShape
) -> SparsePrefillPlan | PrefillPlan:
    """Plan prefills; the queries of a sequence are the sequence's last tokens."""
    if not queries.is_captured and max(queries.host_seq_lens) <= shape.dense_tokens:
        return plan_prefill(queries, shape)
    return plan_chosen_prefill(queries, shape)


def plan_chosen_prefill(queries: AttentionMetadata, shape: SparseShape) -> SparsePrefillPlan:
    """Plan block-sparse attention, even if each query selects all blocks up to its position."""
    rows = tiles_for(queries.seq_lens.device).prefill_rows
    topk = triton.next_power_of_2(shape.topk_blocks)
    size = max(1, min(rows // shape.group, _UNION // topk, _MOST_QUERIES))
    return SparsePrefillPlan(queries, shape, size, list_query_tiles(queries, size))


@triton.jit
def _load_blocks(ids, query, place, count, TOPK: tl.constexpr):
    """Load the block at index `place` of the selection of `query`, or NO_BLOCK if there is none."""
    block = tl.load(ids, mask=(query < count) & (place < TOPK), other=-1)
    return tl.where(block < 0, NO_BLOCK, block)


@triton.jit
def _unite_kernel(
    ids,  # [T, HEADS, TOPK] int32, `BlockSelection.ids`
    pages,  # [T, HEADS, TOPK] int32, `BlockSelection.pages`
    tiles,  # [tiles, 4] int32, `SparsePrefillPlan.tiles`
    unions,  # [tiles * HEADS, QUERIES * TOPK_POW2, _WORDS] int32, written: selected blocks
    sizes,  # [tiles * HEADS] int32, written: number of blocks of each union
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    QUERIES: tl.constexpr,  # number of queries per tile, padded to a power of two
    TOPK_POW2: tl.constexpr,
):
    """List the blocks that the queries of a tile selected, in ascending order. Grid (HEADS, tiles).

    Two loops over the queries compare each block with all blocks that a query selected. The first
    loop finds the queries that selected the block. The second loop counts the blocks of the union
    with smaller numbers; a block that several queries selected is counted once.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    own = tile * HEADS + head
    unions += own.to(tl.int64) * (QUERIES * TOPK_POW2 * _WORDS)
    i, other = tl.arange(0, QUERIES * TOPK_POW2), tl.arange(0, TOPK_POW2)[None, :]
    query, place = i // TOPK_POW2, i % TOPK_POW2
    ids += (first.to(tl.int64) * HEADS + head) * TOPK
    at = query * (HEADS * TOPK) + place
    block = _load_blocks(ids + at, query, place, count, TOPK)
    chosen_by = tl.zeros([QUERIES * TOPK_POW2], tl.int32)
    for j in range(count):
        others = _load_blocks(ids + j * (HEADS * TOPK) + other, j, other, count, TOPK)
        has_chosen = tl.max((others == block[:, None]).to(tl.int32), axis=1)
        chosen_by |= has_chosen << j
    is_first = (block != NO_BLOCK) & (chosen_by & ((1 << query) - 1) == 0)
    tl.store(unions + i * _WORDS + 3, is_first.to(tl.int32))
    tl.debug_barrier()
    rank = tl.zeros([QUERIES * TOPK_POW2], tl.int32)
    for j in range(count):
        others = _load_blocks(ids + j * (HEADS * TOPK) + other, j, other, count, TOPK)
        counts = tl.load(unions + (j * TOPK_POW2 + other) * _WORDS + 3)
        rank += tl.sum(tl.where(others < block[:, None], counts, 0), axis=1)
    page = tl.load(pages + (first.to(tl.int64) * HEADS + head) * TOPK + at, mask=is_first, other=0)
    to = unions + rank * _WORDS
    tl.store(to, block, mask=is_first)
    tl.store(to + 1, chosen_by, mask=is_first)
    tl.store(to + 2, page, mask=is_first)
    tl.store(sizes + own, tl.sum(is_first.to(tl.int32), axis=0))


@triton.jit
def _sparse_prefill_kernel(
    q,  # [T, KV_HEADS * GROUP, DIM]
    k_cache,  # [pages, BLOCK_SIZE, DIM]
    v_cache,
    tiles,  # [tiles, 4] int32, `SparsePrefillPlan.tiles`
    unions,  # selected blocks of each tile, written by `_unite_kernel`
    sizes,
    out,  # [T, KV_HEADS * GROUP * DIM], written
    values,  # [T, KV_HEADS * GROUP * DIM] e4m3, written if QUANTIZE, else None
    scales,  # [T, KV_HEADS * GROUP] fp32, written if QUANTIZE, else None
    lse,  # [T, KV_HEADS * GROUP] fp32, written by `write_lse`, or None
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    UNION: tl.constexpr,
    C: tl.constexpr,  # C.BLOCK_SIZE is the number of tokens per sparse block
):
    """Attend with one tile of queries of one KV head. Grid (KV_HEADS, tiles)."""
    BLOCK_M: tl.constexpr = C.BLOCK_M  # a copy, as Triton 3.6 accepts no struct field in a shape
    BLOCK_D: tl.constexpr = C.BLOCK_D
    TILES: tl.constexpr = C.BLOCK_SIZE // C.BLOCK_N  # number of key tiles per sparse block
    head, tile = tl.program_id(0), tl.program_id(1)
    record = tiles + tile * 4
    first, count, start = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    own = tile * C.KV_HEADS + head
    union, size = unions + own.to(tl.int64) * (UNION * _WORDS), tl.load(sizes + own)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = row // C.GROUP
    is_row = query < count
    token = (first + query).to(tl.int64)
    out_row = token * (C.KV_HEADS * C.GROUP) + head * C.GROUP + row % C.GROUP
    q_mask = is_row[:, None] & (column < C.DIM)[None, :]
    q_at = q + out_row[:, None] * C.DIM + column[None, :]
    operands, scale = split_queries(tl.load(q_at, mask=q_mask, other=0.0), C)
    scale *= qk_scale
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position, everybody = start + query, (1 << count) - 1
    lane, key = tl.arange(0, C.BLOCK_N)[:, None], tl.arange(0, C.BLOCK_N)[None, :]
    block, chosen_by, page = tl.load(union), tl.load(union + 1), tl.load(union + 2)
    for t in range(0, size * TILES):
        part = t % TILES
        offset = page.to(tl.int64) * (C.BLOCK_SIZE * C.DIM) + part * (C.BLOCK_N * C.DIM)
        k = load_tile(k_cache, offset, lane, column[None, :], C)
        v = load_tile(v_cache, offset, lane, column[None, :], C).to(C.DOT)
        first_key, by = block * C.BLOCK_SIZE + part * C.BLOCK_N, chosen_by
        # Load page indices one tile ahead: waiting for them would halve the pipeline stages.
        following = union + tl.minimum((t + 1) // TILES, size - 1) * _WORDS
        block, chosen_by, page = tl.load(following), tl.load(following + 1), tl.load(following + 2)
        scores = multiply_keys(operands, k, C)
        if (first_key + C.BLOCK_N > start + 1) | (by != everybody):
            visible = tl.where((by >> query) & 1 != 0, position - first_key, -1)
            scores = tl.where(key <= visible[:, None], scores, float("-inf"))
        p, alpha, m_i = softmax_step(scores, scale, m_i)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(C.DOT), v, acc * alpha[:, None])
    acc *= tl.where(l_i == 0.0, 0.0, v_scale / l_i)[:, None]
    write_heads(acc, out_row, column, is_row, (out, values, scales), C)
    write_lse(m_i, l_i, out_row, is_row, lse)


def sparse_prefill(
    q: Tensor, cache: KvCache, choice: BlockSelection, plan: SparsePrefillPlan | PrefillPlan
) -> Hidden:
    """Run `block_sparse.prefill` on the pages of the selected blocks."""
    if isinstance(plan, PrefillPlan):
        return prefill(q, cache, plan)
    output = head_outputs(q, quantize=plan.shape.quantize)
    launch_sparse_prefill(q, cache, choice, plan, output)
    return result(*output)


def launch_sparse_prefill(
    q: Tensor,
    cache: KvCache,
    choice: BlockSelection,
    plan: SparsePrefillPlan,
    output: Outputs,
    *,
    lse: Tensor | None = None,
) -> None:
    """Write the results of `sparse_prefill` to `output` and of `write_lse` to lse [T, heads]."""
    assert q.is_contiguous() and cache.k.is_contiguous() and cache.v.is_contiguous()
    if q.shape[0] == 0:
        return
    shape, head_dim, tiles = plan.shape, q.shape[2], plan.tiles
    block_m = max(16, triton.next_power_of_2(plan.size * shape.group))
    queries, topk = (triton.next_power_of_2(n) for n in (plan.size, shape.topk_blocks))
    num_unions, workspaces = tiles.shape[0] * shape.kv_heads, plan.workspaces
    if not workspaces:
        new = q.new_empty
        workspaces["unions"] = new(num_unions, queries * topk, _WORDS.value, dtype=torch.int32)
        workspaces["sizes"] = new(num_unions, dtype=torch.int32)
    unions = (tiles, workspaces["unions"], workspaces["sizes"])
    grid = (shape.kv_heads, tiles.shape[0])
    _unite_kernel[grid](
        choice.ids, choice.pages, *unions, HEADS=shape.kv_heads, TOPK=shape.topk_blocks,
        QUERIES=queries, TOPK_POW2=topk, num_warps=4,
    )  # fmt: skip
    launch = tiles_for(q.device).attend_prefill
    constants = attention_constants(
        q,
        cache.k,
        shape,
        block_m=block_m,
        block_n=min(launch.block_n, shape.sparse_block_size),
        block_size=shape.sparse_block_size,
    )
    _sparse_prefill_kernel[grid](
        q, cache.k, cache.v, *unions, *output, lse, score_scale(head_dim, cache.scales[0]),
        cache.scales[1], UNION=queries * topk, C=constants,
        **launch.options,
    )  # fmt: skip
