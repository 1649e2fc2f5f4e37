from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax import LLM
from negamax.engine.core.source import locate
from negamax.options.engine import EngineOptions
from negamax.planner.chunks import LEAST_SHARE, chunks, plan_even_times
from negamax.planner.cost import Costs, Model, Workload
from negamax.planner.gpus import MEASURED
from negamax.planner.plan import Hardware, make_plan
from negamax.planner.topology import Topology
from negamax.scheduler.chunk_length import ChunkLength, EvenChunks, EvenTimes
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import StepPlan
from tests.unit.plan_support import RankScheduler, make_request

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


def test_plan_uses_the_engines_chunks() -> None:
    spec = locate(EngineOptions(model="minimax-m2", load_format="synthetic")).spec
    plan = make_plan(spec, Hardware(MEASURED, 4), [Workload(1, LONGEST, 1000)])
    seconds = {each.topology.label: each.prompt_seconds for each in plan.candidates}
    assert seconds["PP4"] < costs("minimax-m2", pp=4).prefill_seconds(LONGEST, chunk=STEP) / 1.2
    alone = costs("minimax-m2", tp=4)
    assert seconds["TP4"] == pytest.approx(alone.prefill_seconds(LONGEST, chunk=STEP))


def test_stages_run_chunks_side_by_side() -> None:
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


def limits(length: ChunkLength) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024, block_size=8, num_blocks=200,
        enable_prefix_caching=True, max_queued_requests=100, eos_token_ids=frozenset({0}),
        chunk_length=length,
    )  # fmt: skip


def request(name: str, prompt: list[int]) -> GenerateRequest:
    return make_request(name, prompt, ignore_eos=True)


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


def test_short_prompts_are_planned_unchanged() -> None:
    plans = []
    for length in (EvenChunks(), DOUBLING):
        scheduler = RankScheduler(limits(length))
        for number, size in enumerate((30, 20, 14, 5, 64)):
            scheduler.group.add(request(f"r{number}", [number] * size))
        plans.append([step(scheduler) for _ in range(2)])
    assert plans[0] == plans[1]


def test_a_long_prompt_runs_in_shorter_and_shorter_chunks() -> None:
    """Check that every step takes as long as the first; other prompts use the rest of a step."""
    scheduler = RankScheduler(limits(DOUBLING))
    scheduler.group.add(request("long", [3] * 244))
    scheduler.group.add(request("short", [4] * 40))
    counts = [step(scheduler).num_scheduled for _ in range(6)]
    # After 64, 104, 136, 160 tokens, a token costs 1.5, 1.8, 2.1, 2.5 times the first.
    assert counts == [[64], [40, 4], [32, 4], [24, 8], [24, 3], [16, 13]]


def test_a_prefix_hit_begins_with_a_chunk_of_its_depth() -> None:
    scheduler = RankScheduler(limits(DOUBLING))
    scheduler.group.add(request("first", list(range(264))))
    while scheduler.has_unfinished:
        step(scheduler)
    scheduler.group.add(request("second", [*range(264), *range(300, 360)]))
    plan = step(scheduler)
    assert plan.new_rows[0].num_computed == 264
    assert plan.num_scheduled == [16]  # Each token costs four times as much as the first.
