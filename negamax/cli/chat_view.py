"""Display a chat: dimmed thinking, Markdown as it arrives, tool calls and token counts."""

import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from negamax.text.parser import events

_CONTROL_CODES = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_REFRESH_SECONDS = 0.08


class ChatView:
    """Writes to a terminal or a pipe. Control codes of a model never reach the terminal."""

    def __init__(self, *, show_thinking: bool, is_plain: bool) -> None:
        self.console = Console(highlight=False, markup=False)
        # standard error shows the thinking if standard output is a pipe
        self._errors = Console(stderr=True, highlight=False, markup=False)
        thinking = self.console if self.console.is_terminal else self._errors
        self._thinking = thinking if show_thinking else None
        self._is_markdown = self.console.is_terminal and not is_plain

    @property
    def is_interactive(self) -> bool:
        """Whether a person types the input and reads the output."""
        return sys.stdin.isatty() and self.console.is_terminal

    def answer(self) -> "AnswerView":
        return AnswerView(self.console, self._thinking, is_markdown=self._is_markdown)

    def note(self, text: str) -> None:
        """Print a note about the chat, to standard error if standard output is a pipe."""
        console = self.console if self.console.is_terminal else self._errors
        console.print(text.translate(_CONTROL_CODES), style="dim", soft_wrap=True)

    def figures(self, text: str) -> None:
        """Print times and token counts of the last answer, if the output is a terminal."""
        if self.console.is_terminal:
            self.console.print(text, style="dim", soft_wrap=True)

    def problem(self, text: str) -> None:
        """Print an error."""
        print(text.translate(_CONTROL_CODES), file=sys.stderr)


class AnswerView:
    """Shows the events of one answer and collects them into a message."""

    def __init__(self, console: Console, thinking: Console | None, *, is_markdown: bool) -> None:
        self._console = console
        self._thinking = thinking
        self._markdown = MarkdownStream(console) if is_markdown else None
        self._reasoning = ""
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self._complete_calls = 0

    def show(self, shown: Sequence[events.ParserEvent]) -> None:
        for event in shown:
            self._show(event)

    def _show(self, event: events.ParserEvent) -> None:
        match event:
            case events.ReasoningDelta(text):
                if self._content and self._markdown is not None:
                    self._markdown.finish()
                self._reasoning += text
                if self._thinking is not None:
                    self._write(self._thinking, text, style="dim")
            case events.ContentDelta(text):
                if not self._content:
                    self._break_after_thinking()
                self._content += text
                if self._markdown is not None:
                    self._markdown.push(text.translate(_CONTROL_CODES))
                else:
                    self._write(self._console, text)
            case events.ToolCallStart(_, name):
                self._end_content()
                function = {"name": name, "arguments": ""}
                call_id = f"call_{secrets.token_hex(12)}"
                self._calls.append({"id": call_id, "type": "function", "function": function})
            case events.ToolArgumentsDelta(index, text):
                self._calls[index]["function"]["arguments"] += text
            case events.ToolCallEnd(index):
                self._complete_calls += 1
                function = self._calls[index]["function"]
                text = f"\n[call] {function['name']}({function['arguments']})"
                self._write(self._console, text, style="cyan")

    def finish(self) -> dict[str, Any]:
        """End the last line. Return the answer as a message that omits a truncated tool call."""
        if self._thinking is not None and self._reasoning and not self._content and not self._calls:
            self._break_after_thinking()
        for call in self._calls[self._complete_calls :]:
            function = call["function"]
            text = f"\n[call cut off] {function['name']}({function['arguments']}"
            self._write(self._console, text, style="cyan")
        if self._markdown is None or self._calls:
            self._write(self._console, "\n")
        else:
            self._markdown.finish()
        message: dict[str, Any] = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._complete_calls:
            message["tool_calls"] = self._calls[: self._complete_calls]
        return message

    def _end_content(self) -> None:
        """End the displayed content before the first tool call."""
        if self._calls:
            return
        if self._content and self._markdown is not None:
            self._markdown.finish()
        elif not self._content:
            self._break_after_thinking()

    def _break_after_thinking(self) -> None:
        if self._thinking is not None and self._reasoning and not self._calls:
            self._write(self._thinking, "\n\n" if self._thinking is self._console else "\n")

    def _write(self, console: Console, text: str, style: str | None = None) -> None:
        if console.is_terminal:
            text = text.translate(_CONTROL_CODES)
        console.print(text, end="", style=style, soft_wrap=True)
        console.file.flush()


class MarkdownStream:
    """Renders Markdown text as it arrives. Only the last, incomplete block is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._block = ""  # source text of the last, incomplete block
        self._live: Live | None = None
        self._drawn = 0.0  # time of the latest drawing, in monotonic seconds

    def push(self, text: str) -> None:
        self._block += text
        complete, self._block = split_blocks(self._block)
        if complete:
            self._erase()
            self._console.print(_rendered(complete))
            self._console.print()
        now = time.monotonic()
        if self._block.strip() and now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            if self._live is None:
                # A terminal cannot erase lines beyond its height, so the top of a tall block is
                # drawn only when the block ends.
                how: dict[str, Any] = {
                    "auto_refresh": False,
                    "transient": True,
                    "vertical_overflow": "crop",
                }
                self._live = Live(console=self._console, **how)
                self._live.start()
            self._live.update(_tail(self._block, self._console), refresh=True)

    def finish(self) -> None:
        """Print the last block, which may be incomplete."""
        self._erase()
        block, self._block = self._block, ""
        if block.strip():
            self._console.print(_rendered(block))

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown after the last blank line that is not inside a code fence or list."""
    cut, fence, position = 0, "", 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" \n`~"):
                fence = ""
        elif mark:
            fence = mark[1]
        elif not line.strip() and line.endswith("\n") and not _may_continue(text[position:]):
            cut = position
    return text[:cut], text[cut:]


def _may_continue(rest: str) -> bool:
    """Return whether text after a blank line may belong to the block before this line."""
    return not rest.strip(" ") or bool(re.match(r"(?: {2,}|\t|\s*(?:[-+*]|\d+[.)])(?:\s|$))", rest))


def _tail(block: str, console: Console) -> Markdown:
    """Render the last lines of a block, as many as fit on the terminal."""
    most = max(1, console.height - 2)
    lines = block.splitlines(keepends=True)
    if len(lines) <= most:
        return _rendered(block[-most * console.width :])
    fence = _FENCE.match(lines[0])
    return _rendered((lines[0] if fence else "") + "".join(lines[1 - most :]))


def _rendered(text: str) -> Markdown:
    """Render Markdown. Show HTML as literal text, and show the addresses of links."""
    markdown = Markdown(text, hyperlinks=False)
    markdown.parsed = list(_without_html(markdown.parsed))
    return markdown


def _without_html(tokens: Sequence[Any]) -> Iterator[Any]:
    for token in tokens:
        for child in token.children or ():
            if child.type == "html_inline":
                child.type = "text"
        if token.type != "html_block":
            yield token
            continue
        make = type(token)
        text = make("text", "", 0, content=token.content.rstrip("\n"))
        yield make("paragraph_open", "p", 1)
        yield make("inline", "", 0, content=token.content, children=[text])
        yield make("paragraph_close", "p", -1)
