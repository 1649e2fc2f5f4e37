"""Errors of rows that failed on ranks without results, added to the results of the
reporting rank.
"""

from __future__ import annotations

from collections import deque

import msgspec

from negamax.scheduler.step import RowFailures, StepPlan, StepResult


class RowFailureLog:
    """Row errors by slot, until the slot goes to another sequence. Single user: the thread that
    launches plans and reads results.
    """

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()  # slots of each plan without a result
        self._assigned: dict[int, int] = {}  # slot -> the step that assigned it
        self._errors: dict[int, str] = {}  # by slot

    def launched(self, plan: StepPlan) -> None:
        """Record a launched plan."""
        self._slots.append(plan.slots)
        for row in plan.new_rows:
            self._assigned[row.slot] = plan.step_id
            self._errors.pop(row.slot, None)

    def add(self, failures: RowFailures) -> None:
        """Add the errors that a rank reports; those of reassigned slots are dropped."""
        for slot, error in failures.errors.items():
            if failures.step_id >= self._assigned.get(slot, 0):
                self._errors.setdefault(slot, error)

    def complete(self, result: StepResult) -> StepResult:
        """Return the result of the oldest plan with the errors of its rows."""
        slots = self._slots.popleft()
        if not self._errors:
            return result
        errors = {row: self._errors[slot] for row, slot in enumerate(slots) if slot in self._errors}
        return msgspec.structs.replace(result, errors=errors | result.errors)
