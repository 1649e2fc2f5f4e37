from dataclasses import replace

import pytest
import torch
from triton_support import Group, Ranks, ThreadGroup, Threads, paged, relative_error

from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata, attention_metadata
from negamax.kernels.attention.triton_prefill import PrefillPlan
from negamax.kernels.block_sparse import op as spec
from negamax.kernels.block_sparse import triton as kernels
from negamax.kernels.block_sparse import triton_select_decode
from negamax.kernels.block_sparse.selection import (
    BlockSelection,
    IndexShard,
    SparseShape,
    attended_tokens,
    best_keys,
    blocks_of_keys,
    choose,
    pages_of,
)
from negamax.kernels.block_sparse.triton import sparse_norm_rope_write
from negamax.kernels.block_sparse.triton_prefill import SparsePrefillPlan
from negamax.kernels.block_sparse.triton_select_decode import SelectDecodePlan
from negamax.kernels.block_sparse.triton_select_prefill import SelectPrefillPlan
from negamax.kernels.kvcache.op import FP8, KvCache, TokenPlaces, cache_rows
from negamax.kernels.rotary import cos_sin, signed_frequencies
from tests.layouts import full

FP8_ERROR = 0.03  # error of rounding to e4m3
DECODES, MIXED = (1, 1, 1, 1), (1, 41, 20, 4)


@pytest.mark.parametrize("dtypes", [(FP8, torch.bfloat16), (torch.bfloat16, FP8)])
def test_norms_write_two_dtypes_of_finite_rows(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Give the second token NaN and infinity, and the third token no slot."""
    heads, kv_heads, block_size = 6, 2, 16
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(3, (heads + 3 * kv_heads + 1) * 128, generator=generator).bfloat16()
    projected[1, ::7] = torch.nan
    projected[1, 5] = torch.inf
    weights = 1 + 0.2 * torch.randn(2, 2, 128, generator=generator)
    norm = spec.SparseHeadNorm(*weights, heads=heads, kv_heads=kv_heads, eps=1e-6)
    angles = cos_sin(torch.tensor([5, 900, 31]), signed_frequencies(64, 5e6))
    rows = cache_rows(torch.tensor([17, 2, -1]), kv_heads=kv_heads, block_size=block_size)

    def caches() -> list[torch.Tensor]:
        shapes = ((kv_heads, dtypes[0]), (kv_heads, dtypes[0]), (1, dtypes[1]))
        return [torch.zeros(4, n, block_size, 128, dtype=dtype) for n, dtype in shapes]

    scales, want, got = (0.5, 0.25), caches(), caches()
    own, real = KvCache(*want[:2], scales), TokenPlaces(*(x[:2] for x in angles), rows[:4])
    expected = spec.norm_rope_write(projected[:2].float(), norm, real, own, want[2])
    own = KvCache(*got[:2], scales)
    actual = sparse_norm_rope_write(projected, norm, TokenPlaces(*angles, rows), own, got[2])
    for result, defined in zip(actual, expected, strict=True):
        assert result.isfinite().all()
        assert relative_error(result[0], defined[0]) < 5e-3
    for stored, defined in zip(got, want, strict=True):
        assert stored.float().isfinite().all()
        error = FP8_ERROR if stored.dtype == FP8 else 5e-3
        assert relative_error(stored[1].float(), defined[1].float()) < error
        written = stored.float().abs().sum(dim=(1, 3)).nonzero().tolist()
        assert written == [[0, 2], [1, 1]]  # pairs of block and offset


SHAPE = SparseShape(kv_heads=1, group=2, block_size=32, sparse_block_size=16, topk_blocks=3)


def captured(queries: AttentionMetadata) -> AttentionMetadata:
    """Return `queries` as during capture, when only the device holds the lengths."""
    return replace(queries, host_seq_lens=(), host_query_lens=())


def chosen(
    queries: AttentionMetadata, index_q: torch.Tensor, cache: torch.Tensor, shape: SparseShape
) -> BlockSelection:
    """Select blocks by the kernels, twice with one plan, as two layers of a step do."""
    plan = kernels.plan_select(queries, shape)
    first, second = (kernels.select(index_q, cache, plan) for _ in range(2))
    assert torch.equal(first.ids, second.ids)
    for own in (plan.decode, plan.rest):
        if isinstance(own, SelectDecodePlan):
            assert not own.arrivals.any()
    return first


@pytest.mark.parametrize(
    ("dtype", "heads", "entries"),
    [(FP8, 1, 64), (torch.bfloat16, 2, 512), full(FP8, 3, 512), full(torch.bfloat16, 3, 8)],
)
def test_decodes_select_among_hundreds_of_blocks_and_leave_padding_empty(
    dtype: torch.dtype, heads: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_select_decode, "MOST_ENTRIES", entries)
    lengths = [4805, 1, 130, 40, 300, 300, 4805]
    cache, tables = paged(lengths, heads=1, dtype=dtype)
    shape = replace(SHAPE, kv_heads=heads)
    index_q = torch.randn(7, heads, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    index_q[4], index_q[5:] = torch.nan, 0
    queries = attention_metadata(tables, lengths, [1] * 7, num_decodes=7)
    want = spec.select(index_q.float(), cache, spec.plan(queries, shape))
    queries.seq_lens[1] = 0  # padding
    got = chosen(captured(queries), index_q, cache, shape)
    for row in (0, 2, 3):
        assert torch.equal(got.ids[row], want.ids[row])
        assert torch.equal(got.pages[row], want.pages[row])
    alike = [[-1, -1, -1], [0, 1, 18], [0, 1, 18], [0, 1, 300]]
    for head in range(heads):
        assert got.ids[[1, 4, 5, 6], head].tolist() == alike
    assert not got.pages[1].any()


@pytest.mark.parametrize("how", ["apart", "captured", "together"])
def test_draft_tokens_of_a_sequence_are_scored_together(how: str) -> None:
    apart = how != "together"
    shape = replace(SHAPE, kv_heads=2)
    lengths, counts = [130, 49, 200], [4, 3, 1]
    cache, tables = paged(lengths, heads=1)
    index_q = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = attention_metadata(tables, lengths, counts)
    want = spec.select(index_q.float(), cache, spec.plan(together, shape))
    queries = together
    if apart:
        rows = [0, 0, 0, 0, 1, 1, 1, 2]
        each = [127, 128, 129, 130, 47, 48, 49, 200]
        queries = attention_metadata(tables, each, [1] * 8, indices=rows, num_decodes=8)
    if how == "captured":
        queries = replace(captured(queries), max_decode_run=4)
    plan = kernels.plan_select(queries, shape)
    own = plan.decode if apart else plan.rest
    assert isinstance(own, SelectDecodePlan)
    records = own.queries[:, :3].tolist()
    assert [record for record in records if record[1]] == [[0, 4, 130], [4, 3, 49], [7, 1, 200]]
    got = chosen(queries, index_q, cache, shape)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.pages, want.pages)


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_mixed_batch_selects_for_both(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few queries, several programs share the blocks of a tile."""
    few = replace(platform.CPU, multiprocessors=8)
    monkeypatch.setattr(platform, "platform_of", lambda device: few)
    lengths, counts = [90, 330, 20], [1, 41, 20]
    cache, tables = paged(lengths, heads=1)
    index_q = torch.randn(62, 1, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    queries = attention_metadata(tables, lengths, counts, num_decodes=1)
    want = spec.select(index_q.float(), cache, spec.plan(queries, SHAPE))
    if is_captured:  # A captured step accepts any mixed batch, including sequences of one query.
        queries = captured(replace(queries, num_decodes=0))
    plan = kernels.plan_select(queries, SHAPE)
    assert isinstance(plan.rest, SelectPrefillPlan)
    assert plan.rest.splits == 8
    got = chosen(queries, index_q, cache, SHAPE)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.pages, want.pages)


@pytest.mark.parametrize(
    ("queries", "is_captured"),
    [(DECODES, True), (MIXED, False), full(DECODES, False), full(MIXED, True)],
)
def test_ranks_with_shards_select_what_one_rank_selects_from_all_index_keys(
    queries: tuple[int, ...], is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover hundreds of blocks, few blocks, unscored blocks and equal scores."""
    monkeypatch.setattr(triton_select_decode, "MOST_ENTRIES", 512 if is_captured else 128)
    few = replace(platform.CPU, multiprocessors=8)
    monkeypatch.setattr(platform, "platform_of", lambda device: few)
    lengths = (9700, 130, 40, 300) if max(queries) == 1 else (90, 330, 20, 200)
    cache, tables = paged(lengths, heads=1)
    num_tokens = sum(queries)
    index_q = torch.randn(num_tokens, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    index_q[-2] = 0
    metadata = attention_metadata(tables, lengths, queries, num_decodes=queries.count(1))
    if is_captured:
        metadata = captured(replace(metadata, num_actual_tokens=torch.tensor([num_tokens - 1])))
    threads, shape = Threads(2), replace(SHAPE, kv_heads=2)
    plan = spec.plan(attention_metadata(tables, lengths, queries), shape)
    want = spec.select(index_q.float(), cache, plan).ids[:-1]

    def choose(rank: int) -> BlockSelection:
        own = replace(SHAPE, shard=IndexShard(rank, 2, 2, rank))
        select = kernels.plan_select(metadata, own)
        merge = kernels.plan_merge_shards(metadata, own)
        keys = kernels.select_shard(index_q, cache[rank::2].contiguous(), select)
        return kernels.merge_shards(keys, merge, ThreadGroup(threads, rank, memory=None))

    for rank, got in enumerate(threads.run(choose)):
        assert torch.equal(got.ids[:-1], want[:, rank : rank + 1])
        of_tokens = tables[metadata.token_slots[:-1]]
        assert torch.equal(got.pages[:-1], pages_of(got.ids[:-1], of_tokens, SHAPE))
        if is_captured:
            assert (got.ids[-1] == -1).all() and not got.pages[-1].any()


def test_ranks_exchange_the_keys_of_few_tokens_by_the_ll_protocol() -> None:
    """Tokens that attend to all keys are not exchanged."""
    shape = replace(SHAPE, kv_heads=2, shard=IndexShard(1, 2, 4, 2))
    lengths, rounds = [130, 17, 300], 3
    _, tables = paged(lengths, heads=1)
    queries = attention_metadata(tables, lengths, [1] * 3, num_decodes=3)
    generator, ranks = torch.Generator().manual_seed(0), Ranks(2, rows=4, words=16)
    plan = kernels.plan_merge_shards(queries, shape)
    for epoch in range(1, rounds + 1):
        scores = torch.randn(3, 4, 19, generator=generator)
        keys = torch.cat([
            best_keys(scores[..., n::2], torch.arange(n, 19, 2).expand(3, -1), queries.positions,
                      shape).unsqueeze(0)
            for n in range(2)
        ])  # fmt: skip
        for row in (0, 2):
            payload = keys[0, row, 2:].flatten().view(torch.int32)
            ranks.arrive(1, sender=0, row=row, payload=payload)
        got = kernels.merge_shards(keys[1:], plan, Group(ranks, 1))
        want = spec.merge_shards(keys, spec.plan(queries, shape), None)
        assert torch.equal(got.ids, want.ids) and torch.equal(got.pages, want.pages)
        assert ranks.epochs[1].tolist() == [epoch, 0, epoch, 0]
        sent = ranks.copies[0][epoch & 1, 2, 1, :12]
        assert (sent >> 32 == epoch).all()
        assert torch.equal(sent.int(), keys[1, 2, :2].flatten().view(torch.int32))


class Attended:
    """Hold queries, caches and selected blocks, and the attention that the definition gives."""

    def __init__(self, lengths: list[int], counts: list[int], dtype: torch.dtype) -> None:
        self.shape = replace(SHAPE, kv_heads=2)
        keys, values = (paged(lengths, heads=2, dtype=dtype)[0] for _ in range(2))
        self.cache = KvCache(keys, values, (0.5, 2.0))
        index_cache, tables = paged(lengths, heads=1)
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(sum(counts), 4, 32, generator=generator).bfloat16()
        index_q = torch.randn(sum(counts), 2, 32, generator=generator)
        num_decodes = len(counts) if max(counts) == 1 else 0
        self.queries = attention_metadata(tables, lengths, counts, num_decodes=num_decodes)
        plan = spec.plan(self.queries, self.shape)
        self.choice = spec.select(index_q, index_cache, plan)
        self.want = spec.attend(self.q.float(), self.cache, self.choice, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_decodes_attend_to_their_pages_and_leave_padding_zero(dtype: torch.dtype) -> None:
    case = Attended([130, 17, 5, 200], [1] * 4, dtype)
    case.queries.seq_lens[2] = 0  # padding
    sparse = kernels.plan_sparse_decode(captured(case.queries), case.shape)
    for _ in range(2):
        got = kernels.sparse_decode(case.q, case.cache, case.choice, sparse)
        assert not isinstance(got, QuantizedActivations)
        assert relative_error(got[[0, 1, 3]], case.want[[0, 1, 3]]) < 5e-3
        assert not got[2].any()


@pytest.mark.parametrize(
    ("dtype", "is_captured"),
    [(FP8, False), (torch.bfloat16, True), full(FP8, True), full(torch.bfloat16, False)],
)
def test_near_queries_attend_to_union_of_blocks(dtype: torch.dtype, is_captured: bool) -> None:
    """The rows are a chunk after a prefix, a whole prompt, and one query."""
    case = Attended([140, 60, 90], [37, 60, 1], dtype)
    queries = captured(case.queries) if is_captured else case.queries
    own = kernels.plan_sparse_prefill(queries, case.shape)
    assert isinstance(own, SparsePrefillPlan)
    assert own.size == 16
    for _ in range(2):
        got = kernels.sparse_prefill(case.q, case.cache, case.choice, own)
        assert not isinstance(got, QuantizedActivations)
        assert relative_error(got, case.want) < 5e-3


def test_prompts_that_attend_to_all_tokens_are_dense_prefills() -> None:
    for length, kind in ((SHAPE.dense_tokens, PrefillPlan), (49, SparsePrefillPlan)):
        _, tables = paged([length, 5], heads=1)
        plan = kernels.plan_sparse_prefill(attention_metadata(tables, [length, 5], [7, 5]), SHAPE)
        assert isinstance(plan, kind)


@pytest.mark.parametrize("counts", [(1, 1), (20, 30)])
def test_results_carry_their_fp8_form(counts: tuple[int, int]) -> None:
    shape, lengths, dim = replace(SHAPE, kv_heads=2), (70, 60), 128
    num_tokens, generator = sum(counts), torch.Generator().manual_seed(1)
    caches = [torch.randn(6, 2, 32, dim, generator=generator).bfloat16() for _ in range(2)]
    q = torch.randn(num_tokens, 4, dim, generator=generator).bfloat16()
    index_q = torch.randn(num_tokens, 2, 32, generator=generator)
    index_cache, tables = paged(lengths, heads=1)
    queries = attention_metadata(tables, lengths, counts, num_decodes=2 if counts[0] == 1 else 0)
    choice = spec.select(index_q, index_cache, spec.plan(queries, shape))
    prepare, run = (
        (kernels.plan_sparse_decode, kernels.sparse_decode)
        if queries.num_decodes
        else (kernels.plan_sparse_prefill, kernels.sparse_prefill)
    )
    plain, quantized = (
        run(q, KvCache(*caches), choice, prepare(queries, replace(shape, quantize=quantize)))
        for quantize in (False, True)
    )
    assert isinstance(quantized, QuantizedActivations)
    assert torch.equal(quantized.hidden, plain)
    assert quantized.scale.shape == (num_tokens, 4)
    assert relative_error(quantized.dequantize(), plain) < FP8_ERROR


def select_by_counting(scores: list[float], position: int, shape: SparseShape) -> list[int]:
    local = position // shape.sparse_block_size
    last = range(max(0, local + 1 - shape.local_blocks), local + 1)
    forced = {*range(min(shape.init_blocks, local + 1)), *last}
    others = sorted(set(range(local + 1)) - forced, key=lambda block: (-scores[block], block))
    chosen = sorted([*forced, *others[: shape.topk_blocks - len(forced)]])
    return chosen + [-1] * (shape.topk_blocks - len(chosen))


@pytest.mark.parametrize(("topk", "init", "local"), [(1, 0, 1), (4, 0, 1), (4, 1, 2), (5, 3, 2)])
def test_selects_forced_blocks_and_the_best_of_the_others(topk: int, init: int, local: int) -> None:
    """Scores have few values, so that there are many ties; the lower block must win."""
    shape = SparseShape(2, 1, 64, 32, topk, init, local)
    generator = torch.Generator().manual_seed(topk)
    positions = torch.tensor([0, 31, 32, 100, 255, 256, 383, 70])
    scores = torch.randint(-3, 3, (len(positions), 2, 12), generator=generator).float()
    ids = choose(scores, positions, shape)
    shards = [  # The blocks are on three ranks, one of which holds only the first block.
        best_keys(scores[..., mine], mine.expand(len(positions), -1), positions, shape)
        for mine in map(torch.tensor, ([0], [1, 4, 5, 6, 11], [2, 3, 7, 8, 9, 10]))
    ]
    assert torch.equal(blocks_of_keys(torch.cat(shards, -1), positions, shape), ids)
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            wanted = select_by_counting(scores[token, head].tolist(), position, shape)
            assert ids[token, head].tolist() == wanted
    # blocks of each token, in cache blocks of two sparse blocks
    tables = torch.stack([torch.randperm(40, generator=generator)[:6] for _ in positions])
    pages = pages_of(ids, tables, shape)
    cache = torch.arange(40 * 2 * 64).view(40, 2, 64, 1)
    of_pages = cache.view(-1, 32)
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            seen, own = [], ids[token, head]
            for block in own[own >= 0].tolist():
                ats = range(block * 32, min(block * 32 + 32, position + 1))
                seen += [int(cache[tables[token, at // 64], head, at % 64, 0]) for at in ats]
            length = int(attended_tokens(positions[token], shape))
            assert of_pages[pages[token, head].long()].flatten()[:length].tolist() == seen


def test_selects_nothing_for_a_row_of_padding() -> None:
    shape = SparseShape(1, 1, 32, 32, 3)
    position = torch.tensor([-1])
    ids = choose(torch.zeros(1, 1, 4), position, shape)
    assert ids.tolist() == [[[-1, -1, -1]]] and attended_tokens(position, shape).tolist() == [0]
    assert pages_of(ids, torch.tensor([[7, 8, 9, 10]]), shape).tolist() == [[[0, 0, 0]]]
