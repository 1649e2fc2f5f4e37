"""What node 0 answers to agents, which are bare sockets here."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from negamax.config.nodes import KEY_VARIABLE, NodeOptions
from negamax.engine.nodes import wire
from negamax.engine.nodes.facts import differences
from negamax.engine.nodes.group import NodeGroup
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import MachineShare
from negamax.worker.node_sockets import connect
from tests.ports import free_port

FACTS = {"Negamax": "1", "--seed": "0"}
SHARE = MachineShare("/models", None, None, None, 1, "/tmp/beats", "eth1")


class Peer:
    """An agent that says and hears what a test wants."""

    def __init__(self, context: zmq.Context[Any], port: int, *, node: int, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        connect(self.socket, f"tcp://127.0.0.1:{port}")
        self.node, self.name = node, name

    def join(self, facts: dict[str, str] = FACTS) -> None:
        share = msgspec.Raw(wire.encoder.encode(SHARE))
        self.say(wire.Join(self.node, self.name, "host", facts, share))

    def beat(self, session: str, *, death: str | None = None, silence: float = 0.0) -> None:
        self.say(wire.Beat(self.node, self.name, session, death, 1, silence))

    def say(self, message: wire.FromAgent) -> None:
        self.socket.send(wire.encoder.encode(message))

    def hear(self, kind: Any, *, seconds: float = 20.0) -> Any:
        """The next message of a kind; others are left out."""
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            message = wire.from_leader.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}")


class Setting:
    """Node 0 of two, on the loopback, and agents that may come."""

    def __init__(self) -> None:
        self.port = free_port()
        options = NodeOptions(
            nnodes=2, master_addr="127.0.0.1", master_port=self.port, interface=loopback()
        )
        self.group = NodeGroup(options, ParallelLayout(pp=2, nodes=2), facts=FACTS)
        self.context = zmq.Context()
        self.meeting = threading.Thread(target=self.group.meet, daemon=True)
        self.meeting.start()
        self.is_stopped = False

    def peer(self, name: str, *, node: int = 1) -> Peer:
        return Peer(self.context, self.port, node=node, name=name)

    def started(self, name: str) -> tuple[Peer, str]:
        """An agent whose ranks run, and its session."""
        peer = self.peer(name)
        peer.join()
        self.meeting.join(20.0)
        assert not self.meeting.is_alive()
        self.group.start()
        start = peer.hear(wire.Start)
        assert (start.first_rank, start.last_rank) == (1, 1)
        peer.beat(start.session)
        assert peer.hear(wire.Alive).session == start.session
        return peer, start.session

    def death(self, seconds: float = 20.0) -> str:
        """What node 0 says of a node that is lost, once it has rung the alarm."""
        poller = select.poll()
        poller.register(self.group.alarms[0], 0)
        assert poller.poll(1000 * seconds)
        return self.group.death() or ""


def loopback() -> str:
    return "lo0" if os.uname().sysname == "Darwin" else "lo"


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")
    made = Setting()
    yield made
    if made.meeting.is_alive():  # nobody has come
        made.peer("last").join()
        made.meeting.join(20.0)
    if not made.is_stopped:
        made.group.stop(timeout=0.0, restarts=True)
    made.context.destroy(linger=0)


def test_what_differs_is_named() -> None:
    here, there = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}
    assert list(differences(here, there, name="node 1")) == [
        "b: 2 on node 0, 4 on node 1",
        "c: 3 on node 0, unknown on node 1",
        "d: unknown on node 0, 5 on node 1",
    ]


def test_agents_that_cannot_join_are_told_why(setting: Setting) -> None:
    other = setting.peer("a")
    other.join({**FACTS, "--seed": "1"})
    assert "--seed: 0 on node 0, 1 on node 1" in other.hear(wire.Refusal).message
    stray = setting.peer("b", node=2)
    stray.join()
    assert stray.hear(wire.Refusal).message == "there is no node 2; node 0 has --nnodes 2"
    peer, session = setting.started("c")
    second = setting.peer("d")
    second.join()
    assert "node 1 (host) is there already" in second.hear(wire.Wait).reason
    second.beat("of another engine")
    assert second.hear(wire.Stop).for_good is False
    peer.beat(session)
    assert setting.group.death() is None


def test_what_an_agent_says_of_its_ranks_counts(setting: Setting) -> None:
    peer, session = setting.started("a")
    peer.beat(session, silence=4.5)
    peer.hear(wire.Alive)
    peer.hear(wire.Alive)
    assert setting.group.longest_silence() == (1, 4.5)
    peer.beat(session, death="rank 1 ended with exit code 3")
    assert setting.death() == "rank 1 ended with exit code 3 on node 1 (host)"
    assert "exit code 3" in peer.hear(wire.Stop).reason


def test_an_agent_that_ends_is_lost_at_once(setting: Setting) -> None:
    peer, _ = setting.started("a")
    peer.say(wire.Leave(peer.node, peer.name))
    assert setting.death(1.5) == "node 1 (host) was stopped"


def test_an_agent_that_lost_its_ranks_is_lost(setting: Setting) -> None:
    peer, session = setting.started("a")
    peer.beat(session)
    peer.hear(wire.Alive)
    peer.join()
    assert setting.death() == "node 1 (host) has lost its ranks"


def test_a_connection_that_is_closed_is_noticed_before_silence_is(setting: Setting) -> None:
    peer, session = setting.started("a")
    peer.beat(session)
    began = time.monotonic()
    peer.socket.close()
    assert "gives no sign of life for 1." in setting.death()
    assert time.monotonic() - began < wire.SILENCE_SECONDS


def test_a_stop_in_order_is_heard_by_all(setting: Setting) -> None:
    peer, _ = setting.started("a")
    stopping = threading.Thread(
        target=setting.group.stop, kwargs={"timeout": 1.0, "restarts": False}
    )
    stopping.start()
    assert peer.hear(wire.Stop).for_good
    peer.say(wire.Leave(peer.node, peer.name))
    stopping.join(20.0)
    assert not stopping.is_alive()
    setting.is_stopped = True
