"""Turn the engine's outputs into one response or into a stream of events."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.responses import Response

from negamax.api.common.api_request import ApiRequest
from negamax.api.common.choice_reader import ChoiceReader, PlainReader, check_failed
from negamax.api.common.context import ApiContext
from negamax.api.errors import build_json_response, log_failure
from negamax.api.http.request_threads import INLINE_BYTES, run_off_loop
from negamax.api.http.sse import (
    DONE,
    FIRST_OUTPUT_SECONDS,
    EventStream,
    Write,
    encode_event,
    run_while_connected,
    wait_for_first_output,
)
from negamax.api.schemas.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.engine.client.open_request import OpenRequest, OpenRequests
from negamax.engine.client.output import RequestOutput
from negamax.text.parser.events import ParserEvent
from negamax.text.parser.packets import PacedPackets

_BYTES_PER_TOKEN, _BYTES_PER_LOGPROB = 4, 64  # Estimated JSON bytes of a token and of a logprob.
Ping = tuple[bytes, float]  # A ping event, and the idle seconds before a stream sends a ping.
_KEEP_ALIVE = b": keep-alive\n\n"  # An SSE comment, which clients ignore.


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a running answer. Only the request's `AnswerWriter` changes this object."""

    index: int  # Index of the choice among the choices of all prompts.
    reader: ChoiceReader | PlainReader
    prompt_index: int = 0
    is_prompt_only: bool = False  # True if the request only caches or scores its prompt.
    packets: PacedPackets = field(default_factory=PacedPackets)
    latest: RequestOutput | None = None  # latest engine output, which contains the token counts


AnswerSource = OpenRequest | OpenRequests
ChoiceT = TypeVar("ChoiceT", bound=Choice)
ResponseT = TypeVar("ResponseT", bound=msgspec.Struct | Sequence[msgspec.Struct])
Send = Callable[[ChoiceT, RequestOutput, list[ParserEvent]], object]


class AnswerWriter(ABC, Generic[ChoiceT, ResponseT]):
    """Writes the answer to one request. Only the request's handler changes this object."""

    is_paced = False  # Whether a stream joins small text fragments into one event.
    keeps_parts = False  # Whether a failed answer keeps the text generated before the error.

    def __init__(self, request_id: str, source: AnswerSource, choices: Sequence[ChoiceT]) -> None:
        """`choices` lists all choices of a prompt before the choices of the next prompt."""
        self.id = request_id
        self.source = source
        self.choices = choices
        self.created = int(time.time())
        self.num_bytes = 0  # estimated JSON bytes of the answer; a thread builds large answers
        self._of_prompt: dict[int, list[ChoiceT]] = {}
        for choice in choices:
            self._of_prompt.setdefault(choice.prompt_index, []).append(choice)

    @abstractmethod
    def take(self, choice: ChoiceT, output: RequestOutput, events: list[ParserEvent]) -> None:
        """Add `output` and its parsed `events` to `choice`."""

    @abstractmethod
    def chunk(self, choice: ChoiceT, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        """Add `output` to `choice`, and return the bytes to stream, which may be empty."""

    @abstractmethod
    def response(self) -> ResponseT:
        """Build the whole response from all added outputs."""

    def count_bytes(self, choice: ChoiceT, output: RequestOutput) -> int:
        """Estimate the number of bytes that `output` adds to the answer."""
        logprobs = (output.logprobs or (), output.prompt_logprobs or ())
        return _BYTES_PER_TOKEN * len(output.token_ids) + sum(
            _BYTES_PER_LOGPROB * len(each) * (1 + len(each[0].top_ids)) for each in logprobs if each
        )

    def start(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return DONE

    def failure(self, error: Exception) -> bytes:
        return encode_event(log_failure(error, request_id=self.id)[1]) + DONE

    @property
    def usage(self) -> Usage:
        """Token counts. A prompt's cached token count is the minimum over the prompt's choices."""
        prompts: dict[int, tuple[int, int]] = {}  # prompt index -> (prompt tokens, cached tokens)
        completion_tokens = reasoning_tokens = 0
        for choice in self.choices:
            if (output := choice.latest) is None:
                continue
            _, cached = prompts.get(choice.prompt_index, (0, output.num_cached_tokens))
            cached = min(cached, output.num_cached_tokens)
            prompts[choice.prompt_index] = output.num_prompt_tokens, cached
            completion_tokens += output.num_output_tokens
            reasoning_tokens += choice.reader.num_reasoning_tokens
        prompt_tokens = sum(tokens for tokens, _ in prompts.values())
        cached_tokens = sum(cached for _, cached in prompts.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens),
        )

    async def whole(self) -> ResponseT:
        """Return the whole response. Raises the errors of `OpenRequest.run`."""
        taken: list[tuple[ChoiceT, RequestOutput, list[ParserEvent]]] = []

        def take_all() -> None:
            for part in taken:
                self.take(*part)

        def build() -> ResponseT:
            take_all()
            return self.response()

        try:
            await self._run(lambda *part: taken.append(part), is_paced=False)
        except BaseException:
            if self.keeps_parts:
                take_all()
            raise
        self.num_bytes = sum(self.count_bytes(choice, output) for choice, output, _ in taken)
        return await run_off_loop(build, num_bytes=self.num_bytes)

    async def stream(self, write: Write) -> None:
        """Write the response as events. Errors after the stream's start are written as events."""
        chunks = _Chunks(write)

        def send(choice: ChoiceT, output: RequestOutput, events: list[ParserEvent]) -> None:
            build = partial(self.chunk, choice, output, events)
            chunks.add(build, num_bytes=self.count_bytes(choice, output))

        if start := self.start():
            write(start)
        try:
            try:
                await self._run(send, is_paced=self.is_paced)
            finally:
                await chunks.finish()
            end = self.end()
        except Exception as error:
            end = self.failure(error)
        write(end)

    async def _run(self, send: Send[ChoiceT], *, is_paced: bool) -> None:
        of_prompt = self._of_prompt

        def take(prompt: int, output: RequestOutput) -> None:
            choice = of_prompt[prompt][output.index]
            if choice.is_prompt_only:
                check_failed(output)
                output = drop_tokens(output)
            events = choice.reader.push(output)
            choice.latest = output
            if is_paced:
                is_last = output.finish_reason is not None
                events = choice.packets.push(events, now=time.monotonic(), is_last=is_last)
            send(choice, output, events)

        await self.source.run(take)


class _Chunks:
    """Writes the chunks of a stream in order. Only the stream's handler changes this object.

    A thread builds each large chunk, and later chunks wait until the large chunk is written.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: deque[tuple[Callable[[], bytes], int]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, build: Callable[[], bytes], *, num_bytes: int) -> None:
        """Write the chunk that `build` returns. The chunk has about `num_bytes` bytes."""
        if self._waiting or num_bytes > INLINE_BYTES:
            self._waiting.append((build, num_bytes))
            if len(self._waiting) == 1:
                self._task = asyncio.create_task(self._write_waiting())
        elif chunk := build():
            self._write(chunk)

    async def finish(self) -> None:
        """Wait until all chunks are written. Raises the errors of the `build` functions."""
        if self._task is not None:
            await self._task

    async def _write_waiting(self) -> None:
        while self._waiting:
            build, num_bytes = self._waiting[0]
            if chunk := await run_off_loop(build, num_bytes=num_bytes):
                self._write(chunk)
            self._waiting.popleft()


async def start_source(
    request: ApiRequest[EngineRequest], source: AnswerSource, *, has_grammar: bool
) -> None:
    """Wait for the first output of a stream, so that an early error can set the HTTP status.

    If the request has a grammar, the wait has no time limit, because grammars compile slowly.
    """
    if request.params.stream:
        seconds = None if has_grammar else FIRST_OUTPUT_SECONDS
        await wait_for_first_output(request.http.receive, source, seconds=seconds)


async def respond(
    context: ApiContext,
    request: ApiRequest[EngineRequest],
    writer: AnswerWriter[ChoiceT, ResponseT],
    *,
    headers: dict[str, str] | None = None,
    ping: Ping | None = None,
) -> Response:
    """Answer a started request as JSON or stream. The default `ping` event is an SSE comment."""
    if not request.params.stream:
        answer = await run_while_connected(request.http.receive, writer.whole())
        return await run_off_loop(
            lambda: build_json_response(answer, headers=headers), num_bytes=writer.num_bytes
        )
    seconds = context.options.sse_keep_alive_interval
    event, seconds = ping or (_KEEP_ALIVE if seconds else b"", seconds)
    stream = EventStream(writer.stream, source=writer.source, ping=event, ping_seconds=seconds)
    stream.headers.update(headers or {})
    return stream


def drop_tokens(output: RequestOutput) -> RequestOutput:
    """Remove the generated token from an output of a prompt-only request."""
    return msgspec.structs.replace(
        output,
        token_ids=[],
        pieces=[],
        logprobs=None if output.logprobs is None else [],
        num_output_tokens=0,
        finish_reason="length",
        stop_reason=None,
    )
