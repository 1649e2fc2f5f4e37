"""Preemption by recompute, with blocks of 4 tokens."""

import pytest

from negamax.scheduler.step import SequenceUpdate, StepPlan
from tests.unit.plan_support import RankScheduler, list_admitted, make_scheduler


def make_tight(num_blocks: int, *, prefix_cache: bool = False) -> RankScheduler:
    """A pool of few blocks, and requests "a" and "b" of two blocks each that soon need more."""
    scheduler = make_scheduler(
        max_model_len=64, num_blocks=num_blocks, enable_prefix_caching=prefix_cache
    )
    scheduler.add_all(a=8, b=8)
    return scheduler


def run_until_preemption(scheduler: RankScheduler) -> StepPlan:
    while True:
        plan = scheduler.next_plan()
        if scheduler.preemption_count:
            return plan
        scheduler.commit(plan)


@pytest.mark.parametrize(
    ("priorities", "left"),
    [((0, 0, 0), "ab"), ((0, 1, 0), "ac"), ((2, 1, 1), "bc"), ((0, 2, 1), "ac")],
)
def test_preempts_by_priority_then_arrival(priorities: tuple[int, ...], left: str) -> None:
    scheduler = make_scheduler(max_model_len=64, num_blocks=9, enable_prefix_caching=False)
    for name, priority in zip("abc", priorities, strict=True):
        # 2 blocks, the third in step 2, the fourth in step 6
        scheduler.add(name, 8, priority=priority)
    plan = scheduler.next_plan()
    slots = dict(zip(list_admitted(plan), (row.slot for row in plan.new_rows), strict=True))
    scheduler.commit(plan)
    assert sorted(run_until_preemption(scheduler).slots) == sorted(slots[name] for name in left)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_better_priority_that_was_admitted_later_is_not_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    scheduler.add("a", 8, priority=1)
    scheduler.step()
    scheduler.add("b", 8)
    assert run_until_preemption(scheduler).slots == [1]


def test_last_running_request_skips_a_step_instead_of_preempting_better_ones() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    scheduler.add("a", 4, max_tokens=5)  # takes the last block in step 2
    scheduler.add("b", 5, max_tokens=8)  # needs one in step 5
    plans = []
    for _ in range(6):
        plans.append(scheduler.next_plan())
        scheduler.commit(plans[-1])
    assert [plan.slots for plan in plans] == [[0, 1]] * 4 + [[0], [1]]
    assert scheduler.starts[plans[5].step_id] == [8] and scheduler.preemption_count == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_request_waits_for_its_tokens_in_flight(prefix_cache: bool) -> None:
    scheduler = make_tight(6, prefix_cache=prefix_cache)
    plans = scheduler.next_plans(6)
    scheduler.end("a", "abort")  # enough room
    assert scheduler.plan() is None
    for plan in plans[:4]:
        scheduler.commit(plan)
    assert scheduler.plan() is None
    scheduler.commit(plans[4])  # its last step
    (row,) = scheduler.next_plan().new_rows
    assert len(row.token_ids) == 13


def test_preempted_request_precedes_later_ones() -> None:
    scheduler = make_tight(6)
    scheduler.add("c", 8)  # too small from the start
    scheduler.commit(run_until_preemption(scheduler))
    order = ""
    while scheduler.has_unfinished:
        plan = scheduler.next_plan()
        order += list_admitted(plan)
        scheduler.commit(plan)
    assert order == "bc"


def test_resumed_request_uses_its_blocks_in_the_cache() -> None:
    scheduler = make_tight(6, prefix_cache=True)
    scheduler.commit(run_until_preemption(scheduler))
    starts: list[int] = []
    updates: list[SequenceUpdate] = []
    while scheduler.has_unfinished:
        plan = scheduler.next_plan()
        starts += scheduler.starts[plan.step_id] if plan.new_rows else []
        updates += scheduler.commit(plan)
    assert starts == [8]
    # as at its first admission
    assert updates[-1].request_id == "b" and updates[-1].num_cached_tokens == 0
    assert (scheduler.prompt_tokens, scheduler.cached_prompt_tokens) == (16, 0)
