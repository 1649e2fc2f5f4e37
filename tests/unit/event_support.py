"""Subscribe to KV events with vLLM's documented schema, and rebuild the cache from the events."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from negamax.scheduler.prefix_cache import BlockHashes


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def shorten(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


class CacheView:
    """Keep the cached blocks of each medium, as the payloads of events describe them.

    The hash of a stored block must be the hash of all tokens up to the block's end.
    """

    def __init__(self) -> None:
        self.cached: dict[str, set[int]] = defaultdict(set)
        self.num_cleared = 0
        self._prefixes: dict[int, tuple[str, list[int]]] = {}  # salt, tokens up to the block

    def apply(self, payload: bytes) -> KVEventBatch:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.events
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                hashes = set(event.block_hashes)
                assert len(hashes) == len(event.block_hashes) and event.medium is not None
                assert hashes <= self.cached[event.medium]
                self.cached[event.medium] -= hashes  # type: ignore[operator]
            else:
                self.cached.clear()
                self.num_cleared += 1
        return batch

    def count_found(self, tokens: list[int], block_size: int, salt: str = "") -> int:
        chain = BlockHashes(tokens, block_size=block_size, salt=salt)
        known = set().union(*self.cached.values())
        for index in range((len(tokens) - 1) // block_size):
            if shorten(chain[index]) not in known:
                return index * block_size
        return (len(tokens) - 1) // block_size * block_size

    def _store(self, event: BlockStored) -> None:
        size, (salt, prefix) = event.block_size, ("", [])
        if event.parent_block_hash is not None:
            assert isinstance(event.parent_block_hash, int)
            salt, prefix = self._prefixes[event.parent_block_hash]
        elif event.extra_keys is not None and event.extra_keys[0] is not None:
            (salt,) = event.extra_keys[0]
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.medium is not None and (event.lora_id, event.lora_name) == (None, None)
        tokens = [*prefix, *event.token_ids]
        chain = BlockHashes(tokens, block_size=size, salt=salt)
        for place, name in enumerate(event.block_hashes):
            index = len(prefix) // size + place
            assert name == shorten(chain[index]) and name not in self.cached[event.medium]
            self.cached[event.medium].add(name)
            self._prefixes[name] = salt, tokens[: (index + 1) * size]


class Subscriber:
    """Receive events on a SUB socket and apply them to a `CacheView`."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.view, self.next_sequence = CacheView(), 0
        self.num_sent = 0  # batches sent, including batches that were lost
        self.batches: list[KVEventBatch] = []
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(self._topic)
        self._socket.connect(endpoint)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive(self, *, wait_ms: int = 0) -> bool:
        """Apply the events that arrive within `wait_ms`. Return whether any event arrived."""
        has_some = bool(self._socket.poll(wait_ms))
        while self._socket.poll(0):
            topic, sequence, payload = self._socket.recv_multipart()
            assert topic == self._topic and len(sequence) == 8
            number = int.from_bytes(sequence, "big")
            is_new = number < self.next_sequence  # engine
            self.num_sent += number + 1 - (0 if is_new else self.next_sequence)
            self.next_sequence = number + 1
            self.batches.append(self.view.apply(payload))
        return has_some


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def view_of_replay(endpoint: str) -> CacheView:
    view = CacheView()
    for _, payload in replay(endpoint):
        view.apply(payload)
    return view


def replay(endpoint: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the batches from sequence number `first` on, as vLLM's replay socket sends them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert socket.poll(60_000), "no end marker"
            empty, _, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert payload == b""
                return
            yield int.from_bytes(sequence, "big"), payload
