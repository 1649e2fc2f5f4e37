"""/v1/completions: plain text to continue, one or many prompts, whole or streamed."""

from __future__ import annotations

import secrets
import time
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from negamax.api.access import names_of, salt_of
from negamax.api.common.constraints import constrained
from negamax.api.common.context import FINGERPRINT, ApiContext
from negamax.api.common.conversation import (
    ReasoningCounter,
    UsageMeter,
    check_failed,
    off_loop,
    without_tokens,
)
from negamax.api.common.logprobs import TextLogprobWriter, prompt_logprobs
from negamax.api.errors import failure_event, json_response
from negamax.api.http.request_body import read_request
from negamax.api.http.sse import (
    DONE,
    FIRST_OUTPUT_SECONDS,
    Write,
    event,
    first_output,
    while_connected,
)
from negamax.api.openai.completions_schema import CompletionRequest, TextAnswer, TextChoice
from negamax.api.openapi import json_body
from negamax.api.schemas.answers import PromptLogprobs, TextLogprobs, Usage
from negamax.engine.client.generation import Generations
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams
from negamax.text.chat_format import ChatFormat


def completions_router(context: ApiContext) -> APIRouter:
    """The route of plain completions."""
    router = APIRouter()
    body_schema = json_body(CompletionRequest)

    @router.post("/v1/completions", openapi_extra=body_schema)
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        arrival = time.monotonic()
        params, num_bytes = await read_request(request, CompletionRequest, context.body_limits)
        model = context.model_name(params.model)
        sampling = _sampling(params)
        context.check_sampling(sampling)
        prompts = await context.prompts.plain(
            params.prompt, cache_salt=salt_of(request, params.cache_salt)
        )
        await off_loop(lambda: params.grammar, num_bytes=num_bytes)  # once, for all prompts
        context.check_room(request, [(prompt, sampling) for prompt in prompts])
        samplings = [
            _constrained(sampling, params, prompt, chat_format=context.chat_format)
            for prompt in prompts
        ]
        answer = _TextAnswering(context, params, model=model, prompts=prompts)
        engine_id = f"{answer.id}-{secrets.token_hex(4)}"
        parts = [
            context.generate(
                prompt,
                limits,
                params,
                request_id=f"{engine_id}-{number}",
                names=names_of(answer.id),
                arrival=arrival,
                stream_interval=params.stream_interval,
                http=request,
            )
            for number, (prompt, limits) in enumerate(zip(prompts, samplings, strict=True))
        ]
        generations = Generations(parts)
        if params.stream:
            # a grammar is compiled first, and may be refused
            is_free = all(limits.grammar is None for limits in samplings)
            await first_output(
                request.receive, generations, seconds=FIRST_OUTPUT_SECONDS if is_free else None
            )
            return context.event_stream(partial(answer.stream, generations), source=generations)
        return json_response(await while_connected(request.receive, answer.whole(generations)))

    return router


def _sampling(params: CompletionRequest) -> SamplingParams:
    """Echoed prompts carry logprobs too, and scoring a prompt runs one step whose token is not
    shown.
    """
    sampling = params.sampling_params(
        max_tokens=1 if params.scores_only else params.max_tokens, logprobs=params.logprobs
    )
    if not params.echo or params.logprobs is None:
        return sampling
    asked = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    return replace(sampling, prompt_logprobs=max(asked))


def _constrained(
    sampling: SamplingParams,
    params: CompletionRequest,
    prompt: list[int],
    *,
    chat_format: ChatFormat,
) -> SamplingParams:
    """With the form of the answer, which begins after the reasoning where the prompt ends in
    one.
    """
    reasoning = chat_format.reasoning_after(prompt)
    budget = params.reasoning_budget if reasoning == "open" else None
    return constrained(
        sampling, chat_format, reasoning=reasoning, grammar=params.grammar, budget=budget
    )


class _Choice:
    """One choice while it is generated. Single writer: its `_TextAnswering`."""

    def __init__(self, reasoning: ReasoningCounter, logprobs: TextLogprobWriter) -> None:
        self.reasoning = reasoning
        self.logprobs = logprobs
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.echoed = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _TextAnswering:
    """Answers one completion request from the engine's outputs. Single writer: the request's
    handler.
    """

    def __init__(
        self,
        context: ApiContext,
        params: CompletionRequest,
        *,
        model: str,
        prompts: list[list[int]],
    ) -> None:
        self.id = params.answer_id("cmpl")
        self._created = int(time.time())
        self._tokenizer = context.engine.tokenizer
        self._params = params
        self._model = model
        self._prompts = prompts
        self._usage = UsageMeter()
        chat_format = context.chat_format
        self._choices = [
            _Choice(
                ReasoningCounter(
                    chat_format, in_reasoning=chat_format.reasoning_after(prompt) == "open"
                ),
                TextLogprobWriter(self._tokenizer, as_ids=params.return_tokens_as_token_ids),
            )
            for prompt in prompts
            for _ in range(params.n)
        ]

    async def whole(self, generations: Generations) -> TextAnswer:
        """The answer in one piece."""

        def take(number: int, output: RequestOutput) -> None:
            index, text = self._take(number, output)
            self._choices[index].text.append(text)

        await generations.run(take)
        choices = [
            self._choice(index, "".join(choice.text), last=True)
            for index, choice in enumerate(self._choices)
        ]
        return self._envelope(choices, usage=self._usage.usage())

    async def stream(self, generations: Generations, write: Write) -> None:
        """The answer as events; an error after the start is an event too."""
        options = self._params.stream_options
        reports_tokens = self._params.return_token_ids or options.continuous_usage_stats

        def send(number: int, output: RequestOutput) -> None:
            index, text = self._take(number, output)
            is_sent = bool(text) or (reports_tokens and bool(output.token_ids))
            if not is_sent and output.finish_reason is None:
                return
            usage: Usage | UnsetType | None = None if options.reports_usage else UNSET
            if options.continuous_usage_stats:
                usage = self._usage.usage()
            choice = self._choice(index, text, last=output.finish_reason is not None)
            write(event(self._envelope([choice], usage=usage)))

        try:
            await generations.run(send)
            if options.reports_usage:
                write(event(self._envelope([], usage=self._usage.usage())))
        except Exception as error:
            write(failure_event(error, request_id=self.id))
        write(DONE)

    def _take(self, number: int, output: RequestOutput) -> tuple[int, str]:
        """Take an output into its choice; the choice's index and the new text."""
        check_failed(output)
        if self._params.scores_only:  # the one token that ran is not part of the answer
            output = without_tokens(output)
        index = number * self._params.n + output.index
        choice = self._choices[index]
        text = ""
        if not choice.echoed:
            choice.echoed = True
            text = self._begin(choice, number, output)
        text += output.text
        choice.token_ids += output.token_ids
        choice.reasoning.push(output.token_ids)
        if choice.reasoning.is_undecided:  # nobody reads the text: a call opener is taken for one
            choice.reasoning.call_began()
        for entry in output.logprobs or ():
            choice.logprobs.push(entry)
        self._usage.update(
            output, prompt=number, choice=index, reasoning_tokens=choice.reasoning.count
        )
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        return index, text

    def _begin(self, choice: _Choice, number: int, output: RequestOutput) -> str:
        """What comes before a choice's first token: the echoed prompt and its logprobs."""
        prompt, entries = self._prompts[number], output.prompt_logprobs
        if entries is not None and self._params.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, entries)
        if not self._params.echo:
            return ""
        if entries is not None and self._params.logprobs is not None:
            choice.logprobs.push_first(prompt[0])
            for entry in entries:
                choice.logprobs.push(entry)
        given = self._params.prompt[number]
        return (
            given
            if isinstance(given, str)
            else self._tokenizer.decode(prompt, skip_special_tokens=False)
        )

    def _choice(self, index: int, text: str, *, last: bool) -> TextChoice:
        choice = self._choices[index]
        logprobs: TextLogprobs | None = (
            choice.logprobs.take() if self._params.logprobs is not None else None
        )
        token_ids, choice.token_ids = choice.token_ids, []
        ids = self._params.return_token_ids
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason if last else UNSET,
            token_ids=token_ids if ids else UNSET,
            prompt_logprobs=choice.prompt_logprobs,
            prompt_token_ids=self._prompts[index // self._params.n] if ids and last else UNSET,
        )

    def _envelope(
        self, choices: list[TextChoice], *, usage: Usage | UnsetType | None
    ) -> TextAnswer:
        return TextAnswer(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=FINGERPRINT,
            usage=usage,
        )
