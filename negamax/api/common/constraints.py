"""What the engine must enforce on the answers of a request: a form, calls, a budget of thinking, in
the model's own format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from negamax.api.schemas.common import nearest, refuse, shown
from negamax.config.grammar import Grammar
from negamax.scheduler.request import SamplingParams
from negamax.text.chat_format import ChatFormat, ReasoningState
from negamax.text.grammar.tool_calls import tool_grammar


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Which calls an answer may or must have: "auto", "none", "required", or "function" with the
    `name` of the one to make. `allowed`: the names of the tools that may be called, where the model
    is shown more."""

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "function")

    def callable_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Those of the declared `tools` that may be called."""
        if tools is None or self.allowed is None:
            return tools
        return [tool for tool in tools if tool["function"]["name"] in self.allowed]


def call_choice(
    mode: str,
    name: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    parallel: bool,
    allowed: Mapping[str, str] | None = None,
) -> CallChoice:
    """The checked choice of calls: `mode` is auto, none, required, or function with a `name`.
    `allowed` has the names of the tools that may be called, where not all may, with the places in
    the request that name them."""
    names = [tool["function"]["name"] for tool in tools or ()]
    for allowed_name, place in (allowed or {}).items():
        if allowed_name not in names:
            refuse(
                place,
                f"{shown(allowed_name)} is not a declared tool.{nearest(allowed_name, names)}",
            )
    may_call = None if allowed is None else tuple(allowed)
    if mode in ("auto", "none"):
        return CallChoice(mode, parallel=parallel, allowed=may_call)
    if not tools:
        refuse(
            "tool_choice",
            "asks for a call, but there are no tools to call; send tools, or use 'auto'",
        )
    if mode == "required":
        return CallChoice("required", parallel=parallel, allowed=may_call)
    if name not in names:
        refuse("tool_choice", f"names the tool {shown(name)}, which is not declared")
    return CallChoice("function", name, parallel=False)


def answer_grammar(
    chat_format: ChatFormat,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: CallChoice,
    content: Grammar | None,
) -> Grammar | None:
    """The grammar of an answer that may or must call `tools`, and whose content has the form
    `content` otherwise.

    Errors: `InvalidRequestError` for a call that is forced but cannot be made.
    """
    if choice.mode == "none":
        return content
    if choice.is_forced and not chat_format.reads_calls:
        refuse(
            "tool_choice",
            "this server reads no calls (--tool-call-parser none); allowed: 'auto', 'none'",
        )
    return tool_grammar(
        tools or (),
        chat_format.call_style(),
        choice=choice.mode,
        name=choice.name,
        allowed=choice.allowed,
        parallel=choice.parallel,
        content=content,
    )


def constrained(
    sampling: SamplingParams,
    chat_format: ChatFormat,
    *,
    reasoning: ReasoningState,
    grammar: Grammar | None,
    budget: int | None,
) -> SamplingParams:
    """`sampling` with the grammar, which begins after the reasoning, and with a budget of reasoning
    tokens.
    """
    if grammar is None and budget is None:
        return sampling
    return replace(
        sampling,
        grammar=grammar,
        reasoning=chat_format.reasoning(reasoning),
        thinking_token_budget=budget,
    )
