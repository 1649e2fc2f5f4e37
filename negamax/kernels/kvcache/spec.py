"""Where tokens lie in the paged cache, and writing their keys and values there.

A layer's cache is two tensors [num_blocks, kv_heads, block_size, head_dim]. Token slot s lives in
block s // block_size at offset s % block_size. Within a block the tokens of one head are adjacent,
so that gathering the blocks of a sequence gives each head a contiguous [tokens, head_dim] matrix,
which is what matrix products read fastest. A cache starts as zeros and only ever holds finite
values: kernels read past the end of a sequence and give what they find there a probability of 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from negamax.kernels.formats import E4M3_MAX
from negamax.kernels.op import (
    FLOAT_DTYPES,
    AnyKernel,
    Case,
    Cost,
    Kernel,
    Op,
    Tolerance,
    num_bytes,
)
from negamax.kernels.rope.spec import cos_sin, signed_frequencies
from negamax.kernels.signatures import LOCATE

FP8 = torch.float8_e4m3fn


def cache_rows(slots: Tensor, *, kv_heads: int, block_size: int) -> Tensor:
    """slots [T] int64 -> [T * kv_heads] int64: row of (token, head) in the cache seen as [-1,
    head_dim].

    Slot -1 (a token of padding) gives negative rows, which GPU kernels skip.
    """
    if slots.device.type != "cpu":
        offsets = slots % block_size
        heads = torch.arange(0, kv_heads * block_size, block_size, device=slots.device)
        return ((slots - offsets) * kv_heads + offsets).unsqueeze(1).add(heads).view(-1)
    numbers = slots.numpy(force=True)
    within = numbers % block_size
    first_head = (numbers - within) * kv_heads + within  # [T]
    rows = first_head[:, None] + np.arange(0, kv_heads * block_size, block_size)
    return torch.from_numpy(rows.ravel()).to(slots.device)


def locate(
    positions: Tensor,
    token_slots: Tensor,
    block_tables: Tensor,
    frequencies: Tensor,
    *,
    kv_heads: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What every layer of a step must know of its T tokens: cos, sin [T, 1, rotary_dim] fp32, and
    their cache rows [T * kv_heads] int64 (`cache_rows`).

    positions, token_slots [T] int64: token t is at positions[t] of the sequence whose blocks are
    block_tables[token_slots[t]]; frequencies [rotary_dim] from `rope.spec.signed_frequencies`.
    """
    blocks = block_tables[token_slots, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    return (
        *cos_sin(positions, frequencies),
        cache_rows(slots, kv_heads=kv_heads, block_size=block_size),
    )


def write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """k, v [T, kv_heads, head_dim] into the caches at `rows` [T * kv_heads] int64 (from
    `cache_rows`).

    Stored are k / kv_scales[0] and v / kv_scales[1], rounded to the dtype of the cache; FP8
    saturates.
    """
    store(k, k_cache, rows, scale=kv_scales[0])
    store(v, v_cache, rows, scale=kv_scales[1])


def store(x: Tensor, cache: Tensor, rows: Tensor, *, scale: float = 1.0) -> None:
    """x [T, heads, width] into one cache at `rows` [T * heads], as `write` does."""
    width = x.shape[-1]
    if scale != 1.0:
        x = x.float() / scale
    if cache.dtype == FP8:  # copied as bytes: index_copy_ does not take FP8
        x, cache = (
            x.float().clamp(-E4M3_MAX, E4M3_MAX).to(FP8).view(torch.uint8),
            cache.view(torch.uint8),
        )
    cache.view(-1, width).index_copy_(0, rows, x.reshape(-1, width).to(cache.dtype))


def _locate_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, rows, kv_heads, block_size, rotary_dim in (
        (0, 1, 1, 16, 8),
        (1, 3, 2, 64, 64),
        (37, 5, 3, 5, 10),
    ):
        tensors = {
            "positions": torch.randint(0, 12 * block_size, (num_tokens,), generator=generator),
            "token_slots": torch.randint(0, rows, (num_tokens,), generator=generator),
            "block_tables": torch.randint(
                0, 1000, (rows, 12), generator=generator, dtype=torch.int32
            ),
            "frequencies": signed_frequencies(rotary_dim, 5e6),
        }
        label = (
            f"T={num_tokens} kv_heads={kv_heads} block_size={block_size} rotary_dim={rotary_dim}"
        )
        cases.append(Case(label, tensors, {"kv_heads": kv_heads, "block_size": block_size}))
    return cases


def _locate_apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = kernel.run(**case.tensors, **case.numbers)
    return outputs


def _locate_cost(case: Case) -> Cost:
    t = case.tensors
    num_tokens = t["positions"].shape[0]
    out_bytes = num_tokens * (8 * t["frequencies"].shape[0] + 8 * case.numbers["kv_heads"])
    return Cost(num_bytes=num_bytes(t["positions"], t["token_slots"]) + out_bytes, flops=0)


OPS = (
    Op(
        name=LOCATE,
        summary="rope angles and cache rows of a step's tokens",
        reference=Kernel(LOCATE, "reference", locate),
        cases=_locate_cases,
        apply=_locate_apply,
        tolerance={
            dtype: Tolerance(2e-5, 0.0, "angles up to 1e3 in fp32, one cosine")
            for dtype in FLOAT_DTYPES
        },
        cost=_locate_cost,
    ),
)
