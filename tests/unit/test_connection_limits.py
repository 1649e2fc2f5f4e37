"""Connections that cost the server something: late heads, late bodies, unread answers, too many at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from negamax.api import guard, protocol
from negamax.base.errors import RequestTimeoutError

BIG = b"x" * 10_000_000  # more than the buffers of both kernels' sockets take


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers /big with more than anyone wants, everything else with ok."""
    body = BIG if scope["path"] == "/big" else b"ok"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Client:
    """A raw connection; `buffer`: bytes that its kernel takes for it."""

    def __init__(self, port: int, *, buffer: int | None = None) -> None:
        self._socket = socket.socket()
        if buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self) -> bytes:
        """The next bytes; empty: the server hung up. An error counts as that too."""
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, 65536), 5)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._socket.close()


def with_server(test: Callable[[int], Awaitable[None]], **limits: Any) -> None:
    """Run `test` against a server with these limits, in one event loop."""

    async def run() -> None:
        kind = protocol.protocol_class(**({"slow_client_timeout": 60.0, "max_connections": 100} | limits))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=kind, lifespan="off", ws="none", log_config=None))
        serving = asyncio.create_task(server._serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await test(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving

    asyncio.run(run())


def test_head_that_does_not_come_in_time_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)

    async def test(port: int) -> None:
        silent, half, good = Client(port), Client(port), Client(port)
        await half.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
        await good.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await good.read()).startswith(b"HTTP/1.1 200")
        late = await half.read()
        assert late.startswith(b"HTTP/1.1 408") and b"x-request-id" in late and b'"error"' in late
        assert await silent.read() == b""
        await good.send(b"GET / HTTP/1.1\r\n")  # the second head of a connection must come in time too
        assert (await good.read()).startswith(b"HTTP/1.1 408")
        for client in (silent, half, good):
            client.close()

    with_server(test)


def test_connections_above_the_limit_are_closed_at_once() -> None:
    async def test(port: int) -> None:
        clients = [Client(port) for _ in range(5)]
        await asyncio.sleep(0.1)
        for client in clients[:3]:
            await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.read()).startswith(b"HTTP/1.1 200")
        for client in clients[3:]:
            assert await client.read() == b""
        for client in clients:
            client.close()

    with_server(test, max_connections=3)


def test_unread_answer_is_dropped_after_the_limit() -> None:
    async def test(port: int) -> None:
        lazy, reading = Client(port, buffer=4096), Client(port)
        for client in (lazy, reading):
            await client.send(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        size = 0
        while size < len(BIG):
            size += len(await reading.read())
            assert size
        await asyncio.sleep(0.5)  # the lazy one has not read for longer than it may
        size = 0
        while part := await lazy.read():
            size += len(part)
        assert size < len(BIG)
        for client in (lazy, reading):
            client.close()

    with_server(test, slow_client_timeout=0.4)


def test_body_that_does_not_come_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)

    class Budget:
        taken = 0

        def take_bytes(self, count: int) -> None:
            self.taken += count

    async def run() -> None:
        parts: list[Message] = [{"type": "http.request", "body": b"abc", "more_body": True}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await asyncio.sleep(60)
            raise AssertionError

        budget: Any = Budget()
        body = guard._Body(receive, budget)
        assert (await body.receive())["body"] == b"abc"
        with pytest.raises(RequestTimeoutError):
            await body.receive()
        assert budget.taken == body.num_bytes == 3

    asyncio.run(run())
