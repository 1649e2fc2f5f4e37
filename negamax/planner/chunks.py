"""Choose prompt chunks that take equally long in a pipeline, using times predicted by `cost`."""

from collections.abc import Iterator

from negamax.planner.cost import Costs
from negamax.scheduler.chunk_length import ChunkLength, EvenTimes

# The shortest prompt chunk has 1 / LEAST_SHARE of the tokens of a step. Shorter chunks would read
# the weights more often, which takes more time than later pipeline stages save.
LEAST_SHARE = 4
_POINTS = 64  # approximate number of context lengths for which costs are computed


def plan_even_times(
    costs: Costs, *, max_num_batched_tokens: int, block_size: int, max_model_len: int
) -> EvenTimes:
    """Plan chunks that each take as long in the slowest stage as the first chunk of a prompt."""
    most = max_num_batched_tokens
    every = max(most, -(-max_model_len // _POINTS))
    least = min(most, max(block_size, most // LEAST_SHARE))
    limit, prices, length = costs.chunk_seconds(most, after=0), [1.0], most
    for after in range(every, max_model_len + every, every):
        length = _longest(costs, after, limit, least=least, most=length)
        prices.append(most / length)
    return EvenTimes(block_size, every, tuple(prices))


def chunks(length: ChunkLength, num_tokens: int, *, budget: int) -> Iterator[int]:
    """Yield the chunk lengths of a prompt of `num_tokens`, at most `budget` per step."""
    done = 0
    while done < num_tokens:
        count, _ = length.fit(done, num_tokens - done, budget)
        yield count
        done += count


def _longest(costs: Costs, after: int, limit: float, *, least: int, most: int) -> int:
    """Return the longest chunk of `least` to `most` tokens that takes at most `limit` seconds."""
    while least < most:
        middle = (least + most + 1) // 2
        if costs.chunk_seconds(middle, after=after) <= limit:
            least = middle
        else:
            most = middle - 1
    return least
