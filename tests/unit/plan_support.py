"""A scheduler whose plans are read as a worker does: the tokens that each row runs."""

from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import StepPlan


class WatchedScheduler(Scheduler):
    """Keeps the lengths of the worker's slots, without draft tokens."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.starts: dict[int, list[int]] = {}  # by step id: position of each row's first token
        self._lengths: dict[int, int] = {}  # by slot

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self._lengths |= {row.slot: row.num_computed for row in plan.new_rows}
            self.starts[plan.step_id] = [self._lengths[slot] for slot in plan.slots]
            for slot, count in zip(plan.slots, plan.num_scheduled, strict=True):
                self._lengths[slot] += count
        return plan

    def postpone(self, plan: StepPlan, rows: list[int]) -> None:
        super().postpone(plan, rows)
        for row in rows:
            self._lengths[plan.slots[row]] -= 1
