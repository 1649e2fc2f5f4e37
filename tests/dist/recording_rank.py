"""A rank without a model: it answers every plan with its own rank and the plan's number."""

import sys
from types import SimpleNamespace
from typing import Any

from negamax.scheduler.step import StepPlan, StepResult
from negamax.worker import rank_process
from negamax.worker.config import WorkerConfig, WorkerReady


class RecordingWorker:
    poll_control = None

    def __init__(self, config: WorkerConfig) -> None:
        self._layout = config.layout
        self.ready = WorkerReady(7, "float32", "cpu", "", "")

    def launch(self, plan: StepPlan, wait_for_bitmask: Any) -> StepResult:
        ranks = [self._layout.dp_rank, self._layout.tp_rank]
        return StepResult(plan.step_id, [*ranks, *plan.slots], {}, {}, {})

    def take_row_failures(self) -> dict[int, str]:
        return {}

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    # replaces the real module, which would import torch
    sys.modules["negamax.worker.worker"] = SimpleNamespace(Worker=RecordingWorker)  # type: ignore[assignment]
    sys.exit(rank_process.main(sys.argv[1], int(sys.argv[2])))
