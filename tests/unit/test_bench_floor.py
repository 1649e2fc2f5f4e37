import json
from dataclasses import replace
from pathlib import Path

import pytest

from negamax.base.errors import ConfigError
from negamax.bench.group import Group, label, sizes
from negamax.cli.bench_options import parse_counts
from negamax.models.memory import expected_distinct_experts
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.floor import step_bytes
from negamax.worker.config import DebugResult

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
