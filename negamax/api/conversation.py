"""What all dialects share: from messages to prompt tokens, and from a choice's outputs to reasoning, content and calls.

A dialect turns its request into a `Conversation`, which `PromptBuilder.chat` turns into a prompt, and into `ReadingRules`, by
which a `ChoiceReader` per choice reads what the engine sends. `UsageMeter` counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from negamax.api.schemas.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from negamax.api.thinking import NO_CHOICE, ReasoningPlace, ThinkingChoice, other_variables, template_switch
from negamax.base.errors import ContextLengthError, EngineError, InvalidRequestError
from negamax.config.grammar import Marker
from negamax.engine.output import RequestOutput
from negamax.text.chat_template import ChatTemplate
from negamax.text.formats import OutputStyle
from negamax.text.messages import normalize_messages, plain_text
from negamax.text.minimax_m2_format import MINIMAX_M2
from negamax.text.output_parser import (
    ContentDelta,
    OutputFormat,
    ParserEvent,
    ReasoningDelta,
    Thinking,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from negamax.text.tokenizer import Tokenizer

_INLINE_BYTES = 8192  # work on larger requests runs in a thread, so that other requests go on
_PROBE_CHARS_PER_TOKEN = 16  # text of more characters than this per token of the window is probed before it is tokenised

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Voice:
    """How the served model writes: its style, the tokens of its tags, and the tokens that close its reasoning."""

    style: OutputStyle
    tag_ids: Mapping[str, int]
    closing_ids: tuple[int, ...]

    @classmethod
    def of(cls, style: OutputStyle, tokenizer: Tokenizer) -> Voice:
        """The voice of a model with this tokenizer."""
        return cls(style, style.format.tag_ids(tokenizer), tuple(tokenizer.encode(closing_text(style.format))))

    def marker(self, tag: str) -> Marker:
        """A tag as grammars know it."""
        return Marker(tag, self.tag_ids.get(tag))


def closing_text(output_format: OutputFormat) -> str:
    """What a model of this format writes to end its reasoning."""
    return f"\n{output_format.think_close}\n\n" if output_format is MINIMAX_M2 else output_format.think_close


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is to be answered. Messages are as in OpenAI's API and not checked yet; tools keep the key order of the client."""

    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None  # that the model is shown
    thinking: ThinkingChoice = NO_CHOICE
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


async def off_loop(work: Callable[[], T], *, num_bytes: int) -> T:
    """The result of `work` on a request of about `num_bytes`, in a thread where it may take long."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


ReasoningState = Literal["open", "optional", "none"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `reasoning`: the answer begins within it, may begin with it, or has none. `continued`: the
    content that the answer goes on with (continue_final_message)."""

    text: str
    token_ids: list[int]
    reasoning: ReasoningState
    continued: str = ""


class PromptBuilder:
    """Renders conversations and tokenises text, off the event loop where it takes long."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        voice: Voice,
        max_model_len: int,
        default_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`default_template_kwargs` are the template variables of requests that set none of that name."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._voice = voice
        self._max_model_len = max_model_len
        self._default_variables = other_variables(default_template_kwargs or {})
        self._default_mode = template_switch(default_template_kwargs or {})

    async def chat(self, conversation: Conversation, *, num_bytes: int) -> ChatPrompt:
        """The prompt for `conversation`, which has about `num_bytes`.

        Errors: `InvalidRequestError` for what the messages, the template or the combination refuses.
        """
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message continues the last message, add_generation_prompt starts a new one",
                hint="send add_generation_prompt=false",
                param="continue_final_message",
                code="invalid_value",
            )

        def build() -> ChatPrompt:
            try:
                text, reasoning, continued = self._render(conversation)
            except RecursionError:
                raise InvalidRequestError("the messages or tools are nested too deeply", param="messages") from None
            return ChatPrompt(text, self._encode(text), reasoning, continued)

        return await off_loop(build, num_bytes=num_bytes)

    async def plain(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of plain prompts; special tokens written as text count as such. Token ids stay as they are."""

        def build() -> list[list[int]]:
            return [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        return await off_loop(build, num_bytes=sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))

    def _render(self, conversation: Conversation) -> tuple[str, ReasoningState, str]:
        """The prompt's text, how the answer begins, and the content that it continues."""
        template = self._chat_template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template", hint="use /v1/completions, or start the server with --chat-template FILE"
            )
        thinking = conversation.thinking
        if thinking.mode_for(template) is None:
            thinking = dataclasses.replace(thinking, mode=self._default_mode)
        messages = normalize_messages(conversation.messages, has_root=template.has_root_role)
        mark = _Mark.put(messages) if conversation.continue_final_message else None
        text = template.render(
            messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            **{**self._default_variables, **conversation.template_kwargs, **thinking.template_variables(template)},
        )
        if mark is not None:
            return mark.cut(text), "open" if mark.is_in_reasoning else "none", mark.continued
        output_format = self._voice.style.format
        if output_format.opens_reasoning(text):
            if thinking.mode_for(template) != "disabled":
                return text, "open", ""
            return text + closing_text(output_format).lstrip("\n"), "none", ""  # the same prompt up to its end
        return text, "none" if text.endswith(output_format.think_close) else "optional", ""

    def _encode(self, text: str) -> list[int]:
        """Tokens of `text`; text that is far longer than the window is refused without tokenising all of it."""
        probe_chars = _PROBE_CHARS_PER_TOKEN * self._max_model_len
        if len(text) > probe_chars:
            probed = len(self._tokenizer.encode(text[:probe_chars]))
            if probed > 2 * self._max_model_len:
                raise ContextLengthError(
                    f"the prompt has more than {probed} tokens; the window is {self._max_model_len} tokens, output included",
                    hint="shorten the prompt",
                    param="messages",
                    code="context_length_exceeded",
                )
        return self._tokenizer.encode(text)


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
            raise InvalidRequestError("the last message is empty; there is nothing to continue", param="continue_final_message")
        return cls(mark, not content, content)

    def cut(self, prompt: str) -> str:
        """`prompt` up to the mark."""
        before, found, _ = prompt.rpartition(self.text)
        if not found:
            raise InvalidRequestError("the chat template does not show the last message", param="continue_final_message")
        return before


class ReasoningCounter:
    """Counts the tokens of a choice that lie inside its reasoning, by the tags' token ids. What was closed stays closed, as in
    the parser: think tags in content are content."""

    def __init__(self, voice: Voice, *, in_reasoning: bool) -> None:
        style = voice.style.format
        opener, closer, call = style.think_open, style.think_close, style.call_open
        self._opener = voice.tag_ids.get(opener)
        self._closers = {voice.tag_ids.get(closer), voice.tag_ids.get(call)}
        self._in_reasoning = in_reasoning
        self.knows_tags = opener in voice.tag_ids and closer in voice.tag_ids
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens; the tags themselves are not reasoning."""
        for token_id in token_ids:
            if token_id in self._closers:
                self._in_reasoning, self._opener = False, None
            elif token_id == self._opener:
                self._in_reasoning = True
            else:
                self.count += self._in_reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRules:
    """How the choices of one request are read."""

    tools: Sequence[Mapping[str, Any]] | None = None  # the declared ones: their schemas decide the types of arguments
    may_call: bool = True  # False: the answer has no calls, what looks like one is content
    parallel_calls: bool = True  # False: only the first call is reported
    is_call_forced_by_name: bool = False  # then a call is the answer, and it ends with "stop", as in OpenAI's API
    reasoning: ReasoningPlace | None = None  # None: where the server's parser puts it
    stream_reasoning: bool = True  # False: reasoning comes in one piece when it is complete


@dataclass(slots=True)
class CallSoFar:
    """A tool call while its arguments grow. Single writer: its `ChoiceReader`."""

    id: str
    name: str
    parts: list[str]

    @property
    def arguments(self) -> str:
        """The JSON text so far; a whole object once the choice has ended."""
        return "".join(self.parts)


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class ChoiceReader:
    """One choice of a chat answer: its outputs in, events out, and all that was said so far. Single writer: the request's
    handler."""

    def __init__(self, voice: Voice, *, prompt: ChatPrompt, rules: ReadingRules) -> None:
        self._rules = rules
        in_reasoning = prompt.reasoning == "open"
        self._parser = _with_reasoning_in(rules.reasoning, voice.style).new_parser(
            tools=rules.tools, in_reasoning=in_reasoning, tag_ids=voice.tag_ids or None, may_call=rules.may_call
        )
        self._counter = ReasoningCounter(voice, in_reasoning=in_reasoning)
        self._held_reasoning: list[str] = []  # that waits for its end
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[CallSoFar] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_output_tokens = 0

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the reasoning so far."""
        return self._counter.count

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """The events of `output`. Errors: `EngineError` if the engine gave up on the request."""
        check_failed(output)
        self.num_output_tokens = output.num_output_tokens
        events = self._parse(output)
        is_end = output.finish_reason is not None
        if is_end:
            events = [*events, *self._parser.finish()]
        if self._holds_back:
            events = list(self._chosen(events, is_end=is_end))
        for event in events:
            self._keep(event)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = self._finish_reason(output.finish_reason), output.stop_reason
        return events

    def _parse(self, output: RequestOutput) -> list[ParserEvent]:
        """Parse and count. Where tags are no tokens of their own, the parser says which pieces are reasoning."""
        counter = self._counter
        if counter.knows_tags:
            counter.push(output.token_ids)
            return self._parser.feed(output.pieces)
        events: list[ParserEvent] = []
        for piece in output.pieces:
            events += self._parser.feed([piece])
            counter.count += self._parser.in_reasoning
        return events

    def _finish_reason(self, of_engine: str) -> str:
        ends_with_calls = of_engine == "stop" and self.calls and not self._rules.is_call_forced_by_name
        return "tool_calls" if ends_with_calls else of_engine

    @property
    def _holds_back(self) -> bool:
        """Whether the parser may say more than the rules allow."""
        rules = self._rules
        return rules.reasoning is ReasoningPlace.NOWHERE or not rules.stream_reasoning or not rules.parallel_calls

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
            if isinstance(event, ReasoningDelta | ContentDelta) or event.index == 0 or self._rules.parallel_calls:
                yield event
        if is_end and self._held_reasoning:
            yield self._released_reasoning()

    def _released_reasoning(self) -> ReasoningDelta:
        held, self._held_reasoning = "".join(self._held_reasoning), []
        return ReasoningDelta(held)

    def _keep(self, event: ParserEvent) -> None:
        match event:
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ContentDelta(text):
                self._content.append(text)
            case ToolCallStart(_, name):
                self.calls.append(CallSoFar(new_call_id(), name, []))
            case ToolArgumentsDelta(index, text):
                self.calls[index].parts.append(text)
            case ToolCallEnd():
                pass


def _with_reasoning_in(place: ReasoningPlace | None, style: OutputStyle) -> OutputStyle:
    if place is None or (place is ReasoningPlace.CONTENT and style.thinking is not Thinking.SPLIT):
        return style
    return dataclasses.replace(style, thinking=Thinking.APPEND if place is ReasoningPlace.CONTENT else Thinking.SPLIT)


def without_tokens(output: RequestOutput) -> RequestOutput:
    """An output of a request that only reads its prompt: the one token that had to run is no part of the answer."""
    return msgspec.structs.replace(
        output,
        token_ids=[],
        pieces=[],
        logprobs=None if output.logprobs is None else [],
        num_output_tokens=0,
        finish_reason="length",
        stop_reason=None,
    )


def check_failed(output: RequestOutput) -> None:
    """`EngineError` if the engine gave up on this request."""
    if output.finish_reason == "error":
        raise EngineError(f"request {output.request_id}: {output.error or 'no reason given'}")


def prompt_in_reasoning(token_ids: Sequence[int], voice: Voice) -> bool:
    """Whether a plain prompt ends with the think opener and at most one token (its line break) after it."""
    opener = voice.tag_ids.get(voice.style.format.think_open)
    return opener is not None and opener in token_ids[-2:]


class UsageMeter:
    """Adds up the token counts of a request. Single writer: the request's handler."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # by prompt: tokens, cached tokens
        self._outputs: dict[int, tuple[int, int]] = {}  # by choice: tokens, reasoning tokens

    def update(self, output: RequestOutput, *, prompt: int, choice: int, reasoning_tokens: int) -> None:
        """Take the counts of an output of `choice`, which belongs to `prompt`. The choices of a prompt share it; what the
        least lucky one found in the cache is what the cache gave."""
        _, cached = self._prompts.get(prompt, (0, output.num_cached_tokens))
        self._prompts[prompt] = (output.num_prompt_tokens, min(cached, output.num_cached_tokens))
        self._outputs[choice] = (output.num_output_tokens, reasoning_tokens)

    def usage(self) -> Usage:
        """The counts so far."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        completion_tokens = sum(tokens for tokens, _ in self._outputs.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(cached for _, cached in self._prompts.values())),
            completion_tokens_details=CompletionTokensDetails(sum(tokens for _, tokens in self._outputs.values())),
        )


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of several generators as they come, with the generator's index. The first error ends all; so does closing."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=4 * len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
