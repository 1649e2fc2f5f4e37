"""Choose which plans of a pipeline run a row. The pipeline runs one plan per stage at the same
time. A generating row runs again only in a plan that can use the row's last sampled token.

The first stage needs the token that the last stage sampled. With P stages, each row is therefore in
one of P consecutive plans. The scheduler spreads rows evenly over the P plans.
"""

from collections.abc import Iterable

from negamax.scheduler.sequence import Sequence


class Turns:
    """Spreads rows over the plans in flight. With one stage, every plan may run every row."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._number = 0

    def begin(self) -> None:
        """Advance to the next turn, even if this turn gets no plan."""
        self._number += 1

    def is_due(self, sequence: Sequence) -> bool:
        """Whether the last sampled token of a sequence is available to the current plan."""
        return sequence.known_at <= self._number

    def most_rows(self, running: Iterable[Sequence], budget: int) -> int:
        """Return how many of the `running` rows may generate in this plan of `budget` tokens."""
        if self._num_stages == 1:
            return budget
        generating = sum(each.num_total - each.num_computed == 1 for each in running)
        return min(budget, self.share(generating))

    def share(self, num_rows: int) -> int:
        """Return how many of `num_rows` running rows belong to one plan."""
        return -(-num_rows // self._num_stages)

    def most_slots(self, max_num_seqs: int, budget: int) -> int:
        """Return how many sequences can run if each generates in one of the plans in flight."""
        stages = self._num_stages
        return max_num_seqs if stages == 1 else min(max_num_seqs, stages * budget)

    def planned(self, sequences: list[Sequence], needs_sampling: list[bool]) -> None:
        """Record that the last tokens of this plan's sampling rows are not known yet."""
        if self._num_stages > 1:
            for sequence, is_sampled in zip(sequences, needs_sampling, strict=True):
                if is_sampled:
                    sequence.known_at = self._number + self._num_stages
