from functools import partial
from typing import Any

import pytest

from negamax.base.errors import ContextLengthError, InvalidRequestError, OverloadedError
from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.prefix_cache import BlockHashes, match_prefix
from negamax.scheduler.step import SequenceUpdate, StepResult, TokenLogprobs
from tests.unit import plan_support
from tests.unit.plan_support import RankScheduler, list_admitted, make_result

EOS = 0
make_scheduler = partial(plan_support.make_scheduler, enable_prefix_caching=False)


def test_refuses_lengths_ids_and_requests_that_cannot_run() -> None:
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(ContextLengthError, match=r"10 tokens > 9 maximum\. .* 10 tokens"):
        scheduler.add("a", 10)
    scheduler.add("b", 9)
    assert scheduler.step()[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="0 tokens"):
        scheduler.add("c", 0)
    scheduler = make_scheduler()
    scheduler.add("a")
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add("a")
    scheduler.end("a", "abort")
    scheduler.add("a")
    scheduler = make_scheduler(num_blocks=3)  # 12 positions; the last token needs none
    scheduler.add("a", 5)
    refusal = r"14 tokens.*need 4 KV blocks.*has 3 KV blocks; lower max_tokens to 8 or less"
    with pytest.raises(InvalidRequestError, match=refusal):
        scheduler.add("b", 5, max_tokens=9)
    with pytest.raises(InvalidRequestError, match="shorten the prompt"):
        scheduler.add("c", 13, max_tokens=1)
    assert len(scheduler.run_all()) == 8
    scheduler = make_scheduler(num_blocks=3, max_model_len=13)
    scheduler.add("a", 5, max_tokens=1000)  # The context length limits the blocks of the request.
    assert len(scheduler.run_all()) == 8


def test_tenants_take_turns_and_share_the_tokens_for_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=5)
    assert scheduler.plan() is None
    for name in "abcdefxy":
        scheduler.add(name, tenant="many" if name < "x" else "few")
    assert list_admitted(scheduler.next_plan()) == "axbyc"
    scheduler = make_scheduler(max_num_batched_tokens=16, max_model_len=200, num_blocks=200)

    def plan(**lengths: int) -> list[int]:
        for name, length in lengths.items():
            scheduler.add(name, length, tenant=name[0])
        return sorted(scheduler.next_plan().num_scheduled)

    assert plan(a1=100, a2=100) == [16]
    assert plan(b1=12, c1=5) == [5, 11]
    assert plan() == [1, 5, 10]  # b1 samples, and a1 gets the tokens that c1 leaves.
    assert plan(b2=100) == [1, 1, 7, 7] == plan()


@pytest.mark.parametrize(
    ("many", "sizes", "priority", "admitted"),
    [
        (4, {}, 0, "xy"),  # Each tenant may hold two slots.
        (3, {"num_blocks": 8, "max_num_seqs": 8}, 0, "x"),  # KV blocks
        (3, {"num_blocks": 8, "max_num_batched_tokens": 16}, 0, "x"),
        (4, {}, 1, ""),  # Rows of better priority do not yield.
        (1, {"max_num_seqs": 1}, 0, ""),  # A tenant's last row does not yield.
    ],
)
def test_rows_of_the_tenant_with_the_most_yield_to_others(
    many: int, sizes: dict[str, int], priority: int, admitted: str
) -> None:
    scheduler = make_scheduler(**sizes)
    for name in "abcdef"[:many] + "gh":
        scheduler.add(name, 6, max_tokens=9, tenant="many")
    plans = scheduler.next_plans(2)
    for name in "xyz":
        scheduler.add(name, 6, max_tokens=9, tenant="few", priority=priority)
    plans += scheduler.next_plans(4)
    assert "".join(map(list_admitted, plans[2:])) == admitted
    assert scheduler.preemption_count == len(admitted)
    updates = [update for plan in plans for update in scheduler.commit(plan)]
    assert len(updates + scheduler.run_all()) == 9 * (many + 5)


def test_rows_of_the_tenant_with_the_most_are_preempted_for_growth() -> None:
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    for name, tenant in (("a", "many"), ("b", "many"), ("x", "few")):
        scheduler.add(name, 7, tenant=tenant)
        admitted = scheduler.next_plan()
    while not scheduler.preemption_count:
        plan = scheduler.next_plan()
    assert list_admitted(admitted) == "x" and admitted.new_rows[0].slot in plan.slots


def test_waiting_requests_run_by_priority_up_to_the_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        scheduler.add(name, priority=priority)
    assert list_admitted(scheduler.next_plan()) == "dba"
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add(name, 1, max_tokens=3)
    assert [plan.slots for plan in scheduler.next_plans(4)] == [[0, 1], [0, 1], [0, 1], [2]]
    scheduler = make_scheduler(max_queued_requests=2)
    scheduler.add_all(a=4, b=4)
    with pytest.raises(OverloadedError, match="2 requests are waiting, and the limit is 2"):
        scheduler.add("c")
    scheduler.step()
    scheduler.add("c")


def test_decodes_come_first_and_prompts_are_chunked_under_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    scheduler.add_all(a=4, b=14)
    assert scheduler.next_plan().num_scheduled == [4, 8]
    scheduler.add_all(c=4, d=4)
    # Rows of one token precede longer rows, even if these run the rest of the budget.
    plan = scheduler.next_plan()
    assert (plan.slots, scheduler.starts[plan.step_id]) == ([0, 3, 1, 2], [4, 0, 8, 0])
    assert (plan.num_scheduled, plan.num_tokens) == ([1, 1, 6, 4], 12)
    assert plan.needs_sampling == [True, False, True, True]
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add("a", 10)
    plans = scheduler.next_plans(4)
    assert [
        (scheduler.starts[plan.step_id], plan.num_scheduled, plan.needs_sampling) for plan in plans
    ] == [([0], [4], [False]), ([4], [4], [False]), ([8], [2], [True]), ([10], [1], [True])]
    assert [len(plan.new_rows) for plan in plans] == [1, 0, 0, 0]
    assert scheduler.commit(plans[0]) == []


def test_admission_leaves_one_block_free_while_others_run() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add("a", 8, max_tokens=2)
    scheduler.add("b", 16, max_tokens=2)
    scheduler.add("c", 1, max_tokens=1)  # c never overtakes the first waiting request.
    assert [list_admitted(plan) for plan in scheduler.next_plans(2)] == ["a", ""]
    assert scheduler.num_free_blocks == 3
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add("a", 4, max_tokens=1)
    scheduler.add("b", 16, max_tokens=1)
    assert [update.request_id for update in scheduler.run_all()] == ["a", "b"]
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add_all(a=4, b=7, c=16)
    assert list_admitted(scheduler.next_plan()) == "ab"
    scheduler.end("a", "abort")  # c lacked only the one block of a.
    assert list_admitted(scheduler.next_plan()) == "c"


def test_blocked_request_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[int] = []

    def counted(pool: BlockPool, block_hashes: BlockHashes, *, max_blocks: int) -> list[int]:
        lookups.append(max_blocks)
        return match_prefix(pool, block_hashes, max_blocks=max_blocks)

    monkeypatch.setattr("negamax.scheduler.scheduler.match_prefix", counted)
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=True)
    scheduler.add("a", 8, max_tokens=6)
    scheduler.add("b", 20, max_tokens=2)
    scheduler.next_plans(5)
    assert lookups == [1, 4]


@pytest.mark.parametrize(
    ("sampling", "sampled", "reason", "stop_reason"),
    [
        ({}, [5, EOS], "stop", None),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, EOS], "length", None),
        ({"stop_token_ids": (9,)}, [5, 9], "stop", 9),
        ({"stop_token_ids": (9,), "ignore_eos": True}, [EOS, 9], "stop", 9),
        ({"stop_token_ids": (9,)}, [5, EOS], "stop", None),
        ({"stop_token_ids": (EOS,)}, [EOS], "stop", None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], "stop", EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS], "stop", None),
        ({"min_tokens": 2, "stop_token_ids": (9,)}, [9, 9, 9], "stop", 9),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, EOS], "length", None),
        ({"max_tokens": 2}, [5, EOS], "stop", None),
        ({"max_tokens": 2}, [5, 6], "length", None),
        ({"max_tokens": 100}, [5, 6, 7, 8], "length", None),  # The context length is 8.
    ],
)
def test_stop_rules(
    sampling: dict[str, Any], sampled: list[int], reason: str, stop_reason: int | None
) -> None:
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add("a", 4, **sampling)
    updates = [update for token in sampled for update in scheduler.step([token])]
    assert [update.token_ids for update in updates] == [[token] for token in sampled]
    assert [update.finish_reason for update in updates[:-1]] == [None] * (len(sampled) - 1)
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == (reason, stop_reason)
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks


def test_aborts_free_at_once_and_plans_are_committed_in_order() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_all(a=4, b=4)
    first, second = scheduler.next_plans(2)
    update = scheduler.end("a", "abort")
    assert update is not None and (update.finish_reason, update.token_ids) == ("abort", [])
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks
    third = scheduler.next_plan()
    assert (third.new_rows[0].slot, list_admitted(third)) == (0, "b")
    assert scheduler.commit(first) == scheduler.commit(second) == []
    assert scheduler.commit(third)[0].request_id == "b"
    scheduler = make_scheduler()
    scheduler.add("a", 4, max_tokens=1)
    update = scheduler.end("a", "abort")
    assert update is not None and (update.finish_reason, update.num_cached_tokens) == ("abort", 0)
    assert scheduler.end("a", "abort") is None and scheduler.end("never seen", "abort") is None
    assert scheduler.plan() is None and not scheduler.has_unfinished
    scheduler = make_scheduler()
    scheduler.add("a")
    _, second = scheduler.next_plans(2)
    with pytest.raises(AssertionError):
        scheduler.commit(second)


def test_lost_step_ends_its_requests_and_no_others() -> None:
    scheduler = make_scheduler()
    plans = []
    for name in "abc":
        scheduler.add(name)
        plans.append(scheduler.next_plan())
    first, second, third = plans
    (update,) = scheduler.fail(first, "worker lost")
    assert (update.request_id, update.finish_reason, update.error) == ("a", "error", "worker lost")
    (update,) = scheduler.commit(second, make_result(second, [21, 22]))
    assert (update.request_id, update.token_ids) == ("b", [22])
    assert [update.request_id for update in scheduler.fail(third, "worker lost")] == ["b", "c"]
    assert not scheduler.has_unfinished and scheduler.num_free_blocks == scheduler.limits.num_blocks


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [], [])


def test_logprobs_and_errors_belong_to_one_row() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    scheduler.add_all(a=4, b=14)
    scheduler.step([1])
    scheduler.add_all(c=4, d=4)
    plan = scheduler.next_plan()  # The rows are a, d, b, c; d does not sample yet.
    result = StepResult(plan.step_id, [21, 22, 23], {2: logprob(23)}, {}, {2: "not a number"})
    updates = scheduler.commit(plan, result)
    assert [
        (update.request_id, update.token_ids, update.logprobs, update.finish_reason, update.error)
        for update in updates
    ] == [
        ("a", [21], None, None, None),
        ("b", [], None, "error", "not a number"),
        ("c", [23], [logprob(23)], None, None),
    ]
    assert {update.request_id for update in scheduler.run_all()} == {"a", "c", "d"}


def commit_prompt_logprobs(scheduler: RankScheduler, name: str) -> dict[str, SequenceUpdate]:
    """Run a step and gather log-probabilities of the rows of `name`, one per next prompt token."""
    plan = scheduler.next_plan()
    (sequence,) = (each for each in scheduler.sequences() if each.request_id == name)
    gathered: dict[int, list[TokenLogprobs]] = {}
    for row, (start, count) in enumerate(
        zip(scheduler.starts[plan.step_id], plan.num_scheduled, strict=True)
    ):
        if plan.slots[row] == sequence.slot:
            stop = min(start + count, sequence.prompt_len - 1) + 1
            gathered[row] = [logprob(position) for position in range(start + 1, stop)]
    result = StepResult(plan.step_id, [7] * sum(plan.needs_sampling), {}, gathered, {})
    return {update.request_id: update for update in scheduler.commit(plan, result)}


def test_prompt_logprobs_are_delivered_once_also_after_a_preemption() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add("a", 10, prompt_logprobs=0)
    assert [commit_prompt_logprobs(scheduler, "a") for _ in range(2)] == [{}, {}]
    for expected in ([logprob(n) for n in range(1, 10)], None):
        assert commit_prompt_logprobs(scheduler, "a")["a"].prompt_logprobs == expected
    scheduler = make_scheduler(max_num_batched_tokens=3, num_blocks=5)
    scheduler.add("a", 4, max_tokens=6)
    scheduler.add("b", 12, max_tokens=1, prompt_logprobs=0)
    # In the end a needs the block, after 10 of the 12 prompt tokens of b have run.
    for _ in range(7):
        commit_prompt_logprobs(scheduler, "b")
    assert scheduler.preemption_count == 1 and scheduler.num_waiting == 1
    updates: dict[str, SequenceUpdate] = {}
    while scheduler.has_unfinished:
        updates |= commit_prompt_logprobs(scheduler, "b")
    assert updates["b"].prompt_logprobs == [logprob(n) for n in range(1, 12)]
