"""Parse the outputs of a choice into reasoning, content and tool calls."""

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from negamax.api.common.conversation import ChatPrompt
from negamax.api.schemas.thinking import ReasoningPlace
from negamax.base.errors import EngineError
from negamax.engine.client.output import RequestOutput
from negamax.models.chat_format import ChatFormat
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from negamax.text.parser.output_parser import Thinking


class ReasoningCounter:
    """Counts a choice's reasoning tokens, which are between the token ids of the think tags.

    A choice has one section of reasoning, and later think tags are content. Reasoning may quote the
    opening tag of a call. If the tag really begins a call, the reader calls `call_began`.
    """

    def __init__(self, chat_format: ChatFormat, *, in_reasoning: bool) -> None:
        output = chat_format.output
        self._opener, self._closer, self._call = (
            chat_format.tag_ids.get(tag)
            for tag in (output.think_open, output.think_close, output.call_open)
        )
        self._in_reasoning = in_reasoning
        self._num_certain = 0
        self._num_since_call = 0  # number of reasoning tokens from the latest call tag on
        self.has_tags = self._opener is not None and self._closer is not None

    @property
    def count(self) -> int:
        return self._num_certain + self._num_since_call

    @property
    def is_undecided(self) -> bool:
        """Whether the latest opening tag of a call may be a quotation."""
        return self._num_since_call > 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Count the reasoning tokens in `token_ids`, including tags that the reasoning quotes."""
        for token_id in token_ids:
            if token_id == self._closer or (token_id == self._call and not self._in_reasoning):
                self._end(self.count)
            elif not self._in_reasoning:
                self._in_reasoning = token_id == self._opener
            elif token_id == self._call:
                self._num_certain, self._num_since_call = self.count, 1
            elif self._num_since_call:
                self._num_since_call += 1
            elif token_id != self._opener or self._num_certain:
                self._num_certain += 1

    def add(self, count: int) -> None:
        """Add `count` to the number of reasoning tokens."""
        self._num_certain += count

    def call_began(self) -> None:
        """End the reasoning before the latest opening tag of a call, because a call began there."""
        self._end(self._num_certain)

    def _end(self, count: int) -> None:
        self._num_certain, self._num_since_call = count, 0
        self._in_reasoning, self._opener, self._closer, self._call = False, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRules:
    # The declared tools, whose schemas determine the types of call arguments.
    tools: Sequence[Mapping[str, Any]] | None = None
    may_call: bool = True  # If False, text that looks like a call is content.
    parallel_calls: bool = True  # If False, the answer contains only its first call.
    is_call_forced_by_name: bool = False  # If True, the finish reason after a call is "stop".
    reasoning: ReasoningPlace | None = None  # None selects the parser's default place of reasoning.
    stream_reasoning: bool = True  # If False, one event sends the whole reasoning.
    stop: tuple[str, ...] = ()  # Strings in the content that end the answer.
    includes_stop: bool = False  # If True, the stop string stays in the content.


@dataclass(frozen=True, slots=True)
class StartedCall:
    id: str
    name: str


class _CountingReader:
    """Counts the reasoning tokens of one choice, and stores why the choice ended."""

    def __init__(self, chat_format: ChatFormat, *, in_reasoning: bool) -> None:
        self._counter = ReasoningCounter(chat_format, in_reasoning=in_reasoning)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._counter.count


class ChoiceReader(_CountingReader):
    """Reads one choice of a chat answer. Only the request's handler changes this object.

    If a request has stop strings, the engine's client uses this reader as a `TextReader`, which
    finds the stop strings. The client adds the reader's parser events to the outputs.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        prompt: ChatPrompt,
        rules: ReadingRules,
        on_call: Callable[[], object] = lambda: None,
    ) -> None:
        """The reader calls `on_call` for each tool call that begins."""
        in_reasoning = prompt.reasoning == "open"
        super().__init__(chat_format, in_reasoning=in_reasoning)
        self._rules, self._on_call = rules, on_call
        is_silent = rules.reasoning is ReasoningPlace.NOWHERE
        # Whether the reader drops or delays events of the parser.
        self._holds_back = is_silent or not rules.stream_reasoning or not rules.parallel_calls
        placed = _place_reasoning(rules.reasoning, chat_format)
        self.splits_reasoning = placed.thinking is Thinking.SPLIT  # whether content lacks reasoning
        self._parser = placed.new_parser(
            tools=rules.tools,
            in_reasoning=in_reasoning,
            may_call=rules.may_call,
            continues=bool(prompt.continued),
            stop=rules.stop,
            includes_stop=rules.includes_stop,
        )
        self._held_reasoning: list[str] = []  # Reasoning texts to send when the reasoning ends.
        self.calls: list[StartedCall] = []

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """Return the parser events of `output`. Raises `EngineError` if the request failed."""
        check_failed(output)
        is_end = output.finish_reason is not None
        counter = self._counter
        if counter.has_tags:
            counter.push(output.token_ids)
        events = self.feed(output.pieces) if output.events is None else output.events
        if counter.is_undecided and not self._parser.in_reasoning:
            counter.call_began()
        if is_end and output.events is None:
            events = [*events, *self.finish(is_truncated=output.finish_reason != "stop")]
        if self._holds_back:
            events = list(self._filter(events, is_end=is_end))
        for event in events:
            if isinstance(event, ToolCallStart):
                self.calls.append(StartedCall(f"call_{secrets.token_hex(12)}", event.name))
                self._on_call()
        if output.finish_reason is not None:
            self.finish_reason = self._convert_finish_reason(output.finish_reason)
            self.stop_reason = output.stop_reason
        return events

    @property
    def matched_stop(self) -> str | None:
        return self._parser.matched_stop

    def feed(self, pieces: Sequence[TextPiece], *, may_stop: bool = True) -> list[ParserEvent]:
        """Parse the next text pieces. Count reasoning tokens if think tags have no token ids."""
        if self._counter.has_tags:
            return self._parser.feed(pieces, may_stop=may_stop)
        events = []
        for piece in pieces:
            events += self._parser.feed([piece], may_stop=may_stop)
            self._counter.add(self._parser.in_reasoning)
        return events

    def finish(self, *, is_truncated: bool) -> list[ParserEvent]:
        """End the text, and return the last events of the parser."""
        return self._parser.finish(is_truncated=is_truncated)

    def _convert_finish_reason(self, of_engine: str) -> str:
        is_call = self.calls and not self._rules.is_call_forced_by_name
        return "tool_calls" if is_call and of_engine == "stop" else of_engine

    def _filter(self, events: Iterable[ParserEvent], *, is_end: bool) -> Iterator[ParserEvent]:
        for event in events:
            if isinstance(event, ReasoningDelta):
                if self._rules.reasoning is ReasoningPlace.NOWHERE:
                    continue
                if not self._rules.stream_reasoning:
                    self._held_reasoning.append(event.text)
                    continue
            elif self._held_reasoning:
                yield self._release_reasoning()
            if (
                isinstance(event, ReasoningDelta | ContentDelta)
                or event.index == 0
                or self._rules.parallel_calls
            ):
                yield event
        if is_end and self._held_reasoning:
            yield self._release_reasoning()

    def _release_reasoning(self) -> ReasoningDelta:
        held, self._held_reasoning = "".join(self._held_reasoning), []
        return ReasoningDelta(held)


class PlainReader(_CountingReader):
    """Counts reasoning tokens of unparsed text. Only the request's handler changes this object."""

    def __init__(self, chat_format: ChatFormat, prompt: Sequence[int]) -> None:
        super().__init__(chat_format, in_reasoning=chat_format.reasoning_after(prompt) == "open")

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """Count the reasoning tokens of `output`. Raises `EngineError` if the request failed."""
        check_failed(output)
        self._counter.push(output.token_ids)
        if self._counter.is_undecided:  # No parser runs here, so each call tag counts as a call.
            self._counter.call_began()
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return []


def _place_reasoning(place: ReasoningPlace | None, given: ChatFormat) -> ChatFormat:
    """Return `given`, changed if its parser would put the reasoning elsewhere than at `place`."""
    suits = {
        None: True,
        ReasoningPlace.CONTENT: given.thinking is not Thinking.SPLIT,
        ReasoningPlace.BLOCK: given.thinking is not Thinking.APPEND,
    }
    if suits.get(place, False):
        return given
    thinking = Thinking.APPEND if place is ReasoningPlace.CONTENT else Thinking.SPLIT
    return dataclasses.replace(given, thinking=thinking)


def check_failed(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        raise EngineError(f"request {output.request_id}: {output.error or 'no reason given'}")
