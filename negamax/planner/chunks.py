"""Chunks of a prompt that take a pipeline equally long, by calculation: `cost` says how long one
takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from negamax.planner.cost import Costs
from negamax.scheduler.chunk_length import ChunkLength, EvenTimes

# No chunk is shorter than this part of a step: it would read the weights once more, for less than
# the stages behind it wait.
LEAST_SHARE = 4
_POINTS = 64  # at which prices are calculated, about


def even_times(
    costs: Costs, *, max_num_batched_tokens: int, block_size: int, max_model_len: int
) -> EvenTimes:
    """Chunks for prompts of up to `max_model_len` tokens, each of which takes the slowest stage as
    long as the first `max_num_batched_tokens` of a prompt, but for those that would be too short to
    be worth a step.
    """
    most = max_num_batched_tokens
    every = max(most, -(-max_model_len // _POINTS))
    least = min(most, max(block_size, most // LEAST_SHARE))
    limit, prices, length = costs.chunk_seconds(most, behind=0), [1.0], most
    for behind in range(every, max_model_len + every, every):
        length = _longest(costs, behind, limit, least=least, most=length)
        prices.append(most / length)
    return EvenTimes(block_size, every, tuple(prices))


def chunks(length: ChunkLength, num_tokens: int, *, budget: int) -> Iterator[int]:
    """The chunks of a prompt of `num_tokens` that runs alone, with `budget` tokens in a step."""
    done = 0
    while done < num_tokens:
        count, _ = length.fit(done, num_tokens - done, budget)
        yield count
        done += count


def _longest(costs: Costs, behind: int, limit: float, *, least: int, most: int) -> int:
    """The longest chunk from `least` to `most` tokens that takes no longer than `limit` seconds, or
    `least`.
    """
    while least < most:
        middle = (least + most + 1) // 2
        if costs.chunk_seconds(middle, behind=behind) <= limit:
            least = middle
        else:
            most = middle - 1
    return least
