"""Run random traces against a worker that records the content of every KV cell.

The worker executes plans in order, while commits lag by up to two steps. A KV cell holds the
identity of the whole token prefix up to its position, so any wrong read is detected. The token at a
position depends only on the request, so the output of each request is known in advance.

Rows may verify accepted, rejected or missing draft tokens. No step may read the KV cell of a
rejected draft token, which is after the end of its sequence.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.base.errors import InvalidRequestError, OverloadedError
from negamax.scheduler.draft_length import AdaptiveDraftLength, FixedDraftLength, make_rank_lengths
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import SequenceUpdate, StepPlan, StepResult
from tests.unit.plan_support import make_limits

EOS_IDS = frozenset({0, 1})
STOP_ID = 2
GARBAGE = -1  # marks a token or a cell of a failed row


def sampled_token(seed: int, position: int) -> int:
    """Return the token of request `seed` at `position`.

    Tokens 0 and 1 end the request, 2 may be a stop token, and most tokens repeat.
    """
    return random.Random(seed * 100_003 + position).choice([0, 1, 2] + [3, 4, 5] * 8)


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int]
    sampling: SamplingParams
    num_computed: int
    lost: bool = False  # A step of the request failed, so that its cells and tokens are void.


@dataclass
class ModelWorker:
    """Execute plans on a memory of prefix identities, and check each read and write."""

    block_size: int
    rows: dict[int, Row] = field(default_factory=dict)
    # (block, offset) -> identity of the prefix that ends there
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    # (identity of the parent, token) -> identity of the longer prefix
    identities: dict[tuple[int, int], int] = field(default_factory=dict)
    # (request seed, position) -> number of times that it was sampled
    sampled: dict[tuple[int, int], int] = field(default_factory=dict)
    draft_quality: float = 0.5  # probability that a draft token is accepted

    def execute(self, plan: StepPlan, *, lose: bool, bad_rows: frozenset[int]) -> StepResult:
        for new in plan.new_rows:
            self.rows[new.slot] = Row(
                list(new.token_ids), list(new.block_ids), new.sampling, new.num_computed
            )
        for slot, block in zip(plan.appended_slots, plan.appended_blocks, strict=True):
            self.rows[slot].blocks.append(block)
        written: set[tuple[int, int]] = set()
        token_ids: list[int] = []
        num_accepted: dict[int, int] = {}
        for index, slot in enumerate(plan.slots):
            row, num_drafts = self.rows[slot], plan.num_draft_tokens[index]
            row.lost |= lose or index in bad_rows
            drafts = self._drafts(row, num_drafts)
            start, end = row.num_computed, row.num_computed + plan.num_scheduled[index]
            known = len(row.tokens) + num_drafts
            assert end == known if plan.needs_sampling[index] else end < known
            assert end <= len(row.blocks) * self.block_size, "the row has a token without a block"
            self._run(row, [*row.tokens, *drafts], start, end, written)
            if plan.needs_sampling[index]:
                sampled = self._sample(row, drafts)
                token_ids += sampled
                if num_drafts:
                    num_accepted[index] = len(sampled) - 1
                end -= num_drafts - (len(sampled) - 1)
            row.num_computed = end
        errors = dict.fromkeys(bad_rows, "bad row")
        return StepResult(plan.step_id, token_ids, {}, {}, errors, num_accepted)

    def _drafts(self, row: Row, count: int) -> list[int]:
        seed, position = row.sampling.seed, len(row.tokens)
        assert seed is not None
        rng = random.Random(f"{seed} {position}")
        return [
            sampled_token(seed, position + place)
            if rng.random() < self.draft_quality
            else rng.choice([GARBAGE, 3, 4, 5])
            for place in range(count)
        ]

    def _run(
        self, row: Row, tokens: list[int], start: int, end: int, written: set[tuple[int, int]]
    ) -> None:
        assert row.sampling.logit_bias is not None
        identity = self._identity((-1, int(row.sampling.logit_bias[0])))  # the salt
        for position in range(end):
            identity = self._identity((identity, tokens[position]))
            cell = (row.blocks[position // self.block_size], position % self.block_size)
            if position < start:
                assert row.lost or self.cells[cell] == identity, f"wrong KV at position {position}"
            else:
                assert cell not in written, "the cell is written twice in a step"
                written.add(cell)
                self.cells[cell] = GARBAGE if row.lost else identity

    def _sample(self, row: Row, drafts: list[int]) -> list[int]:
        seed = row.sampling.seed
        assert seed is not None
        sampled: list[int] = []
        for draft in [*drafts, None]:
            position = len(row.tokens)
            token = GARBAGE if row.lost else sampled_token(seed, position)
            if not row.lost:
                self.sampled[seed, position] = self.sampled.get((seed, position), 0) + 1
                assert self.sampled[seed, position] == 1, "the position is sampled twice"
            row.tokens.append(token)
            sampled.append(token)
            if token != draft or row.lost:
                break
        return sampled

    def _identity(self, key: tuple[int, int]) -> int:
        return self.identities.setdefault(key, len(self.identities))


def prompt_of(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    family = random.Random(rng.randrange(3))
    common = [family.randrange(3, 6) for _ in range(rng.randint(1, 24))]
    return (*common, *(rng.randrange(3, 6) for _ in range(rng.randint(0, 6))))


def request_of(seed: int, limits: SchedulerLimits) -> GenerateRequest:
    rng = random.Random(seed + 1_000_000)
    salt = rng.choice((0, 0, 0, 1))
    sampling = SamplingParams(
        seed=seed,
        max_tokens=rng.randint(1, 20),
        min_tokens=rng.choice((0, 0, 5)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(STOP_ID,) if rng.random() < 0.3 else (),
        prompt_logprobs=0 if rng.random() < 0.2 else None,
        logit_bias={0: salt},  # The simulated worker gets the salt in the bias.
    )
    return GenerateRequest(
        request_id=f"request {seed}", prompt_token_ids=prompt_of(seed), sampling=sampling,
        priority=rng.choice((0, 0, 0, 1, -1)), cache_salt=str(salt), tenant=str(seed % 5 == 0),
    )  # fmt: skip


def expected_output(
    request: GenerateRequest, limits: SchedulerLimits
) -> tuple[list[int], str, int | None]:
    sampling, position = request.sampling, len(request.prompt_token_ids)
    assert sampling.seed is not None and sampling.max_tokens is not None
    tokens: list[int] = []
    while True:
        token = sampled_token(sampling.seed, position + len(tokens))
        tokens.append(token)
        if len(tokens) > sampling.min_tokens:
            if token in EOS_IDS and not sampling.ignore_eos:
                return tokens, "stop", None
            if token in sampling.stop_token_ids:
                return tokens, "stop", token
        if len(tokens) == sampling.max_tokens or position + len(tokens) == limits.max_model_len:
            return tokens, "length", None


class AnyDraftLength(FixedDraftLength):
    """Return a random length, often the maximum, and record every plan that was not lost."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._rng = most, random.Random(seed)

    def choose(self, num_rows: int) -> int:
        return self._rng.choice((self._most, self._rng.randint(0, self._most)))

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        assert plan.step_id == result.step_id


class Trace:
    """Run some ranks at random, with commits that lag by `depth` steps.

    Requests arrive, some are aborted or name a rank, and steps and rows fail.
    """

    worker_type = ModelWorker

    def __init__(
        self, limits: SchedulerLimits, num_ranks: int = 1, *, seed: int, depth: int, trouble: bool,
        joint: AdaptiveDraftLength | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.depth, self.trouble = limits, depth, trouble
        self.rng = random.Random(seed)
        lengths = [AnyDraftLength(limits.num_draft_tokens, seed + at) for at in range(num_ranks)]
        self.scheduler = GroupScheduler(
            limits, make_rank_lengths(joint, num_ranks) if joint else lengths
        )
        self.workers = [self.worker_type(limits.block_size) for _ in range(num_ranks)]
        # The results are None if the step was lost.
        self.in_flight: deque[tuple[list[StepPlan], list[StepResult] | None]] = deque()
        self.steps: list[list[StepPlan]] = []
        # per rank: slot -> number of drafts proposed after the last sampled token
        self.proposed: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self.requests: dict[str, GenerateRequest] = {}
        self.updates: dict[str, list[SequenceUpdate]] = {}
        self.ranks: dict[str, int] = {}  # request id -> rank on which it began to run
        self.lost = 0  # number of lost steps

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plans in self.steps for plan in plans]

    def run(self, num_requests: int) -> Trace:
        to_add = deque(self.rng.sample(range(10_000), num_requests))
        while to_add or self.scheduler.has_unfinished or self.in_flight:
            while to_add and self.rng.random() < 0.5:
                self.add(request_of(to_add.popleft(), self.limits))
            if self.trouble and self.rng.random() < 0.1 and self.requests:
                name = self.rng.choice(list(self.requests))
                update = self.scheduler.end(name, "abort")
                assert (update is None) == self.ended(name)
                self.receive([update] if update is not None else [])
            plans = self.scheduler.plan()
            if plans is not None:
                self.check_step(plans)
                self.launch(plans)
            else:
                assert self.in_flight or not self.scheduler.has_unfinished, "stuck"
            while len(self.in_flight) > (self.depth if plans is not None else 0):
                self.commit()
                if self.rng.random() < 0.5:
                    break
            self.check_counters()
        return self

    def add(self, request: GenerateRequest) -> None:
        pinned = self.rng.choice((None, None, None, self.rng.randrange(len(self.workers))))
        request = msgspec.structs.replace(request, data_parallel_rank=pinned)
        with suppress(InvalidRequestError, OverloadedError):
            self.scheduler.add(request)
            self.requests[request.request_id] = request
            self.updates[request.request_id] = []

    def launch(self, plans: list[StepPlan]) -> None:
        self.steps.append(plans)
        lose = self.trouble and self.rng.random() < 0.02
        results = []
        for plan, worker in zip(plans, self.workers, strict=True):
            rows = range(len(plan.slots))
            bad = frozenset(row for row in rows if self.trouble and self.rng.random() < 0.02)
            results.append(worker.execute(plan, lose=lose, bad_rows=bad))
        self.lost += lose
        self.in_flight.append((plans, None if lose else results))

    def commit(self) -> None:
        plans, results = self.in_flight.popleft()
        if results is None:
            self.receive(self.scheduler.fail(plans, "step lost"))
        else:
            self.receive(self.scheduler.commit(plans, results))

    def ended(self, name: str) -> bool:
        return bool(self.updates[name]) and self.updates[name][-1].finish_reason is not None

    def receive(self, updates: list[SequenceUpdate]) -> None:
        assert len({update.request_id for update in updates}) == len(updates)
        for update in updates:
            assert not self.ended(update.request_id), "an update follows the end of the request"
            assert update.token_ids or update.finish_reason in ("abort", "error")
            assert (update.error is not None) == (update.finish_reason == "error")
            self.updates[update.request_id].append(update)

    def check_step(self, plans: list[StepPlan]) -> None:
        assert len(plans) == len(self.workers)
        assert any(plan.slots or plan.copies for plan in plans)
        assert len({plan.step_id for plan in plans}) == 1, "out of step"
        size, is_decode = plans[0].of_all, True
        assert all(plan.of_all == size for plan in plans) and (size is None) == (len(plans) == 1)
        for at, (rank, plan) in enumerate(zip(self.scheduler.ranks, plans, strict=True)):
            starts = {slot: row.num_computed for slot, row in self.workers[at].rows.items()}
            starts |= {row.slot: row.num_computed for row in plan.new_rows}
            self.check_plan(rank, plan, starts, self.proposed[at])
            columns = plan.num_scheduled, plan.num_draft_tokens, plan.needs_sampling
            for sequence, count, drafts, samples in zip(
                rank.latest_sequences(), *columns, strict=True
            ):
                name, pinned = sequence.request_id, sequence.request.data_parallel_rank
                assert self.ranks.setdefault(name, at) == at == (at if pinned is None else pinned)
                generates = count == 1 + drafts and starts[sequence.slot] >= sequence.prompt_len
                is_decode &= generates and samples
        if size is not None:  # Every rank gets the sizes of the other ranks.
            assert size.num_tokens == max(plan.num_tokens for plan in plans)
            assert size.num_rows == max(len(plan.slots) for plan in plans)
            drafts = max(max(*plan.num_draft_tokens, plan.num_proposed, 0) for plan in plans)
            assert drafts <= size.num_drafts and size.is_decode == is_decode

    def check_plan(
        self, rank: Scheduler, plan: StepPlan, starts: dict[int, int], proposed: dict[int, int]
    ) -> None:
        limits, pool = self.limits, rank._pool
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert all(count >= 1 for count in plan.num_scheduled)
        assert len(set(plan.slots)) == len(plan.slots) <= limits.max_num_seqs
        assert all(0 <= slot < limits.max_num_seqs for slot in plan.slots)
        drafts, columns = plan.num_draft_tokens, (plan.num_scheduled, plan.num_draft_tokens)
        is_long = [count - num_drafts > 1 for count, num_drafts in zip(*columns, strict=True)]
        assert is_long == sorted(is_long)
        proposed |= {row.slot: 0 for row in plan.new_rows}
        for slot, number, is_sampled in zip(plan.slots, drafts, plan.needs_sampling, strict=True):
            assert 0 <= number <= min(proposed[slot], plan.num_proposed)
            if is_sampled:
                proposed[slot] = plan.num_proposed
        assert plan.num_proposed <= limits.num_draft_tokens
        assert len({row.slot for row in plan.new_rows}) == len(plan.new_rows)
        assert {row.slot for row in plan.new_rows} <= set(plan.slots)
        by_slot = {sequence.slot: sequence for sequence in rank._running}
        assert len(by_slot) == len(rank._running)
        for slot, count, num_drafts in zip(plan.slots, *columns, strict=True):
            sequence, start = by_slot[slot], starts[slot]
            assert not num_drafts or start >= sequence.prompt_len, "drafts follow a prompt token"
            first, last = start // limits.block_size, (start + count - 1) // limits.block_size
            for block in sequence.block_ids[first : last + 1]:
                assert pool.ref_count(block) == 1, "the row writes a shared block"
                assert pool._block_hashes[block] is None, "the row writes a cached block"
            assert sequence.num_total <= sequence.limit, "the plan exceeds a length limit"

    def check_counters(self) -> None:
        for rank in self.scheduler.ranks:
            held = [block for sequence in rank._running for block in sequence.block_ids]
            held += [block for load in rank.host._loads for block in load.held_blocks]
            assert rank.num_free_blocks == self.limits.num_blocks - len(set(held))
            for block in set(held):
                assert rank._pool.ref_count(block) == held.count(block)
            assert rank.num_running <= self.limits.max_num_seqs
            orders = [sequence.order for sequence in rank._running]
            assert orders == sorted(orders)
        live = [name for name in self.requests if not self.ended(name)]
        running = sum(rank.num_running for rank in self.scheduler.ranks)
        assert running + self.scheduler.num_waiting == len(live)
        assert self.scheduler.has_unfinished == bool(live)
        assert all((name in self.scheduler) == (name in live) for name in self.requests)

    def check_outputs(self) -> None:
        for name, request in self.requests.items():
            updates = self.updates[name]
            tokens = [token for update in updates for token in update.token_ids]
            expected, *reasons = expected_output(request, self.limits)
            last = updates[-1]
            if last.finish_reason in ("abort", "error"):
                assert self.trouble and tokens == expected[: len(tokens)]
            else:
                got = tokens, [last.finish_reason, last.stop_reason]
                assert got == (expected, reasons)
            with_tokens = [update for update in updates if update.token_ids]
            prompt_len, most = len(request.prompt_token_ids), self.limits.num_draft_tokens + 1
            assert all(len(update.token_ids) <= most for update in with_tokens)
            cached = {update.num_cached_tokens for update in with_tokens}
            assert len(cached) <= 1 and all(0 <= number < prompt_len for number in cached)
            assert request.sampling.prompt_logprobs is None or not cached - {0}
        assert sum(rank.generated_tokens for rank in self.scheduler.ranks) == sum(
            len(update.token_ids) for updates in self.updates.values() for update in updates
        )
        for rank in self.scheduler.ranks:
            assert rank.num_free_blocks == self.limits.num_blocks
            assert sorted(rank._free_slots) == list(range(self.limits.max_num_seqs))


@st.composite
def any_limits(draw: st.DrawFn) -> SchedulerLimits:
    block_size = draw(st.sampled_from((1, 2, 4, 8)))
    max_model_len = draw(st.integers(20, 50))
    whole_window = -(-max_model_len // block_size)
    return SchedulerLimits(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from((1, 3, 8, 17, 64))),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=draw(st.integers(whole_window * 2 // 3, whole_window * 3)),
        enable_prefix_caching=draw(st.sampled_from((True, True, False))),
        max_queued_requests=draw(st.sampled_from((3, 100))),
        eos_token_ids=EOS_IDS,
        num_draft_tokens=draw(st.sampled_from((0, 0, 1, 3, 6))),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    limits=any_limits(), num_ranks=st.sampled_from((1, 1, 2, 3)), seed=st.integers(0, 2**32),
    depth=st.integers(0, 2), trouble=st.booleans(),
)  # fmt: skip
def test_random_traces(
    limits: SchedulerLimits, num_ranks: int, seed: int, depth: int, trouble: bool
) -> None:
    first = Trace(limits, num_ranks, seed=seed, depth=depth, trouble=trouble).run(14)
    first.check_outputs()
    if seed % 8 == 0:  # A second run must give the same plans; one of eight seeds checks this.
        again = Trace(limits, num_ranks, seed=seed, depth=depth, trouble=trouble).run(14)
        assert first.steps == again.steps and first.updates == again.updates


def standard_traces() -> list[Trace]:
    traces = []
    for seed in range(16):
        limits = make_limits(
            max_num_seqs=5, max_num_batched_tokens=16, max_model_len=48, num_blocks=14,
            eos_token_ids=EOS_IDS, num_draft_tokens=seed % 4,
        )  # fmt: skip
        traces.append(Trace(limits, seed=seed, depth=seed % 3, trouble=seed % 2 == 1).run(30))
    return traces


def test_traces_reach_every_mechanism() -> None:
    traces = standard_traces()
    ranks = [rank for trace in traces for rank in trace.scheduler.ranks]
    assert sum(rank.preemption_count for rank in ranks) >= 50
    assert sum(rank.cached_prompt_tokens for rank in ranks) >= 500
    reasons = [updates[-1].finish_reason for trace in traces for updates in trace.updates.values()]
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort", "error")) >= 10
    new_rows = [row for trace in traces for plan in trace.plans for row in plan.new_rows]
    assert sum(len(row.token_ids) > row.prompt_len for row in new_rows) >= 30  # resumed
    assert sum(rank.drafts.num_rows for rank in ranks) >= 500
    accepted = sum(sum(rank.drafts.accepted_per_position) for rank in ranks)
    assert min(accepted, sum(rank.drafts.num_tokens for rank in ranks) - accepted) >= 300
    for trace in traces:
        trace.check_outputs()


def digest_plans() -> str:
    return sha256(repr([trace.plans for trace in standard_traces()]).encode()).hexdigest()


def test_plans_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    root = Path(__file__).parents[2]
    other = subprocess.run(
        [sys.executable, str(Path(__file__))],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert other.stdout == digest_plans() + "\n"


if __name__ == "__main__":
    print(digest_plans())
