from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.attention import op
from negamax.kernels.attention.metadata import (
    AttentionMetadata,
    DecodeRuns,
    PagedShape,
    attention_metadata,
)
from negamax.kernels.kvcache.op import FP8, KvCache, TokenPlaces, cache_rows
from negamax.kernels.op import AnyKernel
from negamax.kernels.rotary import cos_sin, signed_frequencies
from tests.kernel_cases.case import Case, Cost, OpCases, both, num_bytes, randn, table, tabled

# --- QK norm, rope, cache write ------------------------------------------------------------------


# tokens, heads, KV heads, width of a head, rotated columns
_QK_NORM_SMALL = ((0, 2, 1, 16, 8), (1, 8, 2, 128, 64), (5, 6, 3, 20, 10))
_HEAD_NORM_SMALL = ((0, 2, 1, 16, 8), (3, 0, 2, 16, 8), (1, 16, 1, 128, 64), (5, 6, 3, 20, 20))
_ROPE_SMALL = ((0, 2, 1, 16, 16), (1, 6, 1, 128, 128), (5, 3, 3, 20, 20))
# like `_QK_NORM_SMALL`, then blocks of the cache, their size, and the dtype of an FP8 cache
_QK_NORM_WIDE = (
    (1, 48, 8, 128, 64, (64, 64)), (1, 12, 2, 128, 64, (256, 16)), (100, 24, 4, 128, 64, (128, 32)),
    (3001, 12, 2, 128, 64, (256, 16)), (1000, 48, 8, 128, 64, (256, 16), FP8),
    (7, 12, 2, 128, 64, (64, 64), FP8),
)  # fmt: skip
_HEAD_NORM_WIDE = (
    (1, 16, 1, 128, 64, (32, 128)),
    (7, 0, 1, 128, 64, (32, 128)),  # keys and values without queries
    (100, 64, 4, 128, 64, (32, 128)),
    (3001, 16, 1, 128, 64, (32, 128)),
    (100, 16, 1, 128, 64, (32, 128), FP8),
)
_ROPE_WIDE = (
    (1, 6, 2, 128, 128, (64, 64)),
    (4, 24, 8, 128, 128, (64, 64)),
    (400, 16, 16, 128, 128, (64, 64)),
    (3001, 16, 1, 128, 128, (64, 64)),
    (16, 6, 2, 128, 128, (64, 64), FP8),
)
# shape of q and k, rotated columns; the vision tower of MiniMax-M3 has the last small size
_PLAIN_ROPE_SMALL = (((0, 2, 16), 12), ((1, 3, 16), 16), ((5, 16, 80), 78))
_PLAIN_ROPE_WIDE = (((4, 16, 80), 78), ((5476, 16, 80), 78), ((20_736, 16, 80), 78))


def _norm_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    cache: tuple[int, int] = (4, 8),
    cache_dtype: torch.dtype | None = None,
    *,
    norm_per_head: bool = False,
) -> Case:
    """Make a case. `cache` is (number of blocks, block size). An FP8 cache has scales."""
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
    label = f"T={num_tokens} {heads=} {kv_heads=} {head_dim=} {rotary_dim=}"
    numbers: dict[str, Any] = {"heads": heads, "rotary_dim": rotary_dim}
    if cache_dtype is not None:
        numbers |= {"cache_dtype": cache_dtype, "kv_scales": (0.5, 2.0)}
        label = f"{label} {cache_dtype}"
    return Case(label, tensors, numbers)


def apply_norm(
    kernel: AnyKernel, case: Case, *, has_norm: bool = True, **ranks: int
) -> tuple[Tensor, ...]:
    """Return q and the caches as stored values, which the definition also rounds."""
    t, n = case.tensors, case.numbers
    cache, places = stored_cache(case), places_of(case)
    norm: tuple[Any, ...] = ()
    if has_norm:
        heads = {"heads": n["heads"], "kv_heads": cache.k.shape[1]}
        norm = (kernel.prepare(t["norm_weight"], eps=1e-6, **heads, **ranks),)
    qkv = t["qkv"].clone()
    if n["heads"] == 0:  # The columns are part of a wider tensor.
        qkv = torch.cat([qkv, qkv], dim=1)[:, : qkv.shape[1]]
    return kernel.run(qkv, *norm, places, cache), cache.k, cache.v


def copy_stored(case: Case, name: str) -> Tensor:
    """Copy a cache in the dtype of the case's caches."""
    cache = case.tensors[name]
    return cache.to(case.numbers.get("cache_dtype", cache.dtype), copy=True)


def stored_cache(case: Case) -> KvCache:
    scales = case.numbers.get("kv_scales", (1.0, 1.0))
    return KvCache(copy_stored(case, "k_cache"), copy_stored(case, "v_cache"), scales)


def places_of(case: Case) -> TokenPlaces:
    _, kv_heads, block_size, _ = case.tensors["k_cache"].shape
    positions = case.tensors["positions"]
    frequencies = signed_frequencies(case.numbers["rotary_dim"], 5e6).to(positions.device)
    rows = cache_rows(case.tensors["slots"], kv_heads=kv_heads, block_size=block_size)
    return TokenPlaces(*cos_sin(positions, frequencies), rows)


def norm_cost(case: Case) -> Cost:
    projected = next(iter(case.tensors.values()))
    return Cost(num_bytes=2 * num_bytes(projected), flops=7 * projected.numel())


def _rope_case(
    dtype: torch.dtype, generator: torch.Generator, shape: tuple[int, int, int], rotary_dim: int
) -> Case:
    """Make a case. `shape` is (tokens, heads, head_dim)."""
    frequencies = signed_frequencies(rotary_dim, 1e4).to(generator.device)
    angles = cos_sin(torch.arange(shape[0], device=generator.device), frequencies)
    q, k = (randn(*shape, dtype=dtype, generator=generator, scale=2.0) for _ in range(2))
    return Case(f"{shape=} {rotary_dim=}", {"q": q, "k": k, "cos": angles[0], "sin": angles[1]})


def apply_rope(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    q, k, *angles = case.tensors.values()
    outputs: tuple[Tensor, ...] = kernel.run(q.clone(), k.clone(), *angles)
    return outputs


def rope_cost(case: Case) -> Cost:
    q, k, cos, _ = case.tensors.values()
    return Cost(num_bytes=2 * num_bytes(q, k) + num_bytes(cos), flops=6 * q.numel())


# --- attention -----------------------------------------------------------------------------------


# lengths, queries, KV heads, group, width of a head, block size
_DECODE_SMALL = (
    ((1,), 1, 1, 8, 16), ((100,), 1, 1, 8, 16), ((150,), 1, 4, 128, 16),
    ((5, 130, 1, 520), 2, 3, 12, 5), ((16, 32, 31), 1, 12, 20, 16),
)  # fmt: skip
_RUNS_SMALL = (
    ((150,), (4,), 1, 6, 128, 16, None, 4),
    ((66, 130, 0, 2, 520), (2, 4, 0, 1, 4), 2, 3, 12, 5, None, 4),
    ((200, 65, 1, 70), (3, 1, 1, 2), 1, 16, 20, 16, None, 3),
)
_PREFILL_SMALL = (
    ((1,), (1,), 1, 1, 8, 16),
    ((70,), (70,), 1, 3, 32, 16),
    ((147, 3, 38), (70, 3, 33), 2, 2, 12, 5),
    ((529, 2), (9, 2), 1, 1, 20, 16),
    ((130, 64, 41), (1, 64, 11), 2, 6, 16, 16),
    ((1700, 40), (9, 3), 2, 2, 16, 16),
    ((1100,), (40,), 1, 2, 16, 16),
)
# Shards of MiniMax-M2 (8, 4, 2 KV heads) and of MiniMax-M3's dense layers (4 and 1).
# Up to a hundred sequences with padding, a very long one, and some with three draft tokens.
_UNEVEN = [1 + 37 * i % 2200 for i in range(99)] + [0]
_DECODE_WIDE = (
    ([1064], 2, 6, 128, 16), ([1064], 8, 6, 128, 64), ([1064] * 16, 2, 6, 128, 16),
    ([1064] * 100, 8, 6, 128, 64), (_UNEVEN, 4, 6, 128, 32), ([5, 60_000, 0, 300], 2, 6, 128, 16),
    ([1064] * 100, 2, 6, 128, 16, FP8), (_UNEVEN, 8, 6, 128, 64, FP8),
    ([1064], 1, 16, 128, 128, FP8), ([1064] * 16, 4, 16, 128, 128), (_UNEVEN, 4, 16, 128, 128, FP8),
)  # fmt: skip
_RUNS_WIDE = tuple(
    ([length] * count, [4] * count, kv_heads, group, 128, block_size, cache_dtype, 4)
    for length, count, kv_heads, group, block_size, cache_dtype in (
        (1064, 1, 2, 6, 64, None), (8064, 1, 2, 6, 64, None), (8064, 16, 2, 6, 64, None),
        (8064, 16, 2, 6, 64, FP8), (1064, 100, 2, 6, 64, None), (8064, 16, 8, 6, 64, None),
        (1064, 64, 8, 6, 64, FP8), (8064, 4, 1, 16, 128, FP8),
    )
)  # fmt: skip
_PREFILL_WIDE = (
    ([1000] * 8, [1000] * 8, 2, 6, 128, 16),
    ([6000, 1, 777, 129], [2000, 1, 777, 65], 2, 6, 128, 64),
    ([1000, 300], [1000, 7], 8, 6, 128, 32),
    ([1000] * 4, [1000] * 4, 4, 6, 128, 16, FP8),
    ([1064] * 96 + [1000] * 8, [1] * 96 + [1000] * 8, 8, 6, 128, 64, FP8),
    ([60_000], [40], 8, 6, 128, 64),
    ([5000, 1500, 20], [4400, 1300, 9], 2, 6, 128, 64),
    ([60_000, 300], [1100, 7], 1, 6, 128, 64, FP8),
    ([9_000], [3], 1, 16, 128, 128),
)


def _decode_case(
    dtype: torch.dtype, generator: torch.Generator, lengths: Sequence[int], *sizes: Any
) -> Case:
    return _attention_case(dtype, generator, lengths, (1,) * len(lengths), *sizes)


def _attention_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    lengths: Sequence[int],
    counts: Sequence[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
    max_run: int = 0,
) -> Case:
    """Make queries of the last `counts` tokens. With `max_run`, the rows are padded decodes."""
    shape, heads = PagedShape(kv_heads, group, block_size), kv_heads * group
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
    tokens = describe_lengths(lengths)
    sizes = f"{kv_heads=} {group=} {head_dim=} {block_size=}"
    return Case(f"{tokens} queries={num_queries} {sizes} {cache_dtype or dtype}", tensors, numbers)


def describe_lengths(lengths: Sequence[int]) -> str:
    if len(lengths) < 5:
        return f"lengths={list(lengths)}"
    return f"{len(lengths)} sequences of {sum(lengths)} tokens"


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
    scales = case.numbers.get("kv_scales", (1.0, 1.0))
    return KvCache(case.tensors["k_cache"], case.tensors["v_cache"], scales)


def plan_of(kernel: AnyKernel, case: Case) -> Any:
    t, n = case.tensors, case.numbers
    describe = partial(run_metadata, max_run=n["max_run"]) if "max_run" in n else attention_metadata
    queries = describe(t["block_tables"], n["lengths"], n["counts"])
    return kernel.prepare(queries, replace(n["shape"], dtype=t["q"].dtype))


def run_metadata(
    block_tables: Tensor, seq_lens: Sequence[int], query_lens: Sequence[int], *, max_run: int
) -> AttentionMetadata:
    """Turn the last query_lens[s] tokens of each sequence into decodes, and pad to `max_run`."""
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
    op.QK_NORM_ROPE_WRITE: tabled(
        _norm_case, _QK_NORM_SMALL, partial(apply_norm, ranks=1), norm_cost, _QK_NORM_WIDE
    ),
    op.HEAD_NORM_ROPE_WRITE: tabled(
        partial(_norm_case, norm_per_head=True), _HEAD_NORM_SMALL, apply_norm, norm_cost,
        _HEAD_NORM_WIDE,
    ),
    op.ROPE_WRITE: tabled(
        _norm_case, _ROPE_SMALL, partial(apply_norm, has_norm=False), norm_cost, _ROPE_WIDE
    ),
    op.ROPE: tabled(_rope_case, _PLAIN_ROPE_SMALL, apply_rope, rope_cost, _PLAIN_ROPE_WIDE),
    op.DECODE: OpCases(
        both(table(_attention_case, _RUNS_SMALL), table(_decode_case, _DECODE_SMALL)),
        apply_attention, attention_cost,
        both(table(_attention_case, _RUNS_WIDE), table(_decode_case, _DECODE_WIDE)),
    ),
    op.PREFILL: tabled(
        _attention_case, _PREFILL_SMALL, apply_attention, attention_cost, _PREFILL_WIDE
    ),
}  # fmt: skip
