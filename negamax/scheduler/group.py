"""The scheduler of all data-parallel ranks that run each step together. Each rank has its own
slots, blocks, prefix cache and running sequences.

A request waits in one common queue until a rank can admit it. The rank with the lowest cost gets
the request (`Scheduler.cost_of`). A cached prefix of the request lowers the rank's cost. Pending
tokens, rows and long contexts on the rank raise the cost. Preempted requests stay on their rank,
which may still cache their prefix.
"""

from collections.abc import Sequence as Items

import msgspec

from negamax.base.errors import InvalidRequestError
from negamax.scheduler.draft_length import DraftLength
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.request_table import RequestTable
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import (
    SequenceUpdate,
    StepPlan,
    StepResult,
    StepSize,
    bound_shard,
    is_sharded,
)
from negamax.scheduler.waiting import WaitingQueue


class GroupScheduler:
    """A `Scheduler` for each data-parallel rank. Callers call `plan`, launch the plans, and then
    call `commit` or `fail` for the steps in order. `add` and `end` may be called at any time.
    """

    def __init__(
        self, limits: SchedulerLimits, draft_lengths: Items[DraftLength | None] = (None,)
    ) -> None:
        """`limits` apply to each rank, but `max_queued_requests` applies to all ranks together."""
        self.limits, self._requests = limits, RequestTable(limits)
        self.ranks = [Scheduler(limits, self._requests, length) for length in draft_lengths]
        self._waiting = WaitingQueue()  # sequences that have no rank yet

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests.sequences

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests.sequences)

    @property
    def has_writes(self) -> bool:
        """Whether a plan is needed to write or delete files, even if no request needs a plan."""
        return any(rank.host.has_writes for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot: new or preempted."""
        return len(self._waiting) + sum(rank.num_waiting for rank in self.ranks)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request with resolved sampling. Raises the errors of `RequestTable.add`, and
        `InvalidRequestError` for an unknown data-parallel rank.
        """
        pinned = request.data_parallel_rank
        if pinned is not None and not 0 <= pinned < len(self.ranks):
            raise InvalidRequestError(
                f"data_parallel_rank is {pinned}; allowed: 0 to {len(self.ranks) - 1}",
                param="data_parallel_rank",
                code="no_such_data_parallel_rank",
            )
        sequence = self._requests.add(request, num_waiting=self.num_waiting)
        if pinned is not None or len(self.ranks) == 1:
            self._assign(sequence, pinned or 0)
        else:
            self._waiting.push(sequence)

    def sequences(self) -> list[Sequence]:
        """Return the state of all running and waiting requests, which callers must not change."""
        return list(self._requests.sequences.values())

    def end(
        self, request_id: str, finish_reason: str, *, error: str | None = None
    ) -> SequenceUpdate | None:
        """End a request and free its resources. Return None for an unknown or ended request."""
        sequence = self._requests.sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.rank is not None:
            self.ranks[sequence.rank].free(sequence)
        else:
            self._waiting.remove(sequence)
            self._requests.remove(sequence)
        return sequence.end_update(finish_reason, error=error)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, except blocks of running requests."""
        for rank in self.ranks:
            rank.reset_prefix_cache()

    def unblock(self, request_id: str) -> None:
        """Allow the next plan to run a postponed request."""
        sequence = self._requests.sequences.get(request_id)
        if sequence is not None:
            sequence.is_postponed = False

    def clear_grammar(self, request_id: str) -> None:
        sequence = self._requests.sequences.get(request_id)
        if sequence is not None:
            self._requests.clear_grammar(sequence)

    def plan(self) -> list[StepPlan] | None:
        """Return one plan per rank, or None if requests must wait for a `commit` or an `add`."""
        if len(self.ranks) == 1:
            plan = self.ranks[0].plan()
            return None if plan is None else [plan]
        self._place()
        found = [rank.plan() for rank in self.ranks]
        if not any(found):
            return None
        plans = [
            rank.plan_nothing() if plan is None else plan
            for rank, plan in zip(self.ranks, found, strict=True)
        ]
        sequences = [rank.latest_sequences() for rank in self.ranks]
        size = _size(plans, sequences, num_shards=self.limits.num_shards)
        return [msgspec.structs.replace(plan, of_all=size) for plan in plans]

    def take_admitted(self) -> list[str]:
        """Return the ids of requests that have begun to run since the last call."""
        admitted, self._requests.admitted = self._requests.admitted, []
        return admitted

    def proposed(self, results: Items[StepResult]) -> dict[str, list[int]]:
        """Map request ids of grammar rows to drafts that the oldest uncommitted step proposed."""
        ranks = zip(self.ranks, results, strict=True)
        return {name: drafts for rank, one in ranks for name, drafts in rank.proposed(one).items()}

    def commit(
        self, plans: Items[StepPlan], results: Items[StepResult], *, seconds: float = 0.0
    ) -> list[SequenceUpdate]:
        """Apply the results of the oldest uncommitted step, as `Scheduler.commit` does."""
        return [
            update
            for rank, plan, result in zip(self.ranks, plans, results, strict=True)
            for update in rank.commit(plan, result, seconds=seconds)
        ]

    def fail(self, plans: Items[StepPlan], message: str) -> list[SequenceUpdate]:
        """Drop the oldest uncommitted step, which was lost, and end its sequences with an error."""
        return [
            update
            for rank, plan in zip(self.ranks, plans, strict=True)
            for update in rank.fail(plan, message)
        ]

    def _place(self) -> None:
        """Assign waiting sequences to ranks while some rank can admit the first sequence."""
        num_rows = self._requests.num_rows.copy()
        while (sequence := self._waiting.first(num_rows)) is not None:
            costs = [rank.cost_of(sequence) for rank in self.ranks]
            possible = [(cost, at) for at, cost in enumerate(costs) if cost is not None]
            possible = possible or [
                (0, at) for at, rank in enumerate(self.ranks) if rank.can_take(sequence)
            ]
            if not possible:
                break  # later requests must not be admitted before the first request
            self._waiting.remove(sequence)
            num_rows[sequence.tenant] += 1
            self._assign(sequence, min(possible)[1])

    def _assign(self, sequence: Sequence, rank: int) -> None:
        sequence.rank = rank
        self.ranks[rank].queue(sequence)


def _size(
    plans: Items[StepPlan], sequences: Items[Items[Sequence]], *, num_shards: int
) -> StepSize:
    """Return the size of the step of `plans`. `sequences[i]`: sequences of the rows of plans[i]."""
    is_decode, longest_run, largest_shard = True, 0, 0
    for plan, of_plan in zip(plans, sequences, strict=True):
        columns = (plan.num_scheduled, plan.num_draft_tokens, plan.needs_sampling)
        num_runs = 0
        for sequence, count, num_drafts, samples in zip(of_plan, *columns, strict=True):
            is_one = count == 1 + num_drafts
            computed = sequence.num_computed - count
            is_run = not is_one or computed < sequence.prompt_len
            num_runs += is_run
            is_decode &= samples and not is_run
            longest_run = max(longest_run, min(sequence.prompt_len - computed, count))
        shard = bound_shard(plan.num_tokens, num_runs=num_runs, num_shards=num_shards)
        largest_shard = max(largest_shard, shard)
    return StepSize(
        num_tokens=max(plan.num_tokens for plan in plans),
        num_rows=max(len(plan.slots) for plan in plans),
        num_drafts=max(max(*plan.num_draft_tokens, plan.num_proposed, 0) for plan in plans),
        is_decode=is_decode,
        largest_shard=largest_shard if is_sharded(longest_run, num_shards) else 0,
    )
