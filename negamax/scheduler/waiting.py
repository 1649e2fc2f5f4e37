"""The queue of requests without a slot, in which tenants take turns.

Among waiting requests of equal priority, requests of the tenant with the fewest running rows come
first. Requests of the same tenant and priority are ordered by turn, then by arrival.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from math import inf
from operator import attrgetter

from negamax.scheduler.sequence import Sequence

by_order = attrgetter("order")


class WaitingQueue:
    """Lists of waiting sequences by tenant. Tenants without waiting sequences are dropped."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._by_tenant.values() for sequence in queue)

    def push(self, sequence: Sequence) -> None:
        insort(self._by_tenant.setdefault(sequence.tenant, []), sequence, key=by_order)

    def remove(self, sequence: Sequence) -> None:
        queue = self._by_tenant[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._by_tenant[sequence.tenant]

    def tenants(self, priority: int) -> set[str]:
        """Return the tenants with a sequence of `priority` or a better priority."""
        heads = self._by_tenant.items()
        return {tenant for tenant, queue in heads if queue[0].order[0] <= priority}

    def first(
        self, num_rows: Mapping[str, int], *, after: Mapping[str, tuple[float, ...]] | None = None
    ) -> Sequence | None:
        """Return the next sequence to admit, or None if no sequence waits.

        `num_rows` maps a tenant to its number of running rows. `after` maps a tenant to the order
        of its first unfinished prompt, and later requests of the tenant are skipped.
        """
        heads = [queue[0] for queue in self._by_tenant.values()]
        if after:
            heads = [head for head in heads if head.order < after.get(head.tenant, (inf,))]
        return min(heads, key=lambda head: rank_waiting(head, num_rows), default=None)


def rank_waiting(sequence: Sequence, num_rows: Mapping[str, int]) -> tuple[int, ...]:
    """Return the key by which `WaitingQueue.first` orders waiting sequences."""
    return sequence.order[0], num_rows.get(sequence.tenant, 0), *sequence.order[1:]


def choose_victim(
    running: list[Sequence], sequence: Sequence, num_rows: Mapping[str, int]
) -> Sequence:
    """Return the row to preempt so that `sequence` may grow. Of `sequence` and all later rows,
    choose by worst priority, then by most rows of the tenant, then the last row.
    """
    if len(num_rows) == 1:
        return running[-1]
    rows = running[running.index(sequence) :]
    return max(reversed(rows), key=lambda row: (row.order[0], num_rows[row.tenant]))


def list_yielding(
    running: list[Sequence], waiting: Sequence, num_rows: Mapping[str, int]
) -> tuple[list[Sequence], str]:
    """Return rows that may be preempted for a waiting sequence, and their tenant. No row has a
    better priority than the waiting sequence. The rows are sorted by computed tokens. The returned
    tenant has the most running rows.
    """
    rows = [
        row
        for row in reversed(running)
        if row.order[0] >= waiting.order[0] and row.num_total < row.limit
    ]
    tenant = max((row.tenant for row in rows), key=num_rows.__getitem__, default="")
    rows = [row for row in rows if row.tenant == tenant]
    return sorted(rows, key=lambda row: row.num_computed), tenant
