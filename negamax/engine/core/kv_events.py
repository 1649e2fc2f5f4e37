"""Publish events of a rank's prefix cache for routers over ZeroMQ, in vLLM's schema.

The engine loop passes the changes of a step to `EventPublisher.publish`, which takes microseconds.
A thread converts the changes to events and sends batches of events. A slow or disconnected
subscriber loses batches and sees a gap in their sequence numbers. If the thread falls behind, it
drops changes and sends an `AllBlocksCleared` event, so subscribers never use stale entries.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, groupby
from operator import itemgetter
from queue import SimpleQueue

import msgspec
import zmq

from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.engine.kv_event_wire import (
    END_OF_REPLAY,
    FILES,
    HOST,
    KV,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    shorten_hashes,
)
from negamax.options.kv_events import KvEventsConfig, listens
from negamax.scheduler.cache_log import CacheLog
from negamax.scheduler.prefix_cache import BlockHashes

logger = get_logger(__name__)

# Number of steps for which tokens of a removed block are kept, in case the block is cached again.
KEPT_STEPS = 128
_LOST, _STOP = "lost", "stop"
_LINGER_MS = 500
_MOST_BYTES = 65536  # Size limit of a frame that a subscriber sends.


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of a hash chain that entered the prefix cache together."""

    parent: bytes | None
    hashes: list[bytes]
    tokens: msgspec.Raw  # Token ids in MessagePack, to save memory and time.
    salt: str  # Cache salt if `parent` is None, else "".
    block_size: int


class CacheMirror:
    """The cached blocks of a rank, as sent to subscribers. Only one thread may use an instance.

    The methods process blocks by built-in functions, so that they hold the GIL only briefly.
    """

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}  # Block hash -> the run that contains the block.
        self._cached: dict[str, set[bytes]] = {KV: set(), HOST: set(), FILES: set()}
        # For each level, cached blocks whose tokens are not known yet, oldest first.
        self._unknown: dict[str, dict[bytes, None]] = {KV: {}, HOST: {}, FILES: {}}
        self._touched: deque[set[bytes]] = deque()  # New and removed blocks of recent steps.

    def clear(self) -> list[KvEvent]:
        """Forget all blocks, and return an event that clears all blocks."""
        self._runs.clear()
        for medium in self._cached:
            self._cached[medium].clear()
            self._unknown[medium].clear()
        return [AllBlocksCleared()]

    def apply(self, changes: CacheLog) -> list[KvEvent]:
        """Return the events of a step's changes. Blocks with unknown tokens get no event yet."""
        learned = [
            block_hash
            for chain, first, stop in changes.chains
            for block_hash in self._learn(chain, first, stop)
        ]
        touched, events = set(learned), list[KvEvent]()
        levels = (changes.kv, changes.host, changes.files)
        # The loop begins with the KV cache, which contains the parents of all blocks in `learned`.
        for (medium, unknown), of_medium in zip(self._unknown.items(), levels, strict=True):
            found = [block_hash for block_hash in learned if block_hash in unknown]
            events += self._store(found, medium)
            for block_hash in found:
                del unknown[block_hash]
            for is_cached, group in groupby(of_medium, itemgetter(1)):
                hashes = list(map(itemgetter(0), group))
                if is_cached:
                    events += self._store(hashes, medium)
                else:
                    touched.update(hashes)
                    events += self._remove(hashes, medium)
        self._touched.append(touched)
        if len(self._touched) > KEPT_STEPS:
            for block_hash in self._touched.popleft().difference(*self._cached.values()):
                self._runs.pop(block_hash, None)
        return events if any(self._cached.values()) or not events else [AllBlocksCleared()]

    def _learn(self, chain: BlockHashes, first: int, stop: int) -> list[bytes]:
        """Store the unknown blocks among blocks `first` to `stop`, and return their hashes."""
        hashes = list(dropwhile(self._runs.__contains__, chain.computed(first, stop)))
        first = stop - len(hashes)
        if hashes:
            parent = chain.computed(first - 1, first)[0] if first else None
            tokens = _encode_tokens(chain.tokens(first, stop))
            run = _Run(parent, hashes, tokens, "" if first else chain.salt, chain.block_size)
            self._runs.update(dict.fromkeys(hashes, run))
        return hashes

    def _store(self, hashes: list[bytes], medium: str) -> Iterator[BlockStored]:
        """Add blocks to a cache level. Yield one event per series of adjacent blocks of a run."""
        start = 0
        while start < len(hashes):
            run = self._runs.get(hashes[start])
            if run is None:
                self._unknown[medium][hashes[start]] = None
                start += 1
                continue
            place = run.hashes.index(hashes[start])
            stop = start + len(run.hashes) - place
            while hashes[start:stop] != run.hashes[place : place + len(hashes[start:stop])]:
                stop = (start + min(stop, len(hashes))) // 2  # Not equal: compare half the blocks.
            part = hashes[start:stop]
            self._cached[medium].update(part)
            yield _describe(run, place, part, medium)
            start += len(part)

    def _remove(self, hashes: list[bytes], medium: str) -> Iterator[BlockRemoved]:
        for block_hash in self._unknown[medium].keys() & hashes if self._unknown[medium] else ():
            del self._unknown[medium][block_hash]
        known = self._cached[medium].intersection(hashes)
        if known:
            gone = [block_hash for block_hash in hashes if block_hash in known]
            self._cached[medium] -= known
            yield BlockRemoved(block_hashes=shorten_hashes(gone), medium=medium, group_idx=0)


def _describe(run: _Run, place: int, hashes: list[bytes], medium: str) -> BlockStored:
    """Return the event for the blocks `hashes`, which begin at index `place` of `run`."""
    tokens, size = run.tokens, run.block_size
    if len(hashes) < len(run.hashes):
        all_tokens = msgspec.msgpack.decode(tokens, type=list[int])
        tokens = _encode_tokens(all_tokens[place * size : (place + len(hashes)) * size])
    parent = run.hashes[place - 1] if place else run.parent
    has_salt = run.salt and not place
    return BlockStored(
        block_hashes=shorten_hashes(hashes),
        parent_block_hash=None if parent is None else shorten_hashes([parent])[0],
        token_ids=tokens,
        block_size=size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[[run.salt], *[None] * (len(hashes) - 1)] if has_salt else None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def _encode_tokens(tokens: list[int]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(tokens))


class EventPublisher:
    """Publishes a rank's events by one thread, and answers replay requests by another thread."""

    def __init__(self, config: KvEventsConfig, rank: int) -> None:
        """Open the sockets of `rank`, an index over all replicas. Raises `ConfigError`."""
        self.num_batches = 0  # Number of sent batches.
        self.num_dropped = 0  # Number of steps whose cache changes the thread dropped.
        self._config, self._rank = config.add_rank(rank), rank
        self._topic = config.topic.encode()
        # The queue contains `_LOST` in place of dropped changes.
        self._queue: SimpleQueue[CacheLog | str] = SimpleQueue()
        self._is_behind = False
        self._mirror, self._encoder = CacheMirror(), msgspec.msgpack.Encoder()
        # (number, batch) of the latest sent batches, for replays. ZeroMQ does not copy the frames.
        self._sent: deque[tuple[bytes, zmq.Frame]] = deque(maxlen=config.buffer_steps)
        self._has_blocks = False  # Whether a `BlockStored` event was sent.
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(config.hwm)
        self._events.linger = _LINGER_MS
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.set_hwm(config.buffer_steps + 1)  # A full replay has this number of messages.
        self._replays.linger = 0
        self._events.maxmsgsize = self._replays.maxmsgsize = _MOST_BYTES
        self._threads = [
            threading.Thread(target=run, name="kv-events", daemon=True)
            for run in (self._send_events, self._answer_replays)
        ]
        try:
            self._open(self._events, "endpoint", self._config.endpoint)
            if self._config.replay_endpoint is not None:
                self._open(self._replays, "replay_endpoint", self._config.replay_endpoint)
        except ConfigError:
            self.close()
            raise

    def start(self) -> None:
        """Publish that the blocks of an earlier engine are gone, and start the threads."""
        self._send([AllBlocksCleared()])
        for thread in self._threads:
            thread.start()

    def publish(self, changes: CacheLog) -> None:
        """Queue the changes of a step without waiting. Only one thread may publish and close."""
        if self._queue.qsize() >= self._config.max_queue_size:
            self.num_dropped += 1
            self._is_behind = True
            return
        if self._is_behind:
            self._is_behind = False
            self._queue.put(_LOST)
        self._queue.put(changes)

    def close(self) -> None:
        """Send the queued changes and close the sockets."""
        if self._threads[0].is_alive():
            self._queue.put(_STOP)
            self._context.term()  # term() waits until the threads have closed their sockets.
        else:
            self._context.destroy(linger=0)

    def _open(self, socket: zmq.Socket[bytes], key: str, address: str) -> None:
        verb = "listen at" if listens(address) else "connect to"
        try:
            socket.bind(address) if listens(address) else socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--kv-events-config: cannot {verb} {key} {address}: {error.strerror}",
                hint="use another address",
            ) from error
        logger.info("KV events of rank %d: %s %s %s", self._rank, verb, key, address)

    def _send_events(self) -> None:
        with self._events:
            while (changes := self._queue.get()) != _STOP:
                is_lost = not isinstance(changes, CacheLog)
                self._send(self._mirror.clear() if is_lost else self._mirror.apply(changes))

    def _send(self, events: list[KvEvent]) -> None:
        if not events:
            return
        if not self._has_blocks and isinstance(events[0], BlockStored):
            # Repeat the event of `start` for subscribers that have connected after `start`.
            events.insert(0, AllBlocksCleared())
            self._has_blocks = True
        sequence = self.num_batches.to_bytes(SEQUENCE_BYTES, "big")
        payload = zmq.Frame(self._encoder.encode(EventBatch(time.time(), events, self._rank)))
        self._events.send_multipart([self._topic, sequence, payload], copy=False)
        self._sent.append((sequence, payload))
        self.num_batches += 1

    def _answer_replays(self) -> None:
        """Send the stored batches from the requested sequence number on, and then an end mark."""
        with self._replays, suppress(zmq.ContextTerminated):
            while True:
                *route, first = self._replays.recv_multipart()
                for sequence, payload in tuple(self._sent):
                    if sequence >= first:
                        answer = [*route, self._topic, sequence, payload]
                        self._replays.send_multipart(answer, copy=False)
                self._replays.send_multipart([*route, b"", END_OF_REPLAY, b""])
