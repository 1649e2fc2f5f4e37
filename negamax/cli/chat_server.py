"""A chat with an OpenAI-compatible server."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from negamax.base.errors import ConfigError, InvalidRequestError, UnavailableError
from negamax.cli.chat_session import ChatInput, Show, TokenCounts
from negamax.text.parser import events

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0  # longest time without a byte from the server
_MAX_ERROR_BYTES = 64 * 1024


class ServerBackend:
    """A running server that answers one chat."""

    def __init__(self, address: str, *, api_key: str | None, model: str) -> None:
        """Create the backend. Only `connect` calls this method."""
        self.model = model
        self._address = address
        self._headers = _headers(api_key)

    @classmethod
    def connect(cls, url: str, *, api_key: str | None, model: str | None) -> "ServerBackend":
        """Connect to `url` and use `model` or the server's first model. Raises `ConfigError`."""
        address = url if "://" in url else f"http://{url}"
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            hint = "pass an address such as http://localhost:8000"
            raise ConfigError(f"--url is {url!r}, which is not an HTTP address", hint=hint)
        address = address.rstrip("/").removesuffix("/v1")
        if model is None:
            model = _first_model(address, _headers(api_key))
        return cls(address, api_key=api_key, model=model)

    def answer(self, prompt: ChatInput, show: Show) -> TokenCounts:
        """Generate the next message. Raises `UnavailableError` if the server does not answer."""
        body: dict[str, Any] = {"model": self.model, "messages": prompt.messages}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sampling = prompt.sampling
        given = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        body |= {name: value for name, value in given.items() if value is not None}
        body |= {"tools": prompt.tools} if prompt.tools else {}
        url, text = f"{self._address}/v1/chat/completions", json.dumps(body)
        try:
            with _answered(url, headers=self._headers, body=text) as response:
                if response.status != 200:
                    raise InvalidRequestError(_error_text(response))
                return _read_stream(_events(response), show)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"the server at {self._address} does not answer: {error or repr(error)}"
            ) from None


def _read_stream(chunks: Iterator[dict[str, Any]], show: Show) -> TokenCounts:
    """Convert the deltas to events of an output parser, and pass the events to `show`."""
    counts = TokenCounts(0, 0, 0)
    open_calls: set[int] = set()
    for chunk in chunks:
        if "error" in chunk:
            raise InvalidRequestError(_message(chunk["error"]))
        counts = _counts(chunk.get("usage")) or counts
        for choice in chunk.get("choices") or ():
            deltas = list(_delta_events(choice.get("delta") or {}, open_calls))
            if choice.get("finish_reason") not in (None, "length"):
                deltas += [events.ToolCallEnd(index) for index in sorted(open_calls)]
                open_calls.clear()
            show(deltas)
    return counts


def _delta_events(delta: dict[str, Any], open_calls: set[int]) -> Iterator[events.ParserEvent]:
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if thought:
        yield events.ReasoningDelta(thought)
    if delta.get("content"):
        yield events.ContentDelta(delta["content"])
    for call in delta.get("tool_calls") or ():
        index, function = call.get("index", 0), call.get("function") or {}
        if index not in open_calls:
            yield from (events.ToolCallEnd(before) for before in sorted(open_calls))
            open_calls.clear()
            open_calls.add(index)
            yield events.ToolCallStart(index, function.get("name") or "")
        if function.get("arguments"):
            yield events.ToolArgumentsDelta(index, function["arguments"])


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON of server-sent events. Raises `UnavailableError` if the stream ends early."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise UnavailableError(f"the server sent {data[:100]!r}, which is not JSON") from None
        if isinstance(event, dict):
            yield event
    raise UnavailableError("the server ended its answer early")


def _first_model(address: str, headers: dict[str, str]) -> str:
    try:
        with _answered(f"{address}/v1/models", headers=headers) as response:
            if response.status in (401, 403):
                hint = "pass --api-key, or set NEGAMAX_API_KEY"
                raise ConfigError(f"{address} requires a key: {_error_text(response)}", hint=hint)
            if response.status != 200:
                raise ConfigError(f"{address}/v1/models answers: {_error_text(response)}")
            return str(json.loads(response.read())["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        refusal = f"--url is {address}, where no server answers: {error}"
        raise ConfigError(refusal, hint="start a server with `negamax serve MODEL`") from None
    except (ValueError, LookupError, TypeError):
        hint = "pass the model's name as MODEL, or another --url"
        raise ConfigError(f"{address}/v1/models lists no model", hint=hint) from None


@contextmanager
def _answered(
    url: str, *, headers: dict[str, str], body: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Send a GET request, or POST `body` if it is set. Raises `OSError` or `HTTPException`."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname, parts.port, timeout=_CONNECT_SECONDS)) as connection:
        connection.connect()
        connection.sock.settimeout(_SILENCE_SECONDS)
        method = "GET" if body is None else "POST"
        connection.request(method, parts.path, body=body, headers=headers)
        yield connection.getresponse()


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers if api_key is None else headers | {"authorization": f"Bearer {api_key}"}


def _counts(usage: dict[str, Any] | None) -> TokenCounts | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return TokenCounts(usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))


def _error_text(response: http.client.HTTPResponse) -> str:
    body = response.read(_MAX_ERROR_BYTES)
    try:
        return f"{_message(json.loads(body)['error'])} (status {response.status})"
    except (ValueError, LookupError, TypeError):
        text = " ".join(body[:300].decode("utf-8", "replace").split())
        return f"status {response.status} {response.reason}: {text}"


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
