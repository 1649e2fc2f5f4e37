"""Send server-sent events, and cancel work when the client closes its connection."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from negamax.api.http.protocol import BODY_CHANNEL, BodyChannel, Pausable
from negamax.api.schemas.answers import encode

DONE = b"data: [DONE]\n\n"
FIRST_OUTPUT_SECONDS = 5.0

T = TypeVar("T")
Write = Callable[[bytes], None]  # A function that queues bytes for the connection.


class OutputSource(Pausable, Protocol):
    """The source of a stream's outputs, such as `OpenRequest`."""

    async def first_output(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


class ClientGoneError(Exception):
    """The client closed its connection before the response ended."""


def encode_event(answer: Struct) -> bytes:
    return b"data: " + encode(answer) + b"\n\n"


def encode_named_event(name: str, answer: Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(answer) + b"\n\n"


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. If the client closes its connection, cancel `work` and raise `ClientGoneError`.

    The caller has read the whole body from `receive`, so only a disconnect can arrive.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def wait_for_first_output(
    receive: Receive, source: OutputSource, *, seconds: float | None = FIRST_OUTPUT_SECONDS
) -> None:
    """Start `source` and wait for its first output, so that an early error sets the HTTP status.

    The wait ends after `seconds` (None: no time limit). Later errors become events.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await run_while_connected(receive, source.first_output())
    except ClientGoneError:
        source.close()
        raise
    except BaseException as error:
        source.close(error)
        raise


class EventStream(Response):
    """Sends the events that `write_events` writes.

    `source` pauses while the client does not read, and ends when the client disconnects. After
    `ping_seconds` without an event, the stream sends `ping`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        write_events: Callable[[Write], Awaitable[None]],
        *,
        source: OutputSource,
        ping: bytes = b"",
        ping_seconds: float = math.inf,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._write_events = write_events
        self._source = source
        self._ping = ping
        self._ping_seconds = ping_seconds
        self._last_sent = 0.0  # monotonic time of the last events or ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError):
                await run_while_connected(receive, self._send(scope, send))
        finally:
            self._source.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        channel: BodyChannel = scope["extensions"][BODY_CHANNEL]

        def write(events: bytes) -> None:
            self._last_sent = time.monotonic()
            channel.write(events)

        self._last_sent = time.monotonic()
        pings = asyncio.ensure_future(self._fill_pauses(channel)) if self._ping else None
        channel.feed(self._source)
        try:
            await self._write_events(write if self._ping else channel.write)
        finally:
            channel.feed(None)
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fill_pauses(self, channel: BodyChannel) -> None:
        while True:
            silence = time.monotonic() - self._last_sent
            if silence >= self._ping_seconds:
                self._last_sent, silence = time.monotonic(), 0.0
                if not channel.is_full:
                    channel.write(self._ping)
            await asyncio.sleep(self._ping_seconds - silence)
