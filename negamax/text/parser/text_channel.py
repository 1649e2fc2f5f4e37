"""Write reasoning or content without surplus white space, and detect code in Markdown."""

import re
from collections.abc import Callable

_QUOTES = frozenset("`'\"“‘«")
_FENCE = re.compile(r"[ \t>*+-]*(?:\d+[.)][ \t]+)?(`{3,}|~{3,})(.*)")
_LAST_FENCE = re.compile(r"[^`]*[^`](`{3,})([\w+.-]*)")
_MAX_LINE_CHARS = 300  # only the first characters of a line are searched for a code fence
_MAX_PARTS = 4096  # maximum number of text pieces that wait to be processed


class MarkdownCode:
    """Decides whether the end of a Markdown text is within code."""

    __slots__ = ("_fence", "_line", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []  # pieces of the text that are not processed yet
        self._line = ""  # the beginning of the current line
        self._fence = ""  # fence of the open code block

    def add(self, text: str) -> None:
        self._parts.append(text)
        if len(self._parts) > _MAX_PARTS:
            self._process()

    def is_open(self) -> bool:
        """Return whether the next text is in a fenced or indented code block."""
        self._process()
        line = self._line
        if self._fence or _next_fence(line, ""):
            return bool(_next_fence(line, self._fence))
        words = line.lstrip()
        indent = line[: len(line) - len(words)].expandtabs(4)
        # Tags in an indented line are code. Other text in an indented line is not treated as code.
        return len(indent) >= 4 and (not words or words.startswith(("<", "]<]")))

    def is_inline(self) -> bool:
        """Return whether the next text is in inline code or in a quoted line."""
        self._process()
        return len(re.findall("`+", self._line)) % 2 == 1 or self._line.lstrip().startswith(">")

    def _process(self) -> None:
        *lines, last = "".join([self._line, *self._parts]).split("\n")
        for line in lines:
            self._fence = _next_fence(line[:_MAX_LINE_CHARS], self._fence)
        self._line = last[:_MAX_LINE_CHARS]
        self._parts.clear()


def _next_fence(line: str, fence: str) -> str:
    """Return the fence of the code block that is open after `line`, or "".

    A fence at the end of a line of text also opens a block, because models write such fences.
    """
    line = line.rstrip()
    if fence:
        found = _FENCE.fullmatch(line)
        closes = found[1].startswith(fence) and not found[2] if found else line.endswith(fence)
        return "" if closes else fence
    found = _FENCE.fullmatch(line) or _LAST_FENCE.fullmatch(line)
    return found[1] if found and not (found[1][0] == "`" and "`" in found[2]) else ""


class TextChannel:
    """Writes text to `out`, without line breaks at the start and white space at the end."""

    __slots__ = (
        "_holds_space", "_is_verbatim", "_last_char", "_out", "_space", "code", "has_begun",
    )  # fmt: skip

    def __init__(
        self, out: Callable[[str], None], *, is_verbatim: bool = False, holds_space: bool = True
    ) -> None:
        self._out = out
        self._is_verbatim = is_verbatim
        self._holds_space = holds_space
        self._space: list[str] = []
        self._last_char = ""
        self.has_begun = False
        self.code = MarkdownCode()  # Markdown state of the written text, if `holds_space`

    def write(self, text: str) -> None:
        if self._holds_space:
            self.code.add(text)
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
        """Return whether only white space precedes the next text in its line."""
        return not self.has_begun or any("\n" in space for space in self._space)

    def ends_in_quote(self) -> bool:
        return not self._space and self._last_char in _QUOTES

    def drop_space(self) -> None:
        self._space = []

    def flush(self) -> None:
        """Write the white space at the end, unless the text consists only of white space."""
        if self.has_begun and self._space:
            self._out("".join(self._space))
        self._space = []
