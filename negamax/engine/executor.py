"""Where plans run: in this process on a thread of their own, or on several rank processes that all receive every plan."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from negamax.base import process
from negamax.base.errors import ConfigError, EngineDeadError
from negamax.base.private_folder import PrivateFolder
from negamax.scheduler.step import StepMasks, StepPlan, StepResult
from negamax.worker.config import Probe, ProbeAnswer, WorkerConfig, WorkerReady
from negamax.worker.rank_process import MASKS, PLAN, PROBE, RankFailed, RankReport

if TYPE_CHECKING:
    from negamax.worker.outcome import Outcome

POLL_MS = 500
SHUTDOWN_SECONDS = 5.0  # in which ranks that are told to end do so


class Launched(Protocol):
    """A plan on its way."""

    def result(self) -> StepResult:
        """Wait for the step's outcome. Errors: whatever stopped the step as a whole."""
        ...


class Executor(Protocol):
    """Runs plans one after another, in the order they were launched."""

    ready: WorkerReady

    def launch(self, plan: StepPlan) -> Launched: ...

    def send_masks(self, masks: StepMasks) -> None:
        """What the masked rows of the plan launched last may sample: owed for every plan that has any, before the next plan."""
        ...

    def probe(self, probe: Probe) -> ProbeAnswer:
        """Ask every rank between steps; the answer of rank 0."""
        ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """One rank on a thread of this process; launching returns at once."""

    def __init__(self, config: WorkerConfig) -> None:
        from negamax.worker.worker import Worker

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._closed = False
        self._masks: Future[StepMasks] = Future()  # of the plan launched last
        self._worker = self._thread.submit(Worker, config).result()
        self.ready = self._worker.ready

    def launch(self, plan: StepPlan) -> Launched:
        self._masks = Future()
        return _LocalStep(self._thread.submit(self._worker.launch, plan, self._masks.result))

    def send_masks(self, masks: StepMasks) -> None:
        self._masks.set_result(masks)

    def probe(self, probe: Probe) -> ProbeAnswer:
        return self._thread.submit(self._worker.probe, probe).result()

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._masks.cancel()  # a step that waits for them fails
            self._thread.submit(self._worker.close).result()
            self._thread.shutdown(wait=True)


class _LocalStep:
    """The worker's thread enqueues the step; whoever wants the result waits for the device."""

    def __init__(self, launched: Future[Outcome | StepResult]) -> None:
        self._launched = launched

    def result(self) -> StepResult:
        outcome = self._launched.result()
        return outcome if isinstance(outcome, StepResult) else outcome.result()


class MultiProcessExecutor:
    """`layout.world_size` rank processes on this machine, joined by gloo or NCCL; rank 0 reports the results."""

    def __init__(self, config: WorkerConfig) -> None:
        world_size = config.layout.world_size
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._processes = []
        self._results = msgspec.msgpack.Decoder(StepResult)
        # Through a file: torch's TCP store would listen on all interfaces, without a key.
        init_method = f"file://{self._folder.path}/rendezvous"
        results_address = f"ipc://{self._folder.path}/results"
        self._result_socket = self._context.socket(zmq.PAIR)
        self._result_socket.bind(results_address)
        try:
            for rank in range(world_size):
                address = f"ipc://{self._folder.path}/rank{rank}"
                socket = self._context.socket(zmq.PAIR)
                socket.linger = 0
                socket.bind(address)
                self._sockets.append(socket)
                self._processes.append(process.spawn("negamax.worker.rank_process", address, results_address))
                layout = dataclasses.replace(config.layout, rank=rank)
                rank_config = dataclasses.replace(config, layout=layout, init_method=init_method)
                socket.send(msgspec.msgpack.encode(rank_config))
            readies = self._wait_ready()
        except BaseException:
            self._close(timeout=0.0)  # ranks may wait for one that failed, and say so when it goes
            raise
        blocks = {ready.num_kv_blocks for ready in readies}
        assert len(blocks) == 1 or config.num_kv_blocks is None
        self.ready = dataclasses.replace(readies[0], num_kv_blocks=min(blocks))

    def launch(self, plan: StepPlan) -> Launched:
        frame = PLAN + msgspec.msgpack.encode(plan)
        for socket in self._sockets:
            socket.send(frame)
        return _RemoteStep(self)

    def send_masks(self, masks: StepMasks) -> None:
        frame = MASKS + msgspec.msgpack.encode(masks)
        for socket in self._sockets:
            socket.send(frame)

    def probe(self, probe: Probe) -> ProbeAnswer:
        frame = PROBE + msgspec.msgpack.encode(probe)
        for socket in self._sockets:
            socket.send(frame)
        answers = [msgspec.msgpack.decode(self._receive(socket), type=ProbeAnswer) for socket in self._sockets]
        return answers[0]

    def receive(self) -> StepResult:
        """The next result of rank 0. Errors: `EngineDeadError` where a rank process is gone."""
        return self._results.decode(self._receive(self._result_socket))

    def shutdown(self) -> None:
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(b"", zmq.NOBLOCK)
        self._close(timeout=SHUTDOWN_SECONDS)

    def _close(self, *, timeout: float) -> None:
        """End the ranks, those that still run after `timeout` seconds by force."""
        process.stop(*self._processes, timeout=timeout)
        for socket in (*self._sockets, self._result_socket):
            socket.close(0)
        self._context.term()
        self._folder.remove()

    def _wait_ready(self) -> list[WorkerReady]:
        """What every rank reports. Errors: that of the first rank to fail, `EngineDeadError`."""
        poller, readies = zmq.Poller(), {}
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while len(readies) < len(self._sockets):
            reported = dict(poller.poll(POLL_MS))
            for rank, socket in enumerate(self._sockets):
                if socket in reported:
                    readies[rank] = _started(socket.recv())
            if not reported:
                self._check_alive()
        return [readies[rank] for rank in range(len(self._sockets))]

    def _receive(self, socket: zmq.Socket[bytes]) -> bytes:
        """The next frame of `socket`, while all ranks live."""
        while not socket.poll(POLL_MS):
            self._check_alive(socket)
        return socket.recv()

    def _check_alive(self, *awaited: zmq.Socket[bytes]) -> None:
        """Errors: `EngineDeadError` where a rank has ended, and nothing has come from `awaited`."""
        for rank, child in enumerate(self._processes):
            code = child.poll()
            if code is not None and not any(socket.poll(0) for socket in awaited or self._sockets):
                raise EngineDeadError(f"rank {rank} ended with exit code {code}")


def _started(frame: bytes) -> WorkerReady:
    """What a rank that has started reports. Errors: that of one that has not."""
    report = msgspec.msgpack.decode(frame, type=RankReport)
    if isinstance(report, RankFailed):
        error = ConfigError(report.message)
        error.exit_code = report.exit_code
        raise error
    return report.ready


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
