"""Timed batches of random prompts in an engine loop."""

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count, pairwise

import msgspec

from negamax.base.errors import ConfigError, EngineError
from negamax.engine.client.output import admit
from negamax.engine.core.loop import EngineLoop
from negamax.engine.wire import ModelInfo
from negamax.scheduler.request import GenerateRequest, SamplingParams

Write = Callable[[str], None]  # prints a line about the progress of a measurement


@dataclass(frozen=True)
class BatchTimes:
    """One batch of requests that start together. Times are seconds since the first `add`."""

    ttft: tuple[float, ...]  # Time of the first token of each request.
    seconds: float  # Seconds from the start of the batch to its last token.
    # `steps`: duration of each step after all requests have their first token.
    steps: tuple[float, ...]
    # seconds of decoding in which the GPU worked (`busy`) and waited (`idle`); 0: not measured
    busy: float
    idle: float
    # number of prompt tokens found in the prefix cache; above 0 makes the measurement invalid
    cached_tokens: int
    preemptions: int


class RandomPrompts:
    """Makes requests with different prompts of uniformly drawn token ids."""

    def __init__(
        self, info: ModelInfo, *, seed: int, temperature: float, top_k: int = 0, top_p: float = 1.0
    ) -> None:
        self._info = info
        self.speculation = info.speculation
        self._random = random.Random(seed)
        self._filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self._numbers = count()

    def batch(self, num_requests: int, *, input_len: int, output_len: int) -> list[GenerateRequest]:
        """Make requests that generate exactly `output_len` tokens. Raises `ConfigError`."""
        if input_len + output_len > self._info.max_model_len:
            raise ConfigError(
                f"{input_len} prompt and {output_len} output tokens exceed the context length of "
                f"{self._info.max_model_len} tokens",
                hint="use fewer tokens, or raise --max-model-len or --kv-cache-memory",
            )
        if num_requests > self._info.max_num_seqs:
            refusal = f"a batch of {num_requests} requests is too large"
            limit = f"--max-num-seqs is {self._info.max_num_seqs}"
            raise ConfigError(f"{refusal}: {limit}", hint=f"add --max-num-seqs {num_requests}")
        return [self._request(input_len, output_len) for _ in range(num_requests)]

    def again(self, requests: list[GenerateRequest], *, output_len: int) -> list[GenerateRequest]:
        """Copy the requests, but with the output length `output_len`."""
        return [
            msgspec.structs.replace(
                request,
                request_id=self._next_id(),
                sampling=msgspec.structs.replace(request.sampling, max_tokens=output_len),
            )
            for request in requests
        ]

    def _next_id(self) -> str:
        return f"bench-{next(self._numbers)}"

    def _request(self, input_len: int, output_len: int) -> GenerateRequest:
        prompt = tuple(self._random.choices(range(self._info.vocab_size), k=input_len))
        sampling = SamplingParams(
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=output_len,
            ignore_eos=True,
            seed=self._random.getrandbits(62),
            **self._filters,
        )
        return GenerateRequest(
            request_id=self._next_id(),
            prompt_token_ids=prompt,
            sampling=admit(prompt, sampling, info=self._info),
        )


def run_batch(
    loop: EngineLoop,
    requests: list[GenerateRequest],
    *,
    on_decode: Callable[[], None] | None = None,
) -> BatchTimes:
    """Run `requests` to their end. Call `on_decode` after steps in which all requests decode.

    Raises `EngineError` if a request fails.
    """
    running = {request.request_id for request in requests}
    first: dict[str, float] = {}
    commits: list[float] = []
    cached_tokens = 0
    before = opening = loop.stats()
    started = time.perf_counter()
    for request in requests:
        loop.add(request)
    while running:
        updates = loop.step()
        now = time.perf_counter() - started
        for update in updates:
            if update.error is not None:
                raise EngineError(update.error)
            if update.request_id not in first and update.token_ids:
                first[update.request_id] = now
                cached_tokens += update.num_cached_tokens
            if update.finish_reason is not None:
                running.discard(update.request_id)
        if len(first) == len(requests):
            if not commits:
                opening = loop.stats()
            commits.append(now)
            if on_decode is not None and len(running) == len(requests):
                on_decode()
    closing = loop.stats()
    drain(loop)
    return BatchTimes(
        ttft=tuple(sorted(first.values())),
        seconds=commits[-1],
        steps=tuple(later - earlier for earlier, later in pairwise(commits)),
        busy=closing.device_seconds - opening.device_seconds,
        idle=closing.idle_seconds - opening.idle_seconds,
        cached_tokens=cached_tokens,
        preemptions=closing.preemption_count - before.preemption_count,
    )


def drain(loop: EngineLoop) -> None:
    """Run steps until all requests have ended."""
    while loop.has_work:
        loop.step()


def decode_batch(loop: EngineLoop, requests: list[GenerateRequest]) -> Generator[None, None, None]:
    """Run `requests` to their first tokens, then one step per `next`. `close` aborts requests."""
    waiting = {request.request_id for request in requests}
    for request in requests:
        loop.add(request)
    try:
        ended = False
        while not ended:
            for update in loop.step():
                if update.error is not None:
                    raise EngineError(update.error)
                waiting.discard(update.request_id)
                ended = ended or update.finish_reason is not None
            if not waiting:
                yield
    finally:
        loop.abort([request.request_id for request in requests])
        drain(loop)
