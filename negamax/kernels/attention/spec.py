"""Definitions of the attention ops.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h // group] * head_dim ** -0.5) v[j, h // group],   j
    <= position of t

Scores, softmax and sums are in fp32. Keys and values are read from the paged cache (layout:
`kernels/kvcache/spec.py`) through a block table: position p of a sequence lies in block table[p //
block_size] at offset p % block_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata, attention_metadata
from negamax.kernels.kvcache.spec import FP8, cache_rows, write
from negamax.kernels.op import AnyKernel, Case, Cost, Kernel, Op, num_bytes, rounding_tolerance
from negamax.kernels.peers import Collective
from negamax.kernels.rope.spec import cos_sin, half_split_, signed_frequencies
from negamax.kernels.signatures import DECODE, PREFILL, QK_NORM_ROPE_WRITE


@dataclass(frozen=True)
class PagedShape:
    """Sizes that a plan depends on."""

    kv_heads: int
    group: int  # query heads per KV head
    block_size: int


# --- QK norm, rope, cache write ------------------------------------------------------------------


@dataclass(frozen=True)
class QkNorm:
    """This rank's slices of the two norm weights, with the constants of the norms."""

    weight: Tensor  # [(heads + kv_heads) * head_dim] fp32, q part first
    heads: int
    kv_heads: int
    # elements in the sum of squares over all ranks; each of a replicated KV head's copies counts,
    # as it does in the sum
    q_count: float
    k_count: float
    eps: float


def prepare_qk_norm(weight: Tensor, *, heads: int, kv_heads: int, eps: float, ranks: int) -> QkNorm:
    """weight [(heads + kv_heads) * head_dim] fp32; heads of this rank, of which the attention group
    has `ranks`.
    """
    per_head = float(weight.shape[0] // (heads + kv_heads) * ranks)
    return QkNorm(weight, heads, kv_heads, heads * per_head, kv_heads * per_head, eps)


def split_heads(qkv: Tensor, *, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (heads + 2 kv_heads) * head_dim] -> q, k, v, each [T, its heads, head_dim] fp32.

    A row that overflowed must not leave NaN or infinity in a block: whoever gets the block next
    multiplies the masked values by a probability of 0, and 0 * NaN is NaN.
    """
    finite = qkv.nan_to_num().float().unflatten(1, (heads + 2 * kv_heads, -1))
    q, k, v = torch.split(finite, [heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def qk_norm(
    q: Tensor, k: Tensor, norm: QkNorm, *, group: Collective | None = None
) -> tuple[Tensor, Tensor]:
    """Full-width RMS norm of q and of k [T, heads, head_dim] fp32: the mean of squares runs over
    all heads of the attention `group`, whose ranks' sums of squares [T, 2] are added; None: one
    rank.
    """
    q, k = q.flatten(1), k.flatten(1)
    sums = torch.stack((q.square().sum(-1), k.square().sum(-1)), dim=-1)  # [T, 2]
    if group is not None and group.size > 1:
        sums = group.all_reduce(sums)
    q_sum, k_sum = sums.split(1, dim=-1)
    q_weight, k_weight = norm.weight.split([q.shape[1], k.shape[1]])
    q = q * (q_sum / norm.q_count + norm.eps).rsqrt() * q_weight
    k = k * (k_sum / norm.k_count + norm.eps).rsqrt() * k_weight
    return q.unflatten(1, (norm.heads, -1)), k.unflatten(1, (norm.kv_heads, -1))


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of x [T, heads, head_dim] fp32; weight [head_dim]."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


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
    """`qk_norm`, rope on q and k, k and v into the cache; returns q [T, heads, head_dim].

    qkv [T, (heads + 2 kv_heads) * head_dim] is this rank's projection (which a kernel may
    overwrite); cos, sin from `rope.spec.cos_sin`; rows from `kvcache.spec.cache_rows`. All
    arithmetic is in fp32 and rounded once, at the end. The cache holds k / kv_scales[0] and
    v / kv_scales[1].
    """
    q, k, v = split_heads(qkv, heads=norm.heads, kv_heads=norm.kv_heads)
    q, k = qk_norm(q, k, norm, group=group)
    q, k = half_split_(q, cos, sin), half_split_(k, cos, sin)
    write(k, v, k_cache, v_cache, rows, kv_scales=kv_scales)
    return q.to(qkv.dtype)


def _qknr_case(
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
) -> Case:
    """`cache` is the number of blocks and their size; in FP8 it has scales other than 1."""
    num_blocks, block_size = cache
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tensors = {
        "qkv": (2.0 * normal(num_tokens, (heads + 2 * kv_heads) * head_dim)).to(dtype),
        "norm_weight": 1 + 0.2 * normal((heads + kv_heads) * head_dim),
        "positions": torch.randint(0, 1000, (num_tokens,), generator=generator, device=device),
        "k_cache": normal(num_blocks, kv_heads, block_size, head_dim).to(dtype),
        "v_cache": normal(num_blocks, kv_heads, block_size, head_dim).to(dtype),
        "slots": torch.randperm(num_blocks * block_size, generator=generator, device=device)[
            :num_tokens
        ],
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


def _qknr_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _qknr_case(
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


def _qknr_wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """MiniMax-M2's slices under TP1, TP2 and TP4."""
    return [
        _qknr_case(
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


def _qknr_apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """Caches of the dtype that the case names, else of the case's own: what is stored is rounded in
    the definition too.
    """
    t, n = case.tensors, case.numbers
    k_cache, v_cache = (
        t[name].to(n.get("cache_dtype", t[name].dtype), copy=True)
        for name in ("k_cache", "v_cache")
    )
    cos, sin = cos_sin(
        t["positions"], signed_frequencies(n["rotary_dim"], 5e6).to(t["positions"].device)
    )
    rows = cache_rows(t["slots"], kv_heads=k_cache.shape[1], block_size=k_cache.shape[2])
    norm = kernel.prepare(
        t["norm_weight"], heads=n["heads"], kv_heads=k_cache.shape[1], eps=1e-6, ranks=1
    )
    q = kernel.run(
        t["qkv"].clone(),
        norm,
        cos,
        sin,
        k_cache,
        v_cache,
        rows,
        kv_scales=n.get("kv_scales", (1.0, 1.0)),
    )
    return q, k_cache, v_cache


def _qknr_cost(case: Case) -> Cost:
    qkv = case.tensors["qkv"]
    return Cost(num_bytes=2 * num_bytes(qkv), flops=7 * qkv.numel())


# --- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferencePlan:
    """Block tables and lengths as they are."""

    block_tables: Tensor  # [S, blocks] int64
    first_positions: tuple[int, ...]  # position of each sequence's first query
    counts: tuple[int, ...]  # queries of each sequence


def plan(
    queries: AttentionMetadata, shape: PagedShape, *, dtype: torch.dtype, quantize: bool = False
) -> ReferencePlan:
    """`dtype` of the queries. `quantize` asks `run` for `QuantizedActivations`, which the
    definition does not make.
    """
    assert not quantize, "the definition has no FP8 output"
    lengths, counts = queries.host_seq_lens, queries.host_query_lens
    firsts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
    return ReferencePlan(queries.used_tables(shape.block_size), firsts, counts)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: ReferencePlan,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """q [T, heads, head_dim], caches [num_blocks, kv_heads, block_size, head_dim] -> [T, heads *
    head_dim].

    A key is its cache row * kv_scales[0], a value its row * kv_scales[1].
    """
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = k_cache.shape[1:3]
    outputs, first_query = [q.new_empty(0, heads * head_dim)], 0
    for table, first, count in zip(
        plan.block_tables, plan.first_positions, plan.counts, strict=True
    ):
        length = first + count
        if first < 0:  # a row of padding
            outputs.append(q.new_zeros(count, heads * head_dim))
            first_query += count
            continue
        k, v = (
            _rows_of(cache, table[: -(-length // block_size)])
            .transpose(1, 2)
            .reshape(-1, kv_heads, head_dim)[:length]
            .float()
            .mul_(scale)
            .repeat_interleave(heads // kv_heads, 1)
            for cache, scale in zip((k_cache, v_cache), kv_scales, strict=True)
        )
        queries = q[first_query : first_query + count].float()
        scores = torch.einsum("thd,jhd->htj", queries, k) * head_dim**-0.5
        hidden = (
            torch.arange(length, device=q.device)
            > torch.arange(first, length, device=q.device)[:, None]
        )
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("htj,jhd->thd", weights, v).reshape(count, -1).to(q.dtype))
        first_query += count
    return torch.cat(outputs)


def _rows_of(cache: Tensor, blocks: Tensor) -> Tensor:
    """A copy of `blocks` of the cache; indexing does not take FP8 itself."""
    return (
        cache.view(torch.uint8)[blocks].view(cache.dtype)
        if cache.element_size() == 1
        else cache[blocks]
    )


def _paged(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    lengths: Sequence[int],
    shape: PagedShape,
    head_dim: int,
) -> dict[str, Tensor]:
    """Caches and shuffled block tables for sequences of these lengths, on the generator's
    device.
    """
    device = generator.device
    per_sequence = [-(-length // shape.block_size) for length in lengths]
    cache = (sum(per_sequence) + 2, shape.kv_heads, shape.block_size, head_dim)
    blocks = torch.randperm(cache[0], generator=generator, device=device)
    tables = torch.zeros(
        len(lengths), max(per_sequence, default=1), dtype=torch.int64, device=device
    )
    used = 0
    for row, count in enumerate(per_sequence):
        tables[row, :count] = blocks[used : used + count]
        used += count
    return {
        "k_cache": torch.randn(*cache, generator=generator, device=device).to(dtype),
        "v_cache": torch.randn(*cache, generator=generator, device=device).to(dtype),
        "block_tables": tables,
    }


def _attention_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    lengths: Sequence[int],
    counts: Sequence[int],
    shape: PagedShape,
    head_dim: int = 128,
    cache_dtype: torch.dtype | None = None,
) -> Case:
    """Queries of the last `counts` tokens of each sequence; a cache in FP8 has scales other than
    1.
    """
    tensors = _paged(
        cache_dtype or dtype, generator, lengths=lengths, shape=shape, head_dim=head_dim
    )
    q = torch.randn(
        sum(counts),
        shape.kv_heads * shape.group,
        head_dim,
        generator=generator,
        device=generator.device,
    )
    tensors["q"] = q.to(dtype)
    numbers = {"lengths": tuple(lengths), "counts": tuple(counts), "shape": shape}
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
    return Case(f"{tokens} queries={sum(counts)} {sizes} {cache_dtype or dtype}", tensors, numbers)


def _decode_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
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
            ((150,), 1, 4, 128, 16),
            ((5, 130, 1, 520), 2, 3, 12, 5),
            ((16, 32, 31), 1, 12, 20, 16),
        )
    ]


def _prefill_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
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
        )
    ]


def _decode_wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """MiniMax-M2's slices (8, 4 and 2 KV heads), one to a hundred sequences, rows of padding, one
    very long sequence.
    """
    uneven = [1 + 37 * i % 2200 for i in range(99)] + [0]
    return [
        _attention_case(
            dtype,
            generator,
            lengths=lengths,
            counts=(1,) * len(lengths),
            shape=PagedShape(kv_heads=kv_heads, group=6, block_size=block_size),
            cache_dtype=cache_dtype,
        )
        for lengths, kv_heads, block_size, cache_dtype in (
            ([1064], 2, 16, None),
            ([1064], 8, 64, None),
            ([1064] * 16, 2, 16, None),
            ([1064] * 100, 8, 64, None),
            (uneven, 4, 32, None),
            ([5, 60_000, 0, 300], 2, 16, None),
            ([1064] * 100, 2, 16, FP8),
            (uneven, 8, 64, FP8),
        )
    ]


def _prefill_wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """MiniMax-M2's slices: whole prompts, chunks on a prefix, odd counts."""
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
        )
    ]


def _attention_apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t, n = case.tensors, case.numbers
    queries = attention_metadata(t["block_tables"], n["lengths"], n["counts"])
    plan = kernel.prepare(queries, n["shape"], dtype=t["q"].dtype)
    return (
        kernel.run(
            t["q"], t["k_cache"], t["v_cache"], plan, kv_scales=n.get("kv_scales", (1.0, 1.0))
        ),
    )


def _attention_cost(case: Case) -> Cost:
    """Every key and value of the sequences read once, queries read and results written; the
    products of visible pairs.
    """
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


_ATTENTION_TOLERANCE = rounding_tolerance(
    reason="probabilities and the result are rounded to the dtype once each; |out| about 1"
)

OPS = (
    Op(
        name=QK_NORM_ROPE_WRITE,
        sequence=("attention.qk_norm", "rope.half_split", "kvcache.write"),
        summary="full-width RMS norm of q and k, rope, keys and values into the paged cache",
        reference=Kernel(QK_NORM_ROPE_WRITE, "reference", qk_norm_rope_write, prepare_qk_norm),
        cases=_qknr_cases,
        wide=_qknr_wide,
        wide_error=5e-3,
        apply=_qknr_apply,
        tolerance=rounding_tolerance(scale=2.0, reason="one rounding to the dtype; |q| up to 5"),
        cost=_qknr_cost,
    ),
    Op(
        name=DECODE,
        summary="one query per sequence against its paged keys and values",
        reference=Kernel(DECODE, "reference", attend, plan),
        cases=_decode_cases,
        wide=_decode_wide,
        wide_error=5e-3,
        apply=_attention_apply,
        tolerance=_ATTENTION_TOLERANCE,
        cost=_attention_cost,
    ),
    Op(
        name=PREFILL,
        summary="runs of queries, one per sequence, causal, each on top of its cached prefix",
        reference=Kernel(PREFILL, "reference", attend, plan),
        cases=_prefill_cases,
        wide=_prefill_wide,
        wide_error=5e-3,
        apply=_attention_apply,
        tolerance=_ATTENTION_TOLERANCE,
        cost=_attention_cost,
    ),
)
