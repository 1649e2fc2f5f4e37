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
    logprobs: list[ChatLogprob] = []  # token logprobs, with include message.output_text.logprobs


class Item(Struct, frozen=True, tag_field="type"):
    """A part of an answer."""

    id: str  # id of the item
    status: str  # in_progress, completed or incomplete


class ReasoningItem(Item, frozen=True, tag="reasoning"):
    summary: list[SummaryText]  # one part if reasoning.summary is set
    content: list[ReasoningText]  # one part
    encrypted_content: str | UnsetType | None = UNSET  # packed reasoning, only if requested


class MessageItem(Item, frozen=True, tag="message"):
    content: list[OutputText]  # one part
    role: str = "assistant"  # author of the message


class FunctionCallItem(Item, frozen=True, tag="function_call"):
    call_id: str  # id to use in the function_call_output
    name: str  # name of the tool
    arguments: str  # arguments as JSON text
    namespace: str | UnsetType = UNSET  # namespace of the tool, if it has one


class CustomCallItem(Item, frozen=True, tag="custom_tool_call"):
    call_id: str  # id to use in the custom_tool_call_output
    name: str  # name of the tool
    input: str  # text that the tool is called with
    namespace: str | UnsetType = UNSET  # namespace of the tool, if it has one


class LocalEnvironment(Struct, frozen=True, tag="local", tag_field="type"):
    """The client's machine, which runs the shell."""


class ShellCallItem(Item, frozen=True, tag="shell_call"):
    call_id: str  # id to use in the shell_call_output
    action: JsonObject  # `commands`, `timeout_ms`, `max_output_length`
    environment: LocalEnvironment = LocalEnvironment()  # machine that runs the shell


class LocalShellCallItem(Item, frozen=True, tag="local_shell_call"):
    call_id: str  # id for the field `id` of local_shell_call_output
    action: JsonObject  # `command`, `working_directory`, `timeout_ms`


class ApplyPatchCallItem(Item, frozen=True, tag="apply_patch_call"):
    call_id: str  # id to use in the apply_patch_call_output
    operation: JsonObject  # `type`, `path`, `diff`


class ToolSearchCallItem(Item, frozen=True, tag="tool_search_call"):
    call_id: str  # id to use in the tool_search_output
    arguments: JsonObject  # arguments of the search
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
    cached_tokens: int  # tokens found in the prefix cache
    cache_write_tokens: int = 0  # always 0: cache writes are not counted


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int  # tokens within the reasoning


class ResponseUsage(Struct, frozen=True):
    input_tokens: int  # prompt tokens, including cached tokens
    input_tokens_details: InputTokensDetails  # details of the prompt
    output_tokens: int  # generated tokens, including reasoning
    output_tokens_details: OutputTokensDetails  # details of the completion
    total_tokens: int  # prompt and completion tokens


class ResponseError(Struct, frozen=True):
    code: str  # `server_error`
    message: str  # details of the error


class IncompleteDetails(Struct, frozen=True):
    reason: str  # `max_output_tokens`


class ReasoningEcho(Struct, frozen=True):
    effort: str | None  # value from the request
    summary: str | None  # value from the request


class TextEcho(Struct, frozen=True):
    format: JsonObject  # format of the request, or `text`
    verbosity: str  # verbosity of the request, or `medium`


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """A response: the request's fields, and the answer so far."""

    id: str  # id to fetch or continue the response
    object: str = "response"  # type of the object
    created_at: int  # Unix time in seconds
    completed_at: int | None = None  # Unix time of the end, once completed
    status: str  # queued, in_progress, completed, incomplete, failed, cancelled
    background: bool  # value from the request
    error: ResponseError | None = None  # why the response failed
    incomplete_details: IncompleteDetails | None = None  # why the response is incomplete
    instructions: str | None  # value from the request
    max_output_tokens: int | None  # value from the request
    max_tool_calls: int | None = None  # always null: calls are not limited
    metadata: dict[str, str]  # value from the request
    model: str  # model name that the request used
    output: list[OutputItem]  # items in the order in which the model wrote them
    parallel_tool_calls: bool  # value from the request
    previous_response_id: str | None  # value from the request
    reasoning: ReasoningEcho  # value from the request
    service_tier: str = "default"  # always `default`
    store: bool  # value from the request
    temperature: float  # value used for sampling
    text: TextEcho  # value from the request
    tool_choice: str | JsonObject  # value from the request
    tools: list[JsonObject]  # value from the request
    top_logprobs: int = 0  # value from the request
    top_p: float  # value used for sampling
    truncation: str = "disabled"  # always `disabled`
    usage: ResponseUsage | None = None  # token counts, once the response has ended
    user: str | None = None  # no effect


class DeletedResponse(Struct, frozen=True):
    id: str  # id of the response
    object: str = "response"  # type of the object
    deleted: bool = True  # always true


class InputTokenCount(Struct, frozen=True):
    input_tokens: int  # tokens of the prompt that the model would read
    object: str = "response.input_tokens"  # type of the object


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of the input items of a response."""

    object: str = "list"  # type of the object
    data: list[JsonObject]  # items with a stable `id`, whose texts are lists of parts
    first_id: str | None  # id of the first item; null for an empty page
    last_id: str | None  # id of the last item, for `after` of the next page
    has_more: bool  # whether there are items after this page


class StreamEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    type: str  # name of the event
    sequence_number: int  # number of the event in the stream, from 0


class GrowthEvent(StreamEvent, frozen=True, kw_only=True):
    """An event about an item that grows."""

    item_id: str  # id of the item that grows
    output_index: int  # number of the item in the output


class ResponseEvent(StreamEvent, frozen=True, kw_only=True):
    """The events response.created, in_progress, completed, incomplete and failed."""

    response: ResponseAnswer  # current state of the response


class ItemEvent(StreamEvent, frozen=True, kw_only=True):
    """The events response.output_item.added and done."""

    output_index: int  # number of the item in the output
    item: OutputItem  # current state of the item


class PartEvent(GrowthEvent, frozen=True, kw_only=True):
    """The events response.content_part.added and done."""

    content_index: int = 0  # number of the part in the item's content
    part: OutputText | ReasoningText  # the part, empty when added and whole when done


class SummaryPartEvent(GrowthEvent, frozen=True, kw_only=True):
    """The events response.reasoning_summary_part.added and done."""

    summary_index: int = 0  # number of the part in the item's summary
    part: SummaryText  # the part, empty when added and whole when done


class TextEvent(GrowthEvent, frozen=True, kw_only=True):
    """A delta event or a done event, whose fields depend on the event's type."""

    content_index: int | UnsetType = UNSET  # number of the part in the item's content
    summary_index: int | UnsetType = UNSET  # number of the part in the item's summary
    delta: str | UnsetType = UNSET  # new text of the part
    text: str | UnsetType = UNSET  # the whole text, in the done event
    arguments: str | UnsetType = UNSET  # all arguments, in the done event
    input: str | UnsetType = UNSET  # the whole input, in the done event
    name: str | UnsetType = UNSET  # name of the tool, in the done event of the arguments
    # for output_text: logprobs of the delta, or of all tokens when done; empty by default
    logprobs: list[ChatLogprob] | UnsetType = UNSET
