import itertools
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton_support import (
    Group,
    Ranks,
    paged,
    relative_error,
    words_of,
)  # imported before the kernels

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention import op as spec
from negamax.kernels.attention import triton as kernels
from negamax.kernels.attention import triton_decode_plan, triton_prefill
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape, attention_metadata
from negamax.kernels.attention.triton_decode import has_one_new_key
from negamax.kernels.attention.triton_shared import split_queries
from negamax.kernels.kvcache.op import FP8, KvCache, TokenPlaces, cache_rows
from negamax.kernels.rotary import cos_sin, signed_frequencies
from tests.kernel_cases import attention as cases

FP8_ERROR = 0.03  # error of rounding to e4m3


def paged_pair(
    lengths: list[int], shape: PagedShape, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return caches, and block tables with a spare first row and invalid unused entries."""
    sizes = {"heads": shape.kv_heads, "dim": 128, "block_size": shape.block_size}
    keys, found = paged(lengths, dtype=torch.float32, **sizes)
    tables = torch.full((len(lengths) + 1, found.shape[1]), 10**6, dtype=torch.int32)
    for row, length in enumerate(lengths):
        used = -(-length // shape.block_size)
        tables[row + 1, :used] = found[row, :used]
    return keys.to(dtype), keys.flip(-1).to(dtype), tables


def queries_of(tables: Tensor, lengths: list[int], counts: list[int]) -> AttentionMetadata:
    """Return metadata of sequences whose tables are in rows 1, 2, ... in order."""
    return attention_metadata(tables, lengths, counts, indices=range(1, 1 + len(lengths)))


def decode(q: Tensor, cache: KvCache, plan: Any, want: Tensor) -> QuantizedActivations:
    got = kernels.decode(q, cache, plan)
    assert isinstance(got, QuantizedActivations)
    assert relative_error(got.hidden, want) < 5e-3
    assert all((parts == -1).all() for parts in triton_decode_plan.WORKSPACES.values())
    return got


class Fp8Keys(NamedTuple):
    FP8_KEYS: bool = True
    DOT: tl.dtype = tl.float32


@triton.jit
def _split_kernel(q, parts, factors, ROWS: tl.constexpr, C: tl.constexpr):
    row, at = tl.arange(0, ROWS), tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    operands, factor = split_queries(tl.load(q + at), C)
    for i in tl.static_range(2):
        tl.store(parts + i * ROWS * 32 + at, operands[i].to(tl.float32))
    tl.store(factors + row, factor)


def test_bf16_queries_are_sums_of_two_fp8_matrices() -> None:
    q = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    q[1:3] *= torch.tensor([[1e30], [1e-30]])
    q[3], q[4], q[5, ::2] = 0, 3.38e38, q[5, ::2] * 1e-3
    parts, factors = torch.empty(2, 16, 32), torch.empty(16)
    _split_kernel[(1,)](q, parts, factors, ROWS=16, C=Fp8Keys())
    assert torch.equal(parts.to(FP8).float(), parts)
    largest, found = q.float().abs().amax(1, keepdim=True), parts.sum(0) * factors[:, None]
    assert ((found == q) | (q.abs() < largest * 2**-9)).all()
    assert ((found - q).abs() <= largest * 2**-17).all()


@pytest.fixture
def split_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a GPU of two multiprocessors split several sequences."""
    one = replace(triton_decode_plan.DECODE, min_splits=1)
    monkeypatch.setattr(triton_decode_plan, "DECODE", one)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "lengths", "cache_dtype", "block_size"),
    [
        (2, [0, 129, 3, 0, 64, 65], torch.bfloat16, 16),
        (2, [65, 1], FP8, 64),
        (1, [130, 70, 0], FP8, 64),
        (1, [150], torch.bfloat16, 16),
    ],
    ids=["runs", "FP8 runs", "FP8 pieces", "pieces"],
)
def test_decode_splits_sequences_and_leaves_padding_zero(
    kv_heads: int,
    lengths: list[int],
    cache_dtype: torch.dtype,
    block_size: int,
    captured: bool,
    split_early: None,
) -> None:
    """During capture the host has no counts, and the newest key is read separately."""
    shape = PagedShape(kv_heads=kv_heads, group=6, block_size=block_size)
    heads = 6 * kv_heads
    k_cache, v_cache, tables = paged_pair(lengths, shape, dtype=cache_dtype)
    queries = queries_of(tables, lengths, [1] * len(lengths))
    q = torch.randn(len(lengths), heads, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    cache = KvCache(k_cache, v_cache, (0.5, 2.0))
    want = spec.attend(q.float(), cache, spec.plan(queries, shape))
    if captured:
        queries = replace(queries, host_seq_lens=(), host_query_lens=())
    plan = kernels.plan_decode(queries, replace(shape, quantize=True))
    assert plan.split_kv == (kv_heads == 1)
    for _ in range(2):
        got = decode(q, cache, plan, want)
        for padding in (row for row, length in enumerate(lengths) if length == 0):
            assert not got.hidden[padding].any()
            assert torch.equal(got.scale[padding], torch.ones(heads))
        assert relative_error(got.dequantize(), got.hidden) < FP8_ERROR


def test_keys_of_step_with_draft_tokens_are_read_after_they_are_written(split_early: None) -> None:
    shape = PagedShape(kv_heads=1, group=6, block_size=16)
    queries = queries_of(torch.zeros(2, 1), [4, 5], [1, 1])
    alone = replace(queries, host_seq_lens=(), host_query_lens=())
    drafts = replace(alone, max_decode_run=2)
    for case, wanted in ((queries, False), (alone, True), (drafts, False)):
        plan = kernels.plan_decode(case, shape)
        assert plan.split_kv and has_one_new_key(plan) == wanted


@pytest.mark.parametrize(
    ("kv_heads", "group", "num_queries", "cache_dtype"),
    [(1, 6, 4, FP8), (2, 6, 4, torch.bfloat16), (1, 16, 2, torch.bfloat16)],
    ids=["splits", "runs", "two programs"],
)
def test_draft_tokens_read_the_keys_of_their_sequence_once(
    kv_heads: int,
    group: int,
    num_queries: int,
    cache_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = replace(triton_decode_plan.DECODE, min_runs=1)
    monkeypatch.setattr(triton_decode_plan, "DECODE", few)
    shape, max_run = PagedShape(kv_heads=kv_heads, group=group, block_size=16), 4
    lengths, counts = [130, 0, 67], [4, 0, 3]
    k_cache, v_cache, tables = paged_pair(lengths, shape, dtype=cache_dtype)
    queries = cases.run_metadata(tables[1:], lengths, counts, max_run=max_run)
    q = torch.randn(12, kv_heads * group, 128, generator=torch.Generator().manual_seed(1))
    q = q.bfloat16()
    cache = KvCache(k_cache, v_cache, (0.5, 2.0))
    want = spec.attend(q.float(), cache, queries)
    q[sum(counts) :] = torch.nan  # The rows of padding are undefined.
    captured = replace(queries, host_seq_lens=(), host_query_lens=())
    plan = kernels.plan_decode(captured, replace(shape, quantize=True))
    assert plan.num_queries == num_queries and plan.split_kv == (kv_heads * group == 6)
    assert len(plan.sequences) == 8 * len(lengths) * max_run // num_queries
    for _ in range(2):
        got = decode(q, cache, plan, want)
        assert not got.hidden[sum(counts) :].any()
        assert torch.equal(got.scale[sum(counts) :], torch.ones(5, kv_heads * group))


def test_plans_split_a_long_sequence_and_need_no_sequences() -> None:
    shape = PagedShape(kv_heads=1, group=6, block_size=32)
    for lengths, pieces in (([700, 70, 0], [4, 2, 1]), ([700], [3])):
        queries = queries_of(torch.zeros(4, 22), lengths, [1] * len(lengths))
        assert kernels.plan_decode(queries, shape).sequences.view(-1, 8)[:, 5].tolist() == pieces
    shape = PagedShape(kv_heads=1, group=2, block_size=16)
    k_cache, v_cache, tables = paged_pair([1], shape)
    queries, q = queries_of(tables, [], []), torch.empty(0, 2, 128, dtype=torch.bfloat16)
    cache = KvCache(k_cache, v_cache)
    decode, prefill = (kernels.plan_decode, kernels.decode), (kernels.plan_prefill, kernels.prefill)
    for prepare, run in (decode, prefill):
        assert run(q, cache, prepare(queries, shape)).shape == (0, 256)


@pytest.mark.parametrize("seed", range(6))
def test_decode_plan_gives_every_tile_to_one_program(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice((1, 2, 3, 5, 6, 7, 40, 200))
    lengths = [rng.choice((0, 1, 64, 65, rng.randrange(3000))) for _ in range(count)]
    shape = PagedShape(kv_heads=rng.choice((1, 2)), group=6, block_size=16)
    queries = attention_metadata(torch.zeros(count, 1, dtype=torch.int64), lengths, [1] * count)
    plan = kernels.plan_decode(queries, shape)
    sequences, records = plan.sequences.view(-1, 8).tolist(), plan.work.view(-1, 16).tolist()
    visits: dict[int, list[tuple[int, int, int]]] = {}  # sequence -> (program, first tile, end)
    for program, (tile, stop, seq, _, *known) in enumerate(records):
        assert tile == stop or known[:6] == sequences[seq][:6]
        while tile < stop:
            until = min(stop, sequences[seq][1])
            visits.setdefault(seq, []).append((program, tile, until))
            tile, seq = until, seq + 1
    first_tile = 0
    for seq, length in enumerate(lengths):
        base, end, tokens, row, first, parts = sequences[seq][:6]
        assert (base, tokens, row) == (first_tile, length, seq)
        assert end == first_tile + max(1, -(-length // 64))
        programs, starts, ends = zip(*visits[seq], strict=True)
        assert programs == tuple(range(first, first + parts))
        assert (base, *ends) == (*starts, end)
        first_tile = end


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_prefill_runs_several_sequences_on_their_prefixes(cache_dtype: torch.dtype) -> None:
    shape = PagedShape(kv_heads=1, group=2, block_size=32)
    lengths, counts = [140, 40, 65], [70, 40, 1]
    k_cache, v_cache, tables = paged_pair(lengths, shape, dtype=cache_dtype)
    queries = queries_of(tables, lengths, counts)
    q = torch.randn(sum(counts), 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    cache = KvCache(k_cache, v_cache, (0.5, 2.0))
    want = spec.attend(q.float(), cache, spec.plan(queries, shape))
    got = kernels.prefill(q, cache, kernels.plan_prefill(queries, replace(shape, quantize=True)))
    assert isinstance(got, QuantizedActivations)
    assert relative_error(got.hidden, want) < 5e-3
    assert relative_error(got.dequantize(), got.hidden) < FP8_ERROR


@given(
    st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 70)), min_size=1, max_size=9),
    st.sampled_from([(1, 6), (8, 6), (1, 16)]),
)
def test_prefill_splits_by_keys(sequences: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    """Check that every split tile has all its splits in adjacent programs, and none are missing."""
    tiles = [(7 * i, count, start, i) for i, (start, count) in enumerate(sequences)]
    shape, programs = PagedShape(kv_heads=heads[0], group=heads[1], block_size=16), 264
    listed = torch.tensor(sorted(tiles, key=lambda tile: -bool(tile[1])), dtype=torch.int32)
    found = triton_prefill._split_tiles(listed, shape, size=64, programs=programs)
    works = [work for work in found.work.tolist() if work[2]]
    groups: dict[tuple[int, ...], list[int]] = {}
    for split, *tile, splits, place in works:
        groups.setdefault((*tile, splits, place), []).append(split)
    assert all(of_tile == list(range(splits)) for (*_, splits, _), of_tile in groups.items())
    assert sorted(each[:4] for each in groups) == sorted(each for each in tiles if each[1])
    several = [each for each in groups if each[4] > 1]
    assert [tuple(row[1:]) for row in found.merged.tolist() if row[2]] == several
    ends = list(itertools.accumulate((each[4] for each in several), initial=0))
    assert [each[5] for each in several] == ends[:-1] and ends[-1] <= found.places
    for _, count, start, _, splits, _ in several:
        assert (start + count) // splits >= 512


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_norms_sum_over_ranks_and_keep_broken_rows_finite(
    cache_dtype: torch.dtype, peers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, heads, kv_heads, block_size, rounds = 3, 3, 1, 16, 2
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * 128, generator=generator).bfloat16() * 3
    qkv[1, ::7] = torch.nan
    qkv[1, 5] = torch.inf
    weight = 1 + 0.2 * torch.randn((heads + kv_heads) * 128, generator=generator)
    cos, sin = cos_sin(torch.tensor([5, 900, 31]), signed_frequencies(64, 5e6))
    rows = cache_rows(torch.tensor([17, 2, -1]), kv_heads=kv_heads, block_size=block_size)
    others = 500 * torch.rand(tokens, 2, generator=generator)
    ranks = Ranks(2, rows=4, words=2)
    group = Group(ranks, 0)
    monkeypatch.setattr(group, "all_reduce", lambda tensor: tensor + others)
    if not peers:
        group.peers = None
    scales = (0.5, 0.25)
    caches = [torch.zeros(4, kv_heads, block_size, 128, dtype=cache_dtype) for _ in range(4)]
    norm = spec.prepare_qk_norm(weight, heads=heads, kv_heads=kv_heads, eps=1e-6, ranks=2)
    kept = rows >= 0
    cache, at = KvCache(*caches[:2], scales), TokenPlaces(cos, sin, rows.clamp(0))
    want = spec.qk_norm_rope_write(qkv.float(), norm, at, cache, group=group)
    cache, at = KvCache(*caches[2:], scales), TokenPlaces(cos, sin, rows)
    for _ in range(rounds):
        for row, sums in enumerate(others):
            ranks.arrive(0, sender=1, row=row, payload=words_of(sums))
        got = kernels.qk_norm_rope_write(qkv.clone(), norm, at, cache, group=group)
        assert got.isfinite().all()
        assert relative_error(got[[0, 2]], want[[0, 2]]) < 5e-3
        for stored, defined in zip(caches[2:], caches[:2], strict=True):
            flat, expected = stored.float().view(-1, 128), defined.float().view(-1, 128)
            assert flat.isfinite().all()
            assert relative_error(flat[rows[kept]][:1], expected[rows[kept]][:1]) < (
                FP8_ERROR if cache_dtype == FP8 else 5e-3
            )
            assert not flat[3:17].any() and not flat[18:].any()
    if peers:
        assert ranks.epochs[0].tolist() == [rounds] * tokens + [0]
        assert (ranks.copies[1][rounds & 1, :tokens, 0] >> 32 == rounds).all()
