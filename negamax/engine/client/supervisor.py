"""Start, watch, restart and stop the engines for the server processes in front of them."""

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from negamax.base import log
from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.base.supervision import ParentPulse, RestartPolicy, SupervisionLimits
from negamax.engine.client.connection import ENGINE_MODULE, EngineConnection
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.wire import AbortServer, EngineAddress, ModelInfo
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.gpus import visible_devices
from negamax.scheduler import crash_details
from negamax.scheduler.request import GenerateRequest

logger = get_logger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class EngineListener(Protocol):
    """Receives the start, loss and failure of engines, for the other server processes."""

    def on_engine_ready(self, replica: int, address: EngineAddress, info: ModelInfo) -> None:
        """An engine is ready for requests."""

    def on_engine_lost(self, replica: int, reason: str, *, ready_in: float) -> None:
        """The engine is gone; another one is expected in `ready_in` seconds."""

    def on_engine_failed(self, replica: int, reason: str) -> None:
        """The engine is gone and is not started again."""


@dataclass(frozen=True)
class _Servers:
    engine: AsyncEngine  # the client of this process
    count: int
    listener: EngineListener | None
    parent: ParentPulse | None
    limits: SupervisionLimits
    module: str  # module of an engine process


class EngineSupervisor:
    """The engines of all replicas and this process's client. Single writer: the event loop."""

    def __init__(self, options: EngineOptions, servers: _Servers) -> None:
        self.engine = servers.engine
        self._engines = [
            _SupervisedEngine(replica, of_replica, variables=variables, servers=servers)
            for replica, (of_replica, variables) in enumerate(make_replica_options(options))
        ]

    @classmethod
    async def start(cls, options: EngineOptions) -> "EngineSupervisor":
        """Start engines for this process alone, without restarts. Errors: as of `run`."""
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
        """Start the engine processes and wait until all can serve `engine` and the `num_servers` -
        1 clients of `listener`.

        `module`: main module of an engine process. The engine kills this process when the pulse of
        `parent`, which is this process, stops. Errors: `ConfigError` and its subclasses with the
        message of the refusing process; nothing is left running then.
        """
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
        """Stop the engine processes and end every open request with `EngineDeadError`."""
        self.engine.stop()
        await asyncio.gather(*(each.shutdown() for each in self._engines))


class _SupervisedEngine:
    """The engine process of one replica and its successors. Single writer: the event loop."""

    def __init__(
        self,
        replica: int,
        options: EngineOptions,
        *,
        variables: Mapping[str, str],
        servers: _Servers,
    ) -> None:
        """`options` and `variables` are those of `make_replica_options`."""
        self._replica = replica
        self._options = options
        self._variables = variables
        self._servers = servers
        self._client = servers.engine.replicas[replica]
        self._connection: EngineConnection | None = None
        self._start_seconds = 0.0  # duration of the latest start
        self._task: asyncio.Task[None] | None = None
        # prefix of messages if there are several replicas
        self._name = f"replica {replica}: " if options.num_replicas > 1 else ""
        described = dataclasses.asdict(options)
        self._crash_dumps = CrashDumps(options.crash_dump_dir, part="server", options=described)

    async def start(self) -> None:
        """Start a process, wait until it serves, and supervise it. Errors: as of `_connect`."""
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
        """Start a process that serves. Errors: those of `handshake`; no process is left."""
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
        self._connection = connection
        servers.engine.on_engine_ready(self._replica, connection.channel, info)
        if servers.listener is not None:
            servers.listener.on_engine_ready(self._replica, connection.address, info)

    async def _supervise(self) -> None:
        """After each end of the engine: fail its open requests, then start it again or give up."""
        servers, policy = self._servers, RestartPolicy(self._servers.limits)
        assert self._connection is not None
        reason = self._name + await asyncio.shield(self._connection.ended)
        while True:
            pause = policy.note_death(time.monotonic())
            open_requests = self._client.open_requests()
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
                reason = f"{self._name}the engine does not start: {error}"
                continue
            logger.warning("%sthe engine runs again after %.1f s", self._name, self._start_seconds)
            reason = self._name + await asyncio.shield(self._connection.ended)
        logger.error("%s; it is not started again", reason)
        servers.engine.on_engine_failed(self._replica, reason)
        if servers.listener is not None:
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

    def _lost(self, reason: str, *, ready_in: float) -> None:
        servers = self._servers
        servers.engine.on_engine_lost(self._replica, reason, ready_in=ready_in)
        if servers.listener is not None:
            servers.listener.on_engine_lost(self._replica, reason, ready_in=ready_in)


def make_replica_options(options: EngineOptions) -> list[tuple[EngineOptions, Mapping[str, str]]]:
    """Options and variables (log number, GPUs) by replica. Errors: `ConfigError`: too few GPUs."""
    count = options.num_replicas
    if count == 1:
        return [(options, {})]
    # one replica's progress is enough
    quiet = dataclasses.replace(options, show_progress=False)
    each = [options, *[quiet] * (count - 1)]
    return [
        (one, {log.CHILD_VARIABLE: log.settings(replica)} | visible)
        for replica, (one, visible) in enumerate(zip(each, _divide_gpus(options), strict=True))
    ]


def _divide_gpus(options: EngineOptions) -> list[dict[str, str]]:
    """The variable that shows each replica its own GPUs, if there are any."""
    count, num_ranks = options.num_replicas, ParallelLayout.of(options.parallel).world_size
    devices = [] if options.device == "cpu" or options.script else visible_devices()
    if devices == []:
        return [{}] * count
    needed = num_ranks * count
    if devices is None:  # missing GPUs are refused later
        devices = [str(number) for number in range(needed)]
    if len(devices) < needed:
        raise ConfigError(
            f"--num-replicas is {count}, of {num_ranks} GPUs each; {len(devices)} are available",
            hint=f"use --num-replicas {max(1, len(devices) // num_ranks)}"
            + (", or --device cpu" if len(devices) < num_ranks else ""),
        )
    return [
        {_VISIBLE: ",".join(devices[first : first + num_ranks])}
        for first in range(0, needed, num_ranks)
    ]


def check_same_device(infos: Sequence[ModelInfo | None]) -> None:
    """Refuse replicas of which only some found a GPU. Errors: `ConfigError`."""
    kinds = [info.device.partition(":")[0] for info in infos if info is not None]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"--num-replicas is {len(kinds)}, and the replicas run on {', '.join(kinds)}: there "
            "are too few GPUs",
            hint="use fewer replicas, or --device",
        )
