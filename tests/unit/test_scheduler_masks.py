import random
from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.config.grammar import Grammar
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import StepPlan, StepResult
from tests.unit.plan_support import WatchedScheduler
from tests.unit.test_scheduler_traces import EOS_IDS, GARBAGE, ModelWorker, Row, Trace, any_limits

GRAMMAR = Grammar(kind="json_object")


def limits(**changes: int) -> SchedulerLimits:
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 64,
    }
    return SchedulerLimits(
        **(sizes | changes),
        enable_prefix_caching=True,
        max_queued_requests=9,
        eos_token_ids=EOS_IDS,
    )


def request(
    name: str, *, grammar: Grammar | None = GRAMMAR, length: int = 6, max_tokens: int = 8
) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True, grammar=grammar)
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(range(10, 10 + length)), sampling=sampling
    )


def result(plan: StepPlan, token: int = 7) -> StepResult:
    return StepResult(plan.step_id, [token] * sum(plan.needs_sampling), {}, {}, {})


def next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_a_plan_names_the_rows_that_wait_for_masks_and_only_sampled_ones() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=8))
    scheduler.add(request("free", grammar=None, length=3))
    scheduler.add(request("long", length=9))
    first = next_plan(scheduler)
    assert (first.needs_sampling, first.grammar_rows) == ([True, False], [])
    scheduler.commit(first, result(first))
    second = next_plan(scheduler)
    (row,) = scheduler.grammar_rows(second)
    assert (second.grammar_rows, row.row, row.request_id, row.num_outputs) == ([1], 1, "long", 0)
    scheduler.commit(second, result(second))
    (row,) = scheduler.grammar_rows(next_plan(scheduler))
    assert row.num_outputs == 1


def test_without_constrained_requests_no_row_waits_for_a_bitmask() -> None:
    scheduler = Scheduler(limits())
    for name in ("a", "b"):
        scheduler.add(request(name, grammar=None))
    scheduler.add(request("c"))
    scheduler.end("c", "abort")
    assert next_plan(scheduler).grammar_rows == []


def test_the_worker_is_not_sent_what_only_the_engine_reads() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("a"))
    (row,) = next_plan(scheduler).new_rows
    assert row.sampling.grammar is None and row.sampling.max_tokens == 8


def test_a_late_row_is_sampled_again_when_its_mask_is_there_and_others_go_on() -> None:
    scheduler = WatchedScheduler(limits())
    scheduler.add(request("late"))
    scheduler.add(request("other", grammar=None, length=5))
    first = next_plan(scheduler)
    scheduler.postpone(first, [0])
    updates = scheduler.commit(first, result(first))
    assert [(update.request_id, update.token_ids) for update in updates] == [("other", [7])]
    second = next_plan(scheduler)
    assert (second.slots, scheduler.starts[second.step_id]) == ([first.slots[1]], [5])
    scheduler.unblock("late")
    scheduler.commit(second, result(second))
    third = next_plan(scheduler)
    # the last token of the prompt again
    assert (scheduler.starts[third.step_id][0], third.num_scheduled[0], third.grammar_rows) == (
        5,
        1,
        [0],
    )
    updates = scheduler.commit(third, result(third, token=8))
    assert [(update.request_id, update.token_ids) for update in updates] == [
        ("late", [8]),
        ("other", [8]),
    ]


def test_the_block_of_a_postponed_row_enters_the_cache_only_when_its_last_token_ran_for_good() -> (
    None
):
    scheduler = Scheduler(limits())
    scheduler.add(request("late", length=8))  # two whole blocks
    first = next_plan(scheduler)
    scheduler.postpone(first, [0])
    scheduler.commit(first, result(first))
    blocks = scheduler._running[0].block_ids
    assert [scheduler._pool.is_indexed(block) for block in blocks] == [True, False]
    scheduler.unblock("late")
    again = next_plan(scheduler)
    scheduler.commit(again, result(again))
    assert all(scheduler._pool.is_indexed(block) for block in blocks)


def test_requests_can_be_ended_and_freed_of_their_grammars_from_outside() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=32))
    for name in ("ends", "fails", "is free"):
        scheduler.add(request(name))
    plan = next_plan(scheduler)
    ended, failed = scheduler.end("ends", "stop"), scheduler.end("fails", "error", error="no way")
    assert ended is not None and ended.finish_reason == "stop" and not ended.token_ids
    assert failed is not None and failed.error == "no way"
    scheduler.clear_grammar("is free")
    # of an earlier plan
    assert [row.request_id for row in scheduler.grammar_rows(plan)] == ["is free"]
    assert [update.request_id for update in scheduler.commit(plan, result(plan))] == ["is free"]
    assert next_plan(scheduler).grammar_rows == []
    assert scheduler.end("ends", "stop") is None


def test_postponed_sequences_keep_their_place_in_the_budget() -> None:
    """Four rows of one token fill the step: no row may replace one that waits."""
    scheduler = Scheduler(limits(max_num_batched_tokens=4, max_num_seqs=5))
    for name in "abcd":
        scheduler.add(request(name, length=1, max_tokens=20))
    plan = next_plan(scheduler)
    scheduler.postpone(plan, [0, 1, 2, 3])
    scheduler.commit(plan, result(plan))
    scheduler.add(request("e", length=1, grammar=None))
    assert scheduler.plan() is None
    for name in "abcd":
        scheduler.unblock(name)
    assert len(next_plan(scheduler).slots) == 4


def test_a_row_with_drafts_says_how_many_and_a_late_one_has_none_that_count() -> None:
    scheduler = Scheduler(replace(limits(), num_draft_tokens=2))
    scheduler.add(request("a", length=3, max_tokens=20))
    first = next_plan(scheduler)
    second = next_plan(scheduler)
    proposed = StepResult(first.step_id, [7], {}, {}, {}, proposed={0: [8, -1]})
    assert scheduler.proposed(proposed) == {"a": [8, -1]}
    scheduler.commit(first, proposed)
    (row,) = scheduler.grammar_rows(second)
    assert (row.num_outputs, row.num_drafts, second.num_scheduled) == (1, 2, [3])
    scheduler.postpone(second, [0])
    scheduler.unblock("a")
    third = next_plan(scheduler)  # before the masks void all of them
    assert scheduler.commit(second, result(second)) == []
    (row,) = scheduler.grammar_rows(third)
    assert (row.num_outputs, third.num_draft_tokens) == (1, [0])  # no drafts for it here
    fourth = next_plan(scheduler)
    (update,) = scheduler.commit(third, result(third))
    assert update.token_ids == [7] and fourth.num_draft_tokens == [2]
    (update,) = scheduler.commit(fourth, StepResult(fourth.step_id, [8, 9], {}, {}, {}, {0: 1}))
    assert update.token_ids == [8, 9] and scheduler.sequences()[0].num_committed == 6


def test_rows_under_grammars_verify_no_drafts_where_these_count_whatever_they_are() -> None:
    limits_of = replace(limits(), num_draft_tokens=2, constrained_drafts=False)
    scheduler = Scheduler(limits_of)
    scheduler.add(request("a", length=3))
    scheduler.add(request("b", length=3, grammar=None))
    first = next_plan(scheduler)
    scheduler.commit(first, result(first))
    assert next_plan(scheduler).num_draft_tokens == [0, 2]


class ForgettingWorker(ModelWorker):
    late: frozenset[int | None] = frozenset()  # seeds of requests whose drafts are void

    def _drafts(self, row: Row, count: int) -> list[int]:
        return [GARBAGE] * count if row.sampling.seed in self.late else super()._drafts(row, count)

    def forget_sample(self, slot: int) -> None:
        row = self.rows[slot]
        row.tokens.pop()
        row.num_computed -= 1
        if not row.lost:
            assert row.sampling.seed is not None
            del self.sampled[row.sampling.seed, len(row.tokens)]


class LateTrace(Trace):
    """A random run in which the masks of some requests are late for a time."""

    worker: ForgettingWorker

    def __init__(self, limits: SchedulerLimits, *, seed: int, depth: int, trouble: bool) -> None:
        super().__init__(limits, seed=seed, depth=depth, trouble=trouble)
        self.worker = ForgettingWorker(limits.block_size)

    def add(self, request: GenerateRequest) -> None:
        if random.Random(request.request_id).random() < 0.6:
            sampling = msgspec.structs.replace(request.sampling, grammar=GRAMMAR)
            request = msgspec.structs.replace(request, sampling=sampling)
        super().add(request)

    def launch(self, plan: StepPlan) -> None:
        rows = [row for row in self.scheduler.grammar_rows(plan) if self.rng.random() < 0.3]
        late = [row.row for row in rows]
        self.worker.late = frozenset(
            self.requests[row.request_id].sampling.seed for row in rows if row.num_drafts
        )
        super().launch(plan)
        self.scheduler.postpone(plan, late)
        for row in late:
            self.worker.forget_sample(plan.slots[row])

    def check_counters(self) -> None:
        super().check_counters()
        for sequence in [*self.scheduler._running, *self.scheduler._waiting]:
            if sequence.is_postponed and (not self.in_flight or self.rng.random() < 0.5):
                self.scheduler.unblock(sequence.request_id)
        live = self.scheduler._sequences.values()
        assert self.scheduler._num_constrained == sum(sequence.is_constrained for sequence in live)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    limits=any_limits(), seed=st.integers(0, 2**32), depth=st.integers(0, 1), trouble=st.booleans()
)
def test_random_traces_with_late_masks_give_every_request_its_own_tokens(
    limits: SchedulerLimits, seed: int, depth: int, trouble: bool
) -> None:
    LateTrace(limits, seed=seed, depth=depth, trouble=trouble).run(14).check_outputs()
