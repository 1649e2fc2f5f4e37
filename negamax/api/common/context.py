"""What every route needs: the engine, the prompt builder, the metrics and the names the model
answers to.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Request

from negamax import __version__
from negamax.api.access import Access, owner_of, salt_of
from negamax.api.common.conversation import PromptBuilder
from negamax.api.common.data_parallel_rank import asked_rank
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.http.lifecycle import Lifecycle
from negamax.api.http.request_body import BodyLimits
from negamax.api.http.sse import EventStream, Source, Write
from negamax.api.metrics import ServerMetrics
from negamax.api.processes.peers import PeerClient
from negamax.api.processes.server_rank import ServerRank
from negamax.api.request_log import RequestLog
from negamax.api.request_record import RequestRecord, RequestRecorder
from negamax.api.schemas.request_model import nearest, shown
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.api.tracing import RequestTracer
from negamax.base.errors import InvalidRequestError, NotFoundError
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.client.open_request import Observer, OpenRequest
from negamax.engine.client.output import TextReader
from negamax.models.chat_format import ChatFormat
from negamax.options.server import ServerOptions
from negamax.scheduler.request import SamplingParams

FINGERPRINT = f"negamax-{__version__}"
Ping = tuple[bytes, float]  # an event, and the seconds of silence after which it is sent
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it
_WHOLE_INTERVAL = 32  # tokens that are read at a time for an answer in one piece


@dataclass(frozen=True)
class ApiContext:
    """One server's parts; made once, shared by all routes."""

    engine: AsyncEngine
    prompts: PromptBuilder
    chat_format: ChatFormat
    metrics: ServerMetrics
    lifecycle: Lifecycle
    server_rank: ServerRank
    peers: PeerClient
    access: Access
    options: ServerOptions
    body_limits: BodyLimits
    model_names: tuple[str, ...]  # the first is the one answers carry when the request names none
    started: int  # seconds since 1970
    request_log: RequestLog | None
    tracer: RequestTracer | None

    @property
    def request_ended(self) -> list[Callable[[RequestRecord], None]]:
        """What takes the record of a request that is over: nothing without options for it."""
        takers = (self.request_log, self.tracer)
        return [taker.ended for taker in takers if taker is not None]

    @classmethod
    def create(
        cls, engine: AsyncEngine, options: ServerOptions, server_rank: ServerRank
    ) -> ApiContext:
        """The context of a started engine, in the process that has `server_rank`."""
        names = options.served_model_name or (engine.info.served_model_name,)
        chat_format = ChatFormat.of_model(
            engine.info.architecture,
            tokenizer=engine.tokenizer,
            template=engine.chat_template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )
        lifecycle = Lifecycle(
            drain_timeout=options.drain_timeout,
            numbers=server_rank.metrics,
            pulses=server_rank.pulses,
            index=server_rank.index,
        )
        return cls(
            engine=engine,
            prompts=PromptBuilder(
                engine.tokenizer,
                chat_format,
                max_model_len=engine.info.max_model_len,
                default_template_kwargs=options.default_chat_template_kwargs,
                allow_special_tokens_in_text=options.allow_special_tokens_in_text,
            ),
            chat_format=chat_format,
            metrics=ServerMetrics(
                engine,
                lifecycle,
                model_name=names[0],
                numbers=server_rank.metrics,
                index=server_rank.index,
            ),
            lifecycle=lifecycle,
            server_rank=server_rank,
            peers=PeerClient(server_rank),
            access=Access(options),
            options=options,
            body_limits=BodyLimits.of(
                max_bytes=options.max_body_bytes, max_model_len=engine.info.max_model_len
            ),
            model_names=names,
            started=int(time.time()),
            request_log=RequestLog(engine.tokenizer, max_prompt_chars=options.max_log_len)
            if options.enable_log_requests
            else None,
            tracer=RequestTracer(options.otlp_traces_endpoint)
            if options.otlp_traces_endpoint
            else None,
        )

    def model_name(self, requested: str | None) -> str:
        """The name to answer with; `NotFoundError` for a model that is not served here."""
        if requested is None:
            return self.model_names[0]
        if requested not in self.model_names:
            served = ", ".join(repr(name) for name in self.model_names)
            hint = nearest(requested, list(self.model_names))
            raise NotFoundError(
                f"the model {shown(requested)} is not served here; served: {served}.{hint}",
                param="model",
                code="model_not_found",
            )
        return requested

    def hidden_thoughts(self, signer: ThoughtSigner) -> HiddenThoughts:
        """What takes the thoughts of one request out of their signatures."""
        template = self.chat_format.template
        shows_earlier = template is not None and template.shows_earlier_thinking
        return HiddenThoughts(
            signer, context_length=self.engine.info.max_model_len, shows_earlier=shows_earlier
        )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse parameters out of range before any work is done for them."""
        sampling.check(
            max_logprobs=self.engine.info.max_logprobs, vocab_size=self.engine.info.vocab_size
        )

    def check_room(
        self, http: Request, prompts: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> None:
        """Refuse several prompts which together find no room: the errors of
        `AsyncEngine.check_room`.
        """
        tokens: list[int] = []
        for prompt, sampling in prompts:
            tokens += self.engine.prefill_tokens(len(prompt), sampling, num_choices=sampling.n)
        self.engine.check_room(tokens, owner=owner_of(http))

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        params: EngineRequest,
        *,
        request_id: str,
        names: Iterable[str] = (),
        arrival: float,
        stream_interval: int | None,
        http: Request,
        readers: Sequence[TextReader] | None = None,
    ) -> OpenRequest:
        """A request to the engine, measured. Errors at the call are the engine's; `arrival` is a
        `time.monotonic()`. The server's own limit of time counts beside the request's; its interval
        where the request has none. `http` is the HTTP request; `names` are what the client may
        call it, `readers` are as of `AsyncEngine.generate`.
        """
        observer: Observer = self.metrics.measured.meter(sampling, arrival=arrival)
        if self.request_ended:
            record = RequestRecord(
                request_id=request_id,
                http_request_id=http.state.request_id,
                route=http.url.path,
                model=self.model_names[0],
                headers=http.headers,
                num_prompt_tokens=len(prompt_token_ids),
                is_stream=params.stream,
                arrival=arrival,
                sampling=sampling,
            )
            observer = RequestRecorder(record, self.request_ended, then=observer)
        if params.priority and self.options.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority is {params.priority}; this server takes all requests in turn, so "
                f"allowed: 0",
                hint="leave it out, or start the server with --scheduling-policy priority",
                param="priority",
                code="invalid_value",
            )
        limits = [
            limit for limit in (params.timeout, self.options.request_timeout) if limit is not None
        ]
        generation = self.engine.generate(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            priority=params.priority,
            cache_salt=salt_of(http, params.cache_salt),
            data_parallel_rank=asked_rank(http, params, num_ranks=self.engine.num_ranks),
            deadline=arrival + min(limits) if limits else None,
            observer=observer,
            readers=readers,
            owner=owner_of(http, names),
            interval=(stream_interval or self.options.stream_interval)
            if params.stream
            else _WHOLE_INTERVAL,
        )
        if self.request_ended:
            record.sampling = msgspec.structs.replace(generation.sampling, n=sampling.n)
        if self.request_log is not None:
            self.request_log.began(record, prompt_token_ids)
        return generation

    def event_stream(
        self,
        write_events: Callable[[Write], Awaitable[None]],
        *,
        source: Source,
        ping: Ping | None = None,
    ) -> EventStream:
        """The response that sends what `write_events` writes, with `ping` in its pauses; None:
        comments."""
        seconds = self.options.sse_keep_alive_interval
        event, seconds = ping or (KEEP_ALIVE if seconds else b"", seconds)
        return EventStream(write_events, source=source, ping=event, ping_seconds=seconds)
