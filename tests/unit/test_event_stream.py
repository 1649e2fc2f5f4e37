import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from negamax.api.dialects.generate.growing_json import BYTES_PER_SECOND, GrowingList, RepeatPacing
from negamax.api.http.protocol import BODY_CHANNEL
from negamax.api.http.sse import EventStream, Write

PING = b"event: ping\n\n"


class Client:
    """Record the status, the pieces of the body, and None at the end."""

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
    def __init__(self) -> None:
        self.is_closed = False

    async def begun(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None:
        self.is_closed = True


async def send_to(client: Client, stream: EventStream) -> None:
    scope = {"type": "http", "extensions": {BODY_CHANNEL: client}}
    await stream(scope, client.receive, client.send)


def sent_by(
    produce: Callable[[Write, list[Any]], Awaitable[None]], *, seconds: float, full: bool = False
) -> list[Any]:
    """Return the bytes that a client receives of a stream. `produce` can read these bytes."""

    async def run() -> list[Any]:
        client, source = Client(), Source()
        client.is_full = full

        async def speak(write: Write) -> None:
            await produce(write, client.sent)

        stream = EventStream(speak, source=source, ping=PING, ping_seconds=seconds)
        await send_to(client, stream)
        assert source.is_closed and client.source is None
        await asyncio.sleep(2 * seconds)
        return client.sent

    return asyncio.run(run())


def test_pings_are_sent_only_in_pauses() -> None:
    pauses: list[float] = []

    async def pause(sent: list[Any]) -> None:
        started, before = time.monotonic(), sent.count(PING)
        while sent.count(PING) < before + 3:
            await asyncio.sleep(0.001)
        pauses.append(time.monotonic() - started)

    async def produce(write: Write, sent: list[Any]) -> None:
        await pause(sent)  # The pause comes before the first event.
        for number in range(3):
            write(b"%d" % number)
        await pause(sent)
        write(b"end")

    sent = sent_by(produce, seconds=0.1)
    first, last = sent.index(b"0"), sent.index(b"end")
    assert sent[0] == 200 and sent[-1] is None and min(pauses) > 0.15
    assert set(sent[1:first]) == {PING}
    assert sent[first : first + 3] == [b"0", b"1", b"2"]
    assert set(sent[first + 3 : last]) == {PING} and last == len(sent) - 2


def test_busy_streams_and_clients_that_do_not_read_get_no_pings() -> None:
    times: list[float] = []  # time just before each event

    async def produce(write: Write, _: list[Any]) -> None:
        for _ in range(60):
            times.append(time.monotonic())
            write(b"x")
            await asyncio.sleep(0.005)

    # A busy machine may add pauses, and each pause adds a ping.
    has_ping = PING in sent_by(produce, seconds=0.2)
    assert not has_ping or max(after - before for before, after in pairwise(times)) > 0.2

    async def wait(*_: Any) -> None:
        await asyncio.sleep(0.2)

    assert sent_by(wait, seconds=0.05, full=True) == [200, None]


def test_hang_up_ends_the_stream_and_its_source() -> None:
    async def run() -> None:
        client, source, ended = Client(), Source(), asyncio.Event()

        async def produce(write: Write) -> None:
            write(b"x")
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        sending = asyncio.create_task(send_to(client, EventStream(produce, source=source)))
        while b"x" not in client.sent:
            await asyncio.sleep(0)
        client.hung_up.set()
        await asyncio.wait_for(sending, 120)
        assert ended.is_set() and source.is_closed and client.sent == [200, b"x"]

    asyncio.run(run())


def test_failure_of_the_stream_closes_the_source() -> None:
    async def run() -> None:
        client, source = Client(), Source()

        async def produce(write: Write) -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            await send_to(client, EventStream(produce, source=source))
        assert source.is_closed and client.source is None

    asyncio.run(run())


def test_list_has_all_appended_entries() -> None:
    growing = GrowingList()
    assert msgspec.json.encode(growing.json()) == b"[]"
    growing.extend([])
    growing.extend([(-0.5, 3, None)])
    growing.extend([(-1.5, 4, "a,]"), None])
    decoded = msgspec.json.decode(msgspec.json.encode({"entries": growing.json()}))
    assert decoded == {"entries": [[-0.5, 3, None], [-1.5, 4, "a,]"], None]}


def test_repeated_answers_are_paced_by_their_bytes() -> None:
    """Repeat an answer that grows by 400 bytes 100,000 times in 100 s: without pacing, 2 TB."""
    pacing, num_sent, largest = RepeatPacing(num_choices=2), 0, 0
    for number in range(100_000):
        if pacing.is_due(400 * number, now=100 + number / 1000):
            num_sent += 400 * number
            largest = 400 * number
    assert num_sent <= 100 * BYTES_PER_SECOND / 2 + largest
    pacing = RepeatPacing()
    assert all(pacing.is_due(300 + 11 * number, now=number / 100) for number in range(1500))
