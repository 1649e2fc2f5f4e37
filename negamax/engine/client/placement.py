"""Which of several replicas a request goes to: what each has to do, and which prompts it has seen.

Nobody asks an engine. The server processes count what they have sent, in numbers that they share,
and remember the prompts by the hashes that the engines' prefix caches use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from negamax.base.shared_numbers import SharedNumbers
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.scheduler import ROW_COST, TOKENS_PER_COST
from negamax.scheduler.step import SequenceUpdate

# Of the numbers that the server processes share, for each replica: open sequences, prompt tokens to
# be computed before first tokens, prompt tokens of open sequences, and of all that were ever sent.
_ROWS, _PENDING, _CONTEXT, _SENT = range(4)
NUM_COLUMNS = 4
# Blocks of prompts that are remembered for a replica, at most; more than its cache holds are not.
MAX_BLOCKS = 1 << 15
_TAG_BYTES = 6  # of a block's hash: an integer that a float64 holds


class ReplicaLoad:
    """What one replica has to do for all server processes. Single writer of a process's own part:
    its event loop.
    """

    def __init__(self, numbers: SharedNumbers, *, replica: int, index: int) -> None:
        """`numbers` have `NUM_COLUMNS` for each replica; process `index` writes its row."""
        self._numbers = numbers
        self._start = replica * NUM_COLUMNS
        self._row = numbers.row(index, start=self._start, count=NUM_COLUMNS)
        self._pending: dict[str, int] = {}  # by sequence, until its first token
        self._context: dict[str, int] = {}  # by open sequence

    def enter(self, sequence_id: str, *, context: int, pending: int) -> None:
        """A sequence goes to the replica: prompt tokens that are its own, and those of them that
        are to be computed, as far as is known.
        """
        self._context[sequence_id] = context
        self._row[_ROWS] += 1
        self._row[_CONTEXT] += context
        self._row[_SENT] += context
        if pending:
            self._pending[sequence_id] = pending
            self._row[_PENDING] += pending

    def gained(self, updates: Iterable[SequenceUpdate]) -> None:
        """Sequences have tokens: their prompts are computed."""
        if self._pending:
            for update in updates:
                self._row[_PENDING] -= self._pending.pop(update.request_id, 0)

    def leave(self, sequence_id: str) -> None:
        """A sequence is over; ids that are not open are ignored."""
        context = self._context.pop(sequence_id, None)
        if context is not None:
            self._row[_ROWS] -= 1
            self._row[_CONTEXT] -= context
            self._row[_PENDING] -= self._pending.pop(sequence_id, 0)

    def cost(self, own: int, *, num_ranks: int) -> tuple[float, float]:
        """What it costs to have `own` more prompt tokens computed here, in tokens of prompts, as
        `Scheduler.cost_of` counts; and for two that cost the same, what each was ever sent.
        `num_ranks`: data-parallel ranks, which share the load.
        """
        rows, pending, context, sent = (
            self._numbers.total(self._start + column) for column in range(NUM_COLUMNS)
        )
        load = pending + ROW_COST * rows + context // TOKENS_PER_COST
        return own + load / num_ranks, sent


class PrefixTable:
    """The blocks of the prompts that each replica was sent. Every server process writes and reads
    all of it, without locks: an entry is one number, and a wrong one costs time and no more.

    A block is found in one place only, where a later one may replace it: with as many places as the
    replica's cache has blocks, what is old is forgotten about as it is there.
    """

    def __init__(self, numbers: SharedNumbers) -> None:
        """`numbers` have `MAX_BLOCKS` columns and a row for each replica."""
        self._tags = [numbers.row(replica) for replica in range(numbers.num_rows)]
        self._num_blocks = [MAX_BLOCKS] * numbers.num_rows

    def resize(self, replica: int, *, num_blocks: int) -> None:
        """The replica's cache has so many blocks."""
        self._num_blocks[replica] = max(1, min(num_blocks, MAX_BLOCKS))

    def discard(self, replica: int) -> None:
        """Its cache is empty."""
        self._tags[replica][:] = [0.0] * MAX_BLOCKS

    def matches(self, tags: Sequence[int], replica: int) -> int:
        """How many blocks of a prompt, given by their `tags_of`, the replica was sent before."""
        row, num_blocks = self._tags[replica], self._num_blocks[replica]
        for index in range(len(tags) - 1, -1, -1):  # a block's name covers those before it
            if row[tags[index] % num_blocks] == tags[index]:
                return index + 1
        return 0

    def add(self, tags: Sequence[int], replica: int) -> None:
        """The replica is sent this prompt."""
        row, num_blocks = self._tags[replica], self._num_blocks[replica]
        for tag in tags:
            row[tag % num_blocks] = tag


def tags_of(request: GenerateRequest, *, block_size: int) -> list[int]:
    """The names of the full blocks of a prompt, the last token left out: it is always computed."""
    tokens = list(request.prompt_token_ids)
    hashes = BlockHashes(tokens, block_size=block_size, salt=request.cache_salt)
    num_blocks = (len(tokens) - 1) // block_size
    return [int.from_bytes(hashes[index][:_TAG_BYTES], "big") for index in range(num_blocks)]
