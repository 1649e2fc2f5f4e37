"""Resize the text fragments of a stream to 5 to 200 characters.

MiniMax's acceptance suite requires fragments of 5 to 200 characters. `Packets` holds back short
text and splits long text. The last fragment of a call's arguments is often short. A complete
fragment of reasoning or arguments is held back, so that a short last fragment can be appended.
Content is held back only until it has 5 characters, because users read content while it arrives.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import structs

from negamax.text.parser.events import (
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

MIN_CHARS, MAX_CHARS = 5, 200
HOLD_SECONDS = 0.05  # longest time that the text of a stream may be held back


class Packets:
    """Resizes the fragments of one choice, and keeps the order of events.

    Held text is released before an event of another kind. The caller must call `flush` at the end,
    and when text was held back too long.
    """

    __slots__ = ("_held", "_like", "_max_chars", "_min_chars", "_ready")

    def __init__(self, *, min_chars: int = MIN_CHARS, max_chars: int = MAX_CHARS) -> None:
        self._min_chars = min_chars
        self._max_chars = max_chars
        # the latest text event; `_held` and `_ready` are text of the same type
        self._like: ReasoningDelta | ContentDelta | ToolArgumentsDelta | None = None
        self._ready = ""  # a complete fragment that waits for the next fragment
        self._held = ""  # text held back until it is a whole fragment

    @property
    def is_holding(self) -> bool:
        return bool(self._ready or self._held)

    def push(self, events: Iterable[ParserEvent]) -> list[ParserEvent]:
        out: list[ParserEvent] = []
        for event in events:
            # a tuple, because `isinstance` with a union takes several times as long
            if isinstance(event, (ToolCallStart, ToolCallEnd)):
                self._release(out)
                out.append(event)
                continue
            # A `ToolCallStart` separates arguments of two calls, so comparing types is enough.
            if type(event) is not type(self._like):
                self._release(out)
            self._like = event
            self._held += event.text
            if len(self._held) >= self._min_chars:
                self._complete(out)
        return out

    def flush(self) -> list[ParserEvent]:
        out: list[ParserEvent] = []
        self._release(out)
        return out

    def _complete(self, out: list[ParserEvent]) -> None:
        """Emit held content. Reasoning and arguments wait until the next fragment is complete."""
        if isinstance(self._like, ContentDelta):
            self._release(out)
        else:
            ready, self._ready, self._held = self._ready, self._held, ""
            self._emit(ready, out)

    def _release(self, out: list[ParserEvent]) -> None:
        text = self._ready + self._held
        self._ready = self._held = ""
        self._emit(text, out)

    def _emit(self, text: str, out: list[ParserEvent]) -> None:
        like = self._like
        if like is None or not text:
            return
        num_parts = -(-len(text) // self._max_chars)
        for part in range(num_parts):  # fragments have about equal lengths, so none is short
            fragment = text[len(text) * part // num_parts : len(text) * (part + 1) // num_parts]
            out.append(structs.replace(like, text=fragment))


class PacedPackets:
    """Resizes the fragments of one choice, and limits the time that text is held back.

    All held text is released with the first output, if outputs arrive at intervals of at least
    `HOLD_SECONDS`, and if text was held back for `HOLD_SECONDS`.
    """

    __slots__ = ("_has_begun", "_held_since", "_last_output", "_packets")

    def __init__(self) -> None:
        self._packets = Packets()
        self._has_begun = False
        self._last_output = -math.inf  # monotonic time of the last `push`
        self._held_since = -math.inf

    def push(
        self, events: Sequence[ParserEvent], *, now: float, is_last: bool
    ) -> list[ParserEvent]:
        """Add the events of an output at `now` (monotonic seconds), and return events to send."""
        was_holding = self._packets.is_holding
        out = self._packets.push(events)
        if out or not was_holding:  # this call of `push` received all held text
            self._held_since = now
        is_slow = now - self._last_output >= HOLD_SECONDS
        self._last_output = now
        if is_last or is_slow or not self._has_begun or now - self._held_since >= HOLD_SECONDS:
            out += self._packets.flush()
        self._has_begun = self._has_begun or bool(out)
        return out
