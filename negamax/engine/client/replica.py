"""One of the engines behind a server, as a server process sees it: whether it runs, what it has for
this process, and what it has done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from negamax.base.errors import EngineDeadError, InvalidRequestError, UnavailableError
from negamax.engine import wire
from negamax.engine.client.admission import Admission
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.open_request import OpenRequest, Owner, joined
from negamax.engine.client.placement import ReplicaLoad
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate

_RESPONSIVE_SECONDS = 0.7  # without a heartbeat: some beats

State = Literal["ok", "silent", "restarting", "failed"]


class Replica:
    """An engine and the sequences it has for this process. Single writer: the event loop. The
    engine comes and goes; its supervisor sees to that.
    """

    def __init__(self, index: int, *, admission: Admission, load: ReplicaLoad) -> None:
        """Replica `index` of the server's; no engine is there yet."""
        self.index = index
        self.load = load
        self.info: wire.ModelInfo | None = None  # of the latest engine
        self.restart_count = 0
        self.open: dict[str, OpenRequest] = {}  # by sequence id
        # gets the number of tokens of each step
        self.on_steps: Callable[[list[int]], None] | None = None
        self._admission = admission
        self._channel: EngineChannel | None = None
        self._past: wire.EngineStats | None = None  # what engines that died had counted
        self._death = "the engine is not running"
        self._next_ready = 0.0  # monotonic: when a start that is under way should be over
        self._stays_dead = False
        # questions about experts that are not answered yet, by their numbers
        self._records: dict[int, asyncio.Future[wire.ExpertRecord]] = {}
        self._num_records = 0

    @property
    def alive(self) -> bool:
        """Whether the engine runs, and no end of it is known."""
        return self._channel is not None and self._channel.is_open

    @property
    def has_failed(self) -> bool:
        """Whether the engine is dead and is not started again."""
        return self._stays_dead

    @property
    def state(self) -> State:
        """In a word; `silence` says of whom."""
        if self.alive:
            return "ok" if self.silence is None else "silent"
        return "failed" if self._stays_dead else "restarting"

    @property
    def silence(self) -> str | None:
        """The process of a running engine that has sent no heartbeat lately; None: there is
        none.
        """
        assert self._channel is not None
        if time.monotonic() - self._channel.last_beat >= _RESPONSIVE_SECONDS:
            return "the engine"
        if self._channel.rank_silence >= _RESPONSIVE_SECONDS:
            return f"rank {self._channel.rank}"
        return None

    def unavailable(self) -> EngineDeadError | UnavailableError:
        """Why nothing can be asked of an engine that does not run, with the time after which to
        come back.
        """
        if self._stays_dead:
            return EngineDeadError(self._death, code="engine_dead")
        wait = max(1.0, self._next_ready - time.monotonic())
        return UnavailableError(
            f"{self._death}; it is being started again", code="engine_restarting", retry_after=wait
        )

    @property
    def stats(self) -> wire.EngineStats:
        """The latest statistics. Gauges are zero while no engine runs; counters go on where one
        that died had them.
        """
        latest = None if self._channel is None else self._channel.stats
        if latest is not None and not self.alive:
            latest = wire.without_gauges(latest)
        return wire.sum_of_same([part for part in (self._past, latest) if part is not None])

    def enter(
        self,
        generation: OpenRequest,
        requests: Sequence[GenerateRequest],
        tokens: Sequence[int],
        *,
        pending: int,
    ) -> None:
        """Take in the sequences of a request, with the prompt tokens of each; `pending`: what is
        to be computed of the first.
        """
        for request, num_tokens in zip(requests, tokens, strict=True):
            self.open[request.request_id] = generation
            self._admission.enter(request.request_id, num_tokens, tenant=generation.owner.tenant)
            self.load.enter(request.request_id, context=num_tokens, pending=pending)
            pending = 0

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Send sequences that were taken in to the engine."""
        for request in requests:
            self.send(wire.AddRequest(request))

    def leave(self, sequence_ids: Sequence[str], *, abort: bool) -> None:
        """Sequences that are over here; `abort`: the engine must be told."""
        known = [
            sequence_id
            for sequence_id in sequence_ids
            if self.open.pop(sequence_id, None) is not None
        ]
        self._left(known)
        if abort and known and self._channel is not None:
            self.send(wire.AbortRequests(known))

    def abort(self, is_meant: Callable[[Owner], bool]) -> int:
        """As of `AsyncEngine.abort`, of an engine that runs."""
        meant = {
            sequence_id: generation
            for sequence_id, generation in self.open.items()
            if not generation.is_told_to_end and is_meant(generation.owner)
        }
        if meant:
            self.send(wire.AbortRequests(list(meant)))
            for generation in dict.fromkeys(meant.values()):
                generation.abort()
        return len(meant)

    def open_requests(self) -> list[GenerateRequest]:
        """The sequences that run or wait here."""
        return [
            request
            for generation in dict.fromkeys(self.open.values())
            for request in generation.requests
            if request.request_id in self.open
        ]

    async def record_experts(
        self, action: wire.RecordAction, *, server: int
    ) -> wire.ExpertDump | None:
        """As of `AsyncEngine.record_experts`, which is of server process `server`."""
        if not self.alive:
            raise self.unavailable()
        self._num_records += 1
        number = self._num_records
        answer = self._records[number] = asyncio.get_running_loop().create_future()
        self.send(wire.RecordExperts(server, number, action))
        try:
            record: wire.ExpertRecord = await answer
        finally:
            self._records.pop(number, None)
        if record.problem is not None:
            raise InvalidRequestError(record.problem, code="no_expert_record")
        return record.dump

    def _take_record(self, record: wire.ExpertRecord) -> None:
        """The answer to a question about experts, whose asker may have gone."""
        asked = self._records.get(record.number)
        if asked is not None and not asked.done():
            asked.set_result(record)

    def send(self, message: wire.ToEngine) -> None:
        """Send to the engine, if there is one."""
        if self._channel is not None:
            self._channel.send(message)

    def on_engine_ready(self, channel: EngineChannel, info: wire.ModelInfo) -> None:
        """An engine is there."""
        self.restart_count += self.info is not None
        self.info = info
        self._channel = channel
        channel.on_record = self._take_record

    def on_engine_lost(self, reason: str, *, ready_in: float) -> None:
        """The engine is gone: every open request ends with `EngineDeadError`. Another one is
        expected in `ready_in` seconds.
        """
        self._death = reason
        self._next_ready = time.monotonic() + ready_in
        self._past = wire.without_gauges(self.stats)
        self._channel = None
        self.fail_open(reason)

    def on_engine_failed(self, reason: str) -> None:
        """The engine stays dead."""
        self._death = reason
        self._stays_dead = True

    def receive(self, steps: Sequence[wire.StepOutputs]) -> None:
        """Take the steps that have arrived together; each sequence gets what they brought it in one
        go.
        """
        for step in steps:
            for sequence_id, at in step.admitted:
                generation = self.open.get(sequence_id)
                if generation is not None:
                    self._admission.start(sequence_id)
                    generation.started(at)
            if self.on_steps is not None:
                self.on_steps(step.step_tokens)
        updates = steps[0].updates if len(steps) == 1 else _merged(steps)
        self.load.gained(updates)
        for update in updates:
            generation = self.open.get(update.request_id)
            if generation is not None:
                generation.push(update)

    def fail_open(self, reason: str) -> None:
        """End every open request: the engine is gone."""
        open_requests, self.open = self.open, {}
        self._left(open_requests)
        for generation in dict.fromkeys(open_requests.values()):
            generation.fail(EngineDeadError(reason, code="engine_dead"))
        for asked in self._records.values():
            if not asked.done():
                asked.set_exception(EngineDeadError(reason, code="engine_dead"))

    def _left(self, sequence_ids: Iterable[str]) -> None:
        now = time.monotonic()
        for sequence_id in sequence_ids:
            self._admission.leave(sequence_id, now=now)
            self.load.leave(sequence_id)


def _merged(steps: Sequence[wire.StepOutputs]) -> list[SequenceUpdate]:
    """One update for each sequence."""
    merged: dict[str, SequenceUpdate] = {}
    for step in steps:
        for update in step.updates:
            earlier = merged.get(update.request_id)
            merged[update.request_id] = update if earlier is None else joined(earlier, update)
    return list(merged.values())
