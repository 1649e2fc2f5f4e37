"""Start, watch, restart and stop the engines of a server."""

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from negamax.base import log
from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.base.supervision import ParentPulse, RestartPolicy, SupervisionLimits
from negamax.engine.client.connection import ENGINE_MODULE, EngineConnection
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.shape import SHAPE
from negamax.engine.wire import AbortServer, EngineAddress, ModelInfo
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.gpus import visible_devices
from negamax.scheduler import crash_details
from negamax.scheduler.request import GenerateRequest

logger = get_logger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class EngineListener:
    """Receives the starts and ends of engines. A subclass reports them to other processes."""

    def on_engine_ready(self, replica: int, address: EngineAddress, info: ModelInfo) -> None:
        """An engine is ready for requests."""

    def on_engine_lost(self, replica: int, reason: str, *, ready_in: float) -> None:
        """An engine has ended. The next engine should be ready in `ready_in` seconds."""

    def on_engine_failed(self, replica: int, reason: str) -> None:
        """An engine has ended and will not be started again."""


@dataclass(frozen=True)
class _Servers:
    engine: AsyncEngine  # Client of this process for all engines.
    count: int
    listener: EngineListener
    parent: ParentPulse | None
    limits: SupervisionLimits
    module: str  # Main module of an engine process.


class EngineSupervisor:
    """Supervises the engines of all replicas. Only the event loop may use an instance."""

    def __init__(self, options: EngineOptions, servers: _Servers) -> None:
        self.engine = servers.engine
        self._engines = [
            _SupervisedEngine(replica, of_replica, variables=variables, servers=servers)
            for replica, (of_replica, variables) in enumerate(make_replica_options(options))
        ]

    @classmethod
    async def start(cls, options: EngineOptions) -> "EngineSupervisor":
        """Start engines for this process alone, without restarts. Raises the errors of `run`."""
        engine = await AsyncEngine.create(options)
        return await cls.run(engine, options, limits=SupervisionLimits(), module=ENGINE_MODULE)

    @classmethod
    async def run(
        cls,
        engine: AsyncEngine,
        options: EngineOptions,
        *,
        limits: SupervisionLimits,
        module: str,
        num_servers: int = 1,
        listener: EngineListener | None = None,
        parent: ParentPulse | None = None,
    ) -> "EngineSupervisor":
        """Start the engine processes, which run `module`, and wait until all engines are ready.

        The engines serve `num_servers` processes, including this process with the client `engine`.
        If this process sends no heartbeat (`parent`), the engines kill it. If an engine refuses to
        start, end all engines and raise `ConfigError` with the engine's message.
        """
        listener = listener or EngineListener()
        supervisor = cls(options, _Servers(engine, num_servers, listener, parent, limits, module))
        starts = [asyncio.create_task(each.start()) for each in supervisor._engines]
        try:
            await asyncio.gather(*starts)
            check_same_device([replica.info for replica in engine.replicas])
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await supervisor.shutdown()
            raise
        return supervisor

    def on_server_lost(self, server: int) -> None:
        for replica in self.engine.replicas:
            replica.send(AbortServer(server))

    async def shutdown(self) -> None:
        """End every open request with `EngineDeadError`, and stop the engine processes."""
        self.engine.stop()
        await asyncio.gather(*(each.shutdown() for each in self._engines))


class _SupervisedEngine:
    """Supervises the engine process of one replica and the processes that replace it."""

    def __init__(
        self,
        replica: int,
        options: EngineOptions,
        *,
        variables: Mapping[str, str],
        servers: _Servers,
    ) -> None:
        """`options` and `variables` are the result of `make_replica_options` for this replica."""
        self._replica = replica
        self._options = options
        self._variables = variables
        self._servers = servers
        self._client = servers.engine.replicas[replica]
        self._connection: EngineConnection | None = None
        self._start_seconds = 0.0  # Duration of the engine's latest start.
        self._task: asyncio.Task[None] | None = None
        # Prefix of log messages if the server has several replicas.
        self._name = f"replica {replica}: " if options.num_replicas > 1 else ""
        self._described = dataclasses.asdict(options)  # Options for crash dumps.
        self._crash_dumps = CrashDumps(
            options.crash_dump_dir, part="server", options=self._described
        )

    async def start(self) -> None:
        """Start an engine, and supervise it once it is ready. Raises errors of `_connect`."""
        await self._connect()
        self._task = asyncio.create_task(self._supervise())

    async def shutdown(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            await self._connection.close(kill=False)

    async def _connect(self) -> None:
        """Start an engine process and wait until it is ready. Raises the errors of `handshake`."""
        servers, started = self._servers, time.monotonic()
        connection = EngineConnection(
            self._options,
            num_servers=servers.count,
            receive=self._client.receive,
            hang_seconds=servers.limits.hang_timeout,
            module=servers.module,
            parent=servers.parent,
            variables=self._variables,
            replica=self._replica,
        )
        try:
            info = await connection.handshake()
        except BaseException:
            await asyncio.shield(connection.close(kill=True))
            raise
        self._start_seconds = time.monotonic() - started
        self._described[SHAPE] = info.shape
        self._connection = connection
        servers.engine.on_engine_ready(self._replica, connection.channel, info)
        servers.listener.on_engine_ready(self._replica, connection.address, info)

    async def _supervise(self) -> None:
        """When the engine ends, fail its open requests, and start a new one if the limits allow."""
        servers, policy = self._servers, RestartPolicy(self._servers.limits)
        assert self._connection is not None
        reason = self._name + await asyncio.shield(self._connection.ended)
        while True:
            pause = policy.note_death(time.monotonic())
            open_requests = self._client.open_requests()
            ready_in = self._start_seconds + (pause or 0.0)
            servers.engine.on_engine_lost(self._replica, reason, ready_in=ready_in)
            servers.listener.on_engine_lost(self._replica, reason, ready_in=ready_in)
            await asyncio.to_thread(self._dump_crash, reason, open_requests)
            await asyncio.shield(self._connection.close(kill=True))
            if pause is None:
                break
            logger.error("%s; the engine restarts%s", reason, f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
            try:
                await self._connect()
            except Exception as error:
                reason = f"{self._name}the engine does not start: {error}"
                continue
            logger.warning("%sthe engine runs again after %.1f s", self._name, self._start_seconds)
            reason = self._name + await asyncio.shield(self._connection.ended)
        logger.error("%s; the engine is not started again", reason)
        servers.engine.on_engine_failed(self._replica, reason)
        servers.listener.on_engine_failed(self._replica, reason)

    def _dump_crash(self, reason: str, open_requests: list[GenerateRequest]) -> None:
        connection, info = self._connection, self._client.info
        assert connection is not None and info is not None

        def details() -> dict[str, Any]:
            code = connection.exit_code
            stats = connection.channel.stats
            return {
                "exit_code": code,
                "signal": signal.Signals(-code).name if code is not None and code < 0 else None,
                "replica": self._replica,
                "info": msgspec.structs.asdict(info),
                "stats": None if stats is None else msgspec.structs.asdict(stats),
                "restart_count": self._client.restart_count,
                "requests": list(map(crash_details.describe_request, open_requests)),
            }

        self._crash_dumps.write(reason, details=details)


def make_replica_options(options: EngineOptions) -> list[tuple[EngineOptions, Mapping[str, str]]]:
    """Return each replica's options and environment variables. Raises `ConfigError`."""
    count = options.num_replicas
    if count == 1:
        return [(options, {})]
    # Only the first replica shows the progress of its start.
    quiet = dataclasses.replace(options, show_progress=False)
    each = [options, *[quiet] * (count - 1)]
    return [
        (one, {log.CHILD_VARIABLE: log.settings(replica)} | visible)
        for replica, (one, visible) in enumerate(zip(each, _divide_gpus(options), strict=True))
    ]


def _divide_gpus(options: EngineOptions) -> list[dict[str, str]]:
    """Return for each replica the environment variables that select its GPUs ({} on CPUs)."""
    count, num_ranks = options.num_replicas, ParallelLayout.of(options.parallel).world_size
    devices = [] if options.device == "cpu" or options.script else visible_devices()
    if devices == []:
        return [{}] * count
    needed = num_ranks * count
    if devices is None:  # Number the GPUs; the engine processes check whether they exist.
        devices = [str(number) for number in range(needed)]
    if len(devices) < needed:
        raise ConfigError(
            f"--num-replicas {count} needs {needed} GPUs, {num_ranks} for each replica; "
            f"{len(devices)} are available",
            hint=f"use --num-replicas {max(1, len(devices) // num_ranks)}"
            + (", or --device cpu" if len(devices) < num_ranks else ""),
        )
    return [
        {_VISIBLE: ",".join(devices[first : first + num_ranks])}
        for first in range(0, needed, num_ranks)
    ]


def check_same_device(infos: Sequence[ModelInfo | None]) -> None:
    """Raise `ConfigError` if some replicas run on GPUs and others on CPUs."""
    kinds = [info.device.partition(":")[0] for info in infos if info is not None]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"the replicas of --num-replicas need one kind of device, not {', '.join(kinds)}",
            hint="use fewer replicas, or set --device",
        )
