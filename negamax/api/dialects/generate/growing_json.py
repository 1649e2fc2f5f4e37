"""JSON that grows: streams whose every event repeats the earlier ones, without encoding them again
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

BYTES_PER_SECOND = 2 * 2**20  # of one stream whose events repeat the earlier ones


class GrowingList:
    """The JSON text of a list that only grows. Single writer: its stream."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = bytearray()

    def extend(self, entries: Sequence[object]) -> None:
        """Append to the list."""
        if entries:
            if self._text:
                self._text += b","
            self._text += memoryview(msgspec.json.encode(entries))[1:-1]

    @property
    def num_bytes(self) -> int:
        """The size of its text."""
        return len(self._text)

    def json(self) -> Any:
        """The list so far, for a field of its type in what is to be encoded."""
        return msgspec.Raw(b"".join((b"[", self._text, b"]")))


class RepeatPacing:
    """When to send an event with all that there is so far: longer ones are sent less often, so
    that the bytes of a stream grow with its duration only. Single writer: its stream."""

    __slots__ = ("_next", "_rate")

    def __init__(self, *, num_choices: int = 1) -> None:
        """`num_choices` share the rate of a stream."""
        self._rate = BYTES_PER_SECOND / num_choices
        self._next = 0.0

    def is_due(self, num_bytes: int, *, now: float) -> bool:
        """Whether `num_bytes` may be sent `now` (monotonic seconds); they are, then."""
        if now < self._next:
            return False
        self._next = now + num_bytes / self._rate
        return True
