"""Packets with a clock: how long text may be held back for a fragment of good size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from negamax.text.parser.events import ParserEvent
from negamax.text.parser.packets import Packets

HOLD_SECONDS = 0.05


class PacedPackets:
    """`Packets` for one choice of a stream. Single writer: its stream.

    Holding pays only while the rest of a fragment is about to come. So text goes out at once where
    outputs come more than `HOLD_SECONDS` apart, where it has been held for so long, and where it is
    the first, which people wait for most.
    """

    __slots__ = ("_has_begun", "_held_since", "_last_output", "_packets")

    def __init__(self) -> None:
        self._packets = Packets()
        self._has_begun = False
        self._last_output = -math.inf  # monotonic seconds
        self._held_since = -math.inf

    def push(
        self, events: Sequence[ParserEvent], *, now: float, is_last: bool
    ) -> list[ParserEvent]:
        """Take the events of an output that came at `now` (monotonic seconds); return those that go
        out with it.
        """
        was_holding = self._packets.is_holding
        out = self._packets.push(events)
        if out or not was_holding:  # else what was held is still there
            self._held_since = now
        is_slow = now - self._last_output >= HOLD_SECONDS
        self._last_output = now
        if is_last or is_slow or not self._has_begun or now - self._held_since >= HOLD_SECONDS:
            out += self._packets.flush()
        self._has_begun = self._has_begun or bool(out)
        return out
