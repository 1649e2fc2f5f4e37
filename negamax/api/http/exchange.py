"""Send a request to another server or server process, and relay the answer while it arrives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

import httptools
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from negamax.api.http.protocol import read_connection_options
from negamax.api.http.sse import ClientGoneError, run_while_connected
from negamax.base.errors import UnavailableError

_READ_BYTES = 1 << 16
_HEAD_BYTES = 1 << 17  # Size limit of an answer's head.
# The headers `_OWN_*` and the headers that a Connection header names are not relayed, because they
# belong to one connection or because the relay sets them.
_OWN_REQUEST_HEADERS = frozenset(
    b"connection content-length expect keep-alive proxy-connection te trailer transfer-encoding "
    b"upgrade x-request-id".split()
)
_OWN_ANSWER_HEADERS = frozenset(
    b"connection date keep-alive server trailer transfer-encoding upgrade x-request-id".split()
)

Headers = Sequence[tuple[bytes, bytes]]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def list_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the request's headers to relay, without headers that belong to the connection."""
    headers = scope["headers"]
    own = _OWN_REQUEST_HEADERS | read_connection_options(headers)
    kept = [header for header in headers if header[0] not in own]
    return [*kept, (b"x-request-id", scope["state"]["request_id"].encode())]


def read_target(scope: Scope) -> bytes:
    """Return path and query as the client sent them."""
    target: bytes = scope["raw_path"]
    return target + b"?" + scope["query_string"] if scope["query_string"] else target


class Exchange:
    """One request and its answer. Only the sender of the request uses this object."""

    def __init__(
        self, connection: Connection, gone: UnavailableError, keep: Callable[[], None] | None = None
    ) -> None:
        """`gone` is the error for a connection or an answer that ends early. `keep` is called
        after the answer if the connection is reusable. Without `keep`, the connection is closed.
        """
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader, self._writer = connection
        self._gone = gone
        self._keep = keep
        self._is_reusable = self._is_closed = False
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_begun = self._is_complete = False
        self._has_end = True  # Whether the headers define the end of the body.

    @classmethod
    async def begin(
        cls,
        connection: Connection,
        method: bytes,
        target: bytes,
        *,
        headers: Headers,
        body: bytes,
        gone: UnavailableError,
        keep: Callable[[], None] | None = None,
    ) -> Self:
        """Send a request and wait for the head of the answer, or raise `gone`."""
        exchange = cls(connection, gone, keep)
        try:
            head = [
                method + b" " + target + b" HTTP/1.1",
                *(name + b": " + value for name, value in headers),
            ]
            if keep is None:
                head.append(b"connection: close")
            head += [b"content-length: %d" % len(body), b"", b""]
            exchange._writer.write(b"\r\n".join(head) + body)
            num_bytes = 0
            while not exchange._has_begun:
                num_bytes += await exchange._read()
                if num_bytes > _HEAD_BYTES and not exchange._has_begun:
                    raise gone
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def wait_for_body(self) -> None:
        """Wait until the first bytes of the body arrive or the body ends. May raise `gone`."""
        while not self._parts and not self._is_complete:
            await self._read()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it arrives. Raises `gone` if the body ends early."""
        while True:
            parts, self._parts = self._parts, []
            if parts:
                yield b"".join(parts)
            if self._is_complete:
                return
            if not self._parts:
                await self._read()

    async def read(self, *, max_bytes: int) -> bytes:
        """Return the whole body, which `parts` yields again.

        Raises `gone` if the body ends early or exceeds `max_bytes`.
        """
        parts, num_bytes = [], 0
        async for part in self.parts():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise self._gone
        self._parts = parts
        return b"".join(parts)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._keep is not None and self._is_reusable and not self._writer.is_closing():
            self._keep()
        else:
            self._writer.close()

    async def _read(self) -> int:
        """Read and parse available bytes, and return their number, or raise `gone`."""
        try:
            part = await self._reader.read(_READ_BYTES)
            if part:
                self._parser.feed_data(part)
        except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise self._gone from None
        if not part and self._has_begun and not self._has_end:
            self._is_complete = True
        elif not part:
            raise self._gone
        return len(part)

    def on_message_begin(self) -> None:
        self._is_reusable = False  # Only the end of the requested answer can set it to True.
        if not self._is_complete:
            self.headers = []  # Drop the headers of a 1xx answer.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_begun:  # Ignore trailers, which follow the body.
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_complete:
            return
        self.status = self._parser.get_status_code()
        self._has_begun = self.status >= 200
        names = {name for name, _ in self.headers}
        self._has_end = bool(names & {b"content-length", b"transfer-encoding"})

    def on_body(self, part: bytes) -> None:
        if not self._is_complete:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._is_complete:
            return
        self._is_complete = self._has_begun
        # A server may refuse a request before it has read the body. On a reused connection the
        # server would parse the rest of the body as the next request.
        self._is_reusable = (
            self._has_begun
            and self.status < 400
            and self._parser.should_keep_alive()
            and not self._writer.transport.get_write_buffer_size()
        )


class RelayedAnswer(Response):
    """Relays another server's answer while the answer arrives."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        encode_end: Callable[[UnavailableError], bytes] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """`encode_end` builds the last event of a stream that ends early. The client's connection
        is closed if `encode_end` is None, or if an answer that is not a stream ends early.
        `on_end` is called after complete and incomplete answers.
        """
        super().__init__(status_code=exchange.status)
        own = _OWN_ANSWER_HEADERS | read_connection_options(exchange.headers)
        self.raw_headers = [header for header in exchange.headers if header[0] not in own]
        self._exchange = exchange
        self._is_stream = self.headers.get("content-type", "").startswith("text/event-stream")
        self._encode_end = encode_end
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._pass_on(send))
        except ClientGoneError:
            pass
        finally:
            self._exchange.close()
            if self._on_end is not None:
                self._on_end()

    async def _pass_on(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        last = b""
        try:
            async for part in self._exchange.parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except UnavailableError as error:
            if self._encode_end is not None:
                last = self._encode_end(error)
            if not (self._is_stream and last):
                raise
        await send({"type": "http.response.body", "body": last, "more_body": False})
