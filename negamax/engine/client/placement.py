"""Choose a replica for a request by its load and earlier prompts, without asking an engine.

The command `negamax route` uses the same functions to choose a server.
"""

from collections.abc import Iterable, Sequence

from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.kv_event_wire import shorten_hashes
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.scheduler import ROW_COST, TOKENS_PER_COST
from negamax.scheduler.step import SequenceUpdate

# Columns of a replica in the shared table. The first three count open sequences, their uncomputed
# prompt tokens and their prompt tokens; the last counts prompt tokens of all sequences ever sent.
_ROWS, _PENDING, _CONTEXT, _SENT = range(4)
NUM_COLUMNS = 4
MAX_BLOCKS = 1 << 15  # Largest number of block hashes that are stored for a replica.
TAG_SHIFT = 16  # A stored hash has 64 - TAG_SHIFT bits, because a float64 stores 48 bits exactly.


class ReplicaLoad:
    """One replica's load by requests of all server processes. Each process writes one row."""

    def __init__(self, numbers: SharedNumbers, *, replica: int, index: int) -> None:
        """Read the replica's columns of `numbers` in all rows, and write row `index` only."""
        self.replica = replica
        self._numbers = numbers
        self._start = replica * NUM_COLUMNS
        self._row = numbers.row(index, start=self._start, count=NUM_COLUMNS)
        self._pending: dict[str, int] = {}  # Number of uncomputed prompt tokens by sequence id.
        self._context: dict[str, int] = {}  # Id of an open sequence -> its number of prompt tokens.

    def enter(self, sequence_id: str, *, context: int, pending: int) -> None:
        """Count a sequence of `context` prompt tokens, of which `pending` must be computed."""
        self._context[sequence_id] = context
        self._row[_ROWS] += 1
        self._row[_CONTEXT] += context
        self._row[_SENT] += context
        if pending:
            self._pending[sequence_id] = pending
            self._row[_PENDING] += pending

    def gained(self, updates: Iterable[SequenceUpdate]) -> None:
        """Record that the prompts of sequences in `updates` are computed."""
        if self._pending:
            for update in updates:
                self.computed(update.request_id)

    def computed(self, sequence_id: str) -> None:
        """Record that the prompt of a sequence is computed."""
        self._row[_PENDING] -= self._pending.pop(sequence_id, 0)

    def leave(self, sequence_id: str) -> None:
        """Remove a sequence that has ended. Ignore the id of an unknown sequence."""
        context = self._context.pop(sequence_id, None)
        if context is not None:
            self._row[_ROWS] -= 1
            self._row[_CONTEXT] -= context
            self._row[_PENDING] -= self._pending.pop(sequence_id, 0)

    def cost(self, own: int, *, num_ranks: int) -> tuple[float, float]:
        """Return the cost of a prompt with `own` tokens to compute, and a number that breaks ties.

        The cost is in prompt tokens, as in `Scheduler.cost_of`. The load is divided by the number
        of data-parallel ranks. Ties are broken by the number of tokens ever sent to the replica.
        """
        rows, pending, context, sent = (
            self._numbers.total(self._start + column) for column in range(NUM_COLUMNS)
        )
        load = pending + ROW_COST * rows + context // TOKENS_PER_COST
        return own + load / num_ranks, sent


class PrefixTable:
    """Hashes of prompt blocks that each replica received. A new hash may overwrite an older one.
    Processes share the table without locks, because a wrong entry affects speed only.
    """

    def __init__(self, numbers: SharedNumbers) -> None:
        """Store hashes in `numbers`, with `MAX_BLOCKS` columns and a row for each replica."""
        self._tags = [numbers.row(replica) for replica in range(numbers.num_rows)]
        self._num_blocks = [MAX_BLOCKS] * numbers.num_rows

    def resize(self, replica: int, *, num_blocks: int) -> None:
        self._num_blocks[replica] = max(1, min(num_blocks, MAX_BLOCKS))

    def discard(self, replica: int) -> None:
        self._tags[replica][:] = [0.0] * MAX_BLOCKS

    def matches(self, tags: Sequence[int], replica: int) -> int:
        """Return how many leading blocks of a prompt the replica received. `tags`: block hashes."""
        row, num_blocks = self._tags[replica], self._num_blocks[replica]
        for index in range(len(tags) - 1, -1, -1):  # A block's hash covers all earlier blocks.
            if row[tags[index] % num_blocks] == tags[index]:
                return index + 1
        return 0

    def add(self, tags: Sequence[int], replica: int) -> None:
        row, num_blocks = self._tags[replica], self._num_blocks[replica]
        for tag in tags:
            row[tag % num_blocks] = tag


def choose_replica(
    candidates: Sequence[ReplicaLoad], *, cached: Sequence[int], num_tokens: int, num_ranks: int = 1
) -> tuple[int, int]:
    """Choose the candidate with the lowest cost for a prompt of `num_tokens` tokens.

    `cached` contains the number of cached prompt tokens by candidate. The cost is the load plus the
    prompt tokens to compute. A replica with more load wins if its cached prefix saves more tokens
    than its extra load. Return the position of the replica in `candidates`, and the number of
    prompt tokens that the replica probably computes.
    """
    own = [num_tokens - count for count in cached]
    costs = [
        load.cost(tokens, num_ranks=num_ranks) for load, tokens in zip(candidates, own, strict=True)
    ]
    best = costs.index(min(costs))
    return best, own[best]


def hash_blocks(token_ids: Sequence[int], *, block_size: int, salt: str) -> list[int]:
    """Return the hashes, as in KV events, of all full blocks of the prompt without its last token.

    Prompts without images have the hashes that the prefix cache uses.
    """
    hashes = BlockHashes(list(token_ids), block_size=block_size, salt=salt)
    num_blocks = (len(token_ids) - 1) // block_size
    return shorten_hashes([hashes[index] for index in range(num_blocks)])
