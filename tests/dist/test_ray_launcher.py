import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from negamax.base import env
from negamax.base.errors import ConfigError, ResourceError
from negamax.engine.nodes import ray_launcher, wire
from negamax.engine.nodes.agent import Agent
from negamax.engine.nodes.ray_launcher import RayLauncher
from negamax.options.engine import EngineOptions
from negamax.options.nodes import KEY_VARIABLE, MP, NodeOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import MachineShare, RankAddresses
from negamax.worker.node_sockets import bind
from tests.dist.test_node_group import FACTS, LOOPBACK, Setting
from tests.ports import free_port


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "DRIVER_MODULE", "tests.dist.scripted_ray_driver")
    monkeypatch.setattr(ray_launcher, "find_spec", lambda name: name)
    for name in (KEY_VARIABLE, "CUDA_VISIBLE_DEVICES", "KEY"):
        monkeypatch.setenv(name, "")  # The fixture restores the variable at the end.
        monkeypatch.delenv(name)


@contextlib.contextmanager
def launcher(model: str, *, seconds: float = 60.0) -> Iterator[RayLauncher]:
    ray = {"distributed_executor_backend": "ray", "ray_placement_timeout": seconds}
    made = RayLauncher(EngineOptions(model, pipeline_parallel_size=2, **ray))
    try:
        yield made
    finally:
        made.close()


def test_ray_options_become_node_options() -> None:
    with launcher("placed") as made:
        options = made.options
        made.check()
        assert (options.nnodes, options.node_rank) == (2, 0)
        place = options.device, options.master_addr, options.interface
        assert place == ("cuda", "10.0.0.1", "eth0")
        assert options.distributed_executor_backend == MP
        assert env.get("CUDA_VISIBLE_DEVICES") == "2,3"
        key = env.get(KEY_VARIABLE) or ""
        assert len(key) == 64 and env.get("KEY") == key  # The key is random and shared.
        driver = made._driver
        assert driver.exit_code is None
    assert driver.exit_code == 0  # The process ends when its standard input ends.


def test_the_message_of_an_agent_that_ends_is_reported() -> None:
    with launcher("dies") as made, pytest.raises(ConfigError, match="it does not fit") as error:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            made.check()
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no room", "Ray has no room"),
        ("ends", "the process that reserves Ray's machines has ended"),
        ("silent", "Ray has not answered within 0.3 s"),
    ],
)
def test_driver_errors_reported(monkeypatch: pytest.MonkeyPatch, model: str, words: str) -> None:
    monkeypatch.setattr(ray_launcher, "CONNECT_SECONDS", 0.2 if model == "silent" else 60.0)
    seconds = 0.1 if model == "silent" else 60.0
    with pytest.raises(ConfigError, match=words), launcher(model, seconds=seconds):
        pass


def test_the_engine_does_not_wait_for_lost_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")
    setting = Setting()

    def check() -> None:
        raise ResourceError("they are gone")

    peer = setting.peer("a")
    peer.join()
    setting.meeting.join(20.0)  # The first wait has ended.
    assert not setting.meeting.is_alive()
    with pytest.raises(ResourceError, match="they are gone"):
        setting.group.meet(check)
    setting.group.stop(timeout=0.0, restarts=True)
    setting.context.destroy(linger=0)


class Leader:
    def __init__(self, port: int) -> None:
        self._port = port
        self.context = zmq.Context()
        self.heard: list[Any] = []
        self.thread = threading.Thread(target=self._lead, daemon=True)
        self.thread.start()

    def _lead(self) -> None:
        socket = self.context.socket(zmq.ROUTER)
        bind(socket, f"tcp://127.0.0.1:{self._port}")
        addresses = RankAddresses.local("/nowhere", ParallelLayout(pp=2, nodes=2))
        while socket.poll(20_000):
            route, frame = socket.recv_multipart()
            message = wire.from_agent.decode(frame)
            self.heard.append(message)
            if isinstance(message, wire.Join):
                answer: Any = wire.StartRanks("of this test", 1, 1, addresses, {})
            elif isinstance(message, wire.AgentHeartbeat):
                answer = wire.StopRanks("the engine is started again", for_good=False)
            else:
                break
            socket.send_multipart([route, wire.encoder.encode(answer)])
        socket.close(linger=0)


def test_an_agent_of_ray_ends_with_its_ranks() -> None:
    leader = Leader(port := free_port())
    options = NodeOptions(
        nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port, interface=LOOPBACK
    )
    share = MachineShare(None, None, None, None, None, 1, "", None)
    Agent(options, facts=FACTS, share=share, waits_again=False).run()
    leader.thread.join(20.0)
    leader.context.destroy(linger=0)
    kinds = [type(message) for message in leader.heard]
    assert kinds[0] is wire.Join and wire.AgentHeartbeat in kinds and kinds[-1] is wire.Leave
