"""An HTTP/1.1 connection with limits of size and time.

The limits apply to the head of a request, to the framing of its body, to the part of a body that
arrives after the answer, and to slow clients. A `BodyChannel` writes bodies without `await`.
"""

import asyncio
import secrets
import weakref
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from negamax.api.schemas.answers import build_error, encode
from negamax.base.log import get_logger

logger = get_logger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # approximate limit of a request head; `AuthMiddleware` checks exactly
_MAX_PARSED_URL_BYTES = 65535  # The parser httptools refuses longer URLs.
HEAD_SECONDS = 30.0  # Time limit for a request's head to arrive.
MAX_FRAMING_BYTES = 64 * 1024  # Size limit of the chunk extensions and trailers of a body.
# `MAX_UNWANTED_BYTES`: size limit of the part of a body that arrives after the answer.
MAX_UNWANTED_BYTES = 64 * 2**20
LINGER_SECONDS = 30.0  # Time limit for the rest of a body to arrive after the answer.
_CHUNK_BYTES = 32  # Bytes of a chunk's size and line ends, which do not count as framing.
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})
# Names of the timers for a head, for the rest of a body, and for a client that does not read.
_HEAD, _BODY, _READER = "head", "body", "reader"
BODY_CHANNEL = "negamax.body_channel"  # Name of the ASGI extension with the `BodyChannel`.


class Pausable(Protocol):
    def pause(self) -> None: ...

    def resume(self) -> None: ...


class BodyChannel:
    """Writes parts of a response's body without the task switches of ASGI's `send`.

    ASGI's `send` still starts and ends the response. Only the response's handler uses this object.
    """

    __slots__ = ("_is_chunked", "_protocol", "_response", "_transport")

    def __init__(self, protocol: "LimitedProtocol", response: Any) -> None:
        """`response` is uvicorn's `RequestResponseCycle`."""
        self._protocol = weakref.ref(protocol)  # Weak references let Python free ended requests.
        self._response = weakref.ref(response)
        self._transport: asyncio.Transport | None = None  # None while no response body is sent
        self._is_chunked = False

    @property
    def is_full(self) -> bool:
        protocol = self._protocol()
        return protocol is not None and protocol.flow.write_paused

    def write(self, part: bytes) -> None:
        """Send the nonempty `part`, or do nothing on a closed connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part)

    def feed(self, source: Pausable | None) -> None:
        """Set the source of body parts. None ends the body. The source pauses for slow clients."""
        protocol, response = self._protocol(), self._response()
        self._transport = None
        if source is not None and response is not None:
            self._transport, self._is_chunked = response.transport, response.chunked_encoding
        if protocol is not None:
            protocol.source = source
            if source is not None and self.is_full:
                source.pause()


class LimitedProtocol(HttpToolsProtocol):
    """A connection of a client. Only the event loop changes this object."""

    def __init__(self, *args: Any, slow_client_timeout: float, **options: Any) -> None:
        """Disconnect a client that reads nothing for `slow_client_timeout` seconds."""
        super().__init__(*args, **options)
        self._slow_client_timeout = slow_client_timeout
        self._timers: dict[str, asyncio.TimerHandle] = {}  # Running timers by name.
        self._in_head = True
        self._in_body = False  # True from the end of a head until the trailers end.
        self._head_bytes = 0
        self._framing_bytes = 0
        self._has_begun = False  # whether a request body began in the latest received data
        self._unwanted_bytes = 0
        self.source: Pausable | None = None  # source of the response body being sent
        self.ended: Callable[[LimitedProtocol], None] | None = None  # Callback on disconnect.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer(_HEAD, HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for awaited in (_HEAD, _BODY, _READER):
            self._stop_timer(awaited)
        super().connection_lost(exc)
        if self.ended is not None:
            self.ended(self)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        was_in_body, self._has_begun = self._in_body, False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            num_bytes = len(getattr(self, "url", b""))  # No request has begun if `url` is missing.
            if num_bytes > _MAX_PARSED_URL_BYTES:
                self._refuse(414, f"the URL has {num_bytes} bytes or more; send a shorter URL")
            else:
                self._refuse(400, "the bytes received are not valid HTTP/1.1")
            return
        if self.transport.is_closing():
            return
        if self._in_head:
            self._check_head(len(data))
        elif self._in_body:
            self._check_framing(len(data) if was_in_body and not self._has_begun else 0)
        # The data began no request, so restart the timer of the idle connection.
        elif self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _check_head(self, num_bytes: int) -> None:
        if not self._head_bytes:
            self._head_bytes = num_bytes  # The data also contains the previous request's end.
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                431,
                f"the request's head has {self._head_bytes} bytes or more; at most "
                f"{MAX_HEAD_BYTES} are allowed",
            )
        else:
            self._start_timer(_HEAD, HEAD_SECONDS, self._head_is_late)

    def _check_framing(self, num_bytes: int) -> None:
        """Check the size of a body's framing after `num_bytes` more bytes were received.

        `on_body` and `on_chunk_header` subtract bytes that are not framing from `_framing_bytes`.
        """
        self._framing_bytes = max(0, self._framing_bytes + num_bytes)
        if self._framing_bytes > MAX_FRAMING_BYTES:
            message = (
                f"the body has {self._framing_bytes} bytes or more of chunk extensions and trailers"
            )
            self._refuse(431, f"{message}; at most {MAX_FRAMING_BYTES} are allowed")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Ignore trailers, which follow the body.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_parse` removes the upgrade headers and parses the head again.
        super().on_headers_complete()  # Raises if the URL cannot be parsed.
        self._in_head = False
        self._in_body = self._has_begun = True
        self._head_bytes = self._framing_bytes = self._unwanted_bytes = 0
        self._stop_timer(_HEAD)
        channel: Any = BodyChannel(self, self.cycle)
        self.scope["extensions"] = {BODY_CHANNEL: channel}  # Set this before the app starts.
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def on_chunk_header(self) -> None:
        self._framing_bytes -= _CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        if self.cycle.response_complete:
            self._unwanted_bytes += len(body)
            if self._unwanted_bytes > MAX_UNWANTED_BYTES:
                self._hang_up()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._stop_timer(_BODY)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer(_BODY, LINGER_SECONDS, self._hang_up)

    def _parse(self, data: bytes) -> None:
        """Feed `data` to the parser. If a request offers a protocol upgrade, ignore the offer.

        An upgrade would make the parser skip the body. CONNECT also raises `HttpParserError`.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("a tunnel") from None
                rest = rest[upgrade.args[0] :]
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                # The new parser needs the same setting as the replaced parser.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        kept = read_connection_options(self.headers) & {b"close", b"keep-alive"}
        headers = [header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        headers += [(b"connection", option) for option in kept]
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        return b"\r\n".join([*lines, *(name + b": " + value for name, value in headers), b"", b""])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer(_READER, self._slow_client_timeout, self._cut_off)
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        self._stop_timer(_READER)
        super().resume_writing()
        if self.source is not None:
            self.source.resume()

    def timeout_keep_alive_handler(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection once the client has read all output, or after the time limit."""
        self.transport.close()
        self._start_timer(_READER, self._slow_client_timeout, self._cut_off)

    def _start_timer(self, awaited: str, seconds: float, late: Callable[[], None]) -> None:
        """Call `late` after `seconds` if the timer is not stopped. Keep a running timer."""
        if awaited not in self._timers:
            self._timers[awaited] = self.loop.call_later(seconds, late)

    def _stop_timer(self, awaited: str) -> None:
        timer = self._timers.pop(awaited, None)
        if timer is not None:
            timer.cancel()

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            if self._head_bytes:
                self._refuse(408, f"the request's head did not arrive within {HEAD_SECONDS:g} s")
            else:
                self._hang_up()

    def _cut_off(self) -> None:
        logger.warning(
            "a client that read nothing for %g s is disconnected", self._slow_client_timeout
        )
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        if not self._can_answer:
            self._hang_up()
            return
        body = encode(build_error(message, error_type="invalid_request_error", code="invalid_http"))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {secrets.token_hex(12)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._hang_up()

    @property
    def _can_answer(self) -> bool:
        """Whether a complete response to the incoming request can be written next."""
        if self.pipeline:
            return False
        if self._in_body:
            return not self.cycle.response_started
        return self.cycle is None or self.cycle.response_complete


def read_connection_options(headers: Sequence[tuple[bytes, bytes]]) -> set[bytes]:
    """Return the options in the Connection header in lower case, such as names of other headers."""
    values = [value for name, value in headers if name == b"connection"]
    return {option.strip().lower() for value in values for option in value.split(b",")}


def _send_without_chunks(response: Any) -> None:
    """Send bodies of unknown length without chunks, because HTTP/1.0 has no chunks.

    The end of the connection ends the body. Uvicorn's `response` object closes the connection.
    """
    send = response.send
    has_length = True

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
        if not has_length:
            response.chunked_encoding = False
            response.expected_content_length = len(message.get("body", b""))
        await send(message)

    response.send = send_plain
