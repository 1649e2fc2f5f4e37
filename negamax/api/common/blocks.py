"""Split answers into blocks of reasoning, content and tool calls."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from negamax.api.common.choice_reader import StartedCall
from negamax.text.parser import events as parsed_events


class BlockKind(enum.Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A reasoning, content or call block. Only the answer's `BlockWriter` changes this object.

    The text of a tool call is the JSON text of its arguments. A truncated call has truncated JSON.
    """

    kind: BlockKind
    index: int  # Index of the block in the answer.
    call: StartedCall | None = None
    parts: list[str] = field(default_factory=list)
    is_whole: bool = False  # False if the block has not ended or is truncated.

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    block: Block
    change: Literal["opened", "grew", "closed"]
    text: str = ""  # The new text of a block that grew.


class BlockWriter:
    """Turns parser events into block events. Only the request's handler changes this object."""

    __slots__ = ("_calls", "_open", "blocks")

    def __init__(self, calls: list[StartedCall]) -> None:
        """`calls` is the list to which the answer's reader adds tool calls."""
        self.blocks: list[Block] = []
        self._calls = calls
        self._open: Block | None = None

    def push(self, events: Iterable[parsed_events.ParserEvent]) -> Iterator[BlockEvent]:
        for event in events:
            match event:
                case parsed_events.ReasoningDelta(text):
                    yield from self._grow(BlockKind.REASONING, text)
                case parsed_events.ContentDelta(text):
                    yield from self._grow(BlockKind.CONTENT, text)
                case parsed_events.ToolCallStart(index, _):
                    yield from self._interrupt()
                    yield self._begin(BlockKind.CALL, self._calls[index])
                case parsed_events.ToolArgumentsDelta(_, text):
                    yield from self._grow(BlockKind.CALL, text)
                case parsed_events.ToolCallEnd():
                    yield from self._close(is_whole=True)

    def finish(self, *, is_truncated: bool) -> Iterator[BlockEvent]:
        """End the answer. A call that is still open becomes a truncated call."""
        yield from self._close(is_whole=False) if is_truncated else self._interrupt()

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind is not kind:
            yield from self._interrupt()
            yield self._begin(kind)
        assert self._open is not None
        self._open.parts.append(text)
        yield BlockEvent(self._open, "grew", text)

    def _interrupt(self) -> Iterator[BlockEvent]:
        """Close the open block. If the open block is a tool call, mark the call as truncated."""
        is_call = self._open is not None and self._open.kind is BlockKind.CALL
        yield from self._close(is_whole=not is_call)

    def _begin(self, kind: BlockKind, call: StartedCall | None = None) -> BlockEvent:
        self._open = Block(kind, len(self.blocks), call)
        self.blocks.append(self._open)
        return BlockEvent(self._open, "opened")

    def _close(self, *, is_whole: bool) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            block.is_whole = is_whole
            yield BlockEvent(block, "closed")
