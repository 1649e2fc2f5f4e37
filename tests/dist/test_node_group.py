import contextlib
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from negamax.base.errors import ConfigError, ResourceError
from negamax.engine.nodes import network, wire
from negamax.engine.nodes.facts import find_differences
from negamax.engine.nodes.group import NodeGroup
from negamax.engine.nodes.heartbeats import Datagrams
from negamax.options.nodes import KEY_VARIABLE, NodeOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import MachineShare
from negamax.worker.node_sockets import connect
from tests.dist.nodes import wait_until
from tests.ports import free_port

LOOPBACK = "lo0" if os.uname().sysname == "Darwin" else "lo"
FACTS = {"Negamax": "1", "--seed": "0"}
SHARE = MachineShare("/models", None, None, None, "/kv", 1, "/tmp/beats", "eth1")


class Peer:
    def __init__(self, context: zmq.Context[Any], port: int, *, node: int, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        connect(self.socket, f"tcp://127.0.0.1:{port}")
        self.datagrams = Datagrams("127.0.0.1")
        self.leader = "127.0.0.1", port
        self.node, self.name, self.num_beats = node, name, 0

    def join(self, facts: dict[str, str] = FACTS, *, last_beat: int | None = None) -> None:
        share = msgspec.Raw(wire.encoder.encode(SHARE))
        address, beat = self.datagrams.address, self.num_beats if last_beat is None else last_beat
        self.say(wire.Join(self.node, self.name, "host", address, facts, share, beat))

    def beat(self, session: str, *, death: str | None = None, silence: float = 0.0) -> None:
        self.say(self.next_beat(session, death, silence))

    def next_beat(
        self, session: str, death: str | None = None, silence: float = 0.0
    ) -> wire.AgentHeartbeat:
        self.num_beats += 1
        return wire.AgentHeartbeat(self.node, self.name, session, self.num_beats, death, 1, silence)

    def throw(self, frame: bytes) -> None:
        self.datagrams.send(frame, self.leader)

    def say(self, message: wire.FromAgent) -> None:
        self.socket.send(wire.encoder.encode(message))

    def hear(self, kind: Any, *, seconds: float = 20.0) -> Any:
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            message = wire.from_node_0.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}")


class Setting:
    def __init__(self) -> None:
        self.port = free_port()
        self.group = NodeGroup(options(self.port), ParallelLayout(pp=2, nodes=2), facts=FACTS)
        self.context = zmq.Context()
        self.meeting = threading.Thread(target=self.group.meet, daemon=True)
        self.meeting.start()
        self.is_stopped = False

    def peer(self, name: str, *, node: int = 1) -> Peer:
        return Peer(self.context, self.port, node=node, name=name)

    def started(self, name: str) -> tuple[Peer, str]:
        peer = self.peer(name)
        peer.join()
        self.meeting.join(20.0)
        assert not self.meeting.is_alive()
        self.group.start()
        start = peer.hear(wire.StartRanks)
        assert (start.first_rank, start.last_rank) == (1, 1)
        peer.beat(start.session)
        assert peer.hear(wire.Node0Heartbeat).session == start.session
        return peer, start.session

    def death(self, seconds: float = 20.0) -> str:
        poller = select.poll()
        poller.register(self.group.alarms[0], 0)
        assert poller.poll(1000 * seconds)
        return self.group.death() or ""


def silence(words: str) -> float:
    """Return the seconds that the reason reports. On a stalled machine they exceed the limit."""
    match = re.search(r"sends no heartbeat for (\d+\.\d) s", words)
    assert match, words
    return float(match[1])


def options(port: int) -> NodeOptions:
    return NodeOptions(nnodes=2, master_addr="127.0.0.1", master_port=port, interface=LOOPBACK)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")
    made = Setting()
    yield made
    if made.meeting.is_alive():  # No agent has connected.
        made.peer("last").join()
        made.meeting.join(20.0)
    if not made.is_stopped:
        made.group.stop(timeout=0.0, restarts=True)
    made.context.destroy(linger=0)


def test_differences_are_named() -> None:
    here, there = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}
    assert list(find_differences(here, there, name="node 1")) == [
        "b: 2 on node 0, 4 on node 1",
        "c: 3 on node 0, unknown on node 1",
        "d: unknown on node 0, 5 on node 1",
    ]


def test_refused_agents_get_the_reason(setting: Setting) -> None:
    other = setting.peer("a")
    other.join({**FACTS, "--seed": "1"})
    assert "--seed: 0 on node 0, 1 on node 1" in other.hear(wire.Refusal).message
    stray = setting.peer("b", node=2)
    stray.join()
    assert stray.hear(wire.Refusal).message == "--node-rank is 2; allowed: 0 to 1"
    peer, session = setting.started("c")
    second = setting.peer("d")
    second.join()
    assert "node 1 (host) has already joined" in second.hear(wire.Wait).reason
    second.beat("of another engine")
    assert second.hear(wire.StopRanks).for_good is False
    peer.beat(session)
    assert setting.group.death() is None


def test_an_agent_reports_its_ranks(setting: Setting) -> None:
    peer, session = setting.started("a")
    peer.beat(session, silence=4.5)
    peer.hear(wire.Node0Heartbeat)
    peer.hear(wire.Node0Heartbeat)
    assert setting.group.longest_silence() == (1, 4.5)
    peer.throw(wire.encoder.encode(peer.next_beat(session, "rank 1 ended with exit code 3")))
    assert setting.death() == "rank 1 ended with exit code 3 on node 1 (host)"
    assert "exit code 3" in peer.hear(wire.StopRanks).reason
    ends: list[str | None] = []
    deadline = time.monotonic() + 5.0
    while not any(ends) and time.monotonic() < deadline:
        ends += [wire.heartbeat.decode(frame).end for frame, _ in peer.datagrams.receive()]
        time.sleep(0.02)
    assert ends[-1] == "rank 1 ended with exit code 3 on node 1 (host)"


def test_a_leaving_agent_is_lost_at_once(setting: Setting) -> None:
    peer, _ = setting.started("a")
    peer.say(wire.Leave(peer.node, peer.name))
    assert setting.death(1.5) == "node 1 (host) was stopped"


def test_an_agent_that_lost_its_ranks_is_lost(setting: Setting) -> None:
    peer, session = setting.started("a")
    peer.beat(session)
    peer.hear(wire.Node0Heartbeat)
    peer.join()
    assert setting.death() == "node 1 (host) has lost its ranks"


def test_a_join_that_a_heartbeat_overtook_is_no_loss(setting: Setting) -> None:
    """Let a heartbeat by UDP overtake the join by TCP, as after a packet loss."""
    peer, session = setting.started("a")
    peer.join(last_beat=0)
    peer.beat(session)
    peer.hear(wire.Node0Heartbeat)
    peer.hear(wire.Node0Heartbeat)
    assert setting.group.death() is None


@pytest.mark.parametrize("living", ["", "stalled before", "heartbeat after"])
def test_connection_that_an_agent_closes_shortens_the_limit(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, living: str
) -> None:
    """After an interruption, ZeroMQ closes a connection that delivers nothing."""
    monkeypatch.setattr(wire, "DISCONNECTED_SECONDS", 0.6)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 1.2 if living else 60.0)
    (peer, session), (node,) = setting.started("a"), setting.group._nodes
    wait_until(lambda: node.last_beat == peer.num_beats)
    while living == "stalled before" and node.stall._seconds < 2 * wire.DISCONNECTED_SECONDS:
        peer.throw(wire.encoder.encode(peer.next_beat(session)))
        time.sleep(wire.BEAT_SECONDS)
    peer.socket.close()
    if living == "heartbeat after":
        wait_until(lambda: node.is_disconnected)
        peer.throw(wire.encoder.encode(peer.next_beat(session)))
    assert (1.2 if living else 0.6) <= silence(setting.death()) < 60.0


def test_datagrams_count_as_heartbeats_unless_old_or_foreign(setting: Setting) -> None:
    peer, session = setting.started("a")
    stranger = Datagrams("127.0.0.1")
    stranger._key = b"another"
    first = wire.encoder.encode(peer.next_beat(session))
    second = peer.next_beat(session)
    peer.say(second)  # TCP may be faster than UDP.
    peer.hear(wire.Node0Heartbeat)
    peer.throw(wire.encoder.encode(second))
    began = time.monotonic()
    heard: list[Any] = []
    while time.monotonic() < began + 1.25 * wire.SILENCE_SECONDS:
        peer.throw(wire.encoder.encode(peer.next_beat(session)))
        time.sleep(wire.BEAT_SECONDS)
        heard += [wire.heartbeat.decode(frame) for frame, _ in peer.datagrams.receive()]
    assert setting.group.death() is None
    assert {each.session for each in heard} == {session} and len(heard) > 5
    assert [each.number for each in heard] == sorted({each.number for each in heard})
    peer.throw(b"no message")
    stopped = threading.Event()

    def repeat() -> None:  # Repeated lines must not count as heartbeats.
        late = wire.encoder.encode(peer.next_beat("another session"))
        new = wire.encoder.encode(peer.next_beat(session))
        while not stopped.wait(wire.BEAT_SECONDS):
            peer.throw(first)
            peer.throw(late)
            stranger.send(new, peer.leader)

    repeating = threading.Thread(target=repeat)
    repeating.start()
    try:
        assert silence(setting.death()) >= wire.SILENCE_SECONDS
    finally:
        stopped.set()
        repeating.join()


def test_a_stalled_connection_is_lost(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.5)
    peer, session = setting.started("a")
    while setting.group.death() is None:
        peer.throw(wire.encoder.encode(peer.next_beat(session)))
        time.sleep(0.05)
    assert "sends heartbeats by UDP, but no message by TCP for 0." in setting.death()


def test_foreign_connections_do_not_affect_a_node(setting: Setting) -> None:
    peer, session = setting.started("a")
    peer.beat(session)
    peer.hear(wire.Node0Heartbeat)
    for _ in range(3):
        socket.create_connection(("127.0.0.1", setting.port)).close()
    assert silence(setting.death()) >= wire.SILENCE_SECONDS


def test_a_lost_start_is_repeated(setting: Setting) -> None:
    peer = setting.peer("a")
    peer.join()
    setting.meeting.join(20.0)
    setting.group.start()
    start = peer.hear(wire.StartRanks)
    peer.join()
    assert peer.hear(wire.StartRanks) == start
    peer.beat(start.session)
    assert peer.hear(wire.Node0Heartbeat).session == start.session


def test_a_used_udp_port_is_named() -> None:
    port = free_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(ResourceError, match=f"UDP port {port} on 127.0.0.1 .* in use"):
            NodeGroup(options(port), ParallelLayout(pp=2, nodes=2), facts=FACTS)


def test_strangers_take_few_descriptors_and_no_memory(setting: Setting) -> None:
    files, address = Path("/dev/fd"), ("127.0.0.1", setting.port)
    most = len(list(files.iterdir())) + 400 + 150
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_connection(address, timeout=20))
        first.sendall(greeting + b"\x06" + (700 * 2**20).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionError):
            while first.recv(4096):
                pass
        for _ in range(400):
            stack.enter_context(socket.create_connection(address, timeout=20))
        wait_until(lambda: len(list(files.iterdir())) <= most)
    setting.started("a")


def test_several_machines_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    for host in ("127.0.0.1", "::1"):
        network.check_key(NodeOptions(nnodes=2, master_addr=host))
    for host in ("192.0.2.1", "no.invalid"):
        with pytest.raises(ConfigError, match=rf"{KEY_VARIABLE} is not set.*{host}.*openssl"):
            network.check_key(NodeOptions(nnodes=2, master_addr=host))
    monkeypatch.setenv(KEY_VARIABLE, "k")
    network.check_key(NodeOptions(nnodes=2, master_addr="192.0.2.1"))


def test_an_orderly_stop_reaches_agents(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    peer, session = setting.started("a")
    setting.group.expect_end()
    for _ in range(3):
        peer.beat(session, death="rank 1 ended with exit code 0")
        peer.hear(wire.Node0Heartbeat)
    options = {"timeout": 1.0, "restarts": False}
    stopping = threading.Thread(target=setting.group.stop, kwargs=options)
    stopping.start()
    stop = peer.hear(wire.StopRanks)
    assert stop.for_good and stop.reason == "node 0 ends"
    peer.say(wire.Leave(peer.node, peer.name))
    stopping.join(20.0)
    assert not stopping.is_alive() and setting.group.death() is None
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    setting.is_stopped = True


def test_unanswered_connection_is_tried_again() -> None:
    """The system alone would repeat a lost packet only seconds after the link is back."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        peer = context.socket(zmq.DEALER)
        events = peer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        connect(peer, f"tcp://127.0.0.1:{full.getsockname()[1]}")
        assert events.poll(30_000)
        peer.disable_monitor()
