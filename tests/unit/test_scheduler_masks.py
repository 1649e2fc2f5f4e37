import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.config.grammar import Grammar
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import StepPlan, StepResult
from tests.unit.plan_support import RankScheduler, make_scheduler
from tests.unit.test_scheduler_traces import GARBAGE, ModelWorker, Row, Trace, any_limits

GRAMMAR = Grammar(kind="json_object")


def add(scheduler: RankScheduler, name: str, length: int = 6, **fields: Any) -> None:
    fields = {"seed": 1, "ignore_eos": True, "grammar": GRAMMAR, **fields}
    scheduler.add(name, list(range(10, 10 + length)), **fields)


def test_a_plan_lists_sampled_rows_with_grammars() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "free", 3, grammar=None)
    add(scheduler, "long", 9)
    first = scheduler.next_plan()
    assert (first.needs_sampling, first.grammar_rows) == ([True, False], [])
    assert all(row.sampling.grammar is None for row in first.new_rows)
    scheduler.commit(first)
    second = scheduler.next_plan()
    (row,) = scheduler.grammar_rows(second)
    assert (second.grammar_rows, row.row, row.request_id, row.num_outputs) == ([1], 1, "long", 0)
    scheduler.commit(second)
    (row,) = scheduler.grammar_rows(scheduler.next_plan())
    assert row.num_outputs == 1
    scheduler = make_scheduler()
    for name in ("a", "b"):
        add(scheduler, name, grammar=None)
    add(scheduler, "c")
    scheduler.end("c", "abort")
    assert scheduler.next_plan().grammar_rows == []
    scheduler = make_scheduler(num_draft_tokens=2, constrained_drafts=False)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3, grammar=None)
    scheduler.step()
    assert scheduler.next_plan().num_draft_tokens == [0, 2]


def test_requests_can_be_ended_and_freed_of_their_grammars_from_outside() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    for name in ("ends", "fails", "is free"):
        add(scheduler, name)
    plan = scheduler.next_plan()
    ended, failed = scheduler.end("ends", "stop"), scheduler.end("fails", "error", error="no way")
    assert ended is not None and ended.finish_reason == "stop" and not ended.token_ids
    assert failed is not None and failed.error == "no way"
    scheduler.clear_grammar("is free")
    # The plan was made before two of its rows ended.
    assert [row.request_id for row in scheduler.grammar_rows(plan)] == ["is free"]
    assert [update.request_id for update in scheduler.commit(plan)] == ["is free"]
    assert scheduler.next_plan().grammar_rows == []
    assert scheduler.end("ends", "stop") is None


def test_postponed_rows_keep_their_place_and_cache_no_block_early() -> None:
    """Check that no row replaces a row that waits for its mask, if four rows fill the step."""
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=5)
    for name in "abcd":
        add(scheduler, name, 1, max_tokens=20)
    plan = scheduler.next_plan()
    scheduler.postpone(plan, [0, 1, 2, 3])
    scheduler.commit(plan)
    add(scheduler, "e", 1, grammar=None)
    assert scheduler.plan() is None
    for name in "abcd":
        scheduler.unblock(name)
    assert len(scheduler.next_plan().slots) == 4
    scheduler = make_scheduler()
    add(scheduler, "late", 8)  # The prompt has two whole blocks.
    first = scheduler.next_plan()
    scheduler.postpone(first, [0])
    scheduler.commit(first)
    blocks = scheduler._running[0].block_ids
    assert [scheduler._pool._block_hashes[block] is not None for block in blocks] == [True, False]
    scheduler.unblock("late")
    scheduler.step()
    assert all(scheduler._pool._block_hashes[block] is not None for block in blocks)


def test_grammar_rows_count_their_drafts_and_postponed_ones_have_none() -> None:
    scheduler = make_scheduler(num_draft_tokens=2)
    add(scheduler, "a", 3, max_tokens=20)
    first, second = scheduler.next_plans(2)
    proposed = StepResult(first.step_id, [7], {}, {}, {}, proposed={0: [8, -1]})
    assert scheduler.proposed([proposed]) == {"a": [8, -1]}
    scheduler.commit(first, proposed)
    (row,) = scheduler.grammar_rows(second)
    assert (row.num_outputs, row.num_drafts, second.num_scheduled) == (1, 2, [3])
    scheduler.postpone(second, [0])
    scheduler.unblock("a")
    third = scheduler.next_plan()  # The plan is made before the masks reject both drafts.
    assert scheduler.commit(second) == []
    (row,) = scheduler.grammar_rows(third)
    assert (row.num_outputs, third.num_draft_tokens) == (1, [0])
    fourth = scheduler.next_plan()
    (update,) = scheduler.commit(third)
    assert update.token_ids == [7] and fourth.num_draft_tokens == [2]
    (update,) = scheduler.commit(fourth, StepResult(fourth.step_id, [8, 9], {}, {}, {}, {0: 1}))
    assert update.token_ids == [8, 9] and scheduler.sequences()[0].num_committed == 6


class ForgettingWorker(ModelWorker):
    late: frozenset[int | None] = frozenset()  # seeds of requests whose draft tokens are void

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
    """Run random steps in which the masks of some requests are late for a time."""

    worker_type = ForgettingWorker
    workers: list[ForgettingWorker]  # type: ignore[assignment]

    def add(self, request: GenerateRequest) -> None:
        if random.Random(request.request_id).random() < 0.6:
            sampling = msgspec.structs.replace(request.sampling, grammar=GRAMMAR)
            request = msgspec.structs.replace(request, sampling=sampling)
        super().add(request)

    def launch(self, plans: list[StepPlan]) -> None:
        late = []
        for rank, worker, plan in zip(self.scheduler.ranks, self.workers, plans, strict=True):
            rows = [row for row in rank.grammar_rows(plan) if self.rng.random() < 0.3]
            late.append([row.row for row in rows])
            worker.late = frozenset(
                self.requests[row.request_id].sampling.seed for row in rows if row.num_drafts
            )
        super().launch(plans)
        for at, (rank, rows) in enumerate(zip(self.scheduler.ranks, late, strict=True)):
            rank.postpone(plans[at], rows)
            for row in rows:
                self.workers[at].forget_sample(plans[at].slots[row])

    def check_counters(self) -> None:
        super().check_counters()
        live = self.scheduler.sequences()
        for sequence in live:
            if sequence.is_postponed and (not self.in_flight or self.rng.random() < 0.5):
                self.scheduler.unblock(sequence.request_id)
        num_constrained = sum(sequence.is_constrained for sequence in live)
        assert self.scheduler._requests.num_constrained == num_constrained


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    limits=any_limits(), num_ranks=st.sampled_from((1, 1, 2)), seed=st.integers(0, 2**32),
    depth=st.integers(0, 1), trouble=st.booleans(),
)  # fmt: skip
def test_late_masks_never_change_tokens(
    limits: SchedulerLimits, num_ranks: int, seed: int, depth: int, trouble: bool
) -> None:
    LateTrace(limits, num_ranks, seed=seed, depth=depth, trouble=trouble).run(14).check_outputs()
