"""Serve /v1/chat/completions. Whole answers and streams are built from the same parser events."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType

from negamax.api.access import list_ids
from negamax.api.common.answer import Choice, respond
from negamax.api.common.api_request import (
    ApiRequest,
    check_sampling,
    get_cache_salt,
    read_api_request,
)
from negamax.api.common.blocks import BlockWriter
from negamax.api.common.choice_reader import ChoiceReader
from negamax.api.common.completion_writer import CompletionWriter
from negamax.api.common.content_logprobs import ContentLogprobs
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import ChatPrompt, Conversation
from negamax.api.common.logprobs import convert_chat_logprobs, convert_prompt_logprobs
from negamax.api.common.turn import StartedTurn, Turn, answer_blocks, start_turn
from negamax.api.dialects.chat import schema
from negamax.api.errors import build_json_response
from negamax.api.http.request_threads import run_off_loop
from negamax.api.http.sse import encode_event
from negamax.api.openapi import describe_body
from negamax.api.schemas.answers import ChatLogprob, ChatLogprobs, PromptLogprobs, encode
from negamax.api.schemas.request_model import refuse
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import TokenLogprobs
from negamax.text.parser import events as parsed_events
from negamax.text.parser.events import ParserEvent, collect


def make_chat_router(context: ApiContext) -> APIRouter:
    router = APIRouter()
    body_schema = describe_body(schema.ChatRequest)

    @router.post("/v1/chat/completions", openapi_extra=body_schema)
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation with one JSON object or a stream of server-sent events."""
        request = await read_api_request(context, http, schema.ChatRequest)
        chat = request.params
        model = context.model_name(chat.model)
        turn = await run_off_loop(lambda: _build_turn(context, chat), num_bytes=request.num_bytes)
        answer_id = chat.answer_id("chatcmpl")
        engine_id = f"{answer_id}-{secrets.token_hex(4)}"
        started = await start_turn(
            context, request, turn, request_id=engine_id, names=list_ids(answer_id)
        )
        writer = _ChatWriter(context, chat, started, answer_id=answer_id, model=model)
        return await respond(context, request, writer)

    @router.post("/v1/chat/completions/render", openapi_extra=body_schema)
    async def render(http: Request) -> Response:
        """Return the text and the token ids of a conversation's prompt. Generate no answer."""
        request, prompt = await _read_prompt(context, http)
        answer = schema.RenderedPrompt(
            request_id=request.params.answer_id("chatcmpl"),
            model=context.model_name(request.params.model),
            prompt=prompt.text,
            token_ids=prompt.token_ids,
        )
        return await run_off_loop(lambda: build_json_response(answer), num_bytes=request.num_bytes)

    @router.post("/v1/chat/completions/kv_blocks", openapi_extra=body_schema)
    async def kv_blocks(http: Request) -> Response:
        """Return the block hashes of a conversation's prompt. Generate no answer."""
        request, prompt = await _read_prompt(context, http)
        return await answer_blocks(context, request, prompt.token_ids, prompt.images)

    return router


async def _read_prompt(
    context: ApiContext, http: Request
) -> tuple[ApiRequest[schema.ChatRequest], ChatPrompt]:
    """Read a request, and build its prompt without pixels."""
    request = await read_api_request(context, http, schema.ChatRequest)
    chat = request.params
    context.model_name(chat.model)
    _build_sampling(context, chat)
    prompt = await context.prompts.chat(
        _build_conversation(chat, chat.offered_tools),
        num_bytes=request.num_bytes,
        cache_salt=get_cache_salt(request),
        needs_pixels=False,
    )
    return request, prompt


def _build_sampling(context: ApiContext, chat: schema.ChatRequest) -> SamplingParams:
    limit = 1 if chat.token_limit == 0 else chat.token_limit
    sampling = chat.sampling_params(max_tokens=limit, logprobs=chat.num_logprobs)
    most = context.engine.info.max_logprobs
    if (sampling.logprobs or 0) > most:
        refuse("top_logprobs", f"the value {sampling.logprobs} is not allowed; send 0 to {most}")
    check_sampling(context, sampling)
    return sampling


def _build_conversation(
    chat: schema.ChatRequest, tools: list[dict[str, Any]] | None
) -> Conversation:
    return Conversation(
        messages=chat.messages,
        tools=tools,
        thinking=chat.thinking_choice,
        template_kwargs=chat.chat_template_kwargs,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


def _build_turn(context: ApiContext, chat: schema.ChatRequest) -> Turn:
    sampling, tools = _build_sampling(context, chat), chat.offered_tools
    return Turn(
        tools=tools,
        calls=chat.call_choice(tools),
        conversation=_build_conversation(chat, tools),
        form=chat.grammar,
        sampling=sampling,
        reasoning=chat.reasoning_place,
        stream_reasoning=chat.stream_reasoning,
        named_call_stops=True,
        is_prompt_only=chat.token_limit == 0,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class _ChatChoice(Choice):
    """Unsent output of a choice. Only the request's `_ChatWriter` changes this object."""

    reader: ChoiceReader
    blocks: BlockWriter
    found: ContentLogprobs | None  # None without logprobs, or if the content includes reasoning
    events: list[ParserEvent] = field(default_factory=list)  # for an unstreamed answer
    role_sent: bool = False
    entries: list[TokenLogprobs] = field(default_factory=list)  # token logprobs to convert to JSON
    logprobs: list[ChatLogprob | msgspec.Raw] = field(default_factory=list)  # For the next chunk.
    # `token_ids`: unsent ids of a stream, or all ids of an unstreamed answer.
    token_ids: list[int] = field(default_factory=list)


class _ChatWriter(CompletionWriter[_ChatChoice, schema.ChatAnswer]):
    """Writes chat completions. A delta never has both content and reasoning."""

    is_paced = True
    chunk_type = schema.ChatChunk

    def __init__(
        self,
        context: ApiContext,
        chat: schema.ChatRequest,
        started: StartedTurn,
        *,
        answer_id: str,
        model: str,
    ) -> None:
        as_ids = chat.return_tokens_as_token_ids
        choices = [
            _ChatChoice(
                index,
                reader=reader,
                is_prompt_only=started.is_prompt_only,
                blocks=BlockWriter(reader.calls),
                found=ContentLogprobs(context.engine.tokenizer, context.chat_format, as_ids=as_ids)
                if chat.logprobs and reader.splits_reasoning
                else None,
            )
            for index, reader in enumerate(started.readers)
        ]
        super().__init__(context, chat, started.source, choices, answer_id=answer_id, model=model)
        self._chat = chat
        self._prompt = started.prompt
        self._echo = started.prompt.continued if chat.echo else ""
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET

    def take(self, choice: _ChatChoice, output: RequestOutput, events: list[ParserEvent]) -> None:
        choice.events += events
        self._take_tokens(choice, output)

    def response(self) -> schema.ChatAnswer:
        return schema.ChatAnswer(
            **self._head,
            choices=[self._build_choice(choice) for choice in self.choices],
            usage=self.usage,
            kv_transfer_params=self._lease,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt.token_ids if self._chat.return_token_ids else UNSET,
        )

    def chunk(self, choice: _ChatChoice, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        self._take_tokens(choice, output)
        choice.logprobs += self._convert_logprobs(choice, events)
        deltas = self._build_deltas(choice, events)
        is_last = output.finish_reason is not None
        if not (deltas or is_last) and self._reports_tokens and output.token_ids:
            deltas = [schema.Delta()]  # An empty delta reports tokens without text.
        chunks = [encode_event(self._build_chunk(choice, delta)) for delta in deltas]
        if is_last:
            chunks.append(encode_event(self._build_chunk(choice, schema.Delta(), last=True)))
        return b"".join(chunks)

    def _build_deltas(self, choice: _ChatChoice, events: list[ParserEvent]) -> list[schema.Delta]:
        deltas: list[schema.Delta] = []
        if not choice.role_sent:
            choice.role_sent = True
            deltas.append(schema.Delta(role="assistant", content=""))
            if self._echo:
                deltas.append(schema.Delta(content=self._echo))
        for parsed in events:
            match parsed:
                case parsed_events.ReasoningDelta(text):
                    details = self._build_details(text)
                    deltas.append(
                        schema.Delta(
                            reasoning_content=text, reasoning=text, reasoning_details=details
                        )
                    )
                case parsed_events.ContentDelta(text):
                    deltas.append(schema.Delta(content=text))
                case parsed_events.ToolCallStart(index, name):
                    call = schema.ToolCall(
                        index=index,
                        id=choice.reader.calls[index].id,
                        type="function",
                        function=schema.FunctionCall(name=name, arguments=""),
                    )
                    deltas.append(schema.Delta(tool_calls=[call]))
                case parsed_events.ToolArgumentsDelta(index, text):
                    part = schema.ToolCall(
                        index=index, function=schema.FunctionCall(arguments=text)
                    )
                    deltas.append(schema.Delta(tool_calls=[part]))
                case parsed_events.ToolCallEnd():
                    pass
        return deltas

    def _take_tokens(self, choice: _ChatChoice, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None and self._chat.prompt_logprobs is not None:
            self._prompt_logprobs = convert_prompt_logprobs(self._tokenizer, output.prompt_logprobs)
        if output.logprobs is not None:
            choice.entries += output.logprobs
        if self._chat.return_token_ids:
            choice.token_ids += output.token_ids

    def _convert_logprobs(
        self, choice: _ChatChoice, events: list[ParserEvent]
    ) -> Iterator[ChatLogprob]:
        """Yield logprobs of the content in `events`, or of all tokens if `choice.found` is None."""
        entries, choice.entries = choice.entries, []
        if choice.found is None:
            as_ids = self._chat.return_tokens_as_token_ids
            for entry in entries:
                yield from convert_chat_logprobs(self._tokenizer, [entry], as_ids=as_ids)
            return
        choice.found.add(entries)
        for event in choice.blocks.push(events):
            if event.change == "grew":
                yield from choice.found.take(event.block, event.text)

    def _build_details(self, text: str) -> list[schema.ReasoningDetail] | UnsetType:
        return [schema.ReasoningDetail(text)] if self._chat.reasoning_split else UNSET

    def _build_chunk(
        self, choice: _ChatChoice, delta: schema.Delta, *, last: bool = False
    ) -> Struct:
        """Build a chunk of one choice with all logprobs and token ids that were not sent yet."""
        logprobs: ChatLogprobs | None = None
        if choice.logprobs and (delta.content or choice.found is None or last):
            logprobs, choice.logprobs = ChatLogprobs(choice.logprobs), []
        token_ids: list[int] | UnsetType = UNSET
        prompt_token_ids: list[int] | UnsetType = UNSET
        if self._chat.return_token_ids:
            token_ids, choice.token_ids = choice.token_ids, []
            if delta.role is not UNSET and choice.index == 0:
                prompt_token_ids = self._prompt.token_ids
        news = schema.ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=choice.reader.finish_reason if last else None,
            stop_reason=choice.reader.stop_reason if last else UNSET,
            token_ids=token_ids,
        )
        return schema.ChatChunk(
            **self._head, choices=[news], usage=self._chunk_usage, prompt_token_ids=prompt_token_ids
        )

    def _build_choice(self, choice: _ChatChoice) -> schema.ChatChoice:
        reader, parsed = choice.reader, collect(choice.events)
        calls = [
            schema.ToolCall(
                id=known.id,
                type="function",
                function=schema.FunctionCall(call.name, call.arguments),
            )
            for known, call in zip(reader.calls, parsed.tool_calls, strict=True)
        ]
        logprobs: list[ChatLogprob | msgspec.Raw] = [  # JSON text needs less memory than objects.
            msgspec.Raw(encode(entry)) for entry in self._convert_logprobs(choice, choice.events)
        ]
        content = self._echo + (parsed.content or "")
        reasoning = parsed.reasoning
        return schema.ChatChoice(
            index=choice.index,
            message=schema.Message(
                role="assistant",
                content=None if calls and not content else content,
                reasoning_content=reasoning,
                reasoning=reasoning,
                reasoning_details=UNSET if reasoning is None else self._build_details(reasoning),
                tool_calls=calls or UNSET,
            ),
            logprobs=ChatLogprobs(logprobs) if self._chat.logprobs else None,
            finish_reason=reader.finish_reason,
            stop_reason=reader.stop_reason,
            token_ids=choice.token_ids if self._chat.return_token_ids else UNSET,
        )
