"""Run an engine process, which `engine.client.connection` starts.

The first message to the process contains the options. Server processes send requests and get
results. One thread sends heartbeats and watches ranks; another ends the process with its parent.
"""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

import msgspec
import zmq

from negamax.base import log
from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import EngineDeadError, InvalidRequestError, NegamaxError, ResourceError
from negamax.base.imports import large_imports
from negamax.base.log import get_logger
from negamax.base.supervision import exit_now, exit_with_parent, watch_parent
from negamax.engine import wire
from negamax.engine.core.loop import EngineLoop

logger = get_logger(__name__)

LOOK_SECONDS = 0.1  # Time between two checks whether ranks are alive.
# The heartbeat thread waits `LAST_STEP_SECONDS` for the engine loop to report a dead rank itself.
LAST_STEP_SECONDS = 0.3
RECONNECT_MS = 10  # Time between attempts to connect to a server process.

Context = zmq.Context[zmq.Socket[bytes]]


def main(folder: str) -> int:
    """Serve until the first server process stops the engine. Return the exit code."""
    exit_with_parent()
    log.setup_as_parent()
    address = wire.EngineAddress(folder)
    with zmq.Context() as context, context.socket(zmq.PULL) as requests:
        requests.connect(address.requests(0))
        start = wire.start_decoder.decode(requests.recv())
        if start.parent is not None:
            watch_parent(start.parent)
        listen(requests, address, num_servers=start.num_servers)
        with Outbox(context, address, num_servers=start.num_servers, linger=1000) as outbox:
            return _serve(start, context=context, address=address, requests=requests, outbox=outbox)


def _serve(
    start: wire.StartEngine,
    *,
    context: Context,
    address: wire.EngineAddress,
    requests: zmq.Socket[bytes],
    outbox: "Outbox",
) -> int:
    try:
        # Import PyTorch, which takes seconds, after the sockets are connected.
        with large_imports():
            from negamax.engine.core.setup import start_loop

        loop, info = start_loop(start.options, replica=start.replica)
    except (NegamaxError, OSError) as error:
        refusal = ResourceError.of_system(error) if isinstance(error, OSError) else error
        outbox.send_first(wire.EngineFailed(str(refusal), refusal.exit_code))
        return refusal.exit_code
    except Exception as error:
        logger.exception("the engine cannot start")
        options = start.options
        dumps = CrashDumps(options.crash_dump_dir, part="engine", options=asdict(options))
        dumps.write("the engine cannot start", details=dict, error=error)
        outbox.send_first(wire.EngineFailed(f"the engine cannot start: {error!r}", 1))
        return 1
    # Objects created so far live as long as the process, so garbage collections can skip them.
    gc.freeze()
    outbox.send_first(wire.EngineReady(info))
    pulse = Pulse(loop)
    restarts = True  # Whether a new engine follows this one.
    try:
        with pulse.beating(context, address, num_servers=start.num_servers):
            serve(loop, requests=requests, outbox=outbox, pulse=pulse)
        restarts = False
    except EngineDeadError as error:
        logger.error("the engine stops because of an error: %s", error)
        loop.dump_crash(str(error), error)
        outbox.send_first(wire.EngineFailed(str(error), 1))
        return 1
    except Exception as error:
        logger.exception("the engine stops because of an error")
        loop.dump_crash("the engine failed", error)
        outbox.send_first(wire.EngineFailed(f"the engine failed: {error!r}", 1))
        return 1
    finally:
        loop.shutdown(restarts=restarts)
    return 0


def listen(requests: zmq.Socket[bytes], address: wire.EngineAddress, *, num_servers: int) -> None:
    requests.reconnect_ivl = RECONNECT_MS
    for server in range(1, num_servers):
        requests.connect(address.requests(server))


class Outbox(AbstractContextManager["Outbox"]):
    """Sockets that send messages to the server processes. Only one thread may use an instance."""

    def __init__(
        self, context: Context, address: wire.EngineAddress, *, num_servers: int, linger: int
    ) -> None:
        """Connect to all server processes. `close` spends up to `linger` ms on unsent messages."""
        self._sockets = [context.socket(zmq.PUSH) for _ in range(num_servers)]
        for server, socket in enumerate(self._sockets):
            socket.linger = linger
            socket.set_hwm(0)  # No queue limit: a send never blocks.
            socket.reconnect_ivl = RECONNECT_MS
            socket.connect(address.outputs(server))

    def __exit__(self, *error: object) -> None:
        for socket in self._sockets:
            socket.close()

    def send_first(self, message: wire.FromEngine) -> None:
        self._sockets[0].send(wire.encoder.encode(message))

    def send_all(self, message: wire.Heartbeat) -> None:
        frame = wire.encoder.encode(message)
        for socket in self._sockets:
            socket.send(frame)

    def answer(self, server: int, message: wire.ExpertRecord) -> None:
        self._sockets[server].send(wire.encoder.encode(message))

    def frames(self, report: wire.StepOutputs) -> list[tuple[int, bytes]]:
        parts = {0: report} if len(self._sockets) == 1 else _split_report(report)
        return [(server, wire.encoder.encode(part)) for server, part in parts.items()]

    def send(self, frames: list[tuple[int, bytes]]) -> None:
        for server, frame in frames:
            self._sockets[server].send(frame)


def _split_report(report: wire.StepOutputs) -> dict[int, wire.StepOutputs]:
    """Split the loop's report by server process. Only one part has the token counts of steps."""
    parts: dict[int, wire.StepOutputs] = {}

    def part(sequence_id: str) -> wire.StepOutputs:
        server = wire.server_of(sequence_id)
        if server not in parts:
            parts[server] = wire.StepOutputs(
                [], report.stats, [], [] if parts else report.step_tokens
            )
        return parts[server]

    for update in report.updates:
        part(update.request_id).updates.append(update)
    for sequence_id, at in report.admitted:
        part(sequence_id).admitted.append((sequence_id, at))
    return parts


def serve(loop: EngineLoop, *, requests: zmq.Socket[bytes], outbox: Outbox, pulse: "Pulse") -> None:
    """Receive requests, run steps and send updates until a stop is requested."""
    while True:
        while not loop.has_work or requests.poll(0):
            pulse.is_idle = not loop.has_work
            if pulse.is_idle and not loop.await_request(requests):
                continue  # A message of another engine may have ended the wait.
            frame = requests.recv()
            pulse.is_idle = False
            try:
                message = wire.to_engine_decoder.decode(frame)
            except msgspec.DecodeError:
                logger.exception("dropped a message that cannot be decoded")
                continue
            if isinstance(message, wire.AddRequest):
                loop.add(message.request)
            elif isinstance(message, wire.AbortRequests):
                loop.abort(message.request_ids)
            elif isinstance(message, wire.AbortServer):
                loop.abort(
                    [name for name in loop.request_ids() if wire.server_of(name) == message.server]
                )
            elif isinstance(message, wire.ResetPrefixCache):
                loop.reset_prefix_cache()
            elif isinstance(message, wire.Record):
                outbox.answer(message.server, _record(loop, message))
            else:
                return
        updates = loop.step()
        pulse.num_rounds += 1
        if updates:
            outbox.send(outbox.frames(loop.report(updates)))


def _record(loop: EngineLoop, message: wire.Record) -> wire.ExpertRecord:
    try:
        if isinstance(message, wire.RecordExperts):
            return wire.ExpertRecord(message.number, loop.record_experts(message.action))
        loop.record_trace(message.path, num_steps=message.num_steps)
        return wire.ExpertRecord(message.number)
    except InvalidRequestError as error:
        return wire.ExpertRecord(message.number, problem=str(error))


class Pulse:
    """Engine loop state that heartbeats report. Only the loop's thread changes the state."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self.num_rounds = 0
        self.is_idle = False

    @contextmanager
    def beating(
        self, context: Context, address: wire.EngineAddress, *, num_servers: int
    ) -> Iterator[None]:
        """In a thread, send heartbeats. Report a dead rank if the loop does not report it."""
        stop = threading.Event()

        def beat() -> None:
            executor = self._loop.executor
            next_beat = 0.0
            with Outbox(context, address, num_servers=num_servers, linger=0) as outbox:
                while not stop.wait(LOOK_SECONDS):
                    rank, silence = executor.longest_silence()
                    death = executor.death()
                    if death is not None:
                        # First, let the engine loop report the dead rank itself.
                        if not stop.wait(LAST_STEP_SECONDS):
                            self._loop.dump_crash(death, EngineDeadError(death))
                            outbox.send_first(wire.EngineFailed(death, 1))
                        stop.wait()  # The server process ends this process.
                    elif time.monotonic() >= next_beat:
                        next_beat = time.monotonic() + wire.BEAT_SECONDS - LOOK_SECONDS
                        stats = self._loop.stats()
                        outbox.send_all(
                            wire.Heartbeat(self.num_rounds, self.is_idle, stats, rank, silence)
                        )

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    exit_now(main(sys.argv[1]))
