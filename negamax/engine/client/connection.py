"""The engine process seen from the server processes: the sockets to and from it, and, for the
server that started it, its start, its heartbeats and its end.

Sockets are read as soon as they have something, without a task in between: a step's frame is handed
on in the callback that found it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq

from negamax.base.errors import ConfigError, EngineDeadError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import ParentPulse, Silence, Supervised, stop_children
from negamax.engine import wire
from negamax.options.engine import EngineOptions

logger = get_logger(__name__)

ENGINE_MODULE = "negamax.engine.core.process"
SHUTDOWN_SECONDS = 5.0
# without a beat an engine counts as hung, unless the limit on its steps is lower
BEAT_TIMEOUT_SECONDS = 30.0
_WATCH_SECONDS = 0.25
_START_POLL_SECONDS = 0.02
_LAST_WORDS_SECONDS = 5.0  # in which what a process sent before its end arrives at the latest
_FRAMES_PER_TURN = 32  # after which other events of the loop get their turn

Receive = Callable[[list[wire.StepOutputs]], None]


class EngineChannel:
    """The two sockets of one server process, until `close`. Single writer: the event loop.

    `receive` gets the steps of the engine, those that arrived together in one call; `failed` is
    told, at most once, why no more will come.
    """

    def __init__(
        self,
        address: wire.EngineAddress,
        server: int,
        *,
        receive: Receive,
        failed: Callable[[str], None],
    ) -> None:
        self.is_open = True
        self.stats: wire.EngineStats | None = None  # the latest
        # gets what the engine answers to a question that is no request
        self.on_record: Callable[[wire.ExpertRecord], None] = lambda record: None
        self.last_beat = self.last_progress = time.monotonic()
        # the rank that is silent for the longest time, and its seconds, at the last beat
        self.rank, self.rank_silence = 0, 0.0
        self._receive = receive
        self._failed = failed
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.linger = 0
            socket.set_hwm(0)  # never full: what may be on the way is bounded by admission
        self._to_engine.bind(address.requests(server))
        self._from_engine.bind(address.outputs(server))
        self._fd = int(self._from_engine.FD)
        self._is_reading = False
        self._num_rounds = -1

    @property
    def can_send(self) -> bool:
        """Whether the engine has connected; before that, what is sent is lost."""
        return bool(self._to_engine.poll(0, zmq.POLLOUT))

    @property
    def has_frame(self) -> bool:
        """Whether a frame has arrived; before `start_reading`."""
        return bool(self._from_engine.poll(0, zmq.POLLIN))

    def next_frame(self) -> bytes:
        """A frame that has arrived; before `start_reading`."""
        return self._from_engine.recv()

    def start_reading(self) -> None:
        """Pass on what arrives from now on."""
        self.last_beat = self.last_progress = time.monotonic()
        self._is_reading = True
        asyncio.get_running_loop().add_reader(self._fd, self.drain)
        self.drain()  # what came before the reader was there is not announced again

    def send(self, message: wire.ToEngine | wire.Start) -> None:
        """Send now; what an engine that ended does not get, nobody misses."""
        if self.is_open:
            # it died a moment ago and took its end of the socket along
            with contextlib.suppress(zmq.Again):
                self._to_engine.send(wire.encoder.encode(message), zmq.NOBLOCK)

    def drain(self) -> None:
        """Hand on what has arrived. The socket announces news once, so it must be read until it is
        empty.
        """
        steps: list[wire.StepOutputs] = []
        for _ in range(_FRAMES_PER_TURN):
            if (
                not self._is_reading
                or not int(self._from_engine.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            ):
                break
            try:
                message = wire.from_engine_decoder.decode(self._from_engine.recv())
            except msgspec.DecodeError as error:
                self.fail(f"the engine sent what is no message: {error}")
                continue
            self.last_beat = time.monotonic()
            if isinstance(message, wire.StepOutputs):
                self._take_stats(message.stats)
                self.last_progress = self.last_beat
                steps.append(message)
            else:
                self._take(message)
        else:
            asyncio.get_running_loop().call_soon(self.drain)
        if steps:
            self._receive(steps)

    def fail(self, reason: str) -> None:
        """The engine is of no more use. The first reason counts."""
        if self.is_open:
            self.is_open = False
            self._failed(reason)

    def stop_reading(self) -> None:
        """Nothing more is sent or handed on."""
        self.is_open = False
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._fd)

    def close(self) -> None:
        """Give the sockets back."""
        self.stop_reading()
        self._context.destroy(linger=0)

    def _take_stats(self, stats: wire.EngineStats) -> None:
        """Keep the latest statistics: those of a heartbeat may be older than a step's before it."""
        if self.stats is None or stats.at >= self.stats.at:
            self.stats = stats

    def _take(
        self, message: wire.Heartbeat | wire.ExpertRecord | wire.EngineReady | wire.EngineFailed
    ) -> None:
        """A message that is no step."""
        if isinstance(message, wire.Heartbeat):
            self._take_stats(message.stats)
            self.rank, self.rank_silence = message.rank, message.rank_silence
            if message.is_idle or message.num_rounds != self._num_rounds:
                self._num_rounds = message.num_rounds
                self.last_progress = self.last_beat
        elif isinstance(message, wire.ExpertRecord):
            self.on_record(message)
        elif isinstance(message, wire.EngineFailed):
            self.fail(message.message)
        else:
            self.fail(f"the engine sent a {type(message).__name__} out of turn")


class EngineConnection:
    """An engine process from its start to its end, for the server process that starts it. Single
    writer: the event loop.

    `ended` is done, with the reason, once the process is of no more use: it died, it said that it
    failed, or it hangs. `hang_seconds` is how long its loop may stand still while there is work.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        num_servers: int,
        receive: Receive,
        hang_seconds: float,
        module: str,
        parent: ParentPulse | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process, with `variables` in its environment, which watches this one by the
        pulse of `parent`; `handshake` waits for it.
        """
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._folder = PrivateFolder()
        self.address = wire.EngineAddress(self._folder.path)
        self.channel = EngineChannel(self.address, 0, receive=receive, failed=self.ended.set_result)
        self._start = wire.Start(options, num_servers, parent)
        self._hang_seconds = hang_seconds
        self._process = Supervised(module, self.address.folder, own_group=True, variables=variables)
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process. Negative: the number of the signal that ended it; None: it
        lives.
        """
        return self._process.exit_code

    async def handshake(self) -> wire.ModelInfo:
        """Send the options, wait for the engine's word, and begin to receive.

        Errors: `ConfigError` and its kin with the message of whatever refused to start,
        `EngineDeadError`.
        """
        channel = self.channel
        await self._until(lambda: channel.can_send)
        channel.send(self._start)
        await self._until(lambda: channel.has_frame)
        message = wire.from_engine_decoder.decode(channel.next_frame())
        if isinstance(message, wire.EngineFailed):
            error = ConfigError(message.message)
            error.exit_code = message.exit_code
            raise error
        assert isinstance(message, wire.EngineReady), message
        channel.start_reading()
        self._watch = asyncio.create_task(self._watch_process())
        return message.info

    async def close(self, *, kill: bool) -> None:
        """End the process with all its children and free what belongs to it; `kill`: at once. The
        first call counts.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(kill=kill))
        await asyncio.shield(self._closing)

    async def _close(self, *, kill: bool) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not kill:
            self.channel.send(wire.Shutdown())
        self.channel.fail("the engine was stopped")
        self.channel.stop_reading()
        if not kill:
            await asyncio.to_thread(stop_children, [self._process], timeout=SHUTDOWN_SECONDS)
        await asyncio.to_thread(self._process.kill_group)
        self._process.reap()
        self.channel.close()
        self._folder.remove()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for a process that starts. Errors: `EngineDeadError` where it has ended without a
        word.
        """
        while not holds():
            await asyncio.sleep(_START_POLL_SECONDS)
            code = self._process.exit_code
            if code is not None and not await self._hears(holds):
                raise EngineDeadError(
                    f"the engine process ended with exit code {code} while starting"
                )

    async def _hears(self, is_heard: Callable[[], bool]) -> bool:
        """Whether what the process said before its end comes, for which a thread of this process
        must have its turn. One that was killed had no time to say anything.
        """
        was_killed = (self._process.exit_code or 0) < 0
        deadline = time.monotonic() + (0.0 if was_killed else _LAST_WORDS_SECONDS)
        while not (found := is_heard()) and time.monotonic() < deadline:
            await asyncio.sleep(_START_POLL_SECONDS)
        return found

    async def _watch_process(self) -> None:
        """Notice an engine that died without a word, and one that lives and does nothing."""
        channel = self.channel
        beat_seconds = min(BEAT_TIMEOUT_SECONDS, self._hang_seconds)
        beats, progress = Silence(), Silence()
        while channel.is_open:
            await asyncio.sleep(_WATCH_SECONDS)
            code = self._process.exit_code
            if code is not None:

                def has_failed() -> bool:
                    channel.drain()
                    return not channel.is_open

                await self._hears(has_failed)
                channel.fail(f"the engine process ended with exit code {code}")
                return
            beat_silence = beats.seconds(channel.last_beat)
            progress_silence = progress.seconds(channel.last_progress)
            if beat_silence > beat_seconds:
                channel.fail(f"the engine process hangs: no heartbeat for {beat_seconds:g} s")
            elif channel.rank_silence > beat_seconds:
                channel.fail(f"rank {channel.rank} hangs: no heartbeat for {beat_seconds:g} s")
            elif progress_silence > self._hang_seconds:
                channel.fail(f"the engine hangs: no step ended within {self._hang_seconds:g} s")
