"""Interface between the parser and a model family's syntax of reasoning and calls."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from negamax.text.parser.events import ParserEvent, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from negamax.text.parser.schema_values import ToolSchemas, json_string, json_string_body
from negamax.text.parser.tag_lexer import NO_BEGINNINGS, Lexeme, TagBeginnings, TagKind, TagPattern
from negamax.text.tokenizer import Tokenizer


class CallWriter:
    """Write tool calls as events; the arguments are one JSON object that grows.

    Values go into the innermost open container: with a key into an object, with None into an array.
    """

    __slots__ = ("_closers", "_emit", "_has_members", "_index")

    def __init__(self, emit: Callable[[ParserEvent], None]) -> None:
        self._emit = emit
        self._index = -1
        self._closers: list[str] = []  # closers of the open containers below the arguments
        # of the innermost container; a container with a container in it has members
        self._has_members = False

    def start_call(self, name: str) -> None:
        """Begin the next call."""
        self._index += 1
        self._has_members = False
        self._emit(ToolCallStart(self._index, name))

    def member(self, key: str | None, value: str) -> None:
        """Add a whole JSON value."""
        self._arguments(self._lead(key) + value)

    def open_string(self, key: str | None) -> None:
        """Begin a string that arrives in parts."""
        self._arguments(self._lead(key) + '"')

    def string_text(self, text: str) -> None:
        if text:
            self._arguments(json_string_body(text))

    def close_string(self) -> None:
        self._arguments('"')

    def open_container(self, key: str | None, *, is_array: bool) -> None:
        """Begin an object or an array."""
        self._arguments(self._lead(key) + ("[" if is_array else "{"))
        self._closers.append("]" if is_array else "}")
        self._has_members = False

    def close_container(self) -> None:
        self._arguments(self._closers.pop())
        self._has_members = True

    def end_call(self) -> None:
        """Close the arguments and the call; no container may be open."""
        assert not self._closers
        self._arguments("}" if self._has_members else "{}")
        self._emit(ToolCallEnd(self._index))

    def cut_call(self) -> None:
        """End a truncated call. One without arguments gets a brace: clients read "" as complete."""
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
    """Reader of one call block, from its opener on. The parser feeds it lexemes."""

    __slots__ = ("_calls", "_has_opener", "_schemas")

    def __init__(self, calls: CallWriter, *, schemas: ToolSchemas, has_opener: bool) -> None:
        """`has_opener` is False for a bare invoke without a block; it ends the block."""
        self._calls = calls
        self._schemas = schemas
        self._has_opener = has_opener

    @staticmethod
    @abstractmethod
    def is_bare_call(lexeme: Lexeme, schemas: ToolSchemas, *, at_line_start: bool) -> bool:
        """Whether an invoke without a block is a call; `at_line_start`: it begins its line."""

    @abstractmethod
    def take(self, lexeme: Lexeme) -> bool:
        """Process one lexeme. True: it ended the block."""

    @abstractmethod
    def finish(self, *, is_truncated: bool) -> None:
        """End the output: an open call was truncated. `is_truncated`: the model did not end it."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The tags of a model family, and its reader of call blocks."""

    name: str
    think_open: str
    think_close: str
    call_open: str  # begins a call block; one token where the vocabulary has it
    literals: Mapping[str, TagKind]  # tags with a fixed text; each may be one token
    patterns: tuple[TagPattern, ...]
    beginnings: TagBeginnings
    new_block: type[CallBlock]
    may_think_again: bool  # whether a think opener within content begins reasoning
    call_closers: tuple[str, ...]  # closers in and after calls that are not literals
    turn_open: str = "]~b]"  # begins a turn in rendered prompts, before its role
    turn_close: str = "[e~["
    assistant: str = "ai"  # the role of the model's own turns

    def drop_calls(self) -> Self:
        """Return the format for answers in which calls are text."""
        think_tags = {tag: self.literals[tag] for tag in (self.think_open, self.think_close)}
        return dataclasses.replace(self, literals=think_tags, patterns=(), beginnings=NO_BEGINNINGS)

    @property
    def ends_in_content(self) -> bool:
        """Whether only content can follow the reasoning."""
        return not (self.patterns or self.may_think_again or self.call_open in self.literals)

    def tag_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return the token ids of the literal tags that are tokens in `tokenizer`."""
        found = {tag: tokenizer.token_id(tag) for tag in self.literals}
        return {tag: token_id for tag, token_id in found.items() if token_id is not None}

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside the think block of its open assistant turn."""
        if prompt.rstrip("\n").endswith(self.think_open):
            return True
        _, found, turn = prompt.rpartition(f"{self.turn_open}{self.assistant}\n")
        return (
            bool(found)
            and self.turn_close not in turn
            and turn.rfind(self.think_open) > turn.rfind(self.think_close)
        )
