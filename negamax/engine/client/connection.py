"""Start an engine process, exchange messages with it, watch its heartbeats, and end it.

The event loop reads the socket in a callback, so no task delays a message.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import zmq

from negamax.base.errors import ConfigError, EngineDeadError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import ParentPulse, Silence, Supervised, stop_children
from negamax.engine import wire
from negamax.options.engine import EngineOptions
from negamax.options.nodes import RAY

logger = get_logger(__name__)

ENGINE_MODULE = "negamax.engine.core.process"
SHUTDOWN_SECONDS = 5.0
# An engine without heartbeats for this time (at most --engine-hang-timeout) is considered hung.
BEAT_TIMEOUT_SECONDS = 30.0
# Seconds without a heartbeat until an engine on several nodes is considered hung. The time limit
# between two nodes is shorter (`engine.nodes.wire`). Clients get errors within 3 s of a node's end.
NODES_BEAT_SECONDS = 2.4
_WATCH_SECONDS = 0.25
_START_POLL_SECONDS = 0.02
_LAST_WORDS_SECONDS = 5.0  # Longest wait for the last messages of an ended engine.
_FRAMES_PER_TURN = 32  # Largest number of engine messages that `drain` handles at once.

Receive = Callable[[list[wire.StepOutputs]], None]
T = TypeVar("T")


class EngineChannel:
    """The two sockets that connect a server process to an engine. Only the event loop uses the
    sockets. One call of `receive` gets all outputs that have arrived together. When the engine has
    ended, `failed` is called once with the reason.
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
        self.stats: wire.EngineStats | None = None  # Latest statistics of the engine.
        # `on_record` is called with each answer to a `Record`.
        self.on_record: Callable[[wire.ExpertRecord], None] = lambda record: None
        self.last_beat = self.last_progress = time.monotonic()
        # Rank with the oldest heartbeat, and age of this heartbeat in seconds.
        self.rank, self.rank_silence = 0, 0.0
        self._receive = receive
        self._failed = failed
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.linger = 0
            socket.set_hwm(0)  # No queue limit, because `Admission` limits the messages.
        self._to_engine.bind(address.requests(server))
        self._from_engine.bind(address.outputs(server))
        self._fd = int(self._from_engine.FD)
        self._is_reading = False
        self._num_rounds = -1

    @property
    def can_send(self) -> bool:
        """Return whether the engine has connected. Messages sent before the connection are lost."""
        return bool(self._to_engine.poll(0, zmq.POLLOUT))

    def receive_first(self) -> wire.FromEngine | None:
        """Return the next message of the engine, or None. Call this only before `start_reading`."""
        if not self._from_engine.poll(0, zmq.POLLIN):
            return None
        return wire.from_engine_decoder.decode(self._from_engine.recv())

    def start_reading(self) -> None:
        self.last_beat = self.last_progress = time.monotonic()
        self._is_reading = True
        asyncio.get_running_loop().add_reader(self._fd, self.drain)
        self.drain()  # Read earlier messages, which cause no event on the file descriptor.

    def send(self, message: wire.ToEngine | wire.StartEngine) -> None:
        """Send a message without waiting. Drop the message if the engine has ended."""
        if self.is_open:
            # zmq.Again means that the engine has just died and that its socket is closed.
            with contextlib.suppress(zmq.Again):
                self._to_engine.send(wire.encoder.encode(message), zmq.NOBLOCK)

    def drain(self) -> None:
        """Handle all arrived messages, because the socket's `_fd` reports a message only once."""
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
                self.fail(f"the engine sent an invalid message: {error}")
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
        if self.is_open:
            self.is_open = False
            self._failed(reason)

    def stop_reading(self) -> None:
        self.is_open = False
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._fd)

    def close(self) -> None:
        self.stop_reading()
        self._context.destroy(linger=0)

    def _take_stats(self, stats: wire.EngineStats) -> None:
        """Store `stats` unless newer statistics are stored. A heartbeat can arrive late."""
        if self.stats is None or stats.at >= self.stats.at:
            self.stats = stats

    def _take(
        self, message: wire.Heartbeat | wire.ExpertRecord | wire.EngineReady | wire.EngineFailed
    ) -> None:
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
    """An engine process. When the process has ended, the future `ended` gets the reason."""

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
        replica: int = 0,
    ) -> None:
        """Start the engine process with `variables`. The process watches `parent`."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._folder = PrivateFolder()
        self.address = wire.EngineAddress(self._folder.path)
        self.channel = EngineChannel(self.address, 0, receive=receive, failed=self.ended.set_result)
        self._start = wire.StartEngine(options, num_servers, parent, replica)
        self._hang_seconds = hang_seconds
        self._beat_seconds = min(BEAT_TIMEOUT_SECONDS, hang_seconds)
        if options.nodes.nnodes > 1 or options.nodes.launcher == RAY:
            self._beat_seconds = min(NODES_BEAT_SECONDS, hang_seconds)
        self._process = Supervised(module, self.address.folder, own_group=True, variables=variables)
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code (-N if signal N ended the process); None while it runs."""
        return self._process.exit_code

    async def handshake(self) -> wire.ModelInfo:
        """Wait until the engine is ready. Raises `EngineDeadError` or `ConfigError`."""
        channel = self.channel
        await self._until(lambda: channel.can_send)
        channel.send(self._start)
        message = await self._until(channel.receive_first)
        if isinstance(message, wire.EngineFailed):
            error = ConfigError(message.message)
            error.exit_code = message.exit_code
            raise error
        assert isinstance(message, wire.EngineReady), message
        channel.start_reading()
        self._watch = asyncio.create_task(self._watch_process())
        return message.info

    async def close(self, *, kill: bool) -> None:
        """End the process and its descendants, or kill them at once if `kill` is set."""
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

    async def _until(self, look: Callable[[], T]) -> T:
        """Return the first true result of `look`. Raises `EngineDeadError` if the engine ends."""
        while not (found := look()):
            await asyncio.sleep(_START_POLL_SECONDS)
            code = self._process.exit_code
            if code is not None:
                if found := await self._find_last(look):
                    break
                raise EngineDeadError(
                    f"the engine process ended with exit code {code} while starting"
                )
        return found

    async def _find_last(self, look: Callable[[], T]) -> T:
        """Wait for the last message of an ended process. Killed processes send no last message."""
        was_killed = (self._process.exit_code or 0) < 0
        deadline = time.monotonic() + (0.0 if was_killed else _LAST_WORDS_SECONDS)
        while not (found := look()) and time.monotonic() < deadline:
            await asyncio.sleep(_START_POLL_SECONDS)
        return found

    async def _watch_process(self) -> None:
        channel = self.channel
        beat_seconds = self._beat_seconds
        rank_seconds = min(BEAT_TIMEOUT_SECONDS, self._hang_seconds)
        beats, progress = Silence(), Silence()
        while channel.is_open:
            await asyncio.sleep(_WATCH_SECONDS)
            code = self._process.exit_code
            if code is not None:

                def has_failed() -> bool:
                    channel.drain()
                    return not channel.is_open

                await self._find_last(has_failed)
                channel.fail(f"the engine process ended with exit code {code}")
                return
            beat_silence = beats.seconds(channel.last_beat)
            progress_silence = progress.seconds(channel.last_progress)
            if beat_silence > beat_seconds:
                channel.fail(f"the engine process hangs: no heartbeat for {beat_seconds:g} s")
            elif channel.rank_silence > rank_seconds:
                channel.fail(f"rank {channel.rank} hangs: no heartbeat for {rank_seconds:g} s")
            elif progress_silence > self._hang_seconds:
                channel.fail(f"the engine hangs: no step ended within {self._hang_seconds:g} s")
