"""Send requests to an engine and receive their outputs, in a server process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from negamax.base.errors import EngineError, RequestTimeoutError
from negamax.base.log import get_logger
from negamax.engine import wire
from negamax.engine.client.output import ChoiceStream, RequestOutput, check_served, join_outputs
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate

if TYPE_CHECKING:
    from negamax.engine.client.engine_client import AsyncEngine
    from negamax.engine.client.replica import Replica

logger = get_logger(__name__)

Take = Callable[[int, RequestOutput], object]  # Arguments: index of the prompt, output.


@dataclass(frozen=True, slots=True)
class Owner:
    """The sender of a request."""

    tenant: str = ""
    names: frozenset[str] = frozenset()  # Ids by which a client can abort the request.
    shares_queue: bool = False  # Whether several tenants share the queue, each with its own limit.


NOBODY = Owner()


class Observer(Protocol):
    """Receives the events of one request. The methods of an observer must not raise."""

    def started(self, at: float) -> None:
        """A sequence of the request began to run at monotonic second `at`."""

    def gained(self, output: RequestOutput) -> None:
        """A choice of the request gained tokens or ended."""

    def ended(self, error: BaseException | None) -> None:
        """The request has ended; `error` is the reason of an early end."""


class OpenRequest:
    """The choices of one prompt. One caller in the event loop must `run` or `close` the request.

    While the request is paused, the updates of a choice are joined to save memory. Outputs between
    a choice's first and last output are joined until they have `interval` tokens.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        choices: Sequence[tuple[GenerateRequest, ChoiceStream]],
        *,
        deadline: float | None,
        observer: Observer | None,
        interval: int = 1,
        owner: Owner = NOBODY,
        replica_index: int | None = None,
    ) -> None:
        """Prepare a request, which `first_output` or `run` sends. `deadline` is in monotonic
        seconds. If `replica_index` is given, only the replica with this index may answer.
        """
        self.owner = owner
        self.replica_index = replica_index
        self.requests = [request for request, _ in choices]
        self.prompt_index = 0  # Index of this prompt in `OpenRequests`.
        self.is_told_to_end = False
        self._engine = engine
        self._replica: Replica | None = None  # Replica that received the request, or None.
        # Streams of unfinished choices by sequence id.
        self._streams = {request.request_id: stream for request, stream in choices}
        self._deadline = deadline
        self._observer = observer
        self._interval = interval
        self._waiting: dict[int, RequestOutput] = {}  # Index of a choice -> undelivered output.
        self._unsent: Sequence[GenerateRequest] = ()
        self._updates: dict[str, SequenceUpdate] = {}  # Sequence id -> undelivered update.
        self._failure: Exception | None = None  # Error to raise after delivery of `_updates`.
        self._take: Take | None = None
        self._is_paused = False
        self._arrival: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[Exception | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_started = self._is_closed = False

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters of the first choice, with the model's defaults filled in."""
        return self.requests[0].sampling

    async def first_output(self) -> None:
        """Send the request and wait for its first output. On an error, close the request."""
        self._begin()
        if not self._updates and self._failure is None:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        for update in self._updates.values():
            check_served(update)
        if not self._updates and self._failure is not None:
            raise self._failure

    async def run(self, take: Take) -> None:
        """Pass every output to `take` until the last choice has ended. When `run` ends, even with
        an error, the engine runs no sequence of the request. Raises `EngineError`,
        `EngineDeadError`, `RequestTimeoutError`, and the errors of `first_output` and `take`.
        """
        self._ended = asyncio.get_running_loop().create_future()
        self._take = take
        try:
            self._begin()
            self._deliver_stored()
            failure = await self._ended
            if failure is not None:
                raise failure
        except BaseException as error:
            self.close(error)
            raise
        self.close()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._deliver_stored()

    def abort(self) -> None:
        """End choices that were not sent to the engine. `Replica.abort` ends the other choices."""
        self.is_told_to_end = True
        unsent, self._unsent = self._unsent, ()
        for request in unsent:
            self.push(SequenceUpdate(request.request_id, [], finish_reason="abort"))

    def close(self, error: BaseException | None = None) -> None:
        """Abort all unfinished choices because of `error`. Further calls have no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        self._take = None
        if self._timer is not None:
            self._timer.cancel()
        if self._replica is not None:
            self._replica.leave(list(self._streams), abort=True)
        if self._observer is not None and self._has_started:
            self._observer.ended(error)

    def started(self, at: float) -> None:
        """Record that the engine began to run a sequence at monotonic second `at`."""
        if self._observer is not None:
            self._observer.started(at)

    def push(self, update: SequenceUpdate) -> None:
        """Pass an update to `run`'s caller, or store the update while the request is paused. The
        request may modify the update later. This method never raises: errors end only this request.
        """
        if self._take is None or self._is_paused:
            earlier = self._updates.get(update.request_id)
            self._updates[update.request_id] = (
                update if earlier is None else join_updates(earlier, update)
            )
            self._announce()
            return
        try:
            self._deliver(update)
        except Exception as error:
            self._end(error)
            return
        if not self._streams:
            self._end(None)

    def fail(self, error: Exception) -> None:
        """End the request with `error` after arrived outputs. Later errors are ignored."""
        if self._failure is None:
            self._failure = error
        self._announce()
        self._deliver_stored()

    def _announce(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _deliver_stored(self) -> None:
        """Unless the request is paused, deliver its stored updates and then its stored error."""
        if self._take is None or self._is_paused:
            return
        updates, self._updates = self._updates, {}
        for update in updates.values():
            self.push(update)
        if self._failure is not None and not self._is_paused:
            error = self._failure
            try:
                self._deliver_waiting()
            except Exception as wrong:
                error = wrong
            self._end(error)

    def _deliver(self, update: SequenceUpdate) -> None:
        check_served(update)
        assert self._replica is not None
        if self._unsent:
            unsent, self._unsent = self._unsent, ()
            self._replica.send(*map(wire.AddRequest, unsent))
        stream = self._streams.get(update.request_id)
        if stream is None or self._take is None:
            return  # The engine sent this update before the abort arrived at the engine.
        try:
            output = stream.push(update)
        except Exception as wrong:
            logger.exception("the output of request %s is not decodable", update.request_id)
            raise EngineError("the output could not be decoded to text") from wrong
        if stream.finished:
            del self._streams[update.request_id]
            # Abort a sequence that ends at a stop string, as the engine checks no stop strings.
            self._replica.leave([update.request_id], abort=update.finish_reason is None)
        if self._observer is not None:
            self._observer.gained(output)
        if self._interval > 1:
            waiting = self._waiting.pop(output.index, None)
            output = output if waiting is None else join_outputs(waiting, output)
            num_tokens = len(output.token_ids)
            is_first = num_tokens == output.num_output_tokens
            if num_tokens < self._interval and not is_first and output.finish_reason is None:
                self._waiting[output.index] = output
                return
        self._take(self.prompt_index, output)

    def _deliver_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for output in waiting.values():
            if self._take is not None:
                self._take(self.prompt_index, output)

    def _begin(self) -> None:
        """Send the first choice to a replica. The first output of this choice starts the others."""
        if self._has_started:
            return
        self._has_started = True
        self._replica = self._engine.enter(self)
        self._replica.send(wire.AddRequest(self.requests[0]))
        self._unsent = self.requests[1:]
        if self._deadline is not None:
            error = RequestTimeoutError(
                "the request has passed its time limit",
                hint="allow more time, or ask for fewer tokens",
                code="request_timeout",
            )
            wait = max(0.0, self._deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self.fail, error)

    def _end(self, error: Exception | None) -> None:
        self._take = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)


class OpenRequests:
    """Several prompts of one HTTP request."""

    def __init__(self, parts: Sequence[OpenRequest]) -> None:
        self._parts = parts
        for index, part in enumerate(parts):
            part.prompt_index = index

    async def first_output(self) -> None:
        """Send all prompts and wait for the first output. Raises the first error of a prompt."""
        waits = [asyncio.ensure_future(part.first_output()) for part in self._parts]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            await _cancel(waits)

    async def run(self, take: Take) -> None:
        """Run all prompts as `OpenRequest.run` does. The first error ends all prompts."""
        runs = [asyncio.ensure_future(part.run(take)) for part in self._parts]
        try:
            await asyncio.gather(*runs)
        finally:
            await _cancel(runs)

    def pause(self) -> None:
        for part in self._parts:
            part.pause()

    def resume(self) -> None:
        for part in self._parts:
            part.resume()

    def close(self, error: BaseException | None = None) -> None:
        for part in self._parts:
            part.close(error)


def join_updates(earlier: SequenceUpdate, later: SequenceUpdate) -> SequenceUpdate:
    """Join two updates of the same sequence. The result reuses the lists of `earlier`."""
    earlier.token_ids.extend(later.token_ids)
    logprobs = earlier.logprobs
    if logprobs is not None:
        logprobs.extend(later.logprobs or ())
    if later.finish_reason is None:
        return earlier
    return replace(
        later,
        token_ids=earlier.token_ids,
        logprobs=logprobs,
        prompt_logprobs=earlier.prompt_logprobs,
    )


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
