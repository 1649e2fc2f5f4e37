"""Store responses in memory up to a limit, so that clients can fetch and continue them."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from negamax.api.dialects.responses.history import is_passed_over
from negamax.api.http.request_body import count_openers
from negamax.text.messages import is_unseen

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20
_SMALL_BYTES = 1024  # Fields above this size are stored only if the prompt shows them.
_ITEM_FIELDS = (
    "content", "summary", "encrypted_content", "arguments", "input", "output", "action",
    "operation", "tools", "text", "result", "value",
)  # fmt: skip
_PART_FIELDS = ("text", "refusal", "content", "output", "result", "value", "stdout", "stderr")
_SETTING_FIELDS = ("description", "parameters", "function", "tools", "schema")
_SHOWN_SETTINGS = (  # Types of tools, choices and formats that affect the prompt or the answer.
    "function", "custom", "namespace", "tool_search", "allowed_tools", "json_schema",
)  # fmt: skip

Item = dict[str, Any]


class StoredTurn:
    """The items of one response as JSON. Only the store changes this object."""

    def __init__(
        self, parent: "StoredTurn | None", *, input_items: bytes, output_items: bytes
    ) -> None:
        self.parent = parent
        self.input_items = input_items
        self.output_items = output_items
        self.num_bytes = len(input_items) + len(output_items)
        self.total_bytes: int = self.num_bytes + (0 if parent is None else parent.total_bytes)
        own_openers = count_openers(input_items) + count_openers(output_items)
        self.total_openers: int = own_openers + (0 if parent is None else parent.total_openers)
        self.num_users = 0  # Number of stored responses and of later turns that refer to this turn.

    def conversation(self) -> list[Item]:
        parts: list[bytes] = []
        turn: StoredTurn | None = self
        while turn is not None:
            parts += (turn.output_items, turn.input_items)
            turn = turn.parent
        return [item for part in reversed(parts) for item in decode_items(part)]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The JSON of a response that clients fetch, its turn, and the ids of its output items."""

    body: bytes  # JSON.
    turn: StoredTurn
    item_ids: Sequence[str] = ()
    tenant: str = ""  # Tenant that may fetch the response.


@dataclass(slots=True)
class _TenantResponses:
    """The responses of one tenant. Only the store changes this object."""

    # Responses in the order of their last use; the least recently used response is first.
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    owners: dict[str, str] = field(default_factory=dict)  # output item id -> id of its response
    num_bytes: int = 0


class ResponseStore:
    """Stores the most recently used responses. Only the event loop changes this object.

    The store keeps a turn while a stored response needs it, and counts a shared turn's bytes once.
    If full, the store removes the oldest response of the tenant with the most bytes or responses.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._tenants: dict[str, _TenantResponses] = {}

    def __len__(self) -> int:
        return sum(len(each.responses) for each in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._tenants.values())

    def put(self, response_id: str, kept: StoredResponse) -> None:
        """Store a response, or replace its stored state. A full store removes other responses."""
        own = self._tenants.setdefault(kept.tenant, _TenantResponses())
        _change_users(kept.turn, 1, owner=own)
        _remove(own, response_id)
        own.responses[response_id] = kept
        own.num_bytes += len(kept.body)
        own.owners.update((item_id, response_id) for item_id in kept.item_ids)
        while (is_full := self.num_bytes > self._max_bytes) or len(self) > self._max_responses:
            tenants = self._tenants.items()
            if is_full:
                tenant, largest = max(tenants, key=lambda each: each[1].num_bytes)
            else:
                tenant, largest = max(tenants, key=lambda each: len(each[1].responses))
            self.remove(next(iter(largest.responses)), tenant=tenant)

    def get(self, response_id: str, *, tenant: str = "") -> StoredResponse | None:
        """Return a response and mark it as used; None if the tenant has no response of this id."""
        own = self._tenants.get(tenant)
        if own is None or response_id not in own.responses:
            return None
        own.responses.move_to_end(response_id)
        return own.responses[response_id]

    def items(self, item_ids: Collection[str], *, tenant: str = "") -> dict[str, Item]:
        """Map ids to output items of the tenant's stored responses. Unknown ids are omitted."""
        found: dict[str, Item] = {}
        owners = self._tenants[tenant].owners if tenant in self._tenants else {}
        for response_id in {owners.get(item_id, "") for item_id in item_ids}:
            kept = self.get(response_id, tenant=tenant)
            items = [] if kept is None else decode_items(kept.turn.output_items)
            found.update((item["id"], item) for item in items if item["id"] in item_ids)
        return found

    def remove(self, response_id: str, *, tenant: str = "") -> bool:
        """Delete a response, and return whether it was stored."""
        own = self._tenants.get(tenant)
        is_stored = own is not None and _remove(own, response_id)
        if own is not None and not own.responses:
            del self._tenants[tenant]
        return is_stored


def _remove(own: _TenantResponses, response_id: str) -> bool:
    kept = own.responses.pop(response_id, None)
    if kept is None:
        return False
    own.num_bytes -= len(kept.body)
    for item_id in kept.item_ids:
        own.owners.pop(item_id, None)
    _change_users(kept.turn, -1, owner=own)
    return True


def _change_users(turn: StoredTurn, change: int, *, owner: _TenantResponses) -> None:
    """Add `change` to `turn.num_users`, and to the parent's if `turn` becomes used or unused."""
    below: StoredTurn | None = turn
    while below is not None:
        num_before = below.num_users
        below.num_users += change
        if 0 not in (num_before, below.num_users):
            return
        owner.num_bytes += change * below.num_bytes
        below = below.parent


def encode_shown(items: Sequence[Mapping[str, Any]], *, keeps_images: bool = False) -> bytes:
    """Encode items without the large fields that the prompt omits."""
    return msgspec.json.encode([_trim_item(item, keeps_images=keeps_images) for item in items])


def trim_setting(setting: Mapping[str, Any]) -> Item:
    """Return a tool, a tool choice or a text format without large fields that have no effect."""
    is_shown = setting.get("type") in _SHOWN_SETTINGS
    trimmed = _trim(setting, _SETTING_FIELDS if is_shown else ())
    if isinstance(tools := trimmed.get("tools"), list):
        trimmed["tools"] = [
            trim_setting(tool) if isinstance(tool, dict) else tool for tool in tools
        ]
    return trimmed


def _trim_item(item: Mapping[str, Any], *, keeps_images: bool) -> Item:
    trimmed = _trim(item, () if is_passed_over(item) else _ITEM_FIELDS)
    for name in ("content", "output", "summary"):
        if isinstance(parts := trimmed.get(name), list):
            trimmed[name] = [
                _trim(part, _find_shown_fields(part, keeps_images=keeps_images))
                if isinstance(part, dict)
                else part
                for part in parts
            ]
    return trimmed


def _find_shown_fields(part: Mapping[str, Any], *, keeps_images: bool) -> Collection[str]:
    if keeps_images and part.get("type") == "input_image":
        return ("image_url",)
    return () if is_unseen(part) else _PART_FIELDS


def _trim(value: Mapping[str, Any], shown: Collection[str]) -> Item:
    return {
        name: inner
        for name, inner in value.items()
        if name in shown
        or isinstance(inner, int | float | None)
        or len(msgspec.json.encode(inner)) <= _SMALL_BYTES
    }


def decode_items(items: bytes) -> list[Item]:
    return msgspec.json.decode(items, type=list[Item])
