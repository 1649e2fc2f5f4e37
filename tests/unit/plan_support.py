"""Run a scheduler of one rank, and read its plans as a worker does."""

from __future__ import annotations

from typing import Any

from negamax.scheduler.draft_length import DraftLength
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate, StepPlan, StepResult


def make_limits(**changes: Any) -> SchedulerLimits:
    """Make the limits of a small scheduler with prefix caching and blocks of 4 tokens."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 4,
        "num_blocks": 64, "enable_prefix_caching": True, "max_queued_requests": 100,
        "eos_token_ids": frozenset({0}),
    }  # fmt: skip
    return SchedulerLimits(**sizes | changes)


def make_request(name: str, prompt: list[int] | int = 4, **fields: Any) -> GenerateRequest:
    """Make a request; `prompt` is a list of tokens or their number.

    `fields` that `GenerateRequest` lacks are sampling parameters. The default `max_tokens` is 8.
    """
    if isinstance(prompt, int):
        prompt = [1000 * ord(name[0]) + position for position in range(prompt)]
    own = {key: fields.pop(key) for key in GenerateRequest.__struct_fields__ if key in fields}
    sampling = SamplingParams(**{"max_tokens": 8, **fields})
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **own
    )


def list_admitted(plan: StepPlan) -> str:
    """Return the first letters of the admitted requests' names (see `make_request`)."""
    return "".join(chr(row.token_ids[0] // 1000) for row in plan.new_rows)


def make_result(plan: StepPlan, tokens: list[int] | None = None, **fields: Any) -> StepResult:
    """Make the result of `plan`. `tokens` has one token per sampled row; the default is 7."""
    sampled = tokens or [7] * sum(plan.needs_sampling)
    return StepResult(plan.step_id, sampled, {}, {}, fields.pop("errors", {}), **fields)


def make_scheduler(**changes: Any) -> RankScheduler:
    return RankScheduler(make_limits(**changes))


class RankScheduler:
    """Wrap a group scheduler of one rank, so that tests see plans instead of lists of one plan."""

    def __init__(self, limits: SchedulerLimits, draft_length: DraftLength | None = None) -> None:
        self.group = GroupScheduler(limits, [draft_length])
        (self.rank,) = self.group.ranks
        self.starts: dict[int, list[int]] = {}  # step id -> position of each row's first token
        self._lengths: dict[int, int] = {}  # slot -> length of the sequence without draft tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group if hasattr(GroupScheduler, name) else self.rank, name)

    def add(self, name: str, prompt: list[int] | int = 4, **fields: Any) -> None:
        self.group.add(make_request(name, prompt, **fields))

    def add_all(self, **prompts: list[int] | int) -> None:
        for name, prompt in prompts.items():
            self.add(name, prompt)

    def plan(self) -> StepPlan | None:
        plans = self.group.plan()
        if plans is None:
            return None
        (plan,) = plans
        self._lengths |= {row.slot: row.num_computed for row in plan.new_rows}
        self.starts[plan.step_id] = [self._lengths[slot] for slot in plan.slots]
        for slot, count in zip(plan.slots, plan.num_scheduled, strict=True):
            self._lengths[slot] += count
        return plan

    def next_plan(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None
        return plan

    def postpone(self, plan: StepPlan, rows: list[int]) -> None:
        self.rank.postpone(plan, rows)
        for row in rows:
            self._lengths[plan.slots[row]] -= 1

    def commit(self, plan: StepPlan, result: StepResult | None = None) -> list[SequenceUpdate]:
        return self.group.commit([plan], [result or make_result(plan)])

    def fail(self, plan: StepPlan, message: str) -> list[SequenceUpdate]:
        return self.group.fail([plan], message)

    def next_plans(self, count: int) -> list[StepPlan]:
        return [self.next_plan() for _ in range(count)]

    def step(self, tokens: list[int] | None = None) -> list[SequenceUpdate]:
        plan = self.next_plan()
        return self.commit(plan, make_result(plan, tokens))

    def run_all(self) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        while self.has_unfinished:
            updates += self.step()
        return updates
