import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from negamax.base.errors import ConfigError, ResourceError
from negamax.engine.nodes.group import NodeGroup
from negamax.options.nodes import KEY_VARIABLE, NodeOptions
from negamax.parallel.layout import ParallelLayout
from tests.dist.machines import Agent, Machines, NoMachinesError, OneMachine, machines
from tests.dist.nodes import (
    FLOAT32,
    NOTICED_SECONDS,
    expected,
    key,
    meeting_at,
    on_nodes,
    seconds_until_noticed,
    tokens,
)
from tests.ports import free_port
from tests.probes import probe

__all__ = ["expected", "key"]  # fixtures


@pytest.fixture(scope="module")
def network() -> Iterator[Machines | OneMachine]:
    with contextlib.ExitStack() as stack:
        try:
            made: Machines | OneMachine = stack.enter_context(machines(3))
        except NoMachinesError as error:
            made = OneMachine(free_port(), reason=str(error))
        yield made


def test_data_parallel_ranks_on_two_machines_notice_a_stopped_one(
    network: Machines | OneMachine, expected: list[list[int]]
) -> None:
    agents: list[Agent] = []
    options = [
        "-dp", "2", "--headless", "--data-parallel-start-rank", "1", "--data-parallel-size-local",
        "1", "--data-parallel-address", network.address(0),
    ]  # fmt: skip

    def come_late() -> None:
        agents.append(Agent(network, 1, *FLOAT32, *options))

    threading.Timer(1.5, come_late).start()
    with on_nodes(network, 2, data_parallel_size=2) as llm:
        (agent,) = agents
        try:
            assert tokens(llm) == expected
            # The fault happens during a request on each of the two ranks.
            stop = lambda: agent.signal(signal.SIGSTOP)  # noqa: E731
            assert seconds_until_noticed(llm, stop, "node 1 .* no heartbeat") < NOTICED_SECONDS
            agent.signal(signal.SIGCONT)
            agent.wait_for("the ranks end")
        finally:
            agent.kill()


def test_agents_wait_for_the_next_engine_and_end_with_the_last(
    network: Machines | OneMachine, expected: list[list[int]]
) -> None:
    host = network.address(1)
    probes = ("--host", host, "--node-health-port", "0")
    second, first = (
        Agent(network, node, *FLOAT32, "-pp", "3", "--nnodes", "3", *options)
        for node, options in ((2, ()), (1, probes))
    )
    try:
        for agent in (first, second):
            agent.wait_for(f"waiting for node 0 at {network.address(0)}:{network.port}")
        port = int(first.log.split(f"/health at {host} port ")[1].split()[0])
        assert probe(host, port, "/livez") == (200, "ok")
        status, reason = probe(host, port, "/readyz")
        assert status == 503 and reason.startswith("waiting for node 0 at ")
        llm = on_nodes(network, 3, pipeline_parallel_size=3)
        assert probe(host, port, "/readyz") == probe(host, port, "/health") == (200, "ok")
        assert tokens(llm) == expected

        def lose() -> None:
            if isinstance(network, Machines):
                network.set_link(2, "down")
            else:
                second.signal(signal.SIGSTOP)

        assert seconds_until_noticed(llm, lose, "node 2 .* no heartbeat") < NOTICED_SECONDS
        if not isinstance(network, Machines):
            second.signal(signal.SIGCONT)
        llm._loop.shutdown(restarts=True)
        for agent in (first, second):
            agent.wait_for("the ranks end")
        if isinstance(network, Machines):
            network.set_link(2, "up")
        with on_nodes(network, 3, pipeline_parallel_size=3) as again:
            assert tokens(again) == expected
            words = "node 1|rank 1 has disconnected"
            assert seconds_until_noticed(again, first.kill, words) < NOTICED_SECONDS
        assert second.end() == 0
        assert "node 0 ends, so this node ends" in second.log
        assert "Traceback" not in second.log and "[W" not in second.log
    finally:
        if isinstance(network, Machines):
            network.set_link(2, "up")
        for agent in (first, second):
            agent.kill()


# These options are refused without loading weights.


def group_of_two(options: dict[str, Any], **facts: str) -> NodeGroup:
    return NodeGroup(NodeOptions(**options), ParallelLayout(pp=2, nodes=2), facts=facts)


@pytest.mark.parametrize(
    ("options", "variables"),
    [(("--seed", "8"), {}), ((), {KEY_VARIABLE: "another"})],
    ids=["option", "key"],
)
def test_differing_agent_is_refused(
    network: Machines | OneMachine, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    group = group_of_two(meeting_at(network, 2), **{"Negamax": "0.0.1", "--seed": "7"})
    threading.Thread(target=lambda: _ignoring_errors(group.meet), daemon=True).start()
    agent = Agent(network, 1, *FLOAT32, "-pp", "2", "--nnodes", "2", *options, **variables)
    try:
        if variables:
            agent.wait_for(f"{KEY_VARIABLE} differs", seconds=60.0)
            agent.process.send_signal(signal.SIGTERM)
            assert agent.end() == 0
        else:
            assert agent.end(seconds=60.0) == 2
            assert "--seed: 7 on node 0, 8 on node 1" in agent.log
            assert "Negamax: 0.0.1 on node 0" in agent.log
    finally:
        agent.kill()
        group.close()


def test_used_ports_are_named(network: Machines | OneMachine) -> None:
    words = rf"port {network.port + 1} .* Address already in use; .* need 4"
    with (
        socket.create_server((network.address(0), network.port + 1)),
        pytest.raises(ResourceError, match=words),
    ):
        group_of_two(meeting_at(network, 2))


def test_refuses_unreachable_addresses() -> None:
    with pytest.raises(ConfigError, match=r"other machines cannot reach .*--interface lo"):
        group_of_two({"nnodes": 2, "master_addr": "127.0.0.1"})
    with pytest.raises(ConfigError, match="not an address of"):
        group_of_two({"nnodes": 2, "master_addr": "192.0.2.1"})


def _ignoring_errors(call: Any) -> None:
    with contextlib.suppress(Exception):
        call()
