"""The engine's life: started for the server processes in front of it, watched, started again when
it dies, stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from typing import Any, Protocol

import msgspec

from negamax.base.crash_dump import CrashDumps
from negamax.base.log import get_logger
from negamax.base.parent_watch import ParentPulse
from negamax.config.options import EngineOptions
from negamax.engine.client.connection import ENGINE_MODULE, EngineAddress, EngineConnection
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.client.restarts import RestartPolicy, Supervision
from negamax.engine.wire import AbortServer, ModelInfo
from negamax.scheduler import crash_details
from negamax.scheduler.request import GenerateRequest

logger = get_logger(__name__)


class EngineListener(Protocol):
    """Whoever passes on to the other server processes what becomes of the engine."""

    def on_engine_ready(self, address: EngineAddress, info: ModelInfo) -> None:
        """An engine waits for requests."""

    def on_engine_lost(self, reason: str, *, ready_in: float) -> None:
        """It is gone; another one is expected in so many seconds."""

    def on_engine_failed(self, reason: str) -> None:
        """It stays dead."""


class EngineSupervisor:
    """An engine process and this process's client of it. Single writer: the event loop it was
    started on.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        options: EngineOptions,
        *,
        supervision: Supervision,
        module: str,
        num_servers: int,
        listener: EngineListener | None,
        parent: ParentPulse | None,
    ) -> None:
        """Use `start` or `run`."""
        self.engine = engine
        self._options = options
        self._supervision = supervision
        self._module = module
        self._num_servers = num_servers
        self._listener = listener
        self._parent = parent
        self._connection: EngineConnection | None = None
        self._start_seconds = 0.0  # that the last start took
        self._task: asyncio.Task[None] | None = None
        described = dataclasses.asdict(options)
        self._crash_dumps = CrashDumps(options.crash_dump_dir, part="server", options=described)

    @classmethod
    async def start(cls, options: EngineOptions) -> EngineSupervisor:
        """An engine for this process alone, which is not started again when it dies. Errors: those
        of `run`, and of `AsyncEngine.create`."""
        engine = await AsyncEngine.create(options)
        return await cls.run(engine, options, supervision=Supervision(), module=ENGINE_MODULE)

    @classmethod
    async def run(
        cls,
        engine: AsyncEngine,
        options: EngineOptions,
        *,
        supervision: Supervision,
        module: str,
        num_servers: int = 1,
        listener: EngineListener | None = None,
        parent: ParentPulse | None = None,
    ) -> EngineSupervisor:
        """Spawn an engine process for `options` and wait until it can serve `engine`, and the
        clients of `num_servers` - 1 others behind `listener`. `module` is what the process runs; it
        ends this process, too, where the pulse of `parent`, which is this process, stands still.
        Errors: `ConfigError` and its kin, with the message of whatever refused to start; nothing is
        left running then."""
        supervisor = cls(
            engine,
            options,
            supervision=supervision,
            module=module,
            num_servers=num_servers,
            listener=listener,
            parent=parent,
        )
        await supervisor._connect()
        supervisor._task = asyncio.create_task(supervisor._supervise())
        return supervisor

    def on_server_lost(self, server: int) -> None:
        """A server process is gone: its requests end."""
        if self._connection is not None:
            self._connection.channel.send(AbortServer(server))

    async def shutdown(self) -> None:
        """Stop the engine process; every request that is still open ends with `EngineDeadError`."""
        self.engine.stop()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            await self._connection.close(kill=False)

    async def _connect(self) -> None:
        """Start a process and wait until it serves. Errors: those of `run`; nothing is left running
        then.
        """
        started = time.monotonic()
        connection = EngineConnection(
            self._options,
            num_servers=self._num_servers,
            receive=self.engine.receive,
            hang_seconds=self._supervision.hang_timeout,
            module=self._module,
            parent=self._parent,
        )
        try:
            info = await connection.handshake()
        except BaseException:
            await asyncio.shield(connection.close(kill=True))
            raise
        self._start_seconds = time.monotonic() - started
        self._connection = connection
        self.engine.on_engine_ready(connection.channel, info)
        if self._listener is not None:
            self._listener.on_engine_ready(connection.address, info)

    async def _supervise(self) -> None:
        """Wait for the engine's end, again and again: fail what was open, start it anew, or give
        up.
        """
        policy = RestartPolicy(self._supervision)
        assert self._connection is not None
        reason = await asyncio.shield(self._connection.ended)
        while True:
            pause = policy.died(time.monotonic())
            open_requests = self.engine.open_requests()
            self._lost(reason, ready_in=self._start_seconds + (pause or 0.0))
            await asyncio.to_thread(self._dump_crash, reason, open_requests)
            await asyncio.shield(self._connection.close(kill=True))
            if pause is None:
                break
            logger.error("%s; it is started again%s", reason, f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
            try:
                await self._connect()
            except Exception as error:
                reason = f"the engine does not start: {error}"
                continue
            logger.warning("the engine runs again after %.1f s", self._start_seconds)
            reason = await asyncio.shield(self._connection.ended)
        logger.error("%s; it is not started again", reason)
        self.engine.on_engine_failed(reason)
        if self._listener is not None:
            self._listener.on_engine_failed(reason)

    def _dump_crash(self, reason: str, open_requests: list[GenerateRequest]) -> None:
        """Write down what is known here of an engine that is gone; a killed one says nothing."""
        connection = self._connection
        assert connection is not None

        def details() -> dict[str, Any]:
            code = connection.exit_code
            stats = connection.channel.stats
            return {
                "exit_code": code,
                "signal": signal.Signals(-code).name if code is not None and code < 0 else None,
                "info": msgspec.structs.asdict(self.engine.info),
                "stats": None if stats is None else msgspec.structs.asdict(stats),
                "restart_count": self.engine.restart_count,
                "requests": list(map(crash_details.of_request, open_requests)),
            }

        self._crash_dumps.write(reason, details=details)

    def _lost(self, reason: str, *, ready_in: float) -> None:
        self.engine.on_engine_lost(reason, ready_in=ready_in)
        if self._listener is not None:
            self._listener.on_engine_lost(reason, ready_in=ready_in)
