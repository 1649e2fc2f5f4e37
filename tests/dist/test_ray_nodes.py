import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.engine.nodes.ray_driver import Driver, cluster_nodes
from negamax.options.engine import EngineOptions
from tests.ports import free_port

if find_spec("ray") is None:
    pytest.skip("Ray is not installed here: pip install 'negamax[ray]'", allow_module_level=True)

pytestmark = pytest.mark.full

PROMPTS = ["What is 47 + 38?", "Hello!", "Who are you?", "A box holds 24 pencils. How many"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS = ("--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--log-level", "warning")
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

    def variables(self) -> dict[str, str]:
        return VARIABLES | {"RAY_ADDRESS": self.cluster.address}

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
            if len(tree(found.get(machine.node_id, 0))) > 1
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


class Server:
    def __init__(self, log: Path, *options: str, **variables: str) -> None:
        self.port = free_port()
        self.log_file = log
        command = [sys.executable, "-m", "negamax", "serve", "nano", "--port", str(self.port)]
        command += [*OPTIONS, "--distributed-executor-backend", "ray"]
        command += ["--master-port", str(free_port()), *options]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=stderr, env=os.environ | variables,
                start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_until_ready(self) -> None:
        eventually(self.is_ready, START_SECONDS, lambda: self.log)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5.0):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def complete(self, prompt: str, *, max_tokens: int = 24) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | {"model": "nano"}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def texts(self) -> list[str]:
        return [self.complete(prompt) for prompt in PROMPTS]

    def seconds_until_told(self, fault: Callable[[], object]) -> float:
        """Return the seconds from `fault`, during a request, until an error ends the request."""
        hit: list[float] = []

        def strike() -> None:
            hit.append(time.monotonic())
            fault()

        timer = threading.Timer(0.5, strike)
        timer.start()
        with pytest.raises((urllib.error.URLError, OSError)):
            self.complete(PROMPTS[0], max_tokens=3000)
        timer.join()
        return time.monotonic() - hit[0]

    def processes(self) -> set[int]:
        return tree(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def tree(root: int) -> set[int]:
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                todo += [int(child) for child in task.read_text().split()]
    return found


def eventually(
    holds: Callable[[], object], seconds: float, words: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, words()
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@contextlib.contextmanager
def serving(cluster: VirtualCluster, *options: str) -> Iterator[Server]:
    server = Server(cluster.folder / "log", *options, **cluster.variables())
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()
        eventually(cluster.is_empty, GONE_SECONDS)


def test_three_machines_and_their_faults(cluster: VirtualCluster, expected: list[str]) -> None:
    with serving(cluster, "-pp", "3", "--max-engine-restarts", "10") as server:
        before = cluster.agents()
        assert len(before) == 3
        assert server.texts() == expected

        pid, _ = cluster.agent_elsewhere()
        children = server.processes() | tree(pid)
        seconds = server.seconds_until_told(lambda: os.kill(pid, signal.SIGKILL))
        assert seconds < NOTICED_SECONDS
        server.wait_until_ready()
        assert server.texts() == expected
        after = cluster.agents()
        assert len(after) == 3 and not set(after.values()) & set(before.values())
        assert not [pid for pid in children - server.processes() if not is_gone(pid)]

        _, lost = cluster.agent_elsewhere()
        cluster.machines.remove(lost)
        seconds = server.seconds_until_told(
            lambda: cluster.cluster.remove_node(lost, allow_graceful=False)
        )
        assert seconds < NOTICED_SECONDS
        cluster.machines.append(cluster.add())
        server.wait_until_ready()
        assert server.texts() == expected
        assert lost.node_id not in cluster.agents()

        everything = server.processes() | set(cluster.agents().values())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20.0) == 0
        eventually(cluster.is_empty, GONE_SECONDS)
        eventually(lambda: all(map(is_gone, everything)), GONE_SECONDS)
        assert "Traceback" not in server.log, server.log


def test_nothing_is_left_of_a_server_that_is_killed(cluster: VirtualCluster) -> None:
    with serving(cluster, "-dp", "2") as server:
        agents = cluster.agents()
        everything = server.processes()
        for pid in agents.values():
            everything |= tree(pid)
        server.kill()
        eventually(cluster.is_empty, GONE_SECONDS)
        eventually(lambda: all(map(is_gone, everything)), GONE_SECONDS)


def test_a_cluster_without_room_is_refused(cluster: VirtualCluster) -> None:
    options = ("-pp", "4", "--ray-placement-timeout", "1")
    server = Server(cluster.folder / "log", *options, **cluster.variables())
    try:
        assert server.process.wait(START_SECONDS) == 2
    finally:
        server.kill()
    (line,) = [line for line in server.log.splitlines() if "error" in line]
    assert "no room for 4 ranks in 1 s; needed: 4 CPUs on this one, or 2 machines" in line
    assert "available: this machine 127.0.0.1: 1 of 1 CPUs; 127.0.0.1: 1 of 1 CPUs; 127" in line
    assert "negamax" in line and "Traceback" not in server.log


def test_agents_see_gpus_of_ray(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check how agents see GPUs; the GPUs are only numbers, and the model does not exist."""
    cluster.disconnect()
    machines = [cluster.add(num_gpus=3, num_cpus=2) for _ in range(2)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.cluster.address)
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


def test_a_cluster_of_its_own(cluster: VirtualCluster, expected: list[str]) -> None:
    variables = VARIABLES | {"RAY_ADDRESS": "local"}
    del variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    server = Server(cluster.folder / "log", "-tp", "2", **variables)
    try:
        server.wait_until_ready()
        assert server.texts() == expected
        everything = server.processes()
        listeners = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout
        addresses = {
            line.split()[3].rpartition(":")[0]
            for line in listeners.splitlines()
            if any(f"pid={pid}," in line for pid in everything)
        }
        assert addresses <= {"127.0.0.1", "[::ffff:127.0.0.1]"}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20.0) == 0
        eventually(lambda: all(map(is_gone, everything)), 2 * GONE_SECONDS)
    finally:
        server.kill()
