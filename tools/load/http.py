"""A cheap HTTP/1.1 client on asyncio streams, which can disconnect at any moment."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

_LIMIT = 1 << 24  # most bytes of a line or a chunk
DONE = b"[DONE]"
# errors that occur if the client disconnects in the middle of an answer
INTERRUPTED = (ConnectionError, asyncio.IncompleteReadError, ValueError)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """Open a connection on demand, and reuse it while the server keeps it open."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def get(self, path: str) -> Answer:
        return await self.send_raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())

    async def post(self, path: str, body: Any) -> Answer:
        return await self.send_raw(request_bytes(path, json.dumps(body).encode()))

    async def send_raw(self, request: bytes) -> Answer:
        """Send a request and read the whole answer."""
        status, headers = await self.start(request)
        answer = Answer(status, headers, await self.body(headers))
        self._after(headers)
        return answer

    async def start(self, request: bytes) -> tuple[int, Mapping[str, str]]:
        """Send a request and read the head of its answer."""
        reader, writer = await self._connect()
        writer.write(request)
        await writer.drain()
        status_line = (await reader.readline()).split()
        if len(status_line) < 2:
            raise ConnectionError("the server closed the connection without an answer")
        headers: dict[str, str] = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(status_line[1]), headers

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """Return the body of an answer whose head has been read."""
        return b"".join([part async for part in self._parts(headers)])

    async def stream(self, path: str, body: Any) -> AsyncIterator[bytes]:
        """Yield the payloads of events, including `[DONE]`. Raises `UnexpectedStatusError`."""
        status, headers = await self.start(request_bytes(path, json.dumps(body).encode()))
        if status != 200:
            answer = await self.body(headers)
            self._after(headers)
            raise UnexpectedStatusError(status, answer)
        async for part in self._parts(headers):
            for line in part.split(b"\n"):
                if line.startswith(b"data: "):
                    yield line[6:]
        self._after(headers)

    def hang_up(self, *, reset: bool = False) -> None:
        """Close the connection at once; if `reset`, by a TCP reset."""
        if self._writer is not None:
            if reset:
                raw: socket.socket = self._writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, limit=_LIMIT
            )
        return self._reader, self._writer

    async def _parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        reader, _ = await self._connect()
        if headers.get("transfer-encoding") != "chunked":
            yield await reader.readexactly(int(headers.get("content-length", "0")))
            return
        while size := int(await reader.readline(), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readline()

    def _after(self, headers: Mapping[str, str]) -> None:
        if headers.get("connection") == "close":
            self.hang_up()


class UnexpectedStatusError(ConnectionError):
    """Raised if a request for a stream gets a status other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {body[:300]!r}")
        self.status = status


def request_bytes(path: str, content: bytes, *, content_type: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
