"""Start grammar processes from the engine, and exchange messages with them."""

import contextlib
import os
import signal
import socket
import time

import msgspec
import zmq

from negamax.base import supervision
from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import Supervised
from negamax.engine.grammar import wire

RECONNECT_MS = 10  # Time between attempts to connect to a grammar process.
START_SECONDS = 60.0  # Longest wait for the first answer of a grammar process.
SILENT_SECONDS = 10.0  # Seconds without a heartbeat after which a busy process is considered hung.
STOPPED_SECONDS = 1.0  # A process that a signal has stopped is considered hung after this time.
LOOK_SECONDS = 0.1  # Seconds without an answer until the engine checks for a stopped process.


class GrammarHost:
    """A process that loads the grammar compiler and forks grammar processes."""

    def __init__(self, setup: wire.Setup) -> None:
        """Start the process. Raises `OSError` if the system lacks files, processes or memory."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = Supervised(
                "negamax.engine.grammar.process", str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), has_secrets=False,
            )  # fmt: skip
        self._requests.send(msgspec.msgpack.encode(setup))

    @property
    def is_alive(self) -> bool:
        return self.process.exit_code is None

    def fork(self, request: wire.Fork, channel: socket.socket) -> None:
        """Fork a process that ends when the other end of `channel` closes. Raises `OSError`."""
        frame = msgspec.msgpack.encode(request)
        socket.send_fds(self._requests, [frame], [channel.fileno()], socket.MSG_DONTWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.reap()
        self._requests.close()


class GrammarClient:
    """One grammar process. Only the engine loop's thread may use an instance.

    A worker process compiles only the risky grammar `spec`. If `spec` is None, the process compiles
    all grammars that are not risky. If `is_spent` is set, the process ends after its last output.
    """

    def __init__(self, host: GrammarHost, *, spec: wire.GrammarSpec | None = None) -> None:
        """Fork a process. Raises `OSError` or `zmq.ZMQError` if the system lacks resources."""
        self.spec, self.is_spent = spec, False
        self._host = host
        self._context = zmq.Context()
        self._folder = PrivateFolder()
        # When the forked process has ended, `_channel` is at its end.
        self._channel, theirs = socket.socketpair()
        address = f"ipc://{self._folder.path}/grammars"
        try:
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
            self.socket.linger = 0
            # The socket's queues have no limits, so the engine loop never blocks while it sends.
            self.socket.sndhwm = self.socket.rcvhwm = 0
            self.socket.reconnect_ivl = RECONNECT_MS
            # The engine connects, because a bound socket without a peer blocks its sender.
            self.socket.connect(address)
            with theirs:
                host.fork(wire.Fork(address, is_worker=spec is not None), theirs)
        except (OSError, zmq.ZMQError):
            self._clear_away()
            raise
        self._pid: int | None = None
        self._is_gone = False
        self.is_ready = False
        self._stopped: float | None = None  # Monotonic second when a signal stopped the process.
        self._heard = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Return the process id of the grammar process, or None if it is not forked yet."""
        with contextlib.suppress(BlockingIOError):
            while not self._is_gone:
                try:
                    received = self._channel.recv(64, socket.MSG_DONTWAIT)
                except ConnectionError:
                    received = b""
                self._is_gone = not received
                self._pid = int(received) if received else self._pid
        return self._pid

    @property
    def is_alive(self) -> bool:
        _ = self.pid
        return not self._is_gone

    @property
    def is_stopped(self) -> bool:
        return supervision.is_stopped(self.pid or self._host.process.pid)

    def is_silent(self, since: float) -> bool:
        """Return whether the process, which is busy since `since`, has been silent for too long."""
        now = time.monotonic()
        seconds = now - max(since, self._heard)
        if seconds > (SILENT_SECONDS if self.is_ready else START_SECONDS):
            return True
        if seconds < LOOK_SECONDS or not self.is_stopped:
            self._stopped = None
            return False
        if self._stopped is None:
            self._stopped = now
        return now - self._stopped > STOPPED_SECONDS

    def send(self, message: wire.ToGrammars) -> None:
        """Send a message without waiting. Drop the message if the process has ended."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(wire.encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[wire.FromGrammars]:
        answers = []
        with contextlib.suppress(zmq.Again):
            while True:
                answers.append(wire.from_grammars.decode(self.socket.recv(zmq.NOBLOCK)))
        if answers:
            self.is_ready = True
            self._heard = time.monotonic()
        return answers

    def kill(self) -> None:
        if self.pid is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._is_gone = True
        self._clear_away()

    def _clear_away(self) -> None:
        self._channel.close()  # If the host forks the process later, the closed channel ends it.
        self._context.destroy(linger=0)
        self._folder.remove()
