from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from stored_kernels import dequantized, keeping_stored, random_stored
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS, mxfp4, mxfp8, nvfp4
from negamax.formats.floats import plain as as_plain
from negamax.formats.platform import CPU
from negamax.formats.tensor_format import Axis, StoredWeight, TensorFormat
from negamax.kernels.moe.op import EXPERTS, ROUTE, SelectedExperts
from negamax.kernels.quantize.stored import dequantize
from negamax.kernels.registry import OPS, resolve
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import LayerSetup
from negamax.models.minimax_m3 import names
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.awq import awq
from negamax.quantization.compressed_tensors import STRATEGIES, packed
from negamax.quantization.gptq import gptq
from negamax.quantization.modelopt import ALGORITHMS
from negamax.quantization.modelslim import int8
from negamax.quantization.scheme import Scheme, WeightFormat

FORMATS = [
    E4M3_BLOCKS, packed(4, 32, symmetric=False), packed(8, -1), awq(32), int8(64, is_static=True),
    gptq(4, 128, version=1), nvfp4(), nvfp4(divides=True), mxfp4(), mxfp8(), STRATEGIES["tensor"],
    ALGORITHMS["FP8_PB_WO"][0],
]  # fmt: skip
TOP_K, TOKENS = 2, 4
TABLE = keeping_stored(resolve(platform=CPU, dtype=torch.float32))


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
        kernel = TABLE.choose(EXPERTS, self.stored)
        assert kernel is not None

        def prepare(gate_up: StoredWeight, down: StoredWeight, **numbers: Any) -> Any:
            prepared.extend(dequantized(weight) for weight in (gate_up, down))
            return kernel.prepare(*map(as_plain, prepared), **numbers)

        watched = (*TABLE.candidates[EXPERTS][:-1], replace(kernel, prepare=prepare))
        setup = LayerSetup(
            replace(single, layout=layout),
            WeightFormat(torch.float32, torch.device("cpu"), scheme),
            replace(TABLE, candidates={**TABLE.candidates, EXPERTS: watched}),
        )
        moe = SparseMoe(
            names.moe(0), layer=0, hidden_size=self.hidden, width=self.width,
            num_experts=self.num_experts, top_k=TOP_K, shared_width=self.width * self.shared,
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
        ids, weights = route.run(self.x, router, top_k=TOP_K)
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
    kernel = TABLE.choose(EXPERTS, stored)
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
