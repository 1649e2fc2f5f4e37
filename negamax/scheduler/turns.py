"""Turns of rows in a pipeline. One plan per stage is under way, so the rows that generate take
turns: a row's next turn comes when the token of its last one can be there.

A decode reads its token where the first stage begins, so of P stages each row is in one of P plans.
They share the rows equally: a step with fewer rows takes its stages hardly less time.
"""

from __future__ import annotations

from collections.abc import Iterable

from negamax.scheduler.sequence import Sequence


class Turns:
    """Turns among `num_stages` plans that are under way; with one stage it is always every row's
    turn.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._number = 0

    def begin(self) -> None:
        """The next plan, or none in its place."""
        self._number += 1

    def is_due(self, sequence: Sequence) -> bool:
        """Whether a plan may need the token that the sequence sampled last."""
        return sequence.known_at <= self._number

    def most_rows(self, running: Iterable[Sequence], budget: int) -> int:
        """How many rows of the `running` sequences may generate in this plan of `budget` tokens."""
        if self._num_stages == 1:
            return budget
        generating = sum(each.num_total - each.num_computed == 1 for each in running)
        return min(budget, self.share(generating))

    def share(self, num_rows: int) -> int:
        """How many of `num_rows` belong to one plan."""
        return -(-num_rows // self._num_stages)

    def most_slots(self, max_num_seqs: int, budget: int) -> int:
        """How many sequences may run, so that all get their turn in as many plans as there are
        stages.
        """
        stages = self._num_stages
        return max_num_seqs if stages == 1 else min(max_num_seqs, stages * budget)

    def planned(self, sequences: list[Sequence], needs_sampling: list[bool]) -> None:
        """The rows of this plan, of which some sample."""
        if self._num_stages > 1:
            for sequence, is_sampled in zip(sequences, needs_sampling, strict=True):
                if is_sampled:
                    sequence.known_at = self._number + self._num_stages
