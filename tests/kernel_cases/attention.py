from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import (
    AttentionMetadata,
    DecodeRuns,
    PagedShape,
    attention_metadata,
)
from negamax.kernels.attention.op import (
    DECODE,
    HEAD_NORM_ROPE_WRITE,
    PREFILL,
    QK_NORM_ROPE_WRITE,
    ROPE_WRITE,
)
from negamax.kernels.kvcache.op import FP8, KvCache, cache_rows
from negamax.kernels.op import AnyKernel
from negamax.kernels.rotary import cos_sin, signed_frequencies
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn

# --- QK norm, rope, cache write ------------------------------------------------------------------


def qk_norm_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _qk_norm_case(
            dtype,
            generator,
            num_tokens=num_tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            cache=(4, 8),
        )
        for num_tokens, heads, kv_heads, head_dim, rotary_dim in (
            (0, 2, 1, 16, 8),
            (1, 8, 2, 128, 64),
            (5, 6, 3, 20, 10),
        )
    ]


def qk_norm_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _qk_norm_case(
            dtype,
            generator,
            num_tokens=num_tokens,
            heads=6 * kv_heads,
            kv_heads=kv_heads,
            head_dim=128,
            rotary_dim=64,
            cache=(4096 // block_size, block_size),
            cache_dtype=cache_dtype,
        )
        for num_tokens, kv_heads, block_size, cache_dtype in (
            (1, 8, 64, None),
            (1, 2, 16, None),
            (100, 4, 32, None),
            (3001, 2, 16, None),
            (1000, 8, 16, FP8),
            (7, 2, 64, FP8),
        )
    ]


def head_norm_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _qk_norm_case(
            dtype,
            generator,
            num_tokens=num_tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            cache=(4, 8),
            norm_per_head=True,
        )
        for num_tokens, heads, kv_heads, head_dim, rotary_dim in (
            (0, 2, 1, 16, 8),
            (1, 16, 1, 128, 64),
            (5, 6, 3, 20, 20),
        )
    ]


def head_norm_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _qk_norm_case(
            dtype,
            generator,
            num_tokens=num_tokens,
            heads=16 * kv_heads,
            kv_heads=kv_heads,
            head_dim=128,
            rotary_dim=64,
            cache=(32, 128),
            cache_dtype=cache_dtype,
            norm_per_head=True,
        )
        for num_tokens, kv_heads, cache_dtype in (
            (1, 1, None),
            (100, 4, None),
            (3001, 1, None),
            (100, 1, FP8),
        )
    ]


def rope_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _rope_case(dtype, generator, num_tokens, heads, kv_heads, head_dim, cache=(4, 8))
        for num_tokens, heads, kv_heads, head_dim in ((0, 2, 1, 16), (1, 6, 1, 128), (5, 3, 3, 20))
    ]


def rope_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _rope_case(
            dtype, generator, num_tokens, heads, kv_heads, 128, cache=(64, 64), cache_dtype=cache
        )
        for num_tokens, heads, kv_heads, cache in (
            (1, 6, 2, None),
            (4, 24, 8, None),
            (400, 16, 16, None),
            (3001, 16, 1, None),
            (16, 6, 2, FP8),
        )
    ]


def _rope_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **cache: Any,
) -> Case:
    return _qk_norm_case(
        dtype,
        generator,
        num_tokens=num_tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        **cache,
    )


def _qk_norm_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    cache: tuple[int, int],
    cache_dtype: torch.dtype | None = None,
    norm_per_head: bool = False,
) -> Case:
    """`cache` is the number of blocks and their size. An FP8 cache has scales other than 1."""
    num_blocks, block_size = cache
    norm_shape = (2, head_dim) if norm_per_head else ((heads + kv_heads) * head_dim,)
    normal = partial(randn, generator=generator)
    on_device: dict[str, Any] = {"generator": generator, "device": generator.device}
    tensors = {
        "qkv": normal(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, scale=2.0),
        "norm_weight": 1 + normal(*norm_shape, dtype=torch.float32, scale=0.2),
        "positions": torch.randint(0, 1000, (num_tokens,), **on_device),
        "k_cache": normal(num_blocks, kv_heads, block_size, head_dim, dtype=dtype),
        "v_cache": normal(num_blocks, kv_heads, block_size, head_dim, dtype=dtype),
        "slots": torch.randperm(num_blocks * block_size, **on_device)[:num_tokens],
    }
    label = (
        f"T={num_tokens} heads={heads} kv_heads={kv_heads} head_dim={head_dim} "
        f"rotary_dim={rotary_dim}"
    )
    numbers: dict[str, Any] = {"heads": heads, "rotary_dim": rotary_dim}
    if cache_dtype is not None:
        numbers |= {"cache_dtype": cache_dtype, "kv_scales": (0.5, 2.0)}
        label = f"{label} {cache_dtype}"
    return Case(label, tensors, numbers)


def apply_qk_norm(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """Return q and the caches as stored values: rounded in the definition, too."""
    return _apply_norm(kernel, case, ranks=1)


def apply_head_norm(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return _apply_norm(kernel, case)


def apply_rope(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return _apply_norm(kernel, case, has_norm=False)


def _apply_norm(
    kernel: AnyKernel, case: Case, *, has_norm: bool = True, **ranks: int
) -> tuple[Tensor, ...]:
    t, n = case.tensors, case.numbers
    k_cache, v_cache = (
        t[name].to(n.get("cache_dtype", t[name].dtype), copy=True)
        for name in ("k_cache", "v_cache")
    )
    frequencies = signed_frequencies(n["rotary_dim"], 5e6).to(t["positions"].device)
    angles = cos_sin(t["positions"], frequencies)
    rows = cache_rows(t["slots"], kv_heads=k_cache.shape[1], block_size=k_cache.shape[2])
    norm: tuple[Any, ...] = ()
    if has_norm:
        heads = {"heads": n["heads"], "kv_heads": k_cache.shape[1]}
        norm = (kernel.prepare(t["norm_weight"], eps=1e-6, **heads, **ranks),)
    cache = KvCache(k_cache, v_cache, n.get("kv_scales", (1.0, 1.0)))
    q = kernel.run(t["qkv"].clone(), *norm, *angles, cache, rows)
    return q, k_cache, v_cache


def qk_norm_cost(case: Case) -> Cost:
    qkv = case.tensors["qkv"]
    return Cost(num_bytes=2 * num_bytes(qkv), flops=7 * qkv.numel())


# --- attention -----------------------------------------------------------------------------------


def decode_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _attention_case(
            dtype,
            generator,
            lengths=lengths,
            counts=counts,
            max_run=max_run,
            shape=PagedShape(kv_heads=kv_heads, group=group, block_size=block_size),
            head_dim=head_dim,
        )
        for lengths, counts, max_run, kv_heads, group, head_dim, block_size in (
            ((150,), (4,), 4, 1, 6, 128, 16),
            ((66, 130, 0, 2, 520), (2, 4, 0, 1, 4), 4, 2, 3, 12, 5),
            ((200, 65, 1, 70), (3, 1, 1, 2), 3, 1, 16, 20, 16),
        )
    ] + [
        _attention_case(
            dtype,
            generator,
            lengths=lengths,
            counts=(1,) * len(lengths),
            shape=PagedShape(kv_heads=kv_heads, group=group, block_size=block_size),
            head_dim=head_dim,
        )
        for lengths, kv_heads, group, head_dim, block_size in (
            ((1,), 1, 1, 8, 16),
            ((100,), 1, 1, 8, 16),
            ((150,), 1, 4, 128, 16),
            ((5, 130, 1, 520), 2, 3, 12, 5),
            ((16, 32, 31), 1, 12, 20, 16),
        )
    ]


def prefill_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _attention_case(
            dtype,
            generator,
            lengths=[start + count for start, count in zip(starts, counts, strict=True)],
            counts=counts,
            shape=PagedShape(kv_heads=kv_heads, group=group, block_size=block_size),
            head_dim=head_dim,
        )
        for starts, counts, kv_heads, group, head_dim, block_size in (
            ((0,), (1,), 1, 1, 8, 16),
            ((0,), (70,), 1, 3, 32, 16),
            ((77, 0, 5), (70, 3, 33), 2, 2, 12, 5),
            ((520, 0), (9, 2), 1, 1, 20, 16),
            ((129, 0, 30), (1, 64, 11), 2, 6, 16, 16),
        )
    ]


def decode_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """Shards of MiniMax-M2 (8, 4, 2 KV heads) and of MiniMax-M3's dense layers (4 and 1).

    One to a hundred sequences with padding, a very long one, and ones with three draft tokens.
    """
    uneven = [1 + 37 * i % 2200 for i in range(99)] + [0]
    return [
        _attention_case(
            dtype,
            generator,
            lengths=[length] * count,
            counts=[4] * count,
            max_run=4,
            shape=PagedShape(kv_heads, group, block_size),
            cache_dtype=cache_dtype,
        )
        for length, count, kv_heads, group, block_size, cache_dtype in (
            (1064, 1, 2, 6, 64, None),
            (8064, 1, 2, 6, 64, None),
            (8064, 16, 2, 6, 64, None),
            (8064, 16, 2, 6, 64, FP8),
            (1064, 100, 2, 6, 64, None),
            (8064, 16, 8, 6, 64, None),
            (1064, 64, 8, 6, 64, FP8),
            (8064, 4, 1, 16, 128, FP8),
        )
    ] + [
        _attention_case(
            dtype,
            generator,
            lengths=lengths,
            counts=(1,) * len(lengths),
            shape=PagedShape(kv_heads, group, block_size),
            cache_dtype=cache_dtype,
        )
        for lengths, kv_heads, group, block_size, cache_dtype in (
            ([1064], 2, 6, 16, None),
            ([1064], 8, 6, 64, None),
            ([1064] * 16, 2, 6, 16, None),
            ([1064] * 100, 8, 6, 64, None),
            (uneven, 4, 6, 32, None),
            ([5, 60_000, 0, 300], 2, 6, 16, None),
            ([1064] * 100, 2, 6, 16, FP8),
            (uneven, 8, 6, 64, FP8),
            ([1064], 1, 16, 128, FP8),
            ([1064] * 16, 4, 16, 128, None),
            (uneven, 4, 16, 128, FP8),
        )
    ]


def prefill_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _attention_case(
            dtype,
            generator,
            lengths=lengths,
            counts=counts,
            shape=PagedShape(kv_heads=kv_heads, group=6, block_size=block_size),
            cache_dtype=cache_dtype,
        )
        for lengths, counts, kv_heads, block_size, cache_dtype in (
            ([1000] * 8, [1000] * 8, 2, 16, None),
            ([6000, 1, 777, 129], [2000, 1, 777, 65], 2, 64, None),
            ([1000, 300], [1000, 7], 8, 32, None),
            ([1000] * 4, [1000] * 4, 4, 16, FP8),
            ([1064] * 96 + [1000] * 8, [1] * 96 + [1000] * 8, 8, 64, FP8),
        )
    ]


def _attention_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    lengths: Sequence[int],
    counts: Sequence[int],
    shape: PagedShape,
    head_dim: int = 128,
    cache_dtype: torch.dtype | None = None,
    max_run: int = 0,
) -> Case:
    """Queries of the last `counts` tokens of each sequence.

    With `max_run` they are decodes with draft tokens and padding. An FP8 cache has scales other
    than 1.
    """
    heads = shape.kv_heads * shape.group
    num_queries = max_run * len(lengths) or sum(counts)
    tensors = {
        "q": randn(num_queries, heads, head_dim, dtype=dtype, generator=generator),
        **paged_caches(cache_dtype or dtype, generator, lengths, shape=shape, head_dim=head_dim),
    }
    numbers: dict[str, Any] = {"lengths": tuple(lengths), "counts": tuple(counts), "shape": shape}
    if max_run:
        numbers["max_run"] = max_run
    if cache_dtype == FP8:
        numbers["kv_scales"] = (0.5, 2.0)
    tokens = (
        f"lengths={list(lengths)}"
        if len(lengths) < 5
        else f"{len(lengths)} sequences of {sum(lengths)} tokens"
    )
    sizes = (
        f"kv_heads={shape.kv_heads} group={shape.group} head_dim={head_dim} "
        f"block_size={shape.block_size}"
    )
    return Case(f"{tokens} queries={num_queries} {sizes} {cache_dtype or dtype}", tensors, numbers)


def paged_caches(
    dtype: torch.dtype,
    generator: torch.Generator,
    lengths: Sequence[int],
    *,
    shape: PagedShape,
    head_dim: int,
) -> dict[str, Tensor]:
    """Make caches and shuffled block tables for these lengths, on the generator's device."""
    device = generator.device
    per_sequence = [-(-length // shape.block_size) for length in lengths]
    cache = (sum(per_sequence) + 2, shape.kv_heads, shape.block_size, head_dim)
    blocks = torch.randperm(cache[0], generator=generator, device=device)
    tables = torch.zeros(
        len(lengths), max(per_sequence, default=1), dtype=torch.int64, device=device
    )
    for row, own in enumerate(blocks[:-2].split(per_sequence)):
        tables[row, : len(own)] = own
    return {
        "k_cache": randn(*cache, dtype=dtype, generator=generator),
        "v_cache": randn(*cache, dtype=dtype, generator=generator),
        "block_tables": tables,
    }


def apply_attention(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(case.tensors["q"], cache_of(case), plan_of(kernel, case)),)


def cache_of(case: Case) -> KvCache:
    """Return the caches of a case of an attention op."""
    scales = case.numbers.get("kv_scales", (1.0, 1.0))
    return KvCache(case.tensors["k_cache"], case.tensors["v_cache"], scales)


def plan_of(kernel: AnyKernel, case: Case) -> Any:
    t, n = case.tensors, case.numbers
    describe = partial(run_metadata, max_run=n["max_run"]) if "max_run" in n else attention_metadata
    queries = describe(t["block_tables"], n["lengths"], n["counts"])
    return kernel.prepare(queries, n["shape"], dtype=t["q"].dtype)


def run_metadata(
    block_tables: Tensor, seq_lens: Sequence[int], query_lens: Sequence[int], *, max_run: int
) -> AttentionMetadata:
    """Turn the last query_lens[s] tokens of each sequence into decodes, then pad to `max_run`."""
    ends = [
        (row, end)
        for row, (length, count) in enumerate(zip(seq_lens, query_lens, strict=True))
        for end in range(length - count + 1, length + 1)
    ]
    ends += [(0, 0)] * (max_run * len(seq_lens) - len(ends))
    rows, lengths = zip(*ends, strict=True)
    queries = attention_metadata(
        block_tables, lengths, [1] * len(ends), indices=rows, num_decodes=len(ends)
    )
    device = block_tables.device
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int64, device=device)
    runs = DecodeRuns(
        torch.arange(len(seq_lens), dtype=torch.int64, device=device),
        torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        starts,
    )
    return replace(queries, max_decode_run=max_run, decode_runs=runs)


def attention_cost(case: Case) -> Cost:
    q, n = case.tensors["q"], case.numbers
    row_bytes = n["shape"].kv_heads * q.shape[-1] * case.tensors["k_cache"].element_size()
    pairs = sum(
        count * (length - count) + count * (count + 1) // 2
        for length, count in zip(n["lengths"], n["counts"], strict=True)
    )
    return Cost(
        num_bytes=2 * sum(n["lengths"]) * row_bytes + 2 * num_bytes(q),
        flops=4 * pairs * q.shape[1] * q.shape[2],
    )


CASES = {
    QK_NORM_ROPE_WRITE: OpCases(qk_norm_small, apply_qk_norm, qk_norm_cost, qk_norm_full_size),
    HEAD_NORM_ROPE_WRITE: OpCases(
        head_norm_small, apply_head_norm, qk_norm_cost, head_norm_full_size
    ),
    ROPE_WRITE: OpCases(rope_small, apply_rope, qk_norm_cost, rope_full_size),
    DECODE: OpCases(decode_small, apply_attention, attention_cost, decode_full_size),
    PREFILL: OpCases(prefill_small, apply_attention, attention_cost, prefill_full_size),
}
