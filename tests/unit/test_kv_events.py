from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.api.router.kv_events import BlockIndex
from negamax.base.errors import ConfigError
from negamax.engine.core.kv_events import KEPT_STEPS, CacheMirror, EventPublisher
from negamax.engine.kv_event_wire import EventBatch, KvEvent
from negamax.options.engine import EngineOptions
from negamax.options.kv_events import KvEventsConfig, listens
from negamax.scheduler.cache_log import CacheLog
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.prefix_cache import BlockHashes
from tests.e2e.conftest import eventually
from tests.ports import free_port
from tests.unit.event_support import (
    AllBlocksCleared,
    CacheView,
    Subscriber,
    replay,
    resident_bytes,
    shorten,
    view_of_replay,
)
from tests.unit.plan_support import make_limits
from tests.unit.test_file_tier import FileTrace
from tests.unit.test_scheduler_traces import any_limits

ENABLED: dict[str, Any] = {"enable_kv_cache_events": True}


def read(given: dict[str, Any], num_ranks: int = 1) -> KvEventsConfig | None:
    return KvEventsConfig.read(given, num_ranks=num_ranks)


def test_configs_of_vllm_and_sglang_enable_events_on_loopback() -> None:
    assert read(ENABLED) == read({"publisher": "zmq"}) == KvEventsConfig()
    assert KvEventsConfig().endpoint == "tcp://127.0.0.1:5557"
    for off in (
        {},
        {"publisher": "null"},
        {"topic": "x"},
        ENABLED | {"publisher": "null"},
        {"enable_kv_cache_events": False, "publisher": "zmq"},
    ):
        assert read(off) is None
    config = read(ENABLED | {"endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6010"}, 8)
    assert config is not None
    assert config.add_rank(3).endpoint == "tcp://*:6003"
    assert config.add_rank(7).replay_endpoint == "tcp://*:6017"
    assert KvEventsConfig("ipc:///tmp/a").add_rank(2).endpoint == "ipc:///tmp/a_dp2"
    own = ("*:1", "127.0.0.1:1", "localhost:1", "0.0.0.0:1", "[::1]:1", "[::]:1")
    assert all(listens(f"tcp://{address}") for address in own)
    assert not listens("tcp://router.svc:5557") and not listens("tcp://10.0.0.5:5557")


@pytest.mark.parametrize(
    ("given", "num_ranks", "part"),
    [
        ({"endpont": "tcp://*:5557"}, 1, "did you mean endpoint?"),
        ({"enable_kv_cache_events": "yes"}, 1, "allowed: true or false"),
        ({"publisher": "nats"}, 1, "publisher is 'nats'; allowed: zmq or null"),
        ({"hwm": 0}, 1, "hwm is 0; allowed: a whole number, 1 to"),
        ({"max_queue_size": True}, 1, "max_queue_size is True"),
        ({"buffer_steps": 2**40}, 1, "buffer_steps is 1099511627776"),
        ({"topic": 5}, 1, "topic is 5; allowed: a string"),
        ({"endpoint": "udp://h:1"}, 1, "endpoint is 'udp://h:1'; allowed: tcp://HOST:PORT"),
        ({"endpoint": "tcp://*"}, 1, "endpoint is 'tcp://*'"),
        ({"endpoint": "tcp://*:65530"}, 8, "with a port for each rank"),
        ({"endpoint": None}, 1, "endpoint is None"),
        ({"replay_endpoint": "tcp://router:5558"}, 1, "an address of this machine"),
        ({"replay_endpoint": "tcp://*:5558"}, 2, "the ports 5557 and 5558 overlap"),
    ],
)
def test_bad_configs_are_refused(given: dict[str, Any], num_ranks: int, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineOptions("nano", data_parallel_size=num_ranks, kv_events_config=ENABLED | given)
    assert "--kv-events-config" in str(refused.value) and part in str(refused.value)
    assert refused.value.exit_code == 2


def test_events_need_a_prefix_cache_and_a_free_address() -> None:
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching turns the cache off"):
        EngineOptions("nano", enable_prefix_caching=False, kv_events_config=ENABLED)
    words = r"cannot listen at endpoint tcp.*in use"
    with publishing() as publisher, pytest.raises(ConfigError, match=words):
        EventPublisher(publisher._config, 0)


def make_changes(tokens: list[int], *, salt: str = "", stop: int | None = None) -> CacheLog:
    """Make the change that stores a chain of blocks of 4 tokens in the KV cache."""
    chain = BlockHashes(tokens, block_size=4, salt=salt)
    hashes = [chain[index] for index in range(len(tokens) // 4)]
    return CacheLog([(chain, 0, len(hashes))], [(each, True) for each in hashes[:stop]], [])


def encode(events: list[KvEvent]) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, events, 0))


def test_events_on_the_wire_are_maps_in_a_list() -> None:
    """Check the format that vLLM has sent since June 2026 (vllm#42892)."""
    tokens = [5, 300, 70_000, 2, 1, 1, 1, 1]
    changes = make_changes(tokens, salt="team/a")
    first, second = (shorten(block_hash) for block_hash, _ in changes.kv)
    mirror = CacheMirror()
    stored = mirror.apply(changes)
    host = CacheLog([], [], [(changes.kv[1][0], True)])
    removed = mirror.apply(CacheLog([], [(changes.kv[0][0], False)], []))
    events = [*stored, *mirror.apply(host), *removed, *mirror.clear()]
    batch: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, events, 3)))
    names = {"lora_id": None, "lora_name": None, "block_size": 4, "group_idx": 0}
    names |= {"type": "BlockStored", "kv_cache_spec_kind": "full_attention"}
    hashes = {"block_hashes": [first, second], "parent_block_hash": None, "medium": "GPU"}
    assert batch == [
        1.5,
        [
            {**names, **hashes, "token_ids": tokens, "extra_keys": [["team/a"], None]},
            {
                **names,
                "block_hashes": [second],
                "parent_block_hash": first,
                "medium": "CPU",
                "token_ids": tokens[4:],
            },
            {"type": "BlockRemoved", "block_hashes": [first], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


class EventTrace(FileTrace):
    """Compare a subscriber's view with the blocks of the cache after every step."""

    def __init__(self, *limits: Any, **rules: Any) -> None:
        super().__init__(*limits, **rules)
        self.followers = {rank: (CacheMirror(), CacheView()) for rank in self.scheduler.ranks}
        self.indexes = {rank: BlockIndex("") for rank in self.scheduler.ranks}  # of a router
        self.is_second = False
        self.counts = Counter[tuple[str, str | None]]()

    def restart(self) -> EventTrace:
        again = super().restart()
        assert isinstance(again, EventTrace)
        again.is_second = True
        return again

    def check_counters(self) -> None:
        super().check_counters()
        self.follow()

    def follow(self) -> None:
        for rank, (mirror, view) in self.followers.items():
            assert rank.cache_log is not None
            changes = rank.cache_log.take()
            events = [] if changes is None else mirror.apply(changes)
            if events:
                payload = encode(events)
                index = self.indexes[rank]
                index.apply(index.next_number or 0, payload)
                batch = view.apply(payload)
                assert index._levels.keys() == set().union(*view.cached.values())
                for event in batch.events:
                    if not isinstance(event, AllBlocksCleared):
                        self.counts[type(event).__name__, event.medium] += len(event.block_hashes)
            pools = {"GPU": rank._pool._block_of, "CPU": rank.host.blocks._block_of}
            for medium, index in (*pools.items(), ("STORAGE", rank.host.files._index)):
                unknown = mirror._unknown[medium].keys()
                assert view.cached[medium] == set(map(shorten, index.keys() - unknown))
                assert unknown <= index.keys() and (self.is_second or not unknown)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    limits=any_limits(),
    sizes=st.sampled_from(((0, 0), (10, 0), (10, 200), (60, 20))),  # blocks in memory, and files
    seed=st.integers(0, 2**32),
    num_ranks=st.sampled_from((1, 2)),
    depth=st.integers(0, 2),
)
def test_events_tell_the_content_of_the_cache(
    limits: SchedulerLimits, sizes: tuple[int, int], num_ranks: int, **rules: Any
) -> None:
    """Run two engines; the second one finds the files of the first."""
    limits = replace(
        limits,
        num_blocks=min(limits.num_blocks, limits.max_model_len // limits.block_size + 6),
        num_host_blocks=sizes[0],
        num_file_blocks=sizes[1],
        enable_prefix_caching=True,
        logs_cache_changes=True,
    )
    first = EventTrace(limits, num_ranks, trouble=True, **rules)
    first.run(25)
    second = first.restart()
    second.run(25)
    for trace in (first, second):
        trace.follow()
    for rank, (mirror, _) in [*first.followers.items(), *second.followers.items()]:
        for _ in range(KEPT_STEPS + 1):
            mirror.apply(CacheLog([], [], []))
        known = {*rank._pool._block_of, *rank.host.blocks._block_of, *rank.host.files._index}
        known.difference_update(*mirror._unknown.values())
        assert mirror._runs.keys() == known, "descriptions of evicted blocks remain"


def test_random_traces_have_all_events() -> None:
    """Check that random traces have events of all kinds; else the traces above prove nothing."""
    sizes = {"block_size": 2, "num_blocks": 26, "num_host_blocks": 30, "num_file_blocks": 80}
    limits = make_limits(**sizes, max_model_len=50, logs_cache_changes=True)
    traces = [EventTrace(limits, seed=seed, depth=1, trouble=True) for seed in range(3)]
    for trace in traces:
        trace.run(100)
    traces += [trace.restart() for trace in traces]
    for trace in traces[3:]:
        trace.run(100)
    for medium, least in (("GPU", 600), ("CPU", 600), ("STORAGE", 180)):
        assert sum(trace.counts["BlockStored", medium] for trace in traces[:3]) > least
        assert sum(trace.counts["BlockRemoved", medium] for trace in traces[:3]) > 100
        assert sum(trace.counts["BlockStored", medium] for trace in traces[3:]) > least


def test_blocks_that_another_sequence_stored_first_split_a_run() -> None:
    changes = make_changes(list(range(40)))
    missing = replace(changes, kv=[pair for at, pair in enumerate(changes.kv) if at not in (3, 4)])
    view = CacheView()
    mirror = CacheMirror()
    first = mirror.apply(make_changes(list(range(20))))
    for events in (first, mirror.apply(CacheLog([], [(changes.kv[1][0], False)], []))):
        view.apply(encode(events))
    kv = [changes.kv[1], *changes.kv[5:]]
    view.apply(encode(mirror.apply(replace(missing, kv=kv))))
    assert view.cached["GPU"] == {shorten(block_hash) for block_hash, _ in changes.kv}


def test_blocks_from_elsewhere_are_told_when_their_tokens_are_known() -> None:
    changes = make_changes(list(range(12)), salt="a")
    mirror, view = CacheMirror(), CacheView()
    host = [(block_hash, True) for block_hash, _ in changes.kv]
    assert mirror.apply(CacheLog([], changes.kv, host)) == []
    assert mirror.apply(CacheLog([], [(changes.kv[2][0], False)], [])) == []
    (chain, _, _) = changes.chains[0]
    for stop in (0, 2, 3):  # number of blocks that admitted sequences share
        events = mirror.apply(CacheLog([(chain, 0, stop)], [], []))
        assert bool(events) == bool(stop)
        view.apply(encode(events)) if events else None
    names = [shorten(block_hash) for block_hash, _ in changes.kv]
    assert view.cached == {"GPU": set(names[:2]), "CPU": set(names)}
    assert mirror.apply(CacheLog([(chain, 0, 3)], [], [])) == []
    reset = [(name, False) for name, _ in host]
    (event,) = mirror.apply(CacheLog([], reset[:2], reset))
    assert type(event).__name__ == "AllBlocksCleared"


@contextmanager
def publishing(**changes: Any) -> Iterator[EventPublisher]:
    port = free_port()
    endpoints = {
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 1}",
    }
    with closing(EventPublisher(KvEventsConfig(**endpoints | changes), 0)) as publisher:
        yield publisher


def test_first_blocks_follow_a_clear_and_late_subscribers_catch_up() -> None:
    with publishing(topic="kv-events", buffer_steps=4) as publisher:
        publisher.start()
        changes = [make_changes([at] * 8) for at in range(6)]
        with Subscriber(publisher._config.endpoint, "kv-events") as early:
            early.receive(wait_ms=500)  # The subscriber has connected when this call returns.
            for each in changes:
                publisher.publish(each)
            assert eventually(lambda: early.receive(wait_ms=20) and early.next_sequence == 7)
            assert early.view.num_cleared == 1 + (len(early.batches) == 7)
            assert len(early.view.cached["GPU"]) == 12
        assert publisher._config.replay_endpoint is not None
        kept = list(replay(publisher._config.replay_endpoint, 4))
        assert [sequence for sequence, _ in kept] == [4, 5, 6]
        late = CacheView()
        for sequence, payload in replay(publisher._config.replay_endpoint):
            late.apply(payload)
            assert sequence >= 3  # `buffer_steps` ago
        assert late.cached["GPU"] < early.view.cached["GPU"] and len(late.cached["GPU"]) == 8


def test_a_full_queue_drops_changes_and_clears_the_view() -> None:
    with publishing(max_queue_size=2) as publisher:
        for at in range(5):
            publisher.publish(make_changes([at] * 8))  # The publisher's thread does not run yet.
        assert publisher.num_dropped == 3
        publisher.start()
        assert eventually(lambda: publisher.num_batches == 3)
        # The step reports a block that an earlier, dropped batch had stored.
        known, unknown = make_changes([1] * 8), make_changes([4] * 8)
        publisher.publish(CacheLog([], [(known.kv[0][0], False)], [unknown.kv[0]]))
        assert eventually(lambda: publisher.num_batches == 4 and publisher._queue.empty())
        publisher.publish(make_changes([9] * 8))
        assert eventually(lambda: publisher.num_batches == 5)
        assert publisher._config.replay_endpoint is not None
        view = view_of_replay(publisher._config.replay_endpoint)
        assert view.num_cleared == 3
        assert view.cached == {"GPU": {shorten(name) for name, _ in make_changes([9] * 8).kv}}


def test_a_subscriber_that_does_not_read_blocks_nothing() -> None:
    with publishing(hwm=1) as publisher:
        publisher.start()
        with Subscriber(publisher._config.endpoint) as slow:
            slow.receive(wait_ms=500)
            changes = make_changes(list(range(20_000)))
            for _ in range(300):  # 20 MB are more than the buffers of the sockets hold.
                publisher.publish(changes)
            assert eventually(lambda: publisher.num_batches == 301)
            assert publisher.num_dropped == 0
            received = []
            while slow._socket.poll(500):
                received.append(slow._socket.recv_multipart()[1])
            assert 0 < len(received) < 300 and received == sorted(received)


def test_peers_that_never_read_share_the_batches_and_large_frames_are_refused() -> None:
    with zmq.Context() as context, ExitStack() as stack:
        publisher = stack.enter_context(publishing())
        publisher.start()
        address = publisher._config.replay_endpoint
        assert address is not None
        changes = make_changes(list(range(20_000)))
        for _ in range(1000):  # 60 MB
            publisher.publish(changes)
        assert eventually(lambda: publisher.num_batches == 1001)
        before = resident_bytes()
        peers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(20)]
        for peer in peers:
            peer.linger, peer.rcvhwm = 0, 1
            peer.connect(address)
            peer.send_multipart([b"", bytes(8)])
        assert eventually(lambda: all(peer.poll(0) for peer in peers))
        assert len(list(replay(address))) == 1001
        assert resident_bytes() < before + 2**28
        for kind, endpoint in ((zmq.DEALER, address), (zmq.XSUB, publisher._config.endpoint)):
            large = stack.enter_context(context.socket(kind))
            monitor = stack.enter_context(large.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            large.linger = 0
            large.connect(endpoint)
            large.send(b"\2" * 2**20)
            assert monitor.poll(5000)
