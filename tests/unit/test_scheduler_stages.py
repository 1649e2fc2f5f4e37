"""Check plans of a pipeline: several are in flight, each with some of the rows of every rank.

No plan needs a token that is sampled by a plan other than the oldest in flight.
"""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.step import StepPlan, StepResult
from tests.unit.plan_support import make_limits, make_request


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
