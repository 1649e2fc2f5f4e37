"""The engine's side of a grammar process: started, spoken to, and ended."""

from __future__ import annotations

import contextlib

import msgspec
import zmq

from negamax.base import process
from negamax.base.private_folder import PrivateFolder
from negamax.engine import grammar_wire as wire


class GrammarClient:
    """One grammar process. Single writer: the engine loop's thread."""

    def __init__(self, setup: wire.Setup) -> None:
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0  # the loop never waits to be rid of a message
        address = f"ipc://{self._folder.path}/grammars"
        self.socket.bind(address)
        self._process = process.spawn("negamax.engine.grammar_process", address)
        self.socket.send(msgspec.msgpack.encode(setup))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: wire.ToGrammars) -> None:
        self.socket.send(wire.encoder.encode(message))

    def receive(self) -> list[wire.FromGrammars]:
        """All answers that are here."""
        answers = []
        with contextlib.suppress(zmq.Again):
            while True:
                answers.append(wire.from_grammars.decode(self.socket.recv(zmq.NOBLOCK)))
        return answers

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._context.destroy(linger=0)
        self._folder.remove()


def wait_for_any(clients: list[GrammarClient], *, seconds: float) -> None:
    """Until one of them has answered, or the time is up."""
    poller = zmq.Poller()
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
    poller.poll(int(seconds * 1000) + 1)
