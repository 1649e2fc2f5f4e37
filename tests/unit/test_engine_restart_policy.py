"""When a dead engine is started again, and when no more."""

from __future__ import annotations

from negamax.engine.client.restarts import RestartPolicy, Supervision


def test_first_restart_is_at_once_and_the_next_ones_wait_longer_and_longer() -> None:
    policy = RestartPolicy(Supervision(max_restarts=8, restart_window=600.0))
    assert [policy.died(float(second)) for second in range(8)] == [
        0.0,
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        30.0,
        30.0,
    ]
    assert policy.died(8.0) is None


def test_deaths_are_forgotten_after_the_window() -> None:
    policy = RestartPolicy(Supervision(max_restarts=1, restart_window=600.0))
    assert policy.died(0.0) == 0.0
    assert policy.died(600.0) == 0.0
    assert policy.died(1199.0) is None


def test_without_restarts_the_first_death_is_the_last() -> None:
    assert RestartPolicy(Supervision(max_restarts=0)).died(0.0) is None
