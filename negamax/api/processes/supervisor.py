"""Start and restart the other server processes, and send them the states of the engines."""

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Callable

from negamax.api.processes import wire
from negamax.api.processes.server_rank import ServerRank
from negamax.base.addresses import bind
from negamax.base.errors import EngineDeadError
from negamax.base.log import get_logger
from negamax.base.supervision import (
    ParentPulse,
    RestartPolicy,
    Supervised,
    SupervisionLimits,
    stop_children,
)
from negamax.engine.client.connection import BEAT_TIMEOUT_SECONDS
from negamax.engine.client.supervisor import EngineListener
from negamax.engine.wire import EngineAddress, ModelInfo
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions

logger = get_logger(__name__)

SERVER_WORKER_MODULE = "negamax.api.server_worker"
_POLL_SECONDS = 0.05
_RESTARTS = SupervisionLimits(max_restarts=3)  # Limit of restarts per process.
_END_SECONDS = 7.0  # Time limit for processes to end after `Abort`.


class ServerSupervisor(EngineListener):
    """Supervises the other server processes. Only the event loop changes this object."""

    def __init__(
        self,
        rank: ServerRank,
        engine_options: EngineOptions,
        server_options: ServerOptions,
        *,
        listener: socket.socket,
    ) -> None:
        """Start the processes, which wait for the engine and listen at `listener`'s address."""
        # `failed` receives the reason why a process cannot be started or is not restarted.
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_death: Callable[[int], None] | None = None  # The callback receives a process index.
        self._rank = rank
        self._engine_options = engine_options
        self._server_options = server_options
        self._listener = listener
        # The engine's hang limit also applies to server processes.
        self._hang_seconds = min(BEAT_TIMEOUT_SECONDS, server_options.engine_hang_timeout)
        # Child processes end if the heartbeat of this process stops.
        self.pulse = ParentPulse(os.getpid(), str(rank.supervisor_pulse), self._hang_seconds)
        # Each new process receives these messages, the latest state of each engine.
        self._engine_messages: dict[int, wire.EngineMessage] = {}
        self._processes: dict[int, Supervised] = {}
        self._is_ending = False
        self._end: asyncio.Task[None] | None = None
        self._watchers = [
            asyncio.create_task(self._supervise(index)) for index in range(1, rank.count)
        ]

    @property
    def num_running(self) -> int:
        return sum(child.exit_code is None for child in self._processes.values())

    async def ready(self) -> None:
        """Wait until all processes answer or the server ends, or raise `EngineDeadError`."""
        for index in range(1, self._rank.count):
            while not self._is_ending and not await _answers(str(self._rank.socket_of(index))):
                if self.failed.done():
                    raise EngineDeadError(self.failed.result())
                await asyncio.sleep(_POLL_SECONDS)

    def on_engine_ready(self, replica: int, address: EngineAddress, info: ModelInfo) -> None:
        self._broadcast_engine_state(wire.UseEngine(replica, address.folder, info))

    def on_engine_lost(self, replica: int, reason: str, *, ready_in: float) -> None:
        self._broadcast_engine_state(wire.EngineLost(replica, reason, ready_in))

    def on_engine_failed(self, replica: int, reason: str) -> None:
        self._broadcast_engine_state(wire.EngineDead(replica, reason))
        dead = [isinstance(each, wire.EngineDead) for each in self._engine_messages.values()]
        self._is_ending = self._is_ending or sum(dead) == self._engine_options.num_replicas

    def reload(self) -> None:
        """Tell all processes to reload their key and TLS files."""
        self._send_all(wire.Reload())

    def drain(self) -> None:
        """Tell all processes to answer their open requests and end."""
        self._is_ending = True
        self._send_all(wire.Drain())

    async def end(self) -> None:
        """Abort all requests and end all processes. Later calls wait for the first call."""
        if self._end is None:
            self._end = asyncio.create_task(self._end_all())
        await asyncio.shield(self._end)

    async def _end_all(self) -> None:
        self._is_ending = True
        self._send_all(wire.Abort())
        deadline = time.monotonic() + _END_SECONDS
        while self.num_running and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        stop_children(list(self._processes.values()), timeout=0.0)
        shutil.rmtree(self._rank.folder, ignore_errors=True)

    async def _supervise(self, index: int) -> None:
        """Run server process `index`, and restart it when it ends."""
        policy, has_served = RestartPolicy(_RESTARTS), False
        while not self._is_ending:
            try:
                running = self._processes[index] = self._spawn(index)
            except OSError as error:
                self._fail(f"server process {index} cannot be started: {error}")
                return
            was_killed = False
            while running.exit_code is None:
                await asyncio.sleep(_POLL_SECONDS)
                has_served = has_served or self._rank.socket_of(index).exists()
                if running.silence() > self._hang_seconds and not was_killed:
                    logger.error(
                        "server process %d sends no heartbeat for %g s and is killed",
                        index,
                        self._hang_seconds,
                    )
                    running.kill()
                    was_killed = True
            if self._is_ending:
                return
            self._processes.pop(index).reap()
            reason = f"server process {index} ended with exit code {running.exit_code}"
            self._rank.clear(index)
            self._rank.socket_of(index).unlink(missing_ok=True)
            if self.on_death is not None:
                self.on_death(index)
            pause = policy.note_death(time.monotonic()) if has_served else None
            if pause is None:
                self._fail(reason)
                return
            logger.error("%s; it is started again%s", reason, f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)

    def _fail(self, reason: str) -> None:
        logger.error("%s; it is not started again", reason)
        if not self.failed.done():
            self.failed.set_result(reason)

    def _spawn(self, index: int) -> Supervised:
        """Start a process with its own listening socket and send it the engines' states."""
        with bind(self._listener.family, self._listener.getsockname(), is_shared=True) as listener:
            running = Supervised(
                SERVER_WORKER_MODULE,
                own_group=True,
                pass_fds=(listener.fileno(),),
                heartbeat=self._rank.pulses.row(index),
            )
            begin = wire.Begin(
                index=index,
                folder=str(self._rank.folder),
                listener=listener.fileno(),
                parent=self.pulse,
                engine=self._engine_options,
                server=self._server_options,
            )
        running.send(wire.encoder.encode(begin))
        for message in self._engine_messages.values():
            running.send(wire.encoder.encode(message))
        return running

    def _broadcast_engine_state(self, message: wire.EngineMessage) -> None:
        self._engine_messages[message.replica] = message
        self._send_all(message)

    def _send_all(self, message: wire.ServerMessage) -> None:
        for running in self._processes.values():
            running.send(wire.encoder.encode(message))


async def _answers(path: str) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True
