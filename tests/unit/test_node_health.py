import re
import socket
import time

import pytest

from negamax.base.errors import ConfigError, ResourceError
from negamax.engine.nodes import health as module
from negamax.engine.nodes.health import NodeHealth
from tests.probes import probe

HOST = "127.0.0.1"


def test_a_node_is_live_while_it_starts_and_while_its_loop_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    health = NodeHealth(HOST, 0)
    monkeypatch.setattr(module, "STILL_SECONDS", 0.0)  # reads without a time limit
    assert probe(HOST, health.port, "/livez") == (200, "ok")
    assert probe(HOST, health.port, "/readyz") == (503, "it starts")
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
                pass  # more was sent than is read
    for client in slow:  # each connection had its time
        client.settimeout(5.0)
        assert client.recv(100) == b""
        client.close()
    assert probe(HOST, health.port, "/livez") == (200, "ok")


def test_a_used_port_and_a_foreign_host_are_refused() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        words = f"--node-health-port is {port}, which cannot be used at {HOST}: .*in use"
        with pytest.raises(ResourceError, match=words):
            NodeHealth(HOST, port)
    with pytest.raises(ResourceError, match=re.escape("--host 127.0.0.1 or 0.0.0.0")):
        NodeHealth("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        NodeHealth("no such host", 0)
