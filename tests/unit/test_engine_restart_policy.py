"""When a dead engine is started again, and when no more."""

from __future__ import annotations

from negamax.base.supervision import RestartPolicy, SupervisionLimits


def test_first_restart_is_at_once_and_the_next_ones_wait_longer_and_longer() -> None:
    policy = RestartPolicy(SupervisionLimits(max_restarts=8, restart_window=600.0))
    assert [policy.note_death(float(second)) for second in range(8)] == [
        0.0,
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        30.0,
        30.0,
    ]
    assert policy.note_death(8.0) is None


def test_deaths_are_forgotten_after_the_window() -> None:
    policy = RestartPolicy(SupervisionLimits(max_restarts=1, restart_window=600.0))
    assert policy.note_death(0.0) == 0.0
    assert policy.note_death(600.0) == 0.0
    assert policy.note_death(1199.0) is None


def test_without_restarts_the_first_death_is_the_last() -> None:
    assert RestartPolicy(SupervisionLimits(max_restarts=0)).note_death(0.0) is None
