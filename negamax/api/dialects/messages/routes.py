"""Serve /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

import secrets
from collections.abc import Iterator
from itertools import chain

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct
from msgspec.structs import replace

from negamax.api.common.answer import respond
from negamax.api.common.api_request import ApiRequest, read_api_request
from negamax.api.common.blocks import Block, BlockEvent, BlockKind
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import ChatPrompt, Conversation
from negamax.api.common.thought_signature import ThoughtSigner
from negamax.api.common.turn import (
    BlockAnswerWriter,
    StartedTurn,
    Turn,
    answer_blocks,
    build_prompt,
    start_turn,
)
from negamax.api.dialects.messages import schema
from negamax.api.dialects.messages.history import build_history
from negamax.api.errors import build_json_response, log_failure
from negamax.api.http.request_threads import run_off_loop
from negamax.api.http.sse import encode_named_event
from negamax.api.openapi import describe_body
from negamax.api.schemas.answers import build_message_error


def _encode(event: Struct) -> bytes:
    """Encode a stream event. The tag of the struct is the name of the event."""
    return encode_named_event(str(event.__struct_config__.tag), event)


_PING = _encode(schema.Ping())
PING_SECONDS = 10.0  # Ping interval that keeps proxies from closing idle connections.


def make_messages_router(context: ApiContext) -> APIRouter:
    router = APIRouter()
    answer_schema = describe_body(schema.MessagesRequest)
    count_schema = describe_body(schema.CountRequest)

    @router.post("/v1/messages", openapi_extra=answer_schema)
    async def messages(http: Request) -> Response:
        """Answer a conversation with one JSON object or a stream of events."""
        request = await read_api_request(context, http, schema.MessagesRequest)
        params = request.params
        model = context.model_name(params.model)
        message_id = f"msg_{secrets.token_hex(12)}"
        turn = await run_off_loop(
            lambda: _build_turn(
                context, params, max_tokens=params.max_tokens, stop=params.stop_sequences
            ),
            num_bytes=request.num_bytes,
        )
        started = await start_turn(
            context, request, turn, request_id=message_id, names=[message_id]
        )
        request_id = http.state.request_id
        writer = _MessageWriter(
            started,
            params,
            context.signer,
            message_id=message_id,
            model=model,
            request_id=request_id,
        )
        headers = {"request-id": request_id}
        return await respond(context, request, writer, headers=headers, ping=(_PING, PING_SECONDS))

    @router.post("/v1/messages/count_tokens", openapi_extra=count_schema)
    async def count_tokens(http: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        request = await read_api_request(context, http, schema.CountRequest)
        prompt = await _read_prompt(context, request)
        return build_json_response(
            schema.TokenCount(len(prompt.token_ids)), headers={"request-id": http.state.request_id}
        )

    @router.post("/v1/messages/kv_blocks", openapi_extra=answer_schema)
    async def kv_blocks(http: Request) -> Response:
        """Return the block hashes of a conversation's prompt. Generate no answer."""
        request = await read_api_request(context, http, schema.MessagesRequest)
        prompt = await _read_prompt(context, request)
        return await answer_blocks(context, request, prompt.token_ids, prompt.images)

    return router


async def _read_prompt(context: ApiContext, request: ApiRequest[schema.CountRequest]) -> ChatPrompt:
    """Build a prompt without pixels."""
    context.model_name(request.params.model)
    turn = await run_off_loop(
        lambda: _build_turn(context, request.params, max_tokens=1, stop=[]),
        num_bytes=request.num_bytes,
    )
    return await build_prompt(context, request, turn, needs_pixels=False)


def _build_turn(
    context: ApiContext, params: schema.CountRequest, *, max_tokens: int, stop: list[str]
) -> Turn:
    effect, tools = params.tools_in_effect, params.offered_tools
    history = build_history(
        params.messages,
        system=params.system,
        thoughts=context.hidden_thoughts(),
        family=context.chat_format.family,
        tool_notes=effect.notes,
        reads_images=context.engine.info.vision is not None,
    )
    last = history.messages[-1] if history.messages else {"role": "system"}
    is_answer = last["role"] == "assistant" and "tool_calls" not in last
    continues = is_answer and bool(last["content"] or last.get("reasoning_content"))
    return Turn(
        tools=tools,
        calls=params.call_choice(tools),
        conversation=Conversation(
            messages=history.messages,
            tools=effect.shown or None,
            thinking=params.thinking_choice,
            template_kwargs=params.chat_template_kwargs,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        ),
        places=history.places,
        form=params.grammar,
        sampling=params.sampling_params(max_tokens=max_tokens or 1, stop=stop),
        is_prompt_only=max_tokens == 0,
    )


class _MessageWriter(BlockAnswerWriter[schema.MessageAnswer]):
    def __init__(
        self,
        started: StartedTurn,
        params: schema.MessagesRequest,
        signer: ThoughtSigner,
        *,
        message_id: str,
        model: str,
        request_id: str,
    ) -> None:
        super().__init__(message_id, started)
        self._params = params
        self._signer = signer
        self._model = model
        self._request_id = request_id
        self._has_started = False

    def response(self) -> schema.MessageAnswer:
        """Build the message without truncated calls, because clients would run such calls."""
        blocks = [
            block for block in self.blocks if block.is_whole or block.kind is not BlockKind.CALL
        ]
        message = self._build_message([self._build_block(block) for block in blocks])
        has_call = any(block.kind is BlockKind.CALL for block in blocks)
        if message.stop_reason == "tool_use" and not has_call:
            return replace(message, stop_reason="end_turn")
        return message

    def block_chunk(self, events: list[BlockEvent]) -> bytes:
        start = b"" if self._has_started else self._encode_start()
        self._has_started = True
        return start + b"".join(map(_encode, chain.from_iterable(map(self._convert, events))))

    def end(self) -> bytes:
        stop = schema.StopDelta(self._stop_reason, self.stop_string)
        return _encode(schema.MessageDelta(stop, self._build_usage())) + _encode(
            schema.MessageStop()
        )

    def failure(self, error: Exception) -> bytes:
        status, answer = log_failure(error, request_id=self._request_id)
        return _encode(build_message_error(status, answer, request_id=self._request_id))

    def _encode_start(self) -> bytes:
        message = replace(self._build_message([]), stop_reason=None, stop_sequence=None)
        return _encode(schema.MessageStart(message)) + _PING

    def _convert(self, event: BlockEvent) -> Iterator[Struct]:
        block = event.block
        match event.change:
            case "opened":
                yield schema.BlockStart(block.index, self._build_block(block, is_empty=True))
            case "grew":
                delta = self._build_delta(block, event.text)
                if delta is not None:
                    yield schema.BlockDelta(block.index, delta)
            case "closed":
                if block.kind is BlockKind.REASONING:
                    signature = schema.SignatureDelta(self._sign(block))
                    yield schema.BlockDelta(block.index, signature)
                yield schema.BlockStop(block.index)

    def _build_delta(
        self, block: Block, text: str
    ) -> schema.TextDelta | schema.ThinkingDelta | schema.InputJsonDelta | None:
        match block.kind:
            case BlockKind.REASONING:
                return None if self._params.hides_thinking else schema.ThinkingDelta(text)
            case BlockKind.CONTENT:
                return schema.TextDelta(text)
            case BlockKind.CALL:
                return schema.InputJsonDelta(text)

    def _build_block(self, block: Block, *, is_empty: bool = False) -> schema.ContentBlock:
        text = "" if is_empty else block.text
        match block.kind:
            case BlockKind.REASONING:
                signature = "" if is_empty else self._sign(block)
                return schema.ThinkingBlock("" if self._params.hides_thinking else text, signature)
            case BlockKind.CONTENT:
                return schema.TextBlock(text)
            case BlockKind.CALL:
                assert block.call is not None
                call_id = f"toolu_{block.call.id.removeprefix('call_')}"
                arguments = schema.NO_INPUT if is_empty else msgspec.Raw(text.encode())
                return schema.ToolUseBlock(call_id, block.call.name, arguments)

    def _sign(self, block: Block) -> str:
        return self._signer.signature(block.text, is_hidden=self._params.hides_thinking)

    def _build_message(self, content: list[schema.ContentBlock]) -> schema.MessageAnswer:
        return schema.MessageAnswer(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=self.stop_string,
            usage=self._build_usage(),
        )

    def _build_usage(self) -> schema.MessageUsage:
        usage = self.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return schema.MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=schema.ThinkingTokens(
                usage.completion_tokens_details.reasoning_tokens
            ),
            service_tier="standard",
        )

    @property
    def _stop_reason(self) -> str | None:
        if self.stop_string is not None:
            return "stop_sequence"
        match self.finish_reason:
            case "length":
                has_room = self.usage.completion_tokens < self._params.max_tokens
                return "model_context_window_exceeded" if has_room else "max_tokens"
            case "tool_calls":
                return "tool_use"
            case None:
                return None
            case _:
                return "end_turn"
