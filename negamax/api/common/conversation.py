"""What all dialects share: from messages to prompt tokens, and from a choice's outputs to
reasoning, content and calls.

A dialect turns its request into a `Conversation`, which `PromptBuilder.chat` turns into a prompt,
and into `ReadingRules`, by which a `ChoiceReader` per choice reads what the engine sends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from negamax.api.http.request_body import max_chars
from negamax.api.schemas.thinking import (
    NO_CHOICE,
    ReasoningPlace,
    ThinkingChoice,
    other_variables,
    template_switch,
)
from negamax.base.errors import ContextLengthError, EngineError, InvalidRequestError
from negamax.base.pieces import num_chars
from negamax.engine.client.output import RequestOutput
from negamax.text.chat_format import ChatFormat, ReasoningState
from negamax.text.detokenizer import TextPiece
from negamax.text.encoding_cache import EncodingCache
from negamax.text.escaping import unescaped
from negamax.text.messages import is_unseen, normalize_messages, plain_text
from negamax.text.parser.events import ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from negamax.text.parser.output_parser import Thinking
from negamax.text.tokenizer import Tokenizer, TooManyTokensError

_INLINE_BYTES = 8192  # work on larger requests runs in a thread, so that other requests go on
# text of more characters than this per token of the context is probed before it is tokenised
_PROBE_CHARS_PER_TOKEN = 8
# that a text may have however short the context is: it may be for its tokens alone
_LEAST_TOKENS = 2**18

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is to be answered. Messages are as in OpenAI's API and not checked yet; tools keep the
    key order of the client.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None  # that the model is shown
    thinking: ThinkingChoice = NO_CHOICE
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


async def off_loop(work: Callable[[], T], *, num_bytes: int) -> T:
    """The result of `work` on a request of about `num_bytes`, in a thread where it may take
    long.
    """
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `reasoning`: the answer begins within it, may begin with it, or has
    none. `continued`: the content that the answer goes on with (continue_final_message)."""

    text: str
    token_ids: list[int]
    reasoning: ReasoningState
    continued: str = ""


class PromptBuilder:
    """Renders conversations and tokenises text, off the event loop where it takes long."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        max_model_len: int,
        default_template_kwargs: Mapping[str, Any] | None = None,
        allow_special_tokens_in_text: bool = False,
    ) -> None:
        """`default_template_kwargs` are the template variables of requests that set none of that
        name; `allow_special_tokens_in_text`: what a conversation says may become control tokens."""
        self._escaper = None if allow_special_tokens_in_text else tokenizer.escaper
        self._encodings = EncodingCache(tokenizer)
        self._chat_format = chat_format
        self._max_model_len = max_model_len
        self._default_variables = other_variables(default_template_kwargs or {})
        self._default_mode = template_switch(default_template_kwargs or {})

    async def chat(
        self, conversation: Conversation, *, num_bytes: int, cache_salt: str = ""
    ) -> ChatPrompt:
        """The prompt for `conversation`, which has about `num_bytes`.

        Errors: `InvalidRequestError` for what the messages, the template or the combination
        refuses.
        """
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message continues the last message, add_generation_prompt starts "
                "a new one",
                hint="send add_generation_prompt=false",
                param="continue_final_message",
                code="invalid_value",
            )

        def build() -> ChatPrompt:
            try:
                shown = (conversation.messages, conversation.tools, conversation.template_kwargs)
                self._check_chars(num_chars(shown, is_left_out=is_unseen))
                text, reasoning, continued = self._render(conversation)
            except RecursionError:
                raise InvalidRequestError(
                    "the messages or tools are nested too deeply", param="messages"
                ) from None
            token_ids = self._encode(text, cache_salt, is_escaped=True)
            return ChatPrompt(unescaped(text), token_ids, reasoning, continued)

        return await off_loop(build, num_bytes=num_bytes)

    async def plain(
        self, prompts: Sequence[str | list[int]], *, cache_salt: str = ""
    ) -> list[list[int]]:
        """The tokens of plain prompts; special tokens written as text count as such. Token ids stay
        as they are.
        """

        def build() -> list[list[int]]:
            return [
                self._encode(prompt, cache_salt) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        return await off_loop(
            build, num_bytes=sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        )

    def _render(self, conversation: Conversation) -> tuple[str, ReasoningState, str]:
        """The prompt's text, escaped; how the answer begins, and the content that it continues."""
        template = self._chat_format.template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template",
                hint="use /v1/completions, or start the server with --chat-template FILE",
            )
        thinking = conversation.thinking
        if thinking.mode_for(template) is None:
            thinking = dataclasses.replace(thinking, mode=self._default_mode)
        messages = normalize_messages(
            conversation.messages,
            has_root=template.has_root_role,
            family=self._chat_format.family,
        )
        mark = _Mark.put(messages) if conversation.continue_final_message else None
        variables: dict[str, Any] = {
            **self._default_variables,
            **conversation.template_kwargs,
            **thinking.template_variables(template),
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        text = template.render(messages, self._escaper, **variables)
        if mark is not None:
            return mark.cut(text), "open" if mark.is_in_reasoning else "none", mark.continued
        may_think = thinking.mode_for(template) != "disabled"
        return *self._chat_format.begin_answer(text, may_think=may_think), ""

    def _encode(self, text: str, cache_salt: str, *, is_escaped: bool = False) -> list[int]:
        """Tokens of `text`; text that is far longer than the context is refused without tokenising
        all of it.
        """
        encode = partial(self._encodings.encode, salt=cache_salt, is_escaped=is_escaped)
        if not is_escaped:
            self._check_chars(len(text))
        try:
            probe_chars = _PROBE_CHARS_PER_TOKEN * self._max_model_len
            if len(text) > probe_chars:
                encode(text[:probe_chars], max_tokens=2 * self._max_model_len)
            return encode(text, max_tokens=max(_LEAST_TOKENS, 2 * self._max_model_len))
        except TooManyTokensError as error:
            context_length = self._max_model_len
            raise ContextLengthError.of_prompt(
                error.count, context_length=context_length, param="messages", is_counted=False
            ) from None

    def _check_chars(self, count: int) -> None:
        """Refuse texts that cannot fit before any of them is copied: each copy holds Python's
        lock.
        """
        allowed = max_chars(self._max_model_len)
        if count > allowed:
            num_tokens = count // _PROBE_CHARS_PER_TOKEN
            raise ContextLengthError.of_prompt(
                num_tokens, context_length=self._max_model_len, param="messages", is_counted=False
            )


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the last assistant message ends: a text that cannot occur otherwise."""

    text: str
    is_in_reasoning: bool
    continued: str  # content before it

    @classmethod
    def put(cls, messages: list[dict[str, Any]]) -> _Mark:
        """Append a mark to the last message's text; what the template puts after it is cut."""
        last = messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            raise InvalidRequestError(
                "continue_final_message needs a last message by the assistant, without tool calls",
                param="continue_final_message",
            )
        mark = f"[{secrets.token_hex(16)}]"
        content, reasoning = plain_text(last["content"]), last.get("reasoning_content")
        if content:
            messages[-1] = {**last, "content": content + mark}
        elif reasoning:
            messages[-1] = {**last, "reasoning_content": reasoning + mark}
        else:
            raise InvalidRequestError(
                "the last message is empty; there is nothing to continue",
                param="continue_final_message",
            )
        return cls(mark, not content, content)

    def cut(self, prompt: str) -> str:
        """`prompt` up to the mark."""
        before, found, _ = prompt.rpartition(self.text)
        if not found:
            raise InvalidRequestError(
                "the chat template does not show the last message", param="continue_final_message"
            )
        return before


class ReasoningCounter:
    """Counts the tokens of a choice that lie inside its reasoning, by the tags' token ids. What was
    closed stays closed, as in the parser: think tags in content are content. A call opener in
    reasoning may be a quoted one: the reader of the text calls `call_began` where it was not.
    """

    __slots__ = (
        "_call",
        "_closer",
        "_in_reasoning",
        "_num_certain",
        "_num_since_call",
        "_opener",
        "knows_tags",
    )

    def __init__(self, chat_format: ChatFormat, *, in_reasoning: bool) -> None:
        output = chat_format.output
        self._opener, self._closer, self._call = (
            chat_format.tag_ids.get(tag)
            for tag in (output.think_open, output.think_close, output.call_open)
        )
        self._in_reasoning = in_reasoning
        self._num_certain = 0
        self._num_since_call = 0  # tokens from a call opener on; 0: there was none
        self.knows_tags = self._opener is not None and self._closer is not None

    @property
    def count(self) -> int:
        """Reasoning tokens so far."""
        return self._num_certain + self._num_since_call

    @property
    def is_undecided(self) -> bool:
        """Whether a call opener has come that may be quoted."""
        return self._num_since_call > 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens; the tags themselves are not reasoning, quoted ones are."""
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
        """Count tokens that are known to be reasoning."""
        self._num_certain += count

    def call_began(self) -> None:
        """The latest call opener was one, so the reasoning ended before it."""
        self._end(self._num_certain)

    def _end(self, count: int) -> None:
        self._num_certain, self._num_since_call = count, 0
        self._in_reasoning, self._opener, self._closer, self._call = False, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRules:
    """How the choices of one request are read."""

    # the declared ones: their schemas decide the types of arguments
    tools: Sequence[Mapping[str, Any]] | None = None
    may_call: bool = True  # False: the answer has no calls, what looks like one is content
    parallel_calls: bool = True  # False: only the first call is reported
    # then a call is the answer, and it ends with "stop", as in OpenAI's API
    is_call_forced_by_name: bool = False
    reasoning: ReasoningPlace | None = None  # None: where the server's parser puts it
    stream_reasoning: bool = True  # False: reasoning comes in one piece when it is complete
    stop: tuple[str, ...] = ()  # strings that end the answer where they occur in its content
    includes_stop: bool = False  # the one that did stays there


@dataclass(frozen=True, slots=True)
class StartedCall:
    """A tool call whose name is known."""

    id: str
    name: str


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class ChoiceReader:
    """One choice of a chat answer: its outputs in, events out. Single writer: the request's
    handler.

    Where there are stop strings, the engine's client reads with it (`TextReader`), because it must
    know when one has ended the answer; its outputs then bring the events along.
    """

    __slots__ = (
        "_counter",
        "_held_reasoning",
        "_holds_back",
        "_parser",
        "_rules",
        "calls",
        "finish_reason",
        "stop_reason",
    )

    def __init__(self, chat_format: ChatFormat, *, prompt: ChatPrompt, rules: ReadingRules) -> None:
        self._rules = rules
        is_silent = rules.reasoning is ReasoningPlace.NOWHERE
        # more than the parser knows
        self._holds_back = is_silent or not rules.stream_reasoning or not rules.parallel_calls
        in_reasoning = prompt.reasoning == "open"
        self._parser = _with_reasoning_in(rules.reasoning, chat_format).new_parser(
            tools=rules.tools,
            in_reasoning=in_reasoning,
            may_call=rules.may_call,
            continues=bool(prompt.continued),
            stop=rules.stop,
            includes_stop=rules.includes_stop,
        )
        self._counter = ReasoningCounter(chat_format, in_reasoning=in_reasoning)
        self._held_reasoning: list[str] = []  # that waits for its end
        self.calls: list[StartedCall] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the reasoning so far."""
        return self._counter.count

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """The events of `output`. Errors: `EngineError` if the request failed in the engine."""
        check_failed(output)
        is_end = output.finish_reason is not None
        counter = self._counter
        if counter.knows_tags:
            counter.push(output.token_ids)
        events = self.feed(output.pieces) if output.events is None else output.events
        if counter.is_undecided and not self._parser.in_reasoning:
            counter.call_began()
        if is_end and output.events is None:
            events = [*events, *self.finish(is_cut=output.finish_reason != "stop")]
        if self._holds_back:
            events = list(self._chosen(events, is_end=is_end))
        for event in events:
            if isinstance(event, ToolCallStart):
                self.calls.append(StartedCall(new_call_id(), event.name))
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = (
                self._finish_reason(output.finish_reason),
                output.stop_reason,
            )
        return events

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._parser.matched_stop

    def feed(self, pieces: Sequence[TextPiece], *, may_stop: bool = True) -> list[ParserEvent]:
        """Read the next pieces, as of `OutputParser`. Where tags are no tokens of their own, the
        parser says which pieces count as reasoning."""
        if self._counter.knows_tags:
            return self._parser.feed(pieces, may_stop=may_stop)
        events = []
        for piece in pieces:
            events += self._parser.feed([piece], may_stop=may_stop)
            self._counter.add(self._parser.in_reasoning)
        return events

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        """The text is over, as of `OutputParser`."""
        return self._parser.finish(is_cut=is_cut)

    def _finish_reason(self, of_engine: str) -> str:
        ends_with_calls = (
            of_engine == "stop" and self.calls and not self._rules.is_call_forced_by_name
        )
        return "tool_calls" if ends_with_calls else of_engine

    def _chosen(self, events: Iterable[ParserEvent], *, is_end: bool) -> Iterator[ParserEvent]:
        """The events that the rules let through, reasoning when they do."""
        for event in events:
            if isinstance(event, ReasoningDelta):
                if self._rules.reasoning is ReasoningPlace.NOWHERE:
                    continue
                if not self._rules.stream_reasoning:
                    self._held_reasoning.append(event.text)
                    continue
            elif self._held_reasoning:
                yield self._released_reasoning()
            if (
                isinstance(event, ReasoningDelta | ContentDelta)
                or event.index == 0
                or self._rules.parallel_calls
            ):
                yield event
        if is_end and self._held_reasoning:
            yield self._released_reasoning()

    def _released_reasoning(self) -> ReasoningDelta:
        held, self._held_reasoning = "".join(self._held_reasoning), []
        return ReasoningDelta(held)


class PlainReader:
    """Counts the tokens of a choice, whose text stays as it is. Single writer: the request's
    handler.
    """

    __slots__ = ("_counter", "finish_reason", "stop_reason")

    def __init__(self, chat_format: ChatFormat, prompt: Sequence[int]) -> None:
        in_reasoning = chat_format.reasoning_after(prompt) == "open"
        self._counter = ReasoningCounter(chat_format, in_reasoning=in_reasoning)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the reasoning so far."""
        return self._counter.count

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """Take the counts of `output`; its text is not parsed. Errors: as of `ChoiceReader`."""
        check_failed(output)
        self._counter.push(output.token_ids)
        if self._counter.is_undecided:  # the text is not parsed: a call opener counts as one
            self._counter.call_began()
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return []


def _with_reasoning_in(place: ReasoningPlace | None, given: ChatFormat) -> ChatFormat:
    stays = {
        None: True,
        ReasoningPlace.CONTENT: given.thinking is not Thinking.SPLIT,
        ReasoningPlace.BLOCK: given.thinking is not Thinking.APPEND,
    }
    if stays.get(place, False):
        return given
    return dataclasses.replace(
        given, thinking=Thinking.APPEND if place is ReasoningPlace.CONTENT else Thinking.SPLIT
    )


def check_failed(output: RequestOutput) -> None:
    """`EngineError` if this request failed in the engine."""
    if output.finish_reason == "error":
        raise EngineError(f"request {output.request_id}: {output.error or 'no reason given'}")
