from negamax.base.supervision import RestartPolicy, SupervisionLimits


def test_first_restart_is_immediate_and_later_ones_back_off() -> None:
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


def test_without_restarts_the_first_death_is_final() -> None:
    assert RestartPolicy(SupervisionLimits(max_restarts=0)).note_death(0.0) is None
