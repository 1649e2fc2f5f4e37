"""Run the step loop. With P pipeline stages, commit step N - P while step N runs."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import EngineDeadError, EngineError, InvalidRequestError, NegamaxError
from negamax.base.log import get_logger
from negamax.engine.core.executor import Executor, Results
from negamax.engine.core.expert_balancer import ExpertBalancer
from negamax.engine.core.kv_events import EventPublisher
from negamax.engine.core.transfer_sockets import TransferSockets
from negamax.engine.core.transfers import Transfers
from negamax.engine.grammar.manager import GrammarManager, RequestGrammar
from negamax.engine.nodes.ray_launcher import RayLauncher
from negamax.engine.wire import EngineStats, ExpertDump, RankStats, StepOutputs, sum_fields
from negamax.scheduler import crash_details
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate, StepPlan
from negamax.worker.config import (
    EXPERT_COUNTS,
    START_PROFILE,
    STOP_PROFILE,
    DebugCommand,
    DebugResult,
)

logger = get_logger(__name__)

# Size limit of `_admitted` and `_step_tokens`, because `LLM` never calls `report` to clear them.
_REPORT_ENTRIES = 4096
WAIT_SECONDS = 0.005  # Time between polls for new requests while all requests wait for grammars.
FLUSH_SECONDS = 2.0  # Time limit for writing KV blocks to files at shutdown.


@dataclass(frozen=True)
class _InFlight:
    plans: list[StepPlan]  # One plan for each data-parallel rank.
    results: Results
    started: float  # Time of the launch in monotonic seconds.


class EngineLoop:
    """Runs the scheduler and the executor, one `step` at a time, in a single thread."""

    def __init__(
        self,
        scheduler: GroupScheduler,
        executor: Executor,
        *,
        grammars: GrammarManager,
        overlap: bool,
        num_stages: int = 1,
        experts: ExpertBalancer | None = None,
        crash_dumps: CrashDumps,
        launcher: RayLauncher | None = None,
        publishers: Sequence[EventPublisher] = (),
        transfers: TransferSockets | None = None,
    ) -> None:
        """`publishers` send prefix cache events: one publisher per data-parallel rank, or none."""
        self._scheduler = scheduler
        self.executor = executor
        self._grammars = grammars
        self._overlap = overlap
        self._experts = experts
        self._crash_dumps = crash_dumps
        self._launcher = launcher  # Starts other nodes on Ray; None without Ray.
        self._publishers = publishers
        self._sockets = transfers  # Sockets to other engines; None without --kv-transfer-config.
        self._transfers = None if transfers is None else transfers.transfers
        self._last_plans: deque[list[StepPlan]] = deque(maxlen=2)  # Plans of the latest steps.
        # `_in_flight`: launched, uncommitted steps, oldest first; None: a round without a plan.
        self._in_flight: deque[_InFlight | None] = deque()
        self._num_stages = num_stages
        self._pending_updates: list[SequenceUpdate] = []
        self._step_count = 0
        self._prefill_tokens = 0
        self._device_seconds = 0.0
        self._idle_seconds = 0.0
        self._committed_at = 0.0  # Monotonic second when the latest step or command ended.
        self._admitted: deque[tuple[str, float]] = deque(maxlen=_REPORT_ENTRIES)
        self._step_tokens: deque[int] = deque(maxlen=_REPORT_ENTRIES)
        self._traced_steps: int | None = None  # Steps until a trace ends; None without a trace.

    @property
    def has_work(self) -> bool:
        return (
            self._scheduler.has_unfinished
            or any(self._in_flight)
            or self._scheduler.has_writes
            or bool(self._pending_updates)
            or bool(self._grammars.opening_ids())
            or (self._transfers is not None and self._transfers.has_work)
        )

    def await_request(self, requests: zmq.Socket[bytes]) -> bool:
        """Wait until there is work. Return whether the caller should receive a request."""
        if self._sockets is None:
            return True  # The caller then waits in `requests.recv`.
        has_request = self._sockets.wait(requests)
        self._sockets.poll()
        return has_request

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. A refused request gets an update with finish_reason "error"."""
        if request.request_id in self._grammars:
            error = f"request id {request.request_id!r} is in use; choose another id"
            self._end_with_error(request.request_id, error)
        elif self._transfers is not None:
            # `_add_transferred` queues the request after the transfer.
            self._transfers.begin(request, now=time.monotonic())
        else:
            self._queue(request)

    def _queue(self, request: GenerateRequest) -> None:
        """Queue a request that does not wait for another engine."""
        if request.sampling.is_constrained:
            self._take_in(request, self._grammars.open)  # `_add_opened` queues the request.
        else:
            self._take_in(request, self._scheduler.add)

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests at once. Ignore unknown ids and ids of finished requests."""
        for request_id in request_ids:
            is_pulled = self._transfers is not None and self._transfers.abort(request_id)
            if is_pulled or self._grammars.close(request_id):
                self._pending_updates.append(SequenceUpdate(request_id, [], finish_reason="abort"))
            update = self._scheduler.end(request_id, "abort")
            if update is not None:
                self._pending_updates.append(update)

    def request_ids(self) -> list[str]:
        running = (sequence.request_id for sequence in self._scheduler.sequences())
        pulled = () if self._transfers is None else self._transfers.request_ids()
        return [*self._grammars.opening_ids(), *running, *pulled]

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()
        self._publish_cache()

    def step(self) -> list[SequenceUpdate]:
        """Launch a step. If the pipeline is full, commit the oldest step and return its updates."""
        if self._sockets is not None:
            self._sockets.poll()
            self._add_transferred(self._sockets.transfers)
        self._add_opened()
        plans = self._scheduler.plan()
        launched = None
        if plans is not None:
            if self._experts is not None:
                directed = self._experts.direct()
                plans = [msgspec.structs.replace(plan, experts=directed) for plan in plans]
            self._last_plans.append(plans)
            launched = _InFlight(plans, self.executor.launch(plans), time.monotonic())
            self._admitted.extend(
                (request_id, launched.started) for request_id in self._scheduler.take_admitted()
            )
            self._publish_cache()  # Publish cache events while the step runs.
        updates, self._pending_updates = self._pending_updates, []
        if launched is None and not any(self._in_flight) and not updates:
            self._wait()
        oldest = self._in_flight.popleft() if len(self._in_flight) == self._num_stages else None
        if oldest is not None:
            updates += self._commit(oldest)
        if plans is not None:
            updates += self._send_bitmasks(plans)
        if launched is not None and not self._overlap:
            updates += self._commit(launched)
            launched = None
        if launched is None:
            self._publish_cache()
        self._in_flight.append(launched)
        if plans is not None and self._traced_steps is not None:
            self._traced_steps -= 1
            if self._traced_steps <= 0:
                self.record_trace(None)
        if self._transfers is not None:
            self._transfers.take_updates(updates)
        return updates

    def report(self, updates: list[SequenceUpdate]) -> StepOutputs:
        """Report `updates`, statistics, and the requests and step tokens since the last report."""
        report = StepOutputs(updates, self.stats(), list(self._admitted), list(self._step_tokens))
        self._admitted.clear()
        self._step_tokens.clear()
        return report

    def stats(self) -> EngineStats:
        ranks = self._rank_stats()
        return EngineStats(
            **sum_fields(RankStats, ranks) | {"step_count": self._step_count},
            at=time.monotonic(),
            device_seconds=self._device_seconds,
            idle_seconds=self._idle_seconds,
            prefill_tokens=self._prefill_tokens,
            ranks=ranks if len(ranks) > 1 else (),
            experts=None if self._experts is None else self._experts.stats,
        )

    def _publish_cache(self) -> None:
        """Pass new changes of the prefix caches to the publishers of KV events."""
        for publisher, rank in zip(self._publishers, self._scheduler.ranks, strict=False):
            changes = rank.cache_log and rank.cache_log.take()
            if changes is not None:
                publisher.publish(changes)

    def _rank_stats(self) -> tuple[RankStats, ...]:
        """Return statistics by rank. Rank 0's numbers include requests without a rank."""
        ranks = self._scheduler.ranks
        on_none = self._scheduler.num_waiting - sum(rank.num_waiting for rank in ranks)
        on_none += len(self._grammars.opening_ids())
        on_none += 0 if self._transfers is None else len(self._transfers.request_ids())
        return tuple(
            RankStats(
                num_running=rank.num_running,
                num_waiting=rank.num_waiting + (0 if number else on_none),
                num_kv_blocks=rank.limits.num_blocks,
                num_free_kv_blocks=rank.num_free_blocks,
                step_count=self._step_count,
                preemption_count=rank.preemption_count,
                prompt_tokens=rank.prompt_tokens,
                cached_prompt_tokens=rank.cached_prompt_tokens,
                generated_tokens=rank.generated_tokens,
                num_drafts=rank.drafts.num_rows,
                num_draft_tokens=rank.drafts.num_tokens,
                num_accepted_tokens=sum(rank.drafts.accepted_per_position),
                accepted_per_position=tuple(rank.drafts.accepted_per_position),
                num_host_blocks=rank.host.num_blocks,
                num_used_host_blocks=rank.host.num_used,
                num_host_queries=rank.host.num_queries,
                num_host_hits=rank.host.num_hits,
                num_host_stores=rank.host.num_stored,
                num_host_loads=rank.host.num_loaded,
                num_host_evictions=rank.host.blocks.eviction_count,
                num_file_blocks=rank.host.files.num_blocks,
                num_used_file_blocks=rank.host.files.num_used,
                num_file_reads=rank.host.files.num_hits,
                num_file_writes=rank.host.files.num_written,
                num_file_bytes_read=rank.host.files.progress.bytes_read,
                num_file_bytes_written=rank.host.files.progress.bytes_written,
                num_file_evictions=rank.host.files.progress.num_evicted,
                num_file_errors=rank.host.files.progress.num_errors,
                num_kv_event_batches=sum(each.num_batches for each in publishers),
                num_dropped_kv_events=sum(each.num_dropped for each in publishers),
                **({} if self._transfers is None else self._transfers.stats()),
            )
            for number, rank in enumerate(ranks)
            for publishers in (self._publishers[number : number + 1],)
        )

    def record_experts(self, action: str) -> ExpertDump | None:
        """Start, stop or dump a recording of expert selections. Raises `InvalidRequestError`."""
        if self._experts is None:
            raise InvalidRequestError(
                "experts are not counted",
                hint="start the server with --expert-distribution-recorder-mode stat",
                code="experts_not_counted",
            )
        counts = self.run_debug_command(EXPERT_COUNTS)[0].counts
        assert counts is not None
        return self._experts.record(action, counts)

    def record_trace(self, path: str | None, *, num_steps: int = 0) -> None:
        """Start a trace of at most `num_steps` steps. If `path` is None, write the started trace.

        Raises `InvalidRequestError` for a start during a trace, and for a write without a trace.
        """
        if (path is None) == (self._traced_steps is None):
            raise InvalidRequestError(
                "no profile is running; a profile ends after its last step"
                if path is None
                else "a profile is already running; end it with /stop_profile",
                code="profile",
            )
        self._traced_steps = None if path is None else num_steps
        self.run_debug_command(STOP_PROFILE if path is None else START_PROFILE, path=path or "")

    def run_debug_command(self, name: str, argument: int = 0, path: str = "") -> list[DebugResult]:
        """Run a command on all ranks after all launched steps. Return the results by rank."""
        try:
            return self.executor.run_debug_command(DebugCommand(name, argument, path))
        finally:
            self._committed_at = time.monotonic()  # Exclude the command from the next step's time.

    def dump_crash(self, reason: str, error: BaseException) -> None:
        self._crash_dumps.write(reason, details=self._crash_details, error=error)

    def shutdown(self, *, restarts: bool = False) -> None:
        """Stop grammar processes, executor and sockets, and release Ray's machines. If `restarts`
        is False, first spend at most FLUSH_SECONDS to write KV blocks to files.
        """
        end = time.monotonic() + FLUSH_SECONDS
        if self._scheduler.has_writes and not restarts:
            self.abort(self.request_ids())
        with suppress(EngineDeadError):
            while self._scheduler.has_writes and not restarts and time.monotonic() < end:
                self.step()
        self._grammars.shutdown()
        try:
            self.executor.shutdown(restarts=restarts)
        finally:
            for publisher in self._publishers:
                publisher.close()
            if self._sockets is not None:
                self._sockets.close()
            if self._launcher is not None:
                self._launcher.close()

    def _crash_details(self) -> dict[str, Any]:
        return {
            "ready": dataclasses.asdict(self.executor.ready),
            "stats": msgspec.structs.asdict(self.stats()),
            "requests": crash_details.describe_sequences(self._scheduler.sequences()),
            "opening_grammars": list(self._grammars.opening_ids()),
            "last_plans": [
                crash_details.describe_plan(plan) for plans in self._last_plans for plan in plans
            ],
        }

    def _take_in(self, request: GenerateRequest, take: Callable[[GenerateRequest], object]) -> None:
        """Pass a request to `take`. If `take` raises an error, end only this request."""
        try:
            take(request)
        except Exception as error:
            message = str(error)
            if not isinstance(error, NegamaxError):
                logger.exception("request %s cannot be queued", request.request_id)
                message = f"{type(error).__name__} while this request was queued"
            self._grammars.close(request.request_id)
            self._end_with_error(request.request_id, message)

    def _end_with_error(self, request_id: str, error: str, **reasons: bool) -> None:
        """End a request that is not queued. `reasons` are fields of `SequenceUpdate`."""
        end = SequenceUpdate(request_id, [], finish_reason="error", error=error, **reasons)
        self._pending_updates.append(end)

    def _add_transferred(self, transfers: Transfers) -> None:
        """Queue requests whose transfer is complete, and end requests whose transfer has failed."""
        ready, transfers.ready = transfers.ready, []
        for request in ready:
            self._queue(request)
        for request_id, problem in transfers.failed:
            error = f"the prompt did not arrive from the prefilling engine: {problem}"
            self._end_with_error(request_id, error, lacks_prompt=True)
        transfers.failed.clear()

    def _add_opened(self) -> None:
        """Queue requests whose grammar is compiled. End requests whose grammar process was lost.
        Unblock requests whose late mask has arrived.
        """
        for lost in self._grammars.take_lost():
            end = self._scheduler.end(lost.request.request_id, "error", error=lost.problem)
            if end is not None:
                self._pending_updates.append(msgspec.structs.replace(end, **_explain(lost)))
                self._grammars.advance([end])
        for opened in self._grammars.opened():
            if opened.problem is None:
                self._take_in(opened.request, self._scheduler.add)
            else:
                name, problem = opened.request.request_id, opened.problem
                self._end_with_error(name, problem, **_explain(opened))
        for request_id in self._grammars.arrived():
            self._scheduler.unblock(request_id)

    def _send_bitmasks(self, plans: list[StepPlan]) -> list[SequenceUpdate]:
        """Send the grammar bitmasks of a launched step. Return the updates of requests that end."""
        may_wait = all(len(plan.grammar_rows) == len(plan.slots) for plan in plans)
        ended: list[RequestGrammar] = []
        for dp_rank, (plan, rank) in enumerate(zip(plans, self._scheduler.ranks, strict=True)):
            if plan.grammar_rows:
                bitmask, ended_here = self._grammars.bitmask(
                    plan.step_id, rank.grammar_rows(plan), may_wait=may_wait
                )
                self.executor.send_bitmask(bitmask, dp_rank=dp_rank)
                rank.postpone(plan, bitmask.postponed)
                ended += ended_here
        updates = []
        for rule in ended:
            reason = "stop" if rule.problem is None else "error"
            end = self._scheduler.end(rule.request.request_id, reason, error=rule.problem)
            if end is not None:
                updates.append(msgspec.structs.replace(end, **_explain(rule)))
        self._grammars.advance(updates)
        return updates

    def _wait(self) -> None:
        if self._grammars.is_waiting:
            self._grammars.wait(WAIT_SECONDS)
        elif self._transfers is not None and self._transfers.shared.holds_kv_blocks:
            time.sleep(WAIT_SECONDS)  # KV blocks become free when leases of other engines end.
        elif self._scheduler.has_unfinished:
            raise EngineError("the scheduler has waiting requests and cannot run any of them")

    def _commit(self, step: _InFlight) -> list[SequenceUpdate]:
        try:
            results = step.results()
        except EngineDeadError:
            raise
        except Exception as error:
            step_id = step.plans[0].step_id
            logger.exception("step %d was lost", step_id)
            self.dump_crash(f"step {step_id} was lost", error)
            message = f"the step that ran this request failed ({type(error).__name__})"
            updates = self._scheduler.fail(step.plans, message)
            self._grammars.advance(updates)
            return updates
        plans = step.plans
        if self._experts is not None and results[0].expert_counts:
            self._experts.take(results[0].expert_counts)
        now = time.monotonic()
        device_seconds = max(result.device_seconds for result in results)
        # `seconds` is the larger of the step's times on the device and on the host.
        seconds = max(device_seconds, now - max(step.started, self._committed_at))
        self._committed_at = now
        self._step_count += 1
        num_tokens = sum(plan.num_tokens for plan in plans)
        if num_tokens:  # A step without tokens only waits for copies.
            self._step_tokens.append(num_tokens)
        self._prefill_tokens += sum(
            count
            for plan in plans
            for count, drafts in zip(plan.num_scheduled, plan.num_draft_tokens, strict=True)
            if count - drafts > 1
        )
        self._device_seconds += device_seconds
        self._idle_seconds += min(result.idle_seconds for result in results)
        proposed = self._scheduler.proposed(results)
        updates = self._scheduler.commit(plans, results, seconds=seconds)
        for request_id in self._grammars.advance(updates, proposed):
            self._scheduler.clear_grammar(request_id)
        return updates


def _explain(rule: RequestGrammar) -> dict[str, bool]:
    """Return the fields of `SequenceUpdate` that state why a request with a grammar ends."""
    return {"is_refusal": rule.refusal is not None, "is_lost": rule.is_lost}
