"""Items of the Responses API as messages of chat completions, without losing anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from negamax.api.common.history import AssistantParts, HiddenThought, History, part_texts
from negamax.api.common.thought_signature import HiddenThoughts
from negamax.api.openai.responses_schema import CUSTOM_INPUT, shown_name
from negamax.api.schemas.request_model import refuse, shown
from negamax.text.formats.family import ChatFamily
from negamax.text.messages import unseen_note

_ROLES = ("user", "assistant", "system", "developer")
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
# what other servers' models and their own tools leave in a history
_PASSED_OVER = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
    "computer_call", "computer_call_output", "program", "program_output",
    "tool_search_call", "tool_search_output",
    "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
    "compaction", "context_compaction",
)  # fmt: skip


def history_of(
    items: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    instructions: str | None,
    thoughts: HiddenThoughts,
    family: ChatFamily | None = None,
) -> History:
    """The conversation of `items`, which come with their places, with a model of `family`.

    Reasoning, messages of the assistant and calls between two items of others are one assistant
    message, as the model wrote them. Reasoning is its content, else what its encrypted content has,
    unpacked where the prompt shows it, else its summary. A call that was cut is left out where no
    result follows: it could not be run.
    Errors: `InvalidRequestError` naming the place of what cannot be shown to the model.
    """
    history = History()
    if instructions:
        history.add({"role": "system", "content": instructions}, place="instructions")
    parts: AssistantParts | None = None
    parts_place = ""
    answered = {item.get("call_id") for _, item in items if item.get("type") in _RESULTS}
    for place, item in items:
        kind = item.get("type", "message")
        is_cut = kind in _CALLS and item.get("status") == "incomplete"
        if is_cut and item.get("call_id") not in answered:
            continue
        is_assistants = kind in ("reasoning", *_CALLS) or (
            kind == "message" and item.get("role") == "assistant"
        )
        if is_assistants:
            if parts is None:
                parts, parts_place = AssistantParts(), place
            _add_part(parts, item, place, family)
        elif kind not in _PASSED_OVER:
            if parts is not None:
                history.add_assistant(parts, place=parts_place)
                parts = None
            history.add(_message(item, place), place=place)
    if parts is not None:
        history.add_assistant(parts, place=parts_place)
    history.reveal(thoughts)
    return history


def _add_part(
    parts: AssistantParts, item: Mapping[str, Any], place: str, family: ChatFamily | None
) -> None:
    """Add an item of the assistant."""
    match item.get("type", "message"):
        case "reasoning":
            parts.add_reasoning(_reasoning(item))
        case "function_call":
            parts.add_call(item.get("call_id"), _called_name(item), item.get("arguments"))
        case "custom_tool_call":
            parts.add_call(
                item.get("call_id"), _called_name(item), {CUSTOM_INPUT: item.get("input")}
            )
        case _:
            parts.add_text(_assistant_text(item.get("content"), place, family), is_apart=True)


def _called_name(item: Mapping[str, Any]) -> Any:
    return shown_name(item.get("namespace"), item.get("name"))


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """An item of anyone else; its content is checked with the other messages."""
    kind = item.get("type", "message")
    if kind in _RESULTS:
        output = item.get("output")
        if isinstance(output, dict):  # not a list of parts: the value itself
            output = json.dumps(output, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        allowed = ("message", "reasoning", *_CALLS, *_RESULTS, "item_reference")
        refuse(f"{place}.type", f"{shown(kind)}; allowed: {', '.join(map(repr, allowed))}")
    if item.get("role") not in _ROLES:
        refuse(
            f"{place}.role", f"{shown(item.get('role'))}; allowed: {', '.join(map(repr, _ROLES))}"
        )
    return {"role": item["role"], "content": item.get("content")}


def _assistant_text(content: object, place: str, family: ChatFamily | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else [None]):
        kind = part.get("type") if isinstance(part, dict) else None
        note = unseen_note(kind, family, place=f"{place}.content[{index}]")
        if note is not None:
            texts.append(f"\n{note}\n")
            continue
        text = (
            part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
        )
        if kind not in ("output_text", "input_text", "text", "refusal") or not isinstance(
            text, str
        ):
            refuse(
                f"{place}.content[{index}]",
                "must be a part with text; allowed: 'output_text', 'refusal'",
            )
        texts.append(text)
    return "".join(texts)


def _reasoning(item: Mapping[str, Any]) -> str | HiddenThought:
    shown_text, summary = ("".join(part_texts(item.get(name))) for name in ("content", "summary"))
    encrypted = item.get("encrypted_content")
    if shown_text or not isinstance(encrypted, str):
        return shown_text or summary
    return HiddenThought(encrypted, otherwise=summary)
