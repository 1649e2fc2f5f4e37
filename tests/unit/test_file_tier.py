from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.engine.core.executor import FileProgressLog
from negamax.scheduler.file_tier import FileTier
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.step import FileCopies, FileProgress, HostCopies, StepPlan, StepResult
from tests.unit.plan_support import RankScheduler, make_limits, make_result, make_scheduler
from tests.unit.test_host_tier import UNKNOWN, HostTrace, HostWorker
from tests.unit.test_scheduler_traces import EOS_IDS, any_limits

SMALL = {"block_size": 2, "num_blocks": 26, "num_host_blocks": 24, "num_file_blocks": 120}
Content = list[int]  # identities of the cells of a block


@dataclass
class FileWorker(HostWorker):
    """Copy blocks to and from files with a delay, and check each copy.

    The worker may also run the copies of lost plans. A host block must not change during a write,
    and no step may use it during a read. Other engines delete files, and some files are damaged.
    """

    files: dict[bytes, Content] = field(default_factory=dict)
    queue: deque[tuple[int, FileCopies, list[Content]]] = field(default_factory=deque)
    progress: FileProgress = field(default_factory=lambda: FileProgress(0))
    num_read: int = 0
    num_missing: int = 0
    fails: bool = False

    def execute(self, plan: StepPlan, *, lose: bool, bad_rows: frozenset[int]) -> StepResult:
        copies = plan.copies or HostCopies([], [], [], [])
        busy = {place for _, files, _ in self.queue for place in self.places_of(files)}
        assert busy.isdisjoint(copies.stored_places), "a store into a block that a file uses"
        result = super().execute(plan, lose=lose, bad_rows=bad_rows)
        if copies.files is not None and not (lose and self.rng.random() < 0.5):
            self.launch(plan.step_id, copies.files)
        if lose:
            return result
        while self.queue and self.rng.random() < (0.8 if copies.is_awaited else 0.3):
            self.complete(*self.queue.popleft())
        if self.files and self.rng.random() < 0.05:
            del self.files[self.rng.choice(list(self.files))]
        progress, self.progress = self.progress, msgspec.structs.replace(self.progress, missing=[])
        return msgspec.structs.replace(result, files=progress)

    def places_of(self, files: FileCopies) -> list[int]:
        return [*files.written_places, *files.read_places]

    def read_host(self, place: int) -> Content:
        return [self.host[place, at] for at in range(self.block_size)]

    def launch(self, step_id: int, files: FileCopies) -> None:
        for place in files.read_places:
            self.host |= {(place, at): UNKNOWN for at in range(self.block_size)}
        written = [self.read_host(place) for place in files.written_places]
        assert all(UNKNOWN not in content for content in written)
        self.queue.append((step_id, files, written))

    def complete(self, step_id: int, files: FileCopies, written: list[Content]) -> None:
        missing = []
        for name, place in zip(files.read_hashes, files.read_places, strict=True):
            content = self.files.get(name)
            if content is None or self.rng.random() < 0.05 or self.fails:
                missing.append(name)
                self.files.pop(name, None)
            else:
                self.host |= {(place, at): content[at] for at in range(self.block_size)}
        writes = zip(files.written_hashes, files.written_places, written, strict=True)
        for name, place, before in writes:
            assert self.read_host(place) == before, "a host block changed while it was written"
            if not self.fails:
                self.files[name] = before
        if files.deletes_all:
            self.files.clear()
        self.num_read += len(files.read_hashes) - len(missing)
        self.num_missing += len(missing)
        missing += self.progress.missing
        self.progress = FileProgress(0, step_id, step_id, missing, is_off=self.fails)


class FileTrace(HostTrace):
    worker_type = FileWorker

    def restart(self) -> FileTrace:
        """Return a trace of a new engine that finds the files of this one."""
        rules = {"depth": self.depth, "trouble": self.trouble}
        seed = self.rng.getrandbits(32)
        again = type(self)(self.limits, len(self.workers), seed=seed, **rules)
        for rank, old, new in zip(again.scheduler.ranks, self.workers, again.workers, strict=True):
            assert isinstance(old, FileWorker) and isinstance(new, FileWorker)
            new.files, new.identities = old.files, old.identities
            rank.host.files.add_found(old.files)
        return again

    def check_counters(self) -> None:
        super().check_counters()
        for rank in self.scheduler.ranks:
            files: FileTier = rank.host.files
            assert files.num_used <= files.num_blocks or not files.num_blocks
            assert len(files._writes) <= files._most_writes


def run_files(
    limits: SchedulerLimits, num_ranks: int = 1, *, num_requests: int = 20, **rules: Any
) -> list[FileTrace]:
    """Run an engine, then a second one on the files of the first."""
    first = FileTrace(limits, num_ranks, **rules)
    first.run(num_requests).check_outputs()
    second = first.restart()
    second.run(num_requests).check_outputs()
    for trace in (first, second):
        for rank in trace.scheduler.ranks:
            assert not rank.host.has_writes
            assert not any(read.sequences for read in rank.host.files.reads)
    return [first, second]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    limits=any_limits(),
    num_host_blocks=st.integers(1, 60),
    num_file_blocks=st.integers(1, 200),
    stores_new=st.booleans(),
    num_ranks=st.sampled_from((1, 1, 2)),
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 2),
    trouble=st.booleans(),
)
def test_random_traces_with_files(
    limits: SchedulerLimits,
    num_host_blocks: int,
    num_file_blocks: int,
    stores_new: bool,
    num_ranks: int,
    **rules: Any,
) -> None:
    """Read and write files between any steps, with aborts, lost steps, lost files and a restart."""
    limits = replace(
        limits,
        num_blocks=min(limits.num_blocks, limits.max_model_len // limits.block_size + 2),
        num_host_blocks=num_host_blocks,
        num_file_blocks=num_file_blocks,
        stores_new_blocks=stores_new,
        enable_prefix_caching=True,
    )
    run_files(limits, num_ranks, **rules)


def test_random_traces_read_write_and_miss() -> None:
    """Check that random traces read files, write files and miss blocks; else they prove nothing."""
    limits = make_limits(**SMALL, max_model_len=50, eos_token_ids=EOS_IDS)
    rules = {"num_requests": 100, "depth": 1, "trouble": True}
    pairs = [run_files(limits, seed=seed, **rules) for seed in range(5)]
    for traces in zip(*pairs, strict=True):  # traces before the restart, then after it
        workers = [worker for trace in traces for worker in trace.workers]
        files = [rank.host.files for trace in traces for rank in trace.scheduler.ranks]
        assert sum(each.num_hits for each in files) > 100
        assert sum(each.num_written for each in files) > 500
        assert sum(worker.num_missing for worker in workers) > 20  # type: ignore[attr-defined]
        assert sum(trace.lost for trace in traces) > 20


def test_an_error_switches_the_files_off_and_requests_go_on() -> None:
    limits = make_limits(**SMALL, max_model_len=50, eos_token_ids=EOS_IDS)
    first = FileTrace(limits, seed=1, depth=1, trouble=False)
    first.run(60).check_outputs()
    second = first.restart()
    (worker,), (rank,) = second.workers, second.scheduler.ranks
    assert isinstance(worker, FileWorker) and rank.host.files.num_used > 20
    worker.fails = True
    second.run(60).check_outputs()
    assert rank.host.files.num_blocks == rank.host.files.num_used == worker.num_read == 0
    assert worker.num_missing > 0


def test_a_group_has_a_block_only_if_all_its_ranks_have_it() -> None:
    log = FileProgressLog([2, 3])
    result = StepResult(9, [], {}, {}, {})
    assert log.complete(result) is result  # without files
    own = FileProgress(2, 5, 6, [b"a"], bytes_read=10)
    first = log.complete(msgspec.structs.replace(result, files=own)).files
    assert first == FileProgress(2, -1, -1, [b"a"], bytes_read=10)  # One rank has not reported.
    log.add(FileProgress(3, 4, 7, [b"b"], bytes_read=20, num_errors=1))
    log.add(FileProgress(3, 8, 7, [b"c"], is_off=True, bytes_read=30, num_errors=1))
    own = FileProgress(2, 6, 6, bytes_read=10)
    joined = log.complete(msgspec.structs.replace(result, files=own)).files
    expected = FileProgress(2, 6, 6, [b"b", b"c"], is_off=True, bytes_read=40, num_errors=1)
    assert joined == expected


def make_tier(**changes: int) -> RankScheduler:
    sizes = {"num_blocks": 8, "num_host_blocks": 8, "num_file_blocks": 40}
    return make_scheduler(**{**sizes, **changes})


def finish(scheduler: RankScheduler) -> list[FileCopies]:
    """Run all requests and writes to their end. Every copy completes in the step of its plan."""
    made = []
    while scheduler.has_unfinished or scheduler.has_writes:
        plan = scheduler.next_plan()
        step, copies = plan.step_id, plan.copies
        done = FileProgress(0, step, step)
        scheduler.commit(plan, make_result(plan, loaded_step=step, files=done))
        if copies is not None and copies.files is not None:
            made.append(copies.files)
    return made


def fill_files() -> RankScheduler:
    scheduler = make_tier()
    for name in "abc":
        scheduler.add(name, 20, max_tokens=1)
        finish(scheduler)
    return scheduler


def test_blocks_are_written_without_requests_and_read_before_they_are_loaded() -> None:
    scheduler = make_tier()
    files = scheduler.rank.host.files
    written = []
    for name in "abc":
        scheduler.add(name, 20, max_tokens=1)
        written += [block for copies in finish(scheduler) for block in copies.written_hashes]
        assert files.num_used == len(written) == len(set(written))
    assert len(written) == 15
    scheduler.add("a again", 20, max_tokens=1)
    plan = scheduler.next_plan()
    assert plan.copies is not None and plan.copies.files is not None and not plan.slots
    assert plan.copies.files.read_hashes == written[:4] and plan.copies.is_awaited
    assert scheduler.num_waiting == 1
    late = FileProgress(0, plan.step_id - 1, plan.step_id - 1)
    scheduler.commit(plan, make_result(plan, files=late))
    waiting = scheduler.next_plan()
    assert not waiting.slots and waiting.copies == HostCopies([], [], [], [], True)
    missing = FileProgress(0, plan.step_id, plan.step_id, [written[2]])
    scheduler.commit(waiting, make_result(waiting, files=missing))
    load = scheduler.next_plan()
    assert load.copies is not None and len(load.copies.loaded_blocks) == 2
    scheduler.commit(load, make_result(load, loaded_step=load.step_id))
    (row,) = scheduler.next_plan().new_rows
    assert row.num_computed == 8  # The prefix ends at the missing block.


def test_a_request_does_not_wait_for_a_read_that_never_ends() -> None:
    scheduler = fill_files()
    scheduler.add("a again", 20, max_tokens=1)
    plan = scheduler.next_plan()
    assert plan.copies is not None and plan.copies.files is not None
    scheduler.commit(plan, make_result(plan, files=FileProgress(0, is_off=True)))
    assert scheduler.next_plan().new_rows and not scheduler.has_writes
    host, places = scheduler.rank.host.blocks, plan.copies.files.read_places
    assert len(places) == 4 and all(host.ref_count(place) == 1 for place in places)


def test_a_reset_forgets_blocks_on_their_way_into_files() -> None:
    scheduler = make_tier()
    files = scheduler.rank.host.files
    scheduler.add("a", 20, max_tokens=1)
    while not files._writes:
        plan = scheduler.next_plan()
        scheduler.commit(plan)
    scheduler.reset_prefix_cache()
    copies = finish(scheduler)
    assert sum(each.deletes_all for each in copies) == 1 and copies[-1].deletes_all
    assert files.num_used == 0


def test_reads_of_files_are_bounded_by_admission_and_salt() -> None:
    scheduler = fill_files()
    scheduler.add("a again", 20, max_tokens=1)
    plan = scheduler.next_plan()
    done = FileProgress(0, plan.step_id, plan.step_id)
    scheduler.commit(plan, make_result(plan, files=done))
    scheduler.rank.host.blocks.evict()  # Other requests took the host blocks.
    (row,) = scheduler.next_plan().new_rows
    assert row.num_computed == 0
    scheduler = fill_files()
    scheduler.add("a salted", 20, max_tokens=1, cache_salt="x")
    assert scheduler.next_plan().new_rows


def test_blocks_in_constant_use_are_reported_before_their_files_go() -> None:
    scheduler = make_tier(num_blocks=32, num_host_blocks=32, num_file_blocks=20)
    used: list[bytes] = []
    for number in range(6):
        for name, length in (("a again", 20), (chr(ord("b") + number), 12)):
            scheduler.add(name, length, max_tokens=1)
            used += [block for copies in finish(scheduler) for block in copies.used_hashes]
    tokens = [1000 * ord("a") + at for at in range(4)]  # first block of a (see `make_request`)
    first = BlockHashes(tokens, block_size=4, salt="")[0]
    assert first in used and first in scheduler.rank.host.files
    assert scheduler.rank.host.files.num_used == 20
