"""Define the interface between the parser and a model family's syntax of reasoning and calls."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from negamax.text.parser.call_recovery import read_json_calls
from negamax.text.parser.events import ParserEvent, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from negamax.text.parser.schema_values import ToolSchemas, json_string, json_string_body
from negamax.text.parser.tag_lexer import Lexeme, TagBeginnings, TagKind, TagPattern
from negamax.text.tokenizer import Tokenizer


class CallWriter:
    """Writes tool calls as events. The arguments of a call are the text of one JSON object.

    Values are added to the innermost open container. The key of a value in an array is None. The
    first argument or the end of a call emits its `ToolCallStart`. A call can be discarded until its
    `ToolCallStart` is emitted.
    """

    __slots__ = ("_closers", "_emit", "_has_members", "_index", "_name", "_written", "before_call")

    def __init__(self, emit: Callable[[ParserEvent], None]) -> None:
        self._emit = emit
        self._index = -1
        self._name = ""  # name of the open call until its `ToolCallStart` is emitted
        self.before_call: Callable[[], None] = lambda: None  # callback before each `ToolCallStart`
        self._written: list[str] = []  # emitted JSON of the open objects and arrays
        self._closers: list[str] = []  # closing brackets of the open containers in the arguments
        self._has_members = False  # whether the innermost open container has members or items

    def start_call(self, name: str) -> None:
        self._index += 1
        self._has_members = False
        self._closers.clear()
        self._written.clear()
        self._name = name

    def announce(self) -> None:
        """Emit the `ToolCallStart` of the open call if it was not emitted before."""
        if self._name:
            self.before_call()
            self._emit(ToolCallStart(self._index, self._name))
            self._name = ""

    @property
    def is_announced(self) -> bool:
        return not self._name

    def leave_call(self) -> None:
        """Discard an unreadable call, or truncate the call if its start was emitted."""
        if self._name:
            self._index -= 1
            self._name = ""
        else:
            self.cut_call()

    @property
    def mark(self) -> int:
        """The number of parts of the arguments written so far, for `text_since`."""
        return len(self._written)

    def text_since(self, mark: int) -> str:
        """Return the JSON that was written after `mark`."""
        return "".join(self._written[mark:])

    def member(self, key: str | None, value: str) -> None:
        self._arguments(self._lead(key) + value)

    def open_string(self, key: str | None) -> None:
        """Begin a string, to which each call of `string_text` adds text."""
        self._arguments(self._lead(key) + '"')

    def string_text(self, text: str) -> None:
        if text:
            self._arguments(json_string_body(text))

    def close_string(self) -> None:
        self._arguments('"')

    def open_container(self, key: str | None, *, is_array: bool) -> None:
        self._arguments(self._lead(key) + ("[" if is_array else "{"))
        self._closers.append("]" if is_array else "}")
        self._has_members = False

    def close_container(self) -> None:
        self._arguments(self._closers.pop())
        self._has_members = True

    def end_call(self) -> None:
        """Close the arguments and the call. No container may be open."""
        assert not self._closers
        self._arguments("}" if self._has_members else "{}")
        self._emit(ToolCallEnd(self._index))

    def cut_call(self) -> None:
        """End a truncated call. Write "{" if the call is empty, because clients read "" as {}."""
        if not self._has_members and not self._closers:
            self._arguments("{")

    def _lead(self, key: str | None) -> str:
        if self._has_members:
            lead = ", "
        else:
            lead = "" if self._closers else "{"
            self._has_members = True
        return lead if key is None else f"{lead}{json_string(key)}: "

    def _arguments(self, text: str) -> None:
        if self._name:
            self.announce()
        if self._closers:
            self._written.append(text)
        self._emit(ToolArgumentsDelta(self._index, text))


class CallBlock(ABC):
    """Reader of one call block. The parser passes the lexemes of the block to `take`."""

    __slots__ = (
        "_calls", "_has_calls", "_num_tried", "_opener", "_raw", "_schemas", "_show", "_unread",
    )  # fmt: skip

    def __init__(
        self, calls: CallWriter, *, schemas: ToolSchemas, opener: str, show: Callable[[str], None]
    ) -> None:
        """`opener`: the opening tag, or "" without a block. `show` receives text outside calls."""
        self._calls = calls
        self._schemas = schemas
        self._opener = opener
        self._show = show
        self._has_calls = False
        self._unread: list[str] = []  # text between calls, and text of calls that cannot be parsed
        self._num_tried = 0  # number of parts of `_unread` that were searched for calls in JSON
        self._raw: list[str] = []  # text of the open call until its `ToolCallStart` is emitted
        calls.before_call = self._begin_calls

    @staticmethod
    @abstractmethod
    def is_bare_call(lexeme: Lexeme, schemas: ToolSchemas, *, at_line_start: bool) -> bool:
        """Return whether an invoke tag outside a block begins a call."""

    @abstractmethod
    def take(self, lexeme: Lexeme) -> bool:
        """Process one lexeme. Return True if the lexeme ended the block."""

    @abstractmethod
    def finish(self, *, is_truncated: bool) -> None:
        """Process the output's end in the block. `is_truncated`: was the model interrupted?"""

    @abstractmethod
    def _read_tool_name(self, tag: str) -> str:
        """Return the name of the tool in an invoke tag, or "" if the tag has no name."""

    @abstractmethod
    def _begin_arguments(self, tool: str) -> None:
        """Prepare to read the arguments of a call of `tool`."""

    def _take_between_calls(self, lexeme: Lexeme) -> bool:
        """Process a lexeme outside calls. Return True if the lexeme ended the block."""
        kind = lexeme.kind
        if kind in (TagKind.INVOKE_OPEN, TagKind.LOOSE_INVOKE_OPEN):
            tool = self._read_tool_name(lexeme.text)
            if tool:
                self._make_unread_calls()
                self._calls.start_call(tool)
                self._raw = [lexeme.text]
                self._begin_arguments(tool)
                return False
        is_closer = kind in (TagKind.BLOCK_CLOSE, TagKind.LOOSE_BLOCK_CLOSE)
        if not is_closer and kind not in (TagKind.CUT, TagKind.BLOCK_OPEN):
            self._unread.append(lexeme.text)
        is_end = is_closer or (kind is TagKind.INVOKE_CLOSE and not self._opener)
        if is_end:
            self._end_block(lexeme.text if is_closer else "")
        return is_end

    def _finish_call(self, stray: str) -> None:
        """End the open call at the end of the output. `stray`: text after the last argument."""
        if self._calls.is_announced or not stray.strip():
            self._calls.cut_call()
        else:
            self._leave_call(stray)

    def _begin_calls(self) -> None:
        self._has_calls = True
        self._show_unread()

    def _leave_call(self, text: str) -> None:
        """Discard the open call, because the call contains the unreadable `text`."""
        self._unread += [text] if self._calls.is_announced else self._raw
        self._calls.leave_call()

    def _make_unread_calls(self) -> None:
        """If the text since the last call consists of calls in JSON, emit these calls."""
        calls = read_json_calls("".join(self._unread[self._num_tried :]), self._schemas)
        if calls:
            del self._unread[self._num_tried :]
        self._num_tried = len(self._unread)
        for name, arguments in calls:
            self._calls.start_call(name)
            for key, value in arguments.items():
                self._calls.member(key, value)
            self._calls.end_call()

    def _show_unread(self, closer: str = "") -> None:
        """Emit unread text between calls, or a whole block that contains no calls, as content."""
        text, self._unread, self._num_tried = "".join(self._unread), [], 0
        if text.strip():
            self._show(text.strip() if self._has_calls else f"{self._opener}{text}{closer}")

    def _end_block(self, closer: str = "") -> None:
        self._make_unread_calls()
        self._show_unread(closer)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The tags of a model family, and its reader of call blocks."""

    name: str
    think_open: str
    think_close: str
    call_open: str  # tag that begins a call block
    literals: Mapping[str, TagKind]  # tags with a fixed text, which may be tokens
    patterns: tuple[TagPattern, ...]
    beginnings: TagBeginnings
    new_block: type[CallBlock]
    may_think_again: bool  # whether an opening think tag within content begins reasoning
    call_closers: tuple[str, ...]  # closing tags of calls in addition to `literals`.
    # `name_tags`: tags of calls; {} stands for a name, which may contain quotes and angle brackets
    name_tags: tuple[TagPattern, ...]
    turn_open: str = "]~b]"  # tag before the role of a turn in rendered prompts
    turn_close: str = "[e~["
    assistant: str = "ai"  # name of the model's role in rendered prompts

    def drop_calls(self) -> Self:
        """Return the format for answers in which call tags are ordinary text."""
        think_tags = {tag: self.literals[tag] for tag in (self.think_open, self.think_close)}
        patterns = tuple(p for p in self.patterns if p.kind is TagKind.LOOSE_THINK_CLOSE)
        beginnings = TagBeginnings(tuple(p.prefix + p.rest[:-1] for p in patterns))
        return dataclasses.replace(
            self, literals=think_tags, patterns=patterns, beginnings=beginnings, name_tags=()
        )

    @property
    def ends_in_content(self) -> bool:
        """Whether only content, and neither calls nor more reasoning, can follow the reasoning."""
        has_calls = any(p.kind is not TagKind.LOOSE_THINK_CLOSE for p in self.patterns)
        return not (has_calls or self.may_think_again or self.call_open in self.literals)

    def tag_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return the ids of the tags in `literals` that are tokens of `tokenizer`."""
        found = {tag: tokenizer.token_id(tag) for tag in self.literals}
        return {tag: token_id for tag, token_id in found.items() if token_id is not None}

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether `prompt` ends within the think block of an open assistant turn."""
        if prompt.rstrip("\n").endswith(self.think_open):
            return True
        _, found, turn = prompt.rpartition(f"{self.turn_open}{self.assistant}\n")
        return (
            bool(found)
            and self.turn_close not in turn
            and turn.rfind(self.think_open) > turn.rfind(self.think_close)
        )
