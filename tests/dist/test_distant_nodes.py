import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import Any

import pytest

from negamax.base.errors import ResourceError
from negamax.engine.core import executor
from negamax.engine.core.source import locate
from negamax.engine.nodes import wire
from negamax.engine.nodes.facts import collect_facts
from negamax.engine.nodes.group import NodeGroup
from negamax.engine.nodes.network import ephemeral_ports
from negamax.options.engine import EngineOptions
from negamax.options.nodes import MASTER_PORT
from negamax.parallel.layout import ParallelLayout
from tests.dist.machines import Agent, DistantMachines, NoMachinesError, machines
from tests.dist.nodes import (
    FLOAT32,
    NOTICED_SECONDS,
    expected,
    key,
    meeting_at,
    on_nodes,
    seconds_until_noticed,
    tokens,
    wait_until,
)
from tests.layouts import parallel

# A shorter outage has no effect, and a longer one restarts the group.
HARMLESS_SECONDS, NOTICED_AT_LEAST_SECONDS = 1.4, 2.3
WHOLE = {"delay": 0.0, "jitter": 0.0, "loss": 0.0, "rate": 0.0, "cut": False, "open_ports": []}
NEAR = {"delay": 0.02, "jitter": 0.005, "loss": 0.01}
FAR = {"delay": 0.1, "jitter": 0.02, "loss": 0.05}

__all__ = ["expected", "key"]  # fixtures


@pytest.fixture(scope="module")
def priority() -> Iterator[None]:
    """Run the nodes and the links before other work, since the test measures their delays."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - 10)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture(scope="module")
def network(priority: None) -> Iterator[DistantMachines]:
    try:
        with machines(3, DistantMachines) as made:
            yield made
    except NoMachinesError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def whole(network: DistantMachines) -> None:
    network.set_links(**WHOLE)


@pytest.fixture
def agent(network: DistantMachines) -> Iterator[Agent]:
    made = Agent(network, 1, *FLOAT32, "-pp", "2", "--nnodes", "2")
    yield made
    made.kill()


@contextlib.contextmanager
def running(network: DistantMachines, count: int = 2) -> Iterator[NodeGroup]:
    """Run node 0 without ranks. Other nodes have ranks that wait for plans."""
    meeting = meeting_at(network, count)
    options = EngineOptions(
        "nano", device="cpu", dtype="float32", pipeline_parallel_size=count, **meeting
    )
    facts = collect_facts(options, locate(options), device="cpu")
    group = NodeGroup(options.nodes, ParallelLayout(pp=count, nodes=count), facts=facts)
    group.meet()
    group.start()
    try:
        wait_until(lambda: all(node.last_datagram > 2 for node in group._nodes))
        yield group
    finally:
        group.stop(timeout=0.0, restarts=True)


Ways = list[tuple[int, int]]  # pairs of source and target machines


def disconnect(network: DistantMachines, ways: Ways, *, seconds: float) -> None:
    for source, target in ways:
        network.set_links(source=source, target=target, cut=True)
    time.sleep(seconds)
    network.set_links(cut=False)


def start_gap(network: DistantMachines, ways: Ways, *, seconds: float) -> threading.Thread:
    gap = threading.Thread(target=disconnect, args=(network, ways), kwargs={"seconds": seconds})
    gap.start()
    return gap


TO_NODE_1, TO_NODE_0 = [(0, 1)], [(1, 0)]
BOTH = TO_NODE_1 + TO_NODE_0
# broken directions, and the error that node 0 reports
CUTS = (
    (BOTH, "node 1 .* sends no heartbeat for 2|node 0 sent no heartbeat for 2.* on node 1"),
    (TO_NODE_1, r"node 0 sent no heartbeat for 2.* on node 1 \(.*\)"),
    (TO_NODE_0, r"node 1 \(.*\) sends no heartbeat for 2"),
)


def has_ended(agent: Agent, times: int) -> bool:
    return agent.log.count("the ranks end") == times


def num_dropped(network: DistantMachines) -> int:
    return sum(dropped for _, dropped in network.set_links().values())


def test_only_long_losses_raise_an_alarm(network: DistantMachines, agent: Agent) -> None:
    for starts, (ways, words) in enumerate(CUTS, 1):
        with running(network) as group:
            if ways == BOTH:
                disconnect(network, ways, seconds=HARMLESS_SECONDS)
                time.sleep(wire.SILENCE_SECONDS - HARMLESS_SECONDS)
                before = num_dropped(network)
                network.set_links(**FAR)
                time.sleep(2.5)
                assert num_dropped(network) > before
                assert group.death() is None
                network.set_links(**WHOLE)
            assert agent.log.count("starting rank 1") == starts
            gap = start_gap(network, ways, seconds=NOTICED_AT_LEAST_SECONDS)
            try:
                assert wait_until(group.death) < NOTICED_SECONDS
                assert re.match(words, group.death() or "")
                wait_until(partial(has_ended, agent, starts), seconds=1.5)
            finally:
                gap.join()


def test_stages_give_the_text_of_one_rank_and_notice_a_half_open_link(
    network: DistantMachines, agent: Agent, expected: list[list[int]]
) -> None:
    network.set_links(**NEAR)
    before = num_dropped(network)
    with on_nodes(network, 2, pipeline_parallel_size=2) as llm:
        assert tokens(llm) == expected
        assert num_dropped(network) > before
        network.set_links(**WHOLE)
        gap = start_gap(network, BOTH, seconds=HARMLESS_SECONDS)
        assert tokens(llm) == expected
        gap.join()
        half_open = lambda: network.set_links(source=0, target=1, cut=True)  # noqa: E731
        words = "node 0 sent no heartbeat for 2.* on node 1|rank 1 has disconnected"
        assert seconds_until_noticed(llm, half_open, words) < NOTICED_SECONDS
    assert agent.log.count("starting rank 1") == 1


def test_agents_watch_the_link_between_them(network: DistantMachines) -> None:
    options = (*FLOAT32, "-pp", "3", "--nnodes", "3")
    agents = [Agent(network, node, *options) for node in (1, 2)]
    try:
        with running(network, 3) as group:
            network.set_links(source=1, target=2, cut=True)
            assert wait_until(group.death) < NOTICED_SECONDS
            assert re.match("node 1 sent no heartbeat for 2.* on node 2", group.death() or "")
    finally:
        for agent in agents:
            agent.kill()


def test_names_a_rank_behind_a_firewall(
    network: DistantMachines, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open the ports of agents, store and results in the firewall, but not the port of plans."""
    monkeypatch.setattr(executor, "CONNECT_SECONDS", 4.0)
    network.set_links(target=0, open_ports=[[1, MASTER_PORT + 2]])
    endpoint = re.escape(f"tcp://{network.address(0)}:{MASTER_PORT + 3}")
    words = f"rank 1 .* did not reach node 0 at {endpoint} within 4 s .open the ports"
    with pytest.raises(ResourceError, match=words):
        on_nodes(network, 2, pipeline_parallel_size=2)
    agent.wait_for("the ranks end", seconds=5.0)


@pytest.mark.full
@pytest.mark.parametrize("ways", [BOTH, TO_NODE_1, TO_NODE_0], ids=["both", "to 1", "to 0"])
def test_short_gaps_raise_no_alarm(network: DistantMachines, agent: Agent, ways: Ways) -> None:
    network.set_links(delay=FAR["delay"], jitter=FAR["jitter"])
    with running(network) as group:
        for _ in range(6):
            disconnect(network, ways, seconds=HARMLESS_SECONDS)
            time.sleep(1.0)
            assert group.death() is None
    assert agent.log.count("starting rank 1") == 1


@pytest.mark.full
def test_lost_packets_raise_no_alarm(network: DistantMachines, agent: Agent) -> None:
    network.set_links(**FAR | {"loss": 0.1})  # The first message may be lost, too.
    with running(network) as group:
        time.sleep(60.0)
        assert group.death() is None
    assert num_dropped(network) > 50


@pytest.mark.full
@pytest.mark.parametrize(
    ("split", "settings"),
    [("pp", FAR), ("dp", NEAR), ("pcp", NEAR), ("pp", {"rate": 2e6})],
    ids=["stages far", "data-parallel near", "prompts near", "stages 2 Mbit/s"],
)
def test_other_splits_give_the_text_of_one_rank(
    network: DistantMachines,
    expected: list[list[int]],
    split: str,
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Open only the ports in the firewall that the log of node 0 lists."""
    caplog.set_level("INFO", logger="negamax.engine.nodes.group")
    own, system = (MASTER_PORT, MASTER_PORT + 3), (40_000, 40_099)
    network.set_port_range(1, *system)
    first, last = map(int, ephemeral_ports().split("-"))
    network.set_links(target=0, open_ports=[own, (first, last)])
    network.set_links(target=1, open_ports=[system])
    ((name, _),) = (sizes := parallel(**{split: 2})).items()
    other = Agent(network, 1, *FLOAT32, f"--{name.replace('_', '-')}", "2", "--nnodes", "2")
    try:
        network.set_links(**settings)
        before = network.set_links()["0-1"][0]
        with on_nodes(network, 2, **sizes) as llm:
            assert tokens(llm) == expected
            assert network.set_links()["0-1"][0] > before
            listening = network.listening_ports(1)
            assert listening and all(system[0] <= port <= system[1] for port in listening)
        assert f"open its TCP ports {own[0]}-{own[1]} and its UDP port {own[0]} " in caplog.text
        assert f"NCCL take ({first}-{last})" in caplog.text
    finally:
        other.kill()


@pytest.mark.full
def test_three_machines_in_any_order(network: DistantMachines, expected: list[list[int]]) -> None:
    network.set_links(**NEAR)
    options = (*FLOAT32, "-pp", "3", "--nnodes", "3")
    agents = {2: Agent(network, 2, *options)}
    faults: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: agents[2].signal(signal.SIGSTOP), "node 2 .* no heartbeat"),
        (lambda: network.set_links(source=0, target=1, cut=True), "node 0 .* on node 1|rank 1"),
        (lambda: network.set_links(source=2, target=1, cut=True), "node 2 .* on node 1"),
    )
    threading.Timer(6.0, lambda: agents.setdefault(1, Agent(network, 1, *options))).start()
    try:
        for fault, words in faults:
            llm = on_nodes(network, 3, pipeline_parallel_size=3)
            assert tokens(llm) == expected
            assert seconds_until_noticed(llm, fault, words) < NOTICED_SECONDS
            agents[2].signal(signal.SIGCONT)
            network.set_links(cut=False)
            llm._loop.shutdown(restarts=True)
            for agent in agents.values():
                agent.wait_for("the ranks end")
                agent.log = ""
        with on_nodes(network, 3, pipeline_parallel_size=3) as llm:
            gap = start_gap(network, list(permutations(range(3), 2)), seconds=HARMLESS_SECONDS)
            assert tokens(llm) == expected
            gap.join()
        for agent in agents.values():
            assert agent.end() == 0
    finally:
        for agent in agents.values():
            agent.kill()
