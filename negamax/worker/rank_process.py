"""Run one rank as a process: `python -m negamax.worker.rank_process ENDPOINT RANK`.

The executor's socket at ENDPOINT first sends a WorkerConfig, which contains all other addresses.
The executor then sends StepPlans and DebugCommands. A plan with grammar rows is followed by its
GrammarBitmask. In a frame with a plan, a bitmask or a command, the first byte is the message type.
An empty frame stops the rank. The rank answers with a WorkerReady or a RankFailed, then with one
DebugResult per command.

Of the ranks that run a plan, one sends the StepResult to the results socket. Other ranks send
RowFailures and FileProgress. A separate thread waits for the device, so that the next plan can be
launched meanwhile. Another thread writes heartbeats (`worker.heartbeat`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import zmq

from negamax.base import env, log
from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import EngineDeadError, NegamaxError
from negamax.base.imports import large_imports
from negamax.base.log import get_logger
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.supervision import exit_now, exit_with_parent
from negamax.scheduler import crash_details
from negamax.scheduler.step import FileProgress, GrammarBitmask, RowFailures, StepPlan, StepResult
from negamax.worker.config import DebugCommand, WorkerReady, decode_config
from negamax.worker.heartbeat import LOST_SECONDS, RankHeartbeat
from negamax.worker.node_sockets import connect

if TYPE_CHECKING:
    from negamax.worker.step_output import StepOutput
    from negamax.worker.worker import Worker

logger = get_logger(__name__)

Socket = zmq.Socket[bytes]

# The first byte of a frame that the rank sends is one of these types.
RESULT, ROW_FAILURES, FILE_PROGRESS = b"r", b"f", b"d"
PLAN, BITMASK, DEBUG_COMMAND = b"s", b"m", b"p"  # types of frames that the rank receives
IDLE_MILLISECONDS = 100  # a rank is idle if it receives no frame for this time
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks use plain peer memory, so NVLink multicast of PyTorch and NCCL is off. PyTorch's watchdog is
# off because it reports an orderly end as an error; the executor watches the ranks instead.
ENVIRONMENT = (
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_NCCL_ENABLE_MONITORING", "0"),
)


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    ready: WorkerReady


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    exit_code: int


RankReport = RankReady | RankFailed


class _Stopped(BaseException):
    """Raised when the executor requests a stop in the middle of a step."""


def main(endpoint: str, rank: int) -> int:
    """Serve the executor at `endpoint` until it requests a stop. Return the exit code."""
    exit_with_parent()
    log.setup_as_parent()
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as socket,
        context.socket(zmq.PUSH) as reports,  # row failures and file progress
    ):
        socket.linger = reports.linger = 1000
        connect(socket, endpoint)
        config = decode_config(socket.recv())
        addresses, layout = config.addresses, config.layout
        assert addresses is not None
        results = addresses.results[layout.dp_rank]
        connect(reports, results)
        beats = SharedNumbers(1, num_rows=layout.world_size + 1, path=Path(addresses.beats))
        heartbeat = RankHeartbeat(beats, rank)
        _set_environment(addresses.interface)
        part = f"rank-{rank}"
        dumps = CrashDumps(config.crash_dump_dir, part=part, options=dataclasses.asdict(config))
        try:
            with large_imports():  # import after the connection, because the import takes seconds
                from negamax.worker.worker import Worker

            worker = Worker(config)
            heartbeat.watch(worker.poll_control)
        except NegamaxError as error:
            socket.send(msgspec.msgpack.encode(RankFailed(str(error), error.exit_code)))
            # Wait until the executor ends this rank. An earlier exit would be reported as a crash.
            socket.recv()
            return error.exit_code
        # garbage collection can skip all current objects, which live as long as the process
        gc.freeze()
        socket.send(msgspec.msgpack.encode(RankReady(worker.ready)))
        sender = None
        if layout.reports_results:
            sender = _ResultSender(context, results, dumps, heartbeat)
        steps = _StepServer(worker, socket, reports, sender)
        try:
            steps.run()
        except EngineDeadError as error:
            logger.error("rank %d cannot continue: %s", rank, error)
            time.sleep(LOST_SECONDS)
            return 1
        except Exception as error:
            last = [crash_details.describe_plan(steps.last_plan)] if steps.last_plan else []
            dumps.write("the rank failed", details=lambda: {"last_plans": last}, error=error)
            raise
        finally:  # otherwise the sender thread keeps the process alive
            if sender is not None:
                sender.finish()
        if heartbeat.is_aborted:
            exit_now(1)  # a rank is missing, so the process groups cannot be closed
        worker.close()
    return 0


def _set_environment(interface: str | None) -> None:
    """Set environment variables of gloo, NCCL and torch. `interface`: network of the ranks."""
    # gloo and NCCL accept messages without a key, so they listen only on the ranks' network
    env.set_default("GLOO_SOCKET_IFNAME", interface or LOOPBACK)
    env.set_default("NCCL_SOCKET_IFNAME", f"={interface or LOOPBACK}")
    if interface is not None:  # hide the store's warnings of IP addresses without a host name
        env.set_default("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name, value in ENVIRONMENT:
        env.set_default(name, value)


class _StepServer:
    """Runs the plans and commands that the executor sends, in order."""

    def __init__(
        self, worker: Worker, socket: Socket, reports: Socket, sender: _ResultSender | None
    ) -> None:
        """`sender` sends the results. If `sender` is None, the rank sends only `reports`."""
        self.last_plan: StepPlan | None = None
        self._worker, self._socket = worker, socket
        self._reports, self._sender = reports, sender
        self._file_progress: FileProgress | None = None  # latest progress sent to the executor
        self._plans = msgspec.msgpack.Decoder(StepPlan)
        self._bitmasks = msgspec.msgpack.Decoder(GrammarBitmask)
        self._commands = msgspec.msgpack.Decoder(DebugCommand)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Serve until an empty frame arrives."""
        with contextlib.suppress(_Stopped):
            while True:
                if not self._socket.poll(IDLE_MILLISECONDS):
                    self._worker.idle()
                frame = self._socket.recv()
                if not frame:
                    return
                if frame[:1] == PLAN:
                    self._launch(self._plans.decode(frame[1:]))
                else:
                    result = self._worker.run_debug_command(self._commands.decode(frame[1:]))
                    self._socket.send(self._encoder.encode(result))

    def _launch(self, plan: StepPlan) -> None:
        self.last_plan = plan
        outcome = self._worker.launch(plan, self._next_bitmask)
        failures = self._worker.take_row_failures()
        if self._sender is not None:
            self._sender.put(outcome)
            return
        if failures:
            frame = self._encoder.encode(RowFailures(plan.step_id, failures))
            self._reports.send(ROW_FAILURES + frame)
        progress = self._worker.take_file_progress(outcome)
        if progress is not None and progress != self._file_progress:
            self._reports.send(FILE_PROGRESS + self._encoder.encode(progress))
            self._file_progress = progress

    def _next_bitmask(self) -> GrammarBitmask:
        frame = self._socket.recv()
        if frame[:1] != BITMASK:
            raise _Stopped
        return self._bitmasks.decode(frame[1:])


class _ResultSender:
    """A thread that waits for step outputs in order and sends their results."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: str,
        dumps: CrashDumps,
        heartbeat: RankHeartbeat,
    ) -> None:
        self._context, self._address = context, address
        self._dumps, self._heartbeat = dumps, heartbeat
        self._outcomes: SimpleQueue[StepOutput | StepResult | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results")
        self._thread.start()

    def put(self, outcome: StepOutput | StepResult) -> None:
        """Queue an output, to be sent after all earlier outputs."""
        self._outcomes.put(outcome)

    def finish(self) -> None:
        """Wait until all outputs are sent, or until the heartbeat aborts all waits."""
        self._outcomes.put(None)
        while self._thread.is_alive() and not self._heartbeat.is_aborted:
            self._thread.join(0.1)

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger = 1000
            connect(socket, self._address)
            while (outcome := self._outcomes.get()) is not None:
                try:
                    result = outcome if isinstance(outcome, StepResult) else outcome.result()
                except Exception as error:
                    logger.exception("a step failed on the device")
                    self._dumps.write("a step failed on the device", details=dict, error=error)
                    exit_now(1)
                if not self._heartbeat.is_aborted:
                    socket.send(RESULT + encoder.encode(result))


if __name__ == "__main__":
    exit_now(main(sys.argv[1], int(sys.argv[2])))
