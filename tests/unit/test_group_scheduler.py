from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.base.errors import InvalidRequestError, OverloadedError
from negamax.scheduler.draft_length import AdaptiveDraftLength, for_ranks
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate, StepPlan, StepResult, StepSize
from tests.unit.test_scheduler_traces import (
    EOS_IDS,
    AnyDraftLength,
    ModelWorker,
    any_limits,
    expected_output,
    request_of,
)


class GroupTrace:
    """A random run: requests arrive, abort or name a rank, steps fail, commits lag by `depth`."""

    def __init__(
        self, limits: SchedulerLimits, num_ranks: int, *, seed: int, depth: int, trouble: bool,
        joint: AdaptiveDraftLength | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.depth, self.trouble = limits, depth, trouble
        self.rng = random.Random(seed)
        lengths = [AnyDraftLength(limits.num_draft_tokens, seed + at) for at in range(num_ranks)]
        self.scheduler = GroupScheduler(limits, for_ranks(joint, num_ranks) if joint else lengths)
        self.workers = [ModelWorker(limits.block_size) for _ in range(num_ranks)]
        self.in_flight: deque[tuple[list[StepPlan], list[StepResult] | None]] = deque()
        self.steps: list[list[StepPlan]] = []
        self.requests: dict[str, GenerateRequest] = {}
        self.updates: dict[str, list[SequenceUpdate]] = {}
        self.ranks: dict[str, int] = {}  # position where each began to run
        self.lost = 0  # steps

    def run(self, num_requests: int) -> GroupTrace:
        to_add = deque(self.rng.sample(range(10_000), num_requests))
        while to_add or self.scheduler.has_unfinished or self.in_flight:
            while to_add and self.rng.random() < 0.5:
                self.add(to_add.popleft())
            if self.trouble and self.rng.random() < 0.1 and self.requests:
                name = self.rng.choice(list(self.requests))
                update = self.scheduler.end(name, "abort")
                assert (update is None) == self.ended(name)
                self.receive([update] if update is not None else [])
            plans = self.scheduler.plan()
            if plans is not None:
                self.launch(plans)
            else:
                assert self.in_flight or not self.scheduler.has_unfinished, "stuck"
            while len(self.in_flight) > (self.depth if plans is not None else 0):
                plans_then, results = self.in_flight.popleft()
                if results is None:
                    self.receive(self.scheduler.fail(plans_then, "step lost"))
                else:
                    self.receive(self.scheduler.commit(plans_then, results))
            live = [name for name in self.requests if not self.ended(name)]
            running = sum(rank.num_running for rank in self.scheduler.ranks)
            assert running + self.scheduler.num_waiting == len(live)
            assert all((name in self.scheduler) == (name in live) for name in self.requests)
        return self

    def add(self, seed: int) -> None:
        request = request_of(seed, self.limits)
        pinned = self.rng.choice((None, None, None, seed % len(self.workers)))
        request = msgspec.structs.replace(request, data_parallel_rank=pinned)
        try:
            self.scheduler.add(request)
        except (InvalidRequestError, OverloadedError):
            return
        self.requests[request.request_id] = request
        self.updates[request.request_id] = []

    def launch(self, plans: list[StepPlan]) -> None:
        assert len(plans) == len(self.workers) and any(plan.slots for plan in plans)
        assert len({plan.step_id for plan in plans}) == 1, "out of step"
        self.check_size(plans)
        self.steps.append(plans)
        for at, rank in enumerate(self.scheduler.ranks):
            for sequence in rank.latest_sequences():
                name, pinned = sequence.request_id, sequence.request.data_parallel_rank
                assert self.ranks.setdefault(name, at) == at == (at if pinned is None else pinned)
        lose = self.trouble and self.rng.random() < 0.02
        results = []
        for plan, worker in zip(plans, self.workers, strict=True):
            rows = range(len(plan.slots))
            bad = frozenset(row for row in rows if self.trouble and self.rng.random() < 0.02)
            results.append(worker.execute(plan, lose=lose, bad_rows=bad))
        self.lost += lose
        self.in_flight.append((plans, None if lose else results))

    def check_size(self, plans: list[StepPlan]) -> None:
        """Check the sizes of other ranks that every rank gets, from the workers' state."""
        size = plans[0].of_all
        assert size is not None and all(plan.of_all == size for plan in plans)
        assert size.num_tokens == max(plan.num_tokens for plan in plans) > 0
        assert size.num_rows == max(len(plan.slots) for plan in plans)
        is_decode, longest = True, 0
        for plan, worker, rank in zip(plans, self.workers, self.scheduler.ranks, strict=True):
            assert max(*plan.num_draft_tokens, plan.num_proposed, 0) <= size.num_drafts
            starts = {slot: row.num_computed for slot, row in worker.rows.items()}
            starts |= {row.slot: row.num_computed for row in plan.new_rows}
            prompts = {each.slot: each.prompt_len for each in rank.latest_sequences()}
            columns = plan.num_scheduled, plan.num_draft_tokens, plan.needs_sampling
            for slot, count, drafts, samples in zip(plan.slots, *columns, strict=True):
                generates = count == 1 + drafts and starts[slot] >= prompts[slot]
                is_decode &= generates and samples
                if generates:
                    longest = max(longest, starts[slot] + count)
        assert size.is_decode == is_decode
        assert size.longest_decode >= longest  # drafts in flight count as accepted

    def ended(self, name: str) -> bool:
        return bool(self.updates[name]) and self.updates[name][-1].finish_reason is not None

    def receive(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert not self.ended(update.request_id), "an update after the end"
            self.updates[update.request_id].append(update)

    def check_outputs(self) -> None:
        for name, request in self.requests.items():
            tokens = [token for update in self.updates[name] for token in update.token_ids]
            expected, finish_reason, stop_reason = expected_output(request, self.limits)
            last = self.updates[name][-1]
            if last.finish_reason in ("abort", "error"):
                assert self.trouble and tokens == expected[: len(tokens)]
            else:
                got = (tokens, last.finish_reason, last.stop_reason)
                assert got == (expected, finish_reason, stop_reason)
        for rank in self.scheduler.ranks:
            assert rank.num_free_blocks == self.limits.num_blocks
            assert sorted(rank._free_slots) == list(range(self.limits.max_num_seqs))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    limits=any_limits(),
    num_ranks=st.sampled_from((2, 3, 4)),
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 2),
    trouble=st.booleans(),
)
def test_random_traces(
    limits: SchedulerLimits, num_ranks: int, seed: int, depth: int, trouble: bool
) -> None:
    first = GroupTrace(limits, num_ranks, seed=seed, depth=depth, trouble=trouble).run(20)
    first.check_outputs()
    if seed % 8 == 0:
        again = GroupTrace(limits, num_ranks, seed=seed, depth=depth, trouble=trouble).run(20)
        assert first.steps == again.steps and first.updates == again.updates


def test_ranks_verify_as_many_drafts_as_is_best_for_all() -> None:
    limits = replace(
        group(max_num_seqs=8, max_num_batched_tokens=256, num_blocks=400).limits, num_draft_tokens=3
    )
    joint = AdaptiveDraftLength((1, 2, 3))
    trace = GroupTrace(limits, 3, seed=1, depth=1, trouble=True, joint=joint).run(120)
    trace.check_outputs()
    chosen = [{plan.num_proposed for plan in plans if plan.slots} for plans in trace.steps]
    assert all(len(numbers) == 1 for numbers in chosen) and len(set.union(*chosen)) > 1
    verified = sum(place.trials for place in joint._places)
    assert verified > 50 and joint._num_steps == len(trace.steps) - trace.lost


def group(num_ranks: int = 2, **sizes: Any) -> GroupScheduler:
    limits: dict[str, Any] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 4,
        "num_blocks": 64, "enable_prefix_caching": True, "max_queued_requests": 100,
        "eos_token_ids": EOS_IDS,
    }  # fmt: skip
    return GroupScheduler(SchedulerLimits(**limits | sizes), [None] * num_ranks)


def request(name: str, prompt: list[int], **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **fields
    )


def step(scheduler: GroupScheduler) -> list[StepPlan]:
    plans = scheduler.plan()
    assert plans is not None
    results = [
        StepResult(plan.step_id, [7] * sum(plan.needs_sampling), {}, {}, {}) for plan in plans
    ]
    scheduler.commit(plans, results)
    return plans


def test_prompts_of_one_step_are_spread_over_the_ranks() -> None:
    scheduler = group(4)
    for number in range(8):
        scheduler.add(request(f"{number}", [10 + number] * 20))
    assert [plan.num_scheduled for plan in step(scheduler)] == [[20, 20]] * 4


def test_a_long_prompt_keeps_short_ones_off_its_rank() -> None:
    scheduler = group(2, max_num_batched_tokens=32)
    scheduler.add(request("long", [3] * 200))
    for number in range(3):
        scheduler.add(request(f"{number}", [10 + number] * 4))
    long, short = step(scheduler)
    assert (long.num_scheduled, short.num_scheduled) == ([32], [4, 4, 4])
    long, short = step(scheduler)
    assert (long.num_scheduled, short.num_scheduled) == ([32], [1, 1, 1])
    assert long.of_all == StepSize(32, 3, 0, 5, False)


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
    assert found[0] == [0, 1]  # 200 tokens less outweigh one more row
    assert [1, 0] in found  # but not any number of rows


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


def test_ranks_without_requests_have_empty_plans_of_the_same_step() -> None:
    scheduler = group(3)
    scheduler.add(request("a", [3] * 8, data_parallel_rank=1))
    assert [plan.slots for plan in step(scheduler)] == [[], [0], []]
    plans = step(scheduler)
    assert [plan.num_tokens for plan in plans] == [0, 1, 0]
    assert plans[0].of_all == StepSize(1, 1, 0, 9, True)
    assert scheduler.end("a", "abort") is not None
    assert scheduler.plan() is None


def test_all_data_parallel_ranks_share_out_a_step_or_none_does() -> None:
    scheduler = group(3, max_num_batched_tokens=32, num_shares=4)
    scheduler.add(request("short", [3] * 7))  # of 8 pieces one would be empty
    assert [plan.of_all.largest_share for plan in step(scheduler) if plan.of_all] == [0] * 3
    scheduler.add(request("long", [4] * 48))
    plans = step(scheduler)
    assert sorted(plan.num_tokens for plan in plans) == [0, 1, 32]
    # two pieces of each rank, plus the tokens by which pieces may exceed others
    assert [plan.of_all.largest_share for plan in plans if plan.of_all] == [8 + 2] * 3
    assert [plan.of_all.largest_share for plan in step(scheduler) if plan.of_all] == [4 + 2] * 3
    plans = step(scheduler)
    assert sorted(plan.num_tokens for plan in plans) == [0, 1, 1]
    assert [plan.of_all.largest_share for plan in plans if plan.of_all] == [0] * 3


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2; allowed: 0 to 1"):
        group(2).add(request("a", [3], data_parallel_rank=2))
