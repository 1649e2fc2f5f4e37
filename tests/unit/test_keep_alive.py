"""Pings of a stream: only in its pauses, never before it begins or after it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from negamax.api.keep_alive import PingedStream

PING = b"event: ping\n\n"


def sent_by(events: AsyncGenerator[bytes, None], *, seconds: float) -> list[Any]:
    """What goes to a client that reads `events`: the status, the bodies, and None at the end."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)  # as a transport that lets others run
        is_start = message["type"] == "http.response.start"
        assert bool(sent) != is_start and (not sent or sent[-1] is not None)
        sent.append(message["status"] if is_start else message["body"] if message["more_body"] else None)

    async def receive() -> Any:
        await asyncio.sleep(60)

    asyncio.run(PingedStream(events, ping=PING, seconds=seconds)({"type": "http"}, receive, send))
    return sent


def test_pauses_are_filled_and_nothing_else() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.35)  # before the first event
        for number in range(3):
            yield b"%d" % number
        await asyncio.sleep(0.25)
        yield b"end"

    sent = sent_by(events(), seconds=0.1)
    first, last = sent.index(b"0"), sent.index(b"end")
    assert sent[0] == 200 and sent[-1] is None
    assert set(sent[1:first]) == {PING} and 2 <= first - 1 <= 4
    assert sent[first : first + 3] == [b"0", b"1", b"2"]
    assert set(sent[first + 3 : last]) == {PING} and last == len(sent) - 2


def test_busy_stream_has_no_pings() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(20):
            await asyncio.sleep(0.01)
            yield b"x"

    assert PING not in sent_by(events(), seconds=0.15)
