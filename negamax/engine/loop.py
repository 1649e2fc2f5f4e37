"""The step loop: launch step N, then commit step N-1 while N runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from negamax.base.errors import EngineDeadError, EngineError, NegamaxError
from negamax.base.log import get_logger
from negamax.engine.executor import Executor, Launched
from negamax.engine.wire import EngineStats
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import SequenceUpdate, StepPlan
from negamax.worker.config import (
    DECODE_SECONDS,
    DISTINCT_EXPERTS,
    OBSERVE_ROUTING,
    START_PROFILE,
    STOP_PROFILE,
    KernelTime,
    Probe,
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    launched: Launched
    started: float  # monotonic seconds


class EngineLoop:
    """Scheduler and executor, driven one `step` at a time by a single thread."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, overlap: bool) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._overlap = overlap
        self._in_flight: _InFlight | None = None
        self._pending_updates: list[SequenceUpdate] = []
        self._step_count = 0
        self._step_seconds = 0.0
        self._device_seconds = 0.0
        self._idle_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_unfinished or self._in_flight is not None or bool(self._pending_updates)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; one that cannot be served becomes an update with finish_reason "error"."""
        try:
            self._scheduler.add(request)
        except NegamaxError as error:
            self._pending_updates.append(failed_update(request.request_id, str(error)))

    def abort(self, request_ids: list[str]) -> None:
        """End requests now; unknown or finished ids are ignored."""
        for request_id in request_ids:
            update = self._scheduler.abort(request_id)
            if update is not None:
                self._pending_updates.append(update)

    def step(self) -> list[SequenceUpdate]:
        """Launch the next step, commit the one before it, and return what the requests gained."""
        plan = self._scheduler.plan()
        launched = _InFlight(plan, self._executor.launch(plan), time.monotonic()) if plan is not None else None
        updates, self._pending_updates = self._pending_updates, []
        if self._in_flight is not None:
            updates += self._commit(self._in_flight)
        elif launched is None and not updates and self._scheduler.has_unfinished:
            raise EngineError("the scheduler holds requests that it cannot run")
        if launched is not None and not self._overlap:
            updates += self._commit(launched)
            launched = None
        self._in_flight = launched
        return updates

    def stats(self) -> EngineStats:
        s = self._scheduler
        return EngineStats(
            num_running=s.num_running,
            num_waiting=s.num_waiting,
            num_kv_blocks=s.num_blocks,
            num_free_kv_blocks=s.num_free_blocks,
            step_count=self._step_count,
            preemption_count=s.preemption_count,
            prompt_tokens=s.prompt_tokens,
            cached_prompt_tokens=s.cached_prompt_tokens,
            generated_tokens=s.generated_tokens,
            step_seconds=self._step_seconds,
            device_seconds=self._device_seconds,
            idle_seconds=self._idle_seconds,
        )

    def observe_routing(self, on: bool) -> None:
        """From now on (or no more) run without CUDA graphs and keep which experts each step chose."""
        self._executor.probe(Probe(OBSERVE_ROUTING, int(on)))

    def distinct_experts(self, num_rows: int) -> float | None:
        """Experts that the first `num_rows` rows of the last step chose, mean over the layers; None unless observed."""
        return self._executor.probe(Probe(DISTINCT_EXPERTS, num_rows)).number

    def decode_seconds(self, num_rows: int) -> float | None:
        """Device time of one captured decode step, launched back to back; None without graphs. Nothing else may be running."""
        return self._executor.probe(Probe(DECODE_SECONDS, num_rows)).number

    def start_profile(self) -> None:
        """Record every kernel of rank 0 from now on."""
        self._executor.probe(Probe(START_PROFILE))

    def stop_profile(self) -> list[KernelTime]:
        """The kernels since `start_profile`."""
        return self._executor.probe(Probe(STOP_PROFILE)).kernels or []

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _commit(self, step: _InFlight) -> list[SequenceUpdate]:
        try:
            result = step.launched.result()
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("step %d was lost", step.plan.step_id)
            return self._scheduler.fail(step.plan, f"the step that ran this request failed ({type(error).__name__})")
        self._step_count += 1
        self._step_seconds = time.monotonic() - step.started
        self._device_seconds += result.device_seconds
        self._idle_seconds += result.idle_seconds
        return self._scheduler.commit(step.plan, result)


def failed_update(request_id: str, message: str) -> SequenceUpdate:
    """The update that ends a request which never ran."""
    return SequenceUpdate(
        request_id=request_id,
        token_ids=[],
        logprobs=None,
        prompt_logprobs=None,
        finish_reason="error",
        stop_reason=None,
        num_cached_tokens=0,
        error=message,
    )
