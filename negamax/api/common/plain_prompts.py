"""Plain prompts to continue, for the dialects without conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from negamax.api.access import salt_of
from negamax.api.common.answer import AnswerSource, start_source
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import off_loop
from negamax.api.common.turn import constrained
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.config.grammar import Grammar
from negamax.engine.client.open_request import OpenRequests
from negamax.scheduler.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrompt:
    """One of the prompts of a request."""

    prompt: str | list[int]
    sampling: SamplingParams
    form: Callable[[], Grammar | None]  # of the answer; may take long
    reasoning_budget: int | None  # tokens, where the prompt ends within its reasoning
    request_id: str
    names: Sequence[str]  # what the client may call it
    stream_interval: int | None


async def start_prompts(
    context: ApiContext,
    request: Request,
    prompts: Sequence[PlainPrompt],
    params: EngineRequest,
    *,
    num_bytes: int,
    arrival: float,
) -> tuple[list[list[int]], AnswerSource]:
    """Check, tokenise and start `prompts`; their tokens, and what answers them. Errors: everything
    that can be refused, also what only the engine knows.
    """
    for prompt in prompts:
        context.check_sampling(prompt.sampling)
    token_ids = await context.prompts.plain(
        [prompt.prompt for prompt in prompts], cache_salt=salt_of(request, params.cache_salt)
    )
    grammars = await off_loop(lambda: [prompt.form() for prompt in prompts], num_bytes=num_bytes)
    samplings = [prompt.sampling for prompt in prompts]
    context.check_room(request, list(zip(token_ids, samplings, strict=True)))
    parts = []
    for prompt, ids, grammar in zip(prompts, token_ids, grammars, strict=True):
        reasoning = context.chat_format.reasoning_after(ids)
        sampling = constrained(
            prompt.sampling,
            context.chat_format,
            reasoning=reasoning,
            grammar=grammar,
            budget=prompt.reasoning_budget if reasoning == "open" else None,
        )
        parts.append(
            context.generate(
                ids,
                sampling,
                params,
                request_id=prompt.request_id,
                names=prompt.names,
                arrival=arrival,
                stream_interval=prompt.stream_interval,
                http=request,
            )
        )
    source = parts[0] if len(parts) == 1 else OpenRequests(parts)
    await start_source(
        request, params, source, has_grammar=any(one is not None for one in grammars)
    )
    return token_ids, source
