"""Run the scheduler's plans on a thread of this process or in rank processes."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

import msgspec
import zmq

from negamax.base.errors import ConfigError, EngineDeadError, ResourceError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.supervision import Supervised, stop_children
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.draft_length import StepSeconds
from negamax.scheduler.step import FileProgress, GrammarBitmask, RowFailures, StepPlan, StepResult
from negamax.worker.config import (
    DebugCommand,
    DebugResult,
    RankAddresses,
    WorkerConfig,
    WorkerReady,
)
from negamax.worker.node_sockets import FRAME_BYTES, bind
from negamax.worker.rank_process import (
    BITMASK,
    DEBUG_COMMAND,
    PLAN,
    RESULT,
    ROW_FAILURES,
    RankFailed,
    RankReport,
)

logger = get_logger(__name__)

RANK_MODULE = "negamax.worker.rank_process"
_LOGPROB_BYTES = 64  # Size of one encoded log-probability, in bytes.
SHUTDOWN_SECONDS = 5.0  # Time limit for ranks to end before they are killed.
CONNECT_SECONDS = 60.0  # Time limit for a started rank to connect to the executor.
_REMINDER_SECONDS = 30.0  # Time between log lines about ranks that are loading.


# A function that waits for the results of a step, or raises the error that stopped the step.
Results = Callable[[], list[StepResult]]


class Executor(Protocol):
    ready: WorkerReady

    def launch(self, plans: Sequence[StepPlan]) -> Results:
        """Launch a step, which has one plan for each data-parallel rank."""

    def send_bitmask(self, bitmask: GrammarBitmask, *, dp_rank: int = 0) -> None:
        """Send the bitmask of the latest plan. Plans with grammar rows wait for their bitmask."""

    def run_debug_command(self, command: DebugCommand) -> list[DebugResult]:
        """Run a debug command on every rank between two steps. Return the results by rank."""

    def death(self) -> str | None:
        """Describe how the first dead rank ended; return None if all ranks run."""
        return None

    def longest_silence(self) -> tuple[int, float]:
        """Return the result of `RankHost.longest_silence`, or (0, 0.0) without rank processes."""
        return 0, 0.0

    def shutdown(self, *, restarts: bool = False) -> None:
        """End the ranks. With `restarts`, a new engine is expected to follow."""


class InProcessExecutor(Executor):
    def __init__(self, config: WorkerConfig) -> None:
        from negamax.worker.worker import Worker

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._closed = False
        self._bitmask: Future[GrammarBitmask] = Future()  # Resolves with the latest plan's bitmask.
        self._worker = self._thread.submit(Worker, config).result()
        self.ready = self._worker.ready

    def launch(self, plans: Sequence[StepPlan]) -> Results:
        (plan,) = plans
        self._bitmask = Future()
        launched = self._thread.submit(self._worker.launch, plan, self._bitmask.result)

        def results() -> list[StepResult]:
            """Wait until the worker's thread has enqueued the step and the device has run it."""
            outcome = launched.result()
            return [outcome if isinstance(outcome, StepResult) else outcome.result()]

        return results

    def send_bitmask(self, bitmask: GrammarBitmask, *, dp_rank: int = 0) -> None:
        self._bitmask.set_result(bitmask)

    def run_debug_command(self, command: DebugCommand) -> list[DebugResult]:
        return [self._thread.submit(self._worker.run_debug_command, command).result()]

    def shutdown(self, *, restarts: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._bitmask.cancel()  # A step that waits for the bitmask fails at once.
            self._thread.submit(self._worker.close).result()
            self._thread.shutdown(wait=True)


class RowFailureLog:
    """Stores each failed row's error under the row's slot, until a new sequence uses the slot."""

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()  # Slots of each plan that has no result yet.
        self._assigned: dict[int, int] = {}  # Slot -> id of the latest step that assigned it.
        self._errors: dict[int, str] = {}  # Slot -> error of the slot's row.

    def launched(self, plan: StepPlan) -> None:
        self._slots.append(plan.slots)
        for row in plan.new_rows:
            self._assigned[row.slot] = plan.step_id
            self._errors.pop(row.slot, None)

    def add(self, failures: RowFailures) -> None:
        """Add the errors that a rank reports. Ignore an error if a new request uses its slot."""
        for slot, error in failures.errors.items():
            if failures.step_id >= self._assigned.get(slot, 0):
                self._errors.setdefault(slot, error)

    def complete(self, result: StepResult) -> StepResult:
        """Return `result` with the errors of failed rows. `result` is that of the oldest plan."""
        slots = self._slots.popleft()
        if not self._errors:
            return result
        errors = {row: self._errors[slot] for row, slot in enumerate(slots) if slot in self._errors}
        return msgspec.structs.replace(result, errors=errors | result.errors)


class FileProgressLog:
    """Stores, for each rank of a group, the latest report about its cache files."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._latest = {rank: FileProgress(rank) for rank in ranks}
        self._missing: set[bytes] = set()  # Hashes of blocks that ranks failed to read.

    def add(self, progress: FileProgress) -> None:
        self._latest[progress.rank] = progress
        self._missing.update(progress.missing)

    def complete(self, result: StepResult) -> StepResult:
        """Return `result` with the file progress of the whole group instead of one rank's."""
        if result.files is None:
            return result
        self.add(result.files)
        joined = FileProgress.of_group(self._latest.values(), self._missing)
        self._missing.clear()
        return msgspec.structs.replace(result, files=joined)


class RankHost(Protocol):
    """Starts, watches and ends the ranks of this machine, or of all other machines."""

    ranks: range

    def start(self) -> None:
        """Start the rank processes. Each process connects to the endpoint of its rank."""

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        """Return a copy of `config` for `rank`. The copy includes the settings of this machine."""

    @property
    def alarms(self) -> Sequence[IO[bytes]]:
        """Return files to poll. A file reports `POLLERR` when a rank may have ended."""

    def death(self) -> str | None:
        """Describe how the first dead rank ended; return None if all ranks run. Thread-safe."""

    def longest_silence(self) -> tuple[int, float]:
        """Return the rank with the oldest heartbeat, and the heartbeat's age in seconds."""

    def abort(self) -> None:
        """Abort kernels that wait for data of other ranks."""

    def expect_end(self) -> None:
        """Treat the end of a rank as normal from now on, because all ranks will be asked to end."""

    def stop(self, *, timeout: float, restarts: bool) -> None:
        """Wait at most `timeout` seconds for the ranks to end, then kill the remaining ranks."""

    def limit_connections(self, socket: zmq.Socket[bytes]) -> None:
        """Limit the connections of other machines to `socket`, which is not yet bound."""


class LocalRanks(RankHost):
    def __init__(self, ranks: range, addresses: RankAddresses) -> None:
        self.ranks = ranks
        self.processes: list[Supervised] = []
        self._addresses = addresses
        rows = len(addresses.plans) + 1
        self._beats = SharedNumbers(1, num_rows=rows, path=Path(addresses.beats))

    def start(self) -> None:
        for rank in self.ranks:
            arguments = RANK_MODULE, self._addresses.plans[rank], str(rank)
            self.processes.append(Supervised(*arguments, heartbeat=self._beats.row(rank)))

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        return replace(config, layout=config.layout.replace_rank(rank), addresses=self._addresses)

    @property
    def alarms(self) -> list[IO[bytes]]:
        return [process.pipe for process in self.processes]

    def death(self) -> str | None:
        for rank, process in zip(self.ranks, self.processes, strict=False):
            if process.is_gone:
                return f"rank {rank} ended with {process.describe_end()}"
        return None

    def longest_silence(self) -> tuple[int, float]:
        silences = [process.silence() for process in self.processes]
        seconds = max(silences)
        return self.ranks[silences.index(seconds)], seconds

    def abort(self) -> None:
        self._beats.row(self._beats.num_rows - 1)[0] = 1

    def stop(self, *, timeout: float, restarts: bool = False) -> None:
        stop_children(self.processes, timeout=timeout)


class MultiProcessExecutor:
    """Runs plans in rank processes. One of the ranks that run the same plans sends results."""

    def __init__(
        self,
        config: WorkerConfig,
        addresses: RankAddresses | None = None,
        *,
        others: RankHost | None = None,
    ) -> None:
        """Start all ranks and await their readiness. `others` starts ranks on other nodes."""
        layout, world_size = config.layout, config.layout.world_size
        self._folder = PrivateFolder()
        addresses = addresses or RankAddresses.local(self._folder.path, layout)
        layouts = [layout.replace_rank(rank) for rank in range(world_size)]
        self._dp_ranks = [each.dp_rank for each in layouts]
        # -1: the rank encodes no images, because it is not on the first pipeline stage
        self._encoders = [each.encoder_rank if each.is_first_stage else -1 for each in layouts]
        self._context = zmq.Context()
        self._results = msgspec.msgpack.Decoder(StepResult)
        # `_row_failures` and the lists below have one entry for each data-parallel rank.
        self._row_failures = [RowFailureLog() for _ in addresses.results]
        self._file_progress = [
            FileProgressLog([at for at, of in enumerate(self._dp_ranks) if of == dp_rank])
            for dp_rank in range(layout.dp)
        ]
        local = LocalRanks(layout.ranks_of_node(0), addresses)
        self._processes = local.processes
        self._machines: list[RankHost] = [local] if others is None else [local, others]
        try:
            num_logprobs = config.max_num_batched_tokens * (2 + config.max_logprobs)
            result_bytes = FRAME_BYTES + _LOGPROB_BYTES * num_logprobs
            self._result_sockets = [self._context.socket(zmq.PULL) for _ in addresses.results]
            self._sockets = [self._context.socket(zmq.PAIR) for _ in addresses.plans]
            for socket in self._sockets:
                socket.linger = 0
                # With no queue limit, a send returns at once and fails only if the rank has ended.
                socket.sndhwm = 0
            for machine in self._machines:
                for socket in (*self._result_sockets, *self._sockets):
                    machine.limit_connections(socket)
            for socket, endpoint in zip(self._result_sockets, addresses.results, strict=True):
                bind(socket, endpoint, most_bytes=result_bytes)
            for socket, endpoint in zip(self._sockets, addresses.plans, strict=True):
                bind(socket, endpoint)
            for machine in self._machines:
                machine.start()
            self._result_pollers = [
                self._poller([socket], zmq.POLLIN) for socket in self._result_sockets
            ]
            for machine in self._machines:
                for rank in machine.ranks:
                    self._wait_connected(rank, addresses.plans[rank])
                    own = machine.config_of(rank, config)
                    self._sockets[rank].send(msgspec.msgpack.encode(own), zmq.NOBLOCK)
            readies = self._wait_ready(layout)
        except BaseException:
            # Kill the ranks at once, because some may wait for a failed rank.
            self._close(timeout=0.0, restarts=True)
            raise
        blocks = {ready.num_kv_blocks for ready in readies}
        assert len(blocks) == 1 or config.num_kv_blocks is None
        self.ready = replace(
            readies[0],
            num_kv_blocks=min(blocks),
            step_seconds=_find_slowest(readies),
            host_block_bytes=sum(ready.host_block_bytes for ready in readies) // layout.dp,
            num_file_blocks=min(ready.num_file_blocks for ready in readies),
            lanes=tuple(lane for ready in readies for lane in ready.lanes),
        )

    def launch(self, plans: Sequence[StepPlan]) -> Results:
        for dp_rank, (plan, failures) in enumerate(zip(plans, self._row_failures, strict=True)):
            if plan.encodes:
                self._send_pixels(plan, dp_rank)
            else:
                self._send(PLAN + msgspec.msgpack.encode(plan), dp_rank)
            failures.launched(plan)
        return lambda: [self.receive(dp_rank) for dp_rank in range(len(plans))]

    def send_bitmask(self, bitmask: GrammarBitmask, *, dp_rank: int = 0) -> None:
        self._send(BITMASK + msgspec.msgpack.encode(bitmask), dp_rank)

    def run_debug_command(self, command: DebugCommand) -> list[DebugResult]:
        for dp_rank in range(len(self._row_failures)):
            self._send(DEBUG_COMMAND + msgspec.msgpack.encode(command), dp_rank)
        return [
            msgspec.msgpack.decode(
                self._receive(socket, self._poller([socket], zmq.POLLIN)), type=DebugResult
            )
            for socket in self._sockets
        ]

    def receive(self, dp_rank: int = 0) -> StepResult:
        """Receive the next result, and add failures of all ranks. Raises `EngineDeadError`."""
        failures, files = self._row_failures[dp_rank], self._file_progress[dp_rank]
        while True:
            frame = self._receive(self._result_sockets[dp_rank], self._result_pollers[dp_rank])
            if frame[:1] == RESULT:
                return files.complete(failures.complete(self._results.decode(frame[1:])))
            if frame[:1] == ROW_FAILURES:
                failures.add(msgspec.msgpack.decode(frame[1:], type=RowFailures))
            else:
                files.add(msgspec.msgpack.decode(frame[1:], type=FileProgress))

    def death(self) -> str | None:
        return next((death for machine in self._machines if (death := machine.death())), None)

    def longest_silence(self) -> tuple[int, float]:
        silences = [machine.longest_silence() for machine in self._machines]
        return max(silences, key=lambda silence: silence[1])

    def shutdown(self, *, restarts: bool = False) -> None:
        if self.death() is not None:
            for machine in self._machines:  # Abort kernels that wait for the dead rank.
                machine.abort()
        for machine in self._machines:
            machine.expect_end()
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(b"", zmq.NOBLOCK)
        self._close(timeout=SHUTDOWN_SECONDS, restarts=restarts)

    def _close(self, *, timeout: float, restarts: bool) -> None:
        """Wait at most `timeout` s for ranks to end, kill remaining ranks, close all sockets."""
        for machine in self._machines:
            machine.stop(timeout=timeout, restarts=restarts)
        self._context.destroy(linger=0)  # destroy() also closes the monitors of the sockets.
        self._folder.remove()

    def _wait_connected(self, rank: int, endpoint: str) -> None:
        """Wait until a rank has connected. Raises `ResourceError` after `CONNECT_SECONDS`."""
        socket = self._sockets[rank]
        try:
            poller = self._poller([socket], zmq.POLLOUT)
            self._wait_for_any([socket], poller, seconds=CONNECT_SECONDS)
        except TimeoutError:
            is_remote = endpoint.startswith("tcp://")
            raise ResourceError(
                f"rank {rank} was started and did not reach node 0 at {endpoint} within "
                f"{CONNECT_SECONDS:.0f} s",
                hint="open the ports that the log of node 0 lists" if is_remote else None,
            ) from None

    def _wait_ready(self, layout: ParallelLayout) -> list[WorkerReady]:
        """Wait until all ranks are ready. Raises a rank's error, or `EngineDeadError`."""
        readies: dict[int, WorkerReady] = {}
        while len(readies) < len(self._sockets):
            awaited = [rank for rank in range(len(self._sockets)) if rank not in readies]
            waiting = [self._sockets[rank] for rank in awaited]
            try:
                poller = self._poller(waiting, zmq.POLLIN)
                socket = self._wait_for_any(waiting, poller, seconds=_REMINDER_SECONDS)
            except TimeoutError:
                names = [f"{rank} (node {layout.replace_rank(rank).node})" for rank in awaited]
                logger.info("waiting for rank %s to load", ", ".join(names))
                continue
            report = msgspec.msgpack.decode(socket.recv(), type=RankReport)
            if isinstance(report, RankFailed):
                error = ConfigError(report.message)
                error.exit_code = report.exit_code
                raise error
            readies[self._sockets.index(socket)] = report.ready
        return [readies[rank] for rank in range(len(self._sockets))]

    def _send_pixels(self, plan: StepPlan, dp_rank: int) -> None:
        """Send a plan. Only ranks that encode an image get its pixels. Raises `EngineDeadError`."""
        frames: dict[int, bytes] = {}
        bare = [msgspec.structs.replace(job, pixels=b"") for job in plan.encodes]
        for encoder in {-1, *(job.rank for job in plan.encodes)}:
            jobs = [
                job if job.rank == encoder else other
                for job, other in zip(plan.encodes, bare, strict=True)
            ]
            frames[encoder] = PLAN + msgspec.msgpack.encode(
                msgspec.structs.replace(plan, encodes=jobs)
            )
        for rank, encoder in enumerate(self._encoders):
            if self._dp_ranks[rank] == dp_rank:
                self._send_to(rank, frames.get(encoder, frames[-1]))

    def _send(self, frame: bytes, dp_rank: int) -> None:
        """Send a frame to all ranks of `dp_rank` without waiting. Raises `EngineDeadError`."""
        for rank, of in enumerate(self._dp_ranks):
            if of == dp_rank:
                self._send_to(rank, frame)

    def _send_to(self, rank: int, frame: bytes) -> None:
        try:
            self._sockets[rank].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(self.death() or f"rank {rank} has disconnected") from None

    def _receive(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> bytes:
        """Wait for a message of a rank. Raises `EngineDeadError` if a rank ends first."""
        self._wait_for_any([socket], poller)
        return socket.recv()

    def _poller(self, sockets: list[zmq.Socket[bytes]], event: int) -> zmq.Poller:
        """Return a poller that reports `event` on `sockets`, and also the end of a rank."""
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, event)
        for machine in self._machines:
            for alarm in machine.alarms:
                poller.register(alarm, zmq.POLLERR)
        return poller

    def _wait_for_any(
        self, sockets: list[zmq.Socket[bytes]], poller: zmq.Poller, *, seconds: float | None = None
    ) -> zmq.Socket[bytes]:
        """Wait until one of `sockets` is ready. Raises `EngineDeadError` or `TimeoutError`."""
        milliseconds = None if seconds is None else 1000 * seconds
        while True:
            ready = dict(poller.poll(milliseconds))
            if not ready:
                raise TimeoutError
            for socket in sockets:  # First return frames that arrived, even from a rank that ended.
                if socket in ready:
                    return socket
            death = self.death()
            if death is not None:
                raise EngineDeadError(death)


def _find_slowest(readies: Sequence[WorkerReady]) -> tuple[StepSeconds, ...]:
    """Return each captured step size with its time on the slowest rank."""
    found: dict[tuple[int, int], float] = {}
    for rows, drafts, seconds in (each for ready in readies for each in ready.step_seconds):
        found[rows, drafts] = max(seconds, found.get((rows, drafts), 0.0))
    return tuple((rows, drafts, seconds) for (rows, drafts), seconds in found.items())
