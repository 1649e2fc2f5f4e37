"""What the engine must enforce on the answers of a request: a form, calls, a budget of thinking, in
the model's own format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from negamax.api.schemas.request_model import refuse
from negamax.api.schemas.tools import CallChoice
from negamax.config.grammar import Grammar
from negamax.scheduler.request import SamplingParams
from negamax.text.chat_format import ChatFormat, ReasoningState
from negamax.text.grammar.tool_calls import tool_grammar


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
