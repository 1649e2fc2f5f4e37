"""Limit the memory for the bodies of open requests, and divide the memory between API keys."""

from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from negamax.base.errors import OverloadedError

_STATE = "body_share"  # Key of the `BodyShare` in a request's state.


class BodyBudget:
    """The bytes of memory that request bodies may use. Only the event loop changes this object.

    If there are several API keys, a key's requests must not reserve more bytes than remain free.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_free = num_bytes
        self._held: dict[str, int] = {}  # tenant -> bytes reserved for the bodies of its requests

    def take(self, count: int, *, tenant: str, is_shared: bool) -> None:
        """Reserve `count` bytes. Raises `OverloadedError` if too few bytes are free."""
        held = self._held.get(tenant, 0) + count
        if count > 0 and held * is_shared + count > self._num_free:
            whose = "your key's open requests" if is_shared else "open requests"
            raise OverloadedError(
                f"the bodies of {whose} fill the memory for request bodies",
                hint="send the request again later",
                code="memory",
            )
        self._num_free -= count
        self._held[tenant] = held
        if not held:
            del self._held[tenant]


class BodyShare:
    """The bytes that one request reserves. Only the request's handler changes this object."""

    def __init__(self, budget: BodyBudget, scope: Scope) -> None:
        """Store this object in the state of `scope`, and reserve bytes for the state's tenant."""
        state = scope.setdefault("state", {})
        state[_STATE] = self
        self._budget = budget
        self._owner: dict[str, Any] = {
            "tenant": state.get("tenant", ""),
            "is_shared": state.get("shares_queue", False),
        }
        self.num_bytes = 0

    def take(self, count: int) -> None:
        """Reserve `count` more bytes. Raises `OverloadedError` if too few bytes are free."""
        self._budget.take(count, **self._owner)
        self.num_bytes += count

    def keep(self, count: int) -> None:
        """Release all but `count` bytes."""
        self.take(min(0, count - self.num_bytes))


def get_share(request: Request) -> BodyShare:
    """Return the `BodyShare` that the middleware has stored in the state of a request."""
    share: BodyShare = request.scope["state"][_STATE]
    return share
