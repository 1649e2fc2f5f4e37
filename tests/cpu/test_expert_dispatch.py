from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from stored_kernels import KEEPING, dequantized, random_stored
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS, mxfp4, mxfp8, nvfp4, plain
from negamax.formats.floats import plain as as_plain
from negamax.formats.platform import CPU
from negamax.formats.tensor_format import Axis, StoredWeight, TensorFormat
from negamax.kernels.activations import SwiGlu
from negamax.kernels.attention.metadata import StepTokens
from negamax.kernels.moe.op import EXPERTS, PLACE, ROUTE, SelectedExperts
from negamax.kernels.moe.triton import prepare_experts, prepare_packed
from negamax.kernels.moe.triton_shared import PreparedExperts
from negamax.kernels.quantize.stored import dequantize
from negamax.kernels.registry import OPS, resolve
from negamax.layers.expert_dispatch import ExpertMap
from negamax.layers.moe import SparseMoe
from negamax.layers.names import MlpNames
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.models.minimax_m3 import names
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.awq import awq
from negamax.quantization.compressed_tensors import STRATEGIES, packed
from negamax.quantization.gptq import gptq
from negamax.quantization.modelopt import ALGORITHMS
from negamax.quantization.modelslim import int8
from negamax.quantization.scheme import Scheme, WeightFormat
from tests.kernel_cases import weight_only
from tests.kernel_cases.moe import stored_experts

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 24, 16, 3
PERMUTED = (5, 0, 3, 7, 1, 6, 2, 4)
SOME_TWICE = (0, 1, 2, 3, 4, 5, 6, 7, 4, 3, 2, 1)


def mixture(
    layout: ParallelLayout,
    table: tuple[int, ...] | None,
    *,
    shared_width: int = 0,
    context: ParallelContext | None = None,
) -> SparseMoe:
    """Make one rank's part of a model. `context` holds the rank's groups for communication."""
    setup = LayerSetup(
        context or replace(ParallelContext.single(), layout=layout),
        WeightFormat(torch.float32, torch.device("cpu"), None),
        resolve(platform=CPU, dtype=torch.float32),
    )
    moe = SparseMoe(
        names.moe(0), layer=0, hidden_size=HIDDEN, width=WIDTH,
        num_experts=NUM_EXPERTS, top_k=TOP_K,
        activation=SwiGlu(alpha=1.7, limit=0.5, beta=1.0) if shared_width else SwiGlu(),
        routed_scaling=2.0 if shared_width else 1.0, shared_width=shared_width,
        setup=setup, table=table,
    )  # fmt: skip
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
    grid: list[ParallelLayout], table: tuple[int, ...] | None, x: Tensor, *, shared_width: int = 0
) -> Tensor:
    active = torch.tensor([5], dtype=torch.int32)
    mixtures = [mixture(layout, table, shared_width=shared_width) for layout in grid]
    parts = [moe(x, StepTokens(active)).x for moe in mixtures]
    return torch.stack([part if part.dim() == 2 else part.sum(1) for part in parts]).sum(0)


@pytest.mark.parametrize(
    ("table", "tp", "ep"),
    [
        *((None, tp, ep) for tp, ep in ((1, 1), (2, 2), (4, 2), (4, 4))),
        *((PERMUTED, tp, ep) for tp, ep in ((1, 1), (2, 2), (4, 2), (4, 4))),
        *((SOME_TWICE, tp, ep) for tp, ep in ((2, 2), (4, 2), (4, 4))),
    ],
)
def test_all_placements_give_one_ranks_sum(table: tuple[int, ...] | None, tp: int, ep: int) -> None:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = summed([ParallelLayout()], None, x)
    grid = [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]
    got = summed(grid, table, x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert got[:5].abs().sum(1).min() > 0 and not got[5:].any()  # Padding reaches no expert.


# A shared expert of equal width runs among the routed experts; a wider one runs beside them.
@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_the_shared_expert_counts_once_and_is_not_scaled(width: int, tp: int, ep: int) -> None:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    grid = [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]
    got = summed(grid, None, x, shared_width=width)
    whole = mixture(ParallelLayout(), None, shared_width=width)
    seen = torch.full((9, TOP_K), -2, dtype=torch.int32)
    whole.observe(seen)
    whole(x)
    assert seen[:7].min() >= 0 and seen[:7].max() < NUM_EXPERTS  # The router selects these experts.
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


def test_a_map_that_changes_between_steps_says_where_experts_are() -> None:
    counts, device = torch.zeros(NUM_EXPERTS, dtype=torch.int64), torch.device("cpu")
    lies = ExpertMap([*range(NUM_EXPERTS), 3, 3, 6, 6], most_copies=4, device=device, counts=counts)
    place = resolve(platform=CPU, dtype=torch.float32)[PLACE].run
    ids = torch.tensor([[3, 0, 5]] * 300, dtype=torch.int32)
    positions = torch.arange(300)
    before = [tensor.data_ptr() for tensor in lies.tensors]
    slots = place(ids, positions, *lies.tensors)
    assert slots[:, 1:].tolist() == [[0, 5]] * 300
    assert [int((slots[:, 0] == slot).sum()) for slot in (3, 8, 9)] == [100, 100, 100]
    # The slot does not depend on the batch composition.
    assert torch.equal(place(ids[7:9], positions[7:9], *lies.tensors), slots[7:9])
    lies.update([7, 6, 5, 4, 3, 2, 1, 0, 5, 0, 0, 0])
    slots = place(ids[:100], positions[:100], *lies.tensors)
    assert slots[:, 0].tolist() == [4] * 100
    assert {int((slots[:, 1] == slot).sum()) for slot in (7, 9, 10, 11)} == {25}
    assert {int((slots[:, 2] == slot).sum()) for slot in (2, 8)} == {50}
    assert [tensor.data_ptr() for tensor in lies.tensors] == before
    assert counts.tolist() == [402 if expert in (0, 3, 5) else 0 for expert in range(NUM_EXPERTS)]


STORED = {
    "fp8": E4M3_BLOCKS, "mxfp8": mxfp8(), **{each.name: each for each in weight_only.FORMATS}
}  # fmt: skip


@pytest.mark.parametrize("stored", STORED)
def test_an_expert_takes_all_its_tensors_along(stored: str) -> None:
    tensors = stored_experts(STORED[stored], 4, 256, 128, torch.Generator().manual_seed(3))

    def prepared(order: list[int]) -> PreparedExperts:
        own = {name: tensor[order] for name, tensor in tensors.items()}
        weights = [StoredWeight(STORED[stored], part_of(own, name)) for name in ("gate_up", "down")]
        way = prepare_experts if stored == "fp8" else prepare_packed
        return way(*weights)

    moved, expected = prepared([0, 1, 2, 3]), prepared([0, 2, 2, 3])
    bits = [tensor.clone() for tensor in moved.tensors(2)]
    assert len(bits) >= 4
    moved.replace(1, bits)
    for number in range(4):
        for own, other in zip(moved.tensors(number), expected.tensors(number), strict=True):
            assert are_alike(own, other)
    assert not all(map(are_alike, moved.tensors(0), moved.tensors(1)))
    # No other tensor belongs to an expert.
    held = {
        tensor.data_ptr(): tensor
        for part in (moved.gate_up, moved.down, moved.gate_up_scale, moved.down_scale)
        for tensor in (part if isinstance(part, tuple) else (part,))
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    assert size == 4 * sum(tensor.numel() * tensor.element_size() for tensor in bits)


def are_alike(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def part_of(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_every_provider_on_the_cpu_can_be_replaced(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(3)
    gate_up = torch.randn(3, 2 * WIDTH, HIDDEN, generator=drawn).to(dtype)
    down = torch.randn(3, HIDDEN, WIDTH, generator=drawn).to(dtype)
    x = torch.randn(5, HIDDEN, generator=drawn).to(dtype)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [2, 1]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=drawn)
    for kernel in resolve(platform=CPU, dtype=dtype).candidates[EXPERTS]:
        own = kernel.prepare(plain(gate_up.clone()), plain(down.clone()))
        own.replace(1, [tensor.clone() for tensor in own.tensors(2)])
        order = [0, 2, 2]
        other = kernel.prepare(plain(gate_up[order]), plain(down[order]))
        found, expected = (
            kernel.run(x, SelectedExperts(ids, weights, 0, 3), each) for each in (own, other)
        )
        assert torch.equal(found, expected), kernel.provider


FORMATS = [
    E4M3_BLOCKS, packed(4, 32, symmetric=False), packed(8, -1), awq(32), int8(64, is_static=True),
    gptq(4, 128, version=1), nvfp4(), nvfp4(divides=True), mxfp4(), mxfp8(), STRATEGIES["tensor"],
    ALGORITHMS["FP8_PB_WO"][0],
]  # fmt: skip
SPLIT_TOP_K, TOKENS = 2, 4


@pytest.fixture(autouse=True)
def memory_that_nothing_wrote_is_not_zero() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # PyTorch then fills new memory with NaN.
    yield
    torch.use_deterministic_algorithms(False)


class Model:
    """Make experts 12 units wide, so that even shards on 8 or 16 ranks would split a unit."""

    def __init__(self, stored: TensorFormat, num_experts: int, *, shared: bool) -> None:
        self.stored, self.num_experts, self.shared = stored, num_experts, shared
        self.hidden, self.width = stored.unit(Axis.COLUMNS), max(48, 12 * stored.width_unit)
        wide, tall = (self.width, self.hidden), (self.hidden, self.width)
        shapes = list(enumerate((wide, wide, tall)))
        self.experts = [
            [random_stored(stored, shape, seed=3 * expert + n) for n, shape in shapes]
            for expert in range(num_experts + shared)
        ]
        self.plain = [[dequantize(stored, part) for part in parts] for parts in self.experts]
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(TOKENS, self.hidden, generator=generator) / self.hidden
        self.gate = torch.randn(num_experts, self.hidden, generator=generator)

    def rank(self, layout: ParallelLayout) -> tuple[SparseMoe, list[Tensor]]:
        """Return a rank's mixture, and its stacked matrices [experts, rows, columns]."""
        single, prepared = ParallelContext.single(), list[Tensor]()
        scheme = Scheme((self.stored,), lambda module: self.stored)
        kernel = KEEPING.choose(EXPERTS, self.stored)
        assert kernel is not None

        def prepare(gate_up: StoredWeight, down: StoredWeight, **numbers: Any) -> Any:
            prepared.extend(dequantized(weight) for weight in (gate_up, down))
            return kernel.prepare(*map(as_plain, prepared), **numbers)

        watched = (*KEEPING.candidates[EXPERTS][:-1], replace(kernel, prepare=prepare))
        setup = LayerSetup(
            replace(single, layout=layout),
            WeightFormat(torch.float32, torch.device("cpu"), scheme),
            replace(KEEPING, candidates={**KEEPING.candidates, EXPERTS: watched}),
        )
        moe = SparseMoe(
            names.moe(0), layer=0, hidden_size=self.hidden, width=self.width,
            num_experts=self.num_experts, top_k=SPLIT_TOP_K, shared_width=self.width * self.shared,
            setup=setup,
        )  # fmt: skip
        own = names.moe(0)
        tensors: dict[str, Tensor] = {}
        plain = {own.router: self.gate, own.router_bias: torch.zeros(self.num_experts)}
        assert own.shared is not None
        all_names = [*map(own.expert, range(self.num_experts)), own.shared]
        for its, parts, matrices in zip(all_names, self.experts, self.plain, strict=False):
            of_expert = zip((its.gate, its.up, its.down), parts, matrices, strict=True)
            for name, part, matrix in of_expert:
                plain[name], module = matrix, name.removesuffix("weight")
                tensors |= {module + tensor: values for tensor, values in part.items()}
        for slot in moe.slots:
            given = plain if slot.stored is None else tensors
            if slot.needed and slot.name in given:
                slot.write(given[slot.name])
        moe.finish_loading()
        return moe, prepared

    def expected(self) -> Tensor:
        gate_up = torch.stack([torch.cat(each[:2]) for each in self.plain])
        down = torch.stack([each[2] for each in self.plain])
        route, experts = OPS[ROUTE].reference, OPS[EXPERTS].reference
        router = route.prepare(self.gate, torch.zeros(self.num_experts), shared=self.shared)
        ids, weights = route.run(self.x, router, top_k=SPLIT_TOP_K)
        stacked, count = experts.prepare(as_plain(gate_up), as_plain(down)), len(self.experts)
        return experts.run(self.x, SelectedExperts(ids, weights, 0, count), stacked)


def splits() -> Iterator[Any]:
    """Yield formats, ranks and expert-parallel sizes. The gate runs two sizes per format."""
    sizes = [(tp, ep) for tp in (1, 2, 4, 8, 16) for ep in (1, 2, 4, 8, 16) if tp % ep == 0]
    gate = ((1, 1), (2, 2), (4, 1), (8, 2), (16, 4), (2, 1), (4, 2), (8, 1), (16, 1))
    for n, stored in enumerate(FORMATS):
        own = (gate[n % len(gate)], gate[(n + 4) % len(gate)])
        for size in sizes:
            marks = [pytest.mark.full] * (size not in own)
            yield pytest.param(stored, *size, marks=marks, id=f"{stored.name}-{n}-{size}")


@pytest.mark.parametrize(("stored", "tp", "ep"), list(splits()))
def test_parts_of_ranks_add_up_to_one_ranks_sum(stored: TensorFormat, tp: int, ep: int) -> None:
    kernel = KEEPING.choose(EXPERTS, stored)
    assert kernel is not None
    model = Model(stored, max(ep, 2), shared=tp in (1, 8))
    is_among = model.shared and ep == 1  # The shared expert runs among the routed ones.
    expected = model.expected()
    total, shapes, found = torch.zeros(TOKENS, model.hidden), set(), 0
    for layout in (ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)):
        moe, (gate_up, down) = model.rank(layout)
        total += moe(model.x).x.reshape(TOKENS, -1, model.hidden).sum(1)
        shapes.add((gate_up.shape, down.shape))
        _, unit = stored.split_width(model.width // layout.experts.tp, kernel.reads)
        share = layout.experts.width(model.width, unit=unit)
        part, rest = slice(share.part.start, share.part.stop), slice(len(share.part), None)
        found += len(share.part) * len(gate_up)
        gates, ups = gate_up.chunk(2, dim=1)
        numbers = [*layout.experts.experts(model.num_experts)]
        numbers += [model.num_experts] * is_among
        for n, expert in enumerate(numbers):
            held = gates[n], ups[n], down[n].t()
            gate, up, whole_down = model.plain[expert]
            for values, whole in zip(held, (gate, up, whole_down.t()), strict=True):
                assert torch.equal(values[: len(share.part)], whole[part])
            # Zero gate and up rows make any value in the later columns of `down` irrelevant.
            assert not gates[n][rest].any() and not ups[n][rest].any()
    assert len(shapes) == 1 and found == model.width * (model.num_experts + is_among)
    assert (total - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("columns", "least", "group", "unit"),
    [(192, 16, 64, 64), (96, 16, 32, 32), (96, 64, 128, 128), (384, 16, 128, 128)],
)
def test_groups_that_a_share_cuts_become_smaller_where_the_kernel_reads_them(
    columns: int, least: int, group: int, unit: int
) -> None:
    held, found = awq(128).split_width(columns, lambda form: form.unit(Axis.COLUMNS) >= least)
    assert (held, found) == (awq(group), unit)
    assert E4M3_BLOCKS.split_width(columns, lambda form: True) == (E4M3_BLOCKS, 128)
