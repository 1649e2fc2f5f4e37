"""Execute the plans of one rank in order on the rank's model runner."""

from collections import deque
from contextlib import suppress

import torch

from negamax.base.errors import EngineDeadError
from negamax.base.log import get_logger
from negamax.scheduler.step import FileProgress, StepPlan, StepResult
from negamax.worker.config import DebugCommand, DebugResult, WorkerConfig
from negamax.worker.debug_commands import DebugCommands
from negamax.worker.grammar_bitmask import PendingBitmask, WaitForBitmask
from negamax.worker.runner import ModelRunner
from negamax.worker.separate_rows import run_rows_separately
from negamax.worker.stages import Arrived
from negamax.worker.step import StepRunner
from negamax.worker.step_output import StepOutput, complete

logger = get_logger(__name__)


class Worker:
    """The model runtime of one rank, for one thread. Any thread may read a `StepOutput`."""

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self.runner = runner = ModelRunner(config)
        self.ready, self.poll_control = runner.ready, runner.context.poll_control
        self._debug_commands = DebugCommands(runner)
        self._steps = StepRunner(runner, needs_eager=lambda: self._debug_commands.needs_eager)
        # (launch number, verification) of each step with drafts; the verification may still run on
        # the device
        self._unverified: deque[tuple[int, Arrived]] = deque()
        self._num_steps = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan, wait_for_bitmask: WaitForBitmask) -> StepOutput | StepResult:
        """Run one plan. On a GPU, `launch` enqueues the step and returns. After the model and
        before sampling, `launch` waits for the bitmask of grammar rows. If a step succeeds,
        `errors` of the result contains its failed rows. On a GPU, an exception of the model fails
        the whole step. Raises `EngineDeadError` if another rank is dead.
        """
        runner, requests = self.runner, self.runner.requests
        self._lower_bounds(runner.stage.begin(plan))
        expert_counts = None
        if runner.experts is not None and plan.experts is not None:
            expert_counts = runner.experts.apply(plan.experts)
        requests.apply(plan)
        if runner.encoder is not None:
            runner.encoder.encode(plan)
        vocab_size = runner.config.spec.vocab_size
        bitmask = PendingBitmask.of_plan(
            plan, wait_for_bitmask, vocab_size=vocab_size, requests=requests
        )
        loads = None if runner.host_pool is None else runner.host_pool.run(plan)
        size = plan.of_all
        if plan.slots or (size is not None and size.num_tokens) or loads is None:
            output = self._run(plan, bitmask)
        else:  # the plan contains only copies of KV blocks
            output = StepOutput(plan.step_id, [])
        if plan.slots:
            requests.raise_bounds(plan, postponed=bitmask.postponed)
        if isinstance(output, StepResult):
            requests.lower_bounds(plan, output.num_accepted)
        elif output.verification is not None:
            self._unverified.append((self._num_steps, Arrived(plan, output.verification, set())))
        return complete(output, expert_counts, loads)

    def _lower_bounds(self, arrived: list[Arrived]) -> None:
        """Subtract rejected drafts of all steps but the last from the bounds of computed tokens."""
        self._unverified += ((self._num_steps, step) for step in arrived)
        self._num_steps += 1
        settled = self._num_steps - self.runner.runtime.is_asynchronous
        while self._unverified and self._unverified[0][0] < settled:
            _, step = self._unverified.popleft()
            accepted = step.verification.accepted()
            self.runner.requests.lower_bounds(step.plan, accepted, step.reassigned)

    def _run(self, plan: StepPlan, bitmask: PendingBitmask) -> StepOutput | StepResult:
        """Run the step as a batch. If this fails on a single CPU rank, run the rows one by one."""
        runner, requests = self.runner, self.runner.requests
        layout, is_lazy = runner.config.layout, runner.runtime.is_asynchronous
        has_others = plan.of_all is not None or layout.pp > 1 or layout.cp > 1
        try:
            output = self._steps.run(plan, bitmask)
            return output if is_lazy or layout.pp > 1 else output.result()
        except EngineDeadError:  # repeating the step is useless if another rank is dead
            raise
        except Exception:
            if is_lazy or has_others:
                raise
            logger.exception(
                "step %d failed as a batch; running its %d rows one by one",
                plan.step_id,
                len(plan.slots),
            )
        requests.restore_lengths()
        for row in plan.grammar_rows:  # drop drafts that the grammar masks may not match
            requests.drafts[plan.slots[row]] = -1
        return run_rows_separately(plan, bitmask, self._steps.run)

    @torch.inference_mode()
    def run_debug_command(self, command: DebugCommand) -> DebugResult:
        """Run a benchmark's command. Every rank must receive the same command, between steps."""
        return self._debug_commands.run(command)

    @torch.inference_mode()
    def idle(self) -> None:
        """Start to receive messages of other stages. Call this method while no plan arrives."""
        if self.runner.runtime.is_asynchronous:
            self.runner.stage.start_receiving()

    def take_row_failures(self) -> dict[int, str]:
        """Return the errors of rows that failed since the last call, by slot."""
        return self.runner.requests.take_failures()

    def take_file_progress(self, output: StepOutput | StepResult) -> FileProgress | None:
        """Return the progress of file copies after a step, on a rank that sends no results."""
        if isinstance(output, StepResult):
            return output.files
        return None if output.loads is None else output.loads.report_files()

    @torch.inference_mode()
    def close(self) -> None:
        """Free the memory and leave the process groups. No method may be called afterwards."""
        runtime, context = self.runner.runtime, self.runner.context
        with suppress(EngineDeadError):  # other ranks may already have ended
            self.runner.stage.finish()
        if self.runner.lane is not None:
            self.runner.lane.close()
        if self.runner.host_pool is not None:
            self.runner.host_pool.close()
        del self.runner, self._steps, self._debug_commands
        runtime.release_memory()
        context.close()
