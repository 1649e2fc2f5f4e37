"""Serve /v1/completions, which continues one or several plain prompts."""

import secrets
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from negamax.api.access import list_ids
from negamax.api.common.answer import AnswerSource, Choice, respond
from negamax.api.common.api_request import get_cache_salt, read_api_request
from negamax.api.common.choice_reader import PlainReader
from negamax.api.common.completion_writer import CompletionWriter
from negamax.api.common.context import ApiContext
from negamax.api.common.logprobs import TextLogprobWriter, convert_prompt_logprobs
from negamax.api.common.turn import PlainPrompt, answer_blocks, start_prompts
from negamax.api.dialects.completions.schema import CompletionRequest, TextAnswer, TextChoice
from negamax.api.http.request_body import compute_max_chars
from negamax.api.http.sse import encode_event
from negamax.api.openapi import describe_body
from negamax.api.schemas.answers import PromptLogprobs
from negamax.api.schemas.request_model import refuse
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams
from negamax.text.parser.events import ParserEvent

_CHARS_PER_TOKEN = 4
_BYTES_PER_PROMPT_TOKEN = 8  # Estimated bytes of a prompt token's text and id in JSON.


def make_completions_router(context: ApiContext) -> APIRouter:
    router = APIRouter()
    body_schema = describe_body(CompletionRequest)

    @router.post("/v1/completions", openapi_extra=body_schema)
    async def completions(http: Request) -> Response:
        """Continue one or several prompts."""
        request = await read_api_request(context, http, CompletionRequest)
        params = request.params
        model = context.model_name(params.model)
        sampling = _build_sampling(params)
        _check_echo(params, max_chars=compute_max_chars(context.engine.info.max_model_len))
        answer_id = params.answer_id("cmpl")
        engine_id = f"{answer_id}-{secrets.token_hex(4)}"
        prompts = [
            PlainPrompt(
                prompt=prompt,
                sampling=sampling,
                form=lambda: params.grammar,
                reasoning_budget=params.reasoning_budget,
                request_id=f"{engine_id}-{number}",
                names=list_ids(answer_id),
                stream_interval=params.stream_interval,
            )
            for number, prompt in enumerate(params.prompt)
        ]
        token_ids, source = await start_prompts(context, request, prompts)
        choices = [
            _TextChoice(
                index,
                PlainReader(context.chat_format, token_ids[index // params.n]),
                prompt_index=index // params.n,
                is_prompt_only=params.scores_only,
                logprobs=TextLogprobWriter(
                    context.engine.tokenizer, as_ids=params.return_tokens_as_token_ids
                ),
            )
            for index in range(params.n * len(token_ids))
        ]
        writer = _TextWriter(
            context, params, source, choices, answer_id=answer_id, model=model, prompts=token_ids
        )
        return await respond(context, request, writer)

    @router.post("/v1/completions/kv_blocks", openapi_extra=body_schema)
    async def kv_blocks(http: Request) -> Response:
        """Return the block hashes of the first prompt. Generate no answer."""
        request = await read_api_request(context, http, CompletionRequest)
        context.model_name(request.params.model)
        prompts, salt = request.params.prompt[:1], get_cache_salt(request)
        (token_ids,) = await context.prompts.plain(prompts, cache_salt=salt)
        return await answer_blocks(context, request, token_ids)

    return router


def _check_echo(params: CompletionRequest, *, max_chars: int) -> None:
    """Refuse `echo` if the echoed prompts of all choices together are too long."""
    if params.echo:
        sizes = (
            len(one) * (1 if isinstance(one, str) else _CHARS_PER_TOKEN) for one in params.prompt
        )
        if (count := params.n * sum(sizes)) > max_chars:
            refuse(
                "echo", f"{params.n} choices repeat {count} characters; the limit is {max_chars}"
            )


def _build_sampling(params: CompletionRequest) -> SamplingParams:
    """Build the sampling parameters. To score an echoed prompt, the engine generates one token."""
    sampling = params.sampling_params(
        max_tokens=1 if params.scores_only else params.max_tokens, logprobs=params.logprobs
    )
    if not params.echo or params.logprobs is None:
        return sampling
    asked = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    return replace(sampling, prompt_logprobs=max(asked))


@dataclass(slots=True, eq=False, kw_only=True)
class _TextChoice(Choice):
    """Unsent output of a choice. Only the request's `_TextWriter` changes this object."""

    logprobs: TextLogprobWriter
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    echoed: bool = False
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _TextWriter(CompletionWriter[_TextChoice, TextAnswer]):
    chunk_type = TextAnswer

    def __init__(
        self,
        context: ApiContext,
        params: CompletionRequest,
        source: AnswerSource,
        choices: list[_TextChoice],
        *,
        answer_id: str,
        model: str,
        prompts: list[list[int]],
    ) -> None:
        super().__init__(context, params, source, choices, answer_id=answer_id, model=model)
        self._params = params
        self._prompts = prompts
        self._echoes: dict[int, str] = {}  # prompt index -> echoed text of the prompt

    def count_bytes(self, choice: _TextChoice, output: RequestOutput) -> int:
        shows_prompt = self._params.echo or self._params.return_token_ids
        is_first = output.num_output_tokens == len(output.token_ids)
        has_prompt = shows_prompt and (is_first or output.finish_reason is not None)
        num_tokens = len(self._prompts[choice.prompt_index]) if has_prompt else 0
        return super().count_bytes(choice, output) + _BYTES_PER_PROMPT_TOKEN * num_tokens

    def take(self, choice: _TextChoice, output: RequestOutput, events: list[ParserEvent]) -> None:
        if not choice.echoed:
            choice.echoed = True
            choice.text.append(self._begin(choice, output))
        choice.text.append(output.text)
        choice.token_ids += output.token_ids
        for entry in output.logprobs or ():
            choice.logprobs.push(entry)

    def response(self) -> TextAnswer:
        choices = [self._build_choice(choice, last=True) for choice in self.choices]
        return TextAnswer(
            **self._head, choices=choices, usage=self.usage, kv_transfer_params=self._lease
        )

    def chunk(self, choice: _TextChoice, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        self.take(choice, output, events)
        is_last = output.finish_reason is not None
        has_news = any(choice.text) or (self._reports_tokens and bool(output.token_ids))
        if not has_news and not is_last:
            return b""
        choices = [self._build_choice(choice, last=is_last)]
        return encode_event(TextAnswer(**self._head, choices=choices, usage=self._chunk_usage))

    def _begin(self, choice: _TextChoice, output: RequestOutput) -> str:
        """Return the echoed prompt or an empty text. Add the prompt's logprobs to the choice."""
        prompt, entries = self._prompts[choice.prompt_index], output.prompt_logprobs
        if entries is not None and self._params.prompt_logprobs is not None:
            choice.prompt_logprobs = convert_prompt_logprobs(self._tokenizer, entries)
        if not self._params.echo:
            return ""
        if entries is not None and self._params.logprobs is not None:
            choice.logprobs.push_first(prompt[0])
            for entry in entries:
                choice.logprobs.push(entry)
        given = self._params.prompt[choice.prompt_index]
        if isinstance(given, str):
            return given
        if choice.prompt_index not in self._echoes:
            text = self._tokenizer.decode(prompt, skip_special_tokens=False)
            self._echoes[choice.prompt_index] = text
        return self._echoes[choice.prompt_index]

    def _build_choice(self, choice: _TextChoice, *, last: bool) -> TextChoice:
        text, choice.text = "".join(choice.text), []
        logprobs = choice.logprobs.take() if self._params.logprobs is not None else None
        token_ids, choice.token_ids = choice.token_ids, []
        ids = self._params.return_token_ids
        return TextChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.reader.finish_reason,
            stop_reason=choice.reader.stop_reason if last else UNSET,
            token_ids=token_ids if ids else UNSET,
            prompt_logprobs=choice.prompt_logprobs,
            prompt_token_ids=self._prompts[choice.prompt_index] if ids and last else UNSET,
        )
