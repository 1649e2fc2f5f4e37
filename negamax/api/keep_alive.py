"""Event streams that say something while the model reads a long prompt, so that nobody on the way hangs up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from starlette.types import Message, Receive, Scope, Send

from negamax.api.sse import EventStream

PING_SECONDS = 10.0


class PingedStream(EventStream):
    """An event stream that sends `ping` whenever nothing else was sent for `PING_SECONDS`."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping: bytes, seconds: float = PING_SECONDS) -> None:
        super().__init__(events)
        self._ping = ping
        self._seconds = seconds
        self._sending = asyncio.Lock()
        self._last_sent = time.monotonic()
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            async with self._sending:
                self._last_sent = time.monotonic()
                self._is_open = message["type"] == "http.response.start" or message.get("more_body", False)
                await send(message)

        pinging = asyncio.create_task(self._keep_alive(send))
        try:
            await super().__call__(scope, receive, noted)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(0.1, self._last_sent + self._seconds - time.monotonic()))
            async with self._sending:
                if self._is_open and time.monotonic() - self._last_sent >= self._seconds:
                    self._last_sent = time.monotonic()
                    await send({"type": "http.response.body", "body": self._ping, "more_body": True})
