"""Run the rows of a failed step one by one. Only rows that fail again end with an error."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

from negamax.base.errors import EngineDeadError
from negamax.base.log import get_logger
from negamax.scheduler.step import StepPlan, StepResult
from negamax.worker.grammar_bitmask import PendingBitmask
from negamax.worker.step_output import StepOutput

logger = get_logger(__name__)

Value = TypeVar("Value")
RunStep = Callable[[StepPlan, PendingBitmask], StepOutput]


def run_rows_separately(plan: StepPlan, bitmask: PendingBitmask, run: RunStep) -> StepResult:
    """Run the rows of `plan` one by one and merge their results."""
    results = [_run_row(plan, row, bitmask, run) for row in range(len(plan.slots))]
    firsts = list(accumulate((len(result.token_ids) for result in results), initial=0))
    return StepResult(
        plan.step_id,
        [token for result in results for token in result.token_ids],
        {
            first + place: entry
            for first, result in zip(firsts, results, strict=False)
            for place, entry in result.logprobs.items()
        },
        _by_row([result.prompt_logprobs for result in results]),
        _by_row([result.errors for result in results]),
        _by_row([result.num_accepted for result in results]),
        _by_row([result.proposed for result in results]),
        num_draft_tokens=_by_row([result.num_draft_tokens for result in results]),
    )


def _run_row(plan: StepPlan, row: int, bitmask: PendingBitmask, run: RunStep) -> StepResult:
    """Run one row. An exception of the model becomes the row's error."""
    try:
        return run(_single_row(plan, row), bitmask.single(row)).result()
    except EngineDeadError:
        raise
    except Exception as error:
        logger.exception("row %d of step %d failed", row, plan.step_id)
        message = f"{type(error).__name__} while the model ran this request"
        return StepResult(plan.step_id, [0] * plan.needs_sampling[row], {}, {}, {0: message})


def _by_row(results: list[dict[int, Value]]) -> dict[int, Value]:
    """Merge results of single rows, which have the key 0, to a dictionary by row of the plan."""
    return {row: result[0] for row, result in enumerate(results) if 0 in result}


def _single_row(plan: StepPlan, row: int) -> StepPlan:
    return StepPlan(
        step_id=plan.step_id,
        new_rows=[],
        appended_slots=[],
        appended_blocks=[],
        slots=[plan.slots[row]],
        num_scheduled=[plan.num_scheduled[row]],
        num_draft_tokens=[plan.num_draft_tokens[row]],
        needs_sampling=[plan.needs_sampling[row]],
        grammar_rows=[0] if row in plan.grammar_rows else [],
        num_proposed=plan.num_proposed,
        images=[run for run in plan.images if run.slot == plan.slots[row]],
    )
