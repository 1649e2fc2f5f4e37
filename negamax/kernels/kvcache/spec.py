"""Writing new keys and values into the paged cache.

A layer's cache is two tensors [num_blocks, kv_heads, block_size, head_dim]. Token slot s lives in block s // block_size at
offset s % block_size. Within a block the tokens of one head are adjacent, so that gathering the blocks of a sequence gives
each head a contiguous [tokens, head_dim] matrix, which is what matrix products read fastest.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from negamax.kernels.op import Case, Cost, Kernel, Op, num_bytes, randn, rounding_tolerance


def cache_rows(slots: Tensor, *, kv_heads: int, block_size: int) -> Tensor:
    """slots [T] int64 -> [T * kv_heads] int64: row of (token, head) in the cache seen as [-1, head_dim]."""
    numbers = slots.numpy(force=True)
    offsets = numbers % block_size
    first_head = (numbers - offsets) * kv_heads + offsets  # [T]
    rows = first_head[:, None] + np.arange(0, kv_heads * block_size, block_size)
    return torch.from_numpy(rows.ravel()).to(slots.device)


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor) -> None:
    """k, v [T, kv_heads, head_dim] into the caches at `rows` [T * kv_heads] int64 (from `cache_rows`)."""
    head_dim = k.shape[-1]
    k_cache.view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim))
    v_cache.view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim))


def _cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, kv_heads, block_size, head_dim in ((0, 1, 16, 8), (1, 2, 16, 128), (21, 3, 5, 12)):
        num_blocks = 8
        cache = (num_blocks, kv_heads, block_size, head_dim)
        tensors = {
            "k": randn(num_tokens, kv_heads, head_dim, dtype=dtype, generator=generator),
            "v": randn(num_tokens, kv_heads, head_dim, dtype=dtype, generator=generator),
            "k_cache": randn(*cache, dtype=dtype, generator=generator),
            "v_cache": randn(*cache, dtype=dtype, generator=generator),
            "slots": torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
        }
        cases.append(Case(f"T={num_tokens} kv_heads={kv_heads} block_size={block_size} head_dim={head_dim}", tensors))
    return cases


def _apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    k_cache, v_cache = t["k_cache"].clone(), t["v_cache"].clone()
    _, kv_heads, block_size, _ = k_cache.shape
    kernel.run(t["k"], t["v"], k_cache, v_cache, cache_rows(t["slots"], kv_heads=kv_heads, block_size=block_size))
    return k_cache, v_cache


def _cost(case: Case) -> Cost:
    return Cost(num_bytes=2 * num_bytes(case.tensors["k"], case.tensors["v"]), flops=0)


OPS = (
    Op(
        name="kvcache.write",
        summary="store the keys and values of new tokens in the paged cache",
        reference=Kernel("kvcache.write", "reference", write),
        cases=_cases,
        apply=_apply,
        tolerance=rounding_tolerance(scale=0.0, reason="a copy"),
        cost=_cost,
    ),
)
