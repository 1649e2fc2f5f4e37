"""Coding agents that use the openai and anthropic packages. Each API has its own message format.

An agent requests an answer, returns the answer in a common format, and appends it to its history.
As users of the packages do, an agent sends the message objects of the package back to the server.
"""

import asyncio
import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anthropic
import openai

from tools.replay.script import TOOLS, Exchange, Session

MODEL_NAME = "replayed"
MAX_TOKENS = 200_000
TIMEOUT_SECONDS = 300
_CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_SECONDS}


@dataclass(frozen=True)
class SeenCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass
class Seen:
    """An answer as the client received it."""

    thinking: str = ""
    text: str = ""
    calls: list[SeenCall] = field(default_factory=list)
    ends: str = ""  # finish reason as the API names it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    ids: list[str] = field(default_factory=list)  # ids of the answer and of its parts except calls
    problems: list[str] = field(default_factory=list)  # problems of the answer's format or stream

    def expect(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)


class HangUp(Exception):
    """Raised if the client disconnects on purpose."""


class Agent(ABC):
    """A client that plays one session."""

    ends_with_calls: str
    ends_with_text: str

    def __init__(
        self, url: str, session: Session, *, thinking_mode: str | None, rng: random.Random
    ) -> None:
        self._session, self._thinking_mode, self._rng = session, thinking_mode, rng
        self._salt = ""
        self._client = self._connect(url)

    def _connect(self, url: str) -> Any:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", **_CLIENT)

    async def ask(self, salt: str, *, hang_up_after: int | None = None) -> Seen:
        """Ask for the next answer. Raises `HangUp` after `hang_up_after` characters."""
        self._salt = salt
        return await self._ask(hang_up_after)

    @abstractmethod
    async def _ask(self, hang_up_after: int | None) -> Seen: ...

    @abstractmethod
    def follow(self, exchange: Exchange, seen: Seen) -> None:
        """Append the last answer, and the messages after it, to the history."""

    async def close(self) -> None:
        await self._client.close()

    def _results(self, exchange: Exchange, seen: Seen) -> list[tuple[str, str]]:
        """Return ids and results of the calls in a random order."""
        results = list(zip((call.id for call in seen.calls), exchange.results, strict=False))
        self._rng.shuffle(results)
        return results

    def _extra(self) -> dict[str, Any]:
        kwargs = {"thinking_mode": self._thinking_mode} if self._thinking_mode else None
        return {"cache_salt": self._salt} | ({"chat_template_kwargs": kwargs} if kwargs else {})


class _Patience:
    """A counter of a stream's characters, which disconnects the client above a limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit, self._size = limit, 0

    def take(self, text: str | None) -> None:
        self._size += len(text or "")
        if self._limit is not None and self._size > self._limit:
            raise HangUp


async def _with_patience(request: Any, limit: int | None) -> Any:
    """Wait for a whole answer. With a limit, disconnect after a time that grows with the limit."""
    if limit is None:
        return await request
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(request, 0.01 + limit / 1_000_000)
    raise HangUp


class ChatAgent(Agent):
    ends_with_calls, ends_with_text = "tool_calls", "stop"

    def __init__(self, url: str, session: Session, *, is_streamed: bool, **common: Any) -> None:
        super().__init__(url, session, **common)
        self._is_streamed = is_streamed
        system = {"role": "system", "content": session.system}
        self._messages: list[Any] = [system, {"role": "user", "content": session.opening}]
        self._answer: Any = None

    async def _ask(self, hang_up_after: int | None) -> Seen:
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": self._messages,
            "tools": TOOLS,
            "max_completion_tokens": MAX_TOKENS,
            "extra_body": self._extra(),
        }
        if self._is_streamed:
            return await self._stream(body, _Patience(hang_up_after))
        answer = await _with_patience(self._client.chat.completions.create(**body), hang_up_after)
        (choice,) = answer.choices
        message = self._answer = choice.message
        seen = Seen(message.reasoning_content or "", message.content or "", ids=[answer.id])
        seen.calls = [
            SeenCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ]
        seen.ends = choice.finish_reason or ""
        seen.expect(message.reasoning == message.reasoning_content, "the reasoning fields differ")
        seen.expect(not seen.calls or message.content != "", "content is '' beside calls, not null")
        self._count(seen, answer.usage)
        return seen

    async def _stream(self, body: dict[str, Any], patience: _Patience) -> Seen:
        seen = Seen()
        calls: list[tuple[str, str, list[str]]] = []  # id, name, and pieces of the arguments
        usage, num_chunks = None, 0
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await self._client.chat.completions.create(**body, **streamed)
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
                seen.expect(not seen.ends, "a delta after the finish reason")
                self._take(choice.delta, seen, is_first=num_chunks == 1)
                seen.ends = choice.finish_reason or ""
                patience.take(_thought(choice.delta) or choice.delta.content)
                for call in choice.delta.tool_calls or ():
                    if call.id is not None:
                        where = f"call {call.index} begins as number {len(calls)}"
                        seen.expect(call.index == len(calls), where)
                        calls.append((call.id, call.function.name, []))
                    where = f"arguments of call {call.index} among those of {len(calls) - 1}"
                    seen.expect(call.index == len(calls) - 1, where)
                    calls[-1][2].append(call.function.arguments or "")
                    patience.take(call.function.arguments)
        seen.calls = [SeenCall(call_id, name, "".join(parts)) for call_id, name, parts in calls]
        self._answer = {"role": "assistant", "content": seen.text or None}
        self._answer[self._rng.choice(("reasoning_content", "reasoning"))] = seen.thinking
        if seen.calls:
            functions = ({"name": call.name, "arguments": call.arguments} for call in seen.calls)
            self._answer["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(seen.calls, functions, strict=True)
            ]
        self._count(seen, usage)
        return seen

    @staticmethod
    def _take(delta: Any, seen: Seen, *, is_first: bool) -> None:
        thought = _thought(delta)
        kinds = [bool(thought), bool(delta.content), bool(delta.tool_calls)]
        seen.expect(sum(kinds) <= 1, f"one delta has more than one kind of text: {delta}")
        other = (delta.model_extra or {}).get("reasoning", thought or None)
        seen.expect(other == (thought or None), "reasoning differs in a delta")
        seen.expect((delta.role is not None) == is_first, f"role {delta.role!r} in a wrong chunk")
        seen.thinking += thought
        seen.text += delta.content or ""

    @staticmethod
    def _count(seen: Seen, usage: Any) -> None:
        seen.expect(usage is not None, "no usage")
        if usage is not None:
            seen.prompt_tokens, seen.output_tokens = usage.prompt_tokens, usage.completion_tokens
            seen.cached_tokens = usage.prompt_tokens_details.cached_tokens
            seen.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens
            total = usage.prompt_tokens + usage.completion_tokens
            seen.expect(usage.total_tokens == total, "total_tokens is not the sum")

    def follow(self, exchange: Exchange, seen: Seen) -> None:
        self._messages.append(self._answer)
        for call_id, result in self._results(exchange, seen):
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if exchange.note:
            self._messages.append({"role": "system", "content": exchange.note})
        if exchange.question:
            self._messages.append({"role": "user", "content": exchange.question})


class MessagesAgent(Agent):
    """Use the anthropic package, with Claude Code's billing line, reminders and cache marks."""

    ends_with_calls, ends_with_text = "tool_use", "end_turn"

    def __init__(self, url: str, session: Session, *, is_streamed: bool, **common: Any) -> None:
        super().__init__(url, session, **common)
        self._is_streamed = is_streamed
        self._messages: list[Any] = [{"role": "user", "content": session.opening}]
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        functions = [tool["function"] for tool in TOOLS]
        self._tools = [{own: each[name] for own, name in names.items()} for each in functions]
        self._content: Sequence[Any] = ()

    def _connect(self, url: str) -> Any:
        return anthropic.AsyncAnthropic(base_url=url, **_CLIENT)

    async def _ask(self, hang_up_after: int | None) -> Seen:
        number = f"{self._rng.getrandbits(20):05x}"
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        mark = {"cache_control": {"type": "ephemeral"}}
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "max_tokens": MAX_TOKENS,
            "system": [_text(billing), _text(self._session.system) | mark],
            "messages": self._messages,
            "tools": self._tools,
            "metadata": {"user_id": "somebody"},
            "extra_body": {"cache_salt": self._salt},
        }
        if self._thinking_mode:
            body["thinking"] = {"type": self._thinking_mode, "budget_tokens": MAX_TOKENS - 1}
        if self._is_streamed:
            return await self._stream(body, _Patience(hang_up_after))
        # Without a timeout the package refuses to request a whole answer that may be long.
        request = self._client.messages.create(**body, timeout=TIMEOUT_SECONDS)
        return self._read(await _with_patience(request, hang_up_after), Seen())

    async def _stream(self, body: dict[str, Any], patience: _Patience) -> Seen:
        seen = Seen()
        blocks = _Order(seen, "block")
        async with self._client.messages.stream(**body) as stream:
            async for event in stream:
                if event.type == "content_block_start":
                    blocks.open(event.index, event.content_block.type)
                elif event.type == "content_block_delta":
                    text = _delta_text(event.delta)
                    blocks.add(event.index, text)
                    patience.take(text)
                elif event.type == "content_block_stop":
                    blocks.close(event.index)
            answer = await stream.get_final_message()
        seen = self._read(answer, seen)
        for block, kind, text in zip(answer.content, blocks.kinds, blocks.texts(), strict=True):
            if block.type == "tool_use":
                is_right = kind == "tool_use" and json.loads(text) == block.input
            else:
                is_right = (kind, text) == (block.type, _block_text(block))
            seen.expect(is_right, f"the deltas of a {kind} block are not its content")
        pairs = zip(blocks.kinds, blocks.texts(), strict=True)
        raw = iter(text for kind, text in pairs if kind == "tool_use")
        seen.calls = [SeenCall(call.id, call.name, next(raw)) for call in seen.calls]
        return seen

    def _read(self, answer: Any, seen: Seen) -> Seen:
        self._content = answer.content
        _expect_order(seen, [block.type for block in answer.content], "thinking", "text")
        for block in answer.content:
            if block.type == "thinking":
                seen.thinking += block.thinking
                seen.expect(bool(block.signature), "thinking without a signature")
            elif block.type == "text":
                seen.text += block.text
            else:
                seen.calls.append(SeenCall(block.id, block.name, json.dumps(block.input)))
        seen.ends, seen.ids = answer.stop_reason or "", [answer.id]
        usage = answer.usage
        seen.cached_tokens, seen.output_tokens = usage.cache_read_input_tokens, usage.output_tokens
        created = usage.cache_creation_input_tokens or 0
        seen.prompt_tokens = usage.input_tokens + seen.cached_tokens + created
        return seen

    def follow(self, exchange: Exchange, seen: Seen) -> None:
        self._messages.append({"role": "assistant", "content": self._content})
        blocks: list[dict[str, Any]] = []
        for call_id, result in self._results(exchange, seen):
            shown = [_text(result)] if self._rng.random() < 0.5 else result
            blocks.append({"type": "tool_result", "tool_use_id": call_id, "content": shown})
        if exchange.note:
            blocks.append(_text(f"<system-reminder>\n{exchange.note}\n</system-reminder>"))
        if exchange.question:
            blocks.append(_text(exchange.question) | {"cache_control": {"type": "ephemeral"}})
        self._messages.append({"role": "user", "content": blocks})


class ResponsesAgent(Agent):
    """Use streamed Responses of the openai package. If `is_stored`, the server has the history."""

    ends_with_calls = ends_with_text = "completed"

    def __init__(self, url: str, session: Session, *, is_stored: bool, **common: Any) -> None:
        super().__init__(url, session, **common)
        self._is_stored = is_stored
        self._input: list[Any] = [{"role": "user", "content": session.opening}]
        self._previous: str | None = None
        self._tools = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
        self._response: Any = None

    async def _ask(self, hang_up_after: int | None) -> Seen:
        stream = await self._client.responses.create(
            model=MODEL_NAME,
            instructions=self._session.system,
            input=self._input,
            tools=self._tools,
            max_output_tokens=MAX_TOKENS,
            store=self._is_stored,
            stream=True,
            extra_body=self._extra(),
            **({"previous_response_id": self._previous} if self._previous else {}),
        )
        seen, patience = Seen(), _Patience(hang_up_after)
        items, last_number = _Order(seen, "item"), -1
        async with contextlib.aclosing(_chunks(stream)) as events:
            async for event in events:
                where = f"event {event.sequence_number} follows {last_number}"
                seen.expect(event.sequence_number == last_number + 1, where)
                last_number = event.sequence_number
                if event.type == "response.output_item.added":
                    items.open(event.output_index, event.item.type)
                elif event.type.endswith(".delta"):
                    items.add(event.output_index, event.delta)
                    patience.take(event.delta)
                elif event.type == "response.output_item.done":
                    items.close(event.output_index)
                elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                    self._response = event.response
        output = self._response.output
        self._read(self._response, seen)
        same = [item.type for item in output] == items.kinds
        seen.expect(same, "the items of the stream are not those of its end")
        texts = [_item_text(item) for item in output]
        seen.expect(texts == items.texts(), "the deltas of an item are not its text")
        return seen

    def _read(self, response: Any, seen: Seen) -> None:
        _expect_order(seen, [item.type for item in response.output], "reasoning", "message")
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
            self._previous, self._input = self._response.id, []
        else:
            self._input += self._response.output
        for call_id, result in self._results(exchange, seen):
            item = {"type": "function_call_output", "call_id": call_id, "output": result}
            self._input.append(item)
        if exchange.note:
            self._input.append({"role": "developer", "content": exchange.note})
        if exchange.question:
            content = [{"type": "input_text", "text": exchange.question}]
            self._input.append({"role": "user", "content": content})


WAYS: dict[str, Callable[..., Agent]] = {
    "chat, streamed": partial(ChatAgent, is_streamed=True),
    "messages, streamed": partial(MessagesAgent, is_streamed=True),
    "responses, streamed": partial(ResponsesAgent, is_stored=False),
    "chat, whole": partial(ChatAgent, is_streamed=False),
    "messages, whole": partial(MessagesAgent, is_streamed=False),
    "responses, kept by the server": partial(ResponsesAgent, is_stored=True),
}


class _Order:
    """The parts of a stream. Only one part may be open at a time."""

    def __init__(self, seen: Seen, name: str) -> None:
        self.kinds: list[str] = []
        self._parts: list[list[str]] = []
        self._seen, self._name, self._open = seen, name, -1

    def open(self, index: int, kind: str) -> None:
        in_turn = self._open < 0 and index == len(self.kinds)
        self._seen.expect(in_turn, f"{self._name} {index} out of turn")
        self._open = index
        self.kinds.append(kind)
        self._parts.append([])

    def add(self, index: int, text: str) -> None:
        self._seen.expect(index == self._open, f"a delta of {self._name} {index}, which is closed")
        self._parts[index].append(text)

    def close(self, index: int) -> None:
        self._seen.expect(index == self._open, f"{self._name} {index} ends without being open")
        self._open = -1

    def texts(self) -> list[str]:
        return ["".join(parts) for parts in self._parts]


def _expect_order(seen: Seen, kinds: list[str], *single: str) -> None:
    """Check that the `single` kinds come first in `kinds`, in this order, each at most once."""
    order = [kind for kind in single if kind in kinds]
    is_right = kinds[: len(order)] == order and not set(kinds[len(order) :]) & set(single)
    seen.expect(is_right, f"parts {kinds}")


async def _chunks(stream: Any) -> AsyncGenerator[Any, None]:
    """Yield the chunks of a stream, and always close the stream."""
    try:
        async for chunk in stream:
            yield chunk
    finally:
        await stream.close()


def _thought(delta: Any) -> str:
    return (delta.model_extra or {}).get("reasoning_content") or ""


def _delta_text(delta: Any) -> str:
    own = {"thinking_delta": "thinking", "input_json_delta": "partial_json"}
    fields = own | {"text_delta": "text"}
    return str(getattr(delta, fields[delta.type])) if delta.type in fields else ""


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _block_text(block: Any) -> str:
    return str(block.thinking if block.type == "thinking" else block.text)


def _item_text(item: Any) -> str:
    if item.type == "function_call":
        return str(item.arguments)
    return "".join(part.text for part in item.content or ())
