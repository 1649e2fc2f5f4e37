import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from negamax.bench.profile import group, operation_of, table_rows
from negamax.cli.main import main
from negamax.formats.floats import E4M3_BLOCKS
from negamax.formats.platform import CPU
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.registry import OPS, gpu_kernels, resolve
from negamax.worker.config import KernelTime
from tests.kernel_cases import CASES
from tests.kernel_cases.bindings import bind, copy_case, map_tensors, tensors_of
from tests.kernel_cases.case import Case, Cost
from tests.kernel_cases.weight_only import E4M3_CHANNEL
from tests.tables import read_table
from tools import bench_kernels as kernels
from tools.bench_kernels import Ceilings, cases, time_kernel


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_can_be_bound_and_repeated(name: str) -> None:
    for case in cases(OPS[name], platform="cpu", dtype=torch.bfloat16, ranks=(1,)):
        for kernel in resolve(platform=CPU, dtype=torch.bfloat16).candidates[name]:
            call = bind(kernel, case)
            with torch.inference_mode():
                call()
                call()


def test_a_bound_kernel_is_prepared_once_and_returns_what_the_op_returns() -> None:
    op = OPS["gemm.linear"]
    (case, *_) = cases(op, platform="cpu", dtype=torch.float32, ranks=(1,))
    prepared: list[int] = []

    def prepare(weight: StoredWeight) -> Any:
        assert op.reference.prepare is not None
        prepared.append(1)
        return op.reference.prepare(weight)

    call = bind(replace(op.reference, prepare=prepare), case)
    (expected,) = CASES[op].apply(op.reference, case)
    assert torch.equal(call(), expected) and torch.equal(call(), expected)
    assert prepared == [1]


def test_copies_of_a_case_share_no_memory() -> None:
    @dataclass(frozen=True)
    class Pair:
        left: Tensor
        right: tuple[Tensor, ...]

    value = Pair(torch.ones(2), (torch.zeros(3), torch.ones(1).to(torch.float8_e4m3fn)))
    case = Case("", {"pair": value, "plain": torch.ones(5, dtype=torch.int64)}, {"k": 1})
    copy = copy_case(case)
    assert copy.numbers == {"k": 1}
    assert torch.equal(copy.tensors["pair"].right[0], value.right[0])
    assert copy.tensors["pair"].left.data_ptr() != value.left.data_ptr()
    assert sum(tensor.nbytes for tensor in tensors_of(case.tensors)) == 4 * 2 + 4 * 3 + 1 + 8 * 5
    assert map_tensors([None, "x"], torch.neg) == [None, "x"]


def test_peak_of_8_bits_counts_where_8_bits_are_multiplied() -> None:
    ceilings = Ceilings(bytes_per_second=1.0, flops_per_second=1.0, l2_bytes=0)
    seconds = {
        (kernel.provider, stored.name): ceilings.seconds(kernel, Cost(num_bytes=0, flops=4))
        for kernel in gpu_kernels()
        for stored in (E4M3_BLOCKS, E4M3_CHANNEL)
        if kernel.op == "moe.experts" and kernel.reads(stored)
    }
    assert seconds == {
        ("triton", E4M3_BLOCKS.name): 2.0,
        ("triton_w8a8", E4M3_CHANNEL.name): 2.0,
        ("triton_weight_only", E4M3_BLOCKS.name): 4.0,
        ("triton_weight_only", E4M3_CHANNEL.name): 4.0,
    }


def test_empty_cases_and_other_degrees_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"T=1 TP4 qkv": 1, "T=0": 0, "tp=2": 1, "any": 1}
    made = [Case(label, {"x": torch.ones(size)}) for label, size in sizes.items()]
    op = OPS["norm.add_rms"]
    monkeypatch.setitem(CASES, op, replace(CASES[op], small=lambda dtype, generator: made))
    labels = [case.label for case in cases(op, platform="cpu", dtype=torch.float32, ranks=(4,))]
    assert labels == ["T=1 TP4 qkv", "any"]


def test_percent_of_roofline_is_the_longer_floor_over_the_time() -> None:
    op = OPS["gemm.linear"]
    *_, case = cases(op, platform="cpu", dtype=torch.float32, ranks=(1,))
    cost = CASES[op].cost(case)
    for ceilings in (Ceilings(1e3, 1e30, 0), Ceilings(1e30, 1e3, 0)):
        kind = {"dtype": torch.float32, "platform": "cpu"}
        timing = time_kernel(op.reference, case, **kind, ceilings=ceilings)
        seconds = timing.microseconds / 1e6
        by_bytes = cost.num_bytes / ceilings.bytes_per_second
        floor = max(by_bytes, cost.flops / ceilings.flops_per_second)
        assert timing.percent_of_roofline == pytest.approx(100 * floor / seconds)
        assert timing.gigabytes_per_second == pytest.approx(cost.num_bytes / seconds / 1e9)
        assert timing.is_cold is None


def test_command_prints_a_line_per_kernel_and_case_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CPU_SECONDS", 0.0)
    file = tmp_path / "out.json"
    line = "bench kernels --op norm.add_rms --device cpu --dtype float32"
    assert main([*line.split(), "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(file.read_text())
    assert len(document["timings"]) == len(lines) - 1 >= 3
    assert {timing["op"] for timing in document["timings"]} == {"norm.add_rms"}
    assert document["ceilings"]["bytes_per_second"] > 0
    assert not document["failures"]


def test_refuses_unknown_names_and_an_installed_wheel(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, words in (
        ("--op norm.cube", "known: attention.decode"),
        ("--dtype int4", "allowed: float32"),
        ("--device abacus", "allowed: auto, cpu, cuda"),
        ("--op norm.add_rms --provider nobody", "no kernel to time"),
        ("--tp 0", "--tp is '0'"),
    ):
        assert main(["bench", "kernels", *line.split()]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr("negamax.__file__", str(tmp_path / "negamax" / "__init__.py"))
    assert main(["bench", "kernels"]) == 2
    assert "needs a clone of the repository" in capsys.readouterr().err


KERNELS = Path(__file__).parents[2] / "negamax" / "kernels"


@pytest.mark.parametrize(("kernel", "operation"), read_table("bench_profile.operations_of_kernels"))
def test_kernels_are_known_by_how_their_names_begin(kernel: str, operation: str) -> None:
    assert operation_of(kernel) == operation


def test_every_launched_triton_kernel_is_known() -> None:
    launches = re.compile(r"^ +(\w+)\[(?:\(|grid)", re.MULTILINE)
    foreign = {"NCCL", "copies", "indexing", "PyTorch elementwise"}
    names = {
        name
        for file in KERNELS.glob("*/triton*.py")
        for name in launches.findall(file.read_text(encoding="utf-8"))
    }
    assert len(names) > 20
    assert [name for name in sorted(names) if operation_of(name) in {name, *foreign}] == []


def test_groups_add_up_to_what_was_recorded() -> None:
    times = (("_add_rms", 40, 80.0), ("_sum_parts", 20, 20.0), ("_unheard_of", 2, 300.0))
    entries = group([KernelTime(*each) for each in times], steps=10)
    assert [(entry.operation, entry.microseconds, entry.launches) for entry in entries] == [
        ("_unheard_of", 30.0, 0.2),
        ("add + norm", 10.0, 6.0),
    ]
    assert entries[1].kernels == ("_add_rms", "_sum_parts")
    run = {"step_microseconds": 50.0, "operations": [asdict(entry) for entry in entries]}
    runs = [run | {"batch": batch} for batch in (1, 4)]
    headings, rows = table_rows({"runs": runs, "num_layers": 2})
    assert headings[1:] == ["batch 1", "batch 4"]
    assert ["add + norm", "5.0 (3.00)", "5.0 (3.00)"] in rows
    assert ["total", "20.0 (3.10)", "20.0 (3.10)"] in rows


def test_command_records_every_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    line = "--device cpu --num-threads 1 --context 20 --steps 4 --batch 1,2 --list-kernels"
    assert main(["bench", "profile", "nano", *line.split(), "--json", str(file)]) == 0
    assert "total" in capsys.readouterr().out
    (result,) = json.loads(file.read_text())["results"]
    assert [run["batch"] for run in result["runs"]] == [1, 2]
    for run in result["runs"]:
        assert run["step_microseconds"] > 0
        assert sum(entry["microseconds"] for entry in run["operations"]) > 0
        assert all(entry["launches"] > 0 and entry["kernels"] for entry in run["operations"])
