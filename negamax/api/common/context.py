"""Define the context of a server: the objects that its routes use."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from negamax import __version__
from negamax.api.access import Access
from negamax.api.common.conversation import PromptBuilder
from negamax.api.common.media import fetch_media
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.http.lifecycle import Lifecycle
from negamax.api.http.request_body import BodyLimits
from negamax.api.metrics import ServerMetrics
from negamax.api.processes.peers import PeerClient
from negamax.api.processes.server_rank import ServerRank
from negamax.api.recorder import RequestRecord
from negamax.api.request_log import RequestLog
from negamax.api.schemas.request_model import describe, suggest_nearest
from negamax.api.tracing import RequestTracer
from negamax.base.errors import NotFoundError
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.client.image_loader import ImageLoader
from negamax.engine.wire import ModelInfo
from negamax.models.chat_format import ChatFormat
from negamax.options.server import ServerOptions

FINGERPRINT = f"negamax-{__version__}"


@dataclass(frozen=True)
class ApiContext:
    """The objects of one server that all routes use."""

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
    model_names: tuple[str, ...]  # Names of the model. The first name is the default.
    started: int  # Unix time of the server's start, in seconds.
    request_log: RequestLog | None
    tracer: RequestTracer | None
    signer: ThoughtSigner

    @property
    def record_takers(self) -> list[Callable[[RequestRecord], None]]:
        """The functions that receive the record of each finished request."""
        return [taker.ended for taker in (self.request_log, self.tracer) if taker is not None]

    @classmethod
    def create(cls, engine: AsyncEngine, options: ServerOptions, server_rank: ServerRank) -> Self:
        """Build the context of a started engine for server process `server_rank`."""
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
                images=_make_loader(engine.info, options),
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
                max_bytes=options.body_bytes(has_images=engine.info.vision is not None),
                max_model_len=engine.info.max_model_len,
            ),
            model_names=names,
            started=int(time.time()),
            request_log=RequestLog(engine.tokenizer, max_prompt_chars=options.max_log_len)
            if options.enable_log_requests
            else None,
            tracer=RequestTracer(options.otlp_traces_endpoint)
            if options.otlp_traces_endpoint
            else None,
            signer=ThoughtSigner(engine.info.served_model_name),
        )

    def model_name(self, requested: str | None) -> str:
        """Return the model name for the answer. Raises `NotFoundError` for an unknown name."""
        if requested is None:
            return self.model_names[0]
        if requested not in self.model_names:
            served = ", ".join(repr(name) for name in self.model_names)
            hint = suggest_nearest(requested, list(self.model_names))
            raise NotFoundError(
                f"the model {describe(requested)} is not served; use one of {served}.{hint}",
                param="model",
                code="model_not_found",
            )
        return requested

    def hidden_thoughts(self) -> HiddenThoughts:
        template = self.chat_format.template
        shows_earlier = template is not None and template.shows_earlier_thinking
        return HiddenThoughts(
            self.signer, context_length=self.engine.info.max_model_len, shows_earlier=shows_earlier
        )


def _make_loader(info: ModelInfo, options: ServerOptions) -> ImageLoader | None:
    if info.vision is None:
        return None
    rule: Any = options.image_resize_rule
    domains = options.allowed_media_domains
    fetch = partial(fetch_media, domains=frozenset(map(str.lower, domains))) if domains else None
    return ImageLoader(info.vision, max_model_len=info.max_model_len, rule=rule, fetch=fetch)
