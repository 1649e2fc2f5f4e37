import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.base.errors import ConfigError
from negamax.cli.main import app, main
from negamax.cli.plan import commands
from negamax.cli.resolve import resolve
from negamax.config.kv_cache import block_bytes, set_index_dtype, split_over_holders
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.models.memory import ModelWeights, weight_bytes
from negamax.models.registry import bundled_spec, find_bundled_draft
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.options.speculation import SpeculationConfig
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split, possible_splits
from negamax.planner.cost import Costs, Drafts, Model, Workload
from negamax.planner.gpus import GIB, GPUS, MEASURED, find_gpu
from negamax.planner.plan import Candidate, Hardware, Plan, make_plan
from negamax.planner.topology import Topology, fit, gpu_reserve, topologies
from negamax.quantization import online
from tests import quantization_descriptions as described
from tests.layouts import full

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS.parent / "parallelism.md").read_text(encoding="utf-8")
LOG = (RESULTS.parent / "log" / "2026-11-28-h200-fp8.md").read_text(encoding="utf-8")
M2, M3 = bundled_spec("minimax-m2"), bundled_spec("minimax-m3-mxfp8")
SPECS = {
    "m2": M2,
    "m2 in int4": replace(M2, quantization=online.spec("int4")),
    "m3": replace(M3, vision=None),
    # Few rank counts divide this expert width, and fewer divide the number of experts.
    "odd": replace(M2, expert_width=1400, num_experts=6, experts_per_token=2, num_layers=5),
}
LOADS = (Workload(1), Workload(100))


def planned(spec: ModelSpec, gpus: int, *, gpu: str = "H200", **options: Any) -> Plan:
    nodes, gib, model = options.pop("nodes", 1), options.pop("gib", None), find_gpu(gpu)
    model = model if gib is None else replace(model, memory=int(gib * GIB))
    return make_plan(spec, Hardware(model, gpus, nodes), LOADS, **options)


# each spec with whole and with sharded index keys
WEIGHTS = [(ModelWeights(spec), ModelWeights(spec.shard_index())) for spec in SPECS.values()]


def bytes_on_rank(spec: ModelSpec, layout: ParallelLayout, *, is_sharded: bool = False) -> int:
    """Count bytes like `weight_bytes`, but list the weights of each spec only once."""
    plain, sharded = next(pair for pair in WEIGHTS if pair[0].spec is spec)
    held = (sharded if is_sharded else plain).on_rank(dtype="bfloat16", layout=layout)
    return round(sum(num_bytes for _, _, num_bytes in held))


def counted(
    spec: ModelSpec, layout: ParallelLayout, budget: int, *, kv_dtype: str,
    shards_index: bool = False, longest: int | None = None,
) -> tuple[int, int, int]:  # fmt: skip
    """Return tokens, weight bytes and cache bytes per token of the stage with the fewest tokens.

    257 request slots share the memory. A slot holds the tokens of the `longest` request, or fewer
    if such a request does not fit.
    """
    found = []
    longest = longest or spec.max_position_embeddings
    is_sharded = shards_index or layout.dcp > 1
    kept = spec.shard_index() if is_sharded else spec
    for stage in map(layout.replace_rank, range(0, layout.world_size, layout.stage_size)):
        weights = bytes_on_rank(spec, stage, is_sharded=is_sharded)
        layers = stage.layers(spec.num_layers)
        caches = set_index_dtype(kept.kv_caches(), "bfloat16")[layers.start : layers.stop]
        caches = split_over_holders(caches, layout.dcp)
        token = block_bytes(caches, 1, dtype=kv_dtype, ranks=layout.tp)
        slots = 257 * 4 + 257 * 4 // 64 + 1
        room = budget - weights
        window = min(longest, room // (token + slots))
        found.append(((room - slots * window) // token, weights, token))
    return min(found)


@pytest.mark.parametrize("name", SPECS)
def test_counts_bytes_of_a_rank_as_the_loader_does(name: str) -> None:
    spec, layout = SPECS[name], ParallelLayout(tp=2)
    assert bytes_on_rank(spec, layout) == weight_bytes(spec, dtype="bfloat16", layout=layout)


def check_plan(
    spec: ModelSpec, gpus: int, *, gib: int, context_length: int | None, kv_dtype: str
) -> None:
    plan = planned(spec, gpus, gib=gib, max_model_len=context_length, kv_dtype=kv_dtype)
    budget = plan.hardware.budget - gpu_reserve(spec.hidden_size)
    for each in plan.candidates:
        layout = ParallelLayout.of(each.topology.options)
        check_split(layout, spec, gpus=each.topology.ranks)
        assert each.topology.gpus <= gpus
        tokens, *bytes_each = counted(
            spec, layout, budget, kv_dtype=kv_dtype, shards_index=each.shards_index,
            longest=context_length,
        )  # fmt: skip
        assert [each.memory.weights, each.memory.token] == bytes_each
        assert each.context_length <= tokens == each.memory.tokens
        assert context_length in (None, each.context_length)
    for refused in plan.refused:
        topology = refused.topology
        try:
            layout = ParallelLayout.of(topology.options)
            check_split(layout, spec, gpus=topology.ranks)
        except ConfigError:
            continue
        tokens = counted(spec, layout, budget, kv_dtype=kv_dtype, longest=context_length)[0]
        assert tokens < (context_length or 8192), refused
    found = {each.topology for each in (*plan.candidates, *plan.refused)}
    for splits in possible_splits(spec, most=gpus):
        ranks = splits.tensor_parallel_size
        assert Topology(ranks, splits.num_expert_ranks, replicas=gpus // ranks) in found


def test_offered_plans_are_accepted_and_refused_ones_are_not() -> None:
    for name, gpus, gib, context_length, kv_dtype in (
        ("m2", 3, 96, None, "bfloat16"),
        ("m2 in int4", 2, 80, 150_000, "fp8"),
        ("m3", 2, 141, 4096, "fp8"),
        ("odd", 4, 24, None, "bfloat16"),
    ):
        check_plan(SPECS[name], gpus, gib=gib, context_length=context_length, kv_dtype=kv_dtype)


@pytest.mark.full
@given(
    name=st.sampled_from(sorted(SPECS)),
    gpus=st.integers(1, 12),
    gib=st.sampled_from([24, 48, 80, 96, 141, 288]),
    context_length=st.sampled_from([None, 4096, 150_000]),
    kv_dtype=st.sampled_from(["bfloat16", "fp8"]),
)
@settings(max_examples=12, deadline=None)
def test_plans_of_random_hardware_are_accepted(name: str, gpus: int, **given: Any) -> None:
    check_plan(SPECS[name], gpus, **given)


def test_plans_name_options_and_missing_memory() -> None:
    plan = planned(M2, 4)
    reasons = {each.topology: each.reason for each in plan.refused}
    offered = {each.topology: each.topology.flags for each in plan.candidates}
    both = ["--data-parallel-size", "2", "--prefill-context-parallel-size", "2"]
    assert offered[Topology(dp=2, cp=2, ep=4)] == [*both, "--enable-expert-parallel"]
    assert "8 KV heads" in reasons[Topology(3)]
    across = planned(M2, 8, nodes=2)
    assert "2 x TP4" in [each.topology.label for each in across.candidates]
    (reason,) = {each.reason for each in across.refused if each.topology == Topology(8)}
    assert reason.startswith("a machine has 4 of these GPUs, and networks are too slow for the ")
    assert "PP2 TP4" in [each.topology.label for each in across.candidates]
    plan = make_plan(M2, Hardware(MEASURED, 4), [Workload(400, 20_000, 1000)])
    for each in plan.candidates:
        assert each.predictions[0].concurrency <= each.cache_tokens // 21_000 < 400
    found = list(topologies(16, per_node=8, kv_heads=4))
    assert {each.dcp for each in found if each.tp == 16} == {1, 2, 4}
    assert len(found) == len(set(found)) == len({each.label for each in found})
    assert all(each.gpus <= 16 for each in found)
    plan = planned(M2, 4, gpu="H100")
    (two,) = {each.reason for each in plan.refused if each.topology == Topology(2, replicas=2)}
    missing = weight_bytes(M2, dtype="bfloat16", layout=ParallelLayout(tp=2)) + 8192 * 31 * 4096
    missing += 8192 * (257 * 4 + 257 * 4 // 64 + 1)
    missing -= int(81_559 * 2**20 * 0.92) - gpu_reserve(M2.hidden_size)
    assert f"need {missing / GIB:.1f} GiB more per GPU" in two
    fitting = float(two.partition("fits in ")[2].split()[0])
    larger = planned(M2, 4, gpu="H100", gib=fitting + 0.1)
    assert Topology(2, replicas=2) in [each.topology for each in larger.candidates]
    smaller = planned(M2, 4, gpu="H100", gib=fitting - 0.1)
    assert Topology(2, replicas=2) not in [each.topology for each in smaller.candidates]
    asked = planned(M2, 2, max_model_len=190_000)
    hint = next(each.reason for each in asked.refused if each.topology == Topology(2))
    assert 110_000 < int(hint.rpartition(" ")[2]) < 130_000


def test_cache_size_matches_the_measurement_on_two_gpus() -> None:
    info = recorded("h200_tp2")["info"]
    (two,) = [each for each in planned(M2, 2).candidates if each.topology == Topology(2)]
    assert two.memory.tokens == pytest.approx(info["num_kv_blocks"] * info["block_size"], rel=0.01)


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"][0])


RUNS = {"tp1_16_layers": "1, 16 layers", "tp2": "2", "tp4": "4", "tp4_fp8_kv": "4, FP8 cache"}


def predicted(found: dict[str, Any], run: dict[str, Any]) -> tuple[Candidate, float]:
    ranks, dtype = found["tensor_parallel_size"], found["options"]["kv_cache_dtype"]
    load = Workload(run["concurrency"], found["input_len"], found["output_len"])
    spec = M2.first_layers(found["num_layers"])
    plan = make_plan(spec, Hardware(MEASURED, ranks), [load], kv_dtype=dtype)
    (each,) = [each for each in plan.candidates if each.topology == Topology(ranks)]
    alone = load.concurrency == 1
    return each, load.input_len / each.prompt_seconds if alone else each.prefill_rate


def test_page_compares_predictions_with_measurements() -> None:
    """Compare with the log page: time per token within 5 %, prompts within 15 %."""
    expected = []
    for name, label in RUNS.items():
        found = recorded(f"h200_{name}")
        for run in found["runs"]:
            each, prompts = predicted(found, run)
            milliseconds, measured = 1e3 * each.predictions[0].token_seconds, run["tpot_ms"]
            rate = run["prefill_tokens_per_second"]
            assert milliseconds == pytest.approx(measured, rel=0.05)
            assert prompts == pytest.approx(rate, rel=0.15)
            times = f"{measured:.2f} | {milliseconds:.2f} | {rate:,.0f} | {prompts:,.0f}"
            expected.append(f"| {label} | {run['concurrency']} | {times} |")
    text = LOG.partition("## Predictions of `negamax plan`")[2]
    rows = [line for line in text.splitlines() if re.match(r"\| \d[^|]*\| \d+ \| \d", line)]
    assert rows == expected


# ms per token by number of requests, with prompts of 1,000 tokens and 129 output tokens on H200
MEASURED_MS = {
    "minimax-m2": [
        (Topology(4), {1: 2.54, 4: 4.11, 16: 8.87, 64: 16.96, 100: 18.82, 256: 24.31}),
        (Topology(2), {1: 3.24, 4: 6.24, 16: 14.53, 32: 21.54, 64: 28.91, 100: 32.83}),
        (Topology(dp=4, ep=4), {1: 8.08, 16: 12.14, 64: 19.21, 100: 21.05, 512: 33.05}),
        (Topology(2, pp=2), {1: 3.22, 16: 9.67, 64: 21.53, 100: 26.65, 256: 34.81}),
        (Topology(dp=2, ep=2), {1: 6.30, 16: 17.16, 64: 31.46}),
        (Topology(pp=2), {1: 4.41, 16: 16.04, 64: 39.89, 100: 49.54}),
    ],
    "minimax-m3-mxfp8": [(Topology(4), {1: 4.12, 4: 7.57, 16: 16.34, 64: 32.92, 100: 37.34})],
}


def error_of(model: Model, topology: Topology, count: int, ms: float, drafts: Any = None) -> float:
    costs = Costs(model, MEASURED, topology.layout, per_node=8)
    return abs(1e3 * costs.token_seconds(count, context=1064, drafts=drafts)[0] / ms - 1)


def test_predictions_match_measurements_of_two_and_four_gpus() -> None:
    for name, rows in MEASURED_MS.items():
        model = Model.of(bundled_spec(name), MEASURED, kv_dtype="fp8" if "m3" in name else "auto")
        errors = [
            error_of(model, topology, count, measured)
            for topology, times in rows
            for count, measured in times.items()
        ]
        assert median(errors) < (0.03 if name == "minimax-m2" else 0.08) and max(errors) < 0.3


def test_predictions_with_drafts_match_measurements() -> None:
    errors, m3 = [], replace(bundled_spec("minimax-m3"), quantization=online.spec("int4"))
    for name, spec in (("h200_tp2_m3_drafts", m3), ("h200_tp2_drafts", M2)):
        model = Model.of(spec, MEASURED, kv_dtype="fp8")
        for found in json.loads((RESULTS / f"{name}.json").read_text())["results"]:
            given = found["options"]["speculative_config"]
            given |= {"adaptive": "always" not in found["note"]}
            draft: Any = find_bundled_draft(given["model"])
            drafts = Drafts(SpeculationConfig.read(given), draft.adapt_to(spec, None))
            errors += [
                error_of(model, Topology(2), run["concurrency"], run["tpot_ms"], drafts)
                for run in found["runs"]
                if run["tpot_ms"] and "no draft tokens" not in found["note"]
            ]
    assert len(errors) == 18 and median(errors) < 0.08 and max(errors) < 0.25
    # The cache of the last run has 16.38 GiB with 64,512 bytes per token.
    budget = int(0.95 * MEASURED.memory)
    two = fit(model, ParallelLayout(tp=2), budget=budget, longest=4096, drafts=drafts)
    assert two.token == 64_512 and two.tokens == pytest.approx(16.38 * GIB / 64_512, rel=0.06)


def test_best_candidates_are_best() -> None:
    plan = planned(M2, 8, gpu="H100")
    assert plan.fastest is not None and plan.busiest is not None
    most = max(each.predictions[-1].tokens_per_second for each in plan.candidates)
    assert plan.busiest.predictions[-1].tokens_per_second >= most / 1.05
    # The plan prefers TP8, since a split along one more axis is faster by less than the error.
    assert plan.fastest.topology == Topology(8) != plan.candidates[0].topology
    assert plan.busiest.topology.ep > 1  # Expert shards need no padding with expert parallelism.
    # Two machines answer twice as much: each of two servers has half the load.
    found = []
    for count, label in ((1, "TP4"), (2, "2 x TP4")):
        plan = make_plan(M2, Hardware(MEASURED, 4 * count, count), [Workload(32 * count)])
        found += [each.predictions[0] for each in plan.candidates if each.topology.label == label]
    single, double = found
    assert double.token_seconds == single.token_seconds
    assert double.tokens_per_second == pytest.approx(2 * single.tokens_per_second)


def test_ranks_that_shard_a_cache_hold_most_tokens() -> None:
    hardware = Hardware(MEASURED, 8)
    plan = make_plan(M3, hardware, [Workload(1)], kv_dtype="fp8")
    found = {each.topology: each for each in plan.candidates}
    plain, sharded = found[Topology(8)], found[Topology(8, dcp=2)]
    assert (plain.memory.token, sharded.memory.token) == (29_952, 9_504)
    assert sharded.cache_tokens == max(each.cache_tokens for each in plan.candidates) > 7_200_000
    assert sharded.predictions[0].token_seconds > plain.predictions[0].token_seconds
    (line,) = commands(sharded, EngineOptions("minimax-m3-mxfp8"), M3, hardware)
    assert "--decode-context-parallel-size 2" in line and "--index-cache-sharding on" in line
    whole = make_plan(M3, hardware, [Workload(1)], kv_dtype="fp8", host_gib=300).candidates
    (eight,) = [each for each in whole if each.topology.tp == 8 and each.topology.ep == 1]  # no DCP
    assert eight.host_tokens == 300 * GIB // 8 // 29_952


@pytest.mark.parametrize("sizes", [{"tp": 4}, {"dp": 2}, {"cp": 2, "tp": 4, "nodes": 2}])
def test_memory_includes_images(sizes: Any) -> None:
    model, layout = Model.of(M3, MEASURED), ParallelLayout(**sizes)
    own = partial(fit, model, layout, budget=0, longest=9)
    text, seeing, tower = own(encoder_tokens=0), own(), 2 * 865_567_232
    assert seeing.weights - text.weights == tower
    assert text.room - seeing.room == tower + 2 * 32_768 * 6144


def test_index_keys_are_sharded_if_a_request_needs_it() -> None:
    hardware, line = Hardware(MEASURED, 4, utilization=0.95), ""
    for window, is_sharded in ((512_000, False), (1_048_576, True)):
        plan = make_plan(M3, hardware, [Workload(1)], kv_dtype="fp8", index_dtype="fp8",
                         max_model_len=window)  # fmt: skip
        (four,) = (each for each in plan.candidates if each.topology == Topology(4))
        assert four.shards_index == is_sharded
        assert four.memory.token == (17_184 if is_sharded else 22_656)
        engine = EngineOptions("minimax-m3-mxfp8", max_model_len=window)
        (line,) = commands(four, engine, M3, hardware)
        assert ("--index-cache-sharding on" in line) == is_sharded
    assert four.cache_tokens > 1_048_576 and f"--max-model-len {window}" in line


@pytest.mark.full
def test_sharding_the_cache_is_best_for_the_longest_requests() -> None:
    """Check DCP 2: fastest in MXFP8, and in bfloat16 the only split that holds such a request."""
    hardware, long = Hardware(MEASURED, 8), Workload(1, 900_000, 8000)
    plain = bundled_spec("minimax-m3")
    cases = ((M3, long, None), (plain, Workload(1), 1_000_000), (plain, long, None))
    for spec, load, asked in cases:
        plan = make_plan(spec, hardware, [load], max_model_len=asked, encoder_tokens=0)
        assert plan.fastest is plan.busiest is not None
        assert plan.fastest.topology == Topology(8, dcp=2)
        assert plan.fastest.context_length == (asked or spec.max_position_embeddings)
    reasons = {each.topology: each.reason for each in plan.refused}
    words = "of cache for 908000 tokens and 0.9 GiB of request slots need 19.6 GiB more per GPU"
    assert words in reasons[Topology(8)]


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("rtx-pro-6000", "RTX-PRO-6000"),
        *((gpu.name, gpu.name) for gpu in GPUS.values()),
    ],
)
def test_gpus_are_found_by_the_name_that_their_driver_gives(driver: str, name: str) -> None:
    assert find_gpu(driver).name == name


SHORT = "--gpus 2 --max-model-len 1k --input-len 900"


def plan_json(line: str, capsys: pytest.CaptureFixture[str]) -> Any:
    main(["plan", *line.split(), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    [
        "minimax-m2 --gpus 4 --gpu H100 --kv-cache-dtype fp8",
        full("minimax-m3-mxfp8 --gpus 16 --nodes 2 --index-cache-dtype fp8"),
        "minimax-m2 --gpus 2 --quantization int4 --input-len 10 --output-len 100 "
        "--concurrency 1,512,700",
        "nano --gpus 2 --nodes 2 --max-model-len 2K --encoder-cache-tokens 0",
        'nano --gpus 2 --speculative-config {"model":"nano-draft"} --kv-offloading-size 2',
    ],
)
def test_commands_are_what_serve_understands(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    root: Any = typer.main.get_command(app)
    document = plan_json(line, capsys)
    assert document["topologies"][0]["topology"] == document["best"]["latency"]
    for each in document["topologies"]:
        typed = shlex.split(each["command"])
        resolved = resolve(root, typed[1:])
        given = {name: choice.words[-1] for name, choice in resolved.choices.items()}
        assert typed[:2] == ["negamax", "serve"] and not resolved.notes
        assert ("encoder_cache_tokens" in given) == ("--encoder" in line)
        for name, size in each["options"].items():
            flag = f"--{name.replace('_', '-')}"
            assert given[name] == (flag if size is True else f"{flag}={size}")
            assert hasattr(EngineOptions("x"), name)
        nodes = len(each["commands"])
        replicas = each["replicas"] // document["nodes"] or 1 if nodes == 1 else 1
        assert given.get("num_replicas", "--num-replicas=1") == f"--num-replicas={replicas}"
        for node, command in enumerate(each["commands"] if nodes > 1 else ()):
            chosen = resolve(root, shlex.split(command)[1:]).choices
            words = [chosen[name].words[0] for name in ("nnodes", "node_rank", "master_addr")]
            assert words == [f"--nnodes={nodes}", f"--node-rank={node}", "--master-addr=node0"]
            EngineOptions("x", **each["options"], nnodes=nodes, master_addr="a")
        assert int(given.get("max_model_len", "=4096").partition("=")[2]) <= each["max_model_len"]


def test_table_names_the_two_best_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "minimax-m2", "--gpus", "4", "--gpu", "B200"]) == 0
    said = capsys.readouterr().out
    assert "Best for latency: " in said and "Best for throughput: " in said
    assert "negamax serve MiniMaxAI/MiniMax-M2 --tensor-parallel-size" in said
    assert "B200 were never measured" in said and "8 KV heads cannot be split" in said
    assert max(map(len, said.partition("topology")[2].splitlines()[:8])) <= 80
    assert said.index("Best for latency") < said.index("topology") and said.count("\n") < 40
    assert main(["plan", "minimax-m2", "--gpus", "2", "--gpu", "MI325X"]) == 0
    assert "Times on MI325X were never measured" in capsys.readouterr().out
    # The plan of a hub id does not contact the hub. The refusal names formats that fit.
    for line, words in (
        ("minimax-m3 --gpus 4 --gpu H200", "formats: minimax-m3-mxfp8, fp8 (TP4), int8 (TP4)"),
        ("MiniMaxAI/MiniMax-M2 --gpus 1 --gpu H200", "formats: int4 (TP1), mxfp4 (TP1)."),
        ("minimax-m2 --gpus 1 --gpu A100-40GB", "The model fits in no other format either"),
    ):
        assert main(["plan", *line.split()]) == 1
        assert words in capsys.readouterr().out
    assert main(["plan", "minimax-m22", "--gpus", "1"]) == 2
    assert "did you mean minimax-m2?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus 0", "--gpus is 0; allowed: 1 to 64"),
        ("--gpus 4 --nodes 3", "--nodes is 3; allowed: a number that divides 4"),
        ("--gpus 4 --gpu abacus", "--gpu is 'abacus'; known: A100-40GB, "),
        ("--gpus 4 --gpu-memory 0", "--gpu-memory is 0; allowed: 1 to 4096"),
        ("--gpus 4 --max-model-len 1M", "is 1048576; the model's context length is 196608"),
        ("--gpus 4 --input-len 200000", "200001 tokens; the model's context length is 196608"),
        (f"{SHORT} --output-len 101", "1001 tokens; --max-model-len is 1000 (lower"),
        ("--gpus 4 --concurrency 0", "--concurrency is '0'; allowed: numbers from 1"),
        ('--gpus 4 --speculative-config {"method":"x"}', "method is 'x'; allowed: eagle3, "),
        ("--gpus 4 --quantization vtq", "--quantization is 'vtq'; allowed: "),
    ],
)
def test_refuses_bad_input(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "minimax-m2", *line.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "lengths"),
    [
        ("", (1000, 1000)),
        ("--max-model-len 1k", (500, 500)),
        (SHORT, (900, 100)),
        ("--max-model-len 1k --output-len 10", (990, 10)),
        ("--output-len 10", (1000, 10)),
    ],
)
def test_default_lengths_fit(
    line: str, lengths: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan_json(f"minimax-m2 --gpus 2 {line}", capsys)
    assert (document["input_len"], document["output_len"]) == lengths


def test_planner_needs_no_torch() -> None:
    code = (
        'import sys; sys.modules["torch"] = None; from negamax.cli.main import main; '
        'sys.exit(main("plan minimax-m3 --gpus 1 --gpu-memory 2000 --json".split()))'
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


MACHINES = re.findall(
    r"^\| (\d+) x (\S+)[^|]*\| `negamax serve (\S+) (.+?)` \| about ([\d,]+) tokens",
    "".join((RESULTS.parent / page).read_text() for page in ("recipes.md", "models/minimax-m3.md")),
    re.M,
)
CACHES = ("kv", "index")
# 4-bit checkpoints that others have published
PACKED = {
    "Intel/MiniMax-M2.5-int4-AutoRound": described.auto_round(),
    "QuantTrio/MiniMax-M2.5-AWQ": described.awq(
        ["self_attn", "gate", "model.layers.0.", "lm_head"]
    ),
}


@pytest.mark.parametrize(("count", "gpu", "model", "line", "said"), MACHINES)
def test_cache_sizes_are_planned(count: str, gpu: str, model: str, line: str, said: str) -> None:
    root = typer.main.get_command(app)
    words = ["serve", model, *shlex.split(line)]
    chosen = resolve(root, words).choices  # type: ignore[arg-type]
    given = {name: choice.words[0].partition("=")[2] for name, choice in chosen.items()}
    sizes = {name: int(size) for name, size in given.items() if name.endswith("parallel_size")}
    spec = M2 if model in PACKED else bundled_spec(model.rpartition("/")[2])
    if fields := PACKED.get(model):
        spec = replace(spec, quantization=QuantizationSpec(fields["quant_method"], fields))
    elif "quantization" in given:
        spec = replace(spec, quantization=online.spec(given["quantization"]))
    spec = spec.shard_index() if given.get("index_cache_sharding") == "on" else spec
    dtypes = {f"{cache}_dtype": given.get(f"{cache}_cache_dtype", "auto") for cache in CACHES}
    parts = Model.of(spec, find_gpu(gpu), **dtypes)
    utilization = float(given.get("gpu_memory_utilization", Hardware.utilization))
    hardware = Hardware(find_gpu(gpu), int(count), utilization=utilization)
    longest = int(given.get("max_model_len", spec.max_position_embeddings))
    layout = ParallelLayout.of(ParallelOptions(**sizes))  # type: ignore[arg-type]
    images = int(given.get("encoder_cache_tokens", 32_768))
    found = fit(parts, layout, budget=hardware.budget, longest=longest, encoder_tokens=images)
    assert found.context_length == longest and len(MACHINES) > 12
    tokens = found.tokens * int(given.get("num_replicas", 1))
    assert said == f"{round(tokens, -3):,}"


ROWS = re.findall(r"^\| [^|]+ \| `(M[23]\S* --.+?)` \| (.+) \|$", PAGE, re.M)


@pytest.mark.parametrize(("line", "said"), ROWS)
def test_recipes_of_the_page(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = re.fullmatch(r"refused: (.+)", said)
    model, *options = shlex.split(line)
    code = main(["serve", f"MiniMaxAI/MiniMax-{model}", *options, "--explain"])
    assert code == (2 if refusal else 0) and len(ROWS) > 8
    found = capsys.readouterr()
    if refusal:
        assert refusal[1] in found.err
    else:
        assert not found.err
        sizes = dict(re.findall(r"^(\S+-parallel-size|num-replicas) +(\d+) ", found.out, re.M))
        for name, size in re.findall(r"`(\S+-parallel-size|num-replicas) (\d+)`", said):
            assert sizes[name] == size


@pytest.mark.full
def test_page_predicts_context_parallel_prompts() -> None:
    (table,) = re.findall(r"a prompt of\s128,000 .+?\n\n(.+?)\n\n", PAGE, re.S)
    said = set(re.findall(r"\d+\.\d+", table))
    for spec, gpus, labels in ((M2, 4, ("TP4", "PCP2 TP2")), (M3, 8, ("TP8", "PCP2 TP4"))):
        load = Workload(1, 128_000, 1000)
        plan = make_plan(spec, Hardware(MEASURED, gpus), [load], kv_dtype="fp8")
        for label in labels:
            each = next(one for one in plan.candidates if one.topology.label == label)
            assert label in table and f"{each.prompt_seconds:.2f}" in said
            assert f"{1e3 * each.predictions[0].token_seconds:.1f}" in said
        # Only these of the hundreds of splits over 16 GPUs are computed.
        axes = {"2 x TP8": {}, "PCP2 TP8": {"cp": 2}, "PP2 TP8": {"pp": 2}}
        named = {label: ParallelLayout(tp=8, **sizes) for label, sizes in axes.items()}
        machines = Hardware(MEASURED, 16, nodes=2)
        plan = make_plan(spec, machines, [load], kv_dtype="fp8", split_for=[*named.values()])
        for label in named:
            each = next(one for one in plan.candidates if one.topology.label == label)
            assert f"{each.prompt_seconds:.2f}" in said


def test_page_predicts_unmeasured_splits() -> None:
    loads = [Workload(count) for count in (1, 16, 64, 100, 256, 512)]
    plan = make_plan(M2, Hardware(MEASURED, 4), loads)
    rows = re.findall(r"^\| ([A-Z]+\d[A-Z0-9 ]*) \| ([\d,]+) \|(.+)\|$", LOG, re.M)
    names = ["TP4", "TP4 EP4", "DP2 TP2 EP4", "DP4 EP4", "PP2 TP2", "PP4"]
    assert [name for name, *_ in rows] == names
    for name, prompts, cells in rows:
        (each,) = [one for one in plan.candidates if one.topology.label == name]
        assert prompts == f"{each.prefill_rate:,.0f}"
        for one, cell in zip(each.predictions, cells.split("|"), strict=True):
            assert cell.strip() == f"{1e3 * one.token_seconds:.1f}, {one.tokens_per_second:,.0f}"
