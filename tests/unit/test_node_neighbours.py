import pytest

from negamax.engine.nodes import wire
from negamax.engine.nodes.heartbeats import Neighbours


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

    assert pass_seconds(10.0) is None  # UDP between them may be blocked
    neighbours.receive(wire.PeerHeartbeat(2, "s", 5))
    assert pass_seconds(wire.NEIGHBOUR_SECONDS) is None
    beat = wire.PeerHeartbeat
    for stale in (
        beat(2, "s", 5), beat(2, "s", 4), beat(2, "another", 9),
        beat(9, "s", 9),
    ):  # fmt: skip
        neighbours.receive(stale)
    assert pass_seconds(0.4) == "node 2 sent no heartbeat for 2.6 s"
    neighbours.receive(wire.PeerHeartbeat(2, "s", 6))
    assert pass_seconds(0.2) is None
