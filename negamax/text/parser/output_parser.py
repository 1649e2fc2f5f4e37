"""Split streamed text into reasoning, content and tool calls by a state machine.

The state is reasoning, content or call block. The `CallBlock` of a model family reads the inside of
a block. The events together depend only on the text, not on its split into pieces. A streamed
answer and an answer that is parsed as a whole therefore have the same content.

Rules for every format:
- Reasoning ends at its closing tag or at the start of a call block. A second opening tag before the
  first word of reasoning is dropped. A second closing tag before the first word of content is
  dropped. An opening tag before the first word of content begins reasoning. Think tags after the
  first word of content are content. With `OutputFormat.may_think_again`, an opening think tag in
  content begins reasoning if no quotation mark precedes the tag.
- The opening tag of a call block begins a block at the start of a line of content, before an invoke
  tag, and at the end of the output. In content, the opening tag also begins a block if the closing
  tag follows directly. Otherwise, the opening tag is quoted text.
- A call in a code block or inline code of Markdown is quoted text.
- A closing think tag of another family ends reasoning if a line break or a call follows.
- Unreadable text of a call block becomes content. A call with an unreadable argument is dropped, or
  is truncated if the start of the call was already emitted.
- A closing think tag outside reasoning is dropped if it is a token, because quoted tags are text.
- White space between content and a call block is dropped. Line breaks at the start and end of
  reasoning and before content are dropped too.
- Calls of undeclared tools are emitted too. If the output ends within a tag, the incomplete tag is
  text. Within a call block the incomplete tag is dropped, so that a truncated name makes no call.
- A call that is open at the end of the output is truncated. The arguments of a truncated call are
  an incomplete JSON object, so that clients do not run the call.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ContentDelta, ParserEvent, ReasoningDelta, merged
from negamax.text.parser.output_format import CallBlock, CallWriter, OutputFormat
from negamax.text.parser.schema_values import ToolSchemas
from negamax.text.parser.tag_lexer import TEXT, Lexeme, TagKind, TagLexer, TagPattern
from negamax.text.parser.text_channel import TextChannel
from negamax.text.stop_strings import StopMatcher, StoppableText

# One of these tags after a call opener confirms that the opener begins a block.
_AFTER_OPENER = frozenset({TagKind.INVOKE_OPEN, TagKind.LOOSE_INVOKE_OPEN, TagKind.CUT})
_AFTER_LOOSE_OPENER = frozenset({TagKind.INVOKE_OPEN})
# Another family's closing think tag ends the reasoning if one of these tags follows.
_STRUCTURE = frozenset({TagKind.BLOCK_OPEN, TagKind.INVOKE_OPEN})
# Tags that are text in code blocks of Markdown.
_QUOTED_IN_CODE = _STRUCTURE | {TagKind.LOOSE_BLOCK_OPEN, TagKind.LOOSE_THINK_CLOSE}


class Thinking(enum.Enum):
    """Destination of reasoning text."""

    SPLIT = "apart from the content"
    APPEND = "into the content as generated, after the think opener that the prompt ended with"
    RAW = "into the content as generated"


class _ParserState(enum.Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    BLOCK = "call block"


# Module variables, because reading a member of an enumeration takes ten times as long.
_REASONING, _CONTENT = _ParserState.REASONING, _ParserState.CONTENT


class OutputParser:
    """Parses one answer. Call `feed` with each list of pieces, and `finish` once at the end.

    `tools` are the declared tools, whose schemas decide the types of arguments. `in_reasoning`
    means that the prompt ended within a think block. `continues` means that the prompt ended within
    content. The parser recognizes tags in `tag_ids` (text -> token id) only as tokens, and other
    tags by their text.

    A string in `stop` ends the answer if it occurs in the content. Reasoning and calls are not
    searched for stop strings. With `includes_stop` the content includes the stop string. After
    `matched_stop` is set, no event follows.
    """

    __slots__ = (
        "_block", "_calls", "_closer", "_closer_is_token", "_content", "_emit_content", "_events",
        "_format", "_is_after_block", "_lexer", "_opener", "_opener_is_loose", "_reasoning",
        "_schemas", "_splits", "_state", "_stoppable", "_thinking",
    )  # fmt: skip

    def __init__(
        self,
        format: OutputFormat,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        in_reasoning: bool,
        tag_ids: Mapping[str, int] | None,
        thinking: Thinking = Thinking.SPLIT,
        continues: bool = False,
        stop: Sequence[str] = (),
        includes_stop: bool = False,
    ) -> None:
        self._format = format
        self._schemas = ToolSchemas(tools)
        patterns, beginnings = format.patterns, format.beginnings
        self._lexer = TagLexer(
            format.literals,
            patterns=patterns,
            beginnings=beginnings,
            token_ids=tag_ids,
            list_named=self._list_named if format.name_tags else None,
        )
        self._events: list[ParserEvent] = []  # events since the last call of `feed`
        emit = self._events.append
        self._thinking = thinking
        self._splits = thinking is Thinking.SPLIT
        self._closer_is_token = format.think_close in (tag_ids or {})

        def emit_content(text: str) -> None:
            emit(ContentDelta(text))

        self._emit_content = emit_content
        self._stoppable: StoppableText | None = None
        if stop:
            matcher = StopMatcher(stop)
            self._stoppable = StoppableText(emit_content, matcher, is_included=includes_stop)
            self._stoppable.begin(is_before_word=not continues)
        self._content = TextChannel(
            self._stop_or_emit if stop else emit_content,
            is_verbatim=not self._splits,
            holds_space=not format.ends_in_content,
        )
        self._reasoning = self._content
        if self._splits:
            self._reasoning = TextChannel(lambda text: emit(ReasoningDelta(text)))
        self._calls = CallWriter(emit)
        self._state = _ParserState.REASONING if in_reasoning else _ParserState.CONTENT
        self._block: CallBlock | None = None
        self._closer = ""  # pending think closer of another family, which may end the reasoning.
        # `_opener`: a call opener and white space; the next tag decides if they start a block.
        self._opener: list[str] = []
        self._opener_is_loose = False
        self._is_after_block = False  # whether only white space has followed the last block
        self._content.has_begun = continues
        if thinking is Thinking.APPEND and in_reasoning:
            self._content.write(format.think_open)

    @property
    def in_reasoning(self) -> bool:
        return self._state is _ParserState.REASONING

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return None if self._stoppable is None else self._stoppable.matched

    def feed(self, pieces: Sequence[TextPiece], *, may_stop: bool = True) -> list[ParserEvent]:
        """Parse pieces, and return the final events. Without `may_stop`, ignore stop strings."""
        if self._stoppable is not None:
            self._stoppable.may_match = may_stop
        for lexeme in self._lexer.feed(pieces):
            self._take(lexeme)
        return self._taken_events()

    def finish(self, *, is_truncated: bool = False) -> list[ParserEvent]:
        """End the output, and return the last events. `is_truncated`: the model was interrupted."""
        for lexeme in self._lexer.finish():
            self._take(lexeme)
        if self._closer:
            self._write(self._closer)
        if self._block is not None:
            self._block.finish(is_truncated=is_truncated)
            self._block = None
        if self._opener and self._opener_is_loose:
            self._write("".join(self._opener))
            self._opener = []
        may_end_in_space = self._state is _CONTENT or not self._splits
        if may_end_in_space and not self._opener and not self._is_after_block:
            self._content.flush()
        if self._stoppable is not None:
            self._stoppable.release()
        return self._taken_events()

    def _take(self, lexeme: Lexeme) -> None:
        if self._stoppable is not None and self._stoppable.matched is not None:
            return
        if self._closer and self._decide_closer(lexeme):
            return
        if self._opener and self._decide_opener(lexeme):
            return
        if self._block is not None:
            if self._block.take(lexeme):
                self._block = None
                self._enter(_CONTENT)
                self._is_after_block = True
            return
        if lexeme.kind is TEXT:
            self._write(lexeme.text)
            return
        match lexeme.kind:
            case TagKind.THINK_OPEN | TagKind.THINK_CLOSE:
                self._take_think_tag(lexeme)
            case kind if kind in _QUOTED_IN_CODE and self._channel.code.is_open():
                self._write(lexeme.text)
            case TagKind.LOOSE_THINK_CLOSE if self._state is _REASONING and self._splits:
                self._closer = lexeme.text
            case TagKind.BLOCK_OPEN:
                if self._state is _CONTENT and self._content.is_at_line_start():
                    self._open_block(lexeme.text)
                else:
                    self._opener, self._opener_is_loose = [lexeme.text], False
            case TagKind.LOOSE_BLOCK_OPEN:
                self._opener, self._opener_is_loose = [lexeme.text], True
            case TagKind.BLOCK_CLOSE:
                if not self._is_after_block:  # after a block, drop the repeated tag
                    self._write(lexeme.text)
            case TagKind.INVOKE_OPEN:
                self._take_bare_invoke(lexeme)
            case _:
                self._write(lexeme.text)

    def _decide_opener(self, lexeme: Lexeme) -> bool:
        """Decide if the held opener begins a block. Return True if `lexeme` is white space."""
        if lexeme.kind is TagKind.TEXT and lexeme.text.isspace():
            self._opener.append(lexeme.text)
            return True
        quoted = "".join(self._opener)
        self._opener = []
        confirming = _AFTER_LOOSE_OPENER if self._opener_is_loose else _AFTER_OPENER
        may_be_empty = self._state is _CONTENT and not self._opener_is_loose
        is_block = lexeme.kind in confirming
        is_block = is_block or (may_be_empty and lexeme.kind is TagKind.BLOCK_CLOSE)
        # inline code ends at a line break, so a call on a later line is not quoted
        if is_block and ("\n" in quoted or not self._channel.code.is_inline()):
            self._open_block(quoted)
        else:
            self._write(quoted)
        return False

    def _decide_closer(self, lexeme: Lexeme) -> bool:
        """Decide from the next lexeme whether another family's think closer ends the reasoning.

        The held closer of the other family ends the reasoning if a line break or a call follows. If
        a closer of the model's family follows, this closer ends the reasoning. Return True if
        `lexeme` is white space and was added to the held closer.
        """
        if lexeme.kind is TEXT and lexeme.text.isspace():
            self._closer += lexeme.text
            return True
        closer, self._closer = self._closer, ""
        words = lexeme.text.lstrip() if lexeme.kind is TEXT else ""
        space = closer[closer.index(">") + 1 :] + lexeme.text.removesuffix(words)
        ends = lexeme.kind in _STRUCTURE or (lexeme.kind is TEXT and "\n" in space)
        if ends and self._reasoning.has_begun and not self._reasoning.ends_in_quote():
            self._reasoning.drop_space()
            self._enter(_CONTENT)
            closer = closer[closer.index(">") + 1 :]
        if closer:
            self._write(closer)
        return False

    def _take_think_tag(self, lexeme: Lexeme) -> None:
        is_opener = lexeme.kind is TagKind.THINK_OPEN
        is_stray = not is_opener and self._state is _CONTENT and self._closer_is_token
        if is_stray and self._thinking is not Thinking.RAW:
            return  # drop a closing tag without an opening tag
        if not self._splits:
            self._write(lexeme.text)
            self._enter(_REASONING if is_opener else _CONTENT)
            return
        may_think = is_opener and self._format.may_think_again
        thinks_again = may_think and not self._content.ends_in_quote()
        match self._state:
            case _ParserState.REASONING if not is_opener:
                self._reasoning.drop_space()
                self._enter(_CONTENT)
            case _ParserState.REASONING if self._reasoning.has_begun:
                self._write(lexeme.text)
            case _ParserState.CONTENT if self._content.has_begun and not thinks_again:
                self._write(lexeme.text)
            case _ParserState.CONTENT if is_opener:
                self._content.drop_space()
                self._enter(_REASONING)
            case _:
                pass  # drop a repeated opening or closing tag of reasoning

    def _take_bare_invoke(self, lexeme: Lexeme) -> None:
        is_prose = self._state is _CONTENT and not self._content.code.is_inline()
        is_call = is_prose and self._format.new_block.is_bare_call(
            lexeme, self._schemas, at_line_start=self._content.is_at_line_start()
        )
        if not is_call:
            self._write(lexeme.text)
            return
        self._open_block("")
        self._take(lexeme)

    def _open_block(self, opener: str) -> None:
        self._reasoning.drop_space()
        self._content.drop_space()
        self._enter(_ParserState.BLOCK)
        new_block, schemas = self._format.new_block, self._schemas
        self._block = new_block(self._calls, schemas=schemas, opener=opener, show=self._show_unread)
        self._content.code.add("\n")  # the text after the block begins a new line

    def _show_unread(self, text: str) -> None:
        """Show text of a call block as content, after a line break."""
        if self._closer_is_token:  # drop closing think tags from content
            text = text.replace(self._format.think_close, "")
        lead = "\n" if self._content.has_begun else ""
        self._content.write(lead + text)
        self._content.drop_space()

    def _list_named(self) -> list[TagPattern]:
        tools, members = self._schemas.list_names()
        return [
            replace(tag, rest=tag.rest.replace("{}", name))
            for tag in self._format.name_tags
            for name in (tools if tag.kind is TagKind.INVOKE_OPEN else members)
        ]

    def _enter(self, state: _ParserState) -> None:
        """Change the state. No stop string can begin before the change and end after it."""
        if self._stoppable is not None:
            self._stoppable.begin(is_before_word=True)
        self._state = state

    @property
    def _channel(self) -> TextChannel:
        return self._reasoning if self._state is _REASONING else self._content

    def _write(self, text: str) -> None:
        self._channel.write(text)
        if self._is_after_block and not text.isspace():
            self._is_after_block = False

    def _stop_or_emit(self, text: str) -> None:
        """Emit content up to a stop string. Outside content, emit the text unchanged."""
        if self._state is not _CONTENT:
            self._emit_content(text)
        else:
            assert self._stoppable is not None
            self._stoppable.write(text)

    def _taken_events(self) -> list[ParserEvent]:
        events = self._events.copy()
        self._events.clear()
        return events if len(events) < 2 else merged(events)
