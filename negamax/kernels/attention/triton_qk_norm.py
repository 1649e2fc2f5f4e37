"""QK norm, rope and the write to the paged cache, in one launch; its sums of squares cross the
ranks inside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels import formats
from negamax.kernels.attention.spec import QkNorm
from negamax.kernels.collectives.triton import copy_of, poll, push
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.peers import Collective

E4M3_MAX = tl.constexpr(formats.E4M3_MAX)


@triton.jit
def _finite(x, dtype: tl.constexpr):
    """x in fp32, NaN as 0 and infinities as the largest number of `dtype`."""
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
    x = x.to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -largest), largest)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """x in the dtype of a cache; FP8 saturates."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
    return x.to(dtype)


@triton.jit
def _q_and_k(rows, head, HEADS: tl.constexpr):
    """The sums of the query heads' and of the key heads' `rows` [heads]."""
    return tl.sum(tl.where(head < HEADS, rows, 0.0), axis=0), tl.sum(
        tl.where(head < HEADS, 0.0, rows), axis=0
    )


@triton.jit
def _over_ranks(q_sum, k_sum, addresses, epochs, token, region_rows, rank, WORLD: tl.constexpr):
    """Both sums over all ranks, exchanged through the peers' memory; the same order of summation on
    every rank.
    """
    epoch = tl.load(epochs + token) + 1
    row = ((epoch & 1) * region_rows + token).to(tl.int64) * (WORLD * 2)
    word = tl.arange(0, 2)
    bits = tl.where(word == 0, q_sum, k_sum).to(tl.int32, bitcast=True)
    push(addresses, row + rank * 2, word, bits, epoch, word < 2, WORLD)
    own = copy_of(addresses, rank)
    index = tl.arange(0, WORLD * 2)
    got = poll(own + row, index, epoch, index < WORLD * 2, addresses + WORLD).to(
        tl.float32, bitcast=True
    )
    tl.debug_barrier()
    tl.store(epochs + token, epoch)
    return tl.sum(tl.where(index % 2 == 0, got, 0.0), axis=0), tl.sum(
        tl.where(index % 2 == 1, got, 0.0), axis=0
    )


@triton.jit
def _sums_kernel(
    qkv,
    sums,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sums [T, 2] fp32: squares of a token's q and of its k."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (head < HEADS + KV_HEADS)[:, None] & (column < DIM)[None, :]
    x = tl.load(
        qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + column[None, :],
        mask=mask,
        other=0.0,
    )
    x = _finite(x, qkv.dtype.element_ty)
    q_sum, k_sum = _q_and_k(tl.sum(x * x, axis=1), head, HEADS)
    tl.store(sums + token * 2, q_sum)
    tl.store(sums + token * 2 + 1, k_sum)


@triton.jit
def _token_sums(
    squares, head, sums, addresses, epochs, token, region_rows, rank,
    HEADS: tl.constexpr, SUMS: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Sums of squares of a token's q and of its k over all ranks: those in `sums`, or from
    `squares` [heads] of this rank.
    """
    if SUMS:
        q_sum, k_sum = tl.load(sums + token * 2), tl.load(sums + token * 2 + 1)
    else:
        q_sum, k_sum = _q_and_k(squares, head, HEADS)
        if WORLD > 1:
            q_sum, k_sum = _over_ranks(
                q_sum, k_sum, addresses, epochs, token, region_rows, rank, WORLD
            )
    return q_sum, k_sum


@triton.jit
def _rows_out(
    x,
    q_out,
    k_rows,
    cache_row,
    head,
    column,
    mask,
    inverse_k_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """x [heads of q and k, columns]: query heads to q_out, key heads to their rows of the cache."""
    tl.store(
        q_out + head[:, None] * DIM + column[None, :],
        x.to(q_out.dtype.element_ty),
        mask=mask & (head < HEADS)[:, None],
    )
    keys = mask & ((head >= HEADS) & (cache_row >= 0))[:, None]
    tl.store(
        k_rows + column[None, :], _stored(x * inverse_k_scale, k_rows.dtype.element_ty), mask=keys
    )


@triton.jit
def _values_out(
    v,
    v_cache,
    cache_rows,
    inverse_scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A token's values v [kv_heads, DIM] to their rows of the cache."""
    head, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row = tl.load(cache_rows + head, mask=head < KV_HEADS, other=-1)
    mask = (row >= 0)[:, None] & (column < DIM)[None, :]
    x = _finite(
        tl.load(v + head[:, None] * DIM + column[None, :], mask=mask, other=0.0), v.dtype.element_ty
    )
    to = v_cache + row[:, None] * DIM + column[None, :]
    tl.store(to, _stored(x * inverse_scale, v_cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["region_rows", "rank"])
def _qk_norm_rope_write_kernel(
    qkv,
    weight,
    cos,
    sin,
    q_out,
    k_cache,
    v_cache,
    cache_rows,
    sums,  # [T, 2] fp32 where SUMS
    addresses,  # of the peers' regions where WORLD > 1
    epochs,
    region_rows,
    rank,
    q_count,
    k_count,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,  # heads + kv_heads, padded; likewise the three below
    KV_ROWS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,  # of the dimensions that are not rotated; 0: there are none
    V_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    WORLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. Its heads are read as the two halves of the rotated dimensions and the rest."""
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty
    qkv += token * ((HEADS + 2 * KV_HEADS) * DIM)
    q_out += token * (HEADS * DIM)
    cache_rows += token * KV_HEADS
    head = tl.arange(0, ROWS)
    valid = head < HEADS + KV_HEADS
    i = tl.arange(0, HALF_COLUMNS)
    half_mask = valid[:, None] & (i < HALF)[None, :]
    low_at = head[:, None] * DIM + i[None, :]
    # What the kernel before this one did not write is asked for while that one ends.
    cache_row = tl.load(cache_rows + head - HEADS, mask=(head >= HEADS) & valid, other=-1)
    low_weight = tl.load(weight + low_at, mask=half_mask, other=0.0)
    high_weight = tl.load(weight + low_at + HALF, mask=half_mask, other=0.0)
    c = tl.load(cos + token * (2 * HALF) + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * (2 * HALF) + HALF + i, mask=i < HALF, other=0.0)[None, :]
    if REST_COLUMNS > 0:
        j = tl.arange(0, REST_COLUMNS)
        rest_mask = valid[:, None] & (j < DIM - 2 * HALF)[None, :]
        rest_at = head[:, None] * DIM + (2 * HALF + j)[None, :]
        rest_weight = tl.load(weight + rest_at, mask=rest_mask, other=0.0)
    launch_dependents_then_wait(PDL)
    low = tl.load(qkv + low_at, mask=half_mask, other=0.0)
    high = tl.load(qkv + low_at + HALF, mask=half_mask, other=0.0)
    if REST_COLUMNS > 0:
        rest = tl.load(qkv + rest_at, mask=rest_mask, other=0.0)
    v_at = qkv + (HEADS + KV_HEADS) * DIM
    _values_out(v_at, v_cache, cache_rows, inverse_v_scale, KV_HEADS, DIM, KV_ROWS, V_COLUMNS)
    low, high = _finite(low, dtype), _finite(high, dtype)
    if REST_COLUMNS > 0:
        rest = _finite(rest, dtype)
    squares = tl.sum(low * low + high * high, axis=1)
    if REST_COLUMNS > 0:
        squares += tl.sum(rest * rest, axis=1)
    q_sum, k_sum = _token_sums(
        squares, head, sums, addresses, epochs, token, region_rows, rank, HEADS, SUMS, WORLD
    )
    norm = tl.where(head < HEADS, tl.rsqrt(q_sum / q_count + eps), tl.rsqrt(k_sum / k_count + eps))[
        :, None
    ]
    low, high = low * norm * low_weight, high * norm * high_weight
    k_row = k_cache + cache_row[:, None] * DIM
    _rows_out(
        low * c - high * s, q_out, k_row, cache_row, head, i, half_mask, inverse_k_scale, HEADS, DIM
    )
    _rows_out(
        high * c + low * s,
        q_out + HALF,
        k_row + HALF,
        cache_row,
        head,
        i,
        half_mask,
        inverse_k_scale,
        HEADS,
        DIM,
    )
    if REST_COLUMNS > 0:
        rest = rest * norm * rest_weight
        _rows_out(
            rest,
            q_out + 2 * HALF,
            k_row + 2 * HALF,
            cache_row,
            head,
            j,
            rest_mask,
            inverse_k_scale,
            HEADS,
            DIM,
        )


def qk_norm_rope_write(
    qkv: Tensor,
    norm: QkNorm,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    *,
    group: Collective | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """As the definition, but `qkv` is left as it is, and tokens whose `rows` are negative are not
    written to the cache.

    With several ranks: one launch where their memory has a row for every token, else the sums go
    through the group between two.
    """
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    num_tokens, head_dim, half = qkv.shape[0], k_cache.shape[-1], cos.shape[-1] // 2
    heads, kv_heads = norm.heads, norm.kv_heads
    q = qkv.new_empty(num_tokens, heads, head_dim)
    if num_tokens == 0:
        return q
    padded = triton.next_power_of_2(heads + kv_heads)
    columns = triton.next_power_of_2(head_dim)
    warps = 8 if padded * columns > 4096 else 4
    sums, region, world, rank = None, None, 1, 0
    if group is not None and group.size > 1:
        if group.peers is not None and num_tokens <= group.peers.stats.rows:
            region, world, rank = group.peers.stats, group.size, group.rank
        else:
            sums = torch.empty(num_tokens, 2, dtype=torch.float32, device=qkv.device)
            _sums_kernel[(num_tokens,)](
                qkv, sums, heads, kv_heads, head_dim, padded, columns, num_warps=warps
            )
            sums = group.all_reduce(sums)
    _qk_norm_rope_write_kernel[(num_tokens,)](
        qkv,
        norm.weight,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        rows,
        sums,
        region.addresses if region else None,
        region.epochs if region else None,
        region.rows if region else 0,
        rank,
        norm.q_count,
        norm.k_count,
        norm.eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        HALF=half,
        ROWS=padded,
        KV_ROWS=triton.next_power_of_2(kv_heads),
        HALF_COLUMNS=triton.next_power_of_2(half),
        REST_COLUMNS=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        V_COLUMNS=columns,
        SUMS=sums is not None,
        WORLD=world,
        num_warps=warps,
        **launch_options(qkv.device),
    )
    return q
