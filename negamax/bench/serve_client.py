"""The client of `negamax bench serve`, for HTTP/1.1 and server-sent events.

The client reads the clock and parses each chunk inside asyncio's `data_received`. No task has to
wake up first, so recorded times are true arrival times even with hundreds of streams in one loop. A
connection carries one request at a time, and is reused after the response.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import msgspec

from negamax.base.errors import ConfigError

HEAD_BYTES = 64 * 1024  # Size limit of the headers, and of the bytes between two parts of the body.
EVENT_BYTES = 16 * 2**20  # Limit for one server-sent event.
ERROR_BYTES = 4096  # Limit for the body of an error response.
ANSWER_BYTES = 64 * 2**20  # Limit for a response that is not streamed.

CLOSED_EARLY = "connection closed before the answer ended"


class Sink(Protocol):
    """Receives one response. Times are seconds of `time.perf_counter`."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Receive the status and the headers. Names of headers are in lower case."""

    def body(self, piece: bytes, now: float) -> None:
        """Receive a piece of the body that arrived at `now`."""


class ExchangeError(Exception):
    """A request got no usable answer. `fresh` is True if no byte of an answer arrived."""

    def __init__(self, reason: str, *, fresh: bool = False) -> None:
        super().__init__(reason)
        self.fresh = fresh


class ClientConnection(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._now = 0.0  # Arrival time of the latest bytes.
        self._num_framing = 0  # Bytes received since the end of the headers or latest body data.
        self._until_close = False  # Whether the end of the connection ends the body.
        self._untouched = True  # Whether no byte of the current answer has arrived.
        self._keep = True

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent over the connection."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return self._keep and self._sink is None and is_open

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send `request`, and pass the whole answer to `sink`. Raises `ExchangeError`."""
        if self._transport is None or self._transport.is_closing():
            raise ExchangeError(CLOSED_EARLY, fresh=True)
        self._sink, self._untouched, self._num_framing = sink, True, 0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        """Close the connection without waiting."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's class differs
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep = False
        if self._sink is not None and self._until_close and exc is None:
            self._finish()
        elif self._sink is not None:
            self._fail(CLOSED_EARLY, fresh=self._untouched)

    def data_received(self, data: bytes) -> None:
        self._now, self._untouched = time.perf_counter(), False
        self._num_framing += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"malformed HTTP answer: {error}"[:80])
        if self._num_framing > HEAD_BYTES:
            self._fail("malformed HTTP answer: an endless line")

    def on_message_begin(self) -> None:
        self._headers = {}
        self._keep = self._keep and self._sink is not None  # no sink: the answer was not requested

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._sink is not None:  # 1xx responses are interim
            self._keep, self._num_framing = self._parser.should_keep_alive(), 0
            self._until_close = not self._headers.keys() & {"content-length", "transfer-encoding"}
            self._sink.head(status, self._headers)

    def on_body(self, piece: bytes) -> None:
        self._num_framing = 0
        if self._sink is not None:
            self._sink.body(piece, self._now)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._finish()

    def _finish(self) -> None:
        self._sink = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, reason: str, *, fresh: bool = False) -> None:
        self._keep = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ExchangeError(reason, fresh=fresh))
        self.close()


@dataclass(slots=True)
class ResponseRecord:
    """The times and the result of one request. Times are seconds of `time.perf_counter`."""

    session: int
    started: float = 0.0
    ended: float = 0.0  # Time of the last chunk with a choice, or of the failure.
    # `arrivals`: time of each chunk with new output.
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    # reported number of output tokens at each arrival; 0 if not reported
    running_tokens: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: int | None = None  # None: not reported.
    prompt_reported: bool = True  # Whether the server reported the count of prompt tokens.
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # Short reason of a failure.
    detail: str = ""  # The server's error message.
    texts: list[str] | None = None  # Pieces of text and reasoning; None: not kept.

    def fail(self, reason: str, detail: str = "") -> None:
        """Record the first failure."""
        if self.error is None:
            self.error, self.detail = reason, " ".join(detail.split())[:300]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _CallPiece(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallPiece] | None = None


class _EventChoice(msgspec.Struct, gc=False):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_EventChoice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class ResponseReader:
    """Reads a streamed answer into `record`. With `collect`, also makes `message` from the answer.

    With `running_usage`, a chunk has output if its token count exceeds the previous chunk's count.
    A chunk without a token count has output if it has text, reasoning, a tool call or token ids.
    """

    def __init__(
        self, record: ResponseRecord, *, collect: bool = False, running_usage: bool = False
    ) -> None:
        self.record = record
        self._running_usage = running_usage
        empty: dict[str, Any] = {"role": "assistant", "content": ""}
        self.message = empty if collect else None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._rest = b""
        self.is_complete = False  # whether the event [DONE] has arrived

    def head(self, status: int, headers: dict[str, str]) -> None:
        self._status, self._headers = status, headers

    def body(self, piece: bytes, now: float) -> None:
        if self._status != 200:
            self._rest = (self._rest + piece)[:ERROR_BYTES]
            return
        lines = (self._rest + piece if self._rest else piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
        if len(self._rest) > EVENT_BYTES:
            self.record.fail("endless event")
            self._rest = b""

    def finish(self) -> None:
        """Check the answer after its last byte."""
        if self._status != 200:
            wait = self._headers.get("retry-after")
            said = _message(self._rest)
            said = f"Retry-After {wait}: {said}" if wait else said
            self.record.fail(f"HTTP {self._status}", said)
        elif not self.is_complete and self.record.finish_reason is None:
            kind = self._headers.get("content-type", "").partition(";")[0]
            is_stream = kind == "text/event-stream"
            other = f"{kind or 'nothing'} instead of an event stream"
            self.record.fail("stream without an end" if is_stream else other)
        if not self.record.ended:
            self.record.ended = time.perf_counter()

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.is_complete = True
            return
        record = self.record
        try:
            event = _decode_event(payload)
        except msgspec.DecodeError as error:
            record.fail("unreadable chunk", str(error))
            return
        if event.error is not None or event.object == "error":
            record.fail("error in the stream", _message(payload))
            return
        usage = event.usage
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if event.choices:
            record.ended = now
            has_output = self._take(event.choices)
            num_tokens = (usage.completion_tokens or 0) if usage is not None else 0
            if self._running_usage and usage is not None:
                before = record.running_tokens[-1] if record.running_tokens else 0
                has_output = num_tokens > before
            if has_output:
                record.arrivals.append(now)
                record.running_tokens.append(num_tokens)

    def _take(self, choices: list[_EventChoice]) -> bool:
        """Return whether one of `choices` has output."""
        found = False
        for choice in choices:
            delta = choice.delta
            if choice.finish_reason is not None:
                self.record.finish_reason = choice.finish_reason
            text = choice.text
            if delta is not None:
                text = delta.content or delta.reasoning_content or delta.reasoning
                found = found or bool(delta.tool_calls)
            found = found or bool(choice.token_ids or text)
            if text and self.record.texts is not None:
                self.record.texts.append(text)
            if delta is not None and self.message is not None:
                _extend(self.message, delta)
        return found


def _extend(message: dict[str, Any], delta: _Delta) -> None:
    message["content"] += delta.content or ""
    reasoning = delta.reasoning_content or delta.reasoning
    if reasoning:
        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
    for piece in delta.tool_calls or ():
        calls = message.setdefault("tool_calls", [])
        index = min(max(piece.index, 0), 127)
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call["id"] = call["id"] or piece.id or ""
        if piece.function is not None:
            call["function"]["name"] += piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""


def _message(raw: bytes) -> str:
    """Return the message of an error body, or the whole text if the body is not JSON."""
    try:
        parsed = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(parsed, dict) and name in parsed:
            parsed = parsed[name]
    return parsed if isinstance(parsed, str) else msgspec.json.encode(parsed).decode()


@dataclass
class WholeResponse:
    """Collects a whole response. At most `ANSWER_BYTES` of the body are stored."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, piece: bytes, now: float) -> None:
        if len(self.raw) < ANSWER_BYTES:
            self.raw += piece

    def read(self) -> Any:
        """Parse the body as JSON, or return it as text if it is not JSON."""
        try:
            return msgspec.json.decode(self.raw)
        except msgspec.DecodeError:
            return self.raw.decode(errors="replace")

    def read_error(self) -> str:
        """Describe the answer to a refused request: its status and message, on one line."""
        return f"HTTP {self.status}: {' '.join(_message(self.raw).split())[:200]}"


class ServingClient:
    """Sends requests to one server over reused connections, in one event loop."""

    def __init__(
        self, base_url: str, *, headers: dict[str, str], timeout: float, flag: str = "--base-url"
    ) -> None:
        """Parse `base_url`, which the option `flag` sets. `timeout` is in seconds per request.

        Raises `ConfigError` for an invalid URL or header.
        """
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(
                f"{flag} is {base_url[:100]!r}; allowed: http://HOST:PORT or "
                f"https://HOST:PORT, optionally with a path"
            )
        self.url = base_url
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._timeout = timeout
        lines = {
            "host": parts.netloc.rpartition("@")[2],
            "content-type": "application/json",
            "user-agent": "negamax-bench",
        } | headers
        if any(c in text for pair in lines.items() for text in pair for c in "\r\n"):
            hint = "write --header NAME=VALUE on one line"
            raise ConfigError("a header contains a line break", hint=hint)
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[ClientConnection] = []

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def stream(self, path: str, body: bytes, reader: ResponseReader) -> None:
        """POST `body` and read the streamed answer. `reader` records why a request failed."""
        record = reader.record
        record.started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange("POST", path, body, reader)
        except TimeoutError:
            record.fail(f"no end within {self._timeout:g} s")
        except ExchangeError as error:
            if not reader.is_complete:  # an error after [DONE] loses no output
                record.fail(str(error))
        except (OSError, ssl.SSLError) as error:
            record.fail(_connect_failure(error), str(error))
        except asyncio.CancelledError:
            record.fail("interrupted")
            record.ended = time.perf_counter()
            raise
        if record.error is None:
            reader.finish()
        if record.error is not None:
            record.ended = time.perf_counter()

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Send a request. Return the answer's status and JSON or text. Raises `ExchangeError`."""
        answer = WholeResponse()
        await self.send(method, path, b"" if body is None else msgspec.json.encode(body), answer)
        return answer.status, answer.read()

    async def send(self, method: str, path: str, body: bytes, sink: Sink) -> None:
        """Send a request and pass its answer to `sink`. Raises `ExchangeError`."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(method, path, body, sink)
        except TimeoutError:
            raise ExchangeError(f"no answer within {self._timeout:g} s") from None
        except UnicodeError:  # the host's name is invalid
            raise ExchangeError("unknown host") from None
        except OSError as error:
            detail = f" ({error})" if isinstance(error, ssl.SSLError) else ""
            raise ExchangeError(_connect_failure(error) + detail) from error

    async def _exchange(self, method: str, path: str, body: bytes, sink: Sink) -> None:
        line = f"{method} {self._path}{path} HTTP/1.1\r\n"
        head = f"{line}{self._lines}content-length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            try:
                await self._on(connection, request, sink)
                return
            # `fresh`: the server closed a reused connection before it answered, so try another one
            except ExchangeError as error:
                if not error.fresh:
                    raise
        connect = asyncio.get_running_loop().create_connection(
            ClientConnection, self._host, self._port, ssl=self._tls
        )
        await self._on((await connect)[1], request, sink)

    async def _on(self, connection: ClientConnection, request: bytes, sink: Sink) -> None:
        try:
            await connection.exchange(request, sink)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()


def _connect_failure(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "TLS failure"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    several = f"[Errno {errno.ECONNREFUSED}]" in str(error)  # asyncio joins errors of all addresses
    refused = several or isinstance(error, ConnectionRefusedError)
    return "connection refused" if refused else "no connection"
