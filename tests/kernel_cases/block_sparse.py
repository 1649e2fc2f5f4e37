from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import attention_metadata
from negamax.kernels.block_sparse.op import (
    BLOCK_SPARSE_DECODE,
    BLOCK_SPARSE_MERGE_SHARDS,
    BLOCK_SPARSE_NORM_ROPE_WRITE,
    BLOCK_SPARSE_PREFILL,
    BLOCK_SPARSE_SELECT,
    BLOCK_SPARSE_SELECT_SHARD,
)
from negamax.kernels.block_sparse.selection import (
    NO_BLOCK,
    NO_KEY,
    BlockSelection,
    IndexShard,
    SparseShape,
    attended_tokens,
    best_keys,
    choose,
    pages_of,
)
from negamax.kernels.kvcache.op import FP8
from negamax.kernels.op import AnyKernel
from tests.kernel_cases.attention import (
    cache_of,
    copy_stored,
    describe_lengths,
    norm_cost,
    paged_caches,
    places_of,
    run_metadata,
    stored_cache,
)
from tests.kernel_cases.case import Case, Cost, OpCases, Rows, num_bytes, randn, table, tabled

# MiniMax-M3 on one of four ranks, and on a single GPU
M3 = SparseShape(kv_heads=1, group=16, block_size=128, sparse_block_size=128, topk_blocks=16)
M3_WHOLE = replace(M3, kv_heads=4)
WHOLE, SHARD = IndexShard(), IndexShard(rank=3, ranks=4, heads=4, first_head=3)

# --- norms, rope, cache write --------------------------------------------------------------------


# tokens, (heads, KV heads), (width of a head, of an index head), rotated columns
_NORM_SMALL = (
    (0, (2, 1), (16, 16), 8, (4, 8)),
    (1, (16, 1), (128, 128), 64, (4, 8)),
    (5, (6, 3), (20, 12), 10, (4, 8)),
    (9, (4, 2), (16, 12), 8, (4, 8), None, IndexShard(rank=1, ranks=3, heads=6, first_head=2)),
)
_NORM_WIDE = (
    (1, (16, 1), (128, 128), 64, (32, 128)),
    (100, (64, 4), (128, 128), 64, (32, 128)),
    (3001, (16, 1), (128, 128), 64, (32, 128)),
    (100, (16, 1), (128, 128), 64, (32, 128), FP8, SHARD),
)


def _norm_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    rotary_dim: int,
    cache: tuple[int, int],
    cache_dtype: torch.dtype | None = None,
    shard: IndexShard = WHOLE,
) -> Case:
    """Make a case. `heads` counts query and KV heads; `widths` is for heads and index heads."""
    (own, kv), (head_dim, index_dim), (num_blocks, block_size) = heads, widths, cache
    normal = partial(randn, generator=generator)
    on_device: dict[str, Any] = {"generator": generator, "device": generator.device}
    width = (own + 2 * kv) * head_dim + ((shard.heads or kv) + 1) * index_dim
    tensors = {
        "projected": normal(num_tokens, width, dtype=dtype, scale=2.0),
        "norm_weight": 1 + normal(2, head_dim, dtype=torch.float32, scale=0.2),
        "index_norm_weight": 1 + normal(2, index_dim, dtype=torch.float32, scale=0.2),
        "positions": torch.randint(0, 1000, (num_tokens,), **on_device),
        "k_cache": normal(num_blocks, kv, block_size, head_dim, dtype=dtype),
        "v_cache": normal(num_blocks, kv, block_size, head_dim, dtype=dtype),
        "index_cache": normal(-(-num_blocks // shard.ranks), 1, block_size, index_dim, dtype=dtype),
        "slots": torch.randperm(num_blocks * block_size, **on_device)[:num_tokens],
    }
    numbers: dict[str, Any] = {"heads": own, "rotary_dim": rotary_dim, "shard": shard}
    label = f"T={num_tokens} heads={own} kv_heads={kv} widths={widths} rotary_dim={rotary_dim}"
    if shard.ranks > 1:
        label += f" index keys of rank {shard.rank} of {shard.ranks}"
    if cache_dtype is not None:
        numbers |= {"cache_dtype": cache_dtype, "kv_scales": (0.5, 2.0)}
        label = f"{label} {cache_dtype}"
    return Case(label, tensors, numbers)


def apply_norm(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t, n = case.tensors, case.numbers
    cache, index = stored_cache(case), copy_stored(case, "index_cache")
    heads = {"heads": n["heads"], "kv_heads": cache.k.shape[1], "shard": n["shard"]}
    norm = kernel.prepare(t["norm_weight"], t["index_norm_weight"], eps=1e-6, **heads)
    q, index_q = kernel.run(t["projected"].clone(), norm, places_of(case), cache, index)
    return q, index_q, cache.k, cache.v, index


# --- block selection and attention ---------------------------------------------------------------

# lengths, queries, (KV heads, group, width, block size, sparse block size, top-k, init, local)
_DECODE = (
    ((1, 100), (1, 1), (1, 1, 8, 16, 16, 2, 0, 1)),
    ((150, 140, 65), (1, 1, 1), (1, 4, 128, 32, 16, 4, 0, 1)),
    ((5, 130, 1, 520), (1, 1, 1, 1), (2, 3, 16, 32, 32, 3, 0, 1)),
    ((333, 32, 31), (1, 1, 1), (2, 2, 20, 16, 16, 4, 1, 2)),
)
# Rows with drafts: each token is a decode, and padding follows.
_RUNS = (
    ((150, 140, 65, 1), (4, 2, 4, 1), (2, 2, 16, 32, 16, 3, 0, 1)),
    ((333, 32, 31, 200, 90), (3, 1, 4, 4, 2), (1, 4, 32, 16, 16, 4, 1, 2)),
)
_MAX_RUN = 4
_PREFILL = (
    ((1,), (1,), (1, 1, 8, 16, 16, 2, 0, 1)),
    ((70,), (70,), (1, 3, 32, 16, 16, 1, 0, 1)),
    ((147, 3, 238), (70, 3, 33), (2, 2, 16, 32, 16, 3, 0, 1)),
    ((529, 2), (9, 2), (1, 4, 20, 32, 32, 4, 1, 2)),
)


def _rows(cases: Rows, *rest: Any) -> Rows:
    """Yield lengths, queries, shape and width of small cases, followed by `rest`."""
    for lengths, counts, (kv_heads, group, width, *of_blocks) in cases:
        yield lengths, counts, SparseShape(kv_heads, group, *of_blocks), width, *rest


_DECODE_SMALL = (*_rows(_DECODE), *_rows(_RUNS, None, _MAX_RUN))
_PREFILL_SMALL = tuple(_rows(_PREFILL))
_SELECT_SMALL = (*_rows((*_DECODE, *_PREFILL)), *_rows(_PREFILL[-1:], FP8), *_DECODE_SMALL[-2:])

# MiniMax-M3's shard on one of four ranks: contexts of 1k to 1M tokens, padding, rows that verify
# three draft tokens, whole prompts, and chunks after a prefix.
_LONG = [1000, 32_000, 0, 128_001]
_DECODE_FULL = (
    ([1064], None), ([32_000] * 4, None), (_LONG, None), (_LONG, FP8), ([2100] * 100, FP8)
)  # fmt: skip
_RUNS_FULL = ([32_000, 128_001, 777, 2100], [4, 4, 2, 3])
_PREFILL_FULL = (
    ([1000] * 4, [1000] * 4, None),
    ([32_000, 2049, 777], [300, 1, 777], None),
    ([32_000, 128_001], [4, 4], None),
    ([32_000, 2100], [300, 2100], FP8),
)


def _decodes(rows: Rows, shape: SparseShape) -> Rows:
    for lengths, cache_dtype in rows:
        yield lengths, [1] * len(lengths), shape, 128, cache_dtype


def _prefills(shape: SparseShape) -> Rows:
    for lengths, counts, cache_dtype in _PREFILL_FULL:
        yield lengths, counts, shape, 128, cache_dtype


_M3_RUNS = ([32_000] * 4, [1] * 4, M3_WHOLE), (*_RUNS_FULL, M3, 128, None, _MAX_RUN)
_ONE_LONG = ([1_000_000], FP8)
_SELECT_WIDE = (
    *_decodes((*_DECODE_FULL, ([48_000, 200_001], FP8), _ONE_LONG), M3), *_prefills(M3), *_M3_RUNS
)  # fmt: skip
_SELECT_SHARD_WIDE = (*_decodes((*_DECODE_FULL, _ONE_LONG), M3_WHOLE), *_prefills(M3_WHOLE))


def _select_shard_case(
    dtype: torch.dtype, generator: torch.Generator, *row: Any, rank: int, ranks: int
) -> Case:
    case = _select_case(dtype, generator, *row)
    cache, shape = case.tensors["index_cache"], case.numbers["shape"]
    own = cache[: -(-len(cache) // ranks)]  # any block
    shape = replace(shape, shard=IndexShard(rank, ranks, shape.kv_heads))
    label = f"{case.label} rank {rank} of {ranks}"
    return Case(label, case.tensors | {"index_cache": own}, case.numbers | {"shape": shape})


def _merge_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    lengths: Sequence[int],
    counts: Sequence[int],
    shape: SparseShape,
    *_: Any,
    shard: IndexShard | None = None,
) -> Case:
    shape = replace(shape, shard=shard or IndexShard(0, 3, 2 * shape.kv_heads, shape.kv_heads))
    ranks, heads = shape.shard.ranks, shape.index_heads
    num_blocks = -(-max(lengths) // shape.sparse_block_size)
    scores = randn(sum(counts), heads, num_blocks, dtype=torch.float32, generator=generator)
    positions = _positions(lengths, counts).to(scores.device)
    numbers = torch.arange(num_blocks, device=scores.device).expand(len(positions), -1)
    keys = [
        best_keys(scores[..., rank::ranks], numbers[:, rank::ranks], positions, shape)
        for rank in range(ranks)
    ]
    width = -(-max(lengths) // shape.block_size)
    tables = torch.arange(width * len(lengths), device=scores.device).view(len(lengths), width)
    tensors = {"keys": torch.stack(keys), "block_tables": tables.int()}
    case = _case(lengths, counts, shape, 0, torch.int64, tensors)
    return replace(case, label=f"{case.label} of {ranks} shards")


def _select_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    lengths: Sequence[int],
    counts: Sequence[int],
    shape: SparseShape,
    width: int = 128,
    cache_dtype: torch.dtype | None = None,
    max_run: int = 0,
) -> Case:
    """Make index queries of the last `counts` tokens. `run_metadata` explains `max_run`."""
    one_head = SparseShape(1, shape.kv_heads, shape.block_size, shape.block_size, 1)
    caches = paged_caches(cache_dtype or dtype, generator, lengths, shape=one_head, head_dim=width)
    size = (max_run * len(lengths) or sum(counts), shape.kv_heads, width)
    tensors = {
        "index_q": randn(*size, dtype=dtype, generator=generator),
        "index_cache": caches["k_cache"],
        "block_tables": caches["block_tables"],
    }
    return _case(lengths, counts, shape, width, cache_dtype or dtype, tensors, max_run=max_run)


def _attention_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    lengths: Sequence[int],
    counts: Sequence[int],
    shape: SparseShape,
    width: int = 128,
    cache_dtype: torch.dtype | None = None,
    max_run: int = 0,
) -> Case:
    """Make queries of the last `counts` tokens of each sequence, and select random blocks."""
    heads, num_queries = shape.kv_heads * shape.group, max_run * len(lengths) or sum(counts)
    tensors = {
        "q": randn(num_queries, heads, width, dtype=dtype, generator=generator),
        **paged_caches(cache_dtype or dtype, generator, lengths, shape=shape, head_dim=width),
    }
    num_blocks = -(-max(lengths) // shape.sparse_block_size)
    scores = randn(
        num_queries, shape.kv_heads, num_blocks, dtype=torch.float32, generator=generator
    )
    positions = _positions(lengths, counts, num_queries).to(scores.device)
    tensors["ids"] = choose(scores, positions, shape)
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    rows += [0] * (num_queries - len(rows))
    tensors["pages"] = pages_of(tensors["ids"], tensors["block_tables"][rows], shape)
    case = _case(lengths, counts, shape, width, cache_dtype or dtype, tensors, max_run=max_run)
    if cache_dtype == FP8:
        case.numbers["kv_scales"] = (0.5, 2.0)
    return case


def _positions(
    lengths: Sequence[int], counts: Sequence[int], num_queries: int | None = None
) -> Tensor:
    parts = [torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=True)]
    padding = torch.full(((num_queries or sum(counts)) - sum(counts),), -1)
    return torch.cat((*parts, padding))


def _case(
    lengths: Sequence[int],
    counts: Sequence[int],
    shape: SparseShape,
    width: int,
    dtype: torch.dtype,
    tensors: dict[str, Tensor],
    *,
    max_run: int = 0,
) -> Case:
    label = (
        f"{describe_lengths(lengths)} queries={sum(counts)}{' with drafts' * bool(max_run)} "
        f"kv_heads={shape.kv_heads} group={shape.group} width={width} "
        f"block_size={shape.block_size} "
        f"top {shape.topk_blocks} of {shape.sparse_block_size} {dtype}"
    )
    numbers: dict[str, Any] = {"lengths": tuple(lengths), "counts": tuple(counts), "shape": shape}
    return Case(label, tensors, numbers | ({"max_run": max_run} if max_run else {}))


def plan_of(kernel: AnyKernel, case: Case, *, dtype: torch.dtype) -> Any:
    tables, n = case.tensors["block_tables"], case.numbers
    lengths, counts = n["lengths"], n["counts"]
    if "max_run" in n:
        queries = run_metadata(tables, lengths, counts, max_run=n["max_run"])
    else:
        num_decodes = len(counts) if set(counts) == {1} else 0
        queries = attention_metadata(tables, lengths, counts, num_decodes=num_decodes)
    return kernel.prepare(queries, replace(n["shape"], dtype=dtype))


def apply_select(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    plan = plan_of(kernel, case, dtype=t["index_q"].dtype)
    choice = kernel.run(t["index_q"], t["index_cache"], plan)
    return choice.ids, choice.pages


def apply_select_shard(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """Return the blocks in ascending order; -1 stands for missing blocks and comes first."""
    t, shape = case.tensors, case.numbers["shape"]
    keys = kernel.run(
        t["index_q"], t["index_cache"], plan_of(kernel, case, dtype=t["index_q"].dtype)
    ).squeeze(0)
    n = case.numbers
    positions = _positions(n["lengths"], n["counts"], len(keys)).to(keys.device)
    is_none = (keys < NO_KEY + 2**32) | (positions < shape.dense_tokens).view(-1, 1, 1)
    blocks = (NO_BLOCK - (keys & NO_BLOCK)).masked_fill(is_none, -1)
    return (blocks.sort(dim=-1).values,)


def apply_merge_shards(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    choice = kernel.run(case.tensors["keys"], plan_of(kernel, case, dtype=torch.bfloat16), None)
    return choice.ids, choice.pages


def apply_attention(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    plan = plan_of(kernel, case, dtype=t["q"].dtype)
    return (kernel.run(t["q"], cache_of(case), BlockSelection(t["ids"], t["pages"]), plan),)


def select_cost(case: Case) -> Cost:
    """Count index keys of sequences with more than top-k blocks, and GEMMs of visible pairs."""
    t, n = case.tensors, case.numbers
    shape, (num_tokens, heads, width) = n["shape"], t["index_q"].shape
    long = [
        (length, count)
        for length, count in zip(n["lengths"], n["counts"], strict=True)
        if length > shape.dense_tokens
    ]
    row_bytes, ranks = width * t["index_cache"].element_size(), shape.shard.ranks
    return Cost(
        num_bytes=sum(length for length, _ in long) * row_bytes // ranks
        + num_bytes(t["index_q"])
        + 8 * num_tokens * heads * shape.topk_blocks,
        flops=2 * heads * width * sum(length * count for length, count in long) // ranks,
    )


def merge_cost(case: Case) -> Cost:
    keys, shape = case.tensors["keys"], case.numbers["shape"]
    share = num_bytes(keys) * shape.kv_heads // shape.index_heads
    return Cost(num_bytes=share + share // len(keys), flops=0)


def attention_cost(case: Case) -> Cost:
    """Count attended keys and values, queries and results once, and GEMMs of attended pairs."""
    t, n = case.tensors, case.numbers
    q, ids, shape = t["q"], t["ids"], n["shape"]
    pairs = int(attended_tokens(_positions(n["lengths"], n["counts"]), shape).sum())
    chosen = sum(  # blocks of all heads
        len(own[:, head].unique()) - int((own[:, head] < 0).any())
        for end, count in zip(accumulate(n["counts"]), n["counts"], strict=True)
        for own in (ids[end - count : end],)
        for head in range(shape.kv_heads)
    )
    block_bytes = shape.sparse_block_size * q.shape[-1] * t["k_cache"].element_size()
    return Cost(
        num_bytes=2 * chosen * block_bytes + 2 * num_bytes(q),
        flops=4 * pairs * q.shape[1] * q.shape[2],
    )


CASES = {
    BLOCK_SPARSE_NORM_ROPE_WRITE: tabled(
        _norm_case, _NORM_SMALL, apply_norm, norm_cost, _NORM_WIDE
    ),
    BLOCK_SPARSE_SELECT: tabled(
        _select_case, _SELECT_SMALL, apply_select, select_cost, _SELECT_WIDE
    ),
    BLOCK_SPARSE_SELECT_SHARD: OpCases(
        table(_select_shard_case, _SELECT_SMALL, rank=1, ranks=3),
        apply_select_shard,
        select_cost,
        table(_select_shard_case, _SELECT_SHARD_WIDE, rank=3, ranks=4),
    ),
    BLOCK_SPARSE_MERGE_SHARDS: OpCases(
        table(_merge_case, (*_DECODE_SMALL[:4], *_PREFILL_SMALL)),
        apply_merge_shards,
        merge_cost,
        table(_merge_case, (*_decodes(_DECODE_FULL, M3), *_prefills(M3)), shard=SHARD),
    ),
    BLOCK_SPARSE_DECODE: tabled(
        _attention_case, _DECODE_SMALL, apply_attention, attention_cost,
        (*_decodes(_DECODE_FULL, M3), *_M3_RUNS),
    ),
    BLOCK_SPARSE_PREFILL: tabled(
        _attention_case, _PREFILL_SMALL, apply_attention, attention_cost,
        (*_prefills(M3), ([8192], [2048], M3_WHOLE)),
    ),
}  # fmt: skip
