"""Preemption by recompute, with blocks of 4 tokens."""

import pytest

from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import SequenceUpdate, StepPlan, StepResult
from tests.unit.plan_support import WatchedScheduler

TOKEN = 7


def make_scheduler(*, blocks: int, prefix_cache: bool = False) -> WatchedScheduler:
    return WatchedScheduler(
        SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=64,
            block_size=4,
            num_blocks=blocks,
            enable_prefix_caching=prefix_cache,
            max_queued_requests=16,
            eos_token_ids=frozenset({0}),
        )
    )


def add(
    scheduler: Scheduler, name: str, prompt_len: int, *, max_tokens: int = 8, priority: int = 0
) -> None:
    prompt = tuple(1000 * ord(name) + position for position in range(prompt_len))
    scheduler.add(
        GenerateRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
        )
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan) -> list[SequenceUpdate]:
    return scheduler.commit(
        plan, StepResult(plan.step_id, [TOKEN] * sum(plan.needs_sampling), {}, {}, {})
    )


def run_until_preemption(scheduler: Scheduler) -> StepPlan:
    while True:
        plan = planned(scheduler)
        if scheduler.preemption_count:
            return plan
        commit(scheduler, plan)


def test_first_to_go_is_the_lowest_priority_then_the_latest_arrival() -> None:
    for priorities, left in (
        ((0, 0, 0), "ab"),
        ((0, 1, 0), "ac"),
        ((2, 1, 1), "bc"),
        ((0, 2, 1), "ac"),
    ):
        scheduler = make_scheduler(blocks=9)
        for name, priority in zip("abc", priorities, strict=True):
            # 2 blocks, the third in step 2, the fourth in step 6
            add(scheduler, name, 8, priority=priority)
        plan = planned(scheduler)
        slots = {chr(row.token_ids[0] // 1000): row.slot for row in plan.new_rows}
        commit(scheduler, plan)
        assert sorted(run_until_preemption(scheduler).slots) == sorted(slots[name] for name in left)
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_better_priority_that_was_admitted_later_is_not_the_one_to_go() -> None:
    scheduler = make_scheduler(blocks=6)
    add(scheduler, "a", 8, priority=1)
    commit(scheduler, planned(scheduler))
    add(scheduler, "b", 8)
    assert run_until_preemption(scheduler).slots == [1]


def test_last_running_request_sits_out_instead_of_taking_from_better_ones() -> None:
    scheduler = make_scheduler(blocks=4)
    add(scheduler, "a", 4, max_tokens=5)  # takes the last block in step 2
    add(scheduler, "b", 5, max_tokens=8)  # needs one in step 5
    plans = []
    for _ in range(6):
        plans.append(planned(scheduler))
        commit(scheduler, plans[-1])
    assert [plan.slots for plan in plans] == [[0, 1]] * 4 + [[0], [1]]
    assert scheduler.starts[plans[5].step_id] == [8] and scheduler.preemption_count == 0


def test_tokens_in_flight_still_reach_a_preempted_request() -> None:
    scheduler = make_scheduler(blocks=6)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    plans = [planned(scheduler) for _ in range(6)]
    assert scheduler.preemption_count == 1 and plans[5].slots == [0]
    for plan in plans[:5]:
        assert [update.request_id for update in commit(scheduler, plan)] == ["a", "b"]
    assert [update.request_id for update in commit(scheduler, plans[5])] == ["a"]
    outputs = 5
    resumed: list[StepPlan] = []
    while scheduler.has_unfinished:
        plan = planned(scheduler)
        resumed += [plan] if plan.new_rows else []
        outputs += sum(update.request_id == "b" for update in commit(scheduler, plan))
    assert outputs == 8
    ((row,),) = (plan.new_rows for plan in resumed)
    assert (len(row.token_ids), row.prompt_len, row.token_ids[8:]) == (13, 8, [TOKEN] * 5)
    assert (scheduler.starts[resumed[0].step_id], resumed[0].num_scheduled) == ([0], [13])


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_request_waits_for_its_tokens_in_flight(prefix_cache: bool) -> None:
    scheduler = make_scheduler(blocks=6, prefix_cache=prefix_cache)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    plans = [planned(scheduler) for _ in range(6)]
    scheduler.end("a", "abort")  # enough room
    assert scheduler.plan() is None
    for plan in plans[:4]:
        commit(scheduler, plan)
    assert scheduler.plan() is None
    commit(scheduler, plans[4])  # its last step
    (row,) = planned(scheduler).new_rows
    assert len(row.token_ids) == 13


def test_preempted_request_can_end_while_it_waits() -> None:
    scheduler = make_scheduler(blocks=6)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8, max_tokens=5)
    plans = [planned(scheduler) for _ in range(6)]
    assert scheduler.num_waiting == 1
    updates = [
        update
        for plan in plans[:5]
        for update in commit(scheduler, plan)
        if update.request_id == "b"
    ]
    assert [update.finish_reason for update in updates] == [None] * 4 + ["length"]
    assert scheduler.num_waiting == 0 and scheduler.num_running == 1


def test_preempted_request_goes_before_those_that_came_later() -> None:
    scheduler = make_scheduler(blocks=6)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    add(scheduler, "c", 8)  # too small from the start
    commit(scheduler, run_until_preemption(scheduler))
    order: list[str] = []
    while scheduler.has_unfinished:
        plan = planned(scheduler)
        order += [chr(row.token_ids[0] // 1000) for row in plan.new_rows]
        commit(scheduler, plan)
    assert order == ["b", "c"]


def test_abort_of_a_preempted_request() -> None:
    scheduler = make_scheduler(blocks=6)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    plans = [planned(scheduler) for _ in range(6)]
    assert scheduler.end("b", "abort") is not None and scheduler.num_waiting == 0
    for plan in plans:
        assert [update.request_id for update in commit(scheduler, plan)] == ["a"]


def test_resumed_request_takes_what_is_left_of_it_in_the_cache() -> None:
    scheduler = make_scheduler(blocks=6, prefix_cache=True)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    commit(scheduler, run_until_preemption(scheduler))
    starts: list[int] = []
    updates: list[SequenceUpdate] = []
    while scheduler.has_unfinished:
        plan = planned(scheduler)
        if plan.new_rows:
            starts += scheduler.starts[plan.step_id]
        updates += commit(scheduler, plan)
    assert starts == [8]
    # as at its first admission
    assert updates[-1].request_id == "b" and updates[-1].num_cached_tokens == 0
    assert (scheduler.prompt_tokens, scheduler.cached_prompt_tokens) == (16, 0)


def test_preempted_request_leaves_shared_blocks_to_the_other_holder() -> None:
    scheduler = make_scheduler(blocks=7, prefix_cache=True)
    prompt = tuple(range(100, 109))
    for name in "ab":
        sampling = SamplingParams(max_tokens=13)
        scheduler.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        plan = planned(scheduler)
        commit(scheduler, plan)
    shared = plan.new_rows[0].block_ids[:2]
    assert (
        scheduler.starts[plan.step_id],
        [scheduler._pool.ref_count(block_id) for block_id in shared],
    ) == ([9, 8], [2, 2])
    run_until_preemption(scheduler)
    assert [scheduler._pool.ref_count(block_id) for block_id in shared] == [1, 1]
    assert scheduler.num_free_blocks == 7 - 6  # a's six blocks, the shared ones among them
