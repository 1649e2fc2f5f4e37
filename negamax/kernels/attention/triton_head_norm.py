"""RMS norm of each head (optional), rope and the write to the paged caches in one launch. The
launch also processes the index heads of block-sparse attention.

    projected    |   q heads   | k heads | v heads | index q heads | index k |    a token's row
                  norm and rope            copy      norm and rope
    written to    q              k_cache   v_cache   index_q         index_cache

Grid (T, tiles of BLOCK_H heads). Programs do not wait for each other. The tiles of the index heads,
whose width may differ, come last. Tokens with negative slots are not written to the caches.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.op import HeadNorm
from negamax.kernels.attention.triton_heads import (
    block_of_rest,
    finite,
    load_angles,
    load_heads,
    rotate,
    split_columns,
    store_heads,
)
from negamax.kernels.kvcache.op import KvCache, TokenPlaces
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.peers import Collective

_BLOCK_H = 8  # number of heads per program; 4 and 16 were not faster


class IndexHeads(NamedTuple):
    """The index heads of block-sparse attention, in the columns after q, k and v."""

    weight: Tensor  # [2, INDEX_DIM] fp32, norm weights of queries and of keys
    q: Tensor  # [T, index heads, INDEX_DIM], written
    cache: Tensor  # [blocks * block size, INDEX_DIM], written
    rank: int
    ranks: int  # number of shards of the index keys; each rank holds one shard
    rows: Tensor | None  # [T] int64, row indices in `cache`; None: derived from the slot mapping


class HeadNormConstants(NamedTuple):
    """Constants of `_head_norm_rope_write_kernel`, passed as one argument `C: tl.constexpr`."""

    HEADS: int
    KV_HEADS: int
    DIM: int
    INDEX_DIM: int  # dimension of an index head; 0: there are no index heads
    INDEX_HEADS: int
    INDEX_RANKS: int  # number of shards of the index keys; each rank holds one shard
    BLOCK_SIZE: int  # number of tokens per block of the caches
    HALF: int  # half of the number of rotated dimensions
    BLOCK_H: int
    BLOCK_HALF: int
    BLOCK_REST: int  # number of unrotated dimensions, padded to a power of two; 0: all are rotated
    BLOCK_INDEX_REST: int  # BLOCK_REST of an index head


@triton.jit
def _load_rotated(
    x, weight, angles, head, is_there, is_key, is_plain, eps,
    DIM: tl.constexpr, BLOCK_REST: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Load the heads `head` [BLOCK_H] at x and rotate them; return their tiles, columns, masks. If
    `weight` [2, DIM] is given, heads are normalized first, by weight[1] (keys) or weight[0]
    (queries). Heads for which `is_plain` is true are neither normalized nor rotated.
    """
    BLOCK_H: tl.constexpr = C.BLOCK_H  # a copy, as Triton 3.6 accepts no struct field in a shape
    cos, sin = angles
    columns, masks = split_columns(is_there, DIM, C.HALF, C.BLOCK_HALF, BLOCK_REST)
    # load the angles before waiting for the predecessor kernel, which does not write them
    angles = load_angles(cos, sin, C.HALF, C.BLOCK_HALF)
    if weight is not None:
        weights = load_heads(weight + is_key.to(tl.int32)[:, None] * DIM, columns, masks, C.HALF)
    launch_dependents_then_wait(PDL)
    loaded = load_heads(x + head[:, None] * DIM, columns, masks, C.HALF)
    heads, normed, squares = (), (), tl.zeros([BLOCK_H], tl.float32)
    for part in tl.static_range(len(loaded)):
        value = finite(loaded[part], x.dtype.element_ty)
        heads += (value,)
        squares += tl.sum(value * value, axis=1)
    if weight is None:
        normed = heads
    else:
        norm = tl.rsqrt(squares / DIM + eps)[:, None]
        for part in tl.static_range(len(heads)):
            normed += (heads[part] * norm * weights[part],)
    rotated, results = rotate(normed, angles), ()
    for part in tl.static_range(len(heads)):
        results += (tl.where(is_plain[:, None], heads[part], rotated[part]),)
    return results, columns, masks


@triton.jit
def _write_qkv(
    x, weight, angles, slots, token, tile, q_out, k_cache, v_cache, eps, scales,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the q and k heads of a tile at x; store the tile's q, k and v heads."""
    head = tile * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    is_there = head < C.HEADS + 2 * C.KV_HEADS
    is_q, is_v = head < C.HEADS, head >= C.HEADS + C.KV_HEADS
    kv_head = tl.where(is_v, head - C.HEADS - C.KV_HEADS, head - C.HEADS)
    slot = tl.load(slots + kv_head, mask=is_there & (kv_head >= 0), other=-1)
    heads, columns, masks = _load_rotated(
        x, weight, angles, head, is_there, head >= C.HEADS, is_v, eps,
        C.DIM, C.BLOCK_REST, C, PDL,
    )  # fmt: skip
    if tile * C.BLOCK_H < C.HEADS:
        q_row = q_out + (token * C.HEADS + head) * C.DIM
        store_heads(heads, columns, masks, q_row, is_q, 1.0, C.HALF)
    if (tile + 1) * C.BLOCK_H > C.HEADS:  # Most tiles have queries only and need less time so.
        is_written = slot >= 0
        k_row, v_row = k_cache + slot * C.DIM, v_cache + slot * C.DIM
        store_heads(heads, columns, masks, k_row, is_written & (is_v == 0), scales[0], C.HALF)
        store_heads(heads, columns, masks, v_row, is_written & is_v, scales[1], C.HALF)


@triton.jit
def _write_index(
    x, weight, angles, slots, rows, token, tile, q_out, cache, eps, rank, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and store a tile of the index heads at x."""
    head = tile * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    is_q, is_k = head < C.INDEX_HEADS, head == C.INDEX_HEADS
    if rows is None:  # the index key has the block and offset of the first KV head's key
        slot = tl.load(slots)
        block = slot // (C.KV_HEADS * C.BLOCK_SIZE)
        row = block // C.INDEX_RANKS * C.BLOCK_SIZE + slot % C.BLOCK_SIZE
        is_mine = (slot >= 0) & (block % C.INDEX_RANKS == rank)
    else:
        row = tl.load(rows + token)
        is_mine = row >= 0
    heads, columns, masks = _load_rotated(
        x, weight, angles, head, is_q | is_k, is_k, head < 0, eps,
        C.INDEX_DIM, C.BLOCK_INDEX_REST, C, PDL,
    )  # fmt: skip
    q_row = q_out + (token * C.INDEX_HEADS + head) * C.INDEX_DIM
    store_heads(heads, columns, masks, q_row, is_q, 1.0, C.HALF)
    k_row = cache + (row + head * 0) * C.INDEX_DIM
    store_heads(heads, columns, masks, k_row, is_k & is_mine, 1.0, C.HALF)


@triton.jit(do_not_specialize=["rank"])
def _head_norm_rope_write_kernel(
    projected,  # [T, (HEADS + 2 * KV_HEADS) * DIM + (INDEX_HEADS + 1) * INDEX_DIM]
    weight,  # [2, DIM] fp32, norm weights of queries and keys; None: no norm
    index_weight,  # [2, INDEX_DIM] fp32; all index arguments are None if there are no index heads
    cos,  # [T, 2 * HALF] fp32
    sin,
    q_out,  # [T, HEADS * DIM], written
    index_q_out,  # [T, INDEX_HEADS * INDEX_DIM], written
    k_cache,  # [blocks * KV_HEADS * BLOCK_SIZE, DIM], written
    v_cache,
    index_cache,  # [blocks * BLOCK_SIZE, INDEX_DIM], written
    slot_mapping,  # [T * KV_HEADS] int64, row indices in k_cache and v_cache
    index_rows,  # [T] int64, row indices in index_cache; None: derived from slot_mapping
    eps,
    inverse_k_scale,
    inverse_v_scale,
    stride,  # row stride of `projected`
    rank,  # index of this rank among INDEX_RANKS
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize, rotate and store BLOCK_H heads of one token."""
    TILES: tl.constexpr = triton.cdiv(C.HEADS + 2 * C.KV_HEADS, C.BLOCK_H)
    QKV: tl.constexpr = (C.HEADS + 2 * C.KV_HEADS) * C.DIM
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = projected + token * stride
    angles = (cos + token * (2 * C.HALF), sin + token * (2 * C.HALF))
    slots = slot_mapping + token * C.KV_HEADS
    if tile < TILES:
        _write_qkv(
            x, weight, angles, slots, token, tile, q_out, k_cache, v_cache, eps,
            (inverse_k_scale, inverse_v_scale), C, PDL,
        )  # fmt: skip
    elif C.INDEX_DIM > 0:
        _write_index(
            x + QKV, index_weight, angles, slots, index_rows, token, tile - TILES, index_q_out,
            index_cache, eps, rank, C, PDL,
        )  # fmt: skip


def launch_norm_rope_write(
    projected: Tensor,
    heads: int,
    norm: tuple[Tensor, float] | None,
    at: TokenPlaces,
    cache: KvCache,
    index: IndexHeads | None = None,
) -> Tensor:
    """Launch the kernel and return q [T, heads, head_dim]. `norm` is (weight, eps). Tokens with
    negative row indices are not cached.
    """
    (num_tokens, width), (_, kv_heads, block_size, head_dim) = projected.shape, cache.k.shape
    assert projected.stride(1) == 1 and cache.k.is_contiguous() and cache.v.is_contiguous()
    index_heads, index_dim = (0, 0) if index is None else index.q.shape[1:]
    assert width == (heads + 2 * kv_heads) * head_dim + (index_heads + 1) * index_dim
    q = projected.new_empty(num_tokens, heads, head_dim)
    if num_tokens == 0:
        return q
    half = at.cos.shape[-1] // 2
    tiles = triton.cdiv(heads + 2 * kv_heads, _BLOCK_H)
    if index is not None:
        tiles += triton.cdiv(index_heads + 1, _BLOCK_H)
    constants = HeadNormConstants(
        HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, INDEX_DIM=index_dim, INDEX_HEADS=index_heads,
        INDEX_RANKS=1 if index is None else index.ranks, BLOCK_SIZE=block_size, HALF=half,
        BLOCK_H=_BLOCK_H, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=block_of_rest(head_dim, half), BLOCK_INDEX_REST=block_of_rest(index_dim, half),
    )  # fmt: skip
    weight, eps = norm or (None, 0.0)
    index_weight, index_q, index_cache, rank, _, rows = index or (None, None, None, 0, 1, None)
    _head_norm_rope_write_kernel[(num_tokens, tiles)](
        projected, weight, index_weight, at.cos, at.sin, q, index_q, cache.k, cache.v, index_cache,
        at.rows, rows, eps, 1.0 / cache.scales[0], 1.0 / cache.scales[1],
        projected.stride(0), rank, constants,
        num_warps=4, **launch_options(projected.device),
    )  # fmt: skip
    return q


def head_norm_rope_write(
    qkv: Tensor, norm: HeadNorm, at: TokenPlaces, cache: KvCache, *, group: Collective | None = None
) -> Tensor:
    """Run `attention.head_norm_rope_write`; tokens with negative row indices are not cached."""
    own = (norm.weight, norm.eps)
    return launch_norm_rope_write(qkv, norm.heads, own, at, cache)


def rope_write(qkv: Tensor, at: TokenPlaces, cache: KvCache) -> Tensor:
    """Run `attention.rope_write`; tokens with negative row indices are not cached."""
    heads = qkv.shape[1] // cache.k.shape[3] - 2 * cache.k.shape[1]
    return launch_norm_rope_write(qkv, heads, None, at, cache)
