"""JSON that grows: streams whose every event repeats what was said before, without writing it anew
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

BYTES_PER_SECOND = 2 * 2**20  # of one stream whose events repeat what was said


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
    """When to tell again all that was said so far: what is longer is told less often, so that a
    stream costs as many bytes as it lasts. Single writer: its stream."""

    __slots__ = ("_next", "_rate")

    def __init__(self, *, num_choices: int = 1) -> None:
        """`num_choices` share the rate of a stream."""
        self._rate = BYTES_PER_SECOND / num_choices
        self._next = 0.0

    def is_due(self, num_bytes: int, *, now: float) -> bool:
        """Whether `num_bytes` may be told `now` (monotonic seconds); they are, then."""
        if now < self._next:
            return False
        self._next = now + num_bytes / self._rate
        return True
