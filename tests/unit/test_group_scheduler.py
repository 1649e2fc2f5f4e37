from typing import Any

import pytest

from negamax.base.errors import InvalidRequestError
from negamax.scheduler.draft_length import AdaptiveDraftLength
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import StepPlan, StepSize
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


def test_a_request_goes_where_its_prefix_is_until_that_costs_more() -> None:
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


def test_a_rank_without_room_leaves_requests_to_the_others_and_to_the_queue() -> None:
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
