from negamax.bench.group import Group, label, sizes
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import DebugResult

# two stages of two data-parallel ranks of two ranks each: rank = stage * 4 + group * 2 + tp
LAYOUT = ParallelLayout(pp=2, dp=2, tp=2)


def test_experts_are_those_of_all_tokens_of_a_step() -> None:
    first = [[[1, 2], [3]], [[2, 5], [3, 4]]]  # of the two groups, in each of two layers
    second = [[[7, 8]], [[7, 9]]]  # in the third layer
    answers = [
        DebugResult(experts=of_group)
        for stage in (first, second)
        for of_group in stage
        for _ in range(2)
    ]
    assert Group(LAYOUT).distinct_experts(answers) == (3 + 2 + 3) / 3
    assert Group(LAYOUT).distinct_experts([*answers[:-1], DebugResult()]) is None
    for nothing in ([], [[], []]):  # a model without experts, a turn without a plan
        answer = DebugResult(experts=nothing)
        assert Group(ParallelLayout()).distinct_experts([answer]) is None


def test_a_step_takes_as_long_as_the_slowest_rank_of_each_stage() -> None:
    seconds = [0.001, 0.002, 0.0015, 0.001, 0.003, 0.001, 0.001, 0.001]
    answers = [DebugResult(number=each) for each in seconds]
    assert Group(LAYOUT).stage_milliseconds(answers) == [2.0, 3.0]
    assert Group(LAYOUT).stage_milliseconds([*answers[:-1], DebugResult()]) == []


def test_rows_take_turns_and_are_split() -> None:
    group = Group(LAYOUT)
    assert [group.step_rows(count) for count in (1, 2, 3, 100)] == [1, 1, 2, 50]
    assert [group.rank_rows(count) for count in (1, 3, 100, 102)] == [1, 1, 25, 26]


def test_results_say_how_the_model_was_split() -> None:
    """Results without stages and groups keep the format of older files."""
    options = EngineOptions("nano", tensor_parallel_size=2)
    assert sizes(options) == {"tensor_parallel_size": 2} and label(sizes(options)) == "TP2"
    options = EngineOptions("nano", pipeline_parallel_size=2, data_parallel_size=4)
    assert label(sizes(options)) == "PP2 DP4 TP1"
