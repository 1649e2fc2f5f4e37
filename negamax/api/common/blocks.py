"""An answer as blocks in the order the model wrote them: reasoning, content, calls. Anthropic's
API and Responses have them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from negamax.api.common.choice_reader import StartedCall
from negamax.text.parser.events import (
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


class BlockKind(enum.Enum):
    """What a block holds."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A piece of an answer while it grows; the text of a call is the JSON of its arguments, or the
    beginning of it where the call is not whole. Single writer: `BlockWriter`."""

    kind: BlockKind
    index: int  # among the blocks of the answer
    call: StartedCall | None = None
    parts: list[str] = field(default_factory=list)
    is_whole: bool = False  # False in the end: it was cut

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrew:
    """A block has more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockClosed:
    """A block is over."""

    block: Block


BlockEvent = BlockOpened | BlockGrew | BlockClosed


class BlockWriter:
    """Turns parser events into events of blocks. Single writer: the request's handler."""

    __slots__ = ("_calls", "_open", "blocks")

    def __init__(self, calls: list[StartedCall]) -> None:
        """`calls` are those of the answer's reader, which grow while it reads."""
        self.blocks: list[Block] = []
        self._calls = calls
        self._open: Block | None = None

    def push(self, events: Iterable[ParserEvent]) -> Iterator[BlockEvent]:
        """What `events` mean for the blocks."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    yield from self._grow(BlockKind.REASONING, text)
                case ContentDelta(text):
                    yield from self._grow(BlockKind.CONTENT, text)
                case ToolCallStart(index, _):
                    yield from self._close(is_whole=True)
                    yield self._begin(BlockKind.CALL, self._calls[index])
                case ToolArgumentsDelta(_, text):
                    yield from self._grow(BlockKind.CALL, text)
                case ToolCallEnd():
                    yield from self._close(is_whole=True)

    def finish(self, *, is_cut: bool) -> Iterator[BlockEvent]:
        """The end of the answer; `is_cut`: by the limit of tokens. An open call is cut in any
        case.
        """
        is_call = self._open is not None and self._open.kind is BlockKind.CALL
        yield from self._close(is_whole=not (is_cut or is_call))

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind is not kind:
            yield from self._close(is_whole=True)
            yield self._begin(kind)
        assert self._open is not None
        self._open.parts.append(text)
        yield BlockGrew(self._open, text)

    def _begin(self, kind: BlockKind, call: StartedCall | None = None) -> BlockOpened:
        self._open = Block(kind, len(self.blocks), call)
        self.blocks.append(self._open)
        return BlockOpened(self._open)

    def _close(self, *, is_whole: bool) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            block.is_whole = is_whole
            yield BlockClosed(block)
