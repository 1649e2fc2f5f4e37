"""`negamax bench serve`: send a workload to an OpenAI-compatible server and record the answers.

Sessions arrive at the given rate as a gamma process, by default a Poisson process. The turns of a
session run one after the other. A concurrency limit delays requests. As in vLLM, this delay is no
part of the latency.
"""

import asyncio
import gc
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import msgspec

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError
from negamax.bench import serve_workloads as workloads
from negamax.bench.agent_sessions import AgentSessions, source_code
from negamax.bench.drafts import NO_DRAFTS, DraftCounts
from negamax.bench.serve_client import ExchangeError, ResponseReader, ResponseRecord, ServingClient
from negamax.bench.serve_options import BenchOptions
from negamax.bench.serve_workloads import Prompts, Session, TextScale, TurnResponse, random_text
from negamax.engine.shape import SHAPE

PROBE_CHARS = (64, 4096)  # Lengths of two prompts, in characters, to measure tokens per character.
# `COUNTING_SERVERS` have continuous_usage_stats; /v1/models shows these names as `owned_by`.
COUNTING_SERVERS = ("negamax", "vllm", "sglang")
UNSENT = "not sent: an earlier turn of the session failed"
_REFUSALS = ("HTTP 400", "HTTP 401", "HTTP 403", "HTTP 404", "HTTP 422")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """The result of a run. All records use the same clock, in seconds."""

    model: str
    records: tuple[ResponseRecord, ...]  # One record per request, in the order of sending.
    seconds: float  # Time from the first request to the end of the last request.
    notes: tuple[str, ...]
    interrupted: bool = False
    drafts: DraftCounts = NO_DRAFTS  # Draft tokens counted in the server's /metrics.
    shape: dict[str, Any] | None = None  # Serving shape from /server_info; None if not reported.
    retokenized: int | None = None  # Tokenizer's token count of all answers; None: no --tokenizer.

    @property
    def good(self) -> list[ResponseRecord]:
        """Return the records of the requests that succeeded."""
        return [record for record in self.records if record.error is None]


def first_start(records: Iterable[ResponseRecord]) -> float:
    """Return the time at which the first request was sent, or 0 if no request was sent."""
    return min((record.started for record in records if record.started), default=0.0)


@dataclass
class RunProgress:
    """Progress of a run, which a display shows."""

    total: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    started: float | None = None  # `time.perf_counter` before the first timed request
    stage: str = "connecting"


@dataclass(frozen=True)
class _Server:
    """The server under test."""

    client: ServingClient
    model: str
    context_length: int | None  # The model's limit in tokens; None: not reported.
    running_usage: bool  # Whether chunks can report the output tokens so far.
    shape: dict[str, Any] | None = None


def run(
    options: BenchOptions,
    progress: RunProgress,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Measurement:
    """Run the workload once. Raises `ConfigError` or `NegamaxError` if the workload cannot run."""
    env.raise_file_limit()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_run(options, progress))


async def _run(options: BenchOptions, progress: RunProgress) -> Measurement:
    async with _connected(options) as server:
        progress.stage = "preparing"
        options, workload = await _prepare(options, server)
        progress.stage, progress.total = "warming up", workload.num_requests
        load = _Load(options, server, progress)
        await _warm_up(load, workload.warmups)
        before = await _drafts(server.client)
        if options.profile and (refusal := await _profile(server.client, "start")):
            raise NegamaxError(f"--profile: {refusal}")
        gc.collect()
        gc.freeze()  # exclude the workload from garbage collection
        progress.stage, progress.started = "running", time.perf_counter()
        interrupted = False
        try:
            await load.drive(workload.sessions)
        except asyncio.CancelledError:  # Ctrl-C: show the partial result.
            interrupted = True
        finally:
            gc.unfreeze()
        notes = workload.notes
        if options.profile and (refusal := await _profile(server.client, "stop")):
            notes += (refusal,)
        drafts = (await _drafts(server.client)).subtract(before)
    records = tuple(load.records)
    begin = first_start(records)
    seconds = max(max((record.ended for record in records), default=0.0) - begin, 1e-9)
    retokenized = _count_again(options, records)
    return Measurement(
        server.model, records, seconds, notes, interrupted, drafts, server.shape, retokenized
    )


def _count_again(options: BenchOptions, records: Sequence[ResponseRecord]) -> int | None:
    """Count the tokens of all answers with --tokenizer; return None if the option is not set."""
    if options.tokenizer is None:
        return None
    encode = _tokenizer(options.tokenizer).encode
    return sum(len(encode("".join(record.texts or ()))) for record in records if not record.error)


async def _drafts(client: ServingClient) -> DraftCounts:
    """Read the counts of draft tokens, which are 0 if the server has no /metrics."""
    text = await _ask(client, "/metrics")
    return DraftCounts.of_metrics(text if isinstance(text, str) else "")


async def _profile(client: ServingClient, action: str) -> str | None:
    """Start or stop a profile of the server. Return the reason of a failure, or None."""
    path = f"/{action}_profile"
    try:
        status, answer = await client.ask("POST", path)
    except ExchangeError as error:
        return f"{path} failed: {error}"
    if status == 200:
        return None
    detail = answer.get("error", answer) if isinstance(answer, dict) else answer
    detail = detail.get("message", detail) if isinstance(detail, dict) else detail
    return f"{path} failed with status {status}: {str(detail)[:200]}"


async def _ask(client: ServingClient, path: str) -> Any:
    """Return the JSON or the text of `path`; None if the server does not provide the path."""
    try:
        status, answer = await client.ask("GET", path)
    except ExchangeError:
        return None
    return answer if status == 200 else None


@asynccontextmanager
async def _connected(options: BenchOptions) -> AsyncIterator[_Server]:
    """Connect to the server. Yield the server with the name and context length of its model."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    for pair in options.headers:
        name, _, value = pair.partition("=")
        headers[name.strip().lower()] = value.strip()
    client = ServingClient(options.url, headers=headers, timeout=options.request_timeout)
    try:
        cards = await _models(client, options)
        names = [card.get("id") for card in cards]
        if options.model is None and not names:
            raise ConfigError(f"{options.url}/v1/models lists no model", hint="add --model NAME")
        model = options.model or str(names[0])
        card = cards[names.index(model)] if model in names else {}
        length = card.get("max_model_len")
        length = length if isinstance(length, int) else None
        counts = options.itl_rule == "token" or card.get("owned_by") in COUNTING_SERVERS
        shape = await _ask_shape(client) if card.get("owned_by") == "negamax" else None
        yield _Server(client, model, length, running_usage=counts, shape=shape)
    finally:
        client.close()


async def _ask_shape(client: ServingClient) -> dict[str, Any] | None:
    answer = await _ask(client, "/server_info")
    shape = answer.get(SHAPE) if isinstance(answer, dict) else None
    return shape if isinstance(shape, dict) else None


async def _models(client: ServingClient, options: BenchOptions) -> list[dict[str, Any]]:
    """Return the entries of /v1/models, or [] if the route is missing and --model is set."""
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            status, answer = await client.ask("GET", "/v1/models")
        except ExchangeError as error:
            status, answer = 0, str(error)
        if status == 200 and isinstance(answer, dict) and isinstance(answer.get("data"), list):
            return [card for card in answer["data"] if isinstance(card, dict)]
        if status in (401, 403):
            raise NegamaxError(
                f"{options.url}/v1/models: HTTP {status}", hint="set --api-key to a valid key"
            )
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(0.5)
    if status == 0:
        hint = "start a server, or pass its address with --base-url or --host and --port"
        raise NegamaxError(f"{options.url} does not answer: {answer}", hint=hint)
    if options.model is None:
        unknown = f"{options.url}/v1/models returns HTTP {status}, so the model's name is not known"
        raise ConfigError(unknown, hint="add --model NAME")
    return []


# The workload


async def _prepare(
    options: BenchOptions, server: _Server
) -> tuple[BenchOptions, workloads.BenchWorkload]:
    """Return `options` with the chosen prompt format, and the workload for this server."""
    has_file = options.dataset_path is not None
    if options.dataset_name == "custom" or (options.dataset_name == "agent" and has_file):
        sessions = workloads.read_requests(str(options.dataset_path), options)
        return options, workloads.file_workload(sessions, options)
    if options.dataset_name == "agent":
        return options, await _agent_workload(options, server)
    if options.dataset_name == "sharegpt":
        return options, await _sharegpt_workload(options, server)
    longest = workloads.longest_prompt(options)
    if server.context_length is not None and longest > server.context_length:
        hint = "lower --random-input-len or --random-output-len (or --prefix-repetition-...-len)"
        limit = f"the model's context length is {server.context_length}"
        raise ConfigError(f"prompts with outputs have up to {longest} tokens; {limit}", hint=hint)
    if options.prompt_format == "auto":
        options = replace(options, prompt_format="text" if options.is_chat else "ids")
    scale: TextScale | None = None
    notes: tuple[str, ...] = ()
    if options.prompt_format == "text":
        sample = random_text(random.Random(options.seed), PROBE_CHARS[1])
        scale, notes = await measure_scale(options, server, sample=sample)
    prompts = Prompts(options, scale, _vocabulary(options))
    is_random = options.dataset_name == "random"
    turns = workloads.random_turns if is_random else workloads.prefix_repetition_turns
    return options, replace(workloads.endless_workload(turns(prompts), options), notes=notes)


async def _agent_workload(options: BenchOptions, server: _Server) -> workloads.BenchWorkload:
    sample = source_code(random.Random(options.seed), PROBE_CHARS[1])
    scale, notes = await measure_scale(options, server, sample=sample)
    sessions = AgentSessions(options, scale=scale, context_length=server.context_length)
    chosen = workloads.take_turns(iter(sessions), options.num_prompts)
    warmups = tuple(workloads.shortened(sessions.session(), 1) for _ in range(options.num_warmups))
    turns = f"{len(chosen)} sessions of up to {max(session.num_turns for session in chosen)} turns"
    return workloads.BenchWorkload(chosen, warmups, (turns, *notes))


async def _sharegpt_workload(options: BenchOptions, server: _Server) -> workloads.BenchWorkload:
    pairs = workloads.read_sharegpt(str(options.dataset_path))
    notes: tuple[str, ...] = ()
    if options.tokenizer is not None:
        encode, scale = _tokenizer(options.tokenizer).encode, None
    else:
        text = "\n".join(chain.from_iterable(pairs[:200]))[: PROBE_CHARS[1]]
        scale, notes = await measure_scale(options, server, sample=text)

    def count(text: str) -> int:
        return len(encode(text)) if scale is None else scale.tokens(len(text))

    workload = workloads.sharegpt_workload(
        pairs, options, count=count, context_length=server.context_length
    )
    return replace(workload, notes=(*workload.notes, *notes))


def _tokenizer(name: str) -> Any:
    from negamax.checkpoint.hub import resolve_model
    from negamax.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(resolve_model(name, needs_weights=False))


def _vocabulary(options: BenchOptions) -> Sequence[int]:
    """Return token ids for random prompts: the tokenizer's text tokens, or ids of most models."""
    if options.tokenizer is None or options.prompt_format != "ids":
        return workloads.COMMON_IDS
    tokenizer = _tokenizer(options.tokenizer)
    return [token for token in range(tokenizer.vocab_size) if not tokenizer.is_added(token)]


async def measure_scale(
    options: BenchOptions, server: _Server, *, sample: str
) -> tuple[TextScale, tuple[str, ...]]:
    """Measure tokens per character and the tokens of an empty prompt by requests to the server."""
    counts: list[int] = []
    for num_chars in PROBE_CHARS:
        prompt = workloads.as_prompt(sample[:num_chars], options)
        body = {"model": server.model, "max_tokens": 1, **prompt}
        with suppress(ExchangeError):
            status, answer = await server.client.ask("POST", options.path, body)
            usage = answer.get("usage") if status == 200 and isinstance(answer, dict) else None
            if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
                counts.append(usage["prompt_tokens"])
    chars = [len(sample[:num_chars]) for num_chars in PROBE_CHARS]
    if len(counts) < 2 or counts[1] <= counts[0] or chars[1] <= chars[0]:
        return TextScale(), (
            "the server reports no prompt tokens; 4 characters are assumed to be one token",
        )
    per_char = (counts[1] - counts[0]) / (chars[1] - chars[0])
    return TextScale(per_char, max(0, round(counts[0] - per_char * chars[0]))), ()


# The load


class _Load:
    """Sends sessions and stores the records of their requests."""

    def __init__(self, options: BenchOptions, server: _Server, progress: RunProgress) -> None:
        self.records: list[ResponseRecord] = []
        self._options = options
        self._server = server
        self._progress = progress
        limit = options.max_concurrency
        self._room = nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._fields = request_fields(options, server.model, running_usage=server.running_usage)

    async def drive(self, sessions: Sequence[Session]) -> None:
        """Start each session at its time and wait for all of them."""
        tasks: list[asyncio.Task[None]] = []
        begin = time.perf_counter()
        try:
            starts = zip(sessions, arrivals(self._options), strict=False)
            for number, (session, at) in enumerate(starts):
                if (wait := begin + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self.session(session, number)))
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def session(self, session: Session, number: int) -> None:
        """Send the turns of one session."""
        turns, sent = session.start(), 0
        answer: TurnResponse | None = None
        while True:
            try:
                turn = next(turns) if answer is None else turns.send(answer)
            except StopIteration:
                break
            if turn.pause:
                await asyncio.sleep(turn.pause)
            answer = await self._turn(turn, number, collect=session.wants_responses)
            sent += 1
        now = time.perf_counter()
        for _ in range(session.num_turns - sent):
            self._count(ResponseRecord(number, ended=now, error=UNSENT))

    async def _turn(
        self, turn: workloads.SessionTurn, number: int, *, collect: bool
    ) -> TurnResponse:
        record = ResponseRecord(number, texts=None if self._options.tokenizer is None else [])
        reader = ResponseReader(record, collect=collect, running_usage=self._server.running_usage)
        async with self._room:
            body = msgspec.json.encode({**turn.body, **self._fields})
            try:
                await self._server.client.stream(self._options.path, body, reader)
            finally:
                if record.prompt_tokens is None and record.error is None:
                    record.prompt_tokens, record.prompt_reported = turn.prompt_tokens, False
                self._count(record)
        return TurnResponse(record, reader.message)

    def reset(self) -> None:
        """Delete all records."""
        self.records.clear()
        self._progress.done = self._progress.failed = self._progress.output_tokens = 0

    def _count(self, record: ResponseRecord) -> None:
        self.records.append(record)
        self._progress.done += 1
        self._progress.failed += record.error is not None
        self._progress.output_tokens += record.output_tokens or len(record.arrivals)


async def _warm_up(load: _Load, sessions: Sequence[Session]) -> None:
    """Run `sessions`, and delete their records. Raises `NegamaxError` if all sessions fail."""
    for number, session in enumerate(sessions):
        await load.session(session, number)
    if sessions and all(record.error in _REFUSALS for record in load.records):
        first = load.records[0]
        error = f"{first.error}: {first.detail}".rstrip(": ")
        raise NegamaxError(f"the server refuses the warm-up request: {error}")
    load.reset()


def request_fields(options: BenchOptions, model: str, *, running_usage: bool) -> dict[str, Any]:
    """Return the common fields of all requests: model, streaming, sampling, --extra-body."""
    counts = {"continuous_usage_stats": True} if running_usage else {}
    stream_options = {"include_usage": True} | counts
    fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": stream_options}
    fields |= {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.ignores_eos:
        fields["ignore_eos"] = True
    return fields | options.extra_body


def arrivals(options: BenchOptions) -> Iterator[float]:
    """Yield sessions' start times in seconds. The gaps are gamma-distributed with mean 1 / rate.

    A burstiness of 1 gives a Poisson process. Lower values give bursts.
    """
    rng, at = random.Random(options.seed ^ 0x5EED), 0.0
    while True:
        yield at
        if math.isfinite(options.request_rate):
            scale = 1.0 / (options.request_rate * options.burstiness)
            at += rng.gammavariate(options.burstiness, scale)
