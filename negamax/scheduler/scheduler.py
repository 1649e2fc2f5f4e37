"""Plan each step, allocate KV blocks, and turn results into updates for the callers.

Steps overlap: `plan` may be called before the last plan is committed. The worker executes plans in
order and stores each sampled token in the slot of its row. A later plan may therefore reuse freed
blocks and slots. A later plan may also contain a decode row whose input token is still unknown. A
row whose next token depends on a grammar mask is planned like other rows. If the mask is late,
`postpone` lets a later plan run the row's last token again.

A row with k draft tokens yields 1 to k+1 tokens. Until the row's step is committed, the scheduler
assumes that all drafts are accepted, and keeps their blocks. The commit subtracts rejected drafts.

Tenants share the rows of a batch. If a waiting request's tenant has at least two rows fewer than
another tenant, rows of the other tenant are preempted until the request fits.

Equal calls return equal plans: plans do not depend on time, string hashes or the order of sets.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

import msgspec

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.cache_log import CacheLog
from negamax.scheduler.draft_length import DraftLength, FixedDraftLength
from negamax.scheduler.encoder_cache import EncoderCache
from negamax.scheduler.host_tier import HostTier
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.plan_builder import PlanBuilder
from negamax.scheduler.prefix_cache import match_prefix
from negamax.scheduler.request_table import RequestTable
from negamax.scheduler.sequence import NEVER, NO_SLOT, DraftCounters, Sequence
from negamax.scheduler.shared_blocks import SharedBlocks
from negamax.scheduler.step import GrammarRow, NewRow, SequenceUpdate, StepPlan, StepResult
from negamax.scheduler.turns import Turns
from negamax.scheduler.waiting import (
    WaitingQueue,
    by_order,
    choose_victim,
    list_yielding,
    rank_waiting,
)

# Over all its steps, a running sequence costs `ROW_COST`, plus 1 per `TOKENS_PER_COST` tokens of KV
# cache. A cost of 1 is the time of one prompt token.
ROW_COST, TOKENS_PER_COST = 128, 4


@dataclass(frozen=True)
class _UncommittedPlan:
    step_id: int
    sequences: list[Sequence]  # the sequence of each row
    postponed: set[int]  # indices of postponed rows, whose samples are ignored


class Scheduler:
    """Continuous batching on one data-parallel rank: paged KV blocks, chunked prefill, prefix cache
    and preemption by recompute.

    Callers call `plan`, launch the plan, and then call `commit` or `fail` for the plans in order.
    """

    def __init__(
        self, limits: SchedulerLimits, requests: RequestTable, draft_length: DraftLength | None
    ) -> None:
        """All ranks share `requests`. If `draft_length` is None, `limits` sets the draft length."""
        self.limits = limits
        self._requests = requests
        self._draft_length = draft_length or FixedDraftLength(limits.num_draft_tokens)
        self.preemption_count = 0
        self.prompt_tokens = 0  # number of prompt tokens of admitted requests
        self.cached_prompt_tokens = 0  # number of prompt tokens found in the prefix cache
        self.generated_tokens = 0
        self.drafts = DraftCounters(limits.num_draft_tokens)
        self.cache_log = log = CacheLog() if limits.logs_cache_changes else None
        self._pool = BlockPool(limits.num_blocks, log.kv if log else None)
        self.encoder = EncoderCache(limits.encoder_tokens, num_ranks=limits.num_encoders)
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # sorted by `Sequence.order`
        self.host = HostTier(limits, self._pool, self._waiting, log)
        self.shared = SharedBlocks(self._pool, self.host, block_size=limits.block_size)
        self._turns = Turns(limits.num_stages)
        num_slots = self._turns.most_slots(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._in_flight: deque[_UncommittedPlan] = deque()
        # id of the request whose admission was last refused, and the pool's gain count at that time
        self._refused: tuple[str, int] | None = None
        # request id for which preemption cannot free enough blocks, and the gain count to wait for
        self._kept_out: tuple[str, int] | None = None
        self._step_count = 0
        self._last_committed = -1  # id of the last committed step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot: new, preempted, or waiting for a load."""
        return len(self._waiting) + self.host.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Number of KV blocks that no request holds, including cached blocks."""
        return self._pool.num_free

    def queue(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)

    def free(self, sequence: Sequence) -> None:
        """Drop a sequence. `commit` ignores rows of this sequence that are still in flight."""
        self._requests.remove(sequence)
        if sequence.slot != NO_SLOT:
            self._leave(sequence)
        elif not self.host.detach(sequence):
            self._waiting.remove(sequence)

    def reset_prefix_cache(self) -> None:
        self._pool.evict()
        self.host.evict()
        self.encoder.evict()

    def grammar_rows(self, plan: StepPlan) -> list[GrammarRow]:
        """Return the grammar rows of the latest plan, without rows of ended sequences."""
        latest = self._in_flight[-1]
        assert latest.step_id == plan.step_id
        found = []
        for row in plan.grammar_rows:
            sequence, num_drafts = latest.sequences[row], plan.num_draft_tokens[row]
            if not sequence.finished:
                num_outputs = sequence.num_total - 1 - num_drafts - sequence.prompt_len
                found.append(GrammarRow(row, sequence.request_id, num_outputs, num_drafts))
        return found

    def proposed(self, result: StepResult) -> dict[str, list[int]]:
        """Map request ids of grammar rows to drafts that the oldest uncommitted plan proposed."""
        sequences = self._in_flight[0].sequences
        return {sequences[row].request_id: drafts for row, drafts in result.proposed.items()}

    def postpone(self, plan: StepPlan, rows: list[int]) -> None:
        """Postpone rows of the latest plan until `unblock` is called. `commit` ignores the samples
        of these rows, and their last tokens run again. `GrammarBitmask` lists the postponed rows.
        """
        latest = self._in_flight[-1]
        assert latest.step_id == plan.step_id
        for row in rows:
            sequence = latest.sequences[row]
            latest.postponed.add(row)
            sequence.is_postponed = True
            sequence.num_proposed = 0
            sequence.subtract(1)

    def plan(self) -> StepPlan | None:
        """Return the next plan, or None if rows must wait for a commit, `add` or pipeline turn."""
        self._turns.begin()
        self.shared.take_queued()
        first = self._waiting.first(self._requests.num_rows)
        if first is not None:
            for row in self._find_yielding(first) or ():
                self._preempt(row)
        builder = self._build_plan(self.limits.max_num_batched_tokens)
        num_drafts = 0
        if self.limits.num_draft_tokens:
            num_drafts = self._draft_length.choose(self._turns.share(len(self._running)))
        prefills = self._plan_decodes(builder, num_drafts)
        self.encoder.continue_images(builder.step_id, has_decodes=bool(builder.slots))
        unfinished = self._plan_shares(builder, prefills) if prefills else []
        started = {sequence.tenant: sequence.order for sequence in reversed(unfinished)}
        # keep a slot for each sequence that waits for a load
        while builder.budget and len(self._free_slots) > self.host.num_waiting:
            first = self._waiting.first(self._requests.num_rows, after=started)
            if first is not None and self._begin_load(first):
                self._waiting.remove(first)  # let other requests run during the load
                continue
            new_row = None if first is None else self._admit(first)
            if first is None or new_row is None:
                break  # later requests must wait until the first request is admitted
            builder.new_rows.append(new_row)
            self._waiting.remove(first)
            builder.add_chunk(first)
            self._look_ahead(first, builder)
        for sequence in unfinished:
            if not builder.budget:
                break
            builder.extend_chunk(sequence)
            self._look_ahead(sequence, builder)
        if not builder.sequences and not builder.chunks:
            is_awaited = (self.host.has_loads or self.host.has_writes) and not self._in_flight
            if not (is_awaited or self.host.has_new_loads or self.shared.has_new_stores):
                return None
            return self._finish(builder, num_proposed=0, is_awaited=is_awaited)
        return self._finish(builder, num_proposed=num_drafts)

    def plan_nothing(self) -> StepPlan:
        """Return a plan without rows, for a rank that must join the step of other ranks."""
        return self._finish(self._build_plan(0), num_proposed=0)

    def _build_plan(self, budget: int) -> PlanBuilder:
        return PlanBuilder(self._step_count, budget, self.limits.chunk_length, self.encoder)

    def _finish(
        self, builder: PlanBuilder, *, num_proposed: int, is_awaited: bool = False
    ) -> StepPlan:
        has_constrained = self._requests.num_constrained > 0
        plan = builder.finish(has_constrained=has_constrained, num_proposed=num_proposed)
        copies = self.host.take_copies(self._step_count, is_awaited=is_awaited)
        if copies is not None:
            plan = msgspec.structs.replace(plan, copies=copies)
        self._turns.planned(builder.sequences, plan.needs_sampling)
        self._in_flight.append(_UncommittedPlan(self._step_count, builder.sequences, set()))
        self._step_count += 1
        return plan

    def latest_sequences(self) -> list[Sequence]:
        return self._in_flight[-1].sequences

    def cost_of(self, sequence: Sequence) -> int | None:
        """Return the cost of admitting a waiting sequence to this rank, or None if it must wait.
        The cost counts tokens before the sequence's first output, rows, and used KV blocks.
        """
        pool, block_size, waiting = self._pool, self.limits.block_size, self._waiting
        attempt = (sequence.request_id, pool.gain_count)
        if len(self._free_slots) <= len(waiting) or self._refused == attempt:
            return None
        backlog = sum(len(other.tokens) for other in waiting)
        backlog += sum(other.num_total - other.num_computed - 1 for other in self._running)
        if backlog >= self.limits.max_num_batched_tokens:
            return None
        shared, _, num_taken = self._blocks_for(sequence)
        promised = sum(-(-len(other.tokens) // block_size) for other in waiting)
        if num_taken + promised + bool(self._running or waiting) > pool.num_free:
            self._refused = attempt
            return None
        num_found = len(shared) + self.host.count_found(sequence, len(shared))
        own = len(sequence.tokens) - num_found * block_size
        num_held = (pool.num_blocks - pool.num_free) * block_size
        num_rows = len(self._running) + len(waiting)
        return backlog + own + ROW_COST * num_rows + num_held // TOKENS_PER_COST

    def can_take(self, sequence: Sequence) -> bool:
        """Whether this rank can preempt rows of another tenant to admit a sequence of the group's
        queue. The sequence must come before all sequences in the rank's own queue.
        """
        num_rows = self._requests.num_rows
        first = self._waiting.first(num_rows)
        is_next = first is None or rank_waiting(sequence, num_rows) < rank_waiting(first, num_rows)
        return is_next and self._find_yielding(sequence) is not None

    def commit(
        self, plan: StepPlan, result: StepResult, *, seconds: float = 0.0
    ) -> list[SequenceUpdate]:
        """Apply the result of the oldest uncommitted plan. Return an update for each sequence that
        gained tokens or ended. `seconds`: duration of the step; 0 if unknown.
        """
        step = self._take_in_flight(plan)
        postponed = step.postponed
        assert result.step_id == plan.step_id
        self.shared.commit(result)
        if self.limits.num_draft_tokens:
            self._draft_length.record(plan, result, seconds)
        token_ids, logprobs = result.token_ids, result.logprobs
        prompt_logprobs, errors = result.prompt_logprobs, result.errors
        updates: list[SequenceUpdate] = []
        end = 0  # index in `token_ids` after the row's last token
        num_generated = 0
        columns = (plan.num_scheduled, plan.num_draft_tokens, plan.needs_sampling)
        for row, (sequence, count, num_drafts, sampled) in enumerate(
            zip(step.sequences, *columns, strict=True)
        ):
            first = end
            end += sampled
            if num_drafts:
                num_accepted = result.num_accepted.get(row, 0)
                end += num_accepted
                sequence.subtract(num_drafts - num_accepted)
                proposed = result.num_draft_tokens.get(row, num_drafts)
                self.drafts.add(sequence, proposed, num_accepted)
            if sequence.finished:
                continue
            if errors and row in errors:
                updates.append(self._end(sequence, errors[row]))
                continue
            if prompt_logprobs and row in prompt_logprobs and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(prompt_logprobs[row])
            if not sampled or row in postponed:
                # a postponed row's last token runs again, so do not count it
                sequence.num_committed += count - num_drafts - sampled
                if sequence.num_committed >= sequence.index_at:
                    self._index_blocks(sequence)
                if sequence.held_images:
                    self.encoder.release(sequence)
                continue
            token_id = token_ids[first]
            tokens = [token_id]
            computed = len(sequence.tokens)
            sequence.tokens.append(token_id)
            finish_reason: str | None = None
            if token_id in sequence.stop_ids or computed + 1 >= sequence.limit:
                finish_reason = sequence.finish_reason()
            if num_drafts:
                for token_id in token_ids[first + 1 : end]:
                    if finish_reason is not None:
                        break  # drop tokens after the end of the sequence
                    tokens.append(token_id)
                    sequence.tokens.append(token_id)
                    finish_reason = sequence.finish_reason()
                computed += len(tokens) - 1
            num_generated += len(tokens)
            sequence.num_committed = computed
            if computed >= sequence.index_at:
                self._index_blocks(sequence)
            if sequence.held_images:
                self.encoder.release(sequence)
            token_logprobs = None
            if logprobs:
                places = range(first, first + len(tokens))
                token_logprobs = [logprobs[i] for i in places if i in logprobs] or None
            if finish_reason is not None:
                if sequence.request.lease_id:
                    self.shared.add_lease(sequence, step_id=plan.step_id)
                self.free(sequence)
            updates.append(
                SequenceUpdate(
                    sequence.request_id,
                    tokens,
                    token_logprobs,
                    sequence.prompt_logprobs,
                    finish_reason,
                    sequence.stop_reason(self.limits.eos_token_ids)
                    if finish_reason == "stop"
                    else None,
                    sequence.num_cached_tokens,
                    drafts=sequence.drafts
                    if finish_reason is not None and sequence.drafts[0]
                    else None,
                )
            )
            sequence.prompt_logprobs = None
        self.generated_tokens += num_generated
        return updates

    def fail(self, plan: StepPlan, message: str) -> list[SequenceUpdate]:
        """Drop the oldest uncommitted plan, which was lost, and end its sequences with an error."""
        sequences = self._take_in_flight(plan).sequences
        self.host.fail(plan.step_id)
        lost = [*sequences, *self.encoder.fail(plan.step_id, self._running)]
        return [self._end(row, message) for row in dict.fromkeys(lost) if not row.finished]

    def _plan_decodes(self, builder: PlanBuilder, most_drafts: int) -> list[Sequence]:
        """Plan a row for each running sequence that has one token to run. Rows get up to
        `most_drafts` drafts if the budget allows. Admission reserves budget for one token of every
        running sequence. Return the sequences with several tokens to run, in order.
        """
        prefills: list[Sequence] = []
        sequences, slots, num_postponed = builder.sequences, builder.slots, 0
        has_drafts, looks_ahead = (self.limits.num_draft_tokens > least for least in (0, 1))
        most_rows = self._turns.most_rows(self._running, builder.budget)
        spare = builder.budget - min(len(self._running), most_rows) if most_drafts else 0
        # `_grow` may preempt only sequences that this loop has not visited yet
        for sequence in self._running:
            if sequence.is_postponed:
                num_postponed += 1  # a postponed row uses one token of the budget
                continue
            computed = sequence.num_computed
            total = sequence.num_total
            if total - computed > 1:
                prefills.append(sequence)
                continue
            if total >= sequence.limit:
                continue  # a step in flight will sample the row's last token
            if not self._turns.is_due(sequence) or len(slots) == most_rows:
                continue
            if computed >= sequence.capacity:
                if not self._grow(sequence):
                    continue
                builder.append_block(sequence)
            if has_drafts:
                wanted = min(most_drafts, spare, sequence.num_proposed)
                if wanted > 0 and (self.limits.constrained_drafts or not sequence.is_constrained):
                    num_drafts = self._reserve_drafts(sequence, wanted, builder)
                    builder.drafts[len(slots)] = num_drafts
                    spare -= num_drafts
                    total += num_drafts
                sequence.num_proposed = most_drafts
            sequence.num_computed = total
            sequence.num_total = total + 1
            if looks_ahead:
                self._look_ahead(sequence, builder)
            sequences.append(sequence)
            slots.append(sequence.slot)
        builder.budget -= len(slots) + sum(builder.drafts.values()) + num_postponed
        if self.limits.num_stages > 1:  # postponed rows of other plans can make the budget negative
            builder.budget = max(0, builder.budget)
        assert builder.budget >= 0
        return prefills

    def _plan_shares(self, builder: PlanBuilder, prefills: list[Sequence]) -> list[Sequence]:
        """Plan chunks of running prompts. If several tenants have prompts of the best priority,
        each tenant gets an equal share of the budget. The budget keeps unused shares, and shares
        for waiting tenants. Return the prompts that may get the rest of the budget.
        """
        priority = prefills[0].order[0]
        urgent = [row for row in prefills if row.order[0] == priority]
        tenants = dict.fromkeys(row.tenant for row in urgent)
        waiting = self._waiting.tenants(priority) - tenants.keys() if self._free_slots else ()
        num_shares = len(tenants) + len(waiting)
        groups = [prefills]
        if num_shares > 1:
            groups = [[row for row in urgent if row.tenant == tenant] for tenant in tenants]
        budget, ended = builder.budget, set[Sequence]()
        for place, rows in enumerate(groups):
            builder.budget = share = budget // (num_shares - place)
            for row in rows:
                if not builder.budget:
                    break
                if builder.add_chunk(row):
                    ended.add(row)
                self._look_ahead(row, builder)
            budget -= share - builder.budget
        builder.budget = budget
        return [row for row in prefills if row not in ended] if num_shares > 1 else []

    def _reserve_drafts(self, sequence: Sequence, most: int, builder: PlanBuilder) -> int:
        """Allocate free blocks for up to `most` drafts. Return how many drafts fit."""
        wanted = min(most, sequence.limit - 1 - sequence.num_total)
        pool = self._pool
        while sequence.num_total + wanted > sequence.capacity and pool.num_free:
            self._take_block(sequence)
            builder.append_block(sequence)
        return min(wanted, sequence.capacity - sequence.num_total)

    def _look_ahead(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Allocate free blocks that the draft model needs for its KV after this step."""
        most_drafts = self.limits.num_draft_tokens
        end = min(sequence.num_total + most_drafts - 2, sequence.limit - 1)
        while most_drafts > 1 and end > sequence.capacity and self._pool.num_free:
            self._take_block(sequence)
            builder.append_block(sequence)

    def _find_yielding(self, waiting: Sequence) -> list[Sequence] | None:
        """Return the rows to preempt for a waiting sequence; [] if it fits without preemption. The
        rows are those with the fewest computed tokens of the tenant with the most rows. This tenant
        keeps more rows than the waiting tenant has. Return None if preemption cannot make room.
        """
        pool, num_rows = self._pool, self._requests.num_rows
        own = num_rows[waiting.tenant]
        if max(num_rows.values(), default=0) < own + 2:
            return None
        kept_out, needed_gain = self._kept_out or ("", 0)
        if waiting.resume_after > self._last_committed or (
            kept_out == waiting.request_id and pool.gain_count < needed_gain
        ):
            return None
        rows, tenant = list_yielding(self._running, waiting, num_rows)
        yielding: list[Sequence] = []
        missing = self._blocks_for(waiting)[2] + 1 - pool.num_free
        for row in rows[: max(0, num_rows[tenant] - own - 1)]:
            if missing <= 0 and (yielding or self._free_slots):
                break
            yielding.append(row)
            missing -= sum(pool.ref_count(block) == 1 for block in row.block_ids)
        if missing > 0:
            self._kept_out = waiting.request_id, pool.gain_count + missing
        return yielding if missing <= 0 and (yielding or self._free_slots) else None

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate a block for a running sequence; preempt later sequences if needed. Return False
        if the sequence itself is the victim and skips the step. The running sequence that is first
        in order never skips a step.
        """
        pool = self._pool
        while pool.num_free == 0:
            victim = choose_victim(self._running, sequence, self._requests.num_rows)
            if victim is sequence:
                return False
            self._preempt(victim)
        self._take_block(sequence)
        return True

    def _take_block(self, sequence: Sequence) -> None:
        sequence.block_ids.append(self._pool.allocate())
        sequence.capacity += self.limits.block_size

    def _preempt(self, sequence: Sequence) -> None:
        """Return a sequence to the queue, with the tokens that steps in flight will sample."""
        self.preemption_count += 1
        self._leave(sequence)
        sequence.resume_after = self._step_count - 1
        sequence.may_load = sequence.may_read = True
        self._waiting.push(sequence)

    def _admit(self, sequence: Sequence) -> NewRow | None:
        """Admit a waiting sequence with blocks for all its tokens; return None if it must wait.
        While other sequences run, one more block must be free. Otherwise, a running sequence that
        needs a block would preempt the new sequence. If no sequence runs, all blocks are free.
        """
        if not self._may_admit(sequence):
            return None
        pool = self._pool
        block_size = self.limits.block_size
        shared, num_new, num_taken = self._blocks_for(sequence)
        if not self.encoder.may_begin(sequence, len(shared) * block_size):
            return None
        shortage = num_taken + bool(self._running) - pool.num_free
        if shortage > 0:
            sequence.retry_gain = pool.gain_count + shortage
            return None
        pool.share(shared)
        self.host.offer(sequence, 0, len(shared))
        sequence.block_ids = shared + [pool.allocate() for _ in range(num_new)]
        sequence.capacity = len(sequence.block_ids) * block_size
        sequence.num_computed = sequence.num_committed = len(shared) * block_size
        sequence.num_indexed = len(shared)
        if self.limits.enable_prefix_caching:
            sequence.index_at = sequence.num_computed + block_size
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []  # a repeated prefill collects all prompt logprobs
        if self._requests.admit(sequence):
            self.prompt_tokens += sequence.prompt_len
            self.cached_prompt_tokens += sequence.num_computed
        sequence.is_postponed, sequence.num_proposed = False, 0
        sequence.slot = self._free_slots.pop()
        insort(self._running, sequence, key=by_order)
        return NewRow(
            sequence.slot,
            sequence.tokens.copy(),
            sequence.prompt_len,
            sequence.num_computed,
            sequence.block_ids.copy(),
            sequence.worker_sampling,
        )

    def _may_admit(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has no tokens in flight and enough blocks may be free now."""
        retry_gain = sequence.retry_gain if self._running else 0
        return sequence.resume_after <= self._last_committed and self._pool.gain_count >= retry_gain

    def _begin_load(self, sequence: Sequence) -> bool:
        """Start to load a waiting sequence's blocks from host memory or files, once per admission.
        Return False if the sequence needs no load, or if too few KV blocks are free.
        """
        if not (self.host.num_blocks and sequence.may_load and self._may_admit(sequence)):
            return False
        if self._blocks_for(sequence)[2] + bool(self._running) > self._pool.num_free:
            return False
        return self.host.begin(sequence)

    def _blocks_for(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """Return (cached blocks, number of missing blocks, free blocks needed for admission)."""
        pool, block_size, num_tokens = self._pool, self.limits.block_size, len(sequence.tokens)
        shared: list[int] = []
        if sequence.request.sampling.prompt_logprobs is None:
            # at least one token must run, because sampling needs its logits
            max_blocks = (num_tokens - 1) // block_size
            shared = match_prefix(pool, sequence.block_hashes, max_blocks=max_blocks)
        num_new = -(-num_tokens // block_size) - len(shared)
        return shared, num_new, num_new + sum(pool.ref_count(block) == 0 for block in shared)

    def _index_blocks(self, sequence: Sequence) -> None:
        """Index the blocks that committed steps filled. The blocks of a lost step are invalid."""
        block_size = self.limits.block_size
        num_full = sequence.num_committed // block_size
        for index in range(sequence.num_indexed, num_full):
            self._pool.index(sequence.block_ids[index], sequence.block_hashes[index])
        if self.limits.stores_new_blocks:
            self.host.offer(sequence, sequence.num_indexed, num_full)
        elif self.cache_log is not None:
            self.cache_log.chains.append((sequence.block_hashes, sequence.num_indexed, num_full))
        sequence.num_indexed = num_full
        sequence.index_at = (num_full + 1) * block_size

    def _end(self, sequence: Sequence, error: str) -> SequenceUpdate:
        self.encoder.release_all(sequence, is_valid=False)
        self.free(sequence)
        return sequence.end_update("error", error=error)

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._requests.leave(sequence)
        self.host.touch(sequence)
        self.encoder.release_all(sequence)
        self._pool.release(sequence.block_ids)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        sequence.block_ids = []
        sequence.index_at = NEVER  # do not index these blocks, which rows in flight may still write

    def _take_in_flight(self, plan: StepPlan) -> _UncommittedPlan:
        step = self._in_flight.popleft()
        assert step.step_id == plan.step_id, "plans are committed in the order they were made"
        self._last_committed = step.step_id
        return step
