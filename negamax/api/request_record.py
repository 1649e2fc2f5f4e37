"""What is known of one request to the engine at its end, for those who write it down: request log
and traces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from negamax.base.errors import NegamaxError
from negamax.engine.client.open_request import Observer
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams


@dataclass
class RequestRecord:
    """One request; times are monotonic seconds. Single writer: its `RequestRecorder`."""

    request_id: str  # in the engine
    http_request_id: str  # of the x-request-id header
    route: str
    model: str
    headers: Mapping[str, str]
    num_prompt_tokens: int
    is_stream: bool
    arrival: float
    sampling: SamplingParams  # as asked for; as it runs once the engine has taken the request
    start: float | None = None  # of its first step
    first_token: float | None = None
    end: float = 0.0
    num_cached_tokens: int = 0
    output_tokens: dict[int, int] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice
    error: BaseException | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(self.output_tokens.values())

    @property
    def finish_reason(self) -> str:
        """How the choices ended, such as `stop` or `length,stop`; `abort` or the error's code for a
        request that did not get there."""
        if self.finish_reasons and len(self.finish_reasons) == self.sampling.n:
            return ",".join(self.finish_reasons[index] for index in sorted(self.finish_reasons))
        if self.error is None or isinstance(self.error, GeneratorExit | asyncio.CancelledError):
            return "abort"
        code = self.error.code if isinstance(self.error, NegamaxError) else None
        return code or "error"


class RequestRecorder:
    """The observer that fills a record in, and gives it to `takers` at the end. Single writer: the
    request's stream."""

    __slots__ = ("_record", "_takers", "_then")

    def __init__(
        self,
        record: RequestRecord,
        takers: Sequence[Callable[[RequestRecord], None]],
        *,
        then: Observer,
    ) -> None:
        """`then` is another observer of the same request."""
        self._record = record
        self._takers = takers
        self._then = then

    def started(self, at: float) -> None:
        """As of `Observer`."""
        self._then.started(at)
        if self._record.start is None:
            self._record.start = at

    def gained(self, output: RequestOutput) -> None:
        """As of `Observer`."""
        self._then.gained(output)
        record = self._record
        if record.first_token is None and output.token_ids:
            record.first_token = time.monotonic()
            record.num_cached_tokens = output.num_cached_tokens
        record.output_tokens[output.index] = output.num_output_tokens
        if output.finish_reason is not None:
            record.finish_reasons[output.index] = output.finish_reason

    def ended(self, error: BaseException | None) -> None:
        """As of `Observer`."""
        self._then.ended(error)
        self._record.error = error
        self._record.end = time.monotonic()
        for take in self._takers:
            take(self._record)
