"""How a model family writes reasoning and calls, as the parser asks for it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from negamax.text.parser.events import (
    ParserEvent,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from negamax.text.parser.schema_values import ToolSchemas, json_string, json_string_body
from negamax.text.parser.tag_lexer import NO_BEGINNINGS, Lexeme, TagBeginnings, TagKind, TagPattern
from negamax.text.tokenizer import Tokenizer


class CallWriter:
    """Writes tool calls as events; arguments are one JSON object that grows member by member.
    Single writer: the open block.

    Values go into the innermost container that is open: with a key into an object, with None into
    an array.
    """

    __slots__ = ("_closers", "_emit", "_has_members", "_index")

    def __init__(self, emit: Callable[[ParserEvent], None]) -> None:
        self._emit = emit
        self._index = -1
        self._closers: list[str] = []  # of the open containers below the arguments
        # the innermost container; one that has a container in it has members
        self._has_members = False

    def start_call(self, name: str) -> None:
        """Begin the next call."""
        self._index += 1
        self._has_members = False
        self._emit(ToolCallStart(self._index, name))

    def member(self, key: str | None, value: str) -> None:
        """Add a whole value, which is JSON."""
        self._arguments(self._lead(key) + value)

    def open_string(self, key: str | None) -> None:
        """Begin a string that arrives bit by bit."""
        self._arguments(self._lead(key) + '"')

    def string_text(self, text: str) -> None:
        """Add text to the open string."""
        if text:
            self._arguments(json_string_body(text))

    def close_string(self) -> None:
        """End the open string."""
        self._arguments('"')

    def open_container(self, key: str | None, *, is_array: bool) -> None:
        """Begin an object or an array, whose values follow."""
        self._arguments(self._lead(key) + ("[" if is_array else "{"))
        self._closers.append("]" if is_array else "}")
        self._has_members = False

    def close_container(self) -> None:
        """End the innermost container."""
        self._arguments(self._closers.pop())
        self._has_members = True

    def end_call(self) -> None:
        """Close the arguments and the call; no container may be open."""
        assert not self._closers
        self._arguments("}" if self._has_members else "{}")
        self._emit(ToolCallEnd(self._index))

    def cut_call(self) -> None:
        """The output ended within the call. Where no argument has begun, there is an opening brace:
        clients read empty text as a call without arguments."""
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
        self._emit(ToolArgumentsDelta(self._index, text))


class CallBlock(ABC):
    """One call block, from its opener on, as a format reads it. Fed with lexemes by the parser, its
    single writer."""

    __slots__ = ("_calls", "_has_opener", "_schemas")

    def __init__(self, calls: CallWriter, *, schemas: ToolSchemas, has_opener: bool) -> None:
        """`has_opener` is False for a bare invoke without the block around it; such a block ends
        with that invoke.
        """
        self._calls = calls
        self._schemas = schemas
        self._has_opener = has_opener

    @staticmethod
    @abstractmethod
    def is_bare_call(lexeme: Lexeme, schemas: ToolSchemas, *, at_line_start: bool) -> bool:
        """Whether an invoke without a block around it is a call; `at_line_start`: only white space
        stands before it in its line.
        """

    @abstractmethod
    def take(self, lexeme: Lexeme) -> bool:
        """Process one lexeme; True when it ended the block."""

    @abstractmethod
    def finish(self, *, is_cut: bool) -> None:
        """The output is over: a call that is still open was cut. `is_cut`: not the model ended
        it.
        """


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model family writes reasoning and calls: its tags, and the reader of a call block."""

    name: str
    think_open: str
    think_close: str
    call_open: str  # what a call block begins with, one token where the vocabulary has it
    literals: Mapping[str, TagKind]  # tags with a fixed text, which may be one token each
    patterns: tuple[TagPattern, ...]
    beginnings: TagBeginnings
    new_block: type[CallBlock]
    may_think_again: bool  # whether a think opener within content begins reasoning
    call_closers: tuple[str, ...]  # closers within and after calls that are no literals
    turn_open: str = "]~b]"  # in rendered prompts: what a turn begins with, before its role
    turn_close: str = "[e~["
    assistant: str = "ai"  # the role of the model's own turns

    def without_calls(self) -> OutputFormat:
        """The same format for answers in which what looks like a call is text."""
        think_tags = {tag: self.literals[tag] for tag in (self.think_open, self.think_close)}
        return dataclasses.replace(self, literals=think_tags, patterns=(), beginnings=NO_BEGINNINGS)

    @property
    def ends_in_content(self) -> bool:
        """Whether nothing but content follows the reasoning."""
        return not (self.patterns or self.may_think_again or self.call_open in self.literals)

    def tag_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The token ids of the tags with a fixed text; tags that `tokenizer` has no token for are
        left out.
        """
        found = {tag: tokenizer.token_id(tag) for tag in self.literals}
        return {tag: token_id for tag, token_id in found.items() if token_id is not None}

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside an open think block, so that the answer begins
        there.

        Only the assistant turn that the prompt leaves open is looked at: prompts quote think tags
        elsewhere.
        """
        if prompt.rstrip("\n").endswith(self.think_open):
            return True
        _, found, turn = prompt.rpartition(f"{self.turn_open}{self.assistant}\n")
        return (
            bool(found)
            and self.turn_close not in turn
            and turn.rfind(self.think_open) > turn.rfind(self.think_close)
        )
