"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. A whole answer is the blocks of its
stream.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct
from msgspec.structs import replace

from negamax.api.common.answer import respond
from negamax.api.common.blocks import (
    Block,
    BlockClosed,
    BlockEvent,
    BlockGrew,
    BlockKind,
    BlockOpened,
)
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import off_loop
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.common.turn import (
    BlockAnswerWriter,
    StartedTurn,
    Turn,
    start_turn,
    turn_conversation,
    turn_prompt,
)
from negamax.api.dialects.messages.history import history_of
from negamax.api.dialects.messages.schema import (
    NO_INPUT,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    CountRequest,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingTokens,
    TokenCount,
    ToolUseBlock,
)
from negamax.api.errors import json_response, logged_failure
from negamax.api.http.request_body import read_request
from negamax.api.http.sse import named_event
from negamax.api.openapi import json_body
from negamax.api.schemas.answers import message_error

_PING = named_event("ping", Ping())
# of silence, so that no proxy closes the connection while the model reads a long prompt
PING_SECONDS = 10.0


def messages_router(context: ApiContext) -> APIRouter:
    """The routes of Anthropic's API."""
    router = APIRouter()
    signer = ThoughtSigner(context.engine.info.served_model_name)
    answer_schema = json_body(MessagesRequest)
    count_schema = json_body(CountRequest)

    @router.post("/v1/messages", openapi_extra=answer_schema)
    async def messages(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        arrival = time.monotonic()
        params, num_bytes = await read_request(request, MessagesRequest, context.body_limits)
        model = context.model_name(params.model)
        message_id = f"msg_{secrets.token_hex(12)}"
        thoughts = context.hidden_thoughts(signer)
        turn = await off_loop(
            lambda: _turn(
                context,
                params,
                thoughts,
                max_tokens=params.max_tokens,
                stop=params.stop_sequences,
            ),
            num_bytes=num_bytes,
        )
        started = await start_turn(
            context,
            request,
            turn,
            params,
            request_id=message_id,
            names=[message_id],
            num_bytes=num_bytes,
            arrival=arrival,
        )
        writer = _MessageWriter(
            started,
            params,
            signer,
            message_id=message_id,
            model=model,
            request_id=request.state.request_id,
        )
        headers = {"request-id": request.state.request_id}
        ping = (_PING, PING_SECONDS)
        return await respond(context, request, params, writer, headers=headers, ping=ping)

    @router.post("/v1/messages/count_tokens", openapi_extra=count_schema)
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a conversation has."""
        params, num_bytes = await read_request(request, CountRequest, context.body_limits)
        context.model_name(params.model)
        turn = await off_loop(
            lambda: _turn(context, params, context.hidden_thoughts(signer), max_tokens=1, stop=[]),
            num_bytes=num_bytes,
        )
        prompt = await turn_prompt(context, request, turn, params, num_bytes=num_bytes)
        return json_response(
            TokenCount(len(prompt.token_ids)), headers={"request-id": request.state.request_id}
        )

    return router


def _turn(
    context: ApiContext,
    params: CountRequest,
    thoughts: HiddenThoughts,
    *,
    max_tokens: int,
    stop: list[str],
) -> Turn:
    family = context.chat_format.family
    history = history_of(params.messages, system=params.system, thoughts=thoughts, family=family)
    tools = params.offered_tools
    last = history.messages[-1] if history.messages else {"role": "system"}
    is_answer = last["role"] == "assistant" and "tool_calls" not in last
    continues = is_answer and bool(last["content"] or last.get("reasoning_content"))
    return Turn(
        calls=params.call_choice(tools),
        conversation=turn_conversation(
            params, history.messages, tools, params.thinking_choice, continues=continues
        ),
        places=history.places,
        form=params.grammar,
        sampling=params.shared_sampling(
            seed=params.seed,
            max_tokens=max_tokens or 1,
            min_tokens=params.min_tokens,
            stop=stop,
        ),
        is_prompt_only=max_tokens == 0,
    )


class _MessageWriter(BlockAnswerWriter[MessageAnswer]):
    """Answers in Anthropic's words."""

    def __init__(
        self,
        started: StartedTurn,
        params: MessagesRequest,
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

    def response(self) -> MessageAnswer:
        """A call that was cut is left out: its input would have to be an object, which clients
        run."""
        blocks = [
            block for block in self.blocks if block.is_whole or block.kind is not BlockKind.CALL
        ]
        message = self._message([self._block(block) for block in blocks])
        has_call = any(block.kind is BlockKind.CALL for block in blocks)
        if message.stop_reason == "tool_use" and not has_call:
            return replace(message, stop_reason="end_turn")
        return message

    def block_chunk(self, events: list[BlockEvent]) -> bytes:
        start = b"" if self._has_started else self._start()
        self._has_started = True
        return start + b"".join(
            named_event(name, data) for event in events for name, data in self._events_of(event)
        )

    def end(self) -> bytes:
        stop = StopDelta(self._stop_reason, self.stop_string)
        return named_event("message_delta", MessageDelta(stop, self._usage())) + named_event(
            "message_stop", MessageStop()
        )

    def failure(self, error: Exception) -> bytes:
        status, answer = logged_failure(error, request_id=self._request_id)
        return named_event("error", message_error(status, answer, request_id=self._request_id))

    def _start(self) -> bytes:
        """The beginning of a stream, which says nothing of its end even where that has come."""
        message = replace(self._message([]), stop_reason=None, stop_sequence=None)
        return named_event("message_start", MessageStart(message)) + _PING

    def _events_of(self, event: BlockEvent) -> Iterator[tuple[str, Struct]]:
        """The events of a stream, by name."""
        block = event.block
        match event:
            case BlockOpened():
                yield (
                    "content_block_start",
                    BlockStart(block.index, self._block(block, is_empty=True)),
                )
            case BlockGrew(_, text):
                delta = self._delta(block, text)
                if delta is not None:
                    yield "content_block_delta", BlockDelta(block.index, delta)
            case BlockClosed():
                if block.kind is BlockKind.REASONING:
                    yield (
                        "content_block_delta",
                        BlockDelta(block.index, SignatureDelta(self._signature(block))),
                    )
                yield "content_block_stop", BlockStop(block.index)

    def _delta(self, block: Block, text: str) -> TextDelta | ThinkingDelta | InputJsonDelta | None:
        match block.kind:
            case BlockKind.REASONING:
                return None if self._params.hides_thinking else ThinkingDelta(text)
            case BlockKind.CONTENT:
                return TextDelta(text)
            case BlockKind.CALL:
                return InputJsonDelta(text)

    def _block(self, block: Block, *, is_empty: bool = False) -> ContentBlock:
        """A block, or, with `is_empty`, what it begins as."""
        text = "" if is_empty else block.text
        match block.kind:
            case BlockKind.REASONING:
                signature = "" if is_empty else self._signature(block)
                return ThinkingBlock("" if self._params.hides_thinking else text, signature)
            case BlockKind.CONTENT:
                return TextBlock(text)
            case BlockKind.CALL:
                assert block.call is not None
                call_id = f"toolu_{block.call.id.removeprefix('call_')}"
                arguments = NO_INPUT if is_empty else msgspec.Raw(text.encode())
                return ToolUseBlock(call_id, block.call.name, arguments)

    def _signature(self, block: Block) -> str:
        return self._signer.signature(block.text, is_hidden=self._params.hides_thinking)

    def _message(self, content: list[ContentBlock]) -> MessageAnswer:
        return MessageAnswer(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=self.stop_string,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(usage.completion_tokens_details.reasoning_tokens),
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
