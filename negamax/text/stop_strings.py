"""Search for the first stop string in text that arrives in pieces."""

from collections import deque
from collections.abc import Callable, Sequence

from negamax.base.errors import InvalidRequestError


class StopMatcher:
    """Aho-Corasick automaton of the stop strings, with one step per character.

    A state is the longest text suffix that begins a stop string. State 0 is the empty suffix.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton. Raises `InvalidRequestError` for an empty stop string."""
        if "" in stops:
            raise InvalidRequestError(
                "stop has an empty string; give each stop string at least 1 character", param="stop"
            )
        self._next: list[dict[str, int]] = [{}]  # state -> character -> next state
        self._fallback = [0]  # state -> state of the longest proper suffix
        self._depth = [0]  # state -> length of the matched prefix
        self._match: list[str | None] = [None]  # state -> longest stop string ending there
        for stop in stops:
            self._insert(stop)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self._match[state] = self._match[state] or self._match[fallback]
            for char, child in self._next[state].items():
                self._fallback[child] = self._step(fallback, char)
                queue.append(child)

    def scan(self, text: str, *, state: int, may_match: bool) -> tuple[str | None, int, int]:
        """Read `text`. Return the first stop string or None, its end offset, and the new state."""
        for offset, char in enumerate(text):
            state = self._step(state, char)
            matched = self._match[state]
            if matched is not None and may_match:
                return matched, offset + 1, state
        # After an ignored stop string, only a shorter suffix may become another stop string.
        while state and not self._next[state]:
            state = self._fallback[state]
        return None, len(text), state

    def depth(self, state: int) -> int:
        """Return the length of the suffix that `state` represents, which must be held back."""
        return self._depth[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._next[state].get(char)
            if child is None:
                child = self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = child
        self._match[state] = stop

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)


class StoppableText:
    """Emits content up to the first stop string. Holds back text that may become a stop string."""

    __slots__ = (
        "_held", "_is_before_word", "_is_included", "_out", "_state", "_stops", "matched",
        "may_match",
    )  # fmt: skip

    def __init__(
        self, out: Callable[[str], None], stops: StopMatcher, *, is_included: bool
    ) -> None:
        """`out` receives the text, with the stop string only if `is_included`."""
        self._out = out
        self._stops = stops
        self._is_included = is_included
        self._state = 0
        self._held = ""
        self._is_before_word = True
        self.may_match = True
        self.matched: str | None = None  # the stop string that ended the text

    def write(self, text: str) -> None:
        """Add text. Text after a stop string is dropped."""
        if self.matched is not None:
            return
        if self._is_before_word:
            text = self._emit_space(text)
        self.matched, end, self._state = self._stops.scan(
            text, state=self._state, may_match=self.may_match
        )
        end += len(self._held)
        text = self._held + text
        if self.matched is None:
            end -= self._stops.depth(self._state)
        elif not self._is_included:
            end -= len(self.matched)
        self._held = "" if self.matched is not None else text[end:]
        if end:
            self._out(text[:end])

    def release(self) -> None:
        """When the content ends or is interrupted, emit the text that was held back."""
        if self._held:
            self._out(self._held)
        self._held = ""
        self._state = 0

    def begin(self, *, is_before_word: bool) -> None:
        """Begin or continue content. With `is_before_word`, no match begins in leading space."""
        self.release()
        self._is_before_word = is_before_word

    def _emit_space(self, text: str) -> str:
        rest = text.lstrip()
        if len(rest) < len(text):
            self._out(text[: len(text) - len(rest)])
        self._is_before_word = not rest
        return rest
