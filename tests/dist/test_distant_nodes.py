"""Ranks on machines whose network delays, loses and cuts: the text of one machine, no alarm without
cause, and a lost node noticed in time, whichever way it cannot be heard.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from negamax import LLM
from negamax.config.nodes import KEY_VARIABLE
from negamax.config.options import EngineOptions
from negamax.engine.core.source import locate
from negamax.engine.nodes import wire
from negamax.engine.nodes.facts import facts_of
from negamax.engine.nodes.group import NodeGroup
from negamax.parallel.layout import ParallelLayout
from tests.dist.nodes import (
    COMMON,
    FLOAT32,
    NOTICED_SECONDS,
    meeting_at,
    on_nodes,
    seconds_until_noticed,
    tokens,
)
from tools.load.machines import Agent, DistantMachines, NoMachinesError, machines

# cut for so long, nothing happens; for longer than the other, the group starts again
HARMLESS_SECONDS, NOTICED_AT_LEAST_SECONDS = 1.4, 2.3
WHOLE = {"delay": 0.0, "jitter": 0.0, "loss": 0.0, "rate": 0.0, "cut": False, "closed_ports": []}
NEAR = {"delay": 0.02, "jitter": 0.005, "loss": 0.01}
FAR = {"delay": 0.1, "jitter": 0.02, "loss": 0.05}


@pytest.fixture(scope="module")
def network() -> Iterator[DistantMachines]:
    try:
        with machines(3, DistantMachines) as made:
            yield made
    except NoMachinesError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def whole(network: DistantMachines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")
    network.set_links(**WHOLE)


@pytest.fixture
def agent(network: DistantMachines) -> Iterator[Agent]:
    """Node 1 of two stages."""
    made = Agent(network, 1, *FLOAT32, "-pp", "2", "--nnodes", "2")
    yield made
    made.kill()


class Group:
    """Node 0 without ranks: what is known of node 1, whose rank waits to be told what to do."""

    def __init__(self, network: DistantMachines) -> None:
        meeting = meeting_at(network, 2)
        options = EngineOptions(
            "nano", device="cpu", dtype="float32", pipeline_parallel_size=2, **meeting
        )
        self.facts = facts_of(options, locate(options), device="cpu")
        self._options = options.nodes

    @contextlib.contextmanager
    def running(self) -> Iterator[NodeGroup]:
        """With node 1, whose datagrams have come."""
        group = NodeGroup(self._options, ParallelLayout(pp=2, nodes=2), facts=self.facts)
        group.meet()
        group.start()
        try:
            wait_until(lambda: group._nodes[0].num_signs > 3 and group._nodes[0].peer is not None)
            yield group
        finally:
            group.stop(timeout=0.0, restarts=True)


def wait_until(holds: Callable[[], object], *, seconds: float = 20.0) -> float:
    """The seconds until `holds`. Errors: `TimeoutError`."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() > began + seconds:
            raise TimeoutError
        time.sleep(0.02)
    return time.monotonic() - began


def cut(network: DistantMachines, ways: list[tuple[int, int]], *, seconds: float) -> None:
    """Some ways for a time."""
    for source, target in ways:
        network.set_links(source=source, target=target, cut=True)
    time.sleep(seconds)
    network.set_links(cut=False)


TO_NODE_1, TO_NODE_0 = [(0, 1)], [(1, 0)]
BOTH = TO_NODE_1 + TO_NODE_0


def test_short_gaps_and_lost_packets_are_no_alarm(network: DistantMachines, agent: Agent) -> None:
    with Group(network).running() as group:
        for ways in (BOTH, TO_NODE_1, TO_NODE_0):
            cut(network, ways, seconds=HARMLESS_SECONDS)
            time.sleep(wire.SILENCE_SECONDS - HARMLESS_SECONDS)
            assert group.death() is None, ways
        network.set_links(**FAR)
        before = network.set_links()
        time.sleep(4.0)
        assert group.death() is None
        assert sum(dropped for _, dropped in network.set_links().values()) > sum(
            dropped for _, dropped in before.values()
        )
    assert agent.log.count("starting rank 1") == 1


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (BOTH, "node 1 .* gives no sign of life for 2|node 0 was not heard for 2.* on node 1"),
        (TO_NODE_1, r"node 0 was not heard for 2.* on node 1 \(.*\)"),
        (TO_NODE_0, r"node 1 \(.*\) gives no sign of life for 2"),
    ],
)
def test_longer_gaps_are_noticed_by_both_ends(
    network: DistantMachines, agent: Agent, ways: list[tuple[int, int]], words: str
) -> None:
    with Group(network).running() as group:
        cutting = threading.Thread(
            target=cut, args=(network, ways), kwargs={"seconds": NOTICED_AT_LEAST_SECONDS}
        )
        cutting.start()
        try:
            assert wait_until(group.death) < NOTICED_SECONDS
            assert re.match(words, group.death() or "")
            agent.wait_for("the ranks end", seconds=1.5)
        finally:
            cutting.join()
    with Group(network).running():  # and both join again
        assert agent.log.count("starting rank 1") == 2


def test_stages_answer_as_one_rank_does_over_a_network_with_delay_and_loss(
    network: DistantMachines, agent: Agent
) -> None:
    with LLM("nano", **COMMON) as one:
        expected = tokens(one)
    network.set_links(**NEAR)
    with on_nodes(network, 2, pipeline_parallel_size=2) as llm:
        assert tokens(llm) == expected
        assert sum(dropped for _, dropped in network.set_links(**WHOLE).values())
        gap = threading.Thread(
            target=cut, args=(network, BOTH), kwargs={"seconds": HARMLESS_SECONDS}
        )
        gap.start()
        assert tokens(llm) == expected
        gap.join()
        assert tokens(llm) == expected
        half_open = lambda: network.set_links(source=0, target=1, cut=True)  # noqa: E731
        words = "node 0 was not heard for 2.* on node 1|rank 1 has hung up"
        assert seconds_until_noticed(llm, half_open, words) < NOTICED_SECONDS
    assert agent.log.count("starting rank 1") == 1
