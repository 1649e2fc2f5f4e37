import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from negamax import LLM, SamplingParams
from negamax.engine.nodes.ray_driver import Driver, cluster_nodes
from negamax.options.engine import EngineOptions
from tests.dist.nodes import seconds_until_error
from tests.e2e.conftest import Server, eventually, launch, serving
from tests.e2e.listening import process_tree
from tests.ports import free_port

if find_spec("ray") is None:
    pytest.skip("Ray is not installed here: pip install 'negamax[ray]'", allow_module_level=True)

pytestmark = pytest.mark.full

PROMPTS = ["What is 47 + 38?", "Hello!", "Who are you?", "A box holds 24 pencils. How many"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--log-level", "warning", "--use-ray")
MACHINE = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
NOTICED_SECONDS = 3.0
START_SECONDS = 120.0
GONE_SECONDS = 15.0
# Without the last variable, Ray would listen on all addresses of the machine.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class VirtualCluster:
    """Run a head and other machines with one CPU each; this process drives the cluster."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        head = {"include_dashboard": False, "num_cpus": 1} | MACHINE
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.machines = [self.add() for _ in range(2)]
        self.connect()

    def connect(self) -> None:
        import ray

        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")

    def disconnect(self) -> None:
        import ray

        ray.shutdown()

    def add(self, **resources: int) -> Any:
        return self.cluster.add_node(**({"num_cpus": 1} | resources | MACHINE))

    def agents(self) -> dict[str, int]:
        from ray._private.state import actors

        return {
            actor["Address"]["NodeID"]: actor["Pid"]
            for actor in actors().values()
            if actor["State"] == "ALIVE"
        }

    def agent_elsewhere(self) -> tuple[int, Any]:
        found = self.agents()
        return next(
            (found[machine.node_id], machine)
            for machine in self.machines
            if len(process_tree(found.get(machine.node_id, 0))) > 1
        )

    def is_empty(self) -> bool:
        from ray.util import placement_group_table

        groups = placement_group_table().values()
        is_free = all(node.available == node.total for node in cluster_nodes())
        return is_free and not self.agents() and all(each["state"] == "REMOVED" for each in groups)

    def remove(self) -> None:
        self.disconnect()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        made = VirtualCluster(tmp_path_factory.mktemp("ray"))
        try:
            yield made
        finally:
            made.remove()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM("nano", device="cpu", num_threads=1, dtype="float32") as one:
        return [each.outputs[0].text for each in one.generate(PROMPTS, [GREEDY] * len(PROMPTS))]


@pytest.fixture(autouse=True)
def address(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.cluster.address)


def is_ready(server: Server) -> bool:
    assert server.process.poll() is None, server.log
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}/readyz", timeout=5.0).status_code == 200
    return False


def complete(server: Server, prompt: str, *, max_tokens: int = 24) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body, timeout=60.0).raise_for_status()
        return str(answer.json()["choices"][0]["text"])


def texts(server: Server) -> list[str]:
    assert eventually(lambda: is_ready(server)), server.log
    return [complete(server, prompt) for prompt in PROMPTS]


def seconds_until_told(server: Server, fault: Callable[[], object]) -> float:
    request = partial(complete, server, PROMPTS[0], max_tokens=3000)
    return seconds_until_error(request, fault, httpx.HTTPError)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def serving_on_ray(folder: Path, *options: str) -> contextlib.AbstractContextManager[Server]:
    options = (*OPTIONS, "--master-port", str(free_port()), *options)
    return serving(*options, log_file=folder / "log", is_forked=False)


def assert_gone(cluster: VirtualCluster, pids: set[int]) -> None:
    assert eventually(cluster.is_empty, seconds=GONE_SECONDS)
    assert eventually(lambda: all(map(is_gone, pids)), seconds=GONE_SECONDS)


def test_three_machines_and_their_faults(cluster: VirtualCluster, expected: list[str]) -> None:
    with serving_on_ray(cluster.folder, "-pp", "3", "--max-engine-restarts", "10") as server:
        before = cluster.agents()
        assert len(before) == 3
        assert texts(server) == expected

        pid, _ = cluster.agent_elsewhere()
        children = {*process_tree(server.process.pid), *process_tree(pid)}
        kill = partial(os.kill, pid, signal.SIGKILL)
        assert seconds_until_told(server, kill) < NOTICED_SECONDS
        assert texts(server) == expected
        after = cluster.agents()
        assert len(after) == 3 and not set(after.values()) & set(before.values())
        assert all(map(is_gone, children.difference(process_tree(server.process.pid))))

        _, lost = cluster.agent_elsewhere()
        cluster.machines.remove(lost)
        remove = partial(cluster.cluster.remove_node, lost, allow_graceful=False)
        assert seconds_until_told(server, remove) < NOTICED_SECONDS
        cluster.machines.append(cluster.add())
        assert texts(server) == expected
        assert lost.node_id not in cluster.agents()

        everything = {*process_tree(server.process.pid), *cluster.agents().values()}
        assert server.stop(seconds=20.0) == 0
        assert_gone(cluster, everything)
        assert "Traceback" not in server.log, server.log


def test_nothing_is_left_of_a_server_that_is_killed(cluster: VirtualCluster) -> None:
    with serving_on_ray(cluster.folder, "-dp", "2") as server:
        everything = set(process_tree(server.process.pid)).union(
            *map(process_tree, cluster.agents().values())
        )
        server.stop(signal.SIGKILL)
        assert_gone(cluster, everything)


def test_a_cluster_without_room_is_refused(cluster: VirtualCluster) -> None:
    options, log_file = ("-pp", "4", "--ray-placement-timeout", "1"), cluster.folder / "log"
    with launch(*OPTIONS, *options, log_file=log_file, is_forked=False) as process:
        try:
            assert process.wait(START_SECONDS) == 2
        finally:
            process.kill()
    log = log_file.read_text()
    (line,) = [line for line in log.splitlines() if "error" in line]
    assert "no room for 4 ranks in 1 s; needed: 4 CPUs on this one, or 2 machines" in line
    assert "available: this machine 127.0.0.1: 1 of 1 CPUs; 127.0.0.1: 1 of 1 CPUs; 127" in line
    assert "negamax" in line and "Traceback" not in log


def test_agents_see_gpus_of_ray(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check how agents see GPUs; the GPUs are only numbers, and the model does not exist."""
    cluster.disconnect()
    machines = [cluster.add(num_gpus=3, num_cpus=2) for _ in range(2)]
    options = EngineOptions(
        "/not/there", device="cuda", data_parallel_size=2, tensor_parallel_size=2,
        distributed_executor_backend="ray", ray_placement_timeout=20.0,
    )  # fmt: skip
    driver = Driver(options, threading.Event())
    # This process runs on the head, which has no GPU, so that the first other machine replaces it.
    monkeypatch.setattr(
        "ray.runtime_context.RuntimeContext.get_node_id", lambda self: machines[0].node_id
    )
    try:
        driver.connect()
        placed = driver.placed(driver.place())
        assert (placed.nnodes, placed.device, placed.interface) == (2, "cuda", "lo")
        assert len(placed.variables["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        (reason,) = [next(driver.run_agents(placed))]
        assert reason.startswith("node 1 (") and "/not/there" in reason
    finally:
        driver.close()
        for machine in machines:
            cluster.cluster.remove_node(machine)
        cluster.connect()
    assert cluster.is_empty()


def test_a_cluster_of_its_own(
    tmp_path: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    with serving_on_ray(tmp_path, "-tp", "2") as server:
        assert texts(server) == expected
        everything = process_tree(server.process.pid)
        listeners = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout
        addresses = {
            line.split()[3].rpartition(":")[0]
            for line in listeners.splitlines()
            if any(f"pid={pid}," in line for pid in everything)
        }
        assert addresses <= {"127.0.0.1", "[::ffff:127.0.0.1]"}
        assert server.stop(seconds=20.0) == 0
        assert eventually(lambda: all(map(is_gone, everything)), seconds=2 * GONE_SECONDS)
