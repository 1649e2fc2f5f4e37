"""Rows that failed on a rank that sends no results: their errors are added to the results of the
rank that does.
"""

from __future__ import annotations

from collections import deque

import msgspec

from negamax.scheduler.step import RowFailures, StepPlan, StepResult


class RowFailureLog:
    """Failures by slot, from the report of a rank until the slot is given to another sequence.
    Single user: the thread that launches plans and reads their results.
    """

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()  # of each plan whose result has not come
        self._assigned: dict[int, int] = {}  # slot -> the step that gave it to its sequence
        self._errors: dict[int, str] = {}  # by slot

    def launched(self, plan: StepPlan) -> None:
        """Note a plan on its way to the ranks."""
        self._slots.append(plan.slots)
        for row in plan.new_rows:
            self._assigned[row.slot] = plan.step_id
            self._errors.pop(row.slot, None)

    def add(self, failures: RowFailures) -> None:
        """What a rank reports; nothing where the slot has another sequence since."""
        for slot, error in failures.errors.items():
            if failures.step_id >= self._assigned.get(slot, 0):
                self._errors.setdefault(slot, error)

    def complete(self, result: StepResult) -> StepResult:
        """The result of the oldest plan with the errors of its rows."""
        slots = self._slots.popleft()
        if not self._errors:
            return result
        errors = {row: self._errors[slot] for row, slot in enumerate(slots) if slot in self._errors}
        return msgspec.structs.replace(result, errors=errors | result.errors)
