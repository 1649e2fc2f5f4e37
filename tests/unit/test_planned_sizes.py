import json
import os
import shutil
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax import LLM
from negamax.base.errors import ConfigError
from negamax.bench.group import Group, label, sizes
from negamax.cli.bench_options import parse_counts
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.engine.core.planned_sizes import choose_parallel_sizes
from negamax.engine.core.setup import start_loop
from negamax.engine.core.source import locate
from negamax.models.memory import expected_distinct_experts
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.chunks import LEAST_SHARE, chunks, plan_even_times
from negamax.planner.cost import Costs, Model, Workload
from negamax.planner.floor import step_bytes
from negamax.planner.gpus import MEASURED, visible_devices, visible_gpus
from negamax.planner.plan import Hardware, make_plan
from negamax.planner.topology import Topology
from negamax.scheduler.chunk_length import ChunkLength, EvenChunks, EvenTimes
from negamax.scheduler.step import StepPlan
from negamax.worker.config import DebugResult
from tests.unit.plan_support import RankScheduler, make_scheduler


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


M2 = bundled_spec("minimax-m2")
BF16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "index_dtype": "bfloat16"}
CACHES = ("kv_dtype", "index_dtype")
BASELINE = Path(__file__).parents[2] / "docs" / "results" / "vllm-0.26-h200.json"


@pytest.mark.parametrize(
    ("tokens", "experts"), [(1, 8.0), (4, 30.5), (16, 102.0), (64, 222.4), (100, 245.3)]
)
def test_distinct_experts_under_uniform_routing(tokens: int, experts: float) -> None:
    assert expected_distinct_experts(M2, tokens) == pytest.approx(experts, abs=0.06)


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 0.71), (4, 1.92), (16, 5.83), (64, 13.0), (100, 15.0)]
)
def test_limit_of_minimax_m2_on_four_gpus(batch: int, milliseconds: float) -> None:
    """The limits are computed by hand for 1500 tokens of context and 4.3 TB/s."""
    num_bytes = step_bytes(M2, batch=batch, context=1500, **BF16, ranks=4)
    assert 1e3 * num_bytes / 4.3e12 == pytest.approx(milliseconds, rel=0.006)


@pytest.mark.parametrize(
    ("context", "batch", "milliseconds"),
    [(1000, 1, 1.62), (1000, 64, 22.85), (32_000, 16, 11.25), (128_000, 4, 4.165)],
)
def test_limit_of_minimax_m3_on_four_gpus(context: int, batch: int, milliseconds: float) -> None:
    """The limits are computed by hand for FP8 caches and 4.25 TB/s."""
    spec, dtypes = bundled_spec("minimax-m3-mxfp8"), BF16 | dict.fromkeys(CACHES, "fp8")
    num_bytes = step_bytes(spec, batch=batch, context=context, **dtypes, ranks=4)
    assert 1e3 * num_bytes / 4.25e12 == pytest.approx(milliseconds, rel=0.006)


def test_limit_follows_layers_ranks_and_formats() -> None:
    def floor(kv_dtype: str = "bfloat16", **changes: object) -> float:
        spec = replace(M2, **changes)  # type: ignore[arg-type]
        return step_bytes(spec, batch=16, context=1000, **BF16 | {"kv_dtype": kv_dtype}, ranks=1)

    head = M2.vocab_size * M2.hidden_size * 2
    assert floor(num_layers=31) - head == pytest.approx((floor() - head) / 2)
    assert floor() - floor("fp8") == 16 * 1000 * 62 * 2 * 8 * 128
    assert floor(quantization=None) > 1.9 * floor()


def test_recorded_baseline_holds_both_configurations_with_their_conditions() -> None:
    document = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert document["conditions"]
    four, one = document["results"]
    for result, expected in ((four, (62, 4)), (one, (16, 1))):
        assert (result["num_layers"], result["tensor_parallel_size"]) == expected
        assert [run["concurrency"] for run in result["runs"]] == [1, 4, 16, 64, 100]
    for run in four["runs"]:
        assert run["decode_tokens_per_second"] == pytest.approx(
            1e3 * run["concurrency"] / run["tpot_ms"], rel=0.01
        )


def test_number_lists_are_read_and_others_refused_with_the_flag() -> None:
    assert parse_counts("1, 4,16,4", flag="--batch") == (1, 4, 16)
    for text in ("", "1,", "0", "-1", "1.5", "x", "²", "1" * 40, "1000001"):
        with pytest.raises(ConfigError, match="--batch"):
            parse_counts(text, flag="--batch")


# Two stages have two data-parallel groups of two ranks: rank = stage * 4 + group * 2 + tp.
LAYOUT = ParallelLayout(pp=2, dp=2, tp=2)


def test_experts_are_those_of_all_tokens_of_a_step() -> None:
    first = [[[1, 2], [3]], [[2, 5], [3, 4]]]  # experts of the two groups, in each of two layers
    second = [[[7, 8]], [[7, 9]]]  # in the third layer
    answers = [DebugResult(experts=group) for group in (*first, *second) for _ in range(2)]
    assert Group(LAYOUT).distinct_experts(answers) == (3 + 2 + 3) / 3
    assert Group(LAYOUT).distinct_experts([*answers[:-1], DebugResult()]) is None
    for nothing in ([], [[], []]):  # no experts in the model, or no plan in the turn
        answer = DebugResult(experts=nothing)
        assert Group(ParallelLayout()).distinct_experts([answer]) is None


def test_a_step_takes_as_long_as_the_slowest_rank_of_each_stage() -> None:
    seconds = [0.001, 0.002, 0.0015, 0.001, 0.003, 0.001, 0.001, 0.001]
    answers = [DebugResult(number=each) for each in seconds]
    assert Group(LAYOUT).stage_milliseconds(answers) == [2.0, 3.0]
    assert Group(LAYOUT).stage_milliseconds([*answers[:-1], DebugResult()]) == []
    group = Group(LAYOUT)
    assert [group.step_rows(count) for count in (1, 2, 3, 100)] == [1, 1, 2, 50]
    assert [group.rank_rows(count) for count in (1, 3, 100, 102)] == [1, 1, 25, 26]


def test_results_say_how_the_model_was_split() -> None:
    """Check that results without stages and groups keep the format of older files."""
    options = EngineOptions("nano", tensor_parallel_size=2)
    assert sizes(options) == {"tensor_parallel_size": 2} and label(sizes(options)) == "TP2"
    options = EngineOptions("nano", pipeline_parallel_size=2, data_parallel_size=4)
    assert label(sizes(options)) == "PP2 DP4 TP1"


STEP, BLOCK, LONGEST = 8192, 64, 131_072


@cache
def costs(model: str, **sizes: int) -> Costs:
    spec = locate(EngineOptions(model=model, load_format="synthetic")).spec
    layout = Topology(**sizes).layout
    return Costs(Model.of(spec, MEASURED), MEASURED, layout, per_node=layout.world_size)


def timed(model: str, stages: int) -> EvenTimes:
    sizes = {"max_num_batched_tokens": STEP, "block_size": BLOCK, "max_model_len": LONGEST}
    return plan_even_times(costs(model, pp=stages), **sizes)


@pytest.mark.parametrize("model", ["minimax-m2", "minimax-m3"])
@pytest.mark.parametrize("behind", [0, 40_000])
def test_chunks_take_equally_long(model: str, behind: int) -> None:
    """The last chunk and chunks at the bound differ. A prefix cache hit changes no later chunk."""
    cost, length = costs(model, pp=4), timed(model, 4)
    limit = cost.chunk_seconds(STEP, after=0)
    found, done = [], behind
    while done < LONGEST:
        found.append(length.fit(done, LONGEST - done, STEP)[0])
        done += found[-1]
    assert done == LONGEST and len(found) > 16
    done = behind
    for size in found[:-1]:
        seconds = cost.chunk_seconds(size, after=done)
        assert seconds > 0.9 * limit
        assert seconds < 1.03 * limit or size <= STEP // LEAST_SHARE
        done += size
        assert done % BLOCK == 0
    assert all(later <= size for size, later in pairwise(found))
    if not behind:
        assert found[0] == STEP


@pytest.mark.parametrize(("stages", "gain"), [(2, 1.06), (4, 1.2), (8, 1.4)])
def test_a_pipeline_gives_the_first_token_of_a_long_prompt_sooner(stages: int, gain: float) -> None:
    """Compare M2 at 128K tokens with a pipeline that runs equal chunks."""
    cost = costs("minimax-m2", pp=stages)
    lengths = (EvenChunks(), timed("minimax-m2", stages))
    splits = [chunks(length, LONGEST, budget=STEP) for length in lengths]
    even, in_time = map(cost.chunks_seconds, splits)
    assert even == pytest.approx(cost.prefill_seconds(LONGEST, chunk=STEP))
    assert even > gain * in_time
    assert cost.chunk_seconds(STEP, after=LONGEST) > 10 * cost.chunk_seconds(STEP, after=0)


def test_plans_and_stages_use_the_engines_chunks() -> None:
    spec = locate(EngineOptions(model="minimax-m2", load_format="synthetic")).spec
    plan = make_plan(spec, Hardware(MEASURED, 4), [Workload(1, LONGEST, 1000)])
    seconds = {each.topology.label: each.prompt_seconds for each in plan.candidates}
    assert seconds["PP4"] < costs("minimax-m2", pp=4).prefill_seconds(LONGEST, chunk=STEP) / 1.2
    alone = costs("minimax-m2", tp=4)
    assert seconds["TP4"] == pytest.approx(alone.prefill_seconds(LONGEST, chunk=STEP))
    cost = costs("minimax-m2", pp=4)
    one = cost.chunks_seconds([STEP])
    last = cost.chunk_seconds(STEP, after=3 * STEP)
    assert one < cost.chunks_seconds([STEP] * 4) < 8 * last < 4 * one + 8 * last
    alone = costs("minimax-m2", tp=4)
    assert alone.chunks_seconds([STEP] * 4) == pytest.approx(
        sum(alone.chunk_seconds(STEP, after=STEP * at) for at in range(4))
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prices=st.lists(st.floats(1.0, 8.0), max_size=6).map(sorted),
    every=st.integers(1, 300),
    block_size=st.sampled_from((1, 4, 16, 64)),
    budget=st.integers(1, 200),
    num_tokens=st.integers(1, 2000),
)
def test_chunks_cover_the_prompt(
    prices: list[float], every: int, block_size: int, budget: int, num_tokens: int
) -> None:
    length = EvenTimes(block_size, every, (1.0, *prices))
    behind = 0
    while behind < num_tokens:
        left = num_tokens - behind
        count, room = length.fit(behind, left, budget)
        assert 1 <= count <= min(left, room) and room <= budget
        if count < left and count >= block_size:
            assert (behind + count) % block_size == 0
        behind += count
    assert behind == num_tokens


def scheduler_with(length: ChunkLength, **prompts: list[int]) -> RankScheduler:
    sizes = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": 8, "num_blocks": 200}
    scheduler = make_scheduler(**sizes, chunk_length=length)
    scheduler.add_all(**prompts)
    return scheduler


def step(scheduler: RankScheduler) -> StepPlan:
    plan = scheduler.next_plan()
    scheduler.commit(plan)
    return plan


DOUBLING = EvenTimes(8, 128, (1.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"pipeline_parallel_size": 2}, EvenTimes),
        ({"pipeline_parallel_size": 2, "enable_dynamic_chunking": False}, EvenChunks),
        ({"pipeline_parallel_size": 2, "max_model_len": 2048}, EvenChunks),  # single chunks
        ({}, EvenChunks),
    ],
    ids=str,
)
def test_chunks_of_pipeline_stages(options: dict[str, Any], kind: type[ChunkLength]) -> None:
    with LLM("nano", script="agents", device="cpu", **options) as llm:
        (rank,) = llm._loop._scheduler.ranks
        assert type(rank.limits.chunk_length) is kind


def test_prompts_run_in_chunks_of_equal_time() -> None:
    plans = []
    for length in (EvenChunks(), DOUBLING):
        sizes = enumerate((30, 20, 14, 5, 64), start=1)
        prompts = {f"r{number}": [number] * size for number, size in sizes}
        scheduler = scheduler_with(length, **prompts)
        plans.append([step(scheduler) for _ in range(2)])
    assert plans[0] == plans[1]
    # Check that every step takes as long as the first; other prompts use the rest of a step.
    scheduler = scheduler_with(DOUBLING, long=[3] * 244, short=[4] * 40)
    counts = [step(scheduler).num_scheduled for _ in range(6)]
    # After 64, 104, 136, 160 tokens, a token costs 1.5, 1.8, 2.1, 2.5 times the first.
    assert counts == [[64], [40, 4], [32, 4], [24, 8], [24, 3], [16, 13]]
    scheduler = scheduler_with(DOUBLING, first=list(range(264)))
    scheduler.run_all()
    scheduler.add("second", [*range(264), *range(300, 360)])
    plan = step(scheduler)
    assert plan.new_rows[0].num_computed == 264
    assert plan.num_scheduled == [16]  # Each token costs four times as much as the first.
