import re
import socket
import time

import pytest

from negamax.base.errors import ConfigError, ResourceError
from negamax.engine.nodes import health as module
from negamax.engine.nodes import wire
from negamax.engine.nodes.health import NodeHealth
from negamax.engine.nodes.heartbeats import Neighbours
from tests.probes import probe

HOST = "127.0.0.1"


def test_a_node_is_live_while_its_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    health = NodeHealth(HOST, 0)
    monkeypatch.setattr(module, "STILL_SECONDS", 0.0)
    assert probe(HOST, health.port, "/livez") == (200, "ok")
    assert probe(HOST, health.port, "/readyz") == (503, "the agent starts")
    monkeypatch.setattr(module, "STILL_SECONDS", 30.0)
    health.watch(lambda: "")
    health.turn()
    for path in ("/livez", "/readyz", "/health", "/health?verbose=1"):
        assert probe(HOST, health.port, path) == (200, "ok")
    assert probe(HOST, health.port, "/health", method="HEAD") == (200, "")
    monkeypatch.setattr(module, "STILL_SECONDS", 0.05)
    time.sleep(0.1)
    for path in ("/livez", "/readyz"):
        status, reason = probe(HOST, health.port, path)
        assert status == 503 and reason.startswith("the agent has been stuck for")


def test_other_requests_do_not_disturb_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 0.3)
    health = NodeHealth(HOST, 0)
    address = (HOST, health.port)
    slow = [socket.create_connection(address) for _ in range(50)]
    for client in slow:
        client.sendall(b"GET /livez HTT")
    assert probe(HOST, health.port, "/livez") == (200, "ok")
    assert probe(HOST, health.port, "/v1/models")[0] == 404
    assert probe(HOST, health.port, "/livez", method="POST")[0] == 405
    for words in (b"\x00" * 100_000, b"GET\r\n\r\n", b"\xff /livez\r\n\r\n", b""):
        with socket.create_connection(address) as client:
            client.settimeout(5.0)
            try:
                client.sendall(words)
                client.shutdown(socket.SHUT_WR)
                assert not client.recv(1000).startswith(b"HTTP/1.1 200")
            except ConnectionError:
                pass  # The server closes before it has read everything.
    for client in slow:  # The server has closed each slow connection at its time limit.
        client.settimeout(5.0)
        assert client.recv(100) == b""
        client.close()
    assert probe(HOST, health.port, "/livez") == (200, "ok")


def test_a_used_port_and_a_foreign_host_are_refused() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        words = f"--node-health-port {port} cannot be used at {HOST}: .*in use"
        with pytest.raises(ResourceError, match=words):
            NodeHealth(HOST, port)
    with pytest.raises(ResourceError, match=re.escape("--host 127.0.0.1 or 0.0.0.0")):
        NodeHealth("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        NodeHealth("no such host", 0)


def test_a_neighbour_that_stops_its_heartbeats_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("negamax.base.supervision.time.monotonic", lambda: now)
    neighbours = Neighbours("s", {2: ("10.0.0.3", 1), 3: ("10.0.0.4", 1)})

    def pass_seconds(seconds: float) -> str | None:
        nonlocal now
        lost = None
        for _ in range(round(seconds / 0.2)):
            now += 0.2
            lost = neighbours.lost()
        return lost

    assert pass_seconds(10.0) is None  # UDP between the nodes may be blocked.
    neighbours.receive(wire.PeerHeartbeat(2, "s", 5))
    assert pass_seconds(wire.NEIGHBOUR_SECONDS) is None
    for stale in ((2, "s", 5), (2, "s", 4), (2, "another", 9), (9, "s", 9)):
        neighbours.receive(wire.PeerHeartbeat(*stale))
    assert pass_seconds(0.4) == "node 2 sent no heartbeat for 2.6 s"
    neighbours.receive(wire.PeerHeartbeat(2, "s", 6))
    assert pass_seconds(0.2) is None
