"""Definitions of the attention ops.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h // group] * head_dim ** -0.5) v[j, h // group],   j <= position of t

Scores, softmax and sums are in fp32. Keys and values are read from the paged cache (layout: `kernels/kvcache/spec.py`)
through a block table: position p of a sequence lies in block table[p // block_size] at offset p % block_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.kvcache.spec import cache_rows, write
from negamax.kernels.op import Case, Cost, Kernel, Op, num_bytes, randn, rounding_tolerance
from negamax.kernels.rope.spec import cos_sin, half_split_, signed_frequencies


@dataclass(frozen=True)
class PagedShape:
    """Sizes that a plan depends on."""

    kv_heads: int
    group: int  # query heads per KV head
    block_size: int


# --- QK norm, rope, cache write -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QkNorm:
    """This rank's slices of the two norm weights, with the constants of the norms as tensors."""

    weight: Tensor  # [(heads + kv_heads) * head_dim] fp32, q part first
    heads: int
    kv_heads: int
    q_count: Tensor  # [] fp32, elements in the sum of squares over all ranks
    k_count: Tensor  # [] fp32; each of a replicated KV head's copies counts, as it does in the sum
    eps: Tensor  # [] fp32


def prepare_qk_norm(weight: Tensor, *, heads: int, kv_heads: int, eps: float, ranks: int) -> QkNorm:
    """weight [(heads + kv_heads) * head_dim] fp32; heads of this rank, of which the attention group has `ranks`."""
    head_dim = weight.shape[0] // (heads + kv_heads)
    q_count, k_count = float(heads * head_dim * ranks), float(kv_heads * head_dim * ranks)
    constants = torch.tensor([q_count, k_count, eps], dtype=torch.float32, device=weight.device).unbind()
    return QkNorm(weight, heads, kv_heads, *constants)


def qk_norm_rope_write(
    qkv: Tensor,
    norm: QkNorm,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    *,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Full-width RMS norm of q and of k, rope on both, k and v into the cache; returns q [T, heads, head_dim].

    qkv [T, (heads + 2 kv_heads) * head_dim] is this rank's projection (overwritten); cos, sin from `rope.spec.cos_sin`; rows
    from `kvcache.spec.cache_rows`. The mean of squares runs over all heads of the attention group: `all_reduce` sums the
    ranks' fp32 sums of squares [T, 2]; None where there is one rank. All arithmetic is in fp32 and rounded once, at the end.
    """
    num_tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    q_width, qk_width = norm.heads * head_dim, norm.weight.shape[0]
    # A row that overflowed must not leave NaN or infinity in a block: whoever gets the block next multiplies the masked
    # values by a probability of 0, and 0 * NaN is NaN.
    wide = qkv.nan_to_num_().float()
    q, k = wide[:, :q_width], wide[:, q_width:qk_width]
    q_sum, k_sum = q.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True)  # [T, 1]
    if all_reduce is not None:
        q_sum, k_sum = torch.split(all_reduce(torch.cat((q_sum, k_sum), dim=-1)), 1, dim=-1)
    q.mul_(q_sum.div_(norm.q_count).add_(norm.eps).rsqrt_())
    k.mul_(k_sum.div_(norm.k_count).add_(norm.eps).rsqrt_())
    half_split_(wide[:, :qk_width].mul_(norm.weight).view(num_tokens, norm.heads + norm.kv_heads, head_dim), cos, sin)
    rounded = wide.to(qkv.dtype).view(num_tokens, norm.heads + 2 * norm.kv_heads, head_dim)
    q, k, v = torch.split(rounded, [norm.heads, norm.kv_heads, norm.kv_heads], dim=1)
    write(k, v, k_cache, v_cache, rows)
    return q


def _qknr_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, heads, kv_heads, head_dim, rotary_dim in ((0, 2, 1, 16, 8), (1, 8, 2, 128, 64), (11, 6, 3, 20, 10)):
        num_blocks, block_size = 4, 8
        cache = (num_blocks, kv_heads, block_size, head_dim)
        tensors = {
            "qkv": randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, generator=generator, scale=2.0),
            "norm_weight": 1 + randn((heads + kv_heads) * head_dim, dtype=torch.float32, generator=generator, scale=0.2),
            "positions": torch.randint(0, 1000, (num_tokens,), generator=generator),
            "k_cache": randn(*cache, dtype=dtype, generator=generator),
            "v_cache": randn(*cache, dtype=dtype, generator=generator),
            "slots": torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
        }
        label = f"T={num_tokens} heads={heads} kv_heads={kv_heads} head_dim={head_dim} rotary_dim={rotary_dim}"
        cases.append(Case(label, tensors, {"heads": heads, "rotary_dim": rotary_dim}))
    return cases


def _qknr_apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    k_cache, v_cache = t["k_cache"].clone(), t["v_cache"].clone()
    cos, sin = cos_sin(t["positions"], signed_frequencies(case.numbers["rotary_dim"], 5e6))
    rows = cache_rows(t["slots"], kv_heads=k_cache.shape[1], block_size=k_cache.shape[2])
    assert kernel.prepare is not None
    norm = kernel.prepare(t["norm_weight"], heads=case.numbers["heads"], kv_heads=k_cache.shape[1], eps=1e-6, ranks=1)
    q = kernel.run(t["qkv"].clone(), norm, cos, sin, k_cache, v_cache, rows)
    return q, k_cache, v_cache


def _qknr_cost(case: Case) -> Cost:
    qkv = case.tensors["qkv"]
    return Cost(num_bytes=2 * num_bytes(qkv), flops=7 * qkv.numel())


# --- attention ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferencePlan:
    """Block tables and lengths as they are."""

    block_tables: Tensor  # [S, max_blocks] int64
    first_positions: tuple[int, ...]  # position of each sequence's first query
    counts: tuple[int, ...]  # queries of each sequence


def plan_decode(block_tables: Tensor, seq_lens: Sequence[int], shape: PagedShape, *, dtype: torch.dtype) -> ReferencePlan:
    """One query per sequence, at position seq_len - 1. block_tables [S, max_blocks] int64; `dtype` of queries and cache."""
    return ReferencePlan(block_tables, tuple(length - 1 for length in seq_lens), (1,) * len(seq_lens))


def plan_prefill(block_table: Tensor, shape: PagedShape, *, start: int, count: int, dtype: torch.dtype) -> ReferencePlan:
    """`count` queries of one sequence at positions start, start + 1, ... block_table [max_blocks] int64."""
    return ReferencePlan(block_table[None], (start,), (count,))


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: ReferencePlan) -> Tensor:
    """q [T, heads, head_dim], caches [num_blocks, kv_heads, block_size, head_dim] -> [T, heads * head_dim]."""
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    outputs, first_query = [q.new_empty(0, heads * head_dim)], 0
    for table, first, count in zip(plan.block_tables, plan.first_positions, plan.counts, strict=True):
        length = first + count
        k, v = (
            cache[table]
            .transpose(1, 2)
            .reshape(-1, kv_heads, head_dim)[:length]
            .float()
            .repeat_interleave(heads // kv_heads, 1)
            for cache in (k_cache, v_cache)
        )
        queries = q[first_query : first_query + count].float()
        scores = torch.einsum("thd,jhd->htj", queries, k) * head_dim**-0.5
        hidden = torch.arange(length, device=q.device) > torch.arange(first, length, device=q.device)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("htj,jhd->thd", weights, v).reshape(count, -1).to(q.dtype))
        first_query += count
    return torch.cat(outputs)


def _paged(
    dtype: torch.dtype, generator: torch.Generator, *, lengths: Sequence[int], shape: PagedShape, head_dim: int
) -> dict[str, Tensor]:
    """Caches and shuffled block tables for sequences of these lengths."""
    per_sequence = [-(-length // shape.block_size) for length in lengths]
    cache = (sum(per_sequence) + 2, shape.kv_heads, shape.block_size, head_dim)
    blocks = torch.randperm(cache[0], generator=generator)
    tables = torch.zeros(len(lengths), max(per_sequence, default=1), dtype=torch.int64)
    used = 0
    for row, count in enumerate(per_sequence):
        tables[row, :count] = blocks[used : used + count]
        used += count
    return {
        "k_cache": randn(*cache, dtype=dtype, generator=generator),
        "v_cache": randn(*cache, dtype=dtype, generator=generator),
        "block_tables": tables,
    }


def _decode_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for lengths, kv_heads, group, head_dim, block_size in (
        ((1,), 1, 1, 8, 16),
        ((300,), 2, 4, 128, 16),
        ((5, 130, 1, 700), 2, 3, 12, 5),
        ((16, 32, 31), 1, 12, 20, 16),
    ):
        shape = PagedShape(kv_heads=kv_heads, group=group, block_size=block_size)
        tensors = _paged(dtype, generator, lengths=lengths, shape=shape, head_dim=head_dim)
        tensors["q"] = randn(len(lengths), kv_heads * group, head_dim, dtype=dtype, generator=generator)
        label = f"lengths={list(lengths)} kv_heads={kv_heads} group={group} head_dim={head_dim} block_size={block_size}"
        cases.append(Case(label, tensors, {"lengths": lengths, "shape": shape}))
    return cases


def _prefill_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for start, count, kv_heads, group, head_dim, block_size in (
        (0, 1, 1, 1, 8, 16),
        (0, 150, 2, 4, 32, 16),
        (77, 200, 2, 3, 12, 5),
        (1000, 40, 1, 6, 20, 16),
    ):
        shape = PagedShape(kv_heads=kv_heads, group=group, block_size=block_size)
        tensors = _paged(dtype, generator, lengths=(start + count,), shape=shape, head_dim=head_dim)
        tensors["q"] = randn(count, kv_heads * group, head_dim, dtype=dtype, generator=generator)
        label = f"start={start} count={count} kv_heads={kv_heads} group={group} head_dim={head_dim} block_size={block_size}"
        cases.append(Case(label, tensors, {"start": start, "count": count, "shape": shape}))
    return cases


def _decode_apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    t, n = case.tensors, case.numbers
    assert kernel.prepare is not None
    plan = kernel.prepare(t["block_tables"], n["lengths"], n["shape"], dtype=t["q"].dtype)
    return (kernel.run(t["q"], t["k_cache"], t["v_cache"], plan),)


def _prefill_apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    t, n = case.tensors, case.numbers
    assert kernel.prepare is not None
    plan = kernel.prepare(t["block_tables"][0], n["shape"], start=n["start"], count=n["count"], dtype=t["q"].dtype)
    return (kernel.run(t["q"], t["k_cache"], t["v_cache"], plan),)


def _decode_cost(case: Case) -> Cost:
    q, shape = case.tensors["q"], case.numbers["shape"]
    keys = sum(case.numbers["lengths"])
    kv_bytes = 2 * keys * shape.kv_heads * q.shape[-1] * q.element_size()
    return Cost(num_bytes=kv_bytes + 2 * num_bytes(q), flops=4 * keys * q.shape[1] * q.shape[2])


def _prefill_cost(case: Case) -> Cost:
    q, n = case.tensors["q"], case.numbers
    kv_bytes = 2 * (n["start"] + n["count"]) * n["shape"].kv_heads * q.shape[-1] * q.element_size()
    pairs = n["count"] * n["start"] + n["count"] * (n["count"] + 1) // 2
    return Cost(num_bytes=kv_bytes + 2 * num_bytes(q), flops=4 * pairs * q.shape[1] * q.shape[2])


_ATTENTION_TOLERANCE = rounding_tolerance(
    reason="probabilities and the result are rounded to the dtype once each; |out| about 1"
)

OPS = (
    Op(
        name="attention.qk_norm_rope_write",
        summary="full-width RMS norm of q and k, rope, keys and values into the paged cache",
        reference=Kernel("attention.qk_norm_rope_write", "reference", qk_norm_rope_write, prepare_qk_norm),
        cases=_qknr_cases,
        apply=_qknr_apply,
        tolerance=rounding_tolerance(scale=2.0, reason="one rounding to the dtype; |q| up to 5"),
        cost=_qknr_cost,
    ),
    Op(
        name="attention.decode",
        summary="one query per sequence against its paged keys and values",
        reference=Kernel("attention.decode", "reference", attend, plan_decode),
        cases=_decode_cases,
        apply=_decode_apply,
        tolerance=_ATTENTION_TOLERANCE,
        cost=_decode_cost,
    ),
    Op(
        name="attention.prefill",
        summary="a run of queries of one sequence, causal, on top of its cached prefix",
        reference=Kernel("attention.prefill", "reference", attend, plan_prefill),
        cases=_prefill_cases,
        apply=_prefill_apply,
        tolerance=_ATTENTION_TOLERANCE,
        cost=_prefill_cost,
    ),
)
