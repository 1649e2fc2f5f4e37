"""Run QK norm over all heads, rope and the cache write in one launch, with a program per token.

    qkv [T, (HEADS + 2 * KV_HEADS) * DIM]    |   q heads   | k heads | v heads |
                                              norm and rope            copy
    q_out [T, HEADS * DIM]                   |   q heads   |
    caches [blocks * KV_HEADS * BLOCK_SIZE, DIM], rows by slot_mapping [T * KV_HEADS], -1: none

The norm is over all heads of all ranks. The ranks sum the squares inside the kernel by the LL
protocol, or by an all-reduce of the group between two launches. `triton_heads.py` loads and stores
the tiles of a head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.op import QkNorm
from negamax.kernels.attention.triton_heads import (
    block_of_rest,
    finite,
    load_angles,
    load_heads,
    rotate,
    split_columns,
    store_heads,
    to_cache_dtype,
)
from negamax.kernels.collectives.triton_ll import load_peer_base, poll, push
from negamax.kernels.kvcache.op import KvCache, TokenPlaces
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.peers import Collective


class QkNormConstants(NamedTuple):
    """Constants of `_qk_norm_rope_write_kernel`, passed as one argument `C: tl.constexpr`."""

    HEADS: int
    KV_HEADS: int
    DIM: int
    HALF: int  # half of the number of rotated dimensions
    BLOCK_H: int  # HEADS + KV_HEADS, padded to a power of two like all BLOCK sizes
    BLOCK_KV: int
    BLOCK_HALF: int
    BLOCK_REST: int  # number of unrotated dimensions, padded to a power of two; 0: all are rotated
    BLOCK_D: int
    HAS_SUMS: bool  # whether `sums` contains the sums of squares of all ranks
    WORLD: int  # number of ranks that exchange sums of squares in the kernel


@triton.jit
def _sum_q_and_k(squares, head, HEADS: tl.constexpr):
    """Return two sums of `squares` [heads]: over the query heads, and over the key heads."""
    return tl.sum(tl.where(head < HEADS, squares, 0.0), axis=0), tl.sum(
        tl.where(head < HEADS, 0.0, squares), axis=0
    )


@triton.jit
def _sum_over_ranks(q_sum, k_sum, addresses, flags, token, region_rows, rank, WORLD: tl.constexpr):
    """Sum q_sum and k_sum over all ranks, in the same order on every rank."""
    flag = tl.load(flags + token) + 1
    row = ((flag & 1) * region_rows + token).to(tl.int64) * (WORLD * 2)
    word = tl.arange(0, 2)
    bits = tl.where(word == 0, q_sum, k_sum).to(tl.int32, bitcast=True)
    push(addresses, row + rank * 2, word, bits, flag, word < 2, WORLD)
    own = load_peer_base(addresses, rank)
    index = tl.arange(0, WORLD * 2)
    sums = poll(own + row, index, flag, index < WORLD * 2, addresses + WORLD).to(
        tl.float32, bitcast=True
    )
    tl.debug_barrier()
    tl.store(flags + token, flag)
    return tl.sum(tl.where(index % 2 == 0, sums, 0.0), axis=0), tl.sum(
        tl.where(index % 2 == 1, sums, 0.0), axis=0
    )


@triton.jit
def _sums_kernel(
    qkv,
    sums,  # [T, 2] fp32, written: sums of squares of a token's q and k
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the squares of one token's q and of its k. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (head < HEADS + KV_HEADS)[:, None] & (column < DIM)[None, :]
    x = tl.load(
        qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + column[None, :],
        mask=mask,
        other=0.0,
    )
    x = finite(x, qkv.dtype.element_ty)
    q_sum, k_sum = _sum_q_and_k(tl.sum(x * x, axis=1), head, HEADS)
    tl.store(sums + token * 2, q_sum)
    tl.store(sums + token * 2 + 1, k_sum)


@triton.jit
def _write_v(v, v_cache, slot_mapping, inverse_scale, C: tl.constexpr):
    """Write a token's values v [KV_HEADS, DIM] to their slots of the cache."""
    head, column = tl.arange(0, C.BLOCK_KV), tl.arange(0, C.BLOCK_D)
    slot = tl.load(slot_mapping + head, mask=head < C.KV_HEADS, other=-1)
    mask = (slot >= 0)[:, None] & (column < C.DIM)[None, :]
    x = tl.load(v + head[:, None] * C.DIM + column[None, :], mask=mask, other=0.0)
    x = finite(x, v.dtype.element_ty)
    to = v_cache + slot[:, None] * C.DIM + column[None, :]
    tl.store(to, to_cache_dtype(x * inverse_scale, v_cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["region_rows", "rank"])
def _qk_norm_rope_write_kernel(
    qkv,  # [T, (HEADS + 2 * KV_HEADS) * DIM]
    weight,  # [(HEADS + KV_HEADS) * DIM], norm weights of q, then of k
    cos,  # [T, 2 * HALF] fp32
    sin,
    q_out,  # [T, HEADS * DIM], written
    k_cache,  # [blocks * KV_HEADS * BLOCK_SIZE, DIM], written
    v_cache,
    slot_mapping,  # [T * KV_HEADS] int64, indices of rows of the caches
    sums,  # [T, 2] fp32, sums of squares of q and k on all ranks, read if HAS_SUMS
    addresses,  # `PeerRegion.addresses`, read if WORLD > 1
    flags,
    region_rows,
    rank,
    q_count,
    k_count,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize, rotate and store the heads of one token. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty
    qkv += token * ((C.HEADS + 2 * C.KV_HEADS) * C.DIM)
    q_out += token * (C.HEADS * C.DIM)
    slot_mapping += token * C.KV_HEADS
    head = tl.arange(0, C.BLOCK_H)
    valid = head < C.HEADS + C.KV_HEADS
    columns, masks = split_columns(valid, C.DIM, C.HALF, C.BLOCK_HALF, C.BLOCK_REST)
    # load the slots before waiting for the predecessor kernel, which does not write them
    slot = tl.load(slot_mapping + head - C.HEADS, mask=(head >= C.HEADS) & valid, other=-1)
    offsets = ()
    for part in tl.static_range(len(columns)):
        offsets += (head[:, None] * C.DIM + columns[part],)
    weights = load_heads(weight, offsets, masks, C.HALF)
    angles = load_angles(cos + token * (2 * C.HALF), sin + token * (2 * C.HALF), C.HALF,
                         C.BLOCK_HALF)  # fmt: skip
    launch_dependents_then_wait(PDL)
    loaded, heads = load_heads(qkv, offsets, masks, C.HALF), ()
    v = qkv + (C.HEADS + C.KV_HEADS) * C.DIM
    _write_v(v, v_cache, slot_mapping, inverse_v_scale, C)
    for part in tl.static_range(len(loaded)):
        heads += (finite(loaded[part], dtype),)
    squares = tl.sum(heads[0] * heads[0] + heads[1] * heads[1], axis=1)
    if C.BLOCK_REST > 0:
        squares += tl.sum(heads[2] * heads[2], axis=1)
    if C.HAS_SUMS:
        q_sum, k_sum = tl.load(sums + token * 2), tl.load(sums + token * 2 + 1)
    else:
        q_sum, k_sum = _sum_q_and_k(squares, head, C.HEADS)
        if C.WORLD > 1:
            q_sum, k_sum = _sum_over_ranks(
                q_sum, k_sum, addresses, flags, token, region_rows, rank, C.WORLD
            )
    norm = tl.where(
        head < C.HEADS, tl.rsqrt(q_sum / q_count + eps), tl.rsqrt(k_sum / k_count + eps)
    )[:, None]
    normed = ()
    for part in tl.static_range(len(heads)):
        normed += (heads[part] * norm * weights[part],)
    rotated = rotate(normed, angles)
    store_heads(rotated, columns, masks, q_out + head * C.DIM, head < C.HEADS, 1.0, C.HALF)
    is_key = (head >= C.HEADS) & (slot >= 0)
    store_heads(rotated, columns, masks, k_cache + slot * C.DIM, is_key, inverse_k_scale, C.HALF)


def qk_norm_rope_write(
    qkv: Tensor, norm: QkNorm, at: TokenPlaces, cache: KvCache, *, group: Collective | None = None
) -> Tensor:
    """Run `attention.qk_norm_rope_write`; `qkv` is not changed. Tokens with negative slots are not
    cached. One launch suffices for several ranks if the ranks' symmetric memory has a row for every
    token. If the memory has fewer rows than tokens, an all-reduce runs between two launches.
    """
    assert qkv.is_contiguous() and at.cos.is_contiguous() and at.sin.is_contiguous()
    num_tokens, head_dim, half = qkv.shape[0], cache.k.shape[-1], at.cos.shape[-1] // 2
    heads, kv_heads = norm.heads, norm.kv_heads
    q = qkv.new_empty(num_tokens, heads, head_dim)
    if num_tokens == 0:
        return q
    block_h = triton.next_power_of_2(heads + kv_heads)
    block_d = triton.next_power_of_2(head_dim)
    warps = 8 if block_h * block_d > 4096 else 4
    sums, region, world, rank = None, None, 1, 0
    if group is not None and group.size > 1:
        if group.peers is not None and num_tokens <= group.peers.stats.rows:
            region, world, rank = group.peers.stats, group.size, group.rank
        else:
            sums = torch.empty(num_tokens, 2, dtype=torch.float32, device=qkv.device)
            _sums_kernel[(num_tokens,)](
                qkv, sums, heads, kv_heads, head_dim, block_h, block_d, num_warps=warps
            )
            sums = group.all_reduce(sums)
    constants = QkNormConstants(
        HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, HALF=half, BLOCK_H=block_h,
        BLOCK_KV=triton.next_power_of_2(kv_heads), BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=block_of_rest(head_dim, half), BLOCK_D=block_d, HAS_SUMS=sums is not None,
        WORLD=world,
    )  # fmt: skip
    exchange = (None, None, 0) if region is None else (region.addresses, region.flags, region.rows)
    _qk_norm_rope_write_kernel[(num_tokens,)](
        qkv, norm.weight, at.cos, at.sin, q, cache.k, cache.v, at.rows, sums, *exchange, rank,
        norm.q_count, norm.k_count, norm.eps, 1.0 / cache.scales[0], 1.0 / cache.scales[1],
        constants, num_warps=warps, **launch_options(qkv.device),
    )  # fmt: skip
    return q
