"""The request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import AfterValidator, Field

from negamax.api.common.constraints import CallChoice, call_choice
from negamax.api.common.thinking import (
    EFFORTS,
    MODES,
    ReasoningPlace,
    ThinkingChoice,
    switch,
    template_switch,
)
from negamax.api.schemas.common import RequestModel, refuse, shown
from negamax.api.schemas.structure import StructuredRequest
from negamax.api.schemas.tools import allowed_tools, check_function, check_tool_count
from negamax.text.messages import INSTRUCTION_ROLES

MAX_MESSAGES = 16_384
_RENDER_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuse no messages, and more of them than a conversation has."""
    if not messages:
        refuse("messages", "the list is empty; send at least one message")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"{len(messages)} messages; allowed: at most {MAX_MESSAGES}")
    return messages


def _check_tools(tools: list[dict[str, Any]], *, field: str = "tools") -> list[dict[str, Any]]:
    """Checks what the prompt and the parser rely on; the rest of a tool goes to the template as the
    client wrote it.
    """
    check_tool_count(len(tools), field=field)
    for index, tool in enumerate(tools):
        where = f"{field}[{index}]"
        if tool.get("type", "function") != "function":
            refuse(f"{where}.type", f"{shown(tool['type'])}; allowed: 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            refuse(f"{where}.function", f"must be an object with a name; got {shown(function)}")
        check_function(function, where=f"{where}.function")
    return tools


def _check_tool_choice(choice: object) -> object:
    """Checks the shape; whether the named tools are there is found out with the tools."""
    if _allows_some(choice):
        allowed_tools(choice)
        return choice
    if choice in ("none", "auto", "required") or (
        isinstance(choice, dict) and _chosen_name(choice)
    ):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else choice
    allowed = (
        "'auto', 'none', 'required', {'type': 'function', 'function': {'name': ...}}, "
        "{'type': 'allowed_tools', ...}"
    )
    refuse("tool_choice", f"{shown(kind)}; allowed: {allowed}")


def _allows_some(choice: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is a choice of some of the tools."""
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _chosen_name(choice: dict[str, Any]) -> str | None:
    """The name in a choice of one function, also in the flat shape of the Responses API."""
    if choice.get("type", "function") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse template variables that are none, or that the request itself sets."""
    for name in kwargs:
        if name in _RENDER_ARGUMENTS:
            refuse(
                "chat_template_kwargs", f"{name!r} is a field of the request itself; set it there"
            )
        if not name.isidentifier():
            refuse("chat_template_kwargs", f"{shown(name)} is not a variable name")
    return kwargs


def _check_modalities(modalities: list[str]) -> list[str]:
    if modalities != ["text"]:
        refuse("modalities", "this model writes text only; allowed: ['text']")
    return modalities


Tools = Annotated[list[dict[str, Any]], AfterValidator(lambda tools: _check_tools(tools))]


def _one_of(field: str, allowed: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            refuse(field, f"{shown(value)}; allowed: {', '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


class Thinking(RequestModel):
    """`thinking`, as in MiniMax's and Anthropic's APIs."""

    type: Annotated[str, _one_of("thinking.type", MODES)] = "enabled"  # adaptive: the model decides
    # tokens of reasoning after which it is closed; 0: none
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class ChatRequest(StructuredRequest):
    """One chat turn to answer. Messages and tools stay as the client wrote them: the template
    renders their key order.
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

    # the conversation, the latest message last; at most 16,384
    messages: Annotated[list[dict[str, Any]], AfterValidator(check_messages)]
    # 0: read the prompt into the cache, answer nothing
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)  # wins over max_tokens
    logprobs: bool = False  # the answer has the log-probability of each of its tokens
    # so many of the likeliest tokens at each place too; needs logprobs
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: Tools | None = None  # functions that the model may call; at most 1,024
    # whether calls are possible or due, and of which tools
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    parallel_tool_calls: bool = True  # false: at most one call
    # what the answer is made of
    modalities: Annotated[list[str], AfterValidator(_check_modalities)] | None = None
    # variables of the chat template
    chat_template_kwargs: (
        Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] | None
    ) = None
    add_generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    # the answer goes on with the last message; needs add_generation_prompt=false
    continue_final_message: bool = False
    # with continue_final_message: the answer begins with the text of that message
    echo: bool = False
    thinking: Thinking | None = None  # whether the model thinks, and how long
    # whether the model thinks, as in M3's template
    thinking_mode: Annotated[str, _one_of("thinking_mode", MODES)] | None = None
    enable_thinking: bool | None = None  # true and false are the modes enabled and disabled
    # how much is thought, where the template knows efforts; "none" is the mode disabled
    reasoning_effort: Annotated[str, _one_of("reasoning_effort", EFFORTS)] | None = None
    include_reasoning: bool = True  # false: the answer is without its reasoning
    # SGLang's; false: reasoning stays in the content, between think tags
    separate_reasoning: bool | None = None
    # MiniMax's; false: the same; true: also in reasoning_details
    reasoning_split: bool | None = None
    # SGLang's; false: reasoning comes in one piece when it is complete
    stream_reasoning: bool = True

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, or None for the rest of the window."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """None: off; k: the chosen token and the k most likely."""
        if not self.logprobs:
            if self.top_logprobs:
                refuse("top_logprobs", "needs logprobs=true")
            return None
        return self.top_logprobs or 0

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is shown, those that instructions bring along included: none
        with tool_choice 'none'.
        """
        if self.tool_choice == "none":
            return None
        tools = list(self.tools or ())
        for index, message in enumerate(self.messages):
            brought = message.get("tools") if message.get("role") in INSTRUCTION_ROLES else None
            if brought:
                if not isinstance(brought, list) or not all(
                    isinstance(tool, dict) for tool in brought
                ):
                    refuse(f"messages[{index}].tools", "must be a list of tools")
                tools += _check_tools(brought, field=f"messages[{index}].tools")
        return tools or None

    def call_choice(self, tools: list[dict[str, Any]] | None) -> CallChoice:
        """Which of the offered tools may and must be called. Errors: `InvalidRequestError` for one
        that is not among them.
        """
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if _allows_some(choice):
            some = allowed_tools(choice)
            return call_choice(some.mode, None, tools=tools, parallel=parallel, allowed=some.names)
        if isinstance(choice, dict):
            return call_choice("function", _chosen_name(choice), tools=tools, parallel=parallel)
        return call_choice(choice, None, tools=tools, parallel=parallel)

    @property
    def thinking_choice(self) -> ThinkingChoice:
        """What the request says about thinking, by whatever name; the earlier name in this list
        wins.
        """
        modes = (
            None if self.thinking is None else self.thinking.type,
            self.thinking_mode,
            switch(self.enable_thinking),
            template_switch(self.chat_template_kwargs or {}),
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
        """Where reasoning goes in the answer; None: where the server puts it."""
        if not self.include_reasoning:
            return ReasoningPlace.NOWHERE
        split = self.separate_reasoning if self.reasoning_split is None else self.reasoning_split
        if split is None:
            return None
        return ReasoningPlace.FIELD if split else ReasoningPlace.CONTENT
