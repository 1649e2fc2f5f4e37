"""Rope and the write to the paged caches, for attention without norms, in one launch where PyTorch
takes two dozen. Grid (T, heads of q, k and v): one program per token and head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.triton_qk_norm import finite, to_cache_dtype
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options


@triton.jit
def _store(to, x, scale, mask):
    """x * scale to a cache."""
    tl.store(to, to_cache_dtype(x * scale, to.dtype.element_ty), mask=mask)


@triton.jit
def _rope_write_kernel(
    qkv,  # [T, (HEADS + 2 * KV_HEADS) * 2 * HALF]
    cos,  # [T, 2 * HALF] fp32
    sin,
    q_out,  # [T, HEADS * 2 * HALF], written
    k_cache,  # [blocks * KV_HEADS * block size, 2 * HALF], written
    v_cache,
    slot_mapping,  # [T * KV_HEADS] int64, rows of k_cache and v_cache
    inverse_k_scale,
    inverse_v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    mask = i < HALF
    c = tl.load(cos + token * 2 * HALF + i, mask=mask, other=0.0)
    s = tl.load(sin + token * 2 * HALF + HALF + i, mask=mask, other=0.0)
    launch_dependents_then_wait(PDL)
    x = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    low = finite(tl.load(x + i, mask=mask, other=0.0), qkv.dtype.element_ty)
    high = finite(tl.load(x + HALF + i, mask=mask, other=0.0), qkv.dtype.element_ty)
    turned_low, turned_high = low * c - high * s, high * c + low * s
    if head < HEADS:
        q = q_out + (token * HEADS + head) * 2 * HALF
        tl.store(q + i, turned_low.to(q_out.dtype.element_ty), mask=mask)
        tl.store(q + HALF + i, turned_high.to(q_out.dtype.element_ty), mask=mask)
    elif head < HEADS + KV_HEADS:
        slot = tl.load(slot_mapping + token * KV_HEADS + head - HEADS)
        _store(k_cache + slot * 2 * HALF + i, turned_low, inverse_k_scale, mask & (slot >= 0))
        _store(
            k_cache + slot * 2 * HALF + HALF + i, turned_high, inverse_k_scale, mask & (slot >= 0)
        )
    else:
        slot = tl.load(slot_mapping + token * KV_HEADS + head - HEADS - KV_HEADS)
        _store(v_cache + slot * 2 * HALF + i, low, inverse_v_scale, mask & (slot >= 0))
        _store(v_cache + slot * 2 * HALF + HALF + i, high, inverse_v_scale, mask & (slot >= 0))


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """As the definition, but tokens whose slots are negative are not written to the cache."""
    (num_tokens, width), (_, kv_heads, _, head_dim) = qkv.shape, k_cache.shape
    assert qkv.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert cos.shape[-1] == head_dim
    heads = width // head_dim - 2 * kv_heads
    q = qkv.new_empty(num_tokens, heads, head_dim)
    if num_tokens:
        half = head_dim // 2
        _rope_write_kernel[(num_tokens, heads + 2 * kv_heads)](
            qkv, cos, sin, q, k_cache, v_cache, slot_mapping,
            1.0 / kv_scales[0], 1.0 / kv_scales[1],
            HEADS=heads, KV_HEADS=kv_heads, HALF=half, BLOCK_HALF=triton.next_power_of_2(half),
            num_warps=1, **launch_options(qkv.device),
        )  # fmt: skip
    return q
