from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.step import HostCopies, StepPlan, StepResult
from tests.unit.plan_support import RankScheduler, make_limits, make_result, make_scheduler
from tests.unit.test_scheduler_traces import EOS_IDS, GARBAGE, ModelWorker, Trace, any_limits

UNKNOWN = -2  # marks a cell whose load is not yet reported as complete


@dataclass
class HostWorker(ModelWorker):
    """Run copies in plan order at once, and report complete loads with a delay.

    No step may read a cell whose load is not reported.
    """

    host: dict[tuple[int, int], int] = field(default_factory=dict)
    loads: deque[tuple[int, dict[tuple[int, int], int]]] = field(default_factory=deque)
    reported: int = -1
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    num_loaded: int = 0

    def execute(self, plan: StepPlan, *, lose: bool, bad_rows: frozenset[int]) -> StepResult:
        copies = plan.copies or HostCopies([], [], [], [])
        places = range(self.block_size)
        for block, place in zip(copies.stored_blocks, copies.stored_places, strict=True):
            for at in places:
                assert self.cells[block, at] != UNKNOWN
                self.host[place, at] = GARBAGE if lose else self.cells[block, at]
        loaded: dict[tuple[int, int], int] = {}
        for place, block in zip(copies.loaded_places, copies.loaded_blocks, strict=True):
            loaded |= {(block, at): self.host[place, at] for at in places}
        if lose:
            self.cells |= dict.fromkeys(loaded, GARBAGE)
        elif loaded:
            self.loads.append((plan.step_id, loaded))
            self.cells |= dict.fromkeys(loaded, UNKNOWN)
            self.num_loaded += len(loaded)
        result = super().execute(plan, lose=lose, bad_rows=bad_rows)
        while self.loads and self.rng.random() < (0.8 if copies.is_awaited else 0.3):
            self.reported, cells = self.loads.popleft()
            self.cells |= cells
        return msgspec.structs.replace(result, loaded_step=self.reported)


class HostTrace(Trace):
    worker_type = HostWorker

    def run(self, num_requests: int) -> HostTrace:
        super().run(num_requests)
        while (plans := self.scheduler.plan()) is not None:  # loads of aborted requests
            self.launch(plans)
            self.commit()
        for rank in self.scheduler.ranks:
            unplanned = len(rank.host._new_stores)  # Writes remain if files are off.
            unplanned += len(rank.host.files._writes)  # These exist only if files are off.
            assert rank.host.blocks.num_free + unplanned == rank.host.num_blocks
            assert not rank.host.has_loads and rank.num_waiting == 0
        return self

    def check_counters(self) -> None:
        super().check_counters()
        if self.rng.random() < 0.01:
            self.scheduler.reset_prefix_cache()


def run_trace(
    limits: SchedulerLimits, num_ranks: int = 1, *, num_requests: int = 25, **rules: Any
) -> HostTrace:
    trace = HostTrace(limits, num_ranks, **rules)
    trace.run(num_requests).check_outputs()
    return trace


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    limits=any_limits(), num_host_blocks=st.integers(1, 200), stores_new=st.booleans(),
    num_ranks=st.sampled_from((1, 1, 2)), seed=st.integers(0, 2**32), depth=st.integers(0, 2),
    trouble=st.booleans(),
)  # fmt: skip
def test_random_traces_with_host_memory(
    limits: SchedulerLimits, num_host_blocks: int, stores_new: bool, num_ranks: int, **rules: Any
) -> None:
    """Load and store between any steps, with aborts, preemptions, lost steps, small pools."""
    limits = replace(
        limits,
        num_blocks=min(limits.num_blocks, limits.max_model_len // limits.block_size + 2),
        num_host_blocks=num_host_blocks,
        stores_new_blocks=stores_new,
        enable_prefix_caching=True,
    )
    run_trace(limits, num_ranks, **rules)


def test_random_traces_load_and_evict() -> None:
    """Check that random traces load and evict blocks; else the traces above prove nothing."""
    sizes = {"max_model_len": 50, "block_size": 2, "num_blocks": 26, "eos_token_ids": EOS_IDS}
    for host_blocks, stores_new in ((12, True), (80, True), (80, False)):
        own = {"num_host_blocks": host_blocks, "stores_new_blocks": stores_new}
        limits = make_limits(**sizes, **own)
        rules = {"num_requests": 100, "depth": 1, "trouble": True}
        traces = [run_trace(limits, seed=seed, **rules) for seed in range(7)]
        loaded = sum(worker.num_loaded for trace in traces for worker in trace.workers)  # type: ignore[attr-defined]
        hosts = [rank.host for trace in traces for rank in trace.scheduler.ranks]
        assert loaded > 100
        assert host_blocks > 12 or sum(host.blocks.eviction_count for host in hosts) > 100


def make_tier(**changes: int) -> RankScheduler:
    return make_scheduler(**{"num_blocks": 8, "num_host_blocks": 16, **changes})


def finish(scheduler: RankScheduler) -> None:
    """Run all requests to their end. Every load completes in the step of its plan."""
    while scheduler.has_unfinished:
        plan = scheduler.next_plan()
        scheduler.commit(plan, make_result(plan, loaded_step=plan.step_id))


def run_alone(scheduler: RankScheduler, name: str, prompt: list[int] | int, **fields: str) -> None:
    scheduler.add(name, prompt, max_tokens=1, **fields)
    finish(scheduler)


def test_a_prompt_that_left_the_gpu_is_loaded_before_its_admission() -> None:
    scheduler = make_tier()
    for name in "ab":  # The prompts need 5 and 7 blocks, so b evicts blocks of a.
        run_alone(scheduler, name, 20 if name == "a" else 28)
    scheduler.add("again", 20, max_tokens=1)  # the same prompt as that of a
    first = scheduler.next_plan()
    assert not first.slots and first.copies is not None and first.copies.is_awaited
    assert len(first.copies.loaded_blocks) == len(set(first.copies.loaded_places)) > 0
    assert scheduler.num_waiting == 1 and scheduler.plan() is None
    scheduler.commit(first)
    waiting = scheduler.next_plan()  # The load is still not complete.
    assert not waiting.slots and waiting.copies == HostCopies([], [], [], [], True)
    scheduler.commit(waiting, make_result(waiting, loaded_step=first.step_id))
    (row,) = scheduler.next_plan().new_rows
    assert row.num_computed == 16  # The last block runs for its logits.
    assert set(first.copies.loaded_blocks) <= set(row.block_ids[:4])


def test_others_run_while_a_load_is_under_way_and_an_abort_keeps_the_blocks_until_its_end() -> None:
    scheduler = make_tier(num_blocks=12)
    for name, length in (("a", 20), ("b", 28), ("c", 20)):
        run_alone(scheduler, name, length)
    scheduler.add("again", 20)
    scheduler.add("d", 4, max_tokens=8)
    plan = scheduler.next_plan()
    assert plan.copies is not None and plan.copies.loaded_blocks
    assert [row.prompt_len for row in plan.new_rows] == [4]
    assert scheduler.end("again", "abort") is not None
    scheduler.commit(plan)
    assert scheduler.num_waiting == 0
    held = scheduler.num_free_blocks
    last = scheduler.next_plan()
    scheduler.commit(last, make_result(last, loaded_step=plan.step_id))
    assert scheduler.num_free_blocks > held
    finish(scheduler)
    assert scheduler.num_free_blocks == 12


def test_each_load_under_way_keeps_a_slot_for_its_sequence() -> None:
    scheduler = make_tier(num_blocks=40, num_host_blocks=60, max_num_seqs=3)
    for name in "abcd":
        run_alone(scheduler, name, 20)
    for name in "efghi":  # These prompts evict the blocks of all others.
        run_alone(scheduler, name, 32)
    for name in "abcd":
        scheduler.add(f"{name} again", 20)
    plan = scheduler.next_plan()
    assert plan.copies is not None and not plan.slots
    assert len(plan.copies.loaded_blocks) == 3 * 4
    scheduler.commit(plan, make_result(plan, loaded_step=plan.step_id))
    assert [row.num_computed for row in scheduler.next_plan().new_rows] == [16] * 3


def test_equal_prefixes_share_a_load_and_another_salt_or_token_finds_nothing() -> None:
    scheduler = make_tier(num_blocks=24, num_host_blocks=60)
    for name in "abcde":
        run_alone(scheduler, name, 20 if name == "a" else 32)
    tokens = [1000 * ord("a") + at for at in range(20)]
    for number in range(3):
        scheduler.add(f"{number}", [*tokens, 7 + number])
    plan = scheduler.next_plan()
    assert plan.copies is not None and len(plan.copies.loaded_blocks) == 5
    assert scheduler.num_waiting == 3
    assert scheduler.end("1", "abort") is not None and scheduler.num_waiting == 2
    scheduler.commit(plan, make_result(plan, loaded_step=plan.step_id))
    assert [row.num_computed for row in scheduler.next_plan().new_rows] == [20, 20]
    scheduler = make_tier(num_host_blocks=32)
    for name, length in (("a", 20), ("b", 32)):
        run_alone(scheduler, name, length)
    host = scheduler.rank.host
    run_alone(scheduler, "a salted", 20, cache_salt="x")
    run_alone(scheduler, "changed", [1, *tokens[1:]])
    assert host.num_hits == scheduler.cached_prompt_tokens == 0 < host.num_queries
    run_alone(scheduler, "again", 20)
    assert host.num_hits == scheduler.cached_prompt_tokens == 16


def test_a_full_host_pool_evicts_chains_and_may_store_only_hit_blocks() -> None:
    scheduler = make_tier(num_blocks=16, num_host_blocks=8)
    for name in "abc":  # Each prompt has 4 full blocks.
        run_alone(scheduler, name, 17)
    run_alone(scheduler, "d", 4)  # The plan of d stores the blocks of c.
    host = scheduler.rank.host
    assert host.num_used == 8 and host.blocks.eviction_count >= 4
    assert host.num_stored == 12
    scheduler = make_tier(num_blocks=16, stores_new_blocks=False)
    host = scheduler.rank.host
    run_alone(scheduler, "a", 17)
    run_alone(scheduler, "b", 17)
    assert host.num_stored == 0
    run_alone(scheduler, "again", 17)
    run_alone(scheduler, "c", 4)
    assert host.num_stored == 4
