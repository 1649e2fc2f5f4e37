"""Choose how many tokens of a prompt run in one step.

A token attends to all earlier tokens. If all chunks of a prompt have the same length, its last
chunk therefore takes longest. In a pipeline, all later stages wait for this chunk.
"""

from dataclasses import dataclass
from typing import Protocol


class ChunkLength(Protocol):
    """Chooses the length of each prompt chunk, only from the arguments of `fit`."""

    def fit(self, computed: int, left: int, budget: int) -> tuple[int, int]:
        """Return the length of the next chunk (at least 1 token), and how much of `budget` this
        chunk uses. `left`: uncomputed tokens of the sequence. `budget`: tokens left in the step.
        """


class EvenChunks:
    """Makes each chunk as long as the budget of the step allows."""

    def fit(self, computed: int, left: int, budget: int) -> tuple[int, int]:
        count = min(left, budget)
        return count, count


@dataclass(frozen=True)
class EvenTimes:
    """Chooses chunks that each take as much time as the first `budget` tokens of a prompt. A chunk
    that does not end its prompt ends at the last block boundary that it reaches.
    """

    block_size: int
    every: int
    # prices[i]: cost of a token after i * `every` computed tokens, divided by the cost of a
    # prompt's first token. Prices are at least 1 and never decrease.
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
