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
    """Check the shape; `call_choice` checks the named tools."""
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
    """Return the name in a choice of one function, also in the flat shape of the Responses API."""
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
    """`thinking`, as in MiniMax's and Anthropic's APIs."""

    type: Annotated[str, validate_one_of("thinking.type", MODES)] = (
        "enabled"  # adaptive: the model decides
    )
    budget_tokens: Annotated[int, Field(ge=0)] | None = None  # most tokens of reasoning; 0: none


class ChatRequest(StructuredRequest):
    """One chat turn to answer.

    Messages and tools stay as the client wrote them: the template renders their key order.
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

    messages: Messages  # the conversation, the latest message last; at most 16,384
    max_tokens: int | None = Field(default=None, ge=0)  # 0: only cache the prompt
    max_completion_tokens: int | None = Field(default=None, ge=0)  # precedes max_tokens
    logprobs: bool = False  # the answer has the log-probability of each of its tokens
    top_logprobs: int | None = Field(default=None, ge=0)  # alternatives per token; needs logprobs
    tools: Tools | None = None  # functions that the model may call; at most 1,024
    # whether the model may or must call, and which tools
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    parallel_tool_calls: bool = True  # false: at most one call
    # the kinds of output
    modalities: Annotated[list[str], AfterValidator(_check_modalities)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # variables of the chat template
    add_generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    continue_final_message: bool = False  # needs add_generation_prompt=false
    echo: bool = False  # with continue_final_message: the answer begins with its text
    thinking: ThinkingParam | None = None  # whether the model thinks, and how long
    # whether the model thinks, as in M3's template
    thinking_mode: Annotated[str, validate_one_of("thinking_mode", MODES)] | None = None
    enable_thinking: bool | None = None  # true and false are the modes enabled and disabled
    # how much the model thinks, if the template supports efforts; "none" is the mode disabled
    reasoning_effort: Annotated[str, validate_one_of("reasoning_effort", EFFORTS)] | None = None
    include_reasoning: bool = True  # false: the answer omits its reasoning
    separate_reasoning: bool | None = None  # SGLang's; false: reasoning stays in the content
    reasoning_split: bool | None = None  # MiniMax's; the same; true: also in reasoning_details
    stream_reasoning: bool = True  # SGLang's; false: reasoning comes whole at its end

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives per token; None: no logprobs."""
        if not self.logprobs:
            if self.top_logprobs:
                refuse("top_logprobs", "needs logprobs=true")
            return None
        return self.top_logprobs or 0

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools of the request and of its instructions; None with tool_choice 'none'."""
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
        """Return which tools may and must be called. Errors: `InvalidRequestError`."""
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
        """The thinking mode, by whatever name; the first name in this list takes precedence."""
        modes = (
            None if self.thinking is None else self.thinking.type,
            self.thinking_mode,
            read_switch(self.enable_thinking),
        )
        return ThinkingChoice(
            mode=next((mode for mode in modes if mode is not None), None),
            effort=self.reasoning_effort,
            budget=self._thinking_budget,
        )

    @property
    def _thinking_budget(self) -> int | None:
        if self.reasoning_budget is not None or self.thinking is None:
            return self.reasoning_budget
        return self.thinking.budget_tokens

    @property
    def reasoning_place(self) -> ReasoningPlace | None:
        """The place of the reasoning in the answer; None: where the server puts it."""
        if not self.include_reasoning:
            return ReasoningPlace.NOWHERE
        split = self.separate_reasoning if self.reasoning_split is None else self.reasoning_split
        if split is None:
            return None
        return ReasoningPlace.FIELD if split else ReasoningPlace.CONTENT


class FunctionCall(Struct, frozen=True):
    name: str | UnsetType = UNSET  # of the tool; in a stream only in the first piece
    arguments: str | UnsetType = UNSET  # JSON text of an object; in a stream the next piece of it


class ToolCall(Struct, frozen=True):
    """A call in a message, or in a stream a piece of one, where only `index` is always present."""

    index: int | UnsetType = UNSET  # of the call in the message; in a stream
    id: str | UnsetType = UNSET  # id to use as tool_call_id; in a stream only in the first piece
    type: str | UnsetType = UNSET  # `function`; in a stream only in the first piece
    function: FunctionCall = FunctionCall()  # the called function and its arguments


class ReasoningDetail(Struct, frozen=True):
    """A piece of reasoning in MiniMax's own shape; in a stream `text` is only what is new."""

    text: str  # the reasoning
    type: str = "reasoning.text"  # kind of detail
    id: str = "reasoning-text-1"  # number of the reasoning in the message
    format: str = "MiniMax-response-v1"  # the format of the text
    index: int = 0  # number of the reasoning in the message


class Message(Struct, frozen=True):
    role: str  # `assistant`
    content: str | None  # the text without reasoning and calls; null beside calls alone
    reasoning_content: str | None  # the reasoning, apart from the content
    reasoning: str | None  # the same by vLLM's and OpenRouter's name
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET  # with reasoning_split, as MiniMax
    tool_calls: list[ToolCall] | UnsetType = UNSET  # in the order in which the model wrote them


class ChatChoice(Struct, frozen=True):
    index: int  # 0 to n - 1
    message: Message  # the answer
    logprobs: ChatLogprobs | None  # with logprobs
    finish_reason: str | None  # stop, length, tool_calls or abort
    stop_reason: int | str | None  # the stop string or the id of the stop token that ended it
    token_ids: list[int] | UnsetType = UNSET  # generated tokens, with return_token_ids


class ChatAnswer(CompletionAnswer, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice]  # n of them, in their order
    usage: Usage  # token counts
    # an object by token id for each prompt token, null for the first; with prompt_logprobs
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # with return_token_ids


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET  # `assistant`, in the first delta
    content: str | UnsetType = UNSET  # the next text without reasoning and calls
    reasoning_content: str | UnsetType = UNSET  # the next reasoning, never beside content
    reasoning: str | UnsetType = UNSET  # the same by vLLM's and OpenRouter's name
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET  # with reasoning_split
    tool_calls: list[ToolCall] | UnsetType = UNSET  # the next pieces of calls


class ChatChunkChoice(Struct, frozen=True):
    index: int  # 0 to n - 1
    delta: Delta  # the new part
    logprobs: ChatLogprobs | None = None  # of the tokens since the last chunk, with logprobs
    finish_reason: str | None = None  # stop, length, tool_calls or abort, in its last chunk
    stop_reason: int | str | UnsetType | None = UNSET  # what ended it, in its last chunk
    token_ids: list[int] | UnsetType = UNSET  # new ones, with return_token_ids


class ChatChunk(CompletionAnswer, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]  # one, or none in the chunk with the counts
    usage: Usage | UnsetType | None = UNSET  # counts, with include_usage; null elsewhere
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk, with return_token_ids


class RenderedPrompt(Struct, frozen=True, kw_only=True):
    """The prompt of a conversation."""

    request_id: str  # the id that an answer would have
    model: str  # the name that the request used
    prompt: str  # the text
    token_ids: list[int]  # its tokens
