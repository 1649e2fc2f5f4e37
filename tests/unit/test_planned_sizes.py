import json
import os
import shutil
from pathlib import Path

import pytest

from negamax.base.errors import ConfigError
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.engine.core.planned_sizes import choose_parallel_sizes
from negamax.engine.core.setup import start_loop
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.gpus import MEASURED, visible_devices, visible_gpus


@pytest.fixture
def gpu_name() -> str:
    return "NVIDIA H200"


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_name: str) -> None:
    rows = [f"{n}, GPU-{n}aaaaaaa-0000, {gpu_name}, {143_771 - 1000 * (n == 1)}" for n in range(4)]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows), encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,2", 2), ("", 0), ("GPU-3aaaaaaa", 1), ("1,7,2", 1), ("-1", 0)],
)
def test_visible_gpus(visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = visible_gpus()
    assert [gpu.name for gpu in found] == ["H200"] * count
    if visible in (None, "1,7,2"):
        assert min(gpu.memory for gpu in found) == MEASURED.memory - 1000 * 2**20


@pytest.mark.usefixtures("four_gpus")
def test_plans_split_files_for_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "split"
    shutil.copytree(EMBEDDED["nano"], folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "rank": 0}
    index = folder / "model-rank-0.safetensors.index.json"
    index.write_text(json.dumps({"metadata": sizes, "weight_map": {}}))
    assert main(["plan", str(folder), "--gpus", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [each["topology"] for each in plan["topologies"]] == ["2 x TP2 EP2"]
    reason = "split for --tensor-parallel-size 2, --expert-parallel-size 2"
    assert plan["refused"] and all(reason in each["reason"] for each in plan["refused"])
    chosen = choose_parallel_sizes(EngineOptions(str(folder), performance_mode="latency"))
    assert (chosen.tensor_parallel_size, chosen.enable_expert_parallel) == (2, True)


@pytest.mark.usefixtures("four_gpus")
def test_a_performance_mode_chooses_missing_sizes() -> None:
    model = {"model": "minimax-m2", "load_format": "synthetic"}
    for mode in ("latency", "interactivity", "throughput"):
        options = choose_parallel_sizes(EngineOptions(**model, performance_mode=mode))
        layout = ParallelLayout.of(options.parallel)
        assert layout.world_size == 4 and options.load_format == "synthetic"
        assert mode == "throughput" or layout.tp == 4
        assert options.num_replicas == 1
    for own in (
        {"performance_mode": "balanced"},
        {"performance_mode": "latency", "tensor_parallel_size": 2},
        {"performance_mode": "latency", "device": "cpu"},
    ):
        options = EngineOptions(**model, **own)
        assert choose_parallel_sizes(options) is options
    options = EngineOptions(
        **model, performance_mode="throughput", speculative_config={"model": "nano-draft"},
        kv_cache_dtype="fp8", max_model_len=4096,
    )  # fmt: skip
    assert ParallelLayout.of(choose_parallel_sizes(options).parallel).world_size == 4
    own = EngineOptions(**model, performance_mode="latency", num_replicas=2)
    assert choose_parallel_sizes(own, one_engine=False) is own
    large = {"model": "minimax-m3", "load_format": "synthetic", "performance_mode": "latency"}
    # The model fits only if the index keys are sharded, which the options must request.
    fp8 = {"model": "minimax-m3-mxfp8", "kv_cache_dtype": "fp8", "index_cache_dtype": "fp8"}
    for more in ({}, fp8, {"index_cache_sharding": "on"}):
        large |= more
        words = "4 x H200 cannot hold the model and one request of 1048576"
        with pytest.raises(ConfigError, match=words):
            choose_parallel_sizes(EngineOptions(**large))
    # The model also needs more of the memory, and fewer than 256 request slots.
    large |= {"gpu_memory_utilization": 0.95}
    options = choose_parallel_sizes(EngineOptions(**large, max_num_seqs=64))
    assert options.tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="--performance-mode is 'fast'; allowed: balanced, "):
        EngineOptions("nano", performance_mode="fast")


@pytest.mark.usefixtures("four_gpus")
def test_a_performance_mode_of_a_server_uses_all_gpus() -> None:
    options = EngineOptions("nano", performance_mode="throughput", max_model_len=2048)
    for one_engine, gpus in ((True, {1, 2, 4}), (False, {4})):
        chosen = choose_parallel_sizes(options, one_engine=one_engine)
        assert ParallelLayout.of(chosen.parallel).world_size * chosen.num_replicas in gpus
        assert one_engine == (chosen.num_replicas == 1)


@pytest.mark.usefixtures("four_gpus")
def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_devices() == ["0", "1", "2", "3"]
    for variable, names in (("2, 0", ["2", "0"]), ("1,7,2", ["1"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert visible_devices() == names
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    assert visible_devices() == ["1", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices() is None


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("gpu_name", ["NVIDIA Abacus"])
def test_unknown_gpu(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["plan", "minimax-m2"]) == 2
    assert "--gpu is 'NVIDIA Abacus'; known: A100-40GB" in capsys.readouterr().err
    assert main(["plan", "minimax-m2", "--gpus", "4", "--gpu", "H200"]) == 0
    options = EngineOptions("minimax-m2", load_format="synthetic", performance_mode="latency")
    with caplog.at_level("WARNING", logger="negamax"):
        assert choose_parallel_sizes(options) is options
    assert "latency chooses no parallel size: --gpu is 'NVIDIA Abacus'" in caplog.text


def test_throughput_doubles_the_sequences_of_a_step() -> None:
    found = {}
    for mode in ("balanced", "throughput"):
        options = EngineOptions("nano", script="agents", device="cpu", performance_mode=mode)
        loop, info = start_loop(options)
        loop.shutdown()
        found[mode] = info.max_num_seqs
    assert found == {"balanced": 64, "throughput": 128}
