"""Attention of long prompts on Hopper in Gluon, with 16-bit caches and heads of 128 columns.

A program attends with 128 queries of one head to all keys up to their positions, 128 keys at a
time. Its warps have three tasks, and exchange tiles through a ring of stages in shared memory:

    producer     1 warp     waits for `empty`, loads the keys of a tile and the values of the tile
                            before by TMA; then `full` completes
    consumer 0   4 warps    waits for `full`, starts the scores of the keys and the products with
    consumer 1   4 warps    the values together, waits for both, arrives at `empty`, computes the
                            softmax of the scores

Consumer 0 has queries 0 .. 63 of the tile, and consumer 1 has queries 64 .. 127. The tensor cores
work for one consumer while the other computes its softmax.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from negamax.kernels.attention.triton_shared import AttentionConstants, place_rows, write_heads
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.quantize.native import Outputs

# Triton 3.9 renamed the function to `async_load`.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_place_rows, _write_heads = gluon.jit(place_rows.fn), gluon.jit(write_heads.fn)

DIM = 128  # columns of a head
PAGE = 64  # keys of one load; the number of tokens per cache block is a multiple
BLOCK_M = 128  # queries of a program
_DIM, _PAGE = gl.constexpr(DIM), gl.constexpr(PAGE)
_ROWS = gl.constexpr(BLOCK_M // 2)  # queries of a consumer
_STAGES = gl.constexpr(3)  # 128 keys and 128 values, 64 KiB each
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_SHARED_TILE = gl.constexpr(_TILE)
_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_CONSUMER_REGISTERS = gl.constexpr(240)  # per thread
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _locate_page(table, key, end, head, C: gl.constexpr):
    """Return the row of the cache [blocks * KV_HEADS * BLOCK_SIZE, 128] with key `key`; keys from
    `end` on get rows of block 0.
    """
    block = gl.load(table + key // C.BLOCK_SIZE, mask=key < end, other=0).to(gl.int32)
    return (block * C.KV_HEADS + head) * C.BLOCK_SIZE + key % C.BLOCK_SIZE


@gluon.jit
def _produce(k, v, k_ring, v_ring, full, empty, table, num_tiles, end, head, C: gl.constexpr):
    """Load all keys and values of the program. The values before tile 0 have weights of 0, so block
    0 must contain finite values. The scores of keys after the last tile are masked.
    """
    v_row0, v_row1 = 0, 0
    for t in range(num_tiles + 1):
        stage = t % _STAGES
        ready = full.index(stage)
        row0 = _locate_page(table, t * (2 * _PAGE), end, head, C)
        row1 = _locate_page(table, t * (2 * _PAGE) + _PAGE, end, head, C)
        mbarrier.wait(empty.index(stage), ((t // _STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 8 * _PAGE * _DIM)
        _load(k, [row0, 0], ready, k_ring.index(2 * stage))
        _load(k, [row1, 0], ready, k_ring.index(2 * stage + 1))
        _load(v, [v_row0, 0], ready, v_ring.index(2 * stage))
        _load(v, [v_row1, 0], ready, v_ring.index(2 * stage + 1))
        v_row0, v_row1 = row0, row1


@gluon.jit
def _softmax(s0, s1, m_i, l_i, position, first_key, start, scale):
    """Update a base-2 online softmax by the scores s0 and s1 [queries, 64] of 128 keys. Return the
    weights of the keys, the factor alpha of earlier sums, and the new maxima and sums.
    """
    if first_key + 2 * _PAGE > start:
        key = gl.arange(0, _PAGE, layout=gl.SliceLayout(0, _SCORES))[None, :] + first_key
        s0 = gl.where(key <= position[:, None], s0, float("-inf"))
        s1 = gl.where(key + _PAGE <= position[:, None], s1, float("-inf"))
    m_new = gl.maximum(m_i, gl.maximum(gl.max(s0, axis=1), gl.max(s1, axis=1)) * scale)
    alpha = gl.exp2(m_i - m_new)
    p0, p1 = gl.exp2(s0 * scale - m_new[:, None]), gl.exp2(s1 * scale - m_new[:, None])
    return p0, p1, alpha, m_new, l_i * alpha + gl.sum(p0 + p1, axis=1)


@gluon.jit
def _consume(
    q, k_ring, v_ring, full, empty, output, num_tiles, first, count, start, query_head, scale,
    v_scale, C: gl.constexpr,
    CONSUMER: gl.constexpr,  # 0 or 1: the half of the queries
):  # fmt: skip
    """Attend with half of the program's queries."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, _SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _SUM, 2)
    dtype: gl.constexpr = q.dtype.element_ty
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LOAD)) + CONSUMER * _ROWS
    query, out_row = _place_rows(row, first, count, query_head, C)
    column = gl.arange(0, _DIM, layout=gl.SliceLayout(0, LOAD))
    q_ptrs = q + out_row.to(gl.int64)[:, None] * _DIM + column[None, :]
    q_tile = gl.load(q_ptrs, mask=(query < count)[:, None], other=0.0)
    q_tile = gl.convert_layout(q_tile, gl.DotOperandLayout(0, _SCORES, 2))
    score_row = gl.arange(0, _ROWS, layout=ROW) + CONSUMER * _ROWS
    position = start + _place_rows(score_row, first, count, query_head, C)[0]
    m_i = gl.full([_ROWS], float("-inf"), gl.float32, layout=ROW)
    l_i = gl.zeros([_ROWS], gl.float32, layout=ROW)
    alpha = l_i
    zeros = gl.zeros([_ROWS, _PAGE], gl.float32, layout=_SCORES)
    acc = gl.zeros([_ROWS, _DIM], gl.float32, layout=_SUM)
    weights0 = gl.convert_layout(zeros.to(dtype), OPERAND)
    weights1 = weights0
    for t in range(num_tiles + 1):
        stage = t % _STAGES
        mbarrier.wait(full.index(stage), (t // _STAGES) & 1)
        # At the end of the loop, this line would make Triton 3.9 copy sums and spill registers.
        acc *= gl.convert_layout(alpha, gl.SliceLayout(1, _SUM))[:, None]
        k0, k1 = k_ring.index(2 * stage), k_ring.index(2 * stage + 1)
        s0 = warpgroup_mma(q_tile, k0.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s1 = warpgroup_mma(q_tile, k1.permute((1, 0)), zeros, use_acc=False, is_async=True)
        total = warpgroup_mma(weights0, v_ring.index(2 * stage), acc, is_async=True)
        total = warpgroup_mma(weights1, v_ring.index(2 * stage + 1), total, is_async=True)
        s0, s1, acc = warpgroup_mma_wait(0, deps=[s0, s1, total])
        mbarrier.arrive(empty.index(stage), count=1)
        p0, p1, alpha, m_i, l_i = _softmax(
            s0, s1, m_i, l_i, position, t * (2 * _PAGE), start, scale
        )
        weights0 = gl.convert_layout(p0.to(dtype), OPERAND)
        weights1 = gl.convert_layout(p1.to(dtype), OPERAND)
    acc *= gl.convert_layout(v_scale / l_i, gl.SliceLayout(1, _SUM))[:, None]
    sum_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _SUM)) + CONSUMER * _ROWS
    query, out_row = _place_rows(sum_row, first, count, query_head, C)
    column = gl.arange(0, _DIM, layout=gl.SliceLayout(0, _SUM))
    _write_heads(acc, out_row.to(gl.int64), column, query < count, output, C)


# no specialization on alignment, because slices of a step's tensors may have any alignment
@gluon.jit(do_not_specialize_on_alignment=["block_table_indices"])
def _specialized_prefill_kernel(
    q,  # [T, KV_HEADS * GROUP, 128]
    k,  # descriptor of the keys [blocks * KV_HEADS * BLOCK_SIZE, 128]
    v,
    tables,  # [slots, table_stride] int32 or int64, block tables
    block_table_indices,  # [S] int64, row of each sequence in `tables`
    tiles,  # [tiles, 4] int32: `PrefillPlan.tiles`
    out,  # [T, KV_HEADS * GROUP * 128], written
    values,  # [T, KV_HEADS * GROUP * 128] e4m3, written if QUANTIZE, else None
    scales,  # [T, KV_HEADS * GROUP] fp32, written if QUANTIZE, else None
    scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    C: gl.constexpr,
):
    """Attend with one tile of queries. The tile has queries of one head, or few queries of all
    heads of a KV head, for which only the program of the first head works.
    """
    k_ring = gl.allocate_shared_memory(k.dtype, [2 * _STAGES, _PAGE, _DIM], _SHARED_TILE)
    v_ring = gl.allocate_shared_memory(v.dtype, [2 * _STAGES, _PAGE, _DIM], _SHARED_TILE)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    query_head, record = gl.program_id(0), tiles + gl.program_id(1) * 4
    first, count = gl.load(record), gl.load(record + 1)
    start, seq = gl.load(record + 2), gl.load(record + 3)
    if (count * C.GROUP <= C.BLOCK_M) & (query_head % C.GROUP != 0):
        count = 0
    end = gl.where(count > 0, start + count, 0)
    num_tiles, head = (end + 2 * _PAGE - 1) // (2 * _PAGE), query_head // C.GROUP
    table = tables + gl.load(block_table_indices + seq).to(gl.int64) * table_stride
    output = (out, values, scales)
    gl.warp_specialize(
        [
            (_consume, (q, k_ring, v_ring, full, empty, output, num_tiles, first, count, start,
                        query_head, scale, v_scale, C, 0)),
            (_consume, (q, k_ring, v_ring, full, empty, output, num_tiles, first, count, start,
                        query_head, scale, v_scale, C, 1)),
            (_produce, (k, v, k_ring, v_ring, full, empty, table, num_tiles, end, head, C)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_specialized(
    q: Tensor, cache: KvCache, tables: Tensor, block_table_indices: Tensor, tiles: Tensor,
    output: Outputs, scale: float, constants: AttentionConstants,
) -> None:  # fmt: skip
    """Write attention with q [T, heads, 128] to `output`; `tiles` have at most 128 queries."""
    k, v = (
        TensorDescriptor.from_tensor(each.view(-1, DIM), [PAGE, DIM], _TILE)
        for each in (cache.k, cache.v)
    )
    _specialized_prefill_kernel[(q.shape[1], len(tiles))](
        q, k, v, tables, block_table_indices, tiles, *output, scale, cache.scales[1],
        tables.stride(0), constants, num_warps=4,
    )  # fmt: skip
