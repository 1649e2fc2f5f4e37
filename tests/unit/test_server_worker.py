from typing import Any, cast

from negamax.api.processes import wire
from negamax.api.server_worker import can_serve

RUNS = wire.UseEngine(0, "folder", cast(Any, None))  # The test does not use the engine's info.
LOST = wire.EngineLost(1, "killed", 1.0)
DEAD = wire.EngineDead(1, "killed")


def test_serves_once_the_state_of_every_engine_is_known_and_one_runs() -> None:
    for messages, num_replicas, expected in (
        ((), 1, False),
        ((RUNS,), 1, True),
        ((RUNS,), 2, False),  # The other engine may be running.
        ((RUNS, LOST), 2, True),
        ((RUNS, DEAD), 2, True),
        ((LOST,), 1, False),
    ):
        heard = dict(enumerate(messages))
        assert can_serve(heard, num_replicas=num_replicas) is expected
