"""Track one engine of a server, and the requests that one server process sends to the engine."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from negamax.base.errors import EngineDeadError, InvalidRequestError, UnavailableError
from negamax.engine import wire
from negamax.engine.client.admission import Admission
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.open_request import OpenRequest, Owner, join_updates
from negamax.engine.client.placement import ReplicaLoad
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate

_RESPONSIVE_SECONDS = 0.7  # Seconds without a heartbeat after which an engine is considered silent.

State = Literal["ok", "silent", "restarting", "failed"]


class Replica:
    """One engine, and this process's sequences on it. Only the event loop may use an instance."""

    def __init__(self, index: int, *, admission: Admission, load: ReplicaLoad) -> None:
        self.index = index
        self.load = load
        self.info: wire.ModelInfo | None = None  # Properties of the replica's latest engine.
        self.restart_count = 0
        self.open: dict[str, OpenRequest] = {}  # Open requests by sequence id.
        # `on_steps` is called with the number of tokens of each new step.
        self.on_steps: Callable[[list[int]], None] | None = None
        self._admission = admission
        self._channel: EngineChannel | None = None
        self._past: wire.EngineStats | None = None  # Summed counters of the replica's dead engines.
        self._death = "the engine is not running"
        self._next_ready = 0.0  # Monotonic second when the next engine should be ready.
        self.has_failed = False
        # Number of an unanswered `Record` command -> its future.
        self._records: dict[int, asyncio.Future[wire.ExpertRecord]] = {}
        self._num_records = 0

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.is_open

    @property
    def state(self) -> State:
        if self.alive:
            return "ok" if self.silence is None else "silent"
        return "failed" if self.has_failed else "restarting"

    @property
    def silence(self) -> str | None:
        """Return the part without heartbeats, such as "the engine" or "rank 3", or None."""
        assert self._channel is not None
        if time.monotonic() - self._channel.last_beat >= _RESPONSIVE_SECONDS:
            return "the engine"
        if self._channel.rank_silence >= _RESPONSIVE_SECONDS:
            return f"rank {self._channel.rank}"
        return None

    def unavailable(self) -> EngineDeadError | UnavailableError:
        """Return the error of requests that arrive while the engine does not run."""
        if self.has_failed:
            return EngineDeadError(self._death, code="engine_dead")
        wait = max(1.0, self._next_ready - time.monotonic())
        return UnavailableError(
            f"{self._death}; the engine restarts", code="engine_restarting", retry_after=wait
        )

    @property
    def stats(self) -> wire.EngineStats:
        """Return the latest statistics. While no engine runs, gauges are 0, and counters stay."""
        latest = None if self._channel is None else self._channel.stats
        if latest is not None and not self.alive:
            latest = wire.drop_gauges(latest)
        return wire.sum_generations([part for part in (self._past, latest) if part is not None])

    def enter(self, request: OpenRequest, tokens: Sequence[int], *, pending: int) -> None:
        """Add a request. Choice i has tokens[i] prompt tokens. Choice 0 computes `pending`."""
        for sequence, num_tokens in zip(request.requests, tokens, strict=True):
            self.open[sequence.request_id] = request
            self._admission.enter(sequence.request_id, num_tokens, tenant=request.owner.tenant)
            self.load.enter(sequence.request_id, context=num_tokens, pending=pending)
            pending = 0

    def leave(self, sequence_ids: Sequence[str], *, abort: bool) -> None:
        """Remove sequences from this object, and abort them in the engine if `abort` is set."""
        known = [name for name in sequence_ids if self.open.pop(name, None) is not None]
        self._left(known)
        if abort and known and self._channel is not None:
            self.send(wire.AbortRequests(known))

    def abort(self, is_meant: Callable[[Owner], bool]) -> int:
        meant = {
            sequence_id: request
            for sequence_id, request in self.open.items()
            if not request.is_told_to_end and is_meant(request.owner)
        }
        if meant:
            self.send(wire.AbortRequests(list(meant)))
            for request in dict.fromkeys(meant.values()):
                request.abort()
        return len(meant)

    def open_requests(self) -> list[GenerateRequest]:
        return [
            sequence
            for request in dict.fromkeys(self.open.values())
            for sequence in request.requests
            if sequence.request_id in self.open
        ]

    async def record(self, make: Callable[[int], wire.Record]) -> wire.ExpertDump | None:
        """Send the command `make(number)` with a new number. Return the dump in the engine's reply.

        Raises `InvalidRequestError` with the engine's reason for a refusal.
        """
        if not self.alive:
            raise self.unavailable()
        self._num_records += 1
        number = self._num_records
        answer = self._records[number] = asyncio.get_running_loop().create_future()
        self.send(make(number))
        try:
            record: wire.ExpertRecord = await answer
        finally:
            self._records.pop(number, None)
        if record.problem is not None:
            raise InvalidRequestError(record.problem, code="no_record")
        return record.dump

    def send(self, *messages: wire.ToEngine) -> None:
        """Send messages to the engine. Drop the messages while no engine runs."""
        if self._channel is not None:
            for message in messages:
                self._channel.send(message)

    def on_engine_ready(self, channel: EngineChannel, info: wire.ModelInfo) -> None:
        self.restart_count += self.info is not None
        self.info = info
        self._channel = channel

        def take_record(record: wire.ExpertRecord) -> None:
            asked = self._records.get(record.number)
            if asked is not None and not asked.done():
                asked.set_result(record)

        channel.on_record = take_record

    def on_engine_lost(self, reason: str, *, ready_in: float) -> None:
        """End the open requests. The next engine should be ready in `ready_in` seconds."""
        self._death = reason
        self._next_ready = time.monotonic() + ready_in
        self._past = wire.drop_gauges(self.stats)
        self._channel = None
        self.fail_open(reason)

    def on_engine_failed(self, reason: str) -> None:
        self._death = reason
        self.has_failed = True

    def receive(self, steps: Sequence[wire.StepOutputs]) -> None:
        """Deliver updates. If several updates of a sequence arrived together, join them first."""
        for step in steps:
            for sequence_id, at in step.admitted:
                request = self.open.get(sequence_id)
                if request is not None:
                    self._admission.start(sequence_id)
                    request.started(at)
            if self.on_steps is not None:
                self.on_steps(step.step_tokens)
        updates = steps[0].updates
        if len(steps) > 1:
            merged: dict[str, SequenceUpdate] = {}
            for update in (update for step in steps for update in step.updates):
                name, earlier = update.request_id, merged.get(update.request_id)
                merged[name] = update if earlier is None else join_updates(earlier, update)
            updates = list(merged.values())
        self.load.gained(updates)
        for update in updates:
            request = self.open.get(update.request_id)
            if request is not None:
                request.push(update)

    def fail_open(self, reason: str) -> None:
        open_requests, self.open = self.open, {}
        self._left(open_requests)
        for request in dict.fromkeys(open_requests.values()):
            request.fail(EngineDeadError(reason, code="engine_dead"))
        for asked in self._records.values():
            if not asked.done():
                asked.set_exception(EngineDeadError(reason, code="engine_dead"))

    def _left(self, sequence_ids: Iterable[str]) -> None:
        now = time.monotonic()
        for sequence_id in sequence_ids:
            self._admission.leave(sequence_id, now=now)
            self.load.leave(sequence_id)
