"""Where plans run: in this process on a thread of their own, or on several rank processes that all
receive every plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from negamax.base import process
from negamax.base.errors import ConfigError, EngineDeadError
from negamax.base.private_folder import PrivateFolder
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.core.rank_watch import RankWatch
from negamax.engine.core.row_failures import RowFailureLog
from negamax.scheduler.step import GrammarBitmask, RowFailures, StepPlan, StepResult
from negamax.worker.config import Probe, ProbeAnswer, WorkerConfig, WorkerReady
from negamax.worker.rank_process import BITMASK, PLAN, PROBE, RESULT, RankFailed, RankReport

if TYPE_CHECKING:
    from negamax.worker.step_output import StepOutput

SHUTDOWN_SECONDS = 5.0  # in which ranks that are told to end do so


class StepHandle(Protocol):
    """A plan on its way."""

    def result(self) -> StepResult:
        """Wait for the step's outcome. Errors: whatever stopped the step as a whole."""
        ...


class Executor(Protocol):
    """Runs plans one after another, in the order they were launched."""

    ready: WorkerReady

    def launch(self, plan: StepPlan) -> StepHandle: ...

    def send_bitmask(self, bitmask: GrammarBitmask) -> None:
        """What the grammar rows of the plan launched last may sample: owed for every plan that has
        any, before the next plan.
        """
        ...

    def probe(self, probe: Probe) -> ProbeAnswer:
        """Ask every rank between steps; the answer of rank 0."""
        ...

    def watch_ranks(self) -> RankWatch | None:
        """A watch of the rank processes, for a thread of its own; None: there are none."""
        ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """One rank on a thread of this process; launching returns at once."""

    def __init__(self, config: WorkerConfig) -> None:
        from negamax.worker.worker import Worker

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._closed = False
        self._bitmask: Future[GrammarBitmask] = Future()  # of the plan launched last
        self._worker = self._thread.submit(Worker, config).result()
        self.ready = self._worker.ready

    def launch(self, plan: StepPlan) -> StepHandle:
        self._bitmask = Future()
        return _LocalStep(self._thread.submit(self._worker.launch, plan, self._bitmask.result))

    def send_bitmask(self, bitmask: GrammarBitmask) -> None:
        self._bitmask.set_result(bitmask)

    def probe(self, probe: Probe) -> ProbeAnswer:
        return self._thread.submit(self._worker.probe, probe).result()

    def watch_ranks(self) -> None:
        return None

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._bitmask.cancel()  # a step that waits for them fails
            self._thread.submit(self._worker.close).result()
            self._thread.shutdown(wait=True)


class _LocalStep:
    """The worker's thread enqueues the step; whoever wants the result waits for the device."""

    def __init__(self, launched: Future[StepOutput | StepResult]) -> None:
        self._launched = launched

    def result(self) -> StepResult:
        outcome = self._launched.result()
        return outcome if isinstance(outcome, StepResult) else outcome.result()


class MultiProcessExecutor:
    """`layout.world_size` rank processes on this machine, joined by gloo or NCCL; rank 0 reports
    the results.
    """

    def __init__(self, config: WorkerConfig) -> None:
        world_size = config.layout.world_size
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._results = msgspec.msgpack.Decoder(StepResult)
        self._row_failures = RowFailureLog()
        self._result_socket = self._context.socket(zmq.PULL)
        self._result_socket.bind(f"ipc://{self._folder.path}/results")
        self._beats = SharedNumbers(
            1, num_rows=world_size + 1, path=Path(self._folder.path, "beats")
        )
        try:
            for rank in range(world_size):
                socket = self._context.socket(zmq.PAIR)
                socket.linger = 0
                # never full: a send fails where the rank is gone, and else returns at once
                socket.sndhwm = 0
                socket.bind(f"ipc://{self._folder.path}/rank{rank}")
                self._sockets.append(socket)
                self._processes.append(
                    process.spawn("negamax.worker.rank_process", self._folder.path, str(rank))
                )
            # torch's TCP store would listen on all interfaces, without a key
            config = dataclasses.replace(config, rendezvous=f"{self._folder.path}/rendezvous")
            self._results_poller = self._poller([self._result_socket], zmq.POLLIN)
            for rank, socket in enumerate(self._sockets):
                self._wait_for_any([socket], self._poller([socket], zmq.POLLOUT))
                rank_config = dataclasses.replace(
                    config, layout=dataclasses.replace(config.layout, rank=rank)
                )
                socket.send(msgspec.msgpack.encode(rank_config), zmq.NOBLOCK)
            readies = self._wait_ready()
        except BaseException:
            self._close(timeout=0.0)  # ranks may wait for one that failed, and say so when it goes
            raise
        blocks = {ready.num_kv_blocks for ready in readies}
        assert len(blocks) == 1 or config.num_kv_blocks is None
        self.ready = dataclasses.replace(readies[0], num_kv_blocks=min(blocks))

    def launch(self, plan: StepPlan) -> StepHandle:
        self._send_all(PLAN + msgspec.msgpack.encode(plan))
        self._row_failures.launched(plan)
        return _RemoteStep(self)

    def send_bitmask(self, bitmask: GrammarBitmask) -> None:
        self._send_all(BITMASK + msgspec.msgpack.encode(bitmask))

    def probe(self, probe: Probe) -> ProbeAnswer:
        self._send_all(PROBE + msgspec.msgpack.encode(probe))
        answers = [
            msgspec.msgpack.decode(
                self._receive(socket, self._poller([socket], zmq.POLLIN)), type=ProbeAnswer
            )
            for socket in self._sockets
        ]
        return answers[0]

    def receive(self) -> StepResult:
        """The next result of rank 0, with the errors of rows that failed on other ranks. Errors:
        `EngineDeadError` where a rank process is gone.
        """
        while True:
            frame = self._receive(self._result_socket, self._results_poller)
            if frame[:1] == RESULT:
                return self._row_failures.complete(self._results.decode(frame[1:]))
            self._row_failures.add(msgspec.msgpack.decode(frame[1:], type=RowFailures))

    def watch_ranks(self) -> RankWatch:
        return RankWatch(self._processes, self._beats)

    def shutdown(self) -> None:
        if self.watch_ranks().death() is not None:
            self._beats.row(self._beats.num_rows - 1)[0] = 1  # the others may wait for it
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
        readies: dict[int, WorkerReady] = {}
        while len(readies) < len(self._sockets):
            waiting = [socket for rank, socket in enumerate(self._sockets) if rank not in readies]
            socket = self._wait_for_any(waiting, self._poller(waiting, zmq.POLLIN))
            readies[self._sockets.index(socket)] = _started(socket.recv())
        return [readies[rank] for rank in range(len(self._sockets))]

    def _send_all(self, frame: bytes) -> None:
        """To every rank, without waiting. Errors: `EngineDeadError`."""
        for rank, socket in enumerate(self._sockets):
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineDeadError(
                    self.watch_ranks().death() or f"rank {rank} has hung up"
                ) from None

    def _receive(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> bytes:
        """The next frame of `socket`. Errors: `EngineDeadError` where a rank ends before it
        comes.
        """
        self._wait_for_any([socket], poller)
        return socket.recv()

    def _poller(self, sockets: list[zmq.Socket[bytes]], event: int) -> zmq.Poller:
        """Waits for `sockets` to be read or written, and for the end of any rank."""
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, event)
        for child in self._processes:
            assert child.stdin is not None
            poller.register(child.stdin, zmq.POLLERR)  # no one reads it any more: the child is gone
        return poller

    def _wait_for_any(
        self, sockets: list[zmq.Socket[bytes]], poller: zmq.Poller
    ) -> zmq.Socket[bytes]:
        """The first of `sockets`, for which `poller` waits, that is ready. Errors:
        `EngineDeadError` where a rank ends before.
        """
        while True:
            ready = dict(poller.poll())
            for socket in sockets:  # what a rank sent before its end counts
                if socket in ready:
                    return socket
            death = self.watch_ranks().death()
            if death is not None:
                raise EngineDeadError(death)


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
