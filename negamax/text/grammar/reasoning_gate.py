"""Detect the end of an output's reasoning, or end the reasoning at its token budget."""

import enum
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Self

from negamax.config.grammar import Marker, Reasoning


class _GateState(enum.Enum):
    UNDECIDED = "may still become reasoning"
    OPEN = "within reasoning"
    CLOSED = "after reasoning"


class ReasoningGate:
    """Tracks the reasoning of one output.

    After `budget` tokens of reasoning the gate requires the closing tokens. If `calls_end_it` is
    set, the opening tag of a call block also ends the reasoning. `token_bytes` is required if a tag
    of the reasoning is not a single token.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        *,
        budget: int | None,
        calls_end_it: bool,
        token_bytes: Callable[[int], bytes] | None,
    ) -> None:
        self._reasoning = reasoning
        self._budget = budget
        self._token_bytes = token_bytes
        self._ends = [reasoning.closer, *([reasoning.call_opener] if calls_end_it else [])]
        self._state = _GateState.OPEN if reasoning.state == "open" else _GateState.UNDECIDED
        self._num_tokens = 0  # number of tokens of reasoning so far.
        # `_text`: in state UNDECIDED all output so far, in state OPEN the possible start of a tag.
        self._text = b""
        self._due: deque[int] = deque()
        self._spend()

    @property
    def is_open(self) -> bool:
        """Whether the output is certainly within its reasoning."""
        return self._state is _GateState.OPEN

    @property
    def due(self) -> int | None:
        """The closing token that must come next, or None."""
        return self._due[0] if self._due else None

    @property
    def is_over(self) -> bool:
        """Whether the reasoning has ended and no closing token is missing."""
        return self._state is _GateState.CLOSED and not self._due

    def fork(self) -> Self:
        """Return an independent copy of this gate."""
        forked = copy(self)
        forked._due = self._due.copy()
        return forked

    def push(self, token_id: int) -> int | bytes | None:
        """Add the next token, and return the part of the token that belongs to the content.

        The returned part is the token, its last bytes, or None. If reasoning is optional, the
        grammar also describes the reasoning, and every token counts as content.
        """
        if self._due:
            self._due.popleft()
        passed: int | bytes | None = token_id
        match self._state:
            case _GateState.UNDECIDED:
                self._decide(token_id)
            case _GateState.OPEN:
                self._num_tokens += 1
                passed = self._look_for_end(token_id)
        self._spend()
        return token_id if self._reasoning.state == "optional" else passed

    def _spend(self) -> None:
        """Require the closing tokens if the budget is spent."""
        if (
            self._state is not _GateState.CLOSED
            and not self._due
            and self._num_tokens == self._budget
        ):
            self._due.extend(self._reasoning.closing_ids)
            self._budget = None

    def _decide(self, token_id: int) -> None:
        """Open the gate if the output begins with the opening tag of reasoning, else close it."""
        opener = self._reasoning.opener
        if opener.token_id is not None:
            self._state = _GateState.OPEN if token_id == opener.token_id else _GateState.CLOSED
            return
        self._text += self._bytes(token_id)
        wanted = opener.text.encode()
        if self._text.startswith(wanted):
            self._state, self._text = _GateState.OPEN, self._text[len(wanted) :]
        elif not wanted.startswith(self._text):
            self._state = _GateState.CLOSED

    def _look_for_end(self, token_id: int) -> int | bytes | None:
        """End the reasoning at a complete end tag. Return the part of the token that is content."""
        for tag in self._ends:
            if tag.token_id == token_id:
                self._state = _GateState.CLOSED
                return token_id if tag is not self._reasoning.closer else None
        spelled = [tag for tag in self._ends if tag.token_id is None]
        if not spelled:
            return None
        self._text += self._bytes(token_id)
        found = [
            (place, tag) for tag in spelled if (place := self._text.find(tag.text.encode())) >= 0
        ]
        if not found:
            longest = max(len(tag.text.encode()) for tag in spelled)
            self._text = self._text[1 - longest :] if longest > 1 else b""
            return None
        place, tag = min(found, key=lambda hit: hit[0])
        self._state = _GateState.CLOSED
        if tag is not self._reasoning.closer:
            return self._text[place:]
        return self._text[place + len(tag.text.encode()) :].lstrip() or None

    def _bytes(self, token_id: int) -> bytes:
        assert self._token_bytes is not None, "a marker without token_id needs token_bytes"
        return self._token_bytes(token_id)


def needs_text(reasoning: Reasoning) -> bool:
    """Return whether a reasoning tag is not one token, so that a gate needs tokens' bytes."""
    markers: list[Marker] = [reasoning.closer, reasoning.call_opener]
    if reasoning.state == "optional":
        markers.append(reasoning.opener)
    return any(tag.token_id is None for tag in markers)
