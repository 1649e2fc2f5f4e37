from typing import Any

import msgspec
import pytest

from negamax.base.errors import ContextLengthError, InvalidRequestError, OverloadedError
from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.prefix_cache import BlockHashes, match_prefix
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import SequenceUpdate, StepPlan, StepResult, TokenLogprobs
from tests.unit.plan_support import WatchedScheduler

EOS = 0
TOKEN = 7  # the worker's sample unless a test sets another


def make_scheduler(
    *,
    slots: int = 8,
    budget: int = 64,
    window: int = 128,
    blocks: int = 64,
    queue: int = 16,
    prefix_cache: bool = False,
) -> WatchedScheduler:
    return WatchedScheduler(
        SchedulerLimits(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_model_len=window,
            block_size=4,
            num_blocks=blocks,
            enable_prefix_caching=prefix_cache,
            max_queued_requests=queue,
            eos_token_ids=frozenset({EOS}),
        )
    )


def request(
    name: str, prompt_len: int = 4, *, priority: int = 0, **sampling: object
) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
    prompt = tuple(1000 * ord(name[0]) + position for position in range(prompt_len))
    return GenerateRequest(
        request_id=name, prompt_token_ids=prompt, sampling=params, priority=priority
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def result(
    plan: StepPlan, tokens: list[int] | None = None, *, errors: dict[int, str] | None = None
) -> StepResult:
    return StepResult(
        plan.step_id, tokens or [TOKEN] * sum(plan.needs_sampling), {}, {}, errors or {}
    )


def step(scheduler: Scheduler, tokens: list[int] | None = None) -> list[SequenceUpdate]:
    plan = planned(scheduler)
    return scheduler.commit(plan, result(plan, tokens))


def run_all(scheduler: Scheduler) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while scheduler.has_unfinished:
        for update in step(scheduler):
            outputs.setdefault(update.request_id, []).extend(update.token_ids)
    return outputs


def admitted(plan: StepPlan) -> list[int]:
    """Return code points of the admitted requests' first letters (see `request`)."""
    return [row.token_ids[0] // 1000 for row in plan.new_rows]


def names(letters: str) -> list[int]:
    return [ord(letter) for letter in letters]


def test_prompt_that_leaves_no_room_for_output_is_refused_with_numbers() -> None:
    scheduler = make_scheduler(window=10)
    with pytest.raises(ContextLengthError, match=r"10 tokens > 9 maximum\. .* 10 tokens"):
        scheduler.add(request("a", 10))
    scheduler.add(request("b", 9))
    assert step(scheduler)[0].finish_reason == "length"


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="0 tokens"):
        make_scheduler().add(request("a", 0))


def test_id_in_use_is_refused_until_the_request_ended() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add(request("a"))
    scheduler.end("a", "abort")
    scheduler.add(request("a"))


def test_request_that_could_outgrow_the_whole_pool_is_refused_with_a_remedy() -> None:
    scheduler = make_scheduler(blocks=3)  # 12 positions; the last token needs none
    scheduler.add(request("a", 5, max_tokens=8))
    with pytest.raises(
        InvalidRequestError,
        match=r"14 tokens.*need 4 KV blocks.*has 3; lower max_tokens to 8 or less",
    ):
        scheduler.add(request("b", 5, max_tokens=9))
    with pytest.raises(InvalidRequestError, match="shorten the prompt"):
        scheduler.add(request("c", 13, max_tokens=1))
    assert len(run_all(scheduler)["a"]) == 8


def test_window_bounds_the_need_of_a_request() -> None:
    scheduler = make_scheduler(blocks=3, window=13)
    scheduler.add(request("a", 5, max_tokens=1000))
    assert len(run_all(scheduler)["a"]) == 8


def test_full_queue_refuses_and_takes_again_later() -> None:
    scheduler = make_scheduler(queue=2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(OverloadedError, match="2 requests are waiting, 2 are allowed"):
        scheduler.add(request("c"))
    step(scheduler)
    scheduler.add(request("c"))


def test_nothing_to_do_is_none() -> None:
    assert make_scheduler().plan() is None


def test_tenants_take_turns_however_much_one_of_them_has_waiting() -> None:
    scheduler = make_scheduler(slots=5)
    for name in "abcdefxy":
        scheduler.add(
            msgspec.structs.replace(request(name), tenant="many" if name < "x" else "few")
        )
    assert admitted(planned(scheduler)) == names("axbyc")


def test_waiting_requests_run_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(slots=3)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        scheduler.add(request(name, priority=priority))
    assert admitted(planned(scheduler)) == names("dba")


def test_prompt_is_chunked_under_the_budget_and_samples_at_its_end_only() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(request("a", 10))
    plans = [planned(scheduler) for _ in range(4)]
    assert [
        (scheduler.starts[plan.step_id], plan.num_scheduled, plan.needs_sampling) for plan in plans
    ] == [([0], [4], [False]), ([4], [4], [False]), ([8], [2], [True]), ([10], [1], [True])]
    assert [len(plan.new_rows) for plan in plans] == [1, 0, 0, 0]
    assert scheduler.commit(plans[0], result(plans[0])) == []


def test_decodes_come_first_then_unfinished_prompts_then_new_ones() -> None:
    scheduler = make_scheduler(budget=12)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 14))
    assert planned(scheduler).num_scheduled == [4, 8]
    scheduler.add(request("c", 4))
    scheduler.add(request("d", 4))
    # rows of one token precede longer ones, also as the rest of the budget
    plan = planned(scheduler)
    assert (plan.slots, scheduler.starts[plan.step_id], plan.num_scheduled) == (
        [0, 3, 1, 2],
        [4, 0, 8, 0],
        [1, 1, 6, 4],
    )
    assert plan.needs_sampling == [True, False, True, True]
    assert plan.num_tokens == 12


def test_no_more_requests_run_than_the_budget_has_tokens() -> None:
    scheduler = make_scheduler(budget=2)
    for name in "abc":
        scheduler.add(request(name, 1, max_tokens=3))
    assert [planned(scheduler).slots for _ in range(4)] == [[0, 1], [0, 1], [0, 1], [2]]


def test_block_is_appended_when_the_last_one_is_full() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 7))
    plans = [planned(scheduler) for _ in range(4)]
    assert plans[0].new_rows[0].block_ids == [0, 1]
    assert [(plan.appended_slots, plan.appended_blocks) for plan in plans[1:]] == [
        ([], []),
        ([0], [2]),
        ([], []),
    ]


def test_new_row_carries_all_that_the_worker_needs() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 5, seed=3))
    (row,) = planned(scheduler).new_rows
    new = request("a", 5, seed=3)
    assert (tuple(row.token_ids), row.prompt_len, row.sampling) == (
        new.prompt_token_ids,
        5,
        new.sampling,
    )


def test_freed_slot_goes_to_the_next_request() -> None:
    scheduler = make_scheduler(slots=2)
    for name in "abc":
        scheduler.add(request(name, max_tokens=5))
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.end("a", "abort")
    assert [row.slot for row in planned(scheduler).new_rows] == [0]


def test_admission_leaves_one_block_free_while_others_run() -> None:
    scheduler = make_scheduler(blocks=6)
    scheduler.add(request("a", 8, max_tokens=2))
    scheduler.add(request("b", 16, max_tokens=2))
    assert admitted(planned(scheduler)) == names("a")
    assert (scheduler.limits.num_blocks, scheduler.num_free_blocks) == (6, 4)


def test_request_that_needs_the_whole_pool_runs_alone() -> None:
    scheduler = make_scheduler(blocks=4)
    scheduler.add(request("a", 4, max_tokens=1))
    scheduler.add(request("b", 16, max_tokens=1))
    assert run_all(scheduler) == {"a": [TOKEN], "b": [TOKEN]}


def test_nobody_overtakes_the_first_waiting_request() -> None:
    scheduler = make_scheduler(blocks=6)
    scheduler.add(request("a", 8, max_tokens=2))
    scheduler.add(request("b", 20, max_tokens=2))
    scheduler.add(request("c", 1, max_tokens=1))
    assert [admitted(planned(scheduler)) for _ in range(2)] == [names("a"), []]


def test_blocked_request_is_admitted_as_soon_as_blocks_are_free() -> None:
    scheduler = make_scheduler(blocks=7)
    for name, prompt_len in (("a", 4), ("b", 7), ("c", 16)):
        scheduler.add(request(name, prompt_len))
    assert admitted(planned(scheduler)) == names("ab")
    scheduler.end("a", "abort")  # only its one block was missing
    assert admitted(planned(scheduler)) == names("c")


def test_blocked_request_is_not_looked_up_again_while_nothing_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[int] = []

    def counted(pool: BlockPool, block_hashes: BlockHashes, *, max_blocks: int) -> list[int]:
        lookups.append(max_blocks)
        return match_prefix(pool, block_hashes, max_blocks=max_blocks)

    monkeypatch.setattr("negamax.scheduler.scheduler.match_prefix", counted)
    scheduler = make_scheduler(blocks=6, prefix_cache=True)
    scheduler.add(request("a", 8, max_tokens=6))
    scheduler.add(request("b", 20, max_tokens=2))
    for _ in range(5):
        planned(scheduler)
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
        ({"max_tokens": 100}, [5, 6, 7, 8], "length", None),  # the context length of 8
    ],
)
def test_stop_rules(
    sampling: dict[str, Any], sampled: list[int], reason: str, stop_reason: int | None
) -> None:
    scheduler = make_scheduler(window=8)
    scheduler.add(request("a", 4, **sampling))
    updates = [update for token in sampled for update in step(scheduler, [token])]
    assert [update.token_ids for update in updates] == [[token] for token in sampled]
    assert [update.finish_reason for update in updates[:-1]] == [None] * (len(sampled) - 1)
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == (reason, stop_reason)
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks


def test_decode_is_planned_before_its_input_token_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    plans = [planned(scheduler) for _ in range(3)]
    assert list(scheduler.starts.values()) == [[0], [4], [5]]
    for plan, token in zip(plans, (11, 12, 13), strict=True):
        (update,) = scheduler.commit(plan, result(plan, [token]))
        assert update.token_ids == [token]
    assert scheduler.generated_tokens == 3


@pytest.mark.parametrize(("window", "max_tokens"), [(128, 2), (6, 100)])
def test_never_planned_past_a_length_limit(window: int, max_tokens: int) -> None:
    scheduler = make_scheduler(window=window)
    scheduler.add(request("a", 4, max_tokens=max_tokens))
    plans = [planned(scheduler), planned(scheduler)]
    assert scheduler.plan() is None and scheduler.has_unfinished
    updates = [scheduler.commit(plan, result(plan))[0] for plan in plans]
    assert [update.finish_reason for update in updates] == [None, "length"]


def test_rows_in_flight_of_a_finished_request_are_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 4))
    first, second = planned(scheduler), planned(scheduler)
    assert [
        update.finish_reason for update in scheduler.commit(first, result(first, [EOS, 5]))
    ] == ["stop", None]
    (update,) = scheduler.commit(second, result(second, [8, 9]))
    assert (update.request_id, update.token_ids) == ("b", [9])


def test_abort_frees_at_once_and_drops_what_is_in_flight() -> None:
    scheduler = make_scheduler(slots=1)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 4))
    first, second = planned(scheduler), planned(scheduler)
    update = scheduler.end("a", "abort")
    assert update is not None and (update.finish_reason, update.token_ids) == ("abort", [])
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks
    third = planned(scheduler)
    assert (third.new_rows[0].slot, admitted(third)) == (0, names("b"))
    assert scheduler.commit(first, result(first)) == scheduler.commit(second, result(second)) == []
    assert scheduler.commit(third, result(third))[0].request_id == "b"


def test_abort_of_a_waiting_unknown_or_finished_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4, max_tokens=1))
    update = scheduler.end("a", "abort")
    assert update is not None and (update.finish_reason, update.num_cached_tokens) == ("abort", 0)
    assert scheduler.end("a", "abort") is None and scheduler.end("never seen", "abort") is None
    assert scheduler.plan() is None and not scheduler.has_unfinished


def test_plans_must_be_committed_in_order() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    planned(scheduler)
    second = planned(scheduler)
    with pytest.raises(AssertionError):
        scheduler.commit(second, result(second))


def test_error_of_one_row_ends_only_its_request() -> None:
    scheduler = make_scheduler(budget=12)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 14))
    step(scheduler, [1])
    scheduler.add(request("c", 4))
    scheduler.add(request("d", 4))
    plan = planned(scheduler)  # rows a d b c; d does not sample yet
    updates = scheduler.commit(plan, result(plan, [21, 22, 23], errors={2: "not a number"}))
    assert [
        (update.request_id, update.token_ids, update.finish_reason, update.error)
        for update in updates
    ] == [("a", [21], None, None), ("b", [], "error", "not a number"), ("c", [23], None, None)]
    assert sorted(run_all(scheduler)) == ["a", "c", "d"]


def test_lost_step_ends_its_requests_and_no_others() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    first = planned(scheduler)
    scheduler.add(request("b", 4))
    second = planned(scheduler)
    scheduler.add(request("c", 4))
    third = planned(scheduler)
    (update,) = scheduler.fail(first, "worker lost")
    assert (update.request_id, update.finish_reason, update.error) == ("a", "error", "worker lost")
    (update,) = scheduler.commit(second, result(second, [21, 22]))
    assert (update.request_id, update.token_ids) == ("b", [22])
    assert [update.request_id for update in scheduler.fail(third, "worker lost")] == ["b", "c"]
    assert not scheduler.has_unfinished and scheduler.num_free_blocks == scheduler.limits.num_blocks


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [], [])


def test_logprobs_go_with_their_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 4, logprobs=0))
    plan = planned(scheduler)
    updates = scheduler.commit(plan, StepResult(plan.step_id, [5, 6], {1: logprob(6)}, {}, {}))
    assert [update.logprobs for update in updates] == [None, [logprob(6)]]


def test_logprobs_are_counted_by_sampled_rows() -> None:
    scheduler = make_scheduler(budget=12)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 14))
    step(scheduler)
    scheduler.add(request("c", 4))
    scheduler.add(request("d", 4))
    plan = planned(scheduler)  # rows a d b c; d does not sample yet
    updates = scheduler.commit(
        plan, StepResult(plan.step_id, [21, 22, 23], {2: logprob(23)}, {}, {})
    )
    assert [update.logprobs for update in updates] == [None, None, [logprob(23)]]


def commit_prompt_logprobs(scheduler: WatchedScheduler, name: str) -> dict[str, SequenceUpdate]:
    """Step with log-probabilities for the rows of `name`, one per next prompt token."""
    plan = planned(scheduler)
    slot = scheduler._sequences[name].slot
    gathered: dict[int, list[TokenLogprobs]] = {}
    for row, (start, count) in enumerate(
        zip(scheduler.starts[plan.step_id], plan.num_scheduled, strict=True)
    ):
        if plan.slots[row] == slot:
            last = scheduler._sequences[name].prompt_len - 1
            gathered[row] = [
                logprob(position) for position in range(start + 1, min(start + count, last) + 1)
            ]
    updates = scheduler.commit(
        plan, StepResult(plan.step_id, [TOKEN] * sum(plan.needs_sampling), {}, gathered, {})
    )
    return {update.request_id: update for update in updates}


def test_prompt_logprobs_are_gathered_over_chunks_and_delivered_once() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(request("a", 10, prompt_logprobs=0))
    assert [commit_prompt_logprobs(scheduler, "a") for _ in range(2)] == [{}, {}]
    assert commit_prompt_logprobs(scheduler, "a")["a"].prompt_logprobs == [
        logprob(n) for n in range(1, 10)
    ]
    assert commit_prompt_logprobs(scheduler, "a")["a"].prompt_logprobs is None


def test_prompt_logprobs_start_over_after_a_preempted_prefill() -> None:
    scheduler = make_scheduler(budget=3, blocks=5)
    scheduler.add(request("a", 4, max_tokens=6))
    scheduler.add(request("b", 12, max_tokens=1, prompt_logprobs=0))
    # finally "a" needs the block; 10 of the 12 prompt tokens have run
    for _ in range(7):
        commit_prompt_logprobs(scheduler, "b")
    assert scheduler.preemption_count == 1 and scheduler.num_waiting == 1
    updates: dict[str, SequenceUpdate] = {}
    while scheduler.has_unfinished:
        updates |= commit_prompt_logprobs(scheduler, "b")
    assert updates["b"].prompt_logprobs == [logprob(n) for n in range(1, 12)]
