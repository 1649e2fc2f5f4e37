"""What a stream sends beside its events: pings in its pauses, never before it begins or after it
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from negamax.api.http.protocol import BODY_CHANNEL
from negamax.api.http.sse import EventStream, Write

PING = b"event: ping\n\n"


class Client:
    """Notes what it is sent: the status, the pieces of the body, and None at the end."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.source: Any = None
        self.is_full = False
        self.hung_up = asyncio.Event()

    def feed(self, source: Any) -> None:
        self.source = source

    def write(self, part: bytes) -> None:
        assert self.sent and self.sent[-1] is not None
        self.sent.append(part)

    async def send(self, message: Any) -> None:
        is_start = message["type"] == "http.response.start"
        assert bool(self.sent) != is_start and (not self.sent or self.sent[-1] is not None)
        self.sent.append(message["status"] if is_start else None)

    async def receive(self) -> Any:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}


class Source:
    """Notes that it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def begun(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None:
        self.is_closed = True


def sent_by(
    produce: Callable[[Write], Awaitable[None]], *, seconds: float, full: bool = False
) -> list[Any]:
    """What goes to a client of the stream that `produce` speaks into."""

    async def run() -> list[Any]:
        client, source = Client(), Source()
        client.is_full = full
        stream = EventStream(produce, source=source, ping=PING, ping_seconds=seconds)
        await stream(
            {"type": "http", "extensions": {BODY_CHANNEL: client}}, client.receive, client.send
        )
        assert source.is_closed and client.source is None
        await asyncio.sleep(2 * seconds)
        return client.sent

    return asyncio.run(run())


def test_pauses_are_filled_and_nothing_else() -> None:
    async def produce(write: Write) -> None:
        await asyncio.sleep(0.35)  # before the first event
        for number in range(3):
            write(b"%d" % number)
        await asyncio.sleep(0.25)
        write(b"end")

    sent = sent_by(produce, seconds=0.1)
    first, last = sent.index(b"0"), sent.index(b"end")
    assert sent[0] == 200 and sent[-1] is None
    assert set(sent[1:first]) == {PING} and 2 <= first - 1 <= 4
    assert sent[first : first + 3] == [b"0", b"1", b"2"]
    assert set(sent[first + 3 : last]) == {PING} and last == len(sent) - 2


def test_busy_stream_has_no_pings() -> None:
    async def produce(write: Write) -> None:
        for _ in range(20):
            await asyncio.sleep(0.01)
            write(b"x")

    assert PING not in sent_by(produce, seconds=0.3)


def test_client_that_is_behind_gets_no_pings_on_top() -> None:
    async def produce(write: Write) -> None:
        await asyncio.sleep(0.2)

    assert sent_by(produce, seconds=0.05, full=True) == [200, None]


def test_hang_up_ends_the_stream_and_what_it_comes_from() -> None:
    async def run() -> None:
        client, source, ended = Client(), Source(), asyncio.Event()

        async def produce(write: Write) -> None:
            write(b"x")
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        stream = EventStream(produce, source=source)
        sending = asyncio.create_task(
            stream(
                {"type": "http", "extensions": {BODY_CHANNEL: client}}, client.receive, client.send
            )
        )
        while b"x" not in client.sent:
            await asyncio.sleep(0)
        client.hung_up.set()
        await asyncio.wait_for(sending, 5)
        assert ended.is_set() and source.is_closed and client.sent == [200, b"x"]

    asyncio.run(run())


def test_failure_while_speaking_closes_the_source() -> None:
    async def run() -> None:
        client, source = Client(), Source()

        async def produce(write: Write) -> None:
            raise RuntimeError("a bug")

        stream = EventStream(produce, source=source)
        with pytest.raises(RuntimeError, match="a bug"):
            await stream(
                {"type": "http", "extensions": {BODY_CHANNEL: client}}, client.receive, client.send
            )
        assert source.is_closed and client.source is None

    asyncio.run(run())
