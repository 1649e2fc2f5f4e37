"""Shard rows over ranks in the interpreter; the ranks are threads that take turns."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from m2_checkpoints import to_fp8
from model_support import PagedRun, random_weights, tiny_config
from stored_kernels import random_stored
from test_triton_model import QUANTIZED, SIZES, gpu_model, kernel_table
from torch import Tensor
from triton_support import ThreadGroup, Threads

from negamax.formats.floats import E4M3_BLOCKS, e4m3_blocks
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.activations import QuantizedActivations, ShardedActivations, unquantized
from negamax.kernels.collectives import tiles
from negamax.kernels.collectives import triton as kernels
from negamax.kernels.gemm import triton as gemm
from negamax.kernels.launch.tile import Tile
from negamax.kernels.moe import triton as moe
from negamax.kernels.moe.op import SelectedExperts
from negamax.kernels.norm import triton as norm_kernels
from negamax.kernels.norm.op import NormWeight
from negamax.kernels.quantize.op import quantize_activations
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import LayerSetup
from negamax.models import minimax_names as names
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.compressed_tensors import packed
from negamax.quantization.scheme import Scheme, WeightFormat
from tests.kernel_cases.gemm import fp8_weight

WIDTH, EXPERTS, TOP_K = 256, 6, 2
ONES = torch.ones(2)
# ranks, rows, shared memory
CASES = [(4, 8, True), (2, 5, True), (4, 7, True), (2, 4, False)]


@pytest.fixture(autouse=True)
def few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SHARD_ROWS", 2)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def norm(seed: int, *, quantize: bool) -> NormWeight:
    weight, gemma = 1 + 0.2 * normal(WIDTH, seed=seed), seed % 2 == 1
    return norm_kernels.prepare(weight, 1e-6, quantize=quantize, gemma=gemma)


def as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


@pytest.mark.parametrize(("world", "num_rows", "shared"), CASES)
def test_a_step_of_norms_is_that_of_one_rank(world: int, num_rows: int, shared: bool) -> None:
    norms = [norm(seed, quantize=seed < 2) for seed in range(3)]
    parts = (1, 3, 1)
    x = [normal(world, num_rows, parts[step], WIDTH, seed=10 + step) for step in range(3)]
    residual = torch.zeros(num_rows, WIDTH).half()
    expected = []
    for step in range(3):
        total = torch.zeros(num_rows, WIDTH)
        for rank in range(world):
            total += x[step][rank].float().sum(dim=1).half().float()
        expected.append(norm_kernels.add_rms(total.half(), residual, norms[step]))
    threads = Threads(world)
    memory = ThreadGroup.memory(world, rows=num_rows + 1, words=WIDTH // 2) if shared else None

    def rank_code(rank: int) -> list[Tensor]:
        group = ThreadGroup(threads, rank, memory=memory)
        own, shard = torch.zeros(num_rows, WIDTH).half(), -(-num_rows // world)
        mine = slice(rank * shard, (rank + 1) * shard)
        wrong = []
        for step in range(3):
            got = kernels.all_reduce_add_rms(x[step][rank].clone(), own, norms[step], group)
            want = expected[step]
            if step < 2:
                assert isinstance(got, ShardedActivations) and got.first == mine.start
                assert isinstance(want, QuantizedActivations)
                pairs = [(got.hidden, want.hidden[mine]), (got.scale, want.scale)]
                pairs.append((as_bytes(got.q), as_bytes(want.q)))
                with pytest.raises(AssertionError, match="only its own rows"):
                    unquantized(got)
            else:
                assert isinstance(got, Tensor) and isinstance(want, Tensor)
                pairs = [(got, want), (own[mine], residual[mine])]
            wrong += [(a != b).sum() for a, b in pairs]
        return wrong

    for wrong in threads.run(rank_code):
        assert not any(wrong), wrong


@pytest.mark.parametrize("active", [None, 3])
@pytest.mark.parametrize(("world", "num_rows", "shared"), CASES[1:])
def test_each_rank_routes_its_rows_and_has_the_others(
    world: int, num_rows: int, shared: bool, active: int | None
) -> None:
    x, weight = normal(world, num_rows, WIDTH, seed=1), norm(2, quantize=True)
    router = normal(EXPERTS, WIDTH, seed=3).float(), normal(EXPERTS, seed=4).float()
    gate = moe.prepare_gate(*router, shared=active is None)
    real = None if active is None else torch.tensor([active], dtype=torch.int32)
    total = torch.zeros(num_rows, WIDTH)
    for part in x:
        total += part.float()
    whole = norm_kernels.add_rms(total.half(), torch.zeros(num_rows, WIDTH).half(), weight)
    ids, weights = moe.route(whole, gate, top_k=TOP_K, active=real)
    threads = Threads(world)
    memory = ThreadGroup.memory(world, rows=num_rows, words=WIDTH // 2) if shared else None

    def rank_code(rank: int) -> tuple[Tensor, Tensor]:
        group = ThreadGroup(threads, rank, memory=memory)
        for _ in range(2):
            got = kernels.all_reduce_add_rms(
                x[rank].clone(), torch.zeros(num_rows, WIDTH).half(), weight, group
            )
            chosen = moe.route(got, gate, top_k=TOP_K, active=real)
            assert isinstance(whole, QuantizedActivations) and isinstance(got, QuantizedActivations)
            assert torch.equal(as_bytes(got.q), as_bytes(whole.q))
            assert torch.equal(got.scale, whole.scale)
        return chosen

    for got_ids, got_weights in threads.run(rank_code):
        assert torch.equal(got_ids, ids)
        # Tensors with another alignment need another specialization.
        assert got_ids.data_ptr() % 16 == 0 == got_weights.data_ptr() % 16
        torch.testing.assert_close(got_weights, weights, atol=1e-6, rtol=1e-6)


def test_products_in_fp8_need_no_plain_rows() -> None:
    num_rows, generator = 6, torch.Generator().manual_seed(5)
    whole = quantize_activations(normal(num_rows, WIDTH, seed=6))
    part = ShardedActivations(
        whole.hidden[2:4], whole.q, whole.scale, ThreadGroup(Threads(1), 0, memory=None), 2
    )
    linear = gemm.prepare(e4m3_blocks(*fp8_weight(128, WIDTH, generator=generator)))
    assert torch.equal(gemm.linear(part, linear), gemm.linear(whole, linear))
    experts = moe.prepare_experts(
        e4m3_blocks(*fp8_weight(EXPERTS, 256, WIDTH, generator=generator)),
        e4m3_blocks(*fp8_weight(EXPERTS, WIDTH, 128, generator=generator)),
    )
    ids = torch.rand(num_rows, EXPERTS, generator=generator).topk(TOP_K).indices.int()
    weights = torch.rand(num_rows, TOP_K, generator=generator)
    for most_m in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe.tiles.H200MoeTiles, "gemv_max_m", lambda self, width: 0)
            patch.setattr(moe.tiles, "SMALL_M_MAX_M", most_m)
            got, want = (
                moe.experts(x, SelectedExperts(ids, weights, 0, EXPERTS), experts)
                for x in (part, whole)
            )
            assert torch.equal(got, want) and got.dtype == torch.float16


INT4 = packed(4, 128)
# numbers of tokens up to which gemv and small_m run
GEMV, SMALL_M, LARGE_M = (8, 8), (0, 8), (0, 0)
GATE = (
    (2, E4M3_BLOCKS, GEMV), (4, E4M3_BLOCKS, LARGE_M), (4, E4M3_BLOCKS, SMALL_M),
    (2, INT4, SMALL_M),
)  # fmt: skip


def splits() -> list[Any]:
    every = product((2, 4), (E4M3_BLOCKS, INT4), (GEMV, SMALL_M, LARGE_M))
    marks = pytest.mark.full
    return [pytest.param(*one, marks=[marks] * (one not in GATE)) for one in every]


@pytest.mark.parametrize(("ranks", "stored", "most_tokens"), splits())
def test_experts_of_sharded_blocks_and_groups_add_up_to_those_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int, stored: TensorFormat, most_tokens: tuple[int, int]
) -> None:
    """Shard three blocks over two or four ranks; groups of 128 become groups of 64 and 32."""
    hidden, width, generator = 128, 384, torch.Generator().manual_seed(7)
    own, tensors = names.moe(0), {}
    for expert in range(2):
        for name in (own.gate, own.up, own.down):
            shape = (hidden, width) if name == own.down else (width, hidden)
            module = name.replace("*", str(expert)).removesuffix("weight")
            parts = random_stored(stored, shape, seed=len(tensors))
            tensors |= {module + part: values for part, values in parts.items()}
    tensors |= {own.router: torch.randn(2, hidden, generator=generator), own.router_bias: ONES}
    table = kernel_table(torch.float16)
    weights = WeightFormat(
        torch.float16, torch.device("cpu"), Scheme((stored,), lambda module: stored)
    )

    def experts(layout: ParallelLayout) -> SparseMoe:
        layer = SparseMoe(
            own, layer=0, hidden_size=hidden, width=width, num_experts=2, top_k=2,
            setup=LayerSetup(replace(ParallelContext.single(), layout=layout), weights, table),
        )  # fmt: skip
        for slot in layer.slots:
            if slot.name in tensors and slot.needed:
                slot.write(tensors[slot.name])
        layer.finish_loading()
        return layer

    whole = experts(ParallelLayout())
    parts = [experts(ParallelLayout(rank=rank, tp=ranks)) for rank in range(ranks)]
    x = quantize_activations(torch.randn(3, hidden, generator=generator).half() / 8)
    tile = Tile(1, 64, 128, num_warps=2)  # a large tile, for few programs
    gemv = moe.tiles.ExpertTiles(tile, tile, choices=2)
    monkeypatch.setattr(moe.tiles.H200MoeTiles, "gemv", lambda self, width, hidden: gemv)
    gemv_m, small_m = most_tokens
    monkeypatch.setattr(moe.tiles.H200MoeTiles, "gemv_max_m", lambda self, width: gemv_m)
    if gemv_m == 0:
        monkeypatch.setattr(moe.tiles.H200MoeTiles, "packed_gemv", lambda self, **_: None)
    monkeypatch.setattr(moe.tiles, "SMALL_M_MAX_M", small_m)
    expected = whole(x).x.float().sum(1)
    total = sum(part(x).x.float().sum(1) for part in parts)
    assert (total - expected).norm() < 2e-3 * expected.norm()


def test_model_gives_same_bits_if_rows_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two FP8 layers on two ranks with three rows, in fp16; sums keep the shards' order."""
    sizes = SIZES | {"num_hidden_layers": 2, "intermediate_size": 256}
    spec = read_spec(tiny_config(0, **sizes) | QUANTIZED)
    weights = to_fp8(random_weights(spec, 3))
    # The kernels for few tokens read unsharded rows.
    monkeypatch.setattr(moe.tiles.H200MoeTiles, "gemv_max_m", lambda self, width: 0)
    # The interpreter runs programs one by one, so use large tiles.
    monkeypatch.setattr(gemm.tiles, "tiles_for", lambda device: gemm.tiles.GemmTiles(1))

    def logits(shard_rows: int) -> list[tuple[Tensor, ...]]:
        monkeypatch.setattr(tiles, "SHARD_ROWS", shard_rows)
        threads, memory = Threads(2), ThreadGroup.memory(2, rows=4, words=SIZES["hidden_size"] // 2)

        @torch.inference_mode()
        def rank_code(rank: int) -> tuple[Tensor, ...]:
            group = ThreadGroup(threads, rank, memory=memory)
            context = ParallelContext(ParallelLayout(rank=rank, tp=2), group, group, group)
            model = gpu_model(weights, spec=spec, context=context, dtype=torch.float16)
            run = PagedRun(model, dtype=torch.float16)
            run.capture = (0, 1, 2)  # layers whose residual streams a draft model reads
            return (run.step([("a", [1, 2, 3])])["a"], *run.captured)

        return threads.run(rank_code)

    whole, sharded = logits(1000), logits(2)
    for got in (*whole, *sharded):
        assert len(got) == 4
        assert all(torch.equal(one, other) for one, other in zip(got, whole[0], strict=True))
