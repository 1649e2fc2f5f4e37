"""Server-sent events, and work that ends when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from negamax.api.schemas.answers import encode

DONE = b"data: [DONE]\n\n"
FIRST_OUTPUT_SECONDS = 5.0

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


def event(answer: Struct) -> bytes:
    """One `data:` event."""
    return b"data: " + encode(answer) + b"\n\n"


def named_event(name: str, answer: Struct) -> bytes:
    """One event with its name."""
    return b"event: " + name.encode() + b"\ndata: " + encode(answer) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it the moment the client hangs up and raise `ClientGoneError` then.

    `receive` is the ASGI channel after the body was read: all that can still arrive is the disconnect.
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


async def after_first(
    receive: Receive, outputs: AsyncGenerator[T, None], *, seconds: float | None = FIRST_OUTPUT_SECONDS
) -> AsyncGenerator[T, None]:
    """`outputs` again, after waiting for the first one: an error before it is raised here, where a status line can still tell
    it. After `seconds` without an output (None: however long it takes) the stream begins nevertheless, and errors come in it.
    """
    first: asyncio.Task[T] = asyncio.ensure_future(anext(outputs))
    watcher = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({first, watcher}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if first.done() and first.exception() is not None:
            first.result()
        if watcher.done() and not first.done():
            raise ClientGoneError
    except BaseException:
        await _give_up(first, outputs)
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return _from_first(first, outputs)


async def _from_first(first: asyncio.Task[T], outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        yield await first
        async for output in outputs:
            yield output
    finally:
        await _give_up(first, outputs)


async def _give_up(first: asyncio.Task[T], outputs: AsyncGenerator[T, None]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await outputs.aclose()


class EventStream(Response):
    """Sends the events of a generator; closes the generator, and so aborts its request, when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
