import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.base.errors import InvalidRequestError
from negamax.scheduler.draft_length import AdaptiveDraftLength
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import StepPlan, StepResult, StepSize
from tests.unit.plan_support import make_limits, make_request, make_result
from tests.unit.test_scheduler_traces import EOS_IDS, Trace


def test_ranks_verify_one_number_of_drafts() -> None:
    limits = make_limits(
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=400,
        eos_token_ids=EOS_IDS, num_draft_tokens=3,
    )  # fmt: skip
    joint = AdaptiveDraftLength((1, 2, 3))
    trace = Trace(limits, 3, seed=1, depth=1, trouble=True, joint=joint).run(120)
    trace.check_outputs()
    chosen = [{plan.num_proposed for plan in plans if plan.slots} for plans in trace.steps]
    assert all(len(numbers) == 1 for numbers in chosen) and len(set.union(*chosen)) > 1
    verified = sum(place.trials for place in joint._places)
    assert verified > 50 and joint._num_steps == len(trace.steps) - trace.lost


def group(num_ranks: int = 2, **sizes: Any) -> GroupScheduler:
    limits = make_limits(**{"max_model_len": 256, "eos_token_ids": EOS_IDS, **sizes})
    return GroupScheduler(limits, [None] * num_ranks)


def request(name: str, prompt: list[int], **fields: Any) -> GenerateRequest:
    return make_request(name, prompt, ignore_eos=True, **fields)


def step(scheduler: GroupScheduler) -> list[StepPlan]:
    plans = scheduler.plan()
    assert plans is not None
    scheduler.commit(plans, [make_result(plan) for plan in plans])
    return plans


def test_prompts_of_one_step_are_spread_over_the_ranks() -> None:
    scheduler = group(4)
    for number in range(8):
        scheduler.add(request(f"{number}", [10 + number] * 20))
    assert [plan.num_scheduled for plan in step(scheduler)] == [[20, 20]] * 4
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2; allowed: 0 to 1"):
        group(2).add(request("a", [3], data_parallel_rank=2))
    scheduler = group(2, max_num_batched_tokens=32)
    scheduler.add(request("long", [3] * 200))
    for number in range(3):
        scheduler.add(request(f"{number}", [10 + number] * 4))
    long, short = step(scheduler)
    assert (long.num_scheduled, short.num_scheduled) == ([32], [4, 4, 4])
    long, short = step(scheduler)
    assert (long.num_scheduled, short.num_scheduled) == ([32], [1, 1, 1])
    assert long.of_all == StepSize(32, 3, 0, False)


def test_a_request_goes_where_its_prefix_or_a_row_is() -> None:
    scheduler = group(2, num_blocks=512, max_num_seqs=16)
    common = [5] * 200
    scheduler.add(request("other", [4] * 4))
    scheduler.add(request("first", [*common, 1]))
    for _ in range(5):
        at = [len(plan.slots) for plan in step(scheduler)]
    assert at == [1, 1]
    found = []
    for number in range(8):
        scheduler.add(request(f"{number}", [*common, 10 + number]))
        found.append([len(plan.new_rows) for plan in step(scheduler)])
    assert found[0] == [0, 1]  # 200 cached tokens outweigh one more row.
    assert [1, 0] in found  # Many more rows outweigh the cached tokens.
    scheduler = group(2, max_num_seqs=1)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, [3] * 8))
    assert [len(plan.slots) for plan in step(scheduler)] == [1, 1]
    assert scheduler.num_waiting == 1 and "c" in scheduler
    scheduler.end("b", "abort")
    plans = step(scheduler)
    assert [len(plan.new_rows) for plan in plans] in ([0, 1], [1, 0])
    assert scheduler.num_waiting == 0


@pytest.mark.parametrize("size", [1, 4])
def test_tenants_share_the_rows_of_all_ranks(size: int) -> None:
    scheduler = group(2, max_num_seqs=size)
    for tenant in ("many", "few"):
        for number in range(12):
            scheduler.add(request(f"{tenant} {number}", [3] * 8, tenant=tenant, max_tokens=40))
        for _ in range(8):
            step(scheduler)
    assert scheduler._requests.num_rows == {"many": size, "few": size}


def test_all_data_parallel_ranks_shard_a_step_or_none_does() -> None:
    scheduler = group(3, max_num_batched_tokens=32, num_shards=4)
    scheduler.add(request("short", [3] * 7))  # One of 8 pieces would be empty.
    assert [plan.of_all.largest_shard for plan in step(scheduler) if plan.of_all] == [0] * 3
    scheduler.add(request("long", [4] * 48))
    plans = step(scheduler)
    assert sorted(plan.num_tokens for plan in plans) == [0, 1, 32]
    # Each rank runs two pieces, and the limit adds the tokens by which a piece may be longer.
    assert [plan.of_all.largest_shard for plan in plans if plan.of_all] == [8 + 2] * 3
    assert [plan.of_all.largest_shard for plan in step(scheduler) if plan.of_all] == [4 + 2] * 3
    plans = step(scheduler)
    assert sorted(plan.num_tokens for plan in plans) == [0, 1, 1]
    assert [plan.of_all.largest_shard for plan in plans if plan.of_all] == [0] * 3


class Pipeline:
    """Run the engine's loop over stages that execute a plan of each rank in turn."""

    def __init__(
        self, stages: int, *, ranks: int = 1, budget: int = 64, blocks: int = 200, drafts: int = 0
    ) -> None:
        """Rows verify up to `drafts` draft tokens, of which a random number is accepted."""
        self.stages = stages
        self.rng = random.Random(0)
        self.num_accepted = 0
        limits = make_limits(
            max_num_seqs=32, max_num_batched_tokens=budget, max_model_len=64, num_blocks=blocks,
            num_draft_tokens=drafts, num_stages=stages,
        )  # fmt: skip
        self.scheduler = GroupScheduler(limits, [None] * ranks)
        self.in_flight: deque[list[StepPlan] | None] = deque()
        self.texts: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add(make_request(name, prompt, max_tokens=max_tokens))
        self.texts[name] = []

    def turn(self) -> list[StepPlan] | None:
        plans = self.scheduler.plan()
        after_oldest = list(self.in_flight)[len(self.in_flight) == self.stages :]
        for rank, plan in enumerate(plans or []):
            in_flight: set[int] = set()
            for others in filter(None, after_oldest):
                samples = zip(others[rank].slots, others[rank].needs_sampling, strict=True)
                in_flight |= {slot for slot, is_sampled in samples if is_sampled}
            assert in_flight.isdisjoint(set(plan.slots) - {row.slot for row in plan.new_rows})
        if len(self.in_flight) == self.stages:
            oldest = self.in_flight.popleft()
            if oldest is not None:
                for update in self.scheduler.commit(oldest, [self.run(plan) for plan in oldest]):
                    self.texts[update.request_id] += update.token_ids
        self.in_flight.append(plans)
        return plans

    def run(self, plan: StepPlan) -> StepResult:
        drafts = [(row, count) for row, count in enumerate(plan.num_draft_tokens) if count]
        accepted = {row: self.rng.randint(0, count) for row, count in drafts}
        num_tokens = sum(plan.needs_sampling) + sum(accepted.values())
        self.num_accepted += sum(accepted.values())
        return StepResult(plan.step_id, [7] * num_tokens, {}, {}, {}, accepted)


@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 3)])
def test_every_stage_gets_an_equal_share_of_the_rows(stages: int, ranks: int) -> None:
    pipeline = Pipeline(stages, ranks=ranks)
    for number in range(23):
        pipeline.add(f"r{number}", [number, 1, 2], 40)
        if number in (0, 1, 7):
            pipeline.turn()
    plans = [pipeline.turn() for _ in range(10 * stages)][-2 * stages :]
    num_rows = 0
    for rank in range(ranks):
        rounds = [of_turn[rank].slots for of_turn in plans if of_turn is not None]
        assert len(rounds) == len(plans)
        assert max(map(len, rounds)) - min(map(len, rounds)) <= 1
        first, second = rounds[:stages], rounds[stages:]
        assert sorted(map(sorted, first)) == sorted(map(sorted, second))
        num_rows += len({slot for slots in first for slot in slots})
    assert num_rows == 23


def test_prompts_and_single_requests_fill_the_pipeline() -> None:
    pipeline = Pipeline(4, budget=8)
    pipeline.add("long", list(range(40)), 4)
    turns = [pipeline.turn() for _ in range(6)]
    assert [plans[0].num_tokens if plans else 0 for plans in turns] == [8] * 5 + [0]
    pipeline = Pipeline(2)
    pipeline.add("one", [3, 4], 30)
    assert [pipeline.turn() is not None for _ in range(8)] == [True, False] * 4


def test_rows_verify_drafts_from_their_second_turn_on() -> None:
    pipeline = Pipeline(3, drafts=2)
    for number in range(4):
        pipeline.add(f"r{number}", [number, 1], 30)
    turns = [plans[0] for plans in (pipeline.turn() for _ in range(9)) if plans]
    assert [turn.num_draft_tokens for turn in turns[:3]] == [[0] * 4, [2, 2], [2, 2]]
    for turn in turns[3:]:
        assert turn.num_draft_tokens == [2] * len(turn.slots)
    assert pipeline.num_accepted


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    stages=st.sampled_from((2, 3, 4)),
    ranks=st.sampled_from((1, 2, 3)),
    budget=st.sampled_from((1, 3, 16)),
    blocks=st.integers(12, 40),
    drafts=st.sampled_from((0, 3)),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12),
)
def test_all_requests_get_all_their_tokens(
    stages: int, ranks: int, budget: int, blocks: int, drafts: int, lengths: list[tuple[int, int]]
) -> None:
    pipeline = Pipeline(stages, ranks=ranks, budget=budget, blocks=blocks, drafts=drafts)
    for number, (prompt, output) in enumerate(lengths):
        pipeline.add(f"r{number}", list(range(prompt)), output)
    for _ in range(20_000):
        if not pipeline.scheduler.has_unfinished:
            break
        pipeline.turn()
    expected = {f"r{number}": [7] * output for number, (_, output) in enumerate(lengths)}
    assert pipeline.texts == expected
