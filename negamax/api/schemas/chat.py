"""The request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from negamax.api.schemas.common import GenerationRequest, RequestModel, refuse, shown

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 256
_NAME_BREAKERS = frozenset('"<>\n\r\t')  # would not survive <invoke name="...">
_RENDER_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})


def _check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        refuse("messages", "the list is empty; send at least one message")
    return messages


def _check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checks what the prompt and the parser rely on; the rest of a tool goes to the template as the client wrote it."""
    if len(tools) > MAX_TOOLS:
        refuse("tools", f"{len(tools)} tools; allowed: at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            refuse(f"{where}.type", f"{shown(tool['type'])}; allowed: 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            refuse(f"{where}.function", f"must be an object with a name; got {shown(function)}")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME_CHARS or not _NAME_BREAKERS.isdisjoint(name):
            allowed = f"1 to {MAX_TOOL_NAME_CHARS} characters without quotes, angle brackets and line breaks"
            refuse(f"{where}.function.name", f"{shown(name)}; allowed: {allowed}")
        for key, kind in (("description", str), ("parameters", dict)):
            if not isinstance(function.get(key), kind | None):
                refuse(f"{where}.function.{key}", f"must be a JSON {'string' if kind is str else 'object'}")
    return tools


def _check_tool_choice(choice: object) -> object:
    if choice in ("none", "auto"):
        return choice
    if choice == "required" or isinstance(choice, dict):
        refuse("tool_choice", "a forced call is not implemented yet; allowed: 'auto', 'none'")
    refuse("tool_choice", f"{shown(choice)}; allowed: 'auto', 'none'")


def _check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") != "text":
        refuse("response_format", f"type {shown(value.get('type'))} is not implemented yet; allowed: 'text'")
    return value


def _check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in _RENDER_ARGUMENTS:
            refuse("chat_template_kwargs", f"{name!r} is a field of the request itself; set it there")
        if not name.isidentifier():
            refuse("chat_template_kwargs", f"{shown(name)} is not a variable name")
    return kwargs


def _check_modalities(modalities: list[str]) -> list[str]:
    if modalities != ["text"]:
        refuse("modalities", "this model writes text only; allowed: ['text']")
    return modalities


class Thinking(RequestModel):
    """`thinking` of MiniMax's own API. The M2 family always thinks, so switching it off is refused, not ignored."""

    type: str = "enabled"
    budget_tokens: int | None = None  # accepted; the model decides how long it thinks


def _check_thinking(thinking: Thinking) -> Thinking:
    if thinking.type not in ("enabled", "adaptive"):
        refuse("thinking.type", f"{shown(thinking.type)}; this model always thinks; allowed: 'enabled', 'adaptive'")
    return thinking


class ChatRequest(GenerationRequest):
    """One chat turn to answer. Messages and tools stay as the client wrote them: the template renders their key order."""

    ignored_fields: ClassVar[frozenset[str]] = GenerationRequest.ignored_fields | {"reasoning_effort"}
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.unsupported_fields,
        "functions": "it was replaced by tools",
        "function_call": "it was replaced by tool_choice",
        "audio": "this model writes text only",
        "web_search_options": "the server does not search the web",
        "documents": "put them into a message",
        "chat_template": "the template is chosen when the server starts (--chat-template)",
        "echo": "chat answers do not repeat the prompt; use /v1/completions",
    }

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(_check_messages)]
    max_completion_tokens: int | None = Field(default=None, ge=1)  # wins over max_tokens
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(_check_tools)] | None = None
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    response_format: Annotated[dict[str, Any], AfterValidator(_check_response_format)] | None = None
    modalities: Annotated[list[str], Field(fail_fast=True), AfterValidator(_check_modalities)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_template_kwargs)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # needs add_generation_prompt=false and a last assistant message
    include_reasoning: bool = True
    reasoning_split: Literal[True] = True  # MiniMax's field; reasoning is always split from content
    thinking: Annotated[Thinking, AfterValidator(_check_thinking)] | None = None

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
        """The tools that the model is shown: none of them with tool_choice 'none'."""
        return self.tools if self.tools and self.tool_choice != "none" else None
