"""What all dialects share: from messages to prompt tokens, and from a choice's outputs to reasoning, content and calls."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from negamax.api.schemas.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from negamax.base.errors import ContextLengthError, EngineError, InvalidRequestError
from negamax.engine.output import RequestOutput
from negamax.text.chat_template import ChatTemplate, normalize_messages
from negamax.text.minimax_m2_format import MINIMAX_M2, opens_reasoning
from negamax.text.output_parser import OutputParser, ParserEvent
from negamax.text.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN = "<minimax:tool_call>"

_INLINE_BYTES = 8192  # larger prompts are rendered and tokenised in a thread, so that other requests go on
_PROBE_CHARS_PER_TOKEN = 16  # text of more characters than this per token of the window is probed before it is tokenised

_WITHOUT_CALLS = dataclasses.replace(
    MINIMAX_M2, literals={tag: MINIMAX_M2.literals[tag] for tag in (THINK_OPEN, THINK_CLOSE)}, patterns=()
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `starts_in_reasoning`: it ends inside an open think block, so the answer begins there."""

    token_ids: list[int]
    starts_in_reasoning: bool


class PromptBuilder:
    """Renders conversations and tokenises text, off the event loop where it takes long."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_model_len = max_model_len

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
        num_bytes: int,
    ) -> ChatPrompt:
        """The prompt for `messages`. `num_bytes` is about how large they are.

        Errors: `InvalidRequestError` for what the messages, the template or the combination refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message continues the last message, add_generation_prompt starts a new one",
                hint="send add_generation_prompt=false",
                param="continue_final_message",
                code="invalid_value",
            )

        def build() -> ChatPrompt:
            text = self._render(
                messages,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            return ChatPrompt(self._encode(text), opens_reasoning(text))

        return build() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(build)

    async def plain(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of plain prompts; special tokens written as text count as such. Token ids stay as they are."""

        def build() -> list[list[int]]:
            return [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return build() if num_chars <= _INLINE_BYTES else await asyncio.to_thread(build)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template", hint="use /v1/completions, or start the server with --chat-template FILE"
            )
        try:
            normalized = normalize_messages(list(messages))
            mark = _mark_end(normalized) if continue_final_message else None
            text = self._chat_template.render(
                normalized, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
            )
        except RecursionError:
            raise InvalidRequestError("the messages or tools are nested too deeply", param="messages") from None
        if mark is None:
            return text
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequestError("the chat template does not show the last message", param="continue_final_message")
        return before

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


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Append a mark to the text where the last assistant message ends; what the template puts after it is cut."""
    last = messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message needs a last message by the assistant, without tool calls", param="continue_final_message"
        )
    mark = f"[{secrets.token_hex(16)}]"
    if last.get("content"):
        field = "content"
    elif last.get("reasoning_content"):
        field = "reasoning_content"
    else:
        raise InvalidRequestError("the last message is empty; there is nothing to continue", param="continue_final_message")
    if not isinstance(last[field], str):
        raise InvalidRequestError("continue_final_message needs plain text in the last message", param="continue_final_message")
    messages[-1] = {**last, field: last[field] + mark}
    return mark


class ReasoningCounter:
    """Counts the tokens of a choice that lie inside its reasoning, by the tags' token ids. What was closed stays closed, as in
    the parser: think tags in content are content."""

    def __init__(self, tags: Mapping[str, int], *, in_reasoning: bool) -> None:
        self._opener = tags.get(THINK_OPEN)
        self._closers = {tags.get(THINK_CLOSE), tags.get(CALL_OPEN)}
        self._in_reasoning = in_reasoning
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


class ChoiceReader:
    """One choice of a chat answer: its outputs in, parser events out. Single writer: the request's handler.

    With `may_call` False the answer has no calls: what looks like one is content.
    """

    def __init__(
        self, tags: Mapping[str, int], *, tools: Sequence[Mapping[str, Any]] | None, in_reasoning: bool, may_call: bool = True
    ) -> None:
        output_format = MINIMAX_M2 if may_call else _WITHOUT_CALLS
        self._parser = OutputParser(output_format, tools=tools, in_reasoning=in_reasoning, tag_ids=tags or None)
        self._reasoning = ReasoningCounter(tags, in_reasoning=in_reasoning)
        self.num_output_tokens = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the reasoning so far."""
        return self._reasoning.count

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """The events of `output`. Errors: `EngineError` if the engine gave up on the request."""
        check_failed(output)
        self._reasoning.push(output.token_ids)
        self.num_output_tokens = output.num_output_tokens
        events = self._parser.feed(output.pieces)
        return events if output.finish_reason is None else [*events, *self._parser.finish()]


def check_failed(output: RequestOutput) -> None:
    """`EngineError` if the engine gave up on this request."""
    if output.finish_reason == "error":
        raise EngineError(f"request {output.request_id}: {output.error or 'no reason given'}")


def prompt_in_reasoning(token_ids: Sequence[int], tags: Mapping[str, int]) -> bool:
    """Whether a plain prompt ends with the think opener and at most one token (its line break) after it."""
    opener = tags.get(THINK_OPEN)
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
