"""The engine's side of a grammar process: started, spoken to, and ended."""

from __future__ import annotations

import contextlib
import time

import msgspec
import zmq

from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import Supervised
from negamax.engine.grammar import wire

RECONNECT_MS = 10  # between attempts to reach the process
START_SECONDS = 60.0  # until its first answer
SILENT_SECONDS = 10.0  # without a heartbeat while it has something to do: beyond hope
STOPPED_SECONDS = 1.0  # the same, of which the system says each time that it is stopped
LOOK_SECONDS = 0.1  # of silence after which the system is asked


class GrammarClient:
    """One grammar process. Single writer: the engine loop's thread."""

    def __init__(self, setup: wire.Setup) -> None:
        """Errors: `OSError` and `zmq.ZMQError` where the system has no room for it (files,
        processes, memory).
        """
        self._context = zmq.Context()
        self._folder = PrivateFolder()
        address = f"ipc://{self._folder.path}/grammars"
        try:
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
            self.socket.linger = 0
            # the loop never waits to be rid of a message
            self.socket.sndhwm = self.socket.rcvhwm = 0
            self.socket.reconnect_ivl = RECONNECT_MS
            # not bound: a socket without a peer would block whoever sends
            self.socket.connect(address)
            self._process = Supervised("negamax.engine.grammar.process", address)
        except (OSError, zmq.ZMQError):
            self._clear_away()
            raise
        self._is_ready = False
        self._stopped: float | None = None  # monotonic seconds, since when it has been so
        self._heard = time.monotonic()
        self.socket.send(msgspec.msgpack.encode(setup))

    @property
    def is_alive(self) -> bool:
        return self._process.exit_code is None

    def is_silent(self, since: float) -> bool:
        """Whether it sends no heartbeat although it has had something to do `since` then
        (monotonic seconds).
        """
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
        """Never waits; a process that is gone misses it."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(wire.encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[wire.FromGrammars]:
        """All answers that are here."""
        answers = []
        with contextlib.suppress(zmq.Again):
            while True:
                answers.append(wire.from_grammars.decode(self.socket.recv(zmq.NOBLOCK)))
        if answers:
            self._is_ready = True
            self._heard = time.monotonic()
        return answers

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self._process.kill()
        self._process.reap()
        self._clear_away()

    def _clear_away(self) -> None:
        self._context.destroy(linger=0)
        self._folder.remove()


def wait_for_any(clients: list[GrammarClient], *, seconds: float) -> None:
    """Wait until one of them has answered, or the time is up."""
    poller = zmq.Poller()
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
    poller.poll(int(seconds * 1000) + 1)
