"""How much of a prompt a step runs: as much as it has room for, or as much as takes equally long.

A token attends to all in front of it, so chunks of one length take longer and longer. In a pipeline
the stages behind the first wait for the last chunk of a prompt, which has taken the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ChunkLength(Protocol):
    """Chooses the length of each chunk. It depends on its arguments alone."""

    def fit(self, behind: int, left: int, budget: int) -> tuple[int, int]:
        """Of the `left` tokens of a sequence that follow `behind` others, how many run in a step
        that has room for `budget` more, at least 1; and how much of that room they take, at least
        as many. All are at least 1, but `behind`.
        """


class EvenChunks:
    """As many tokens as there is room for."""

    def fit(self, behind: int, left: int, budget: int) -> tuple[int, int]:
        count = min(left, budget)
        return count, count


@dataclass(frozen=True)
class EvenTimes:
    """As many tokens as take as long as the room's worth of tokens at the beginning of a prompt.
    Chunks that do not end their prompt end with a block, if they reach the end of one.
    """

    block_size: int
    every: int
    # What a token costs that follows 0, every, 2 * every ... others, in tokens at the beginning of
    # a prompt: 1 or more, and never less than those in front of it cost.
    prices: tuple[float, ...]

    def fit(self, behind: int, left: int, budget: int) -> tuple[int, int]:
        price = self._price(behind)
        count = min(left, max(1, int(budget / price)))
        end = (behind + count) // self.block_size * self.block_size
        if behind < end and count < left:
            count = end - behind
        return count, min(budget, max(count, round(count * price)))

    def _price(self, behind: int) -> float:
        """Between two numbers of `prices` by the distance from them."""
        at, beyond = divmod(behind, self.every)
        if at + 1 >= len(self.prices):
            return self.prices[-1]
        low, high = self.prices[at : at + 2]
        return low + (high - low) * beyond / self.every
