"""What the Triton kernels of the mixture of experts promise beyond their ops, in Triton's
interpreter.
"""

from __future__ import annotations

import pytest
import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels.moe import tiles
from negamax.kernels.moe import triton as kernels
from negamax.kernels.moe import triton_prefill as prefill


def test_route_leaves_its_counters_at_whole_rounds() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    prepared = kernels.prepare_gate(
        torch.randn(8, 64, generator=generator), torch.randn(8, generator=generator)
    )
    for _ in range(2):
        kernels.route(x, prepared, top_k=2)
    assert prepared.arrivals.max() == 2 * 1024 and (prepared.arrivals % 1024 == 0).all()


@pytest.mark.parametrize(
    ("most_few", "table"), [(4, tiles.H200), (0, tiles.H200), (0, tiles.Tiles)]
)
def test_route_prefers_the_lower_id_among_equals_and_survives_nan(
    monkeypatch: pytest.MonkeyPatch, most_few: int, table: type[tiles.Tiles]
) -> None:
    monkeypatch.setattr(tiles, "ROUTE_SMALL_M_MAX_M", most_few)
    monkeypatch.setattr(tiles, "tiles_for", lambda device: table())
    prepared = kernels.prepare_gate(torch.zeros(8, 32), torch.zeros(8))
    x = torch.ones(2, 32).bfloat16()
    x[1, 0] = float("nan")
    ids, weights = kernels.route(x, prepared, top_k=4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert (weights[0] == 0.25).all() and weights[1].isnan().all()


def test_few_tokens_are_routed_over_the_logits_of_the_call_before() -> None:
    generator = torch.Generator().manual_seed(5)
    router = torch.randn(8, 32, generator=generator), torch.randn(8, generator=generator)
    prepared = kernels.prepare_gate(*router)
    for _ in range(2):
        x = torch.randn(3, 32, generator=generator).bfloat16()
        again = kernels.route(x, prepared, top_k=2)
    first = kernels.route(x, kernels.prepare_gate(*router), top_k=2)
    assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))
    assert prepared.flag.tolist() == [2]


def test_pieces_of_the_gate_add_up_to_it_exactly() -> None:
    gate = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    pieces = kernels.prepare_gate(gate, torch.zeros(16)).gate_bf16x3.float()
    assert torch.equal((pieces[0] + pieces[1]) + pieces[2], gate)


def test_pairs_of_many_chunks_are_sorted_by_expert_and_then_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "SORT_CHUNK", 16)
    monkeypatch.setattr(tiles, "SORT_PROGRAMS", 3)
    monkeypatch.setattr(tiles, "SORT_BLOCK", 2)
    ids = torch.randint(
        -1, 9, (27, 3), generator=torch.Generator().manual_seed(4), dtype=torch.int32
    )
    order, counts = prefill.sort_pairs(ids, first=2, count=5)
    flat = ids.flatten()
    mine = (flat >= 2) & (flat < 7)
    expected = torch.where(mine, flat, 7).argsort(stable=True)  # those of none of ours last
    assert torch.equal(order, expected.int())
    assert counts.tolist() == [(flat == expert).sum().item() for expert in range(2, 7)]
