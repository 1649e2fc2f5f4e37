"""What every route needs: the engine, the prompt builder, the metrics and the names the model answers to."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from negamax import __version__
from negamax.api.conversation import PromptBuilder
from negamax.api.metrics import ServerMetrics
from negamax.api.schemas.common import nearest, shown
from negamax.base.errors import NotFoundError
from negamax.config.options import ServerOptions
from negamax.engine.client import AsyncEngine
from negamax.engine.output import RequestOutput
from negamax.scheduler.request import SamplingParams

FINGERPRINT = f"negamax-{__version__}"


@dataclass(frozen=True)
class ApiContext:
    """One server's parts; made once, shared by all routes."""

    engine: AsyncEngine
    prompts: PromptBuilder
    metrics: ServerMetrics
    options: ServerOptions
    model_names: tuple[str, ...]  # the first is the one answers carry when the request names none
    started: int  # seconds since 1970

    @classmethod
    def create(cls, engine: AsyncEngine, options: ServerOptions) -> ApiContext:
        """The context of a started engine."""
        names = options.served_model_name or (engine.info.served_model_name,)
        return cls(
            engine=engine,
            prompts=PromptBuilder(engine.tokenizer, engine.chat_template, max_model_len=engine.info.max_model_len),
            metrics=ServerMetrics(lambda: engine.stats, info=engine.info, model_name=names[0]),
            options=options,
            model_names=names,
            started=int(time.time()),
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

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse parameters out of range before any work is done for them."""
        sampling.check(max_logprobs=self.engine.info.max_logprobs, vocab_size=self.engine.info.vocab_size)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int,
        cache_salt: str,
        arrival: float,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs, measured. Errors at the call are the engine's; `arrival` is a `time.monotonic()`."""
        outputs = self.engine.generate(
            prompt_token_ids, sampling, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        return self.metrics.record(outputs, sampling=sampling, arrival=arrival)
