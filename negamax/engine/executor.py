"""Where plans run: in this process on a thread of their own, or on several rank processes that all receive every plan."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket as net
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import zmq

from negamax.base import process
from negamax.base.errors import ConfigError, EngineDeadError
from negamax.scheduler.step import StepPlan, StepResult
from negamax.worker.config import WorkerConfig, WorkerReady
from negamax.worker.rank_process import RankFailed, RankReport

POLL_MS = 500


class Launched(Protocol):
    """A plan on its way."""

    def result(self) -> StepResult:
        """Wait for the step's outcome. Errors: whatever stopped the step as a whole."""
        ...


class Executor(Protocol):
    """Runs plans one after another, in the order they were launched."""

    ready: WorkerReady

    def launch(self, plan: StepPlan) -> Launched: ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """One rank on a thread of this process; launching returns at once."""

    def __init__(self, config: WorkerConfig) -> None:
        from negamax.worker.worker import Worker

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._worker = self._thread.submit(Worker, config).result()
        self.ready = self._worker.ready

    def launch(self, plan: StepPlan) -> Launched:
        return self._thread.submit(self._worker.execute, plan)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)


class MultiProcessExecutor:
    """`layout.world_size` rank processes on this machine, joined by gloo; rank 0 reports the results."""

    def __init__(self, config: WorkerConfig) -> None:
        world_size = config.layout.world_size
        self._folder = tempfile.mkdtemp(prefix="negamax-")
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._processes = []
        self._results = msgspec.msgpack.Decoder(StepResult)
        init_method = f"tcp://127.0.0.1:{_free_port()}"
        try:
            for rank in range(world_size):
                address = f"ipc://{self._folder}/rank{rank}"
                socket = self._context.socket(zmq.PAIR)
                socket.linger = 0
                socket.bind(address)
                self._sockets.append(socket)
                self._processes.append(process.spawn("negamax.worker.rank_process", address))
                layout = dataclasses.replace(config.layout, rank=rank)
                rank_config = dataclasses.replace(config, layout=layout, init_method=init_method)
                socket.send(msgspec.msgpack.encode(rank_config))
            readies = [self._wait_ready(rank) for rank in range(world_size)]
        except BaseException:
            self.shutdown()
            raise
        blocks = {ready.num_kv_blocks for ready in readies}
        assert len(blocks) == 1 or config.num_kv_blocks is None
        self.ready = dataclasses.replace(readies[0], num_kv_blocks=min(blocks))

    def launch(self, plan: StepPlan) -> Launched:
        frame = msgspec.msgpack.encode(plan)
        for socket in self._sockets:
            socket.send(frame)
        return _RemoteStep(self)

    def receive(self) -> StepResult:
        """The next result of rank 0. Errors: `EngineDeadError` where a rank process is gone."""
        return self._results.decode(self._receive(0))

    def shutdown(self) -> None:
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(b"", zmq.NOBLOCK)
        for child in self._processes:
            process.stop(child, timeout=5.0)
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_ready(self, rank: int) -> WorkerReady:
        report = msgspec.msgpack.decode(self._receive(rank), type=RankReport)
        if isinstance(report, RankFailed):
            error = ConfigError(report.message)
            error.exit_code = report.exit_code
            raise error
        return report.ready

    def _receive(self, rank: int) -> bytes:
        while not self._sockets[rank].poll(POLL_MS):
            for other, child in enumerate(self._processes):
                code = child.poll()
                # A rank that failed in order has left its report in its own socket.
                if code is not None and not self._sockets[other].poll(0):
                    raise EngineDeadError(f"rank {other} ended with exit code {code}")
                if code is not None and other != rank:
                    self._wait_ready(other)
        return self._sockets[rank].recv()


class _RemoteStep:
    def __init__(self, executor: MultiProcessExecutor) -> None:
        self._executor = executor

    def result(self) -> StepResult:
        return self._executor.receive()


def start_executor(config: WorkerConfig) -> Executor:
    """The executor for `config.layout`: in-process for one rank, rank processes for several."""
    if config.layout.world_size == 1:
        return InProcessExecutor(config)
    return MultiProcessExecutor(config)


def _free_port() -> int:
    with net.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
