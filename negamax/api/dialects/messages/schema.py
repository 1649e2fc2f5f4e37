"""Define requests, answers and stream events of Anthropic's messages API."""

from functools import cached_property
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic import AfterValidator, Field

from negamax.api.dialects.messages.tool_changes import ToolsInEffect, read_tools
from negamax.api.schemas.request_model import (
    RequestModel,
    check_choice,
    check_type,
    validate_one_of,
)
from negamax.api.schemas.sampled_request import Messages, StopStrings, TurnRequest
from negamax.api.schemas.structure import build_grammar
from negamax.api.schemas.thinking import EFFORTS, MODES, ThinkingChoice
from negamax.api.schemas.tools import CallChoice, check_call_choice
from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import Grammar

_THINKING = {mode: mode for mode in MODES} | {"between_tools": "adaptive"}
_DISPLAYS = ("summarized", "omitted", "updates")
THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's error code for unsupported threads.
_CHOICES = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}


def _refuse_thread(thread: dict[str, Any]) -> NoReturn:
    """Refuse the field `thread`. A request with a thread sends only a part of the conversation.

    Clients recognize the error code and continue without a thread.
    """
    raise InvalidRequestError(
        "thread: the server stores no conversations",
        hint="omit thread, and send the whole conversation, whose prefix is cached",
        param="thread",
        code=THREAD_UNSUPPORTED,
    )


class ThinkingConfig(RequestModel):
    """The field `thinking`: whether and how much the model thinks, and how to show thinking."""

    # With adaptive and between_tools, the model decides whether to think.
    type: Annotated[str, validate_one_of("thinking.type", tuple(_THINKING))]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None  # Limit of thinking tokens.
    # If `display` is "omitted", only the signature contains the thinking.
    display: Annotated[str, validate_one_of("thinking.display", _DISPLAYS)] = "summarized"


class OutputConfig(RequestModel):
    """The field `output_config`: the reasoning effort and the format of the answer."""

    # How much the model thinks; same values as reasoning_effort in chat completions.
    effort: Annotated[str, validate_one_of("output_config.effort", EFFORTS)] | None = None
    format: dict[str, Any] | None = None  # Object with `type` json_schema and a `schema`.


class ToolChoice(RequestModel):
    """The field `tool_choice`."""

    # "any" forces a call of some tool, and "tool" forces a call of the tool in `name`.
    type: Annotated[str, validate_one_of("tool_choice.type", tuple(_CHOICES))]
    name: str | None = None  # Tool to call, if `type` is "tool".
    disable_parallel_tool_use: bool = False  # Allow at most one call per answer.


class CountRequest(TurnRequest):
    """A conversation whose tokens are counted. `MessagesRequest` adds the fields for answers."""

    model: str = Field()  # Model name from /v1/models.
    messages: Messages  # At most 16,384 messages; the latest message is last.
    system: str | list[dict[str, Any]] | None = None  # Text or blocks of the system prompt.
    tools: list[dict[str, Any]] | None = None  # At most 1,024 tools that the model may call.
    tool_choice: ToolChoice | None = None  # Which tools the model may or must call.
    thinking: ThinkingConfig | None = None  # Whether and how much the model thinks.
    output_config: OutputConfig = OutputConfig()  # Reasoning effort, and format of the text.
    output_format: dict[str, Any] | None = None  # The earlier name of output_config.format.
    # The server refuses a `thread`, and clients then send all messages instead.
    thread: Annotated[dict[str, Any], AfterValidator(_refuse_thread)] | None = None

    @cached_property
    def tools_in_effect(self) -> ToolsInEffect:
        """The tools after all tool changes in the conversation; empty with tool_choice "none"."""
        effect = read_tools(self.tools or (), self.messages)
        is_none = self.tool_choice is not None and self.tool_choice.type == "none"
        return ToolsInEffect() if is_none else effect

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call after all tool changes in the conversation."""
        return list(self.tools_in_effect.callable.values()) or None

    def call_choice(self, tools: list[dict[str, Any]] | None) -> CallChoice:
        choice = self.tool_choice or ToolChoice(type="auto")
        return check_call_choice(
            _CHOICES[choice.type],
            choice.name,
            tools=tools,
            parallel=not choice.disable_parallel_tool_use,
        )

    @property
    def thinking_choice(self) -> ThinkingChoice:
        mode = None if self.thinking is None else _THINKING[self.thinking.type]
        budget = None if self.thinking is None else self.thinking.budget_tokens
        effort = _find_latest_effort(self.messages) or self.output_config.effort
        return ThinkingChoice(mode=mode, effort=effort, budget=budget)

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def grammar(self) -> Grammar | None:
        form = self.output_config.format or self.output_format
        if form is None:
            return None
        check_choice(form.get("type"), ("json_schema",), "output_config.format", what="type ")
        return build_grammar("json_schema", form.get("schema"), param="output_config.format.schema")


def _find_latest_effort(messages: list[dict[str, Any]]) -> str | None:
    """Return `output_config.effort` of the last system message that sets this field."""
    effort = None
    for index, message in enumerate(messages):
        config = message.get("output_config") if message.get("role") == "system" else None
        if config is None:
            continue
        place = f"messages[{index}].output_config"
        given = check_type(config, dict, place).get("effort")
        if given is not None:
            effort = check_choice(given, EFFORTS, f"{place}.effort")
    return effort


class MessagesRequest(CountRequest):
    """A request for an answer to a conversation."""

    max_tokens: int = Field(ge=0)  # Limit of generated tokens; 0: cache the prompt and stop.
    stop_sequences: StopStrings = Field(default_factory=list)  # Texts that end the answer.


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int  # Tokens within thinking blocks.


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Token counts. The sum of the three input counts is the prompt length."""

    input_tokens: int  # Prompt tokens not found in the prefix cache.
    cache_creation_input_tokens: int = 0  # Always 0: cache writes are not counted.
    cache_read_input_tokens: int  # Prompt tokens found in the prefix cache.
    output_tokens: int  # Generated tokens, including thinking.
    output_tokens_details: ThinkingTokens  # Number of thinking tokens.
    service_tier: str | UnsetType = UNSET  # Always `standard`.


class TextBlock(Struct, frozen=True, tag="text", tag_field="type"):
    text: str  # The text; empty in content_block_start.


class ThinkingBlock(Struct, frozen=True, tag="thinking", tag_field="type"):
    thinking: str  # The reasoning; empty in content_block_start and with display omitted.
    signature: str  # The signature, which contains the reasoning if thinking.display is 'omitted'.


class ToolUseBlock(Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str  # Id of the call, which the client sends as tool_use_id with the tool_result.
    name: str  # Name of the tool.
    input: msgspec.Raw  # The arguments; empty in content_block_start.


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(Struct, frozen=True, kw_only=True):
    id: str  # Id of the message.
    type: str = "message"  # Type of the object.
    role: str = "assistant"  # Author of the message.
    model: str  # Model name that the request used.
    content: list[ContentBlock]  # Blocks in the order of generation.
    # `stop_reason`: end_turn, max_tokens, model_context_window_exceeded, stop_sequence or tool_use.
    stop_reason: str | None
    stop_sequence: str | None  # Stop string that ended the answer.
    usage: MessageUsage  # Token counts of the prompt and the answer.


class TokenCount(Struct, frozen=True):
    input_tokens: int  # Number of tokens in the prompt.


class TextDelta(Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str  # The next text.


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    thinking: str  # The next reasoning.


class SignatureDelta(Struct, frozen=True, tag="signature_delta", tag_field="type"):
    signature: str  # Signature of the whole block, sent at the end of the block.


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str  # The next piece of the JSON text of the tool input.


class StopDelta(Struct, frozen=True):
    # `stop_reason`: end_turn, max_tokens, model_context_window_exceeded, stop_sequence or tool_use.
    stop_reason: str | None
    stop_sequence: str | None  # Stop string that ended the answer.


class MessageStart(Struct, frozen=True, tag="message_start", tag_field="type"):
    message: MessageAnswer  # Message without content, but with the prompt's token counts.


class Ping(Struct, frozen=True, tag="ping", tag_field="type"):
    pass


class BlockStart(Struct, frozen=True, tag="content_block_start", tag_field="type"):
    index: int  # Number of the block in the content.
    content_block: ContentBlock  # The new block, which has no text yet.


class BlockDelta(Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    index: int  # Number of the block in the content.
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta  # New part of the block.


class BlockStop(Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    index: int  # Number of the block in the content.


class MessageDelta(Struct, frozen=True, tag="message_delta", tag_field="type"):
    delta: StopDelta  # Why the answer ended.
    usage: MessageUsage  # Final token counts of the answer.


class MessageStop(Struct, frozen=True, tag="message_stop", tag_field="type"):
    pass


NO_INPUT = msgspec.Raw(b"{}")  # Empty input in the start event of a call.
