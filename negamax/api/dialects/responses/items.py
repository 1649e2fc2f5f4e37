"""Answers, items and stream events of the Responses API."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from negamax.api.schemas.answers import ChatLogprob

JsonObject = dict[str, Any]


class ReasoningText(Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str  # the reasoning


class SummaryText(Struct, frozen=True, tag="summary_text", tag_field="type"):
    text: str  # the same text as the reasoning


class OutputText(Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str  # the text
    annotations: tuple[()] = ()  # always empty
    logprobs: list[ChatLogprob] = []  # per token, with include message.output_text.logprobs


class Item(Struct, frozen=True, tag_field="type"):
    """A part of an answer."""

    id: str  # of the item
    status: str  # in_progress, completed or incomplete


class ReasoningItem(Item, frozen=True, tag="reasoning"):
    summary: list[SummaryText]  # one part, with reasoning.summary
    content: list[ReasoningText]  # one part
    encrypted_content: str | UnsetType | None = UNSET  # with include reasoning.encrypted_content


class MessageItem(Item, frozen=True, tag="message"):
    content: list[OutputText]  # one part
    role: str = "assistant"  # author of the message


class FunctionCallItem(Item, frozen=True, tag="function_call"):
    call_id: str  # id to use in the function_call_output
    name: str  # of the tool
    arguments: str  # JSON text of an object
    namespace: str | UnsetType = UNSET  # of the tool, where it has one


class CustomCallItem(Item, frozen=True, tag="custom_tool_call"):
    call_id: str  # id to use in the custom_tool_call_output
    name: str  # of the tool
    input: str  # the text that it is called with
    namespace: str | UnsetType = UNSET  # of the tool, where it has one


class LocalEnvironment(Struct, frozen=True, tag="local", tag_field="type"):
    """The client's machine, where a shell runs."""


class ShellCallItem(Item, frozen=True, tag="shell_call"):
    call_id: str  # id to use in the shell_call_output
    action: JsonObject  # `commands`, `timeout_ms`, `max_output_length`
    environment: LocalEnvironment = LocalEnvironment()  # where it runs


class LocalShellCallItem(Item, frozen=True, tag="local_shell_call"):
    call_id: str  # id to use in the local_shell_call_output in `id`
    action: JsonObject  # `command`, `working_directory`, `timeout_ms`


class ApplyPatchCallItem(Item, frozen=True, tag="apply_patch_call"):
    call_id: str  # id to use in the apply_patch_call_output
    operation: JsonObject  # `type`, `path`, `diff`


class ToolSearchCallItem(Item, frozen=True, tag="tool_search_call"):
    call_id: str  # id to use in the tool_search_output
    arguments: JsonObject  # what to search for
    execution: str = "client"  # always `client`


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
    cached_tokens: int  # found in the prefix cache
    cache_write_tokens: int = 0  # writing to the cache is not counted


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int  # within the reasoning


class ResponseUsage(Struct, frozen=True):
    input_tokens: int  # of the prompt, cached ones included
    input_tokens_details: InputTokensDetails  # details of the prompt
    output_tokens: int  # generated, reasoning included
    output_tokens_details: OutputTokensDetails  # details of the completion
    total_tokens: int  # prompt and completion


class ResponseError(Struct, frozen=True):
    code: str  # `server_error`
    message: str  # details of the error


class IncompleteDetails(Struct, frozen=True):
    reason: str  # `max_output_tokens`


class ReasoningEcho(Struct, frozen=True):
    effort: str | None  # of the request
    summary: str | None  # of the request


class TextEcho(Struct, frozen=True):
    format: JsonObject  # of the request, or `text`
    verbosity: str  # of the request, or `medium`


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """A response: the request's fields, and the answer so far."""

    id: str  # to fetch or continue the response
    object: str = "response"  # type of the object
    created_at: int  # seconds since 1970
    completed_at: int | None = None  # the same, once completed
    status: str  # queued, in_progress, completed, incomplete, failed, cancelled
    background: bool  # of the request
    error: ResponseError | None = None  # why it failed
    incomplete_details: IncompleteDetails | None = None  # why it is incomplete
    instructions: str | None  # of the request
    max_output_tokens: int | None  # of the request
    max_tool_calls: int | None = None  # always null: calls are not limited
    metadata: dict[str, str]  # of the request
    model: str  # the name that the request used
    output: list[OutputItem]  # items in the order in which the model wrote them
    parallel_tool_calls: bool  # of the request
    previous_response_id: str | None  # of the request
    reasoning: ReasoningEcho  # of the request
    service_tier: str = "default"  # always `default`
    store: bool  # of the request
    temperature: float  # value used for sampling
    text: TextEcho  # of the request
    tool_choice: str | JsonObject  # of the request
    tools: list[JsonObject]  # of the request
    top_logprobs: int = 0  # of the request
    top_p: float  # value used for sampling
    truncation: str = "disabled"  # always `disabled`
    usage: ResponseUsage | None = None  # token counts, once it has ended
    user: str | None = None  # no effect


class DeletedResponse(Struct, frozen=True):
    id: str  # of the response
    object: str = "response"  # type of the object
    deleted: bool = True  # always true


class InputTokenCount(Struct, frozen=True):
    input_tokens: int  # of the prompt that the model would read
    object: str = "response.input_tokens"  # type of the object


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of the input items of a response."""

    object: str = "list"  # type of the object
    data: list[JsonObject]  # the items, each with a stable `id`, and texts as lists of parts
    first_id: str | None  # the id of the first; null where there are none
    last_id: str | None  # the id of the last, for `after` of the next page
    has_more: bool  # whether there are items after the last


class StreamEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    type: str  # the name of the event
    sequence_number: int  # of the event in the stream, from 0


class GrowthEvent(StreamEvent, frozen=True, kw_only=True):
    """An event about an item that grows."""

    item_id: str  # of the item that grows
    output_index: int  # of the item in the output


class ResponseEvent(StreamEvent, frozen=True, kw_only=True):
    """response.created, in_progress, completed, incomplete and failed."""

    response: ResponseAnswer  # its state at this moment


class ItemEvent(StreamEvent, frozen=True, kw_only=True):
    """response.output_item.added and done."""

    output_index: int  # of the item in the output
    item: OutputItem  # its state at this moment


class PartEvent(GrowthEvent, frozen=True, kw_only=True):
    """response.content_part.added and done."""

    content_index: int = 0  # of the part in the item's content
    part: OutputText | ReasoningText  # empty when it is added, whole when it is done


class SummaryPartEvent(GrowthEvent, frozen=True, kw_only=True):
    """response.reasoning_summary_part.added and done."""

    summary_index: int = 0  # of the part in the item's summary
    part: SummaryText  # empty when it is added, whole when it is done


class TextEvent(GrowthEvent, frozen=True, kw_only=True):
    """A delta or its done event; its fields depend on its type."""

    content_index: int | UnsetType = UNSET  # of the part in the item's content
    summary_index: int | UnsetType = UNSET  # of the part in the item's summary
    delta: str | UnsetType = UNSET  # the new part
    text: str | UnsetType = UNSET  # the whole text, in its done event
    arguments: str | UnsetType = UNSET  # all of them, in their done event
    input: str | UnsetType = UNSET  # all of it, in its done event
    name: str | UnsetType = UNSET  # of the tool, in the done event of the arguments
    # of output_text: those of the delta, or of all tokens when it is done; empty unless requested
    logprobs: list[ChatLogprob] | UnsetType = UNSET
