"""Memory for the bodies of open requests, shared by the holders of keys."""

from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from negamax.base.errors import OverloadedError

_STATE = "body_share"  # of a request


class BodyBudget:
    """Bytes that bodies may take. Single writer: the event loop.

    With several keys, one takes no more than it leaves free. Therefore there is room for another.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_free = num_bytes
        self._held: dict[str, int] = {}  # by tenant

    def take(self, count: int, *, tenant: str, is_shared: bool) -> None:
        """Reserve `count` bytes. Errors: `OverloadedError` if there are too few."""
        held = self._held.get(tenant, 0) + count
        if count > 0 and held * is_shared + count > self._num_free:
            whose = "your key's open requests" if is_shared else "open requests"
            raise OverloadedError(
                f"the bodies of {whose} fill the memory reserved for them",
                hint="retry later",
                code="memory",
            )
        self._num_free -= count
        self._held[tenant] = held
        if not held:
            del self._held[tenant]


class BodyShare:
    """The bytes that one request holds, from its body to its end. Single writer: its handler."""

    def __init__(self, budget: BodyBudget, scope: Scope) -> None:
        """`scope` is that of a request whose sender is identified, unless its route is open."""
        state = scope.setdefault("state", {})
        state[_STATE] = self
        self._budget = budget
        self._owner: dict[str, Any] = {
            "tenant": state.get("tenant", ""),
            "is_shared": state.get("shares_queue", False),
        }
        self.num_bytes = 0

    def take(self, count: int) -> None:
        """Reserve `count` more bytes. Errors: as `BodyBudget.take`."""
        self._budget.take(count, **self._owner)
        self.num_bytes += count

    def keep(self, count: int) -> None:
        """Give all but `count` bytes back."""
        self.take(min(0, count - self.num_bytes))


def get_share(request: Request) -> BodyShare | None:
    """Return the share of a request; None without one, as in tests."""
    share: BodyShare | None = request.scope.get("state", {}).get(_STATE)
    return share
