"""Run the rows of a failed step one by one. Only rows that fail again end with an error."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec

from negamax.base.errors import EngineDeadError
from negamax.base.log import get_logger
from negamax.scheduler.step import StepPlan, StepResult
from negamax.worker.grammar_bitmask import PendingBitmask
from negamax.worker.step_output import StepOutput

logger = get_logger(__name__)

RunStep = Callable[[StepPlan, PendingBitmask], StepOutput]


def run_rows_separately(plan: StepPlan, bitmask: PendingBitmask, run: RunStep) -> StepResult:
    """Run the rows of `plan` one by one and merge their results."""
    results = [_run_row(plan, row, bitmask, run) for row in range(len(plan.slots))]
    firsts = list(accumulate((len(result.token_ids) for result in results), initial=0))
    logprobs = {
        first + place: entry
        for first, result in zip(firsts, results, strict=False)
        for place, entry in result.logprobs.items()
    }
    names = ("prompt_logprobs", "errors", "num_accepted", "proposed", "num_draft_tokens")
    tokens = [token for result in results for token in result.token_ids]
    by_row = {name: _merge([getattr(result, name) for result in results]) for name in names}
    return StepResult(plan.step_id, tokens, logprobs, **by_row)


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


def _merge(fields: list[dict[int, Any]]) -> dict[int, Any]:
    """Merge a field of the results of single rows, which has the key 0, by row of the plan."""
    return {row: field[0] for row, field in enumerate(fields) if 0 in field}


def _single_row(plan: StepPlan, row: int) -> StepPlan:
    """Return a plan that runs only `row`. New rows and blocks of `plan` must already be applied."""
    columns = ("slots", "num_scheduled", "num_draft_tokens", "needs_sampling")
    return msgspec.structs.replace(
        plan,
        **{name: [getattr(plan, name)[row]] for name in columns},
        grammar_rows=[0] if row in plan.grammar_rows else [],
        images=[run for run in plan.images if run.slot == plan.slots[row]],
    )
