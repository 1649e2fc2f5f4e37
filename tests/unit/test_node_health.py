import re
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from negamax.base.errors import ConfigError, ResourceError
from negamax.cli.main import app, main
from negamax.cli.resolve import resolve
from negamax.engine.nodes import health as module
from negamax.engine.nodes import ray_launcher, wire
from negamax.engine.nodes.health import NodeHealth
from negamax.engine.nodes.heartbeats import Neighbours
from negamax.engine.nodes.placement import ClusterNode, RayPlacement, Resources, make_placement
from negamax.engine.nodes.ray_driver import find_cluster, make_paths_absolute
from negamax.options.engine import EngineOptions
from tests.probes import probe
from tests.tables import read_table

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


GROUP: Any = typer.main.get_command(app)
RAY = {"distributed_executor_backend": "ray"}


def placement(*nodes: tuple[float, float], **options: Any) -> RayPlacement:
    total = Resources(gpus=8, cpus=64)
    named = [(str(at), f"10.0.0.{at + 1}", Resources(*free)) for at, free in enumerate(nodes)]
    cluster = [ClusterNode(name, address, total, free) for name, address, free in named]
    return make_placement(EngineOptions("nano", **RAY, **options), cluster, "0")


@pytest.mark.parametrize(
    ("nodes", "options", "count"),
    [
        ([(8, 64)], {"tensor_parallel_size": 8}, 1),
        ([(8, 64), (8, 64)], {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 1),
        ([(4, 64), (8, 64)], {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 2),
        ([(8, 64), (8, 64)], {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, 2),
        # --nnodes sets the number of machines.
        ([(8, 64)] * 4, {"data_parallel_size": 4, "nnodes": 4}, 4),
        # The machines include the one that serves.
        ([(0, 64), (8, 64)], {"tensor_parallel_size": 8}, None),
        ([(0, 64), (8, 64), (8, 64)], {"data_parallel_size": 4}, None),
        # Each rank needs a CPU.
        ([(8, 3), (8, 64)], {"data_parallel_size": 4}, 2),
        ([(8, 1), (8, 64)], {"data_parallel_size": 4}, None),
        # Tensor-parallel ranks stay on one machine.
        ([(8, 64), (8, 64)], {"tensor_parallel_size": 16}, None),
        ([(8, 64), (8, 64)], {"tensor_parallel_size": 16, "allow_cross_node_tp": True}, 2),
        # On CPUs a rank needs one CPU per thread.
        ([(0, 4), (0, 4)], {"data_parallel_size": 2, "device": "cpu", "num_threads": 4}, 2),
        ([(0, 4), (0, 4)], {"data_parallel_size": 2, "device": "cpu"}, 1),
    ],
)
def test_the_fewest_machines_with_room_are_chosen(
    nodes: list[tuple[float, float]], options: dict[str, Any], count: int | None
) -> None:
    assert placement(*nodes, **options).choose() == count


def test_resources_of_each_machine() -> None:
    wanted = placement((8, 64), (8, 64), tensor_parallel_size=8, pipeline_parallel_size=2)
    assert wanted.share(2) == Resources(gpus=8, cpus=8)
    assert (wanted.device, wanted.master_addr, wanted.is_on_loopback) == ("cuda", "10.0.0.1", False)
    node = ClusterNode("a", "127.0.0.1", Resources(0, 2), Resources(0, 2))
    alone = make_placement(EngineOptions("nano", num_threads=2, **RAY), [node], "a")
    assert alone.share(1) == Resources(gpus=0, cpus=2)
    assert (alone.device, alone.master_addr, alone.is_on_loopback) == ("cpu", "127.0.0.1", True)
    with pytest.raises(ResourceError, match="not in the Ray cluster"):
        make_placement(EngineOptions("nano", **RAY), [node], "b")
    nodes = [
        ClusterNode("head", "10.0.0.1", Resources(0, 8), Resources(0, 8)),
        ClusterNode("gpus", "10.0.0.2", Resources(8, 64), Resources(8, 64)),
    ]
    options = EngineOptions("nano", tensor_parallel_size=8, **RAY)
    refusal = str(make_placement(options, nodes, "head").refusal(1.0))
    assert "on a machine with 8 GPUs and 8 CPUs, such as 10.0.0.2" in refusal
    assert EngineOptions("nano", nnodes=2, data_parallel_size=2, **RAY).nodes.master_addr is None


@pytest.mark.parametrize(
    ("nodes", "options", "words"),
    [
        (
            [(4, 60), (8, 64)],
            {"tensor_parallel_size": 8},
            "no room for 8 ranks in 3 s; needed: 8 GPUs and 8 CPUs on this one; available: this "
            "machine 10.0.0.1: 4 of 8 GPUs, 60 of 64 CPUs; 10.0.0.2: 8 of 8 GPUs, 64 of 64 CPUs "
            "(end programs that use the resources, or raise --ray-placement-timeout)",
        ),
        (
            [(8, 64), (8, 64)],
            {"tensor_parallel_size": 16},
            "(use --tensor-parallel-size 8 with --pipeline-parallel-size 2 or "
            "--data-parallel-size 2, or add --allow-cross-node-tp)",
        ),
        (
            [(8, 64)] * 20,
            {"tensor_parallel_size": 8, "pipeline_parallel_size": 32},
            "32 machines with 8 GPUs and 8 CPUs each, this one among them; available: this machine",
        ),
        ([(8, 64)] * 20, {"data_parallel_size": 512}, "; and 4 more (use smaller sizes, or add"),
    ],
)
def test_refusals(nodes: list[tuple[float, float]], options: dict[str, Any], words: str) -> None:
    wanted = placement(*nodes, **options)
    assert wanted.choose() is None
    assert words in str(wanted.refusal(3.0))


@pytest.mark.parametrize(
    ("options", "words"), read_table("node_health.options_incompatible_with_ray_are_refused")
)
def test_options_incompatible_with_ray_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineOptions("nano", **(RAY | options))


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("--distributed-executor-backend ray", "ray"), ("--distributed-executor-backend uni", "mp"),
        ("--use-ray", "ray"), ("--worker-use-ray", "ray"), ("--data-parallel-backend ray", "ray"),
        ("-dpb mp", "mp"),
    ],
)  # fmt: skip
def test_other_names_of_the_backend(words: str, backend: str | None) -> None:
    choices = resolve(GROUP, ["serve", "nano", *words.split()]).choices
    chosen = choices.get("distributed_executor_backend")
    assert (chosen and chosen.words[-1].partition("=")[2]) == backend


@pytest.mark.parametrize("words", ["--distributed-executor-backend ray", "--use-ray", "-dpb ray"])
def test_ignores_variables_of_other_launchers(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    for name, value in {"GROUP_SIZE": "2", "WORKER_INDEX": "0", "LEADER_ADDRESS": "a"}.items():
        monkeypatch.setenv(f"LWS_{name}", value)
    line = ["serve", "nano", "-pp", "2"]
    assert "nnodes" in resolve(GROUP, line).choices
    assert "nnodes" not in resolve(GROUP, [*line, *words.split()]).choices


def test_missing_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ray_launcher, "find_spec", lambda name: None)
    line = shlex.split("serve nano --distributed-executor-backend ray")
    for words in (line, [*line, "--explain"]):
        assert main(words) == 2
        assert "pip install 'negamax[ray]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="needs Ray, which is not installed"):
        ray_launcher.RayLauncher(EngineOptions("nano", **RAY))


def test_order_of_cluster_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert find_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert find_cluster() == address
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert find_cluster() == address
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert find_cluster() is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert find_cluster() is None  # The cluster has ended.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("auto", "no Ray cluster answers"),
        ("127.0.0.1:1", "no Ray cluster answers"),
        ("ray://head:10001", "node 0 must be a machine of the cluster"),
        ("head", "allowed: HOST:PORT"),
    ],
)
def test_a_named_cluster_must_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, words: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ConfigError, match=words):
        find_cluster()


def test_agents_get_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    options = EngineOptions("model", speculative_config={"method": "eagle3", "model": "org/draft"})
    found = make_paths_absolute(options)
    assert found.model == str(tmp_path / "model")
    assert found.speculative_config == options.speculative_config
    assert make_paths_absolute(EngineOptions("org/model")).model == "org/model"
    for name in ("nano", "nano-draft"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    draft = {"method": "eagle3", "model": "nano-draft"}
    found = make_paths_absolute(
        EngineOptions("nano", speculative_config=draft, weight_cache="nano")
    )
    assert (found.model, found.speculative_config) == ("nano", draft)
    assert found.weight_cache == str(tmp_path / "nano")
