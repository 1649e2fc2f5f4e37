import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from negamax.bench.profile import group, operation_of, table_rows
from negamax.cli.main import main
from negamax.worker.config import KernelTime
from tests.tables import read_table

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
