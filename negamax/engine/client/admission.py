"""Limit the number of waiting sequences, their prompt tokens, and each tenant's queue space."""

import math
import zlib

from negamax.base.errors import InvalidRequestError, OverloadedError
from negamax.base.shared_numbers import SharedNumbers

_RATE_SECONDS = 20.0  # Time constant of the average rate of finished sequences.
_LONGEST_RETRY = 120.0  # Upper limit of Retry-After, in seconds.
_POOLS_WAITING = 4  # Default limit of waiting prompt tokens, as a multiple of the KV cache size.

# Columns of the shared table: three totals of all tenants, waiting sequences per group, waiting
# tokens per group. Tenants whose names hash to the same of `_GROUPS` groups count as one tenant.
_GROUPS = 256
_OPEN, _WAITING, _WAITING_TOKENS, _GROUP_WAITING = range(4)
_GROUP_TOKENS = _GROUP_WAITING + _GROUPS
NUM_COLUMNS = _GROUP_TOKENS + _GROUPS


class Admission:
    """Counts open sequences for `AsyncEngine`, and admits or refuses new sequences.

    A sequence waits from `enter` until `start`, and is open until `leave`. If no other prompt
    waits, a prompt of any length is admitted. All times are monotonic seconds. If tenants share the
    queue, a tenant may use only as much of the queue as remains free. So one tenant alone can use
    half of the queue, and two tenants can use a third each.

    Each server process counts its sequences in one row of `numbers`, and compares the sums of all
    rows with the limits. Requests that reach several processes at the same time can exceed a limit.
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
        """Set the limits. KV caches have `pool_tokens` tokens. This process writes row `index`."""
        self._max_waiting = max_waiting
        self._given_waiting_tokens = max_waiting_tokens
        self.resize(max_running=max_running, pool_tokens=pool_tokens)
        # (number of prompt tokens, tenant) of each waiting sequence, by sequence id.
        self._waiting: dict[str, tuple[int, str]] = {}
        self._running: set[str] = set()
        self._rate = 0.0  # Number of sequences that finish per second.
        self._rate_time = 0.0
        self._numbers = numbers or SharedNumbers(NUM_COLUMNS)
        self._row = self._numbers.row(index)
        self._row[:] = [0.0] * NUM_COLUMNS

    def resize(self, *, max_running: int, pool_tokens: int) -> None:
        """Set how many sequences the engines run, and how many tokens the KV caches store."""
        self._max_running = max_running
        self._max_open = max_running + self._max_waiting
        self._max_waiting_tokens = self._given_waiting_tokens or _POOLS_WAITING * pool_tokens

    @property
    def num_open(self) -> int:
        """Return the number of running and waiting sequences of all server processes."""
        return int(self._numbers.total(_OPEN))

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting sequences of all server processes."""
        return int(self._numbers.total(_WAITING))

    @property
    def waiting_tokens(self) -> int:
        return int(self._numbers.total(_WAITING_TOKENS))

    def check(
        self, num_sequences: int, num_tokens: int, *, now: float, sharer: str | None = None
    ) -> None:
        """Check that `num_sequences` sequences with `num_tokens` prompt tokens fit into the queue.

        Raises `InvalidRequestError` if the limits never allow so many sequences, `OverloadedError`
        if the queue is too full. `sharer` is the tenant if tenants share the queue.
        """
        most = (
            self._max_open if sharer is None else self._max_running + (self._max_waiting + 1) // 2
        )
        if num_sequences > most:
            raise InvalidRequestError(
                f"the request has {num_sequences} sequences (prompts times n); allowed: {most}",
                param="n",
                code="invalid_value",
            )
        num_open = self.num_open
        if num_open + num_sequences > self._max_open:
            text = f"{num_open} sequences run or wait, and the request adds {num_sequences}; "
            raise self._refusal(f"{text}the limit is {self._max_open}", "queue_full", now=now)
        tokens, limit = self.waiting_tokens, self._max_waiting_tokens
        if tokens + num_tokens > limit and self.num_waiting:
            text = f"{tokens} prompt tokens wait, and the request adds {num_tokens}; "
            raise self._refusal(f"{text}the limit is {limit}", "queue_tokens_full", now=now)
        if sharer is not None:
            self._check_share(sharer, num_sequences, num_tokens, now=now)

    def _check_share(self, tenant: str, num_sequences: int, num_tokens: int, *, now: float) -> None:
        """Refuse a request if its tenant would use more of the queue than would remain free."""
        group, num_open = _hash_tenant(tenant), self.num_open
        held = int(self._numbers.total(_GROUP_WAITING + group))
        held_tokens = int(self._numbers.total(_GROUP_TOKENS + group))
        about_to_run = max(0, self._max_running - (num_open - self.num_waiting))
        free = self._max_open - num_open - num_sequences
        free_tokens = self._max_waiting_tokens - self.waiting_tokens - num_tokens
        if held + num_sequences - about_to_run > free + 1:
            used, added, left = f"{held} sequences", num_sequences, free
        elif held and held_tokens + num_tokens > free_tokens:
            used, added, left = f"{held_tokens} prompt tokens", num_tokens, free_tokens
        else:
            return
        raise self._refusal(
            f"{used} of this API key wait, and the request adds {added} more; this leaves "
            f"{max(0, left)} for other API keys. An API key must not use more of the queue than it "
            "leaves free",
            "queue_share_full",
            now=now,
        )

    def _refusal(self, message: str, code: str, *, now: float) -> OverloadedError:
        retry_after = self.retry_after(now)
        return OverloadedError(message, hint="retry later", code=code, retry_after=retry_after)

    def retry_after(self, now: float) -> float:
        """Estimate the seconds (1 to 120) until all sequences that wait now have started."""
        rate = self._rate_at(now)
        if not self._waiting or rate <= 0.0:
            return 1.0
        return min(max(1.0, len(self._waiting) / rate), _LONGEST_RETRY)

    def enter(self, sequence_id: str, num_tokens: int, *, tenant: str = "") -> None:
        """Count an admitted sequence, which must compute `num_tokens` prompt tokens."""
        self._waiting[sequence_id] = num_tokens, tenant
        self._count_waiting(1, num_tokens, tenant)
        self._publish()

    def start(self, sequence_id: str) -> None:
        """Count a waiting sequence as running. Ignore the id of a sequence that does not wait."""
        if self._stop_waiting(sequence_id):
            self._running.add(sequence_id)
            self._publish()

    def leave(self, sequence_id: str, *, now: float) -> None:
        """Stop counting a sequence that has ended. Ignore the id of an unknown sequence."""
        if sequence_id in self._running:
            self._running.remove(sequence_id)
            self._rate = self._rate_at(now) + 1.0 / _RATE_SECONDS
            self._rate_time = now
        else:
            self._stop_waiting(sequence_id)
        self._publish()

    def _stop_waiting(self, sequence_id: str) -> bool:
        """Remove a sequence from the queue. Return whether the sequence was in the queue."""
        num_tokens, tenant = self._waiting.pop(sequence_id, (None, ""))
        if num_tokens is not None:
            self._count_waiting(-1, -num_tokens, tenant)
        return num_tokens is not None

    def _count_waiting(self, num_sequences: int, num_tokens: int, tenant: str) -> None:
        group = _hash_tenant(tenant)
        self._row[_WAITING_TOKENS] += num_tokens
        self._row[_GROUP_WAITING + group] += num_sequences
        self._row[_GROUP_TOKENS + group] += num_tokens

    def _publish(self) -> None:
        self._row[_OPEN] = len(self._waiting) + len(self._running)
        self._row[_WAITING] = len(self._waiting)

    def _rate_at(self, now: float) -> float:
        return self._rate * math.exp(-(now - self._rate_time) / _RATE_SECONDS)


def _hash_tenant(tenant: str) -> int:
    return zlib.crc32(tenant.encode()) % _GROUPS
