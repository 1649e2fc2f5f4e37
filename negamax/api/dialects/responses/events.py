"""Write whole answers of the Responses API as items, and streams as events that extend items."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from negamax.api.common.blocks import Block, BlockEvent, BlockKind
from negamax.api.common.content_logprobs import ContentLogprobs
from negamax.api.common.thought_signature import ThoughtSigner
from negamax.api.common.turn import BlockAnswerWriter, StartedTurn
from negamax.api.dialects.responses import items
from negamax.api.dialects.responses.client_tools import CLIENT_TOOLS, build_call_item
from negamax.api.dialects.responses.schema import (
    CUSTOM_INPUT,
    ENCRYPTED_REASONING,
    ResponsesRequest,
)
from negamax.api.errors import log_failure
from negamax.api.http.sse import encode_named_event
from negamax.api.schemas.answers import ChatLogprob

EventT = TypeVar("EventT", bound=items.StreamEvent)
GrowthT = TypeVar("GrowthT", bound=items.GrowthEvent)

_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.CONTENT: "msg", BlockKind.CALL: "fc"}


class ResponseEventWriter(BlockAnswerWriter[items.ResponseAnswer]):
    def __init__(
        self,
        started: StartedTurn,
        params: ResponsesRequest,
        blank: items.ResponseAnswer,
        *,
        new_id: Callable[[str], str],
        signer: ThoughtSigner,
        logprobs: ContentLogprobs | None,
        keep: Callable[[items.ResponseAnswer], None],
        request_id: str,
    ) -> None:
        """`blank` is the response without output. `new_id` makes an item id from an id prefix.
        `keep` stores the final state of a streamed response before the client receives this state.
        """
        super().__init__(blank.id, started)
        self._blank = blank
        self._new_id = new_id
        self._signer = signer
        self._found_logprobs = logprobs
        self._keep = keep
        self._request_id = request_id
        self._tools = {tool.shown_name: tool for tool in params.declared_tools}
        self._has_summary = params.reasoning.summary not in (None, "none")
        self._has_encrypted = ENCRYPTED_REASONING in params.include
        self._ids: list[str] = []  # block index -> id of the block's output item
        self._sequence_number = -1

    def start(self) -> bytes:
        return self._encode_state("response.created", self._blank) + self._encode_state(
            "response.in_progress", self._blank
        )

    def block_chunk(self, events: list[BlockEvent]) -> bytes:
        return b"".join(
            encode_named_event(data.type, data) for event in events for data in self._convert(event)
        )

    def end(self) -> bytes:
        return self._encode_last(self.response())

    def failure(self, error: Exception) -> bytes:
        _, answer = log_failure(error, request_id=self._request_id)
        return self._encode_last(self.failed(answer.error.message))

    def _encode_last(self, response: items.ResponseAnswer) -> bytes:
        self._keep(response)
        return self._encode_state(f"response.{response.status}", response)

    def failed(self, message: str) -> items.ResponseAnswer:
        return replace(
            self._blank,
            status="failed",
            error=items.ResponseError("server_error", message),
            output=self._build_items(),
        )

    def cancelled(self) -> items.ResponseAnswer:
        return replace(self._blank, status="cancelled", output=self._build_items())

    def response(self) -> items.ResponseAnswer:
        usage = self.usage
        is_truncated = self.finish_reason == "length"
        return replace(
            self._blank,
            status="incomplete" if is_truncated else "completed",
            completed_at=None if is_truncated else int(time.time()),
            incomplete_details=items.IncompleteDetails("max_output_tokens")
            if is_truncated
            else None,
            output=self._build_items(),
            usage=items.ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=items.InputTokensDetails(
                    usage.prompt_tokens_details.cached_tokens
                ),
                output_tokens=usage.completion_tokens,
                output_tokens_details=items.OutputTokensDetails(
                    usage.completion_tokens_details.reasoning_tokens
                ),
                total_tokens=usage.total_tokens,
            ),
        )

    def _build_items(self) -> list[items.OutputItem]:
        self._read_logprobs()
        for block in self.blocks:
            self._list_logprobs(block)  # Assign logprobs to the blocks in the order of the answer.
        return [self._build_final_item(block) for block in self.blocks]

    def _build_final_item(self, block: Block) -> items.OutputItem:
        return self._build_item(block, "completed" if block.is_whole else "incomplete")

    def _read_logprobs(self) -> None:
        if self._found_logprobs is not None:
            self._found_logprobs.add(self.take_logprobs())

    def _list_logprobs(self, block: Block) -> list[ChatLogprob]:
        return [] if self._found_logprobs is None else self._found_logprobs.list_tokens(block)

    def _encode_state(self, kind: str, response: items.ResponseAnswer) -> bytes:
        return encode_named_event(kind, self._event(items.ResponseEvent, kind, response=response))

    def _event(self, model: type[EventT], kind: str, **fields: Any) -> EventT:
        self._sequence_number += 1
        return model(type=kind, sequence_number=self._sequence_number, **fields)

    def _get_id(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            kind = self.blocks[len(self._ids)].kind
            self._ids.append(self._new_id(_ID_PREFIXES[kind]))
        return self._ids[block.index]

    def _build_item(self, block: Block, status: str, *, is_empty: bool = False) -> items.OutputItem:
        item_id, text = self._get_id(block), "" if is_empty else block.text
        match block.kind:
            case BlockKind.REASONING:
                encrypted: str | UnsetType | None = UNSET
                if self._has_encrypted:
                    encrypted = None if is_empty else self._signer.signature(text, is_hidden=True)
                summary = [items.SummaryText(text)] if self._has_summary and not is_empty else []
                return items.ReasoningItem(
                    item_id,
                    status,
                    summary,
                    [] if is_empty else [items.ReasoningText(text)],
                    encrypted,
                )
            case BlockKind.CONTENT:
                return items.MessageItem(
                    item_id,
                    status,
                    []
                    if is_empty
                    else [items.OutputText(text, logprobs=self._list_logprobs(block))],
                )
            case BlockKind.CALL:
                assert block.call is not None
                tool, call_id = self._tools.get(block.call.name), block.call.id
                name = block.call.name if tool is None else tool.name
                namespace = tool.namespace or UNSET if tool is not None else UNSET
                if self._is_custom(block):
                    return items.CustomCallItem(
                        item_id, status, call_id, name, _read_custom_input(text), namespace
                    )
                typed = (
                    build_call_item(name, text, item_id=item_id, status=status, call_id=call_id)
                    if self._has_own_item(block)
                    else None
                )
                return typed or items.FunctionCallItem(
                    item_id, status, call_id, name, text, namespace
                )

    def _convert(self, event: BlockEvent) -> Iterator[Any]:
        block = event.block
        self._read_logprobs()
        match event.change:
            case "opened" if not self._has_own_item(block):
                yield self._added(block, is_empty=True)
                yield from self._opened(block)
            case "grew":
                yield from self._grew(block, event.text)
            case "closed":
                if self._has_own_item(block):  # The type of the item depends on the whole call.
                    yield self._added(block, is_empty=False)
                yield from self._closed(block)
                yield self._item_event(block, "done", self._build_final_item(block))

    def _added(self, block: Block, *, is_empty: bool) -> items.ItemEvent:
        return self._item_event(
            block, "added", self._build_item(block, "in_progress", is_empty=is_empty)
        )

    def _item_event(self, block: Block, moment: str, item: items.OutputItem) -> items.ItemEvent:
        kind = f"response.output_item.{moment}"
        return self._event(items.ItemEvent, kind, output_index=block.index, item=item)

    def _opened(self, block: Block) -> Iterator[Struct]:
        if block.kind is not BlockKind.CALL:
            yield self._part(block, "added", "")
        if block.kind is BlockKind.REASONING and self._has_summary:
            yield self._summary_part(block, "added", "")

    def _grew(self, block: Block, text: str) -> Iterator[Struct]:
        logprobs = [] if self._found_logprobs is None else self._found_logprobs.take(block, text)
        match block.kind:
            case BlockKind.REASONING:
                yield self._text(block, "reasoning_text.delta", content_index=0, delta=text)
                if self._has_summary:
                    yield self._text(
                        block, "reasoning_summary_text.delta", summary_index=0, delta=text
                    )
            case BlockKind.CONTENT:
                yield self._text(
                    block, "output_text.delta", content_index=0, delta=text, logprobs=logprobs
                )
            # The input of a custom tool is sent at the end, because decoding needs the whole JSON.
            case BlockKind.CALL if not (self._is_custom(block) or self._has_own_item(block)):
                yield self._text(block, "function_call_arguments.delta", delta=text)

    def _closed(self, block: Block) -> Iterator[Struct]:
        text = block.text
        match block.kind:
            case BlockKind.REASONING:
                yield self._text(block, "reasoning_text.done", content_index=0, text=text)
                yield self._part(block, "done", text)
                if self._has_summary:
                    yield self._text(
                        block, "reasoning_summary_text.done", summary_index=0, text=text
                    )
                    yield self._summary_part(block, "done", text)
            case BlockKind.CONTENT:
                logprobs = self._list_logprobs(block)
                yield self._text(
                    block, "output_text.done", content_index=0, text=text, logprobs=logprobs
                )
                yield self._part(block, "done", text)
            case BlockKind.CALL if self._is_custom(block):
                given = _read_custom_input(text)
                yield self._text(block, "custom_tool_call_input.delta", delta=given)
                yield self._text(block, "custom_tool_call_input.done", input=given)
            case BlockKind.CALL if self._has_own_item(block):
                pass
            case BlockKind.CALL:
                assert block.call is not None
                tool = self._tools.get(block.call.name)
                name = block.call.name if tool is None else tool.name
                yield self._text(block, "function_call_arguments.done", arguments=text, name=name)

    def _get_kind(self, block: Block) -> str | None:
        tool = None if block.call is None else self._tools.get(block.call.name)
        return None if tool is None else tool.kind

    def _is_custom(self, block: Block) -> bool:
        return self._get_kind(block) == "custom"

    def _has_own_item(self, block: Block) -> bool:
        return self._get_kind(block) in CLIENT_TOOLS

    def _growth(self, model: type[GrowthT], block: Block, kind: str, **fields: Any) -> GrowthT:
        place = {"item_id": self._get_id(block), "output_index": block.index}
        return self._event(model, f"response.{kind}", **place, **fields)

    def _text(self, block: Block, kind: str, **fields: Any) -> items.TextEvent:
        return self._growth(items.TextEvent, block, kind, **fields)

    def _part(self, block: Block, moment: str, text: str) -> items.PartEvent:
        part: items.OutputText | items.ReasoningText = items.ReasoningText(text)
        if block.kind is not BlockKind.REASONING:
            logprobs = self._list_logprobs(block) if moment == "done" else []
            part = items.OutputText(text, logprobs=logprobs)
        return self._growth(items.PartEvent, block, f"content_part.{moment}", part=part)

    def _summary_part(self, block: Block, moment: str, text: str) -> items.SummaryPartEvent:
        kind, part = f"reasoning_summary_part.{moment}", items.SummaryText(text)
        return self._growth(items.SummaryPartEvent, block, kind, part=part)


def _read_custom_input(arguments: str) -> str:
    """Return the input text of a custom tool call, or `arguments` if the JSON has no input text."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) and len(given) == 1 else None
    return text if isinstance(text, str) else arguments
