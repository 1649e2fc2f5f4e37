"""/v1/chat/completions: one handler; a whole answer is the same events as a stream, collected."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType

from negamax.api.border import failure_event, json_response, read_json
from negamax.api.context import FINGERPRINT, ApiContext
from negamax.api.conversation import ChatPrompt, ChoiceReader, UsageMeter
from negamax.api.logprobs import chat_logprobs, prompt_logprobs
from negamax.api.schemas.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    FunctionCall,
    Message,
    PromptLogprobs,
    ToolCall,
    Usage,
)
from negamax.api.schemas.chat import ChatRequest
from negamax.api.schemas.common import refuse
from negamax.api.sse import DONE, EventStream, event, while_connected
from negamax.engine.output import RequestOutput
from negamax.text.minimax_m2_format import tag_ids
from negamax.text.output_parser import (
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


def chat_router(context: ApiContext) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter()
    tags = tag_ids(context.engine.tokenizer)
    body_schema = {"content": {"application/json": {"schema": ChatRequest.model_json_schema()}}, "required": True}

    @router.post("/v1/chat/completions", openapi_extra={"requestBody": body_schema})
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        arrival = time.monotonic()
        body, num_bytes = await read_json(request, max_bytes=context.options.max_body_bytes)
        chat = ChatRequest.parse(body)
        model = context.model_name(chat.model)
        sampling = chat.sampling_params(max_tokens=chat.token_limit, logprobs=chat.wanted_logprobs)
        if (sampling.logprobs or 0) > context.engine.info.max_logprobs:
            refuse("top_logprobs", f"{sampling.logprobs}; allowed: 0 to {context.engine.info.max_logprobs}")
        context.check_sampling(sampling)
        prompt = await context.prompts.chat(
            chat.messages,
            tools=chat.offered_tools,
            template_kwargs=chat.chat_template_kwargs or {},
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            num_bytes=num_bytes,
        )
        answer = _ChatAnswering(context, chat, model=model, prompt=prompt, tags=tags)
        outputs = context.generate(
            prompt.token_ids,
            sampling,
            request_id=answer.id,
            priority=chat.priority,
            cache_salt=chat.cache_salt,
            arrival=arrival,
        )
        if chat.stream:
            return EventStream(answer.stream(outputs))
        return json_response(await while_connected(request.receive, answer.whole(outputs)))

    return router


class _Choice:
    """One choice while it is generated. Single writer: its `_ChatAnswering`."""

    def __init__(self, index: int, reader: ChoiceReader) -> None:
        self.index = index
        self.reader = reader
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[_Call] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.role_sent = False
        self.logprobs: list[ChatLogprob] = []  # not sent yet (stream) or all (whole answer)
        self.token_ids: list[int] = []  # the same


class _Call:
    """A tool call while its arguments grow."""

    def __init__(self, name: str) -> None:
        self.id = f"call_{secrets.token_hex(12)}"
        self.name = name
        self.arguments: list[str] = []


class _ChatAnswering:
    """Answers one chat request from the engine's outputs. Single writer: the request's handler."""

    def __init__(
        self, context: ApiContext, chat: ChatRequest, *, model: str, prompt: ChatPrompt, tags: Mapping[str, int]
    ) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._tokenizer = context.engine.tokenizer
        self._chat = chat
        self._model = model
        self._prompt = prompt
        self._usage = UsageMeter()
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._choices = [_Choice(index, self._reader(tags)) for index in range(chat.n)]

    def _reader(self, tags: Mapping[str, int]) -> ChoiceReader:
        return ChoiceReader(
            tags,
            tools=self._chat.offered_tools,
            in_reasoning=self._prompt.starts_in_reasoning,
            may_call=self._chat.tool_choice != "none",
        )

    async def whole(self, outputs: AsyncGenerator[RequestOutput, None]) -> ChatAnswer:
        """The answer in one piece."""
        async with aclosing(outputs):
            async for output in outputs:
                for _ in self._deltas(output):
                    pass
        return ChatAnswer(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(choice) for choice in self._choices],
            usage=self._usage.usage(),
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt.token_ids if self._chat.return_token_ids else UNSET,
        )

    async def stream(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
        """The answer as events. An error after the start is an event too: the status line is already sent."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    choice = self._choices[output.index]
                    events = [event(self._chunk(choice, delta)) for delta in self._deltas(output)]
                    if choice.finish_reason is not None:
                        events.append(event(self._chunk(choice, Delta(), last=True)))
                    if events:
                        yield b"".join(events)  # one write for all that one step brought
            if self._chat.stream_options.include_usage:
                yield event(self._envelope([], usage=self._usage.usage()))
        except Exception as error:
            yield failure_event(error, request_id=self.id)
        yield DONE

    def _deltas(self, output: RequestOutput) -> Iterator[Delta]:
        """Take an output into its choice; what a stream says about it. Content and reasoning never share a delta."""
        choice = self._choices[output.index]
        events = choice.reader.push(output)
        self._usage.update(output, prompt=0, choice=choice.index, reasoning_tokens=choice.reader.num_reasoning_tokens)
        if output.prompt_logprobs is not None and self._chat.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, output.prompt_logprobs)
        if output.logprobs is not None:
            choice.logprobs += chat_logprobs(self._tokenizer, output.logprobs)
        choice.token_ids += output.token_ids
        if not choice.role_sent:
            choice.role_sent = True
            yield Delta(role="assistant", content="")
        for parsed in events:
            delta = self._delta(choice, parsed)
            if delta is not None:
                yield delta
        if output.finish_reason is not None:
            calls_end = output.finish_reason == "stop" and choice.calls
            choice.finish_reason = "tool_calls" if calls_end else output.finish_reason
            choice.stop_reason = output.stop_reason

    def _delta(self, choice: _Choice, parsed: ParserEvent) -> Delta | None:
        match parsed:
            case ReasoningDelta(text):
                if not self._chat.include_reasoning:
                    return None
                choice.reasoning.append(text)
                return Delta(reasoning_content=text, reasoning=text)
            case ContentDelta(text):
                choice.content.append(text)
                return Delta(content=text)
            case ToolCallStart(index, name):
                call = _Call(name)
                choice.calls.append(call)
                function = FunctionCall(name=name, arguments="")
                return Delta(tool_calls=[ToolCall(index=index, id=call.id, type="function", function=function)])
            case ToolArgumentsDelta(index, text):
                choice.calls[index].arguments.append(text)
                return Delta(tool_calls=[ToolCall(index=index, function=FunctionCall(arguments=text))])
            case ToolCallEnd():
                return None

    def _chunk(self, choice: _Choice, delta: Delta, *, last: bool = False) -> Struct:
        """A chunk of one choice; it takes along the logprobs and token ids that were not sent yet."""
        logprobs, choice.logprobs = choice.logprobs, []
        token_ids, choice.token_ids = choice.token_ids, []
        options = self._chat.stream_options
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        if options.include_usage and options.continuous_usage_stats:
            usage = self._usage.usage()
        is_first = delta.role is not UNSET and choice.index == 0
        return self._envelope(
            [
                ChatChunkChoice(
                    index=choice.index,
                    delta=delta,
                    logprobs=ChatLogprobs(logprobs) if logprobs else None,
                    finish_reason=choice.finish_reason if last else None,
                    stop_reason=choice.stop_reason if last else UNSET,
                    token_ids=token_ids if self._chat.return_token_ids else UNSET,
                )
            ],
            usage=usage,
            prompt_token_ids=self._prompt.token_ids if is_first and self._chat.return_token_ids else UNSET,
        )

    def _envelope(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=FINGERPRINT,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _whole_choice(self, choice: _Choice) -> ChatChoice:
        calls = [
            ToolCall(id=call.id, type="function", function=FunctionCall(call.name, "".join(call.arguments)))
            for call in choice.calls
        ]
        content = "".join(choice.content)
        reasoning = "".join(choice.reasoning) or None
        return ChatChoice(
            index=choice.index,
            message=Message(
                role="assistant",
                content=None if calls and not content else content,
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=calls or UNSET,
            ),
            logprobs=ChatLogprobs(choice.logprobs) if self._chat.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._chat.return_token_ids else UNSET,
        )
