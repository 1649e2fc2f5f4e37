"""Follow the KV events of servers, so that the router knows the blocks in their caches.

One thread reads the events of all servers. The event loop only looks up blocks. If events are lost,
the cache's index is cleared, because a removed block could otherwise stay in the index.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.engine.kv_event_wire import (
    END_OF_REPLAY,
    FILES,
    HOST,
    KV,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
)
from negamax.options.route import EventAddress

logger = get_logger(__name__)

# Limit of blocks in an index, which needs about 110 bytes per block. More blocks are ignored.
MAX_BLOCKS = 1 << 18
_LEVELS = {KV: 1, HOST: 2, FILES: 4}
_MOST_BYTES = 2**24  # Size limit of a message, such as the event of a prompt of 3 million tokens.
_MOST_QUEUED = 16  # Length of the message queue; further messages wait at the publisher.
_MOST_READ = 100  # Messages that are read from one server before other servers get their turn.
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000
_RECONNECT_MS, _MOST_RECONNECT_MS = 100, 2_000
_POLL_MS = 200
_REPLAY_SECONDS = 10.0  # Time limit of a replay.
_IDLE_SECONDS = 2.0  # After this time without a message, ask for messages that were lost.


class BlockIndex:
    """The published blocks of one cache. One thread changes an instance; other threads may read."""

    def __init__(self, endpoint: str) -> None:
        self.is_live = False  # Whether KV events keep the index up to date.
        self.num_losses = 0  # How often events were lost or malformed.
        self.next_number: int | None = None  # Number of the next batch; None: any number.
        self._endpoint = endpoint
        self._levels: dict[int, int] = {}  # Block hash -> bits of `_LEVELS` that store the block.
        self._decoder = msgspec.msgpack.Decoder(EventBatch)

    def __len__(self) -> int:
        return len(self._levels)

    def count_leading(self, block_hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt the cache contains."""
        levels = self._levels
        absent = (at for at, each in enumerate(block_hashes) if each not in levels)
        return next(absent, len(block_hashes))

    def reset(self) -> None:
        """Forget all blocks, and accept a batch with any sequence number."""
        self._levels, self.next_number = {}, None

    def lose(self, problem: str) -> None:
        """Forget all blocks, because events are missing."""
        self.num_losses += 1
        if self.num_losses == 1:
            logger.warning(
                "KV events of %s: %s; later problems are only counted", self._endpoint, problem
            )
        self.reset()

    def apply(self, number: int, payload: bytes) -> None:
        """Apply `payload`, the batch of events with sequence number `number`."""
        if self.next_number not in (None, number):
            self.lose(f"batches {self.next_number} to {number - 1} are missing")
        self.next_number = number + 1
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.lose(f"batch {number} is malformed ({error})")
            return
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._levels = {}
            elif level := _LEVELS.get(event.medium):
                change = self._add if isinstance(event, BlockStored) else self._remove
                change(event.block_hashes, level)

    def _add(self, block_hashes: Iterable[int], level: int) -> None:
        levels = self._levels
        for each in block_hashes:
            if each in levels or len(levels) < MAX_BLOCKS:
                levels[each] = levels.get(each, 0) | level

    def _remove(self, block_hashes: Iterable[int], level: int) -> None:
        for each in block_hashes:
            if rest := self._levels.get(each, 0) & ~level:
                self._levels[each] = rest
            else:
                self._levels.pop(each, None)


class EventReader:
    """Reads the events of all servers in a thread."""

    def __init__(self, addresses: Iterable[EventAddress]) -> None:
        """Connect to `addresses`. Raises `ConfigError` for an address that ZeroMQ refuses."""
        self._context, self._poller = zmq.Context(), _Poller()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._feeds: list[_Feed] = []
        try:
            self._feeds += (_Feed(each, self._context, self._poller) for each in addresses)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot read KV events: {error.strerror}") from error
        self.indexes = [feed.index for feed in self._feeds]
        if self._feeds:
            self._thread.start()

    def close(self) -> None:
        self._is_stopping = True
        if self._feeds:
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._poller.run(_POLL_MS)
                for feed in self._feeds:
                    feed.check_time()
        finally:  # Without live events, the router estimates the content of caches.
            for index in self.indexes:
                index.is_live = False


class _Poller:
    """Calls the handler of each socket that has a message."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}

    def add(self, socket: zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def run(self, wait_ms: int) -> None:
        for socket, _ in self._poller.poll(wait_ms):
            if handler := self._handlers.get(socket):  # Another handler may remove this socket.
                handler()


class _Feed:
    """The sockets of one cache. Only the thread of `EventReader` uses this object.

    A socket receives live events, which arrive in order; another one receives a replay of earlier
    events. Live events wait during a replay, and events that both sockets receive are applied once.
    """

    def __init__(
        self, address: EventAddress, context: zmq.Context[zmq.Socket[bytes]], poller: _Poller
    ) -> None:
        self.index = BlockIndex(address.endpoint)
        self._address, self._context, self._poller = address, context, poller
        self._last = -1  # Number of the last live batch.
        self._is_connected = False
        self._replay: zmq.Socket[bytes] | None = None
        self._began = 0.0  # Monotonic second when the replay began or the last message arrived.
        self._live = self._open(zmq.SUB)
        self._live.subscribe(b"")
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._live.get_monitor_socket(events)
        poller.add(self._monitor, self._note_connection)
        poller.add(self._live, self._read_live)
        self._live.connect(address.endpoint)
        if address.replay_endpoint is not None:
            with self._open(zmq.DEALER) as probe:
                probe.connect(address.replay_endpoint)  # An invalid address is refused here.

    def check_time(self) -> None:
        """End a replay that takes too long. Begin a replay if no message arrives."""
        silence = time.monotonic() - self._began
        if self._replay is not None and silence > _REPLAY_SECONDS:
            self.index.lose("the server does not answer a request for past events")
            self._end_replay()
        elif self._replay is None and self.index.next_number and silence > _IDLE_SECONDS:
            self._begin_replay()

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = _MOST_QUEUED
        socket.maxmsgsize = _MOST_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _MOST_RECONNECT_MS
        return socket

    def _note_connection(self) -> None:
        self._is_connected = (
            recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._restart()

    def _restart(self) -> None:
        """Forget the blocks of a server that was lost or has a new engine, and replay all events.

        The replay contains the live events that this method drops. Without a replay, the index
        lacks the blocks of the dropped events.
        """
        self._end_replay()
        self.index.is_live = False
        self.index.reset()
        self._last = -1
        for _ in range(_MOST_READ):
            if not self._live.poll(0):
                break
            self._live.recv_multipart()
        if self._is_connected:
            self._begin_replay()

    def _begin_replay(self) -> None:
        self._began = time.monotonic()
        if self._address.replay_endpoint is None:
            self.index.is_live = True
            return
        first = (self.index.next_number or 0).to_bytes(SEQUENCE_BYTES, "big")
        self._replay = self._open(zmq.DEALER)
        self._replay.connect(self._address.replay_endpoint)
        self._replay.send_multipart([b"", first])
        self._poller.add(self._replay, self._read_replay)
        self._poller.remove(self._live)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._poller.remove(self._replay)
            self._replay.close()
            self._replay = None
            self._poller.add(self._live, self._read_live)
            self.index.is_live, self._began = True, time.monotonic()

    def _read_replay(self) -> None:
        for _ in range(_MOST_READ):
            if self._replay is None or not self._replay.poll(0):
                return
            frames = self._replay.recv_multipart()
            if len(frames) != 4 or frames[2] == END_OF_REPLAY:
                self._end_replay()
            elif (number := _read_number(frames[2])) is not None:
                self.index.apply(number, frames[3])

    def _read_live(self) -> None:
        for _ in range(_MOST_READ):
            if self._replay is not None or not self._live.poll(0):
                return
            frames = self._live.recv_multipart()
            self._began = time.monotonic()
            number = _read_number(frames[1]) if len(frames) == 3 else None
            expected = self.index.next_number
            if number is None:
                self.index.lose("a message is malformed")
            elif expected is not None and number <= self._last:
                self._restart()  # Another engine publishes at this address.
            elif expected is not None and number < expected:
                self._last = number  # The replay contained this batch.
            elif expected not in (None, number) and self._address.replay_endpoint is not None:
                self._last = number
                self._begin_replay()
            else:
                self._last = number
                self.index.apply(number, frames[2])


def _read_number(frame: bytes) -> int | None:
    """Return a sequence number, or None if it is malformed."""
    number = int.from_bytes(frame, "big", signed=True)
    return number if len(frame) == SEQUENCE_BYTES and number >= 0 else None
