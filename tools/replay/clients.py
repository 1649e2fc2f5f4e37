"""The ways a coding agent talks to a server: the openai and anthropic packages, each with its own
idea of a conversation.

An agent asks, hands out what it saw in one form for all, and takes the answer and what follows it
into its history as users of the package do: the message objects that it got go back as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

from tools.replay.script import TOOLS, Exchange, Session

MODEL_NAME = "replayed"
MAX_TOKENS = 200_000
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class SeenCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass
class Seen:
    """An answer as the client got it. Single writer: its agent."""

    thinking: str = ""
    text: str = ""
    calls: list[SeenCall] = field(default_factory=list)
    ends: str = ""  # as the API names it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    # of the answer and its parts, without those of calls
    ids: list[str] = field(default_factory=list)
    # with the form of the answer or of its stream
    problems: list[str] = field(default_factory=list)

    def expect(self, is_right: bool, problem: str) -> None:
        """Note a problem."""
        if not is_right:
            self.problems.append(problem)


class HangUp(Exception):
    """The client has seen as much as it wanted to."""


class Agent(ABC):
    """One session at a client. Single writer: its player."""

    ends_with_calls: str
    ends_with_text: str

    def __init__(self, session: Session, *, thinking_mode: str | None, rng: random.Random) -> None:
        self._session = session
        self._thinking_mode = thinking_mode
        self._rng = rng

    async def ask(self, salt: str, *, hang_up_after: int | None = None) -> Seen:
        """The answer to the history so far. Errors: `HangUp` once `hang_up_after` characters of it
        have come, and those of the package."""
        self._salt = salt
        return await self._ask(hang_up_after)

    @abstractmethod
    async def _ask(self, hang_up_after: int | None) -> Seen:
        """See `ask`."""

    @abstractmethod
    def follow(self, exchange: Exchange, seen: Seen) -> None:
        """Take the last answer into the history, and what follows it."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    def _results(self, exchange: Exchange, seen: Seen) -> list[tuple[str, str]]:
        """Ids and results of the calls, as they come in: in any order."""
        results = [
            (call.id, result) for call, result in zip(seen.calls, exchange.results, strict=False)
        ]
        self._rng.shuffle(results)
        return results

    def _extra(self) -> dict[str, Any]:
        return {"cache_salt": self._salt}


class _Patience:
    """Counts what has come of a stream, and hangs up."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._size = 0

    def take(self, text: str | None) -> None:
        self._size += len(text or "")
        if self._limit is not None and self._size > self._limit:
            raise HangUp


async def _with_patience(request: Any, limit: int | None) -> Any:
    """A whole answer; one that is to be hung up on gets a moment, which is longer for a later
    point.
    """
    if limit is None:
        return await request
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(request, 0.01 + limit / 1_000_000)
    raise HangUp


class ChatAgent(Agent):
    """openai, chat completions."""

    ends_with_calls, ends_with_text = "tool_calls", "stop"

    def __init__(
        self,
        url: str,
        session: Session,
        *,
        is_streamed: bool,
        thinking_mode: str | None,
        rng: random.Random,
    ) -> None:
        super().__init__(session, thinking_mode=thinking_mode, rng=rng)
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
        )
        self._is_streamed = is_streamed
        self._messages: list[Any] = [
            {"role": "system", "content": session.system},
            {"role": "user", "content": session.opening},
        ]
        self._answer: Any = None

    async def _ask(self, hang_up_after: int | None) -> Seen:
        kwargs = {"thinking_mode": self._thinking_mode} if self._thinking_mode else None
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": self._messages,
            "tools": TOOLS,
            "max_completion_tokens": MAX_TOKENS,
            "extra_body": self._extra() | ({"chat_template_kwargs": kwargs} if kwargs else {}),
        }
        if self._is_streamed:
            return await self._stream(body, _Patience(hang_up_after))
        answer = await _with_patience(self._client.chat.completions.create(**body), hang_up_after)
        (choice,) = answer.choices
        message = self._answer = choice.message
        calls = [
            SeenCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ]
        thinking = message.reasoning_content or ""
        seen = Seen(
            thinking, message.content or "", calls, choice.finish_reason or "", ids=[answer.id]
        )
        seen.expect(
            message.reasoning == message.reasoning_content, "reasoning and reasoning_content differ"
        )
        seen.expect(
            not calls or message.content != "", "content is '' beside calls instead of null"
        )
        self._count(seen, answer.usage)
        return seen

    async def _stream(self, body: dict[str, Any], patience: _Patience) -> Seen:
        seen = Seen()
        names: list[tuple[str, str]] = []
        arguments: list[list[str]] = []
        usage, num_chunks = None, 0
        stream = await self._client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        async with contextlib.aclosing(_chunks(stream)) as chunks:
            async for chunk in chunks:
                num_chunks += 1
                seen.ids = seen.ids or [chunk.id]
                seen.expect(chunk.id == seen.ids[0], "the id changes within a stream")
                seen.expect(usage is None, "a chunk after the usage")
                if not chunk.choices:
                    usage = chunk.usage
                    continue
                (choice,) = chunk.choices
                delta, extra = choice.delta, choice.delta.model_extra or {}
                thought = extra.get("reasoning_content") or ""
                kinds = [bool(thought), bool(delta.content), bool(delta.tool_calls)]
                seen.expect(sum(kinds) <= 1, f"one delta has more than one kind of text: {delta}")
                seen.expect(
                    extra.get("reasoning", thought or None) == (thought or None),
                    "reasoning differs in a delta",
                )
                seen.expect(
                    (delta.role is None) == (num_chunks > 1),
                    f"role {delta.role!r} in chunk {num_chunks}",
                )
                seen.expect(not seen.ends, "a delta after the finish reason")
                seen.thinking += thought
                seen.text += delta.content or ""
                seen.ends = choice.finish_reason or ""
                patience.take(thought or delta.content)
                for call in delta.tool_calls or ():
                    if call.id is not None:
                        seen.expect(
                            call.index == len(names),
                            f"call {call.index} begins as number {len(names)}",
                        )
                        names.append((call.id, call.function.name))
                        arguments.append([])
                    seen.expect(
                        call.index == len(names) - 1,
                        f"arguments of call {call.index} among those of {len(names) - 1}",
                    )
                    arguments[-1].append(call.function.arguments or "")
                    patience.take(call.function.arguments)
        seen.calls = [
            SeenCall(*name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)
        ]
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in seen.calls
        ]
        reasoning_field = self._rng.choice(("reasoning_content", "reasoning"))
        self._answer = {
            "role": "assistant",
            "content": seen.text or None,
            reasoning_field: seen.thinking,
        }
        self._answer |= {"tool_calls": calls} if calls else {}
        self._count(seen, usage)
        return seen

    @staticmethod
    def _count(seen: Seen, usage: Any) -> None:
        seen.expect(usage is not None, "no usage")
        if usage is not None:
            seen.prompt_tokens, seen.output_tokens = usage.prompt_tokens, usage.completion_tokens
            seen.cached_tokens = usage.prompt_tokens_details.cached_tokens
            seen.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens
            seen.expect(
                usage.total_tokens == usage.prompt_tokens + usage.completion_tokens,
                "total_tokens is no sum",
            )

    def follow(self, exchange: Exchange, seen: Seen) -> None:
        self._messages.append(self._answer)
        for call_id, result in self._results(exchange, seen):
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if exchange.note:
            self._messages.append({"role": "system", "content": exchange.note})
        if exchange.question:
            self._messages.append({"role": "user", "content": exchange.question})

    async def close(self) -> None:
        await self._client.close()


class MessagesAgent(Agent):
    """anthropic, messages, with what Claude Code adds: a changing first line of the system prompt,
    reminders, cache marks.
    """

    ends_with_calls, ends_with_text = "tool_use", "end_turn"

    def __init__(
        self,
        url: str,
        session: Session,
        *,
        is_streamed: bool,
        thinking_mode: str | None,
        rng: random.Random,
    ) -> None:
        super().__init__(session, thinking_mode=thinking_mode, rng=rng)
        self._client = anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
        )
        self._is_streamed = is_streamed
        self._messages: list[Any] = [{"role": "user", "content": session.opening}]
        self._tools = [
            {
                "name": tool["name"],
                "description": tool["description"],
                "input_schema": tool["parameters"],
            }
            for tool in (entry["function"] for entry in TOOLS)
        ]
        self._content: Sequence[Any] = ()

    async def _ask(self, hang_up_after: int | None) -> Seen:
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1; cch={self._rng.getrandbits(20):05x};"
        )
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "max_tokens": MAX_TOKENS,
            "system": [
                {"type": "text", "text": billing},
                {
                    "type": "text",
                    "text": self._session.system,
                    "cache_control": {"type": "ephemeral"},
                },
            ],
            "messages": self._messages,
            "tools": self._tools,
            "metadata": {"user_id": "somebody"},
            "extra_body": self._extra(),
        }
        if self._thinking_mode:
            body["thinking"] = {"type": self._thinking_mode, "budget_tokens": MAX_TOKENS - 1}
        if self._is_streamed:
            return await self._stream(body, _Patience(hang_up_after))
        # its package refuses whole answers that may be long, unless a timeout says how long
        answer = await _with_patience(
            self._client.messages.create(**body, timeout=TIMEOUT_SECONDS), hang_up_after
        )
        return self._read(answer, Seen())

    async def _stream(self, body: dict[str, Any], patience: _Patience) -> Seen:
        seen = Seen()
        merged: list[tuple[str, list[str]]] = []  # of every block: its type and its text
        opened: int | None = None
        async with self._client.messages.stream(**body) as stream:
            async for event in stream:
                if event.type == "content_block_start":
                    seen.expect(
                        opened is None and event.index == len(merged),
                        f"block {event.index} starts out of turn",
                    )
                    opened = event.index
                    merged.append((event.content_block.type, []))
                elif event.type == "content_block_delta":
                    seen.expect(
                        event.index == opened,
                        f"a delta of block {event.index} while {opened} is open",
                    )
                    text = _delta_text(event.delta)
                    merged[-1][1].append(text)
                    patience.take(text)
                elif event.type == "content_block_stop":
                    seen.expect(
                        event.index == opened, f"block {event.index} stops while {opened} is open"
                    )
                    opened = None
            answer = await stream.get_final_message()
        seen = self._read(answer, seen)
        for block, (kind, parts) in zip(answer.content, merged, strict=True):
            text = "".join(parts)
            if block.type == "tool_use":
                seen.expect(
                    kind == "tool_use" and json.loads(text) == block.input,
                    "the input's deltas are not the input",
                )
            else:
                seen.expect(
                    (kind, text) == (block.type, _block_text(block)),
                    f"the deltas of a {kind} block are not its text",
                )
        raw = iter("".join(parts) for kind, parts in merged if kind == "tool_use")
        seen.calls = [SeenCall(call.id, call.name, next(raw)) for call in seen.calls]
        return seen

    def _read(self, answer: Any, seen: Seen) -> Seen:
        self._content = answer.content
        kinds = [block.type for block in answer.content]
        order = [kind for kind in ("thinking", "text") if kind in kinds] + [
            "tool_use"
        ] * kinds.count("tool_use")
        seen.expect(kinds == order, f"blocks {kinds}")
        for block in answer.content:
            if block.type == "thinking":
                seen.thinking += block.thinking
                seen.expect(bool(block.signature), "thinking without a signature")
            elif block.type == "text":
                seen.text += block.text
            else:
                seen.calls.append(SeenCall(block.id, block.name, json.dumps(block.input)))
        seen.ends = answer.stop_reason or ""
        seen.ids = [answer.id]
        usage = answer.usage
        seen.cached_tokens = usage.cache_read_input_tokens
        seen.prompt_tokens = (
            usage.input_tokens
            + usage.cache_read_input_tokens
            + (usage.cache_creation_input_tokens or 0)
        )
        seen.output_tokens = usage.output_tokens
        return seen

    def follow(self, exchange: Exchange, seen: Seen) -> None:
        self._messages.append({"role": "assistant", "content": self._content})
        blocks: list[dict[str, Any]] = []
        for call_id, result in self._results(exchange, seen):
            shown = [{"type": "text", "text": result}] if self._rng.random() < 0.5 else result
            blocks.append({"type": "tool_result", "tool_use_id": call_id, "content": shown})
        if exchange.note:
            blocks.append(
                {"type": "text", "text": f"<system-reminder>\n{exchange.note}\n</system-reminder>"}
            )
        if exchange.question:
            blocks.append(
                {"type": "text", "text": exchange.question, "cache_control": {"type": "ephemeral"}}
            )
        self._messages.append({"role": "user", "content": blocks})

    async def close(self) -> None:
        await self._client.close()


class ResponsesAgent(Agent):
    """openai, Responses, streamed; `is_stored`: the server keeps the conversation, and only what is
    new is sent.
    """

    ends_with_calls = ends_with_text = "completed"

    def __init__(
        self,
        url: str,
        session: Session,
        *,
        is_stored: bool,
        thinking_mode: str | None,
        rng: random.Random,
    ) -> None:
        super().__init__(session, thinking_mode=thinking_mode, rng=rng)
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
        )
        self._is_stored = is_stored
        self._input: list[Any] = [{"role": "user", "content": session.opening}]
        self._previous: str | None = None
        self._tools = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
        self._response: Any = None

    async def _ask(self, hang_up_after: int | None) -> Seen:
        kwargs = {"thinking_mode": self._thinking_mode} if self._thinking_mode else None
        stream = await self._client.responses.create(
            model=MODEL_NAME,
            instructions=self._session.system,
            input=self._input,
            tools=self._tools,
            max_output_tokens=MAX_TOKENS,
            store=self._is_stored,
            stream=True,
            extra_body=self._extra() | ({"chat_template_kwargs": kwargs} if kwargs else {}),
            **({"previous_response_id": self._previous} if self._previous else {}),
        )
        seen, patience = Seen(), _Patience(hang_up_after)
        merged: dict[int, list[str]] = {}
        kinds: list[str] = []
        opened: int | None = None
        last_number = -1
        async with contextlib.aclosing(_chunks(stream)) as events:
            async for event in events:
                seen.expect(
                    event.sequence_number == last_number + 1,
                    f"event {event.sequence_number} follows {last_number}",
                )
                last_number = event.sequence_number
                if event.type == "response.output_item.added":
                    seen.expect(
                        opened is None and event.output_index == len(kinds),
                        f"item {event.output_index} out of turn",
                    )
                    opened = event.output_index
                    kinds.append(event.item.type)
                    merged[opened] = []
                elif event.type.endswith(".delta"):
                    seen.expect(
                        event.output_index == opened,
                        f"a delta of item {event.output_index} while {opened} is open",
                    )
                    merged[event.output_index].append(event.delta)
                    patience.take(event.delta)
                elif event.type == "response.output_item.done":
                    seen.expect(
                        event.output_index == opened,
                        f"item {event.output_index} is done while {opened} is open",
                    )
                    opened = None
                elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                    self._response = event.response
        response = self._response
        texts = ["".join(merged[index]) for index in range(len(kinds))]
        self._read(response, seen)
        seen.expect(
            [item.type for item in response.output] == kinds,
            "the items of the stream are not those of its end",
        )
        seen.expect(
            [_item_text(item) for item in response.output] == texts,
            "the deltas of an item are not its text",
        )
        return seen

    def _read(self, response: Any, seen: Seen) -> None:
        kinds = [item.type for item in response.output]
        order = [kind for kind in ("reasoning", "message") if kind in kinds] + [
            "function_call"
        ] * kinds.count("function_call")
        seen.expect(kinds == order, f"items {kinds}")
        for item in response.output:
            if item.type == "reasoning":
                seen.thinking += _item_text(item)
            elif item.type == "message":
                seen.text += _item_text(item)
            else:
                seen.calls.append(SeenCall(item.call_id, item.name, item.arguments))
        seen.ends = response.status
        seen.ids = [response.id, *(item.id for item in response.output)]
        usage = response.usage
        seen.prompt_tokens, seen.output_tokens = usage.input_tokens, usage.output_tokens
        seen.cached_tokens = usage.input_tokens_details.cached_tokens
        seen.reasoning_tokens = usage.output_tokens_details.reasoning_tokens

    def follow(self, exchange: Exchange, seen: Seen) -> None:
        if self._is_stored:
            self._previous = self._response.id
            self._input = []
        else:
            self._input += self._response.output
        for call_id, result in self._results(exchange, seen):
            self._input.append(
                {"type": "function_call_output", "call_id": call_id, "output": result}
            )
        if exchange.note:
            self._input.append({"role": "developer", "content": exchange.note})
        if exchange.question:
            self._input.append(
                {"role": "user", "content": [{"type": "input_text", "text": exchange.question}]}
            )

    async def close(self) -> None:
        await self._client.close()


NewAgent = Callable[..., Agent]


def _way(kind: Callable[..., Agent], **settings: bool) -> NewAgent:
    def new(url: str, session: Session, *, thinking_mode: str | None, rng: random.Random) -> Agent:
        return kind(url, session, thinking_mode=thinking_mode, rng=rng, **settings)

    return new


WAYS: dict[str, NewAgent] = {
    "chat, streamed": _way(ChatAgent, is_streamed=True),
    "messages, streamed": _way(MessagesAgent, is_streamed=True),
    "responses, streamed": _way(ResponsesAgent, is_stored=False),
    "chat, whole": _way(ChatAgent, is_streamed=False),
    "messages, whole": _way(MessagesAgent, is_streamed=False),
    "responses, kept by the server": _way(ResponsesAgent, is_stored=True),
}


async def _chunks(stream: Any) -> AsyncGenerator[Any, None]:
    """The chunks of a stream, which is closed whatever happens."""
    try:
        async for chunk in stream:
            yield chunk
    finally:
        await stream.close()


def _delta_text(delta: Any) -> str:
    match delta.type:
        case "thinking_delta":
            return str(delta.thinking)
        case "text_delta":
            return str(delta.text)
        case "input_json_delta":
            return str(delta.partial_json)
        case _:
            return ""


def _block_text(block: Any) -> str:
    return str(block.thinking if block.type == "thinking" else block.text)


def _item_text(item: Any) -> str:
    if item.type == "function_call":
        return str(item.arguments)
    return "".join(part.text for part in item.content or ())
