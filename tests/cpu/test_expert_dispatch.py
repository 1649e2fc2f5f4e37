"""Where experts lie changes nothing about what a mixture of experts gives, and the one that all
tokens share is added once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from negamax.kernels.activations import SwiGlu
from negamax.kernels.platform import CPU
from negamax.kernels.registry import resolve
from negamax.layers.expert_dispatch import ExpertTable
from negamax.layers.moe import SparseMoe
from negamax.layers.names import MlpNames
from negamax.layers.weights import WeightSlot
from negamax.models.minimax_m3 import names
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.scheme import WeightFormat

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 24, 16, 3
PERMUTED = ExpertTable((5, 0, 3, 7, 1, 6, 2, 4))
SOME_TWICE = ExpertTable((0, 1, 2, 3, 4, 5, 6, 7, 4, 3, 2, 1))


def mixture(
    layout: ParallelLayout,
    table: ExpertTable | None,
    *,
    shared_width: int = 0,
    context: ParallelContext | None = None,
) -> SparseMoe:
    """One rank's part of the same model each time. `context`: its groups, where it is to speak."""
    moe = SparseMoe(
        names.moe(0),
        hidden_size=HIDDEN,
        width=WIDTH,
        num_experts=EXPERTS,
        top_k=TOP_K,
        activation=SwiGlu(alpha=1.7, limit=0.5, beta=1.0) if shared_width else SwiGlu(),
        routed_scaling=2.0 if shared_width else 1.0,
        shared_width=shared_width,
        context=context or replace(ParallelContext.single(), layout=layout),
        kernels=resolve(platform=CPU, dtype=torch.float32),
        weights=WeightFormat(torch.float32, torch.device("cpu"), None),
        table=table,
    )
    for number, slot in enumerate(by_name(moe)):
        slot.write(draw(number, slot))
    moe.finish_loading()
    return moe


def by_name(moe: SparseMoe) -> list[WeightSlot]:
    return sorted(moe.slots, key=lambda slot: slot.name)


def draw(number: int, slot: WeightSlot) -> Tensor:
    values = torch.randn(slot.shape, generator=torch.Generator().manual_seed(number))
    return values * slot.shape[-1] ** -0.5


def summed(
    grid: list[ParallelLayout], table: ExpertTable | None, x: Tensor, *, shared_width: int = 0
) -> Tensor:
    active = torch.tensor([5], dtype=torch.int32)
    mixtures = [mixture(layout, table, shared_width=shared_width) for layout in grid]
    parts = [moe(x, active=active).x for moe in mixtures]
    return torch.stack([part if part.dim() == 2 else part.sum(1) for part in parts]).sum(0)


@pytest.mark.parametrize(
    ("table", "tp", "ep"),
    [
        *((None, tp, ep) for tp, ep in ((1, 1), (2, 2), (4, 2), (4, 4))),
        *((PERMUTED, tp, ep) for tp, ep in ((1, 1), (2, 2), (4, 2), (4, 4))),
        *((SOME_TWICE, tp, ep) for tp, ep in ((2, 2), (4, 2), (4, 4))),
    ],
)
def test_every_placement_gives_the_sum_of_one_rank(
    table: ExpertTable | None, tp: int, ep: int
) -> None:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = summed([ParallelLayout()], None, x)
    grid = [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]
    got = summed(grid, table, x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert got[:5].abs().sum(1).min() > 0 and not got[5:].any()  # padding reaches no expert


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])  # among the experts, or beside them
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_the_shared_expert_counts_once_and_is_not_scaled(width: int, tp: int, ep: int) -> None:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    grid = [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]
    got = summed(grid, None, x, shared_width=width)
    whole = mixture(ParallelLayout(), None, shared_width=width)
    seen = torch.full((9, TOP_K), -2, dtype=torch.int32)
    whole.observe(seen)
    whole(x)
    assert seen[:7].min() >= 0 and seen[:7].max() < EXPERTS  # those that the router chose
    t = {slot.name: draw(number, slot) for number, slot in enumerate(by_name(whole))}
    its, act = names.moe(0), SwiGlu(alpha=1.7, limit=0.5, beta=1.0)

    def mlp(own: MlpNames, x: Tensor) -> Tensor:
        return act(x @ torch.cat((t[own.gate], t[own.up])).t()) @ t[own.down].t()

    scores = torch.sigmoid(x @ t[its.router].t())
    for token in range(5):
        chosen = (scores[token] + t[its.router_bias]).topk(TOP_K).indices.tolist()
        weights = 2.0 * scores[token, chosen] / scores[token, chosen].sum()
        assert its.shared is not None
        expected = mlp(its.shared, x[token])
        for weight, expert in zip(weights, chosen, strict=True):
            expected += weight * mlp(its.expert(expert), x[token])
        torch.testing.assert_close(got[token], expected, atol=1e-5, rtol=1e-5)


def test_the_identity_hands_the_routers_ids_on() -> None:
    moe = mixture(ParallelLayout(), None)
    ids = torch.zeros(3, TOP_K, dtype=torch.int32)
    assert moe._dispatch.dispatch(torch.zeros(3, HIDDEN), ids, torch.zeros(3, TOP_K)).ids is ids
