"""Keep connections to one server open for later requests."""

import asyncio
import ssl
import time
from typing import Any

_READ_LIMIT = 1 << 16
MAX_IDLE = 256  # Limit of idle connections to one server.
IDLE_SECONDS = 4.0  # Time limit of an idle connection, below uvicorn's limit of 5 s.


class KeptReader(asyncio.StreamReader):
    """Reads from a connection. After an answer, unread bytes or EOF make a connection unusable."""

    def __init__(self) -> None:
        super().__init__(limit=_READ_LIMIT)
        self.has_received = False
        self.num_unread = 0  # in bytes
        self.idle_since = 0.0

    @property
    def is_spoiled(self) -> bool:
        return self.at_eof() or self.num_unread > 0

    def feed_data(self, data: Any) -> None:
        self.has_received = True
        self.num_unread += len(data)
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        part = await super().read(n)
        self.num_unread -= len(part)
        return part


Connection = tuple[KeptReader, asyncio.StreamWriter]


class ConnectionPool:
    """The idle connections to a server. Only the event loop uses this object."""

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None) -> None:
        self._host, self.port, self._tls = host, port, tls
        self._idle: list[Connection] = []

    async def open(self) -> Connection:
        """Open a connection. Raises `OSError` if the server cannot be reached."""
        loop, reader = asyncio.get_running_loop(), KeptReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.create_connection(
            lambda: protocol, self._host, self.port, ssl=self._tls
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def take(self) -> Connection | None:
        """Return the most recently used connection, or None if no connection is usable."""
        while self._idle:
            reader, writer = self._idle.pop()
            is_old = time.monotonic() - reader.idle_since > IDLE_SECONDS
            if not (is_old or reader.is_spoiled or writer.is_closing()):
                reader.has_received = False
                return reader, writer
            writer.close()
            if is_old:
                self.close()  # The remaining idle connections are older, so close all.
        return None

    def keep(self, connection: Connection) -> None:
        """Keep a connection for reuse after an answer, or close it if it is not reusable."""
        reader, writer = connection
        reader.idle_since = time.monotonic()
        if reader.is_spoiled or len(self._idle) >= MAX_IDLE:
            writer.close()
        else:
            self._idle.append(connection)

    def prune(self) -> None:
        """Close connections that have been idle too long or that the server has closed."""
        oldest = time.monotonic() - IDLE_SECONDS
        kept = []
        for reader, writer in self._idle:
            if reader.is_spoiled or reader.idle_since < oldest:
                writer.close()
            else:
                kept.append((reader, writer))
        self._idle = kept

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle = []
