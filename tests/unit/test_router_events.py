"""Check the router's block indexes while publishers lose events, restart, err or do not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from negamax.api.router import kv_events, servers
from negamax.api.router.kv_events import BlockIndex, EventReader
from negamax.api.router.prompt import RoutedPrompt
from negamax.api.schemas.answers import PromptBlocks
from negamax.base.errors import ConfigError
from negamax.engine.kv_event_wire import END_OF_REPLAY, SEQUENCE_BYTES
from negamax.options.route import EventAddress, RouteOptions, list_event_addresses, list_servers
from tests.e2e.conftest import eventually
from tests.ports import free_port
from tests.tables import read_table
from tests.unit.test_kv_events import make_changes, publishing
from tests.unit.test_open_request import in_loop
from tests.unit.test_router import CHAT, OK, answer_with, ask, chat, pool_of, routing

CLEARED = {"type": "AllBlocksCleared"}


def stored(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    names = {"lora_id": None, "lora_name": None, "kv_cache_spec_kind": "full_attention"}
    tokens = {"token_ids": [1] * len(hashes), "block_size": 1, "group_idx": 0}
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
    return {**event, **tokens, **names, "medium": medium}


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": 0}


def encode(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


class FakePublisher:
    """Sends chosen batches to subscribers, and answers requests for replays if it is polled."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        port = free_port()
        self.address = EventAddress(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        self.batches: list[bytes] = []
        self.peers = [self]  # all publishers of the reader
        self.num_replays = 0
        self.is_silent = False  # Whether requests for replays get no answer.
        self._live, self._replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._live.bind(self.address.endpoint)
        self._replays.bind(str(self.address.replay_endpoint))

    def send(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        self.batches.append(encode(*events))
        if not is_lost:
            number = (len(self.batches) - 1).to_bytes(SEQUENCE_BYTES, "big")
            self.send_raw(b"", number, self.batches[-1])

    def send_raw(self, *frames: bytes) -> None:
        self._live.send_multipart(frames)

    def poll(self) -> None:
        while self._replays.poll(0):
            route, _, first = self._replays.recv_multipart()
            self.num_replays += 1
            if not self.is_silent:
                for number in range(int.from_bytes(first, "big"), len(self.batches)):
                    frames = [number.to_bytes(SEQUENCE_BYTES, "big"), self.batches[number]]
                    self._replays.send_multipart([route, b"", b"", *frames])
                self._replays.send_multipart([route, b"", b"", END_OF_REPLAY, b""])

    def wait(self, check: Callable[[], bool]) -> bool:
        def is_true() -> bool:
            for peer in self.peers:
                peer.poll()
            return check()

        return eventually(is_true)


@contextmanager
def reading(count: int = 1) -> Iterator[tuple[list[FakePublisher], list[BlockIndex]]]:
    """Run a reader and publishers whose first batch it has received."""
    with zmq.Context() as context:
        publishers = [FakePublisher(context) for _ in range(count)]
        for publisher in publishers:
            publisher.peers = publishers
            publisher.send(CLEARED)
        reader = EventReader(publisher.address for publisher in publishers)
        try:
            for publisher, index in zip(publishers, reader.indexes, strict=True):
                assert publisher.wait(lambda index=index: index.is_live)
                # The publisher may notice the subscriber later than the request for a replay.
                publisher.send(stored(1))
                assert publisher.wait(lambda index=index: len(index) == 1)
            yield publishers, reader.indexes
        finally:
            reader.close()
            context.destroy(linger=0)


def hashes_in(index: BlockIndex) -> set[int]:
    return set(index._levels)


def test_a_block_is_cached_until_every_level_has_removed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = BlockIndex("")
    index.apply(7, encode(stored(1, 2, 3), stored(1, medium="CPU"), stored(9, medium="TAPE")))
    index.apply(8, encode(removed(1, 2), removed(8), removed(9, medium="TAPE")))
    assert hashes_in(index) == {1, 3}
    assert [index.count_leading(each) for each in ([1, 3, 2], [2, 1], [])] == [2, 0, 0]
    index.apply(9, encode(removed(1, medium="STORAGE"), removed(1, medium="CPU")))
    assert hashes_in(index) == {3}
    index.apply(10, encode(CLEARED, stored(5)))
    assert hashes_in(index) == {5}
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 3)
    index.apply(11, encode(stored(*range(6, 100)), stored(5, medium="CPU")))
    index.apply(12, encode(removed(5)))
    assert hashes_in(index) == {5, 6, 7} and index.num_losses == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000,
        encode({"type": "Other"}),
        msgspec.msgpack.encode([0.0, [{**stored(1), "block_hashes": ["x"]}], 0]),
    ],
)
def test_missing_and_malformed_batches_empty_the_index(payload: bytes) -> None:
    index = BlockIndex("")
    index.apply(0, encode(stored(1)))
    index.apply(2, encode(stored(2)))
    assert hashes_in(index) == {2} and index.num_losses == 1
    index.apply(3, payload)
    assert not hashes_in(index) and index.num_losses == 2
    index.apply(4, encode(stored(4)))
    assert hashes_in(index) == {4} and index.num_losses == 2


def test_lost_batches_are_replayed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_IDLE_SECONDS", 0.3)
    with reading() as ((publisher,), (index,)):
        publisher.send(stored(2, 3), is_lost=True)
        publisher.send(removed(2), is_lost=True)
        publisher.send(stored(4))
        publisher.send(stored(5))
        assert publisher.wait(lambda: hashes_in(index) == {1, 3, 4, 5})
        # No message follows the lost one.
        publisher.send(removed(4), is_lost=True)
        assert publisher.wait(lambda: hashes_in(index) == {1, 3, 5})
        assert index.num_losses == 0


def test_a_server_that_replays_nothing_loses_its_blocks_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reading() as ((publisher,), (index,)):
        monkeypatch.setattr(kv_events, "_REPLAY_SECONDS", 0.3)
        publisher.is_silent = True
        publisher.send(removed(1), is_lost=True)
        publisher.send(stored(2))
        assert publisher.wait(lambda: index.num_losses == 1)
        assert not hashes_in(index)
        publisher.send(stored(3))
        assert publisher.wait(lambda: hashes_in(index) == {3} and index.is_live)


def test_another_publisher_at_the_address_starts_with_an_empty_index() -> None:
    with reading() as ((publisher,), (index,)):
        for _ in range(3):
            publisher.send(stored(2))
        assert publisher.wait(lambda: index.next_number == 5)
        publisher.batches.clear()  # as if a proxy had hidden the restart
        publisher.send(CLEARED)
        publisher.send(stored(7))
        assert publisher.wait(lambda: hashes_in(index) == {7})


def test_a_dead_server_has_no_blocks_and_a_restarted_one_only_its_own() -> None:
    with ExitStack() as stack:
        with publishing() as publisher:
            config = publisher._config
            reader = EventReader([EventAddress(config.endpoint, config.replay_endpoint)])
            stack.callback(reader.close)
            (index,) = reader.indexes
            publisher.start()
            for at in range(5):
                publisher.publish(make_changes([at] * 8))
            assert eventually(lambda: len(index) == 10)
        assert eventually(lambda: not index.is_live and len(index) == 0)
        addresses = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
        with publishing(**addresses, buffer_steps=2) as again:
            again.start()
            for at in range(9):  # more batches than the first publisher sent
                again.publish(make_changes([50 + at] * 8))
            assert eventually(lambda: index.is_live and index.next_number == 10)
            again.publish(make_changes([99] * 8))
            assert eventually(lambda: index.next_number == 11)
            # The replay has only the latest two batches, so some blocks may be missing.
            assert 4 <= len(index) <= 20 and index.num_losses == 0


def test_malformed_events_affect_only_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_IDLE_SECONDS", 0.05)
    with reading(2) as ((broken, healthy), (bad_index, good_index)):
        number, largest = (one.to_bytes(SEQUENCE_BYTES, "big") for one in (5, 2**64 - 1))
        for frames in ((b"x",), (b"", b"1", b""), (b"", number, b"\xff"), (b"",) * 9):
            broken.send_raw(*frames)
        broken.send_raw(b"", largest, encode(stored(1)))
        assert broken.wait(lambda: bad_index.num_losses >= 3)
        broken.send_raw(b"", (2**63 - 2).to_bytes(SEQUENCE_BYTES, "big"), encode(stored(5)))
        assert broken.wait(lambda: hashes_in(bad_index) == {5})
        for at in range(2, 50):
            healthy.send(stored(at))
        assert healthy.wait(lambda: len(good_index) == 49)
        before = broken.num_replays
        assert broken.wait(lambda: broken.num_replays > before)  # The reader still runs.
        assert good_index.num_losses == 0


def make_prompt(*hashes: int) -> RoutedPrompt:
    num_tokens = 100 * len(hashes)
    return RoutedPrompt((), num_tokens, {}, PromptBlocks(num_tokens, 100, list(hashes)))


def test_the_server_with_more_cached_tokens_is_chosen_until_it_is_busier() -> None:
    indexes = [BlockIndex(""), BlockIndex("")]
    pool = pool_of(3, indexes=[[indexes[0]], [indexes[1]], []])
    first, second, _ = pool.servers
    indexes[0].apply(0, encode(stored(1, 2)))
    indexes[1].apply(0, encode(stored(1, 2, 3, 4)))
    for index in indexes:
        index.is_live = True
    known = make_prompt(1, 2, 3, 4, 5)
    call = pool.open(known)
    assert call.server is second and call.num_pending == 100 and second.num_event_hits == 1
    # The prompt of an open request counts as cached.
    assert second.count_cached(make_prompt(1, 2, 3, 4, 5, 6).blocks) == 500
    assert second.count_cached(make_prompt(1, 2, 3, 9).blocks) == 300
    assert first.count_cached(known.blocks) == 200
    call.close()
    assert second.count_cached(known.blocks) == 400
    indexes[1].apply(1, encode(removed(1)))
    assert pool.open(known).server is first
    indexes[0].is_live = False
    assert first.count_cached(known.blocks) is None and second.count_cached(None) is None


@in_loop
async def test_a_server_is_asked_for_the_blocks_of_long_prompts() -> None:
    index = BlockIndex("")
    index.apply(0, encode(stored(7, 8)))
    index.is_live = True
    async with routing(OK, OK) as (app, fakes, (pool,)):
        pool.servers[1]._indexes = [index]
        found = {"num_tokens": 1000, "block_size": 400, "block_hashes": [7, 8]}
        fakes[1].blocks = answer_with(found)
        assert (await ask(app, body=chat("x" * 4000)))[2] == b"ok"
        assert [server.num_event_hits for server in pool.servers] == [0, 1]
        asked, sent = fakes[1].heads
        assert asked.startswith(f"POST {CHAT}/kv_blocks ") and sent.startswith(f"POST {CHAT} ")
        assert fakes[1].bodies[0] == fakes[1].bodies[1]
        others = {"previous_response_id": "resp_1"}
        for path, body in ((CHAT, chat("x")), ("/x", chat("x" * 4000)), (CHAT, others)):
            await ask(app, path, body)
        pool.servers[0].is_up = False
        await ask(app, body=chat("x" * 4000))  # The only server gets the request anyway.
        assert sum(head.count("/kv_blocks ") for fake in fakes for head in fake.heads) == 1


NONSENSE = answer_with({"num_tokens": 5, "block_size": 10, "block_hashes": [1]})
FAILURES = [b"hangs", b"", answer_with({}), NONSENSE, answer_with({}, b"404 No")]


@pytest.mark.parametrize("failure", FAILURES)
@in_loop
async def test_a_server_that_cannot_name_the_blocks_is_not_asked_for_a_while(
    failure: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_BLOCKS_SECONDS", 0.1)
    index = BlockIndex("")
    index.is_live = True
    async with routing(OK, OK) as (app, fakes, (pool,)):
        pool.servers[0]._indexes, fakes[0].blocks = [index], failure
        for _ in range(3):
            assert (await ask(app, body=chat("x" * 4000)))[2] == b"ok"
        assert sum("/kv_blocks " in head for head in fakes[0].heads) == 1
        # The estimate still keeps the prompt on one server.
        assert sorted(server.num_prefix_hits for server in pool.servers) == [0, 2]
        # A refusal of the request says nothing about the server.
        pool.servers[0]._next_ask, fakes[0].blocks = 0.0, answer_with({}, b"401 No")
        for _ in range(2):
            await ask(app, body=chat("x" * 4000))
        assert sum("/kv_blocks " in head for head in fakes[0].heads) == 3


@pytest.mark.parametrize(
    ("sources", "replays", "message"),
    read_table("router_events.wrong_addresses_of_events_are_refused"),
)
def test_wrong_addresses_of_events_are_refused(
    sources: list[str], replays: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list_given(sources, replays)


def list_given(sources: list[str], replays: list[str]) -> dict[str, list[EventAddress]]:
    options = RouteOptions(kv_event_source=tuple(sources), kv_event_replay_source=tuple(replays))
    return list_event_addresses(options, list_servers(("http://a/v1",), options)[0])


def test_addresses_of_events_are_read_by_server_and_rank() -> None:
    found = list_given(["http://a/v1=tcp://b:1,ipc:///tmp/x"], ["http://a=tcp://b:2,tcp://[::1]:3"])
    assert found == {
        "http://a": [
            EventAddress("tcp://b:1", "tcp://b:2"),
            EventAddress("ipc:///tmp/x", "tcp://[::1]:3"),
        ]
    }
    assert list_given(["http://a=tcp://b:1"], []) == {"http://a": [EventAddress("tcp://b:1", None)]}
    with pytest.raises(ConfigError, match="cannot read KV events"):
        EventReader([EventAddress(f"ipc://{'x' * 300}", None)])
