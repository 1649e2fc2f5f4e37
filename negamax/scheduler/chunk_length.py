"""Choose how many tokens of a prompt run in one step.

A token attends to all earlier tokens, so later chunks of equal length take longer. In a pipeline,
later stages wait for the last chunk of a prompt, which takes longest.
"""

from dataclasses import dataclass
from typing import Protocol


class ChunkLength(Protocol):
    """Chooses the length of each chunk. The result depends only on the arguments."""

    def fit(self, computed: int, left: int, budget: int) -> tuple[int, int]:
        """Return the tokens to run (at least 1) and the budget that they use (at least as many).
        `left`: tokens of the sequence that are not computed. `budget`: tokens left in the step.
        """


class EvenChunks:
    """Fills the budget of a step with each chunk."""

    def fit(self, computed: int, left: int, budget: int) -> tuple[int, int]:
        count = min(left, budget)
        return count, count


@dataclass(frozen=True)
class EvenTimes:
    """Chooses chunks that take as long as `budget` tokens at the start of a prompt. A chunk that
    does not end its prompt ends at the last block boundary that it reaches.
    """

    block_size: int
    every: int
    # prices[i]: cost of a token after i * `every` computed tokens, relative to the first token of a
    # prompt; at least 1 and never decreasing.
    prices: tuple[float, ...]

    def fit(self, computed: int, left: int, budget: int) -> tuple[int, int]:
        price = self._price(computed)
        count = min(left, max(1, int(budget / price)))
        end = (computed + count) // self.block_size * self.block_size
        if computed < end and count < left:
            count = end - computed
        return count, min(budget, max(count, round(count * price)))

    def _price(self, computed: int) -> float:
        """Interpolate `prices` linearly."""
        at, beyond = divmod(computed, self.every)
        if at + 1 >= len(self.prices):
            return self.prices[-1]
        low, high = self.prices[at : at + 2]
        return low + (high - low) * beyond / self.every
