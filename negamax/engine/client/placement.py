"""Chooses a replica by the load of each and the prompts sent to it; asks no engine.

`negamax route` places requests on servers by the same rule.
"""

from collections.abc import Iterable, Sequence

from negamax.base.shared_numbers import SharedNumbers
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.scheduler import ROW_COST, TOKENS_PER_COST
from negamax.scheduler.step import SequenceUpdate

# Shared columns of each replica: open sequences, prompt tokens to compute before first tokens,
# prompt tokens of open sequences, and prompt tokens of all sequences ever sent.
_ROWS, _PENDING, _CONTEXT, _SENT = range(4)
NUM_COLUMNS = 4
# Most prompt blocks remembered for a replica, but no more than its cache holds.
MAX_BLOCKS = 1 << 15
_TAG_BYTES = 6  # bytes of a block's hash that make an integer exact in a float64


class ReplicaLoad:
    """The load of one replica from all servers. Single writer of a row: its event loop."""

    def __init__(self, numbers: SharedNumbers, *, replica: int, index: int) -> None:
        """`numbers`: `NUM_COLUMNS` columns for each replica; process `index` writes its row."""
        self.replica = replica
        self._numbers = numbers
        self._start = replica * NUM_COLUMNS
        self._row = numbers.row(index, start=self._start, count=NUM_COLUMNS)
        self._pending: dict[str, int] = {}  # by sequence, until its first token
        self._context: dict[str, int] = {}  # by open sequence

    def enter(self, sequence_id: str, *, context: int, pending: int) -> None:
        """Count a sequence of `context` prompt tokens; `pending` of them are to be computed."""
        self._context[sequence_id] = context
        self._row[_ROWS] += 1
        self._row[_CONTEXT] += context
        self._row[_SENT] += context
        if pending:
            self._pending[sequence_id] = pending
            self._row[_PENDING] += pending

    def gained(self, updates: Iterable[SequenceUpdate]) -> None:
        """Record sequences with tokens: their prompts are computed."""
        if self._pending:
            for update in updates:
                self.computed(update.request_id)

    def computed(self, sequence_id: str) -> None:
        """Record that the sequence's prompt is computed."""
        self._row[_PENDING] -= self._pending.pop(sequence_id, 0)

    def leave(self, sequence_id: str) -> None:
        """Remove a sequence that is over; ids that are not open are ignored."""
        context = self._context.pop(sequence_id, None)
        if context is not None:
            self._row[_ROWS] -= 1
            self._row[_CONTEXT] -= context
            self._row[_PENDING] -= self._pending.pop(sequence_id, 0)

    def cost(self, own: int, *, num_ranks: int) -> tuple[float, float]:
        """Return the cost of computing `own` more prompt tokens here, in prompt tokens as in
        `Scheduler.cost_of`. Ties are broken by all tokens ever sent. `num_ranks` data-parallel
        ranks divide the load.
        """
        rows, pending, context, sent = (
            self._numbers.total(self._start + column) for column in range(NUM_COLUMNS)
        )
        load = pending + ROW_COST * rows + context // TOKENS_PER_COST
        return own + load / num_ranks, sent


class PrefixTable:
    """Prompt blocks sent to each replica, shared without locks: an entry is one number, and a wrong
    one only costs time. A block has one place, where a later block may replace it.
    """

    def __init__(self, numbers: SharedNumbers) -> None:
        """`numbers`: `MAX_BLOCKS` columns and a row for each replica."""
        self._tags = [numbers.row(replica) for replica in range(numbers.num_rows)]
        self._num_blocks = [MAX_BLOCKS] * numbers.num_rows

    def resize(self, replica: int, *, num_blocks: int) -> None:
        self._num_blocks[replica] = max(1, min(num_blocks, MAX_BLOCKS))

    def discard(self, replica: int) -> None:
        self._tags[replica][:] = [0.0] * MAX_BLOCKS

    def matches(self, tags: Sequence[int], replica: int) -> int:
        """Count the leading blocks (`hash_blocks`) of a prompt that were sent to the replica."""
        row, num_blocks = self._tags[replica], self._num_blocks[replica]
        for index in range(len(tags) - 1, -1, -1):  # a block's hash covers those before it
            if row[tags[index] % num_blocks] == tags[index]:
                return index + 1
        return 0

    def add(self, tags: Sequence[int], replica: int) -> None:
        row, num_blocks = self._tags[replica], self._num_blocks[replica]
        for tag in tags:
            row[tag % num_blocks] = tag


def choose_replica(
    candidates: Sequence[ReplicaLoad],
    prefixes: PrefixTable,
    tags: Sequence[int],
    *,
    num_tokens: int,
    block_size: int,
    num_ranks: int = 1,
) -> tuple[int, int]:
    """Choose the candidate where a prompt costs least, and record the prompt's blocks there.

    The tokens to compute and the load have one unit. So the longest known prefix wins until its
    replica has more load than the prefix saves; without a known prefix the least loaded one wins.
    Return its position in `candidates` and the prompt tokens that it probably has to compute.
    """
    own = [num_tokens - block_size * prefixes.matches(tags, each.replica) for each in candidates]
    costs = [
        load.cost(tokens, num_ranks=num_ranks) for load, tokens in zip(candidates, own, strict=True)
    ]
    best = costs.index(min(costs))
    prefixes.add(tags, candidates[best].replica)
    return best, own[best]


def hash_blocks(request: GenerateRequest, *, block_size: int) -> list[int]:
    """The hashes of a prompt's full blocks without the last token, which is always computed."""
    tokens = list(request.prompt_token_ids)
    hashes = BlockHashes(tokens, block_size=block_size, salt=request.cache_salt)
    num_blocks = (len(tokens) - 1) // block_size
    return [int.from_bytes(hashes[index][:_TAG_BYTES], "big") for index in range(num_blocks)]
