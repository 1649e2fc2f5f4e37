from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_block_sparse import SHAPE, captured
from triton_support import (  # This import must precede the kernels.
    Group,
    Ranks,
    ThreadGroup,
    Threads,
    paged,
    relative_error,
)

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention import op as dense
from negamax.kernels.attention.metadata import CacheShard, PagedShape, attention_metadata
from negamax.kernels.block_sparse import op as sparse
from negamax.kernels.cache_shards import op as spec
from negamax.kernels.cache_shards import triton as kernels
from negamax.kernels.cache_shards.op import PartialResults
from negamax.kernels.kvcache.op import FP8, KvCache
from tests.layouts import full

RANKS = 2


def own_blocks(cache: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's cache: a padding block with any content, then every other block."""
    stored = cache.view(torch.uint8)
    return torch.cat([torch.full_like(stored[:1], 60), stored[rank::RANKS]]).view(cache.dtype)


@pytest.mark.parametrize(
    ("is_sparse", "counts", "dtype", "is_captured"),
    [
        (False, [1, 1, 1], torch.bfloat16, False),
        (True, [1, 1, 1], FP8, True),
        (False, [11, 5, 3], FP8, True),
        (True, [11, 5, 3], torch.bfloat16, False),
        full(False, [1, 1, 1], FP8, True),
        full(True, [1, 1, 1], torch.bfloat16, False),
        full(False, [37, 5, 33], torch.bfloat16, False),
        full(True, [37, 5, 33], FP8, True),
    ],
)
def test_parts_merge_to_the_attention_to_all_blocks(
    is_sparse: bool, counts: list[int], dtype: torch.dtype, is_captured: bool
) -> None:
    """Merge two of four heads per rank, in FP8 or bf16. One sequence is on a single rank."""
    lengths, dim, scales = [130, 17, 200], 128, (0.5, 2.0)
    shape: PagedShape = PagedShape(1, 4, 32)
    if is_sparse:
        shape = replace(SHAPE, group=4)
    caches = [paged(lengths, heads=1, dtype=dtype, dim=dim)[0] for _ in range(2)]
    tables = paged(lengths, heads=1)[1]
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sum(counts), 4, dim, generator=generator).bfloat16()
    is_decode = max(counts) == 1
    queries = attention_metadata(tables, lengths, counts, num_decodes=3 if is_decode else 0)
    choice: list[Any] = []
    if is_sparse:
        assert isinstance(shape, sparse.SparseShape)
        index_cache, index_q = paged(lengths, heads=1)[0], torch.randn(sum(counts), 1, 32)
        plan = sparse.plan(queries, shape)
        choice = [sparse.select(index_q, index_cache, plan)]
        want = sparse.attend(q.float(), KvCache(*caches, scales), *choice, plan)
    else:
        want = dense.attend(q.float(), KvCache(*caches, scales), queries)
    of_op = {
        (False, True): (kernels.plan_partial_decode, kernels.partial_decode),
        (False, False): (kernels.plan_partial_prefill, kernels.partial_prefill),
        (True, True): (kernels.plan_sparse_decode, kernels.partial_sparse_decode),
        (True, False): (kernels.plan_chosen_prefill, kernels.partial_sparse_prefill),
    }
    prepare, run = of_op[is_sparse, is_decode]
    threads = Threads(RANKS)

    def attend(rank: int) -> list[Any]:
        own = replace(shape, cache=CacheShard(rank, RANKS))
        found = prepare(captured(queries) if is_captured else queries, own)
        mine = [own_blocks(cache, rank) for cache in caches]
        group = ThreadGroup(threads, rank, memory=None)
        results = []
        for quantize in (False, True):
            parts = run(q, KvCache(*mine, scales), *choice, found)
            results.append(
                kernels.merge_partials(parts, group, first=2 * rank, count=2, quantize=quantize)
            )
        return results

    for rank, (plain, quantized) in enumerate(threads.run(attend)):
        expected = want.view(-1, 4, dim)[:, 2 * rank : 2 * rank + 2].flatten(1)
        assert relative_error(plain, expected) < 1e-2
        assert isinstance(quantized, QuantizedActivations)
        assert torch.equal(quantized.hidden, plain)
        values = quantized.q.float().view(-1, 2, dim) * quantized.scale.unsqueeze(-1)
        assert relative_error(values.flatten(1), expected) < 0.04


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_exchange_results_of_few_tokens_by_ll_protocol(rank: int, dtype: torch.dtype) -> None:
    """Check bit-equality with an all-gather. Some tokens have keys on one rank, others on none."""
    heads, count, dim, rounds, peer = 6, 3, 20, 3, 1 - rank
    words = count * (dim // 2 + 1)
    generator, ranks = torch.Generator().manual_seed(0), Ranks(RANKS, rows=4, words=words + 3)
    for epoch in range(1, rounds + 1):
        q = torch.empty(3, heads, dim, dtype=dtype)
        each = [PartialResults.empty(q) for _ in range(RANKS)]
        for parts in each:
            parts.out.copy_(torch.randn(parts.out.shape, generator=generator))
            parts.lse.copy_(4 * torch.randn(parts.lse.shape, generator=generator))
        each[0].lse[1], each[1].lse[2], each[0].lse[2] = -torch.inf, -torch.inf, -torch.inf
        for row in range(3):
            its = slice(rank * count, (rank + 1) * count)
            theirs = each[peer].out.unflatten(1, (heads, dim))[row, its].contiguous()
            payload = torch.cat([
                theirs.view(torch.int32).flatten(),
                each[peer].lse[row, its].contiguous().view(torch.int32),
            ])  # fmt: skip
            ranks.arrive(rank, sender=peer, row=row, payload=payload)
        own = {"first": rank * count, "count": count}
        got = kernels.merge_partials(each[rank], Group(ranks, rank), **own)
        of_all = PartialResults.of(torch.stack([parts.message for parts in each]), q)
        assert torch.equal(got, kernels.merge_partials(of_all, None, **own))
        torch.testing.assert_close(got, spec.merge(of_all, None, **own), atol=4e-3, rtol=1e-2)
        assert not got[2].any()
        assert ranks.epochs[rank].tolist() == [epoch] * 3 + [0]
        sent = ranks.copies[peer][epoch & 1, 1, rank, :words]
        assert (sent >> 32 == epoch).all()
        to = slice(peer * count, (peer + 1) * count)
        assert torch.equal(sent.int()[-count:].view(torch.float32), each[rank].lse[1, to])
