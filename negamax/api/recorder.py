"""Record one request to the engine for the metrics, the request log and the traces."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from negamax.api.measurements import FINISH_REASONS, Measurements
from negamax.base.errors import NegamaxError
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams


@dataclass(slots=True)
class ChoiceRecord:
    first_token: float | None = None
    latest_token: float = 0.0
    num_tokens: int = 0
    finish_reason: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """Observes one request, updates the metrics, and calls `takers` at the request's end.

    Times are monotonic seconds. Only the request's stream changes this object.
    """

    request_id: str  # Id of the request in the engine.
    http_request_id: str  # Value of the x-request-id header.
    route: str
    model: str
    headers: Mapping[str, str]
    num_prompt_tokens: int
    is_stream: bool
    arrival: float
    sampling: SamplingParams  # requested parameters; after `generate`, the applied parameters
    measured: Measurements
    takers: Sequence[Callable[["RequestRecord"], None]] = ()
    start: float | None = None  # Time of the request's first engine step.
    first_token: float | None = None
    end: float = 0.0
    num_cached_tokens: int = 0
    choices: dict[int, ChoiceRecord] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices.values())

    @property
    def finish_reason(self) -> str:
        """The finish reasons of all choices, such as `stop` or `length,stop`.

        If the request ended early, the reason is `abort` or the code of its error.
        """
        reasons = [choice.finish_reason for _, choice in sorted(self.choices.items())]
        if len(reasons) == self.sampling.n and None not in reasons:
            return ",".join(map(str, reasons))
        if self._was_aborted:
            return "abort"
        return (self.error.code if isinstance(self.error, NegamaxError) else None) or "error"

    @property
    def _was_aborted(self) -> bool:
        return self.error is None or isinstance(self.error, GeneratorExit | asyncio.CancelledError)

    def started(self, at: float) -> None:
        if self.start is None:  # Only the first choice sets `start`.
            self.start = at
            self.measured.histograms["queue"].observe(max(0.0, at - self.arrival))

    def gained(self, output: RequestOutput) -> None:
        now, num_new = time.monotonic(), len(output.token_ids)
        choice = self.choices.get(output.index)
        if choice is None:
            choice = self.choices[output.index] = ChoiceRecord()
        choice.num_tokens = output.num_output_tokens
        if num_new:
            if choice.first_token is None:
                choice.first_token = now
                if self.first_token is None:
                    self._take_first_token(output, now)
            else:
                latency = (now - choice.latest_token) / num_new
                self.measured.histograms["inter_token"].observe(latency, num_new)
            choice.latest_token = now
        if output.finish_reason is not None:
            self._finish(output.finish_reason, choice, now)

    def ended(self, error: BaseException | None) -> None:
        self.error, self.end = error, time.monotonic()
        finished = sum(choice.finish_reason is not None for choice in self.choices.values())
        reason = "abort" if self._was_aborted else "error"
        self.measured.finished.add(reason, self.sampling.n - finished)
        for take in self.takers:
            take(self)

    def _take_first_token(self, output: RequestOutput, now: float) -> None:
        self.first_token, self.num_cached_tokens = now, output.num_cached_tokens
        histograms = self.measured.histograms
        histograms["ttft"].observe(now - self.arrival)
        histograms["prompt_tokens"].observe(output.num_prompt_tokens)
        if self.start is not None:
            histograms["prefill"].observe(max(0.0, now - self.start))

    def _finish(self, reason: str, choice: ChoiceRecord, now: float) -> None:
        choice.finish_reason = reason
        histograms = self.measured.histograms
        self.measured.finished.add(reason if reason in FINISH_REASONS else "error")
        histograms["e2e"].observe(now - self.arrival)
        histograms["generation_tokens"].observe(choice.num_tokens)
        counts = [each.num_tokens for each in self.choices.values() if each.finish_reason]
        if len(counts) == self.sampling.n:
            histograms["max_generation_tokens"].observe(max(counts))
        if choice.first_token is None:
            return
        histograms["decode"].observe(now - choice.first_token)
        if self.start is not None:
            histograms["inference"].observe(max(0.0, now - self.start))
        if choice.num_tokens > 1:
            histograms["tpot"].observe((now - choice.first_token) / (choice.num_tokens - 1))
