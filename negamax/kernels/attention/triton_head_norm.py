"""RMS norm of each head, rope and the write to the paged caches, in one launch, that of the index
heads of block-sparse attention included.

    projected    |   q heads   | k heads | v heads | index q heads | index k |    a token's row
                  norm and rope            as it is  norm and rope
    goes to       q              k_cache   v_cache   index_q         index_cache

Grid (T, tiles of BLOCK_H heads): no head waits for another one. The tiles of the index heads, whose
width may be another, come last. Tokens with negative slots are not written to the caches.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.spec import HeadNorm
from negamax.kernels.attention.triton_qk_norm import finite, to_cache_dtype
from negamax.kernels.block_sparse.choice import IndexShard
from negamax.kernels.block_sparse.spec import SparseHeadNorm
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.peers import Collective

_BLOCK_H = 8  # heads of a program: not measured


class HeadNormConstants(NamedTuple):
    """Constants of `_head_norm_rope_write_kernel`, one argument `C: tl.constexpr`."""

    HEADS: int
    KV_HEADS: int
    DIM: int
    INDEX_DIM: int  # 0: no index heads
    INDEX_HEADS: int
    INDEX_RANKS: int  # that hold a shard of the index keys each
    BLOCK_SIZE: int  # tokens of a block of the caches
    HALF: int  # of the rotated dimensions
    BLOCK_H: int
    BLOCK_HALF: int
    BLOCK_REST: int  # of the dimensions that are not rotated; likewise
    BLOCK_INDEX_REST: int


@triton.jit
def _normed_heads(
    x, weight, angles, head, is_there, is_key, is_plain, eps,
    DIM: tl.constexpr, BLOCK_REST: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The heads `head` [BLOCK_H] at x, normed by row `is_key` of weight [2, DIM] and rotated; as
    they are where `is_plain`. Three parts [BLOCK_H, columns] fp32 in a tuple, and of each its
    columns and its mask.
    """
    BLOCK_H: tl.constexpr = C.BLOCK_H  # Triton 3.6 takes no field of a struct in a shape
    cos, sin = angles
    i, j = tl.arange(0, C.BLOCK_HALF), 2 * C.HALF + tl.arange(0, BLOCK_REST)
    mask = is_there[:, None] & (i < C.HALF)[None, :]
    rest_mask = is_there[:, None] & (j < DIM)[None, :]
    columns, masks = (i, C.HALF + i, j), (mask, mask, rest_mask)
    # what the kernel before this one did not write is loaded while that one ends
    c = tl.load(cos + i, mask=i < C.HALF, other=0.0)[None, :]
    s = tl.load(sin + C.HALF + i, mask=i < C.HALF, other=0.0)[None, :]
    weights, parts, squares = (), (), tl.zeros([BLOCK_H], tl.float32)
    row = weight + is_key.to(tl.int32)[:, None] * DIM
    for part in tl.static_range(3):
        weights += (tl.load(row + columns[part][None, :], mask=masks[part], other=0.0),)
    launch_dependents_then_wait(PDL)
    for part in tl.static_range(3):
        at = x + head[:, None] * DIM + columns[part][None, :]
        value = finite(tl.load(at, mask=masks[part], other=0.0), x.dtype.element_ty)
        parts += (value,)
        squares += tl.sum(value * value, axis=1)
    norm = tl.rsqrt(squares / DIM + eps)[:, None]
    low, high = parts[0] * norm * weights[0], parts[1] * norm * weights[1]
    rotated = (low * c - high * s, high * c + low * s, parts[2] * norm * weights[2])
    results = ()
    for part in tl.static_range(3):
        results += (tl.where(is_plain[:, None], parts[part], rotated[part]),)
    return results, columns, masks


@triton.jit
def _store_heads(heads, columns, masks, to, mine, scale):
    """What `_normed_heads` returned, times `scale`, to the rows at the pointers `to` [BLOCK_H]."""
    dtype: tl.constexpr = to.dtype.element_ty
    for part in tl.static_range(3):
        x = to_cache_dtype(heads[part] * scale, dtype)
        tl.store(to[:, None] + columns[part][None, :], x, mask=masks[part] & mine[:, None])


@triton.jit
def _qkv_heads(
    x, weight, angles, slots, token, tile, q_out, k_cache, v_cache, eps, scales,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the heads of q, k and v at x."""
    head = tile * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    is_there = head < C.HEADS + 2 * C.KV_HEADS
    is_q, is_v = head < C.HEADS, head >= C.HEADS + C.KV_HEADS
    kv_head = tl.where(is_v, head - C.HEADS - C.KV_HEADS, head - C.HEADS)
    slot = tl.load(slots + kv_head, mask=is_there & (kv_head >= 0), other=-1)
    heads, columns, masks = _normed_heads(
        x, weight, angles, head, is_there, head >= C.HEADS, is_v, eps,
        C.DIM, C.BLOCK_REST, C, PDL,
    )  # fmt: skip
    q_row = q_out + (token * C.HEADS + head) * C.DIM
    _store_heads(heads, columns, masks, q_row, is_q, 1.0)
    is_written = slot >= 0
    k_row, v_row = k_cache + slot * C.DIM, v_cache + slot * C.DIM
    _store_heads(heads, columns, masks, k_row, is_written & (is_v == 0), scales[0])
    _store_heads(heads, columns, masks, v_row, is_written & is_v, scales[1])


@triton.jit
def _index_heads(
    x, weight, angles, slots, rows, token, tile, q_out, cache, eps, rank, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the index heads at x."""
    head = tile * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    is_q, is_k = head < C.INDEX_HEADS, head == C.INDEX_HEADS
    if rows is None:  # the same block as that of the first KV head, and there the same place
        slot = tl.load(slots)
        block = slot // (C.KV_HEADS * C.BLOCK_SIZE)
        row = block // C.INDEX_RANKS * C.BLOCK_SIZE + slot % C.BLOCK_SIZE
        is_mine = (slot >= 0) & (block % C.INDEX_RANKS == rank)
    else:
        row = tl.load(rows + token)
        is_mine = row >= 0
    heads, columns, masks = _normed_heads(
        x, weight, angles, head, is_q | is_k, is_k, head < 0, eps,
        C.INDEX_DIM, C.BLOCK_INDEX_REST, C, PDL,
    )  # fmt: skip
    q_row = q_out + (token * C.INDEX_HEADS + head) * C.INDEX_DIM
    _store_heads(heads, columns, masks, q_row, is_q, 1.0)
    k_row = cache + (row + head * 0) * C.INDEX_DIM
    _store_heads(heads, columns, masks, k_row, is_k & is_mine, 1.0)


@triton.jit(do_not_specialize=["rank"])
def _head_norm_rope_write_kernel(
    projected,  # [T, (HEADS + 2 * KV_HEADS) * DIM + (INDEX_HEADS + 1) * INDEX_DIM]
    weight,  # [2, DIM] fp32, of queries and of keys
    index_weight,  # [2, INDEX_DIM] fp32, None without index heads; likewise the two below
    cos,  # [T, 2 * HALF] fp32
    sin,
    q_out,  # [T, HEADS * DIM], written
    index_q_out,  # [T, INDEX_HEADS * INDEX_DIM], written
    k_cache,  # [blocks * KV_HEADS * BLOCK_SIZE, DIM], written
    v_cache,
    index_cache,  # [blocks * BLOCK_SIZE, INDEX_DIM], written
    slot_mapping,  # [T * KV_HEADS] int64, rows of k_cache and v_cache
    index_rows,  # [T] int64, rows of index_cache; None: as follows from slot_mapping
    eps,
    inverse_k_scale,
    inverse_v_scale,
    rank,  # of the INDEX_RANKS
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one token."""
    TILES: tl.constexpr = triton.cdiv(C.HEADS + 2 * C.KV_HEADS, C.BLOCK_H)
    QKV: tl.constexpr = (C.HEADS + 2 * C.KV_HEADS) * C.DIM
    INDEX: tl.constexpr = (C.INDEX_HEADS + 1) * C.INDEX_DIM
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = projected + token * (QKV + INDEX)
    angles = (cos + token * (2 * C.HALF), sin + token * (2 * C.HALF))
    slots = slot_mapping + token * C.KV_HEADS
    if tile < TILES:
        _qkv_heads(
            x, weight, angles, slots, token, tile, q_out, k_cache, v_cache, eps,
            (inverse_k_scale, inverse_v_scale), C, PDL,
        )  # fmt: skip
    elif C.INDEX_DIM > 0:
        _index_heads(
            x + QKV, index_weight, angles, slots, index_rows, token, tile - TILES, index_q_out,
            index_cache, eps, rank, C, PDL,
        )  # fmt: skip


def _launch(
    projected: Tensor,
    norm: HeadNorm | SparseHeadNorm,
    index: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None],
    angles: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_scales: tuple[float, float],
    index_rows: Tensor | None = None,
) -> Tensor:
    """`index`: weight, index_q and index_cache -> q."""
    index_weight, index_q, index_cache = index
    (num_tokens, width), (_, kv_heads, block_size, head_dim) = projected.shape, caches[0].shape
    assert projected.is_contiguous() and all(cache.is_contiguous() for cache in caches)
    index_dim, index_heads, shard = 0, 0, IndexShard()
    if isinstance(norm, SparseHeadNorm):
        index_dim, index_heads, shard = norm.index_weight.shape[1], norm.index_heads, norm.shard
    assert width == (norm.heads + 2 * kv_heads) * head_dim + (index_heads + 1) * index_dim
    q = projected.new_empty(num_tokens, norm.heads, head_dim)
    if num_tokens == 0:
        return q
    half = angles[0].shape[-1] // 2
    tiles = triton.cdiv(norm.heads + 2 * kv_heads, _BLOCK_H)
    if index_dim:
        tiles += triton.cdiv(index_heads + 1, _BLOCK_H)
    _head_norm_rope_write_kernel[(num_tokens, tiles)](
        projected,
        norm.weight,
        index_weight,
        *angles,
        q,
        index_q,
        *caches,
        index_cache,
        slot_mapping,
        index_rows,
        norm.eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        shard.rank,
        HeadNormConstants(
            HEADS=norm.heads,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            INDEX_DIM=index_dim,
            INDEX_HEADS=index_heads,
            INDEX_RANKS=shard.ranks,
            BLOCK_SIZE=block_size,
            HALF=half,
            BLOCK_H=_BLOCK_H,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=_block_of_rest(head_dim, half),
            BLOCK_INDEX_REST=_block_of_rest(index_dim, half),
        ),
        num_warps=4,
        **launch_options(projected.device),
    )
    return q


def _block_of_rest(width: int, half: int) -> int:
    return int(triton.next_power_of_2(max(1, width - 2 * half)))


def head_norm_rope_write(
    qkv: Tensor,
    norm: HeadNorm,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    group: Collective | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """As the definition, but `qkv` is left as it is, and tokens whose slots are negative are not
    written to the cache.
    """
    no_index = (None, None, None)
    caches = (k_cache, v_cache)
    return _launch(qkv, norm, no_index, (cos, sin), caches, slot_mapping, kv_scales)


def sparse_norm_rope_write(
    projected: Tensor,
    norm: SparseHeadNorm,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    *,
    index_rows: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """As the definition, but for the same two things as `head_norm_rope_write`."""
    index_q = projected.new_empty(projected.shape[0], norm.index_heads, norm.index_weight.shape[1])
    index = (norm.index_weight, index_q, index_cache)
    caches = (k_cache, v_cache)
    q = _launch(projected, norm, index, (cos, sin), caches, slot_mapping, kv_scales, index_rows)
    return q, index_q
