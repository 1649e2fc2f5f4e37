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
    """Check the JSON types in `tool_choice`. `call_choice` checks the names of tools later."""
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
        "or {'type': 'allowed_tools', ...}"
    )
    refuse("tool_choice", f"the value {describe(kind)} is not valid; allowed: {allowed}")


def _allows_some(choice: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _get_chosen_name(choice: dict[str, Any]) -> str | None:
    """Return the function name in `choice`, in the format of chat completions or /v1/responses."""
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
    budget_tokens: Annotated[int, Field(ge=0)] | None = None  # Limit of reasoning tokens.


class ChatRequest(StructuredRequest):
    """A conversation to answer. The template renders a tool's keys in the client's order."""

    synonyms: ClassVar[Mapping[str, tuple[str, ...]]] = {"max_tokens": ("max_completion_tokens",)}

    messages: Messages  # At most 16,384 messages; the latest message is last.
    # `max_tokens`: limit of generated tokens. A limit of 0 only caches the prompt.
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)  # Overrides max_tokens.
    logprobs: bool = False  # Return the log-probability of each token of the answer.
    top_logprobs: int | None = Field(default=None, ge=0)  # Number of likely tokens per position.
    tools: Tools | None = None  # Functions that the model may call; at most 1,024.
    # `tool_choice`: whether the model may or must call tools, and which tools it may call.
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    parallel_tool_calls: bool = True  # False allows at most one call per answer.
    # `modalities`: requested kinds of output. Only text is supported.
    modalities: Annotated[list[str], AfterValidator(_check_modalities)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # Variables of the chat template.
    add_generation_prompt: bool = True  # End the prompt with the beginning of an answer.
    continue_final_message: bool = False  # Extend the last message; excludes add_generation_prompt.
    echo: bool = False  # Also return the text that continue_final_message continues.
    thinking: ThinkingParam | None = None  # Whether and how long the model thinks.
    # `thinking_mode` selects whether the model thinks, as in M3's chat template.
    thinking_mode: Annotated[str, validate_one_of("thinking_mode", MODES)] | None = None
    enable_thinking: bool | None = None  # True sets thinking_mode to enabled, false to disabled.
    # `reasoning_effort`: how much to think, if the template reads this field; "none": not at all.
    reasoning_effort: Annotated[str, validate_one_of("reasoning_effort", EFFORTS)] | None = None
    include_reasoning: bool = True  # False omits the reasoning from the answer.
    separate_reasoning: bool | None = None  # SGLang's field; false keeps the reasoning in content.
    reasoning_split: bool | None = None  # MiniMax's field; true adds reasoning_details to answers.
    stream_reasoning: bool = True  # SGLang's field; false sends all reasoning in one chunk.

    @property
    def token_limit(self) -> int | None:
        """The limit of generated tokens. None allows all tokens that fit in the context length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens to list per position, or None without logprobs."""
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
        """Return which tools the model may or must call, or raise `InvalidRequestError`."""
        mode, name, allowed = self.tool_choice, None, None
        if _allows_some(mode):
            mode, allowed = read_allowed_tools(mode)
        elif isinstance(mode, dict):
            name, mode = _get_chosen_name(mode), "function"
        parallel = self.parallel_tool_calls
        return check_call_choice(mode, name, tools=tools, parallel=parallel, allowed=allowed)

    @property
    def thinking_choice(self) -> ThinkingChoice:
        """The thinking settings. `thinking` overrides `thinking_mode` and `enable_thinking`."""
        mode, budget = None, self.reasoning_budget
        if self.thinking is not None:
            mode = self.thinking.type
            budget = self.thinking.budget_tokens if budget is None else budget
        modes = (mode, self.thinking_mode, read_switch(self.enable_thinking))
        mode = next((mode for mode in modes if mode is not None), None)
        return ThinkingChoice(mode=mode, effort=self.reasoning_effort, budget=budget)

    @property
    def reasoning_place(self) -> ReasoningPlace | None:
        """Where the answer contains the reasoning. None selects the server's default."""
        if not self.include_reasoning:
            return ReasoningPlace.NOWHERE
        split = self.separate_reasoning if self.reasoning_split is None else self.reasoning_split
        if split is None:
            return None
        return ReasoningPlace.FIELD if split else ReasoningPlace.CONTENT


class FunctionCall(Struct, frozen=True):
    name: str | UnsetType = UNSET  # Tool name; only the first delta of a call has the name.
    arguments: str | UnsetType = UNSET  # JSON text of the arguments; in a stream, its next part.


class ToolCall(Struct, frozen=True):
    """A tool call in an answer, or a new part of a tool call in a stream."""

    index: int | UnsetType = UNSET  # Number of the call in the message; sent only in streams.
    id: str | UnsetType = UNSET  # Id of the call; only the first delta of a call has the id.
    type: str | UnsetType = UNSET  # Always `function`; only the first delta of a call has a type.
    function: FunctionCall = FunctionCall()  # The called function and its arguments.


class ReasoningDetail(Struct, frozen=True):
    """Reasoning in MiniMax's format. In a stream, `text` contains only new reasoning."""

    text: str  # Text of the reasoning.
    type: str = "reasoning.text"  # Always `reasoning.text`.
    id: str = "reasoning-text-1"  # Id of the reasoning in the message.
    format: str = "MiniMax-response-v1"  # Name of MiniMax's reasoning format.
    index: int = 0  # Always 0: a message has at most one reasoning text.


class Message(Struct, frozen=True):
    role: str  # Always `assistant`.
    content: str | None  # Text without reasoning and calls; null if the message has only calls.
    reasoning_content: str | None  # The reasoning, separate from the content.
    reasoning: str | None  # Same text as reasoning_content, for vLLM's clients.
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET  # Set if reasoning_split is true.
    tool_calls: list[ToolCall] | UnsetType = UNSET  # Tool calls in the order of generation.


class ChatChoice(Struct, frozen=True):
    index: int  # Number of the choice, 0 to n - 1.
    message: Message  # The model's answer.
    logprobs: ChatLogprobs | None  # Log-probabilities of answer tokens, if requested.
    finish_reason: str | None  # One of `stop`, `length`, `tool_calls` and `abort`.
    stop_reason: int | str | None  # Stop string or stop token id that ended the answer.
    token_ids: list[int] | UnsetType = UNSET  # Token ids of the answer, with return_token_ids.


class ChatAnswer(CompletionAnswer, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice]  # The `n` choices in the order of `index`.
    usage: Usage  # Token counts of the prompt and all choices.
    # `prompt_logprobs`: one object per token, with token ids as keys, and null for the first token.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # Prompt token ids, if return_token_ids is set.


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET  # Always `assistant`; only the first delta has a role.
    content: str | UnsetType = UNSET  # The next text, without reasoning and tool calls.
    reasoning_content: str | UnsetType = UNSET  # The next text of the reasoning.
    reasoning: str | UnsetType = UNSET  # Same text as reasoning_content, for vLLM's clients.
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET  # Set if reasoning_split is true.
    tool_calls: list[ToolCall] | UnsetType = UNSET  # The next parts of tool calls.


class ChatChunkChoice(Struct, frozen=True):
    index: int  # Number of the choice, 0 to n - 1.
    delta: Delta  # New part of the choice.
    logprobs: ChatLogprobs | None = None  # Logprobs of the tokens since the last chunk.
    finish_reason: str | None = None  # `stop`, `length`, `tool_calls` or `abort` in the last chunk.
    stop_reason: int | str | UnsetType | None = UNSET  # Stop string or token id, in the last chunk.
    token_ids: list[int] | UnsetType = UNSET  # New token ids, if return_token_ids is set.


class ChatChunk(CompletionAnswer, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]  # One choice, or none in the chunk with token counts.
    usage: Usage | UnsetType | None = UNSET  # Token counts or null, if include_usage is set.
    prompt_token_ids: list[int] | UnsetType = UNSET  # Prompt token ids, in the first chunk only.


class RenderedPrompt(Struct, frozen=True, kw_only=True):
    """The prompt of a conversation."""

    request_id: str  # The id that an answer to the request would have.
    model: str  # Model name that the request used.
    prompt: str  # Text of the prompt.
    token_ids: list[int]  # Token ids of the prompt.
