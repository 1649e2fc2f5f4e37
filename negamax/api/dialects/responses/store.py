"""Stored responses, in memory and within a limit, so that clients can fetch and continue them."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20

Item = dict[str, Any]


class StoredTurn:
    """One response's items as JSON, on top of the turn before. Single writer: the store."""

    def __init__(
        self, parent: "StoredTurn | None", *, input_items: bytes, output_items: bytes
    ) -> None:
        self.parent = parent
        self.input_items = input_items
        self.output_items = output_items
        self.total_bytes: int = (
            len(input_items) + len(output_items) + (0 if parent is None else parent.total_bytes)
        )
        self.num_users = 0  # stored responses with this turn, and turns on top of it

    @property
    def num_bytes(self) -> int:
        return len(self.input_items) + len(self.output_items)

    def conversation(self) -> list[Item]:
        parts: list[bytes] = []
        turn: StoredTurn | None = self
        while turn is not None:
            parts += (turn.output_items, turn.input_items)
            turn = turn.parent
        return [item for part in reversed(parts) for item in decode_items(part)]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as clients fetch it, its turn, and the ids of its output items."""

    body: bytes  # JSON
    turn: StoredTurn
    item_ids: Sequence[str] = ()
    tenant: str = ""  # no other tenant can see it


class ResponseStore:
    """Stores the most recently used responses. Single writer: the event loop.

    A turn lives as long as a stored response needs it; its bytes count once.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, str] = {}  # the response that an output item belongs to, by id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response_id: str, kept: StoredResponse) -> None:
        """Store a response or its new state; the least recently used ones make room."""
        _change_users(kept.turn, 1, store=self)
        self.remove(response_id)
        self._responses[response_id] = kept
        self.num_bytes += len(kept.body)
        self._owners.update((item_id, response_id) for item_id in kept.item_ids)
        while self._responses and (
            len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes
        ):
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str, *, tenant: str = "") -> StoredResponse | None:
        """Return the response, or None if the tenant has none of this id; it counts as used."""
        kept = self._responses.get(response_id)
        if kept is None or kept.tenant != tenant:
            return None
        self._responses.move_to_end(response_id)
        return kept

    def items(self, item_ids: Collection[str], *, tenant: str = "") -> dict[str, Item]:
        """Return output items of the tenant's stored responses by id; unknown ids are omitted."""
        found: dict[str, Item] = {}
        for response_id in {self._owners.get(item_id, "") for item_id in item_ids}:
            kept = self.get(response_id, tenant=tenant)
            items = [] if kept is None else decode_items(kept.turn.output_items)
            found.update((item["id"], item) for item in items if item["id"] in item_ids)
        return found

    def remove(self, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""
        kept = self._responses.pop(response_id, None)
        if kept is None:
            return False
        self.num_bytes -= len(kept.body)
        for item_id in kept.item_ids:
            self._owners.pop(item_id, None)
        _change_users(kept.turn, -1, store=self)
        return True


def _change_users(turn: StoredTurn, change: int, *, store: ResponseStore) -> None:
    """Add `change` to the users of `turn`, and to those of each turn below that it uses."""
    below: StoredTurn | None = turn
    while below is not None:
        num_before = below.num_users
        below.num_users += change
        if 0 not in (num_before, below.num_users):
            return
        store.num_bytes += change * below.num_bytes
        below = below.parent


def decode_items(items: bytes) -> list[Item]:
    return msgspec.json.decode(items, type=list[Item])
