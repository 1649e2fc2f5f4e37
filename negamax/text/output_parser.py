"""One streaming state machine that turns generated text into reasoning, content and tool calls.

It decides between reasoning, content and call blocks; the inside of a block is the business of the model's format file.
Output is read once, tag by tag, and what comes out depends only on the text, never on how it was cut into pieces: a parsed
answer is the sum of its stream.

Rules for every format:
- Reasoning ends at its closer, or at a call block that opens in it. A second opener before the first word of reasoning and
  a second closer before the first word of content are dropped. An opener before the first word of content begins reasoning;
  once content has begun, think tags are part of it.
- A call opener begins a block where it begins a line of content, or where an invoke or the end of the output follows it.
  Anywhere else it is quoted text.
- White space between content and a call block is layout. Line breaks at the edges of reasoning and before content are too.
- Tools that were not declared are reported like any other. At the end of the output a beginning of a tag is text again, except
  inside a call block, where it is dropped: a name that was cut gives no call, a cut string argument keeps what came, other cut
  arguments are dropped, and the JSON is always closed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from negamax.text.detokenizer import TextPiece
from negamax.text.schema_values import ToolSchemas, json_string, json_string_body
from negamax.text.tag_lexer import Lexeme, TagKind, TagLexer, TagPattern


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; `index` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of this call are complete: their deltas form one JSON object."""

    index: int


ParserEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call of an answer; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer. A part that does not occur is None."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ParsedToolCall]


class CallWriter:
    """Writes tool calls as events; arguments are one JSON object that grows member by member. Single writer: the open block."""

    def __init__(self, emit: Callable[[ParserEvent], None]) -> None:
        self._emit = emit
        self._index = -1
        self._has_members = False

    def start_call(self, name: str) -> None:
        """Begin the next call."""
        self._index += 1
        self._has_members = False
        self._emit(ToolCallStart(self._index, name))

    def member(self, key: str, value: str) -> None:
        """Add a whole argument; `value` is JSON."""
        self._arguments(self._lead(key) + value)

    def open_string(self, key: str) -> None:
        """Begin a string argument that arrives bit by bit."""
        self._arguments(self._lead(key) + '"')

    def string_text(self, text: str) -> None:
        """Add text to the open string."""
        if text:
            self._arguments(json_string_body(text))

    def close_string(self) -> None:
        """End the open string."""
        self._arguments('"')

    def end_call(self) -> None:
        """Close the arguments and the call."""
        self._arguments("}" if self._has_members else "{}")
        self._emit(ToolCallEnd(self._index))

    def _lead(self, key: str) -> str:
        lead = ", " if self._has_members else "{"
        self._has_members = True
        return f"{lead}{json_string(key)}: "

    def _arguments(self, text: str) -> None:
        self._emit(ToolArgumentsDelta(self._index, text))


class CallBlock(Protocol):
    """The inside of one call block, as a format reads it."""

    def take(self, lexeme: Lexeme) -> bool:
        """Process one lexeme; True when it ended the block."""

    def finish(self) -> None:
        """The output is over: close what is open."""


class NewBlock(Protocol):
    """Makes the reader of a block that opens; `has_opener` is False for a bare call."""

    def __call__(self, calls: CallWriter, *, schemas: ToolSchemas, has_opener: bool) -> CallBlock: ...


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model family writes reasoning and calls: its tags, and the reader of a call block."""

    name: str
    literals: Mapping[str, TagKind]  # tags with a fixed text, which may be one token each
    patterns: tuple[TagPattern, ...]
    first_chars: str  # characters with which a tag can begin
    new_block: NewBlock
    is_bare_call: Callable[[Lexeme, ToolSchemas], bool]  # whether an invoke on its own line, without a block, is a call


class _State(enum.Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    BLOCK = "call block"


class OutputParser:
    """Parses one answer. Feed pieces, take events; call `finish` once at the end. Single writer: the owner of the answer.

    `tools` are the declared tools (their schemas decide the types of arguments). `in_reasoning` says that the prompt ended
    inside an open think block. Tags with an entry in `tag_ids` (tag text to token id) count only as their tokens, others by
    their text.
    """

    def __init__(
        self,
        format: OutputFormat,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        in_reasoning: bool,
        tag_ids: Mapping[str, int] | None,
    ) -> None:
        self._format = format
        self._schemas = ToolSchemas(tools)
        self._lexer = TagLexer(format.literals, patterns=format.patterns, first_chars=format.first_chars, token_ids=tag_ids)
        self._events: list[ParserEvent] = []
        self._reasoning = _TextChannel(self._emit, event=ReasoningDelta)
        self._content = _TextChannel(self._emit, event=ContentDelta)
        self._calls = CallWriter(self._emit)
        self._state = _State.REASONING if in_reasoning else _State.CONTENT
        self._block: CallBlock | None = None
        self._opener: list[str] = []  # an undecided call opener and the white space after it
        self._is_after_block = False  # only white space since a block ended

    def feed(self, pieces: Sequence[TextPiece]) -> list[ParserEvent]:
        """Take the next pieces; return what is certain now."""
        for lexeme in self._lexer.feed(pieces):
            self._take(lexeme)
        return self._taken_events()

    def finish(self) -> list[ParserEvent]:
        """The output is over: return what was held back, with everything closed."""
        for lexeme in self._lexer.finish():
            self._take(lexeme)
        if self._block is not None:
            self._block.finish()
            self._block = None
        elif self._state is _State.CONTENT and not self._opener and not self._is_after_block:
            self._content.flush()
        return self._taken_events()

    def _take(self, lexeme: Lexeme) -> None:
        if self._opener and self._decide_opener(lexeme):
            return
        if self._block is not None:
            if self._block.take(lexeme):
                self._block = None
                self._state = _State.CONTENT
                self._is_after_block = True
            return
        match lexeme.kind:
            case TagKind.TEXT | TagKind.CUT | TagKind.INVOKE_CLOSE | TagKind.PARAMETER_OPEN | TagKind.PARAMETER_CLOSE:
                self._write(lexeme.text)
            case TagKind.THINK_OPEN | TagKind.THINK_CLOSE:
                self._take_think_tag(lexeme)
            case TagKind.BLOCK_OPEN:
                if self._state is _State.CONTENT and self._content.is_at_line_start():
                    self._open_block(has_opener=True)
                else:
                    self._opener = [lexeme.text]
            case TagKind.BLOCK_CLOSE:
                if not self._is_after_block:  # else a second closer
                    self._write(lexeme.text)
            case TagKind.INVOKE_OPEN:
                self._take_bare_invoke(lexeme)

    def _decide_opener(self, lexeme: Lexeme) -> bool:
        """Settle the undecided call opener by what follows it; True when `lexeme` is used up."""
        if lexeme.kind is TagKind.TEXT and lexeme.text.isspace():
            self._opener.append(lexeme.text)
            return True
        quoted = "".join(self._opener)
        self._opener = []
        if lexeme.kind in (TagKind.INVOKE_OPEN, TagKind.CUT):
            self._open_block(has_opener=True)
        else:
            self._write(quoted)
        return False

    def _take_think_tag(self, lexeme: Lexeme) -> None:
        is_opener = lexeme.kind is TagKind.THINK_OPEN
        match self._state:
            case _State.REASONING if not is_opener:
                self._reasoning.drop_space()
                self._state = _State.CONTENT
            case _State.REASONING if self._reasoning.has_begun:
                self._write(lexeme.text)
            case _State.CONTENT if self._content.has_begun:
                self._write(lexeme.text)
            case _State.CONTENT if is_opener:
                self._content.drop_space()
                self._state = _State.REASONING
            case _:
                pass  # a repeated opener or closer

    def _take_bare_invoke(self, lexeme: Lexeme) -> None:
        may_be_call = self._state is _State.CONTENT and self._content.is_at_line_start()
        if not (may_be_call and self._format.is_bare_call(lexeme, self._schemas)):
            self._write(lexeme.text)
            return
        self._open_block(has_opener=False)
        self._take(lexeme)

    def _open_block(self, *, has_opener: bool) -> None:
        self._reasoning.drop_space()
        self._content.drop_space()
        self._block = self._format.new_block(self._calls, schemas=self._schemas, has_opener=has_opener)
        self._state = _State.BLOCK

    def _write(self, text: str) -> None:
        channel = self._reasoning if self._state is _State.REASONING else self._content
        channel.write(text)
        if not text.isspace():
            self._is_after_block = False

    def _emit(self, event: ParserEvent) -> None:
        self._events.append(event)

    def _taken_events(self) -> list[ParserEvent]:
        events, self._events = self._events, []
        return _merged(events)


def parse(
    format: OutputFormat,
    text: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    in_reasoning: bool,
) -> ParsedOutput:
    """Parse a whole answer given as text; tags count by their text."""
    parser = OutputParser(format, tools=tools, in_reasoning=in_reasoning, tag_ids=None)
    return collect([*parser.feed([TextPiece(text, None)]), *parser.finish()])


def collect(events: Iterable[ParserEvent]) -> ParsedOutput:
    """The whole answer behind all events of one parser."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(_, name):
                names.append(name)
                arguments.append([])
            case ToolArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd():
                pass
    calls = [ParsedToolCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]
    return ParsedOutput("".join(reasoning) or None, "".join(content) or None, calls)


class _TextChannel:
    """Reasoning or content: drops line breaks before the first word and holds white space until a word follows it."""

    def __init__(self, emit: Callable[[ParserEvent], None], *, event: type[ReasoningDelta] | type[ContentDelta]) -> None:
        self._emit = emit
        self._event = event
        self._space: list[str] = []
        self.has_begun = False

    def write(self, text: str) -> None:
        word_end = len(text.rstrip())
        if word_end == 0:
            self._space.append(text)
            return
        out = "".join(self._space) + text[:word_end]
        if not self.has_begun:
            indent = len(out) - len(out.lstrip())
            out = out[out.rfind("\n", 0, indent) + 1 :]
            self.has_begun = True
        self._space = [text[word_end:]] if word_end < len(text) else []
        self._emit(self._event(out))

    def is_at_line_start(self) -> bool:
        return not self.has_begun or any("\n" in space for space in self._space)

    def drop_space(self) -> None:
        self._space = []

    def flush(self) -> None:
        """Release held white space at the end of the output; an answer of nothing else stays empty."""
        if self.has_begun and self._space:
            self._emit(self._event("".join(self._space)))
        self._space = []


def _merged(events: list[ParserEvent]) -> list[ParserEvent]:
    """`events` with neighbouring text of the same kind joined, so that one step gives one delta."""
    if len(events) < 2:
        return events
    merged: list[ParserEvent] = []
    texts: list[str] = []
    for position, event in enumerate(events):
        if isinstance(event, ToolCallStart | ToolCallEnd):
            merged.append(event)
            continue
        texts.append(event.text)
        following = events[position + 1] if position + 1 < len(events) else None
        if type(following) is type(event):  # one call's arguments end before those of the next begin
            continue
        text = "".join(texts)
        texts = []
        if isinstance(event, ToolArgumentsDelta):
            merged.append(ToolArgumentsDelta(event.index, text))
        else:
            merged.append(type(event)(text))
    return merged
