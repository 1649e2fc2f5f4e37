from negamax.engine.core.executor import RowFailureLog
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow, RowFailures, StepPlan, StepResult


def plan(step_id: int, slots: list[int], *, new: tuple[int, ...] = ()) -> StepPlan:
    rows = [NewRow(slot, [1], 1, 0, [0], SamplingParams()) for slot in new]
    count = len(slots)
    return StepPlan(step_id, rows, [], [], slots, [1] * count, [0] * count, [True] * count)


def result(step_id: int, errors: dict[int, str] | None = None) -> StepResult:
    return StepResult(step_id, [7], {}, {}, errors or {})


def test_a_failure_is_in_the_row_of_its_slot_unless_rank_0_reports_one() -> None:
    log = RowFailureLog()
    log.launched(plan(1, [4, 5], new=(4, 5)))
    log.launched(plan(2, [5, 4]))
    log.add(RowFailures(1, {5: "broken"}))
    assert log.complete(result(1)).errors == {1: "broken"}
    assert log.complete(result(2, {1: "other"})).errors == {0: "broken", 1: "other"}
    log = RowFailureLog()
    log.launched(plan(1, [4], new=(4,)))
    log.add(RowFailures(1, {4: "broken"}))
    assert log.complete(result(1, {0: "not finite"})).errors == {0: "not finite"}
    log = RowFailureLog()
    log.launched(plan(1, [4], new=(4,)))
    log.add(RowFailures(1, {4: "broken"}))
    assert log.complete(result(1)).errors == {0: "broken"}
    log.launched(plan(2, [4], new=(4,)))
    log.add(RowFailures(1, {4: "late"}))
    assert log.complete(result(2)).errors == {}
