"""Requests and answers of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeGuard

from msgspec import UNSET, Struct, UnsetType
from pydantic import AfterValidator, Field

from negamax.api.schemas.answers import ChatLogprobs, CompletionAnswer, PromptLogprobs, Usage
from negamax.api.schemas.request_model import (
    RequestModel,
    check_type,
    describe,
    refuse,
    validate_one_of,
)
from negamax.api.schemas.sampled_request import Messages, TemplateKwargs
from negamax.api.schemas.structure import StructuredRequest
from negamax.api.schemas.thinking import EFFORTS, MODES, ReasoningPlace, ThinkingChoice, read_switch
from negamax.api.schemas.tools import (
    CallChoice,
    Tools,
    check_call_choice,
    check_function_tools,
    read_allowed_tools,
)
from negamax.text.messages import INSTRUCTION_ROLES


def _check_tool_choice(choice: object) -> object:
    """Check the JSON shape of `tool_choice`. `call_choice` checks the names of tools later."""
    if _allows_some(choice):
        read_allowed_tools(choice)
        return choice
    if choice in ("none", "auto", "required") or (
        isinstance(choice, dict) and _get_chosen_name(choice)
    ):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else choice
    allowed = (
        "'auto', 'none', 'required', {'type': 'function', 'function': {'name': ...}}, "
        "{'type': 'allowed_tools', ...}"
    )
    refuse("tool_choice", f"{describe(kind)}; allowed: {allowed}")


def _allows_some(choice: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _get_chosen_name(choice: dict[str, Any]) -> str | None:
    """Return the function name in `choice`, which may also have the flat shape of Responses."""
    if choice.get("type", "function") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _check_modalities(modalities: list[str]) -> list[str]:
    if modalities != ["text"]:
        refuse("modalities", "this model writes text only; allowed: ['text']")
    return modalities


class ThinkingParam(RequestModel):
    """The field `thinking`, as in MiniMax's and Anthropic's APIs."""

    type: Annotated[str, validate_one_of("thinking.type", MODES)] = (
        "enabled"  # With "adaptive" the model decides whether to think.
    )
    budget_tokens: Annotated[int, Field(ge=0)] | None = None  # Most reasoning tokens; 0 means none.


class ChatRequest(StructuredRequest):
    """A conversation to answer.

    Messages and tools keep the client's key order, because the template renders it.
    """

    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **StructuredRequest.unsupported_fields,
        "functions": "it was replaced by tools",
        "function_call": "it was replaced by tool_choice",
        "audio": "this model writes text only",
        "web_search_options": "the server does not search the web",
        "documents": "put them into a message",
        "chat_template": "the template is chosen when the server starts (--chat-template)",
        "input_ids": "this endpoint takes messages; use /v1/completions",
        **dict.fromkeys(
            ("thread", "conversation", "previous_response_id"),
            "send the whole conversation; its prefix is cached",
        ),
        **dict.fromkeys(("system", "instructions"), "send a message with the role system"),
    }

    synonyms: ClassVar[Mapping[str, tuple[str, ...]]] = {"max_tokens": ("max_completion_tokens",)}

    messages: Messages  # At most 16,384 messages; the latest message is last.
    max_tokens: int | None = Field(default=None, ge=0)  # Token limit; 0 only caches the prompt.
    max_completion_tokens: int | None = Field(default=None, ge=0)  # Overrides max_tokens.
    logprobs: bool = False  # Return the log-probability of each token of the answer.
    top_logprobs: int | None = Field(default=None, ge=0)  # Alternatives per token; needs logprobs.
    tools: Tools | None = None  # Functions that the model may call; at most 1,024.
    # Whether the model may or must call tools, and which tools it may call.
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    parallel_tool_calls: bool = True  # False allows at most one call.
    # Requested kinds of output. Only text is supported.
    modalities: Annotated[list[str], AfterValidator(_check_modalities)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # Variables of the chat template.
    add_generation_prompt: bool = True  # End the prompt with the beginning of an answer.
    continue_final_message: bool = False  # Requires add_generation_prompt=false.
    echo: bool = False  # With continue_final_message, repeat the continued text.
    thinking: ThinkingParam | None = None  # Whether the model thinks, and its token limit.
    # Whether the model thinks; the modes are those of M3's chat template.
    thinking_mode: Annotated[str, validate_one_of("thinking_mode", MODES)] | None = None
    enable_thinking: bool | None = None  # True selects mode enabled, false selects disabled.
    # How much the model thinks, if the chat template has efforts; "none" disables thinking.
    reasoning_effort: Annotated[str, validate_one_of("reasoning_effort", EFFORTS)] | None = None
    include_reasoning: bool = True  # False omits the reasoning from the answer.
    separate_reasoning: bool | None = None  # SGLang's field; false leaves reasoning in the content.
    reasoning_split: bool | None = None  # MiniMax's separate_reasoning; adds reasoning_details.
    stream_reasoning: bool = True  # SGLang's field; false sends the reasoning in one piece.

    @property
    def token_limit(self) -> int | None:
        """The limit of generated tokens. None allows the rest of the context length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives per token, or None without logprobs."""
        if not self.logprobs:
            if self.top_logprobs:
                refuse("top_logprobs", "needs logprobs=true")
            return None
        return self.top_logprobs or 0

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools of the request and its system messages, or None with tool_choice 'none'."""
        if self.tool_choice == "none":
            return None
        tools = list(self.tools or ())
        for index, message in enumerate(self.messages):
            brought = message.get("tools") if message.get("role") in INSTRUCTION_ROLES else None
            if brought:
                field = f"messages[{index}].tools"
                for number, tool in enumerate(check_type(brought, list, field, "a list of tools")):
                    check_type(tool, dict, f"{field}[{number}]", "a tool")
                tools += check_function_tools(brought, field=field)
        return tools or None

    def call_choice(self, tools: list[dict[str, Any]] | None) -> CallChoice:
        """Return which tools the model may or must call. Raises `InvalidRequestError`."""
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if _allows_some(choice):
            mode, names = read_allowed_tools(choice)
            return check_call_choice(mode, None, tools=tools, parallel=parallel, allowed=names)
        if isinstance(choice, dict):
            return check_call_choice(
                "function", _get_chosen_name(choice), tools=tools, parallel=parallel
            )
        return check_call_choice(choice, None, tools=tools, parallel=parallel)

    @property
    def thinking_choice(self) -> ThinkingChoice:
        """The thinking settings. The first value in `modes` that is not None sets the mode."""
        mode, budget = None, self.reasoning_budget
        if self.thinking is not None:
            mode = self.thinking.type
            budget = self.thinking.budget_tokens if budget is None else budget
        modes = (mode, self.thinking_mode, read_switch(self.enable_thinking))
        mode = next((mode for mode in modes if mode is not None), None)
        return ThinkingChoice(mode=mode, effort=self.reasoning_effort, budget=budget)

    @property
    def reasoning_place(self) -> ReasoningPlace | None:
        """The place of the reasoning in the answer. None selects the server's default."""
        if not self.include_reasoning:
            return ReasoningPlace.NOWHERE
        split = self.separate_reasoning if self.reasoning_split is None else self.reasoning_split
        if split is None:
            return None
        return ReasoningPlace.FIELD if split else ReasoningPlace.CONTENT


class FunctionCall(Struct, frozen=True):
    name: str | UnsetType = UNSET  # Tool name; a stream sends it in the first piece of a call.
    arguments: str | UnsetType = UNSET  # JSON text; a stream sends it in pieces.


class ToolCall(Struct, frozen=True):
    """A tool call, or one piece of a call in a stream. Only pieces have an `index`."""

    index: int | UnsetType = UNSET  # Number of the call in the message; only in streams.
    id: str | UnsetType = UNSET  # Id for tool_call_id; a stream sends it in the first piece.
    type: str | UnsetType = UNSET  # Always `function`; a stream sends it in the first piece.
    function: FunctionCall = FunctionCall()  # The called function and its arguments.


class ReasoningDetail(Struct, frozen=True):
    """Reasoning in MiniMax's own shape. In a stream, `text` contains only the new part."""

    text: str  # Text of the reasoning.
    type: str = "reasoning.text"  # Kind of detail.
    id: str = "reasoning-text-1"  # Id of the reasoning in the message.
    format: str = "MiniMax-response-v1"  # The format of the text.
    index: int = 0  # Number of the reasoning in the message.


class Message(Struct, frozen=True):
    role: str  # Always `assistant`.
    content: str | None  # Text without reasoning and calls; null if there are only calls.
    reasoning_content: str | None  # The reasoning, separate from the content.
    reasoning: str | None  # Same text as reasoning_content, for vLLM's clients.
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET  # Only with reasoning_split.
    tool_calls: list[ToolCall] | UnsetType = UNSET  # Calls in the model's order.


class ChatChoice(Struct, frozen=True):
    index: int  # Number of the choice, 0 to n - 1.
    message: Message  # The answer.
    logprobs: ChatLogprobs | None  # Log-probabilities, if requested.
    finish_reason: str | None  # One of `stop`, `length`, `tool_calls` and `abort`.
    stop_reason: int | str | None  # Stop string or stop token id that ended the answer.
    token_ids: list[int] | UnsetType = UNSET  # Ids of the generated tokens, with return_token_ids.


class ChatAnswer(CompletionAnswer, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice]  # The n choices in order.
    usage: Usage  # Token counts.
    # Only with prompt_logprobs: null, then one object per prompt token with token ids as keys.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # Prompt token ids, with return_token_ids.


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET  # Always `assistant`, in the first delta.
    content: str | UnsetType = UNSET  # The next text, without reasoning and tool calls.
    reasoning_content: str | UnsetType = UNSET  # The next reasoning, in a delta without content.
    reasoning: str | UnsetType = UNSET  # Same text as reasoning_content, for vLLM's clients.
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET  # Only with reasoning_split.
    tool_calls: list[ToolCall] | UnsetType = UNSET  # The next pieces of calls.


class ChatChunkChoice(Struct, frozen=True):
    index: int  # Number of the choice, 0 to n - 1.
    delta: Delta  # New part of the choice.
    logprobs: ChatLogprobs | None = None  # Logprobs of the tokens since the last chunk.
    finish_reason: str | None = None  # `stop`, `length`, `tool_calls` or `abort` in the last chunk.
    stop_reason: int | str | UnsetType | None = UNSET  # Stop string or stop token id, at the end.
    token_ids: list[int] | UnsetType = UNSET  # New token ids, with return_token_ids.


class ChatChunk(CompletionAnswer, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]  # One choice, or none in the chunk with token counts.
    usage: Usage | UnsetType | None = UNSET  # Only with include_usage; null in other chunks.
    prompt_token_ids: list[int] | UnsetType = UNSET  # Prompt token ids, in the first chunk only.


class RenderedPrompt(Struct, frozen=True, kw_only=True):
    """The prompt of a conversation."""

    request_id: str  # The id that an answer would have.
    model: str  # Model name that the request used.
    prompt: str  # Text of the prompt.
    token_ids: list[int]  # Tokens of the prompt.
