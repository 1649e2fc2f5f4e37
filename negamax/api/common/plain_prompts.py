"""Plain prompts to continue, for the dialects without conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from negamax.api.access import salt_of
from negamax.api.common.answering import begin
from negamax.api.common.constraints import constrained
from negamax.api.common.context import ApiContext, RequestParams
from negamax.api.common.conversation import ReasoningCounter, off_loop
from negamax.config.grammar import Grammar
from negamax.engine.client.generation import Generations
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams
from negamax.text.chat_format import ChatFormat
from negamax.text.parser.events import ParserEvent


class Formed(Protocol):
    """What describes the form of an answer."""

    @property
    def grammar(self) -> Grammar | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrompt:
    """One of the prompts of a request."""

    prompt: str | list[int]
    sampling: SamplingParams
    formed: Formed  # has the form of the answer
    reasoning_budget: int | None  # tokens, where the prompt ends within its reasoning
    request_id: str
    names: Sequence[str]  # what the client may call it
    stream_interval: int | None


class PlainReader:
    """Counts the tokens of a choice, whose text stays as it is. Single writer: the request's
    handler.
    """

    __slots__ = ("_counter", "finish_reason", "stop_reason")

    def __init__(self, chat_format: ChatFormat, prompt: Sequence[int]) -> None:
        in_reasoning = chat_format.reasoning_after(prompt) == "open"
        self._counter = ReasoningCounter(chat_format, in_reasoning=in_reasoning)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the reasoning so far."""
        return self._counter.count

    def push(self, output: RequestOutput) -> list[ParserEvent]:
        """As of `Reader`; the text is not parsed."""
        self._counter.push(output.token_ids)
        if self._counter.is_undecided:  # nobody reads the text: a call opener is taken for one
            self._counter.call_began()
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return []


async def begin_prompts(
    context: ApiContext,
    request: Request,
    prompts: Sequence[PlainPrompt],
    params: RequestParams,
    *,
    num_bytes: int,
    arrival: float,
) -> tuple[list[list[int]], Generations]:
    """Check, tokenise and start `prompts`; their tokens, and what answers them. Errors: everything
    that can be refused, also what only the engine knows.
    """
    for prompt in prompts:
        context.check_sampling(prompt.sampling)
    token_ids = await context.prompts.plain(
        [prompt.prompt for prompt in prompts], cache_salt=salt_of(request, params.cache_salt)
    )
    grammars = await off_loop(
        lambda: [prompt.formed.grammar for prompt in prompts], num_bytes=num_bytes
    )
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
    source = Generations(parts)
    await begin(request, params, source, has_grammar=any(one is not None for one in grammars))
    return token_ids, source
