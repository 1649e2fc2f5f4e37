"""A server process beside the first: `python -m negamax.api.server_worker`, started by `leader`.

It serves like the first one, with an engine that is not its own. What becomes of that, and when to
end, it reads from its standard input; when that ends, the leader is gone. A thread watches whether
the leader's event loop goes round.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path

from negamax.api.common.context import ApiContext
from negamax.api.processes import wire
from negamax.api.processes.server_rank import Seat
from negamax.api.server import HttpServer, event_loop, settle_garbage_collection
from negamax.base import log
from negamax.base.log import get_logger
from negamax.base.parent_watch import watch_parent
from negamax.base.process import exit_now
from negamax.engine.client.connection import EngineAddress, EngineChannel
from negamax.engine.client.engine_client import AsyncEngine

logger = get_logger(__name__)

_MAX_LINE_BYTES = 1 << 20
_POLL_SECONDS = 0.01
_END_SECONDS = 2.0  # for the clients of a server without a leader to be told
# for an engine to reach this process; it tries all the time, unless it died again
_CONNECT_SECONDS = 5.0


def main() -> None:
    """Serve until told to end. Signals that ask to end or to reload are the leader's business, see
    `base.process.exit_with_parent`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log.setup_as_parent()
    with event_loop() as runner:
        runner.run(_serve())


async def _serve() -> None:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0)
    )
    begin = await _next(reader)
    assert isinstance(begin, wire.Begin), begin
    while not isinstance(news := await _next(reader), wire.EngineCame):
        if news is None or isinstance(news, wire.Drain | wire.Abort):
            return
    seat = Seat.of(begin.index, begin.server.api_server_count, Path(begin.folder))
    template = begin.server.chat_template
    engine = await AsyncEngine.create(
        begin.engine,
        chat_template=None if template is None else Path(template),
        index=seat.index,
        numbers=seat.queue,
    )
    follower = _Follower(engine, seat)
    await follower.take(news)
    context = ApiContext.create(engine, begin.server, seat)
    server = HttpServer(context, stop_engine=follower.stop)
    loop = asyncio.get_running_loop()
    watch_parent(
        begin.leader, tell=lambda reason: loop.call_soon_threadsafe(follower.leave, server, reason)
    )
    following = asyncio.create_task(follower.follow(reader, server))
    settle_garbage_collection()
    with socket.socket(fileno=begin.listener) as listener:
        await server.serve(sockets=[listener])
    following.cancel()
    follower.close()


class _Follower:
    """Does what the leader says. Single writer: the event loop."""

    def __init__(self, engine: AsyncEngine, seat: Seat) -> None:
        self._engine = engine
        self._seat = seat
        self._channel: EngineChannel | None = None
        self._ending: asyncio.Task[None] | None = None
        self._end_reason = "the engine was stopped"

    async def follow(self, reader: asyncio.StreamReader, server: HttpServer) -> None:
        """Until cancelled, or the leader is gone."""
        while (news := await _next(reader)) is not None:
            if isinstance(news, wire.Drain):
                server.drain()
            elif isinstance(news, wire.Reload):
                server.reload()
            elif isinstance(news, wire.Abort):
                self._ending = asyncio.create_task(server.abort())
            else:
                await self.take(news)
        self.leave(server, "the first server process is gone")

    def leave(self, server: HttpServer, reason: str) -> None:
        """Nobody leads any more: tell the clients why, and end, at the latest after 2 s."""
        end = threading.Timer(_END_SECONDS, exit_now, (1,))
        end.daemon = True
        end.start()
        self._end_reason = reason
        self._ending = asyncio.create_task(server.abort())

    async def take(self, news: wire.News) -> None:
        """Something became of the engine."""
        if isinstance(news, wire.EngineCame):
            self.close()
            address = EngineAddress(news.folder)
            channel = EngineChannel(
                address, self._seat.index, receive=self._engine.receive, failed=_failed
            )
            deadline = time.monotonic() + _CONNECT_SECONDS
            while not channel.can_send and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
            self._channel = channel
            self._engine.came(channel, news.info)
            channel.start_reading()
        elif isinstance(news, wire.EngineWent):
            self._engine.went(news.reason, ready_in=news.ready_in)
            self.close()
        elif isinstance(news, wire.EngineGaveUp):
            self._engine.give_up(news.reason)

    async def stop(self) -> None:
        """End every open request."""
        self._engine.stop(self._end_reason)

    def close(self) -> None:
        """The engine's sockets are not needed any more."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


async def _next(reader: asyncio.StreamReader) -> wire.News | None:
    """The leader's next word; None: it is gone."""
    line = await reader.readline()
    return wire.decoder.decode(line) if line else None


def _failed(reason: str) -> None:
    """The engine's frames make no sense to this process: another one may understand them."""
    logger.error("%s", reason)
    exit_now(1)


if __name__ == "__main__":
    main()
