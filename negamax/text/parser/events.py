"""Events of a parsed answer, and the whole answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import msgspec
from msgspec import structs


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More reasoning text."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More content text."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. `index` counts the calls of the answer from 0."""

    index: int
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """The arguments of this call are a whole JSON object. A truncated call has no end."""

    index: int


ParserEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call; `arguments` is a JSON object, or the beginning of one if not `is_whole`."""

    name: str
    arguments: str
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer. A missing part is None."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ParsedToolCall]


def collect(events: Iterable[ParserEvent]) -> ParsedOutput:
    """Join all events of one parser to the whole answer."""
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
    """Join consecutive text of one kind, so that a step gives one delta."""
    merged: list[ParserEvent] = []
    # one call's arguments end before those of the next begin
    for _, group in groupby(events, key=type):
        first, *others = group
        if isinstance(first, ToolCallStart | ToolCallEnd) or not others:
            merged += [first, *others]
        else:
            texts = (getattr(event, "text", "") for event in (first, *others))
            merged.append(structs.replace(first, text="".join(texts)))
    return merged
