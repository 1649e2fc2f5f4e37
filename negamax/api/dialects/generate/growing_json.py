"""Encode each output only once for streams whose events repeat all earlier output."""

from collections.abc import Sequence
from typing import Any

import msgspec

BYTES_PER_SECOND = 2 * 2**20  # Rate limit of one stream, in bytes per second.


class GrowingList:
    """The JSON text of a growing list. Only the stream's handler changes this object."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = bytearray()

    def extend(self, entries: Sequence[object]) -> None:
        if entries:
            if self._text:
                self._text += b","
            self._text += memoryview(msgspec.json.encode(entries))[1:-1]

    @property
    def num_bytes(self) -> int:
        return len(self._text)

    def json(self) -> Any:
        return msgspec.Raw(b"".join((b"[", self._text, b"]")))


class RepeatPacing:
    """Limits the byte rate of a stream. Only the stream's handler changes this object."""

    __slots__ = ("_next", "_rate")

    def __init__(self, *, num_choices: int = 1) -> None:
        """`num_choices` is the number of choices that share the rate of a stream."""
        self._rate = BYTES_PER_SECOND / num_choices
        self._next = 0.0

    def is_due(self, num_bytes: int, *, now: float) -> bool:
        """Return whether an event may be sent at `now`, in seconds, and if so, count its bytes."""
        if now < self._next:
            return False
        self._next = now + num_bytes / self._rate
        return True
