"""Define the events of a parsed answer, and join the events to one object."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import msgspec
from msgspec import structs


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. `index` is the position of the call in the answer, from 0."""

    index: int
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a call with complete JSON arguments. A truncated call has no `ToolCallEnd`."""

    index: int


ParserEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    name: str
    arguments: str  # a JSON object, or its beginning if `is_whole` is False
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer. The field of a missing part is None."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ParsedToolCall]


def collect(events: Iterable[ParserEvent]) -> ParsedOutput:
    """Build the whole answer from all events of one parser."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    whole: set[int] = set()
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
            case ToolCallEnd(index):
                whole.add(index)
    calls = [
        ParsedToolCall(name, "".join(parts), is_whole=index in whole)
        for index, (name, parts) in enumerate(zip(names, arguments, strict=True))
    ]
    return ParsedOutput("".join(reasoning) or None, "".join(content) or None, calls)


def merged(events: list[ParserEvent]) -> list[ParserEvent]:
    """Join consecutive text events of the same kind."""
    merged: list[ParserEvent] = []
    # Events of two calls have a `ToolCallStart` between them, so arguments are joined correctly.
    for _, group in groupby(events, key=type):
        first, *others = group
        if isinstance(first, ToolCallStart | ToolCallEnd) or not others:
            merged += [first, *others]
        else:
            texts = (getattr(event, "text", "") for event in (first, *others))
            merged.append(structs.replace(first, text="".join(texts)))
    return merged
