"""Send chat requests to any OpenAI-compatible server, and parse the answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from negamax.base.errors import ConfigError
from negamax.bench.serve_client import (
    ExchangeError,
    ResponseReader,
    ResponseRecord,
    ServingClient,
    WholeResponse,
)

CHAT = "/v1/chat/completions"
ABSENT = (404, 405, 501)  # HTTP statuses of missing endpoints
_ADDRESS = re.compile(r"[!-~]+")


class CheckFailure(Exception):
    """Raised if an answer violates the protocol. `status` is the HTTP status, or 0 if unknown."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def connect(url: str, *, api_key: str | None, timeout: float) -> ServingClient:
    """Return a client for the server at `url`, which may end in /v1. Raises `ConfigError`."""
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    headers = {"user-agent": "negamax-verify", "anthropic-version": "2023-06-01"}
    if api_key:
        headers |= {"authorization": f"Bearer {api_key}", "x-api-key": api_key}
    if not _ADDRESS.fullmatch(address) or not (api_key or "").isascii():
        what = "--api-key" if _ADDRESS.fullmatch(address) else f"URL is {url[:100]!r}, which"
        raise ConfigError(f"{what} has characters that HTTP cannot send")
    return ServingClient(address, headers=headers, timeout=timeout, flag="URL")


async def find_model(client: ServingClient) -> str:
    """Return the first model of /v1/models. Raises `CheckFailure`."""
    found = read_object(await exchange(client, "GET", "/v1/models"))
    try:
        return str(found["data"][0]["id"])
    except (LookupError, TypeError):
        raise CheckFailure("the list of models is empty") from None


async def exchange(
    client: ServingClient, method: str, path: str, body: object = None
) -> WholeResponse:
    """Send a request and return the answer. Raises `CheckFailure` if the status is not 2xx."""
    answer = WholeResponse()
    raw = b"" if body is None else json.dumps(body).encode()
    try:
        await client.send(method, path, raw, answer)
    except ExchangeError as error:
        raise CheckFailure(str(error)) from None
    if not 200 <= answer.status < 300:
        raise CheckFailure(answer.read_error(), status=answer.status)
    return answer


def read_object(answer: WholeResponse) -> dict[str, Any]:
    """Return the JSON object in an answer. Raises `CheckFailure` if the answer has none."""
    found = answer.read()
    if isinstance(found, dict):
        return found
    kind = answer.headers.get("content-type", "no content type").partition(";")[0]
    raise CheckFailure(f"the answer is not a JSON object ({kind})")


@dataclass
class JudgedAnswer:
    """An answer of a chat completion, with or without streaming."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments) of each call
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # decoded events of a stream

    @property
    def is_reasoning_only(self) -> bool:
        """Return whether a complete answer consists of reasoning only."""
        has_answer = bool(self.content.strip() or self.calls)
        return bool(self.reasoning) and not has_answer and self.finish_reason != "length"

    def count(self, name: str) -> int:
        """Return the count `name` of `usage`. Raises `CheckFailure` if the count is missing."""
        value: Any = self.usage
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckFailure(f"usage.{name} is {value!r}, not a number of tokens")
        return value


class ServerProbe:
    """Sends the chat requests of one run. `answers` collects all usable answers."""

    def __init__(self, client: ServingClient, model: str) -> None:
        self.client, self.model = client, model
        self.answers: list[JudgedAnswer] = []

    async def chat(self, body: dict[str, Any]) -> JudgedAnswer:
        """Send one chat request. Raises `CheckFailure` for a refusal or a malformed answer."""
        body = {"model": self.model, **body}
        is_streamed = bool(body.get("stream"))
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        answer = await exchange(self.client, "POST", CHAT, body)
        found = read_stream(answer) if is_streamed else read_chat(read_object(answer))
        self.answers.append(found)
        return found


def read_chat(answer: dict[str, Any]) -> JudgedAnswer:
    """Parse an answer without streaming. Raises `CheckFailure` for a malformed answer."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        found = JudgedAnswer(
            message.get("content") or "",
            message.get("reasoning_content") or message.get("reasoning") or "",
            [(function["name"], function["arguments"]) for function in functions],
            choice.get("finish_reason"),
            usage if isinstance(usage := answer.get("usage"), dict) else {},
        )
    except (LookupError, TypeError, AttributeError):
        raise CheckFailure("the answer lacks fields of a chat completion") from None
    texts = [found.content, found.reasoning, *(text for call in found.calls for text in call)]
    if not all(isinstance(text, str) for text in texts):
        raise CheckFailure("a text, or the arguments of a tool call, is not a string")
    return found


def read_stream(answer: WholeResponse) -> JudgedAnswer:
    """Join the events of a stream that ends with [DONE]. Raises `CheckFailure`."""
    reader = ResponseReader(ResponseRecord(0), collect=True)
    reader.head(answer.status, answer.headers)
    reader.body(answer.raw, 0.0)
    reader.finish()
    record, message = reader.record, reader.message or {}
    if record.error is not None:
        raise CheckFailure(f"the stream is broken: {record.error} {record.detail}".rstrip())
    if not reader.is_complete:
        raise CheckFailure("the stream ends without [DONE]")
    lines = [line[5:].strip() for line in answer.raw.split(b"\n") if line.startswith(b"data:")]
    events = [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]
    usages = [event["usage"] for event in events if isinstance(event.get("usage"), dict)]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return JudgedAnswer(
        message.get("content", ""),
        message.get("reasoning_content", ""),
        [(call["name"], call["arguments"]) for call in calls],
        record.finish_reason,
        usages[-1] if usages else {},
        events,
    )
