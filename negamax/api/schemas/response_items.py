"""OpenAI's Responses: the answers, their items, and the events of a stream."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

JsonObject = dict[str, Any]


class ReasoningText(Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


class SummaryText(Struct, frozen=True, tag="summary_text", tag_field="type"):
    text: str


class OutputText(Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningItem(Struct, frozen=True, tag="reasoning", tag_field="type"):
    id: str
    status: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | UnsetType | None = UNSET


class MessageItem(Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallItem(Struct, frozen=True, tag="function_call", tag_field="type"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, frozen=True, tag="custom_tool_call", tag_field="type"):
    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ReasoningEcho(Struct, frozen=True):
    effort: str | None
    summary: str | None


class TextEcho(Struct, frozen=True):
    format: JsonObject
    verbosity: str


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """A response: what was asked, and what has been answered so far."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str  # queued, in_progress, completed, incomplete, failed, cancelled
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningEcho
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True, kw_only=True):
    """The input items of a response."""

    object: str = "list"
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """response.created, in_progress, completed, incomplete and failed."""

    type: str
    sequence_number: int
    response: ResponseAnswer


class ItemEvent(Struct, frozen=True, kw_only=True):
    """response.output_item.added and done."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(Struct, frozen=True, kw_only=True):
    """response.content_part.added and done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class SummaryPartEvent(Struct, frozen=True, kw_only=True):
    """response.reasoning_summary_part.added and done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int = 0
    part: SummaryText


class TextEvent(Struct, frozen=True, kw_only=True):
    """Every delta and its done event; which fields it has depends on its type."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: tuple[()] | UnsetType = UNSET
