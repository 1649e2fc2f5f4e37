from negamax.base.supervision import RestartPolicy, SupervisionLimits


def test_first_restart_is_immediate_and_later_ones_back_off() -> None:
    policy = RestartPolicy(SupervisionLimits(max_restarts=8, restart_window=600.0))
    assert [policy.note_death(float(second)) for second in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert policy.note_death(8.0) is None


def test_deaths_are_forgotten_after_the_window() -> None:
    policy = RestartPolicy(SupervisionLimits(max_restarts=1, restart_window=600.0))
    assert policy.note_death(0.0) == 0.0
    assert policy.note_death(600.0) == 0.0
    assert policy.note_death(1199.0) is None
    assert RestartPolicy(SupervisionLimits(max_restarts=0)).note_death(0.0) is None
