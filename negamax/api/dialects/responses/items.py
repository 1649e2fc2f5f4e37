"""Answers, items and stream events of the Responses API."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from negamax.api.schemas.answers import ChatLogprob

JsonObject = dict[str, Any]


class ReasoningText(Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str  # Text of the reasoning.


class SummaryText(Struct, frozen=True, tag="summary_text", tag_field="type"):
    text: str  # Text of the reasoning; the item's `content` has the same text.


class OutputText(Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str  # Text of the answer.
    annotations: tuple[()] = ()  # Always empty.
    logprobs: list[ChatLogprob] = []  # Logprobs of the text, if `include` requests logprobs.


class Item(Struct, frozen=True, tag_field="type"):
    """An output item of a response."""

    id: str  # Id of the item.
    status: str  # One of `in_progress`, `completed` and `incomplete`.


class ReasoningItem(Item, frozen=True, tag="reasoning"):
    summary: list[SummaryText]  # One part if the request sets reasoning.summary, else empty.
    content: list[ReasoningText]  # The list always has one part.
    encrypted_content: str | UnsetType | None = UNSET  # The reasoning, if requested by `include`.


class MessageItem(Item, frozen=True, tag="message"):
    content: list[OutputText]  # The list always has one part.
    role: str = "assistant"  # Author of the message.


class FunctionCallItem(Item, frozen=True, tag="function_call"):
    call_id: str  # Id to use in the function_call_output.
    name: str  # Name of the tool.
    arguments: str  # Arguments as JSON text.
    namespace: str | UnsetType = UNSET  # Namespace of the tool, if it has one.


class CustomCallItem(Item, frozen=True, tag="custom_tool_call"):
    call_id: str  # Id to use in the custom_tool_call_output.
    name: str  # Name of the tool.
    input: str  # Input text for the tool.
    namespace: str | UnsetType = UNSET  # Namespace of the tool, if it has one.


class LocalEnvironment(Struct, frozen=True, tag="local", tag_field="type"):
    """The client's machine, which runs the shell."""


class ShellCallItem(Item, frozen=True, tag="shell_call"):
    call_id: str  # Id to use in the shell_call_output.
    action: JsonObject  # Object with `commands`, `timeout_ms` and `max_output_length`.
    environment: LocalEnvironment = LocalEnvironment()  # The client's machine runs the shell.


class LocalShellCallItem(Item, frozen=True, tag="local_shell_call"):
    call_id: str  # Id for the field `id` of local_shell_call_output.
    action: JsonObject  # Object with `command`, `working_directory` and `timeout_ms`.


class ApplyPatchCallItem(Item, frozen=True, tag="apply_patch_call"):
    call_id: str  # Id to use in the apply_patch_call_output.
    operation: JsonObject  # Object with `type`, `path` and `diff`.


class ToolSearchCallItem(Item, frozen=True, tag="tool_search_call"):
    call_id: str  # Id to use in the tool_search_output.
    arguments: JsonObject  # Arguments of the tool search.
    execution: str = "client"  # Always `client`.


OutputItem = (
    ReasoningItem
    | MessageItem
    | FunctionCallItem
    | CustomCallItem
    | ShellCallItem
    | LocalShellCallItem
    | ApplyPatchCallItem
    | ToolSearchCallItem
)


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int  # Prompt tokens found in the prefix cache.
    cache_write_tokens: int = 0  # Always 0: cache writes are not counted.


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int  # Tokens within the reasoning.


class ResponseUsage(Struct, frozen=True):
    input_tokens: int  # Prompt tokens, including cached tokens.
    input_tokens_details: InputTokensDetails  # Number of cached prompt tokens.
    output_tokens: int  # Generated tokens, including reasoning.
    output_tokens_details: OutputTokensDetails  # Number of reasoning tokens.
    total_tokens: int  # Sum of prompt tokens and generated tokens.


class ResponseError(Struct, frozen=True):
    code: str  # Always `server_error`.
    message: str  # Why the response failed.


class IncompleteDetails(Struct, frozen=True):
    reason: str  # Always `max_output_tokens`.


class ReasoningEcho(Struct, frozen=True):
    effort: str | None  # Same value as in the request.
    summary: str | None  # Same value as in the request.


class TextEcho(Struct, frozen=True):
    format: JsonObject  # Text format that the request sets; default `text`.
    verbosity: str  # Verbosity that the request sets; default `medium`.


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """A response, with the fields of the request and the answer so far."""

    id: str  # Id by which clients fetch or continue the response.
    object: str = "response"  # Type of the object.
    created_at: int  # Unix time of the creation, in seconds.
    completed_at: int | None = None  # Unix time of the completion; null if not completed.
    status: str  # `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
    background: bool  # Same value as in the request.
    error: ResponseError | None = None  # Why the response failed.
    incomplete_details: IncompleteDetails | None = None  # Why the response is incomplete.
    instructions: str | None  # Same value as in the request.
    max_output_tokens: int | None  # Same value as in the request.
    max_tool_calls: int | None = None  # Always null: the number of calls has no limit.
    metadata: dict[str, str]  # Same value as in the request.
    model: str  # Model name that the request used.
    output: list[OutputItem]  # Items in the order in which the model wrote them.
    parallel_tool_calls: bool  # Same value as in the request.
    previous_response_id: str | None  # Same value as in the request.
    reasoning: ReasoningEcho  # Same value as in the request.
    service_tier: str = "default"  # Always `default`.
    store: bool  # Same value as in the request.
    temperature: float  # Sampling temperature that the server used.
    text: TextEcho  # Same value as in the request.
    tool_choice: str | JsonObject  # Same value as in the request.
    tools: list[JsonObject]  # Same value as in the request.
    top_logprobs: int = 0  # Same value as in the request.
    top_p: float  # Sampling parameter top_p that the server used.
    truncation: str = "disabled"  # Always `disabled`.
    usage: ResponseUsage | None = None  # Token counts; null before the response ends.
    user: str | None = None  # No effect.


class DeletedResponse(Struct, frozen=True):
    id: str  # Id of the response.
    object: str = "response"  # Type of the object.
    deleted: bool = True  # Always true.


class InputTokenCount(Struct, frozen=True):
    input_tokens: int  # Number of tokens in the prompt.
    object: str = "response.input_tokens"  # Type of the object.


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of the input items of a response."""

    object: str = "list"  # Type of the object.
    data: list[JsonObject]  # Input items with stable ids, and with lists of parts as content.
    first_id: str | None  # Id of the first item; null for an empty page.
    last_id: str | None  # Id of the last item, which requests for the next page send as `after`.
    has_more: bool  # Whether more items follow this page.


class StreamEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    type: str  # Name of the event.
    sequence_number: int  # Number of the event in the stream, from 0.


class GrowthEvent(StreamEvent, frozen=True, kw_only=True):
    """An event that extends an item."""

    item_id: str  # Id of the item to which the event belongs.
    output_index: int  # Index of the item in `output` of the response.


class ResponseEvent(StreamEvent, frozen=True, kw_only=True):
    """The events response.created, .in_progress, .completed, .incomplete and .failed."""

    response: ResponseAnswer  # The response at the time of the event.


class ItemEvent(StreamEvent, frozen=True, kw_only=True):
    """The events response.output_item.added and response.output_item.done."""

    output_index: int  # Index of the item in `output` of the response.
    item: OutputItem  # The item at the time of the event.


class PartEvent(GrowthEvent, frozen=True, kw_only=True):
    """The events response.content_part.added and response.content_part.done."""

    content_index: int = 0  # Number of the part in the item's content.
    part: OutputText | ReasoningText  # The part: empty in an added event, complete in a done event.


class SummaryPartEvent(GrowthEvent, frozen=True, kw_only=True):
    """The events response.reasoning_summary_part.added and response.reasoning_summary_part.done."""

    summary_index: int = 0  # Number of the part in the item's summary.
    part: SummaryText  # The part: empty in an added event, complete in a done event.


class TextEvent(GrowthEvent, frozen=True, kw_only=True):
    """A delta or done event of a text, of call arguments or of a tool input."""

    content_index: int | UnsetType = UNSET  # Number of the part in the item's content.
    summary_index: int | UnsetType = UNSET  # Number of the part in the item's summary.
    delta: str | UnsetType = UNSET  # New text of the part.
    text: str | UnsetType = UNSET  # The whole text; only in a done event.
    arguments: str | UnsetType = UNSET  # All arguments of the call as JSON; only in a done event.
    input: str | UnsetType = UNSET  # The whole tool input; only in a done event.
    name: str | UnsetType = UNSET  # Name of the called tool; only in a done event of arguments.
    # Only events of output_text have `logprobs`, for the tokens of `delta` or `text`.
    logprobs: list[ChatLogprob] | UnsetType = UNSET
