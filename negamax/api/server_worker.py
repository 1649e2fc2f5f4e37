"""Run an additional server process with `python -m negamax.api.server_worker`.

Process 0 starts this process, and writes engine states and commands to this process's standard
input. Standard input ends when process 0 ends. A thread watches the heartbeat of process 0.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from negamax.api.common.context import ApiContext
from negamax.api.processes import wire
from negamax.api.processes.server_rank import ServerRank
from negamax.api.server import HttpServer, make_event_loop, settle_garbage_collection
from negamax.base import log
from negamax.base.log import get_logger
from negamax.base.supervision import exit_now, watch_parent
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.wire import EngineAddress

logger = get_logger(__name__)

_MAX_LINE_BYTES = 1 << 20
_POLL_SECONDS = 0.01
_END_SECONDS = 2.0  # Time limit for open requests after process 0 has ended.
_CONNECT_SECONDS = 5.0  # Time limit for an engine to connect to this process.


def main() -> None:
    """Serve until process 0 sends `Drain` or `Abort`. Ignore signals, which process 0 handles."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log.setup_as_parent()
    with make_event_loop() as runner:
        runner.run(_serve())


async def _serve() -> None:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0)
    )
    begin = await _next(reader)
    assert isinstance(begin, wire.Begin), begin
    messages: dict[int, wire.EngineMessage] = {}  # replica -> state of its engine
    while not can_serve(messages, num_replicas=begin.engine.num_replicas):
        message = await _next(reader)
        if message is None or isinstance(message, wire.Drain | wire.Abort):
            return
        if isinstance(message, wire.EngineMessage):
            messages[message.replica] = message
    rank = ServerRank.of(
        begin.index,
        begin.server.api_server_count,
        Path(begin.folder),
        num_replicas=begin.engine.num_replicas,
    )
    template = begin.server.chat_template
    engine = await AsyncEngine.create(
        begin.engine,
        chat_template=None if template is None else Path(template),
        index=rank.index,
        queue=rank.queue,
    )
    worker = ServerWorker(engine, rank)
    for message in messages.values():
        await worker.take(message)
    server = HttpServer(ApiContext.create(engine, begin.server, rank), stop_engine=worker.stop)
    loop = asyncio.get_running_loop()
    watch_parent(
        begin.parent, report=lambda reason: loop.call_soon_threadsafe(worker.leave, server, reason)
    )
    following = asyncio.create_task(worker.follow(reader, server))
    settle_garbage_collection()
    with socket.socket(fileno=begin.listener) as listener:
        await server.serve(sockets=[listener])
    following.cancel()
    worker.close()


def can_serve(messages: Mapping[int, wire.EngineMessage], *, num_replicas: int) -> bool:
    """Return whether at least one engine runs and the states of all engines are known.

    If an engine's state is unknown, this process would refuse all requests for this engine.
    """
    runs = any(isinstance(message, wire.UseEngine) for message in messages.values())
    return runs and len(messages) == num_replicas


class ServerWorker:
    """Executes the commands of process 0. Only the event loop changes this object."""

    def __init__(self, engine: AsyncEngine, rank: ServerRank) -> None:
        self._engine = engine
        self._rank = rank
        self._channels: dict[int, EngineChannel] = {}  # replica -> channel to its engine
        self._ending: asyncio.Task[None] | None = None
        self._end_reason = "the engine was stopped"

    async def follow(self, reader: asyncio.StreamReader, server: HttpServer) -> None:
        """Execute messages of process 0 until cancelled or until process 0 has ended."""
        while (message := await _next(reader)) is not None:
            if isinstance(message, wire.Drain):
                server.drain()
            elif isinstance(message, wire.Reload):
                server.reload()
            elif isinstance(message, wire.Abort):
                self._ending = asyncio.create_task(server.abort())
            elif isinstance(message, wire.EngineMessage):
                await self.take(message)
        self.leave(server, "the first server process is gone")

    def leave(self, server: HttpServer, reason: str) -> None:
        """End open requests with `reason`, and end this process within 2 s."""
        end = threading.Timer(_END_SECONDS, exit_now, (1,))
        end.daemon = True
        end.start()
        self._end_reason = reason
        self._ending = asyncio.create_task(server.abort())

    async def take(self, message: wire.EngineMessage) -> None:
        replica = message.replica
        if isinstance(message, wire.UseEngine):
            self._close(replica)
            channel = EngineChannel(
                EngineAddress(message.folder),
                self._rank.index,
                receive=self._engine.replicas[replica].receive,
                failed=_failed,
            )
            deadline = time.monotonic() + _CONNECT_SECONDS
            while not channel.can_send and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
            self._channels[replica] = channel
            self._engine.on_engine_ready(replica, channel, message.info)
            channel.start_reading()
        elif isinstance(message, wire.EngineLost):
            self._engine.on_engine_lost(replica, message.reason, ready_in=message.ready_in)
            self._close(replica)
        else:
            self._engine.on_engine_failed(replica, message.reason)

    async def stop(self) -> None:
        self._engine.stop(self._end_reason)

    def close(self) -> None:
        """Close the engines' sockets."""
        for replica in list(self._channels):
            self._close(replica)

    def _close(self, replica: int) -> None:
        if (channel := self._channels.pop(replica, None)) is not None:
            channel.close()


async def _next(reader: asyncio.StreamReader) -> wire.ServerMessage | None:
    """Return the next message of process 0, or None if process 0 has ended."""
    line = await reader.readline()
    return wire.decoder.decode(line) if line else None


def _failed(reason: str) -> None:
    """Exit after an undecodable engine message. A new server process may decode later messages."""
    logger.error("%s", reason)
    exit_now(1)


if __name__ == "__main__":
    main()
