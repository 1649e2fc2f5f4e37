"""The Triton kernels of the mixture of experts through Triton's interpreter, on the CPU at small
sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels.formats import E4M3_BLOCKS, e4m3_blocks
from negamax.kernels.launch.tile import Tile
from negamax.kernels.moe import spec, tiles
from negamax.kernels.moe import triton as kernels
from negamax.kernels.moe import triton_prefill as prefill
from negamax.kernels.moe.cases import fp8_experts
from negamax.kernels.op import Case, Kernel
from negamax.kernels.quantize.spec import quantize_activations

OPS = {op.name: op for op in spec.OPS}
ROUTE, _, EXPERTS, _ = kernels.KERNELS
DTYPES = (torch.bfloat16, torch.float16)
# (gemv_max_m, SMALL_M_MAX_M)
PATHS = {"gemv": (1 << 20, 1 << 20), "small_m": (0, 1 << 20), "large_m": (0, 0)}


def choose_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    gemv_max_m, small_m_max_m = PATHS[path]
    monkeypatch.setattr(tiles.H200, "gemv_max_m", lambda self, width: gemv_max_m)
    monkeypatch.setattr(tiles, "SMALL_M_MAX_M", small_m_max_m)
    # the interpreter runs them one by one
    few_programs = tiles.ExpertTiles(
        Tile(1, 16, 256, num_warps=4), Tile(1, 32, 128, num_warps=4), choices=2
    )
    monkeypatch.setattr(tiles.H200, "gemv", lambda self, width: few_programs)


def compare(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    op = OPS[kernel.op]
    with torch.inference_mode():
        expected = op.apply(op.reference, case.upcast())
        actual = op.apply(kernel, case)
    for want, got in zip(expected, actual, strict=True):
        assert got.shape == want.shape, case.label
        tolerance = op.tolerance[dtype]
        if want.is_floating_point():
            torch.testing.assert_close(
                got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol, msg=case.label
            )
        else:
            assert torch.equal(got, want), case.label


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    assert not out.isnan().any()
    return ((out - reference).norm() / reference.norm()).item()


def fp8_case(
    num_tokens: int,
    *,
    hidden: int = 256,
    width: int = 128,
    num_experts: int = 6,
    top_k: int = 2,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "x": torch.randn(num_tokens, hidden, generator=generator).bfloat16(),
        "ids": torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices.int(),
        "weights": torch.rand(num_tokens, top_k, generator=generator) + 0.1,
        **fp8_experts(num_experts, hidden=hidden, width=width, generator=generator),
    }
    return Case(f"fp8 T={num_tokens}", tensors, {"first": 0, "count": num_experts}, E4M3_BLOCKS)


def experts_error(case: Case) -> float:
    op = OPS["moe.experts"]
    (expected,) = op.apply(op.reference, case.upcast())
    (actual,) = op.apply(EXPERTS, case)
    return relative_error(actual.float(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_route_on_every_case_of_the_op(dtype: torch.dtype) -> None:
    for case in OPS["moe.route"].cases(dtype, torch.Generator().manual_seed(1)):
        compare(ROUTE, case, dtype)


def test_route_marks_padding_and_leaves_its_counters_at_whole_rounds() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(19, 64, generator=generator).bfloat16()
    prepared = kernels.prepare_gate(
        torch.randn(8, 64, generator=generator), torch.randn(8, generator=generator)
    )
    ids, weights = kernels.route(x, prepared, top_k=2)
    again, some = kernels.route(x, prepared, top_k=2, active=torch.tensor([5], dtype=torch.int32))
    assert torch.equal(again[:5], ids[:5]) and torch.equal(some[:5], weights[:5])
    assert (again[5:] == -1).all() and (some[5:] == 0).all()
    assert prepared.arrivals.max() == 2 * 1024 and (prepared.arrivals % 1024 == 0).all()


@pytest.mark.parametrize("most_few", [0, 4])
def test_route_prefers_the_lower_id_among_equals_and_survives_nan(
    monkeypatch: pytest.MonkeyPatch, most_few: int
) -> None:
    monkeypatch.setattr(tiles, "ROUTE_SMALL_M_MAX_M", most_few)
    prepared = kernels.prepare_gate(torch.zeros(8, 32), torch.zeros(8))
    x = torch.ones(2, 32).bfloat16()
    x[1, 0] = float("nan")
    ids, weights = kernels.route(x, prepared, top_k=4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert (weights[0] == 0.25).all() and weights[1].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_few_tokens_are_routed_as_many_are(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """72 experts are three groups of 32; the second call finds the words of the first."""
    generator = torch.Generator().manual_seed(5)
    prepared = kernels.prepare_gate(
        torch.randn(72, 136, generator=generator), torch.randn(72, generator=generator)
    )
    for active in (num_tokens, num_tokens - 1):
        x = torch.randn(num_tokens, 136, generator=generator).bfloat16()
        rows = torch.tensor([active], dtype=torch.int32)
        ids, weights = kernels.route(x, prepared, top_k=6, active=rows)
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "ROUTE_SMALL_M_MAX_M", 0)
            many_ids, many_weights = kernels.route(x, prepared, top_k=6, active=rows)
        assert torch.equal(ids, many_ids) and (ids[active:] == -1).all()
        torch.testing.assert_close(weights, many_weights)
    assert prepared.flag.tolist() == [2]


def test_pieces_of_the_gate_add_up_to_it_exactly() -> None:
    gate = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    pieces = kernels.prepare_gate(gate, torch.zeros(16)).gate_bf16x3.float()
    assert torch.equal((pieces[0] + pieces[1]) + pieces[2], gate)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_on_every_case_of_the_op(
    monkeypatch: pytest.MonkeyPatch, path: str, dtype: torch.dtype
) -> None:
    choose_path(monkeypatch, path)
    for case in OPS["moe.experts"].cases(dtype, torch.Generator().manual_seed(1)):
        # the interpreter is slow
        if case.tensors["x"].shape[0] * case.tensors["down"].shape[2] < 1000:
            compare(EXPERTS, case, dtype)


@pytest.mark.parametrize(("path", "bound"), [("gemv", 0.01), ("small_m", 0.1), ("large_m", 0.1)])
def test_fp8_experts(monkeypatch: pytest.MonkeyPatch, path: str, bound: float) -> None:
    choose_path(monkeypatch, path)
    assert experts_error(fp8_case(5)) < bound


@pytest.mark.parametrize("path", ["small_m", "large_m"])
def test_one_expert_with_more_tokens_than_a_tile_holds(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    choose_path(monkeypatch, path)
    case = fp8_case(37)
    case.tensors["ids"][:] = torch.tensor([4, 1], dtype=torch.int32)
    assert experts_error(case) < 0.1


@pytest.mark.parametrize("path", PATHS)
def test_choices_of_other_ranks_and_padding_add_nothing(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    choose_path(monkeypatch, path)
    whole = fp8_case(9, num_experts=8)
    whole.tensors["ids"][6:] = -1
    mine = {
        name: whole.tensors[name][2:5].contiguous()
        for name in ("gate_up", "down", "gate_up_scale", "down_scale")
    }
    case = replace(whole, tensors={**whole.tensors, **mine}, numbers={"first": 2, "count": 3})
    assert experts_error(case) < 0.1
    (out,) = OPS["moe.experts"].apply(EXPERTS, case)
    assert (out[6:] == 0).all()


def test_experts_of_large_m_write_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and other ranks' choices included: memory is full of NaN before."""
    choose_path(monkeypatch, "large_m")
    case = fp8_case(9, num_experts=3)
    case.tensors["ids"][4:] = torch.tensor([-1, 5], dtype=torch.int32)
    t, empty = case.tensors, torch.empty
    prepared = kernels.prepare_experts(
        e4m3_blocks(t["gate_up"], t["gate_up_scale"]), e4m3_blocks(t["down"], t["down_scale"])
    )
    x = quantize_activations(t["x"])

    def poisoned(*shape: int, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        made.view(torch.uint8).fill_(255)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)
    parts = kernels.experts(x, t["ids"], t["weights"], prepared, first=0, count=3)
    assert (
        parts.shape == (9, 2, 256)
        and not parts.isnan().any()
        and (parts[4:] == 0).all()
        and (parts[:4] != 0).any()
    )


def test_h_kept_in_shared_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_path(monkeypatch, "large_m")
    tile = replace(tiles.H200().large_m(width=128, fp8=True), repeat_n=2)
    case, outputs = fp8_case(5), []
    for resident in (False, True):
        kept = replace(tile, resident=resident)
        monkeypatch.setattr(tiles.H200, "large_m", lambda self, kept=kept, **_: kept)
        outputs += OPS["moe.experts"].apply(EXPERTS, case)
    assert torch.equal(*outputs)


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


def test_no_tokens() -> None:
    case = fp8_case(0)
    (out,) = OPS["moe.experts"].apply(EXPERTS, case)
    assert out.shape == (0, 256)
