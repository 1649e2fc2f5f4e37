"""How many draft tokens the rows of a step verify."""

from __future__ import annotations

from typing import Protocol

from negamax.scheduler.step import StepPlan, StepResult


class DraftLength(Protocol):
    """Chooses the number for each plan. It may depend on earlier calls alone."""

    def choose(self, num_rows: int) -> int:
        """Tokens for each of up to `num_rows` generating rows, from 0 to the limit: that many are
        verified, as far as the step before has proposed them, and proposed for the step behind.
        """

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """`plan` has run; called for all plans, in order."""


class FixedDraftLength:
    """Always the same number."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def choose(self, num_rows: int) -> int:
        """See `DraftLength`."""
        return self._num_tokens

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """See `DraftLength`."""
