"""How much may wait for the engine: sequences and prompt tokens, and when to come back. No clock of
its own, no I/O.
"""

from __future__ import annotations

import math
import zlib

from negamax.base.errors import InvalidRequestError, OverloadedError
from negamax.base.shared_numbers import SharedNumbers

_RATE_SECONDS = 20.0  # over which the rate of finished sequences is averaged
_LONGEST_RETRY = 120.0  # seconds
_POOLS_WAITING = 4  # default for the tokens that may wait: so many times what the KV cache holds

# Of the numbers that the server processes share: the totals, then for each group of tenants what
# of it waits. Tenants whose names hash to the same group are counted as one.
_GROUPS = 256
_OPEN, _WAITING, _WAITING_TOKENS, _GROUP_WAITING = range(4)
_GROUP_TOKENS = _GROUP_WAITING + _GROUPS
NUM_COLUMNS = _GROUP_TOKENS + _GROUPS


class Admission:
    """The sequences that are open, and whether more may come. Single writer: the engine's client.

    A sequence waits from `enter` until `start`, and is open until `leave`. Up to `max_running`
    sequences run; beyond them `max_waiting` sequences of `max_waiting_tokens` prompt tokens in all
    may wait. A prompt that would wait alone is taken whatever its length. Times are monotonic
    seconds.

    Where several tenants share the queue, none may hold more of it than it leaves free. So one of
    them alone gets half, two that ask for all they can get a third each, and there is room for the
    next one.

    The limits are those of the engine. Where several server processes stand in front of it, each
    counts its own sequences in its row of `numbers` and judges by the totals; requests that come to
    several in the same moment may exceed a limit by their number.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_waiting_tokens: int | None,
        pool_tokens: int,
        numbers: SharedNumbers | None = None,
        index: int = 0,
    ) -> None:
        """`pool_tokens`: what the KV cache holds, for the default of `max_waiting_tokens`; `index`:
        the row of this process.
        """
        self._max_waiting = max_waiting
        self._given_waiting_tokens = max_waiting_tokens
        self.resize(max_running=max_running, pool_tokens=pool_tokens)
        self._waiting: dict[str, tuple[int, str]] = {}  # prompt tokens and tenant by sequence id
        self._running: set[str] = set()
        self._rate = 0.0  # finished sequences per second
        self._rate_time = 0.0
        self._numbers = numbers or SharedNumbers(NUM_COLUMNS)
        self._row = self._numbers.row(index)
        self._row[:] = [0.0] * NUM_COLUMNS

    def resize(self, *, max_running: int, pool_tokens: int) -> None:
        """Set how many sequences the engines run, and how many tokens their KV caches hold."""
        self._max_running = max_running
        self._max_open = max_running + self._max_waiting
        self._max_waiting_tokens = self._given_waiting_tokens or _POOLS_WAITING * pool_tokens

    @property
    def num_open(self) -> int:
        """Sequences that run or wait, of all server processes."""
        return int(self._numbers.total(_OPEN))

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun to run, of all server processes."""
        return int(self._numbers.total(_WAITING))

    @property
    def waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return int(self._numbers.total(_WAITING_TOKENS))

    def check(
        self, num_sequences: int, num_tokens: int, *, now: float, sharer: str | None = None
    ) -> None:
        """Refuse a request for `num_sequences` sequences with `num_tokens` prompt tokens in all:
        `InvalidRequestError` where they never fit, `OverloadedError` where they do not fit now.
        `sharer`: its tenant, if others have the same queue."""
        most = (
            self._max_open if sharer is None else self._max_running + (self._max_waiting + 1) // 2
        )
        if num_sequences > most:
            raise InvalidRequestError(
                f"the request asks for {num_sequences} sequences (prompts times n); allowed: "
                f"{most}",
                param="n",
                code="invalid_value",
            )
        num_open = self.num_open
        if num_open + num_sequences > self._max_open:
            raise OverloadedError(
                f"{num_open} sequences run or wait and {num_sequences} more were asked for; "
                f"allowed: {self._max_open}",
                hint="retry later",
                code="queue_full",
                retry_after=self.retry_after(now),
            )
        if self.waiting_tokens + num_tokens > self._max_waiting_tokens and self.num_waiting:
            raise OverloadedError(
                f"{self.waiting_tokens} prompt tokens wait and {num_tokens} more came; allowed: "
                f"{self._max_waiting_tokens}",
                hint="retry later",
                code="queue_tokens_full",
                retry_after=self.retry_after(now),
            )
        if sharer is not None:
            self._check_share(sharer, num_sequences, num_tokens, now=now)

    def _check_share(self, tenant: str, num_sequences: int, num_tokens: int, *, now: float) -> None:
        """Refuse what would give a tenant more of the queue than it leaves to others; one place it
        may always have."""
        group = _group_of(tenant)
        held = int(self._numbers.total(_GROUP_WAITING + group))
        num_open = self.num_open
        about_to_run = max(0, self._max_running - (num_open - self.num_waiting))
        free = self._max_open - num_open - num_sequences
        if held + num_sequences - about_to_run > free + 1:
            raise self._share_taken(
                f"{held} sequences", f"{num_sequences} more", left=max(0, free), now=now
            )
        held_tokens = int(self._numbers.total(_GROUP_TOKENS + group))
        free_tokens = self._max_waiting_tokens - self.waiting_tokens - num_tokens
        if held and held_tokens + num_tokens > free_tokens:
            raise self._share_taken(
                f"{held_tokens} prompt tokens",
                f"{num_tokens} more",
                left=max(0, free_tokens),
                now=now,
            )

    def _share_taken(self, held: str, asked: str, *, left: int, now: float) -> OverloadedError:
        return OverloadedError(
            f"{held} of this API key wait and {asked} came, which would leave {left} to other "
            f"keys;"
            " a key may hold no more of the queue than it leaves free",
            hint="retry later",
            code="queue_share_full",
            retry_after=self.retry_after(now),
        )

    def retry_after(self, now: float) -> float:
        """About how many seconds until what waits now has begun to run, 1 to 120."""
        rate = self._rate_at(now)
        if not self._waiting or rate <= 0.0:
            return 1.0
        return min(max(1.0, len(self._waiting) / rate), _LONGEST_RETRY)

    def enter(self, sequence_id: str, num_tokens: int, *, tenant: str = "") -> None:
        """A sequence of a tenant's was accepted; its prompt has `num_tokens` tokens to compute."""
        self._waiting[sequence_id] = num_tokens, tenant
        self._count_waiting(1, num_tokens, tenant)
        self._tell()

    def start(self, sequence_id: str) -> None:
        """A sequence began to run; ids that are not waiting are ignored."""
        if self._stop_waiting(sequence_id):
            self._running.add(sequence_id)
            self._tell()

    def leave(self, sequence_id: str, *, now: float) -> None:
        """A sequence is over, however it ended; ids that are not open are ignored."""
        if sequence_id in self._running:
            self._running.remove(sequence_id)
            self._rate = self._rate_at(now) + 1.0 / _RATE_SECONDS
            self._rate_time = now
        else:
            self._stop_waiting(sequence_id)
        self._tell()

    def _stop_waiting(self, sequence_id: str) -> bool:
        """Whether the sequence waited until now."""
        num_tokens, tenant = self._waiting.pop(sequence_id, (None, ""))
        if num_tokens is not None:
            self._count_waiting(-1, -num_tokens, tenant)
        return num_tokens is not None

    def _count_waiting(self, num_sequences: int, num_tokens: int, tenant: str) -> None:
        group = _group_of(tenant)
        self._row[_WAITING_TOKENS] += num_tokens
        self._row[_GROUP_WAITING + group] += num_sequences
        self._row[_GROUP_TOKENS + group] += num_tokens

    def _tell(self) -> None:
        """Let the other processes know."""
        self._row[_OPEN] = len(self._waiting) + len(self._running)
        self._row[_WAITING] = len(self._waiting)

    def _rate_at(self, now: float) -> float:
        return self._rate * math.exp(-(now - self._rate_time) / _RATE_SECONDS)


def _group_of(tenant: str) -> int:
    return zlib.crc32(tenant.encode()) % _GROUPS


def prefill_tokens(num_tokens: int, num_choices: int, *, shares_prompt: bool) -> list[int]:
    """The prompt tokens that each choice of a request has to compute, whose prompt has
    `num_tokens`. With `shares_prompt` the later ones find what the first has computed in the prefix
    cache."""
    return [num_tokens, *[1 if shares_prompt else num_tokens] * (num_choices - 1)]
