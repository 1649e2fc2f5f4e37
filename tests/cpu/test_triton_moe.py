from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton_support  # noqa: F401  (must precede the kernels)
from kernel_contract import check
from stored_kernels import random_stored
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS, E4M3_GROUPS, PLAIN
from negamax.formats.platform import CPU
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.activations import SwiGlu
from negamax.kernels.launch.tile import Tile
from negamax.kernels.moe import tiles
from negamax.kernels.moe import triton as kernels
from negamax.kernels.moe import triton_prefill as prefill
from negamax.kernels.moe.op import EXPERTS
from negamax.kernels.norm.op import NormWeight
from negamax.kernels.norm.triton import add_rms
from negamax.kernels.quantize.stored import dequantize
from negamax.kernels.quantize.triton import quantize
from negamax.kernels.registry import KernelTable, gpu_kernels, resolve
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import LayerSetup
from negamax.models.minimax_m3 import names
from negamax.parallel.context import ParallelContext
from negamax.quantization.compressed_tensors import packed
from negamax.quantization.scheme import Scheme, WeightFormat
from tests.kernel_cases import moe as cases
from tests.kernel_cases.weight_only import INT4


def test_route_leaves_its_counters_at_whole_rounds_and_splits_gates_exactly() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    prepared = kernels.prepare_gate(
        torch.randn(8, 64, generator=generator), torch.randn(8, generator=generator)
    )
    for _ in range(2):
        kernels.route(x, prepared, top_k=2)
    assert prepared.arrivals.max() == 2 * 1024 and (prepared.arrivals % 1024 == 0).all()
    gate = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    pieces = kernels.prepare_gate(gate, torch.zeros(16)).gate_bf16x3.float()
    assert torch.equal((pieces[0] + pieces[1]) + pieces[2], gate)


@pytest.mark.parametrize(
    ("most_few", "table"), [(4, tiles.H200MoeTiles), (0, tiles.H200MoeTiles), (0, tiles.MoeTiles)]
)
def test_route_prefers_the_lower_id_among_equals_and_survives_nan(
    monkeypatch: pytest.MonkeyPatch, most_few: int, table: type[tiles.MoeTiles]
) -> None:
    monkeypatch.setattr(tiles, "ROUTE_SMALL_M_MAX_M", most_few)
    monkeypatch.setattr(tiles, "tiles_for", lambda device: table())
    prepared = kernels.prepare_gate(torch.zeros(8, 32), torch.zeros(8))
    x = torch.ones(2, 32).bfloat16()
    x[1, 0] = float("nan")
    ids, weights = kernels.route(x, prepared, top_k=4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert (weights[0] == 0.25).all() and weights[1].isnan().all()


@pytest.mark.parametrize("gemma", [False, True])
def test_norm_and_router_in_one_launch_round_as_in_two(gemma: bool) -> None:
    """Each launch overwrites the logits of the previous call; 5 tokens take two launches."""
    generator = torch.Generator().manual_seed(6)
    hidden, weight = 1160, torch.randn(1160, generator=generator).bfloat16()
    gate = torch.randn(4, hidden, generator=generator), torch.randn(4, generator=generator)
    norm = NormWeight(weight, 1e-6, gemma=gemma)
    joined, router = kernels.prepare_gate(*gate), kernels.prepare_gate(*gate)
    for num_tokens in (1, 2, 5, 2):
        x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        residual = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        added = residual.clone()
        normed, *choices = kernels.norm_route(x, residual, norm, joined, top_k=2)
        expected = add_rms(x, added, norm)
        assert torch.equal(residual, added)
        assert (normed != expected).float().mean() < 0.02  # The sum's last bit may differ.
        ids, weights = kernels.route(normed, router, top_k=2)
        assert torch.equal(choices[0], ids)
        torch.testing.assert_close(choices[1], weights, rtol=1e-5, atol=1e-6)
    assert joined.flag.tolist() == [3] and router.flag.tolist() == [3]


def test_pairs_of_chunks_are_sorted_by_expert_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SORT_CHUNK", 16)
    monkeypatch.setattr(tiles, "SORT_PROGRAMS", 3)
    monkeypatch.setattr(tiles, "SORT_BLOCK", 2)
    ids = torch.randint(-1, 9, (27, 3), generator=torch.Generator().manual_seed(4)).int()
    order, counts = prefill.sort_pairs(ids, first=2, count=5)
    flat = ids.flatten()
    mine = (flat >= 2) & (flat < 7)
    expected = torch.where(mine, flat, 7).argsort(stable=True)  # Pairs of other ranks come last.
    assert torch.equal(order, expected.int())
    assert counts.tolist() == [(flat == expert).sum().item() for expert in range(2, 7)]
    again, listed = prefill.sort_pairs(ids, first=2, count=5, tile=4)
    begins = (counts.cumsum(0) - counts).tolist()
    found = [
        (expert << 40) | (begin + offset << 8) | min(4, count - offset)
        for expert, begin, count in zip(
            (4, 3, 2, 1, 0), begins[::-1], counts.tolist()[::-1], strict=True
        )
        for offset in range(0, count, 4)
    ]
    assert torch.equal(order, again)
    assert listed[: 4 + len(found)].tolist() == [len(found), mine.sum().item(), 0, 0, *found]


def test_last_tile_of_an_expert_is_the_smallest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = tiles.ExpertTiles(*(Tile(64, 32, 128, num_warps=4, num_stages=2) for _ in range(2)))
    monkeypatch.setattr(tiles.MoeTiles, "packed", lambda self, **sizes: tile)
    monkeypatch.setattr(tiles, "SMALL_M_MAX_M", 4)
    counts = {0: 64 + 16, 1: 64 + 17, 2: 64 + 33, 4: 1, 5: 128, 7: 9}
    ids = torch.cat([torch.full((count,), expert) for expert, count in counts.items()])
    generator = torch.Generator().manual_seed(9)
    ids = ids[torch.randperm(len(ids), generator=generator)].int()[:, None]
    (kernel,) = (each for each in gpu_kernels() if each.op == EXPERTS and each.reads(INT4))
    case = cases._stored_case(torch.bfloat16, generator, INT4, len(ids), 128, 40, 8, 1, 0, 7)
    check(kernel, replace(case, tensors=case.tensors | {"ids": ids}), torch.bfloat16)


@pytest.mark.parametrize(
    ("routed", "shared"),
    [(E4M3_BLOCKS, E4M3_BLOCKS), (packed(4, 128), E4M3_BLOCKS), (E4M3_BLOCKS, PLAIN)],
    ids=["one format", "4 bits and FP8", "FP8 and plain"],
)
def test_a_shared_expert_runs_with_the_others_or_by_itself(
    routed: TensorFormat, shared: TensorFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the same values in fp32. A dense FP8 MLP runs beside the experts."""
    # The interpreter runs programs one by one, so use large tiles.
    monkeypatch.setattr(tiles.H200MoeTiles, "gemv_max_m", lambda self, width: 0)
    hidden, width, num_experts, own = 128, 128, 3, names.moe(0)
    generator = torch.Generator().manual_seed(8)
    stored: dict[str, Tensor] = {own.router: torch.randn(3, hidden, generator=generator)}
    plain = {**stored, own.router_bias: torch.zeros(3)}
    stored = dict(plain)
    assert own.shared is not None
    for number, its in enumerate((*map(own.expert, range(num_experts)), own.shared)):
        form = shared if its is own.shared else routed
        for seed, name in enumerate((its.gate, its.up, its.down)):
            parts = random_stored(form, (width, hidden), seed=3 * number + seed)
            if form is PLAIN:
                parts = {"weight": parts["weight"] * hidden**-0.5}
            stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
            plain[name] = dequantize(form, parts)

    def moe(table: KernelTable, form: Callable[[str], TensorFormat] | None) -> SparseMoe:
        scheme = None if form is None else Scheme((routed,), form)
        weights = WeightFormat(table.dtype, torch.device("cpu"), scheme)
        layer = SparseMoe(
            own, layer=0, hidden_size=hidden, width=width, num_experts=num_experts, top_k=2,
            activation=SwiGlu(alpha=1.702, limit=7.0, beta=1.0), routed_scaling=2.0,
            shared_width=width, setup=LayerSetup(ParallelContext.single(), weights, table),
        )  # fmt: skip
        for slot in layer.slots:
            if slot.needed:
                slot.write((plain if form is None else stored)[slot.name])
        layer.finish_loading()
        return layer

    definition = moe(resolve(platform=CPU, dtype=torch.float32), None)
    table = KernelTable.of(gpu_kernels(), platform=CPU, dtype=torch.bfloat16)
    layer = moe(table, lambda name: shared if "shared" in name else routed)
    assert layer.activation == (E4M3_GROUPS if routed is shared else None)
    x = (torch.randn(6, hidden, generator=generator) / 8).bfloat16()
    given = x if layer.activation is None else quantize(x)
    got, expected = layer(given).x.float().sum(1), definition(x.float()).x
    assert (got - expected).norm() < 6e-2 * expected.norm()
