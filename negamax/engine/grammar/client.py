"""The engine's side of a grammar process."""

import contextlib
import time

import msgspec
import zmq

from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import Supervised
from negamax.engine.grammar import wire

RECONNECT_MS = 10  # between attempts to reach the process
START_SECONDS = 60.0  # longest wait for the first answer
SILENT_SECONDS = 10.0  # with work and without a heartbeat for so long, it counts as hung
STOPPED_SECONDS = 1.0  # the same limit while the system reports it as stopped by a signal
LOOK_SECONDS = 0.1  # silence after which the system is asked for its state


class GrammarClient:
    """One grammar process. Single writer: the engine loop's thread."""

    def __init__(self, setup: wire.Setup) -> None:
        """Errors: `OSError` and `zmq.ZMQError` if the system lacks files, processes or memory."""
        self._context = zmq.Context()
        self._folder = PrivateFolder()
        address = f"ipc://{self._folder.path}/grammars"
        try:
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
            self.socket.linger = 0
            # sends of the loop never block
            self.socket.sndhwm = self.socket.rcvhwm = 0
            self.socket.reconnect_ivl = RECONNECT_MS
            # connect, not bind: a bound socket without a peer blocks its sender
            self.socket.connect(address)
            self._process = Supervised("negamax.engine.grammar.process", address)
        except (OSError, zmq.ZMQError):
            self._clear_away()
            raise
        self._is_ready = False
        self._stopped: float | None = None  # monotonic seconds, since when it is stopped
        self._heard = time.monotonic()
        self.socket.send(msgspec.msgpack.encode(setup))

    @property
    def is_alive(self) -> bool:
        return self._process.exit_code is None

    def is_silent(self, since: float) -> bool:
        """Whether it is silent for too long, with work `since` then (monotonic seconds)."""
        now = time.monotonic()
        seconds = now - max(since, self._heard)
        if seconds > (SILENT_SECONDS if self._is_ready else START_SECONDS):
            return True
        if seconds < LOOK_SECONDS or not self._process.is_stopped:
            self._stopped = None
            return False
        if self._stopped is None:
            self._stopped = now
        return now - self._stopped > STOPPED_SECONDS

    def send(self, message: wire.ToGrammars) -> None:
        """Send without waiting; dropped if the process is gone."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(wire.encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[wire.FromGrammars]:
        answers = []
        with contextlib.suppress(zmq.Again):
            while True:
                answers.append(wire.from_grammars.decode(self.socket.recv(zmq.NOBLOCK)))
        if answers:
            self._is_ready = True
            self._heard = time.monotonic()
        return answers

    def kill(self) -> None:
        self._process.kill()
        self._process.reap()
        self._clear_away()

    def _clear_away(self) -> None:
        self._context.destroy(linger=0)
        self._folder.remove()
