"""White space of reasoning or content while it is written."""

from collections.abc import Callable

_QUOTES = frozenset("`'\"“‘«")


class TextChannel:
    """Reasoning or content: drops leading line breaks unless verbatim, and holds trailing space."""

    __slots__ = ("_holds_space", "_is_verbatim", "_last_char", "_out", "_space", "has_begun")

    def __init__(
        self, out: Callable[[str], None], *, is_verbatim: bool = False, holds_space: bool = True
    ) -> None:
        self._out = out
        self._is_verbatim = is_verbatim
        self._holds_space = holds_space
        self._space: list[str] = []
        self._last_char = ""
        self.has_begun = False

    def write(self, text: str) -> None:
        words = (
            text.rstrip() if self._holds_space or (text.isspace() and not self.has_begun) else text
        )
        if not words:
            self._space.append(text)
            return
        out = "".join(self._space) + words if self._space else words
        if not self.has_begun:
            if not self._is_verbatim:
                indent = len(out) - len(out.lstrip())
                out = out[out.rfind("\n", 0, indent) + 1 :]
            self.has_begun = True
        num_words = len(words)
        self._space = [text[num_words:]] if num_words < len(text) else []
        self._last_char = out[-1]
        self._out(out)

    def is_at_line_start(self) -> bool:
        """Whether only white space precedes the next text in its line."""
        return not self.has_begun or any("\n" in space for space in self._space)

    def ends_in_quote(self) -> bool:
        """Whether the last character is a quotation mark."""
        return not self._space and self._last_char in _QUOTES

    def drop_space(self) -> None:
        self._space = []

    def flush(self) -> None:
        """Release held white space at the end. An answer of white space alone stays empty."""
        if self.has_begun and self._space:
            self._out("".join(self._space))
        self._space = []
