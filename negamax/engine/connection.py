"""One engine process seen from the server: starting it, frames to and from it, its heartbeats, and its end.

Sockets are read as soon as they have something, without a task in between: a step's frame is handed on in the callback that
found it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from negamax.base import process
from negamax.base.errors import ConfigError, EngineDeadError
from negamax.base.log import get_logger
from negamax.config.options import EngineOptions
from negamax.engine import wire

logger = get_logger(__name__)

ENGINE_MODULE = "negamax.engine.process"
BEAT_SECONDS = 0.5
SHUTDOWN_SECONDS = 5.0
BEAT_TIMEOUT_SECONDS = 30.0  # without a beat an engine counts as hung, unless the limit on its steps is lower
_WATCH_SECONDS = 0.25
_START_POLL_SECONDS = 0.02
_FRAMES_PER_TURN = 32  # after which other events of the loop get their turn


@dataclass(frozen=True)
class EngineAddress:
    """The two sockets of an engine process, in a folder only this user can enter."""

    folder: str

    @property
    def requests(self) -> str:
        return f"ipc://{self.folder}/requests"

    @property
    def outputs(self) -> str:
        return f"ipc://{self.folder}/outputs"


class EngineConnection:
    """An engine process from its start to its end. Single writer: the event loop.

    `receive` gets the steps of the engine, those that arrived together in one call. `ended` is done, with the reason, once the
    process is of no more use: it died, it said that it failed, or it hangs. `hang_seconds` is how long its loop may stand still
    while there is work.
    """

    def __init__(
        self, options: EngineOptions, *, receive: Callable[[list[wire.StepOutputs]], None], hang_seconds: float, module: str
    ) -> None:
        """Starts the process; `handshake` waits for it."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stats: wire.EngineStats | None = None  # of the last message
        self._options = options
        self._receive = receive
        self._hang_seconds = hang_seconds
        self._address = EngineAddress(tempfile.mkdtemp(prefix="negamax-"))
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.linger = 0
            socket.set_hwm(0)  # never full: what may be on the way is bounded by admission
        self._to_engine.bind(self._address.requests)
        self._from_engine.bind(self._address.outputs)
        self._process = process.spawn(module, self._address.folder, own_group=True)
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._fd = int(self._from_engine.FD)
        self._reading = False
        self._num_rounds = -1
        self._last_beat = self._last_progress = 0.0  # monotonic seconds

    @property
    def silent_seconds(self) -> float:
        """Seconds since the engine's last sign of life."""
        return time.monotonic() - self._last_beat

    async def handshake(self) -> wire.ModelInfo:
        """Send the options, wait for the engine's word, and begin to receive.

        Errors: `ConfigError` and its kin with the message of whatever refused to start, `EngineDeadError`.
        """
        await self._ready_for(self._to_engine, zmq.POLLOUT)
        self._to_engine.send(msgspec.msgpack.encode(self._options), zmq.NOBLOCK)
        await self._ready_for(self._from_engine, zmq.POLLIN)
        message = wire.from_engine_decoder.decode(self._from_engine.recv())
        if isinstance(message, wire.EngineFailed):
            error = ConfigError(message.message)
            error.exit_code = message.exit_code
            raise error
        assert isinstance(message, wire.EngineReady), message
        self._last_beat = self._last_progress = time.monotonic()
        self._reading = True
        asyncio.get_running_loop().add_reader(self._fd, self._drain)
        self._drain()  # what came before the reader was there is not announced again
        self._watch = asyncio.create_task(self._watch_process())
        return message.info

    def send(self, message: wire.ToEngine) -> None:
        """Send now; what an engine that ended does not get, nobody misses."""
        if not self.ended.done():
            with contextlib.suppress(zmq.Again):  # it died a moment ago and took its end of the socket along
                self._to_engine.send(wire.encoder.encode(message), zmq.NOBLOCK)

    async def close(self, *, kill: bool) -> None:
        """End the process with all its children and free what belongs to it; `kill`: at once. The first call counts."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(kill=kill))
        await asyncio.shield(self._closing)

    async def _close(self, *, kill: bool) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not kill:
            self.send(wire.Shutdown())
        self._end("the engine was stopped")
        self._stop_reading()
        if not kill:
            await asyncio.to_thread(process.stop, self._process, timeout=SHUTDOWN_SECONDS)
        await asyncio.to_thread(process.end_group, self._process)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._address.folder, ignore_errors=True)

    async def _ready_for(self, socket: zmq.Socket[bytes], event: int) -> None:
        """Wait until `socket` can be used, while the process lives."""
        while not socket.poll(0, event):
            code = self._process.poll()
            if code is not None and not socket.poll(100, event):
                raise EngineDeadError(f"the engine process ended with exit code {code} while starting")
            await asyncio.sleep(_START_POLL_SECONDS)

    def _drain(self) -> None:
        """Hand on what has arrived. The socket announces news once, so it must be read until it is empty."""
        steps: list[wire.StepOutputs] = []
        for _ in range(_FRAMES_PER_TURN):
            if not self._reading or not int(self._from_engine.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            try:
                message = wire.from_engine_decoder.decode(self._from_engine.recv())
            except msgspec.DecodeError as error:
                self._end(f"the engine sent what is no message: {error}")
                continue
            self._last_beat = time.monotonic()
            if isinstance(message, wire.StepOutputs):
                self.stats = message.stats
                self._last_progress = self._last_beat
                steps.append(message)
            else:
                self._take(message)
        else:
            asyncio.get_running_loop().call_soon(self._drain)
        if steps:
            self._receive(steps)

    def _take(self, message: wire.Heartbeat | wire.EngineReady | wire.EngineFailed) -> None:
        """A message that is no step."""
        if isinstance(message, wire.Heartbeat):
            self.stats = message.stats
            if message.is_idle or message.num_rounds != self._num_rounds:
                self._num_rounds = message.num_rounds
                self._last_progress = self._last_beat
        elif isinstance(message, wire.EngineFailed):
            self._end(message.message)
        else:
            self._end(f"the engine sent a {type(message).__name__} out of turn")

    async def _watch_process(self) -> None:
        """Notice an engine that died without a word, and one that lives and does nothing."""
        beat_seconds = min(BEAT_TIMEOUT_SECONDS, self._hang_seconds)
        last = time.monotonic()
        while not self.ended.done():
            await asyncio.sleep(_WATCH_SECONDS)
            code = self._process.poll()
            if code is not None:
                self._drain()  # its last words
                self._end(f"the engine process ended with exit code {code}")
                return
            now = time.monotonic()
            if now - last > 4 * _WATCH_SECONDS:  # this process itself stood still: the engine's signs are waiting to be read
                self._last_beat = self._last_progress = now
            last = now
            if now - self._last_beat > beat_seconds:
                self._end(f"the engine process hangs: no sign of life for {beat_seconds:g} s")
            elif now - self._last_progress > self._hang_seconds:
                self._end(f"the engine hangs: no step ended within {self._hang_seconds:g} s")

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._fd)
