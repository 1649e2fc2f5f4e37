"""Send requests in each dialect of the API, and convert the answers to one format."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, STUB, Server, serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
JSON = {"content-type": "application/json"}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]
ASK = "Tom has 47 apples and buys 38 more. How many apples does he have now?"
QUESTION = [{"role": "user", "content": ASK}]
ASK_WEATHER = "What is the weather in Paris?"
WEATHER_QUESTION = [{"role": "user", "content": ASK_WEATHER}]
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
FIELDS = {"city": {"type": "string"}, "unit": UNIT}
FUNCTION = {
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "parameters": {"type": "object", "properties": FIELDS, "required": ["city"]},
}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
RESULT_TEXT = '{"temperature": 19, "condition": "cloudy"}'
TOTAL = {
    "type": "object",
    "properties": {"total": {"type": "integer"}},
    "required": ["total"],
    "additionalProperties": False,
}


def error_of(response: httpx.Response, status: int, **fields: str) -> dict[str, Any]:
    """Check the status and some `fields` of an error object. Return the error object."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(body["error"]["message"]) <= 1000
    error: dict[str, Any] = body["error"]
    assert {name: error[name] for name in fields} == fields
    return error


@contextlib.contextmanager
def serving_stub(folder: Path, *options: str) -> Iterator[tuple[Server, httpx.Client]]:
    with serving(*options, program=STUB, log_file=folder / "log") as server, server.http() as http:
        yield server, http
        assert "Traceback" not in server.log


@contextlib.contextmanager
def flooding(server: Server, bodies: list[bytes]) -> Iterator[list[int]]:
    """Post each of `bodies` again and again, and yield the growing list of statuses."""
    stop, statuses = threading.Event(), list[int]()

    def flood(body: bytes) -> None:
        with server.http() as http:
            while not stop.is_set():
                statuses.append(http.post(CHAT, content=body, headers=JSON).status_code)
                time.sleep(0.005)

    threads = [threading.Thread(target=flood, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream. A stream of events without names must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    blocks = response.text.strip().split("\n\n")
    if not blocks[-1].startswith("event: "):
        assert blocks.pop() == "data: [DONE]"
    events = []
    for block in blocks:
        *names, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert names in ([], [f"event: {event.get('type')}"])
        events.append(event)
    return events


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    return events_of(http.post(path, json={**body, "stream": True}))


def deltas_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for event in events for choice in event["choices"]]


def join(parts: list[dict[str, Any]], field: str) -> str:
    return "".join(part.get(field) or "" for part in parts)


@dataclass(frozen=True)
class Said:
    """An answer of any dialect, with the field values of chat completions."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]  # name and arguments of each call
    reason: str
    stop: str | None  # the stop string that the answer reports; responses have none
    tokens: tuple[int, int, int]  # number of tokens of prompt, answer and reasoning
    parts: list[dict[str, Any]]  # blocks or items of the answer, without ids
    cached_tokens: int = field(compare=False, default=0)


def read_chat(answer: dict[str, Any]) -> Said:
    ((choice,), usage) = answer["choices"], answer["usage"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return Said(
        message["reasoning"] or "",
        message["content"] or "",
        [(function["name"], function["arguments"]) for function in functions],
        choice["finish_reason"],
        choice["stop_reason"],
        (usage["prompt_tokens"], usage["completion_tokens"], num_reasoning),
        [],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def join_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join a stream with include_usage as clients do, and check 02_07 of MiniMax's suite."""
    *events, last = events
    assert last["choices"] == [] and all(event["usage"] is None for event in events)
    deltas = deltas_of(events)
    assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    assert not any(delta.get("content") and delta.get("reasoning_content") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if piece["index"] == len(calls):
            assert piece["id"].startswith("call_") and len(piece["id"]) == 29
            assert piece["type"] == "function"
            calls.append({"function": {"name": piece["function"]["name"], "arguments": ""}})
        else:
            assert "id" not in piece and "name" not in piece["function"]
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    names = ("content", "reasoning", "reasoning_content")
    message = {name: join(deltas, name) for name in names} | {"tool_calls": calls}
    return {"choices": [{**events[-1]["choices"][0], "message": message}], "usage": last["usage"]}


def read_messages(answer: dict[str, Any]) -> Said:
    blocks, usage = answer["content"], answer["usage"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    inputs = [call["input"] for call in calls]
    texts = [given if isinstance(given, str) else json.dumps(given) for given in inputs]
    reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    num_reasoning = usage["output_tokens_details"]["thinking_tokens"]
    return Said(
        join(blocks, "thinking"),
        join(blocks, "text"),
        [(call["name"], text) for call, text in zip(calls, texts, strict=True)],
        reasons.get(answer["stop_reason"], "stop"),
        answer["stop_sequence"],
        (num_prompt, usage["output_tokens"], num_reasoning),
        [{name: block[name] for name in block if name != "id"} for block in blocks],
        usage["cache_read_input_tokens"],
    )


def join_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join a stream's events into an answer as clients do, and check their order."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    answer = events[0]["message"]
    assert answer["content"] == []
    assert answer["stop_reason"] is answer["stop_sequence"] is None
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for event in events[2:]:
        match event["type"]:
            case "content_block_start":
                assert open_index is None and event["index"] == len(blocks)
                open_index = event["index"]
                blocks.append({**event["content_block"], "partial_json": ""})
            case "content_block_delta":
                assert event["index"] == open_index
                for name in event["delta"].keys() - {"type"}:
                    blocks[-1][name] += event["delta"][name]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            case "message_delta":
                answer |= event["delta"] | {"usage": event["usage"]}
            case "message_stop":
                assert event is events[-1] and open_index is None
            case kind:
                assert kind == "ping"
    for block in blocks:
        collected = block.pop("partial_json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(collected)
            except ValueError:  # The call is truncated.
                assert answer["stop_reason"] == "max_tokens"
                block["input"] = collected
    return answer | {"content": blocks}


def read_responses(answer: dict[str, Any]) -> Said:
    items, usage = answer["output"], answer["usage"]
    texts: dict[str, str] = {"reasoning": "", "message": ""}
    for item in items:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    calls = [item for item in items if item["type"] == "function_call"]
    is_truncated = answer["status"] == "incomplete"
    if is_truncated:
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    num_reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    return Said(
        texts["reasoning"],
        texts["message"],
        [(call["name"], call["arguments"]) for call in calls],
        "length" if is_truncated else "tool_calls" if calls else "stop",
        None,
        (usage["input_tokens"], usage["output_tokens"], num_reasoning),
        [{name: item[name] for name in item if name not in ("id", "call_id")} for item in items],
        usage["input_tokens_details"]["cached_tokens"],
    )


def join_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last state of a response, after checking all events before it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == response["output"]
    for index, item in enumerate(response["output"]):
        about = [event for event in events if event.get("output_index") == index]
        kinds = [event["type"].removeprefix("response.") for event in about]
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
        assert about[0]["item"]["status"] == "in_progress" and about[0]["item"]["id"] == item["id"]
        assert all(event.get("item_id", item["id"]) == item["id"] for event in about)
        name, delta = {
            "reasoning": ("content", "reasoning_text.delta"),
            "message": ("content", "output_text.delta"),
            "function_call": ("arguments", "function_call_arguments.delta"),
            "custom_tool_call": ("input", "custom_tool_call_input.delta"),
        }[item["type"]]
        whole = item[name] if isinstance(item[name], str) else item[name][0]["text"]
        pairs = zip(about, kinds, strict=True)
        assert "".join(event["delta"] for event, kind in pairs if kind == delta) == whole
    return response


@dataclass(frozen=True)
class Dialect:
    path: str
    messages: str  # name of the request field for messages
    limit: str
    stop: str
    make_tool: Callable[[dict[str, Any]], dict[str, Any]]  # makes a tool from a function
    read: Callable[[dict[str, Any]], Said]
    join: Callable[[list[dict[str, Any]]], dict[str, Any]]
    default_limit: int | None = None

    def body(
        self,
        messages: Any = QUESTION,
        *,
        functions: tuple[dict[str, Any], ...] = (),
        limit: int | None = None,
        stop: list[str] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Build a greedy request. `fields` are common to all dialects or belong to this one."""
        body = {**GREEDY, self.messages: messages, **fields}
        if functions:
            body["tools"] = [self.make_tool(function) for function in functions]
        limit = self.default_limit if limit is None else limit
        body |= {} if limit is None else {self.limit: limit}
        return body | ({} if stop is None else {self.stop: stop})

    def ask(self, http: httpx.Client, body: dict[str, Any], *, is_streamed: bool = False) -> Said:
        if not is_streamed:
            return self.read(post(http, self.path, **body))
        if self.path == CHAT:
            body = body | {"stream_options": {"include_usage": True}}
        return self.read(self.join(stream(http, self.path, **body)))


def make_chat_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def make_block_tool(function: dict[str, Any]) -> dict[str, Any]:
    more = {name: function[name] for name in function if name != "parameters"}
    return {**more, "input_schema": function["parameters"]}


def make_flat_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "strict": False, **function}


CHAT_DIALECT = Dialect(CHAT, "messages", "max_tokens", "stop", make_chat_tool, read_chat, join_chat)
RESPONSES_DIALECT = Dialect(
    RESPONSES, "input", "max_output_tokens", "stop", make_flat_tool, read_responses, join_responses
)
OWN_NAMES = ("messages", "max_tokens", "stop_sequences")
MESSAGES_DIALECT = Dialect(
    MESSAGES, *OWN_NAMES, make_block_tool, read_messages, join_messages, default_limit=300
)
DIALECTS = {"chat": CHAT_DIALECT, "messages": MESSAGES_DIALECT, "responses": RESPONSES_DIALECT}


def every_way(*gate: str) -> pytest.MarkDecorator:
    """Parametrize by dialect, and by whole or streamed answers. The gate runs ways in `gate`."""
    params = []
    for name, dialect in DIALECTS.items():
        for mode in ("whole", "stream"):
            marks = () if f"{name}-{mode}" in gate else (pytest.mark.full,)
            way = (dialect, mode == "stream")
            params.append(pytest.param(*way, id=f"{name}-{mode}", marks=marks))
    return pytest.mark.parametrize(("dialect", "is_streamed"), params)


every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
whole_and_streamed = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
