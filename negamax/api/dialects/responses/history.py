"""Convert items of the Responses API into messages of chat completions without losing content."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from negamax.api.common.history import AssistantParts, HiddenThought, History, collect_texts
from negamax.api.common.thought_signature import HiddenThoughts
from negamax.api.dialects.responses.client_tools import CALLS as CLIENT_CALLS
from negamax.api.dialects.responses.client_tools import (
    FOUND_TOOLS,
    extract_arguments,
    is_hosted_search,
    render_result,
)
from negamax.api.dialects.responses.client_tools import RESULTS as CLIENT_RESULTS
from negamax.api.dialects.responses.item_settings import SETTINGS
from negamax.api.dialects.responses.schema import CUSTOM_INPUT, build_shown_name
from negamax.api.schemas.request_model import check_choice, check_type, refuse
from negamax.text.chat_family import ChatFamily
from negamax.text.messages import find_text, find_thought, unseen_note

_ROLES = ("user", "assistant", "system", "developer")
_CALLS = ("function_call", "custom_tool_call", *CLIENT_CALLS)
_RESULTS = ("function_call_output", "custom_tool_call_output", *CLIENT_RESULTS)
# Types of items that the prompt omits, because other servers and their tools wrote the items.
_PASSED_OVER = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
    "computer_call", "computer_call_output", "program", "program_output",
    "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
    "compaction", "context_compaction", *SETTINGS,
)  # fmt: skip
_NO_NOTES: Mapping[int, str] = {}
_END: Mapping[str, Any] = {"type": "end"}  # Marks the end of the request's items.


def build_history(
    items: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    instructions: str | None,
    thoughts: HiddenThoughts,
    family: ChatFamily | None = None,
    tool_notes: Mapping[int, str] = _NO_NOTES,
) -> History:
    """Build the conversation for a model of `family`. `items` has pairs of a path and an item.

    Consecutive reasoning, assistant messages and calls form one assistant message. The text of an
    item of unknown type becomes a user message, or a system message within a loop of tool calls.
    Unknown items without text are omitted. Reasoning is read from `content`, `encrypted_content` or
    `summary`, in this order of preference. A truncated call without a result is omitted.
    `tool_notes` maps the index of an item that adds tools to the text that describes the tools.
    Raises `InvalidRequestError` with the path of an item that the prompt cannot show.
    """
    history = History()
    if instructions:
        history.add({"role": "system", "content": instructions}, place="instructions")
    parts: AssistantParts | None = None
    parts_place = ""
    notes: list[tuple[str, str]] = []  # (text, path) of items between calls, moved after the calls
    local_calls = {
        item["id"]: item.get("call_id")
        for _, item in items
        if item.get("type") == "local_shell_call" and isinstance(item.get("id"), str)
    }
    results = (_get_call_id(item, local_calls) for _, item in items if item.get("type") in _RESULTS)
    answered = {call_id for call_id in results if isinstance(call_id, str)}
    for number, (place, item) in enumerate([*items, ("", _END)]):
        kind = check_type(item.get("type", "message"), str, f"{place}.type")
        is_truncated = kind in _CALLS and item.get("status") == "incomplete"
        call_id = item.get("call_id")
        if is_truncated and isinstance(call_id, str | None) and call_id not in answered:
            continue
        is_hosted = is_hosted_search(item)
        is_assistants = (kind in ("reasoning", *_CALLS) and not is_hosted) or (
            kind == "message" and item.get("role") == "assistant"
        )
        if is_assistants:
            if parts is None:
                parts, parts_place = AssistantParts(), place
            _add_part(parts, item, place, family)
            continue
        is_known = (kind in ("message", *_RESULTS) and not is_hosted) or item is _END
        text = "" if is_known else tool_notes.get(number) or _read_unknown(item, place)
        if not (is_known or text):
            continue
        if text and parts is not None and parts.calls:
            notes.append((text, place))
            continue
        if parts is not None:
            history.add_assistant(parts, place=parts_place)
            parts = None
        for note, note_place in notes:
            history.add({"role": "system", "content": note}, place=note_place)
        notes.clear()
        if text:
            role = "system" if history.is_in_loop or number in tool_notes else "user"
            history.add({"role": role, "content": text}, place=place)
        elif item is not _END:
            found = tool_notes.get(number, "[no other tools were found]")
            history.add(_build_message(item, place, local_calls, found_tools=found), place=place)
    history.reveal(thoughts)
    return history


def _add_part(
    parts: AssistantParts, item: Mapping[str, Any], place: str, family: ChatFamily | None
) -> None:
    match item.get("type", "message"):
        case "reasoning":
            parts.add_reasoning(_read_reasoning(item))
        case str() as kind if kind in CLIENT_CALLS:
            parts.add_call(item.get("call_id"), CLIENT_CALLS[kind], extract_arguments(item, place))
        case "function_call":
            parts.add_call(item.get("call_id"), _get_called_name(item), item.get("arguments"))
        case "custom_tool_call":
            parts.add_call(
                item.get("call_id"), _get_called_name(item), {CUSTOM_INPUT: item.get("input")}
            )
        case _:
            parts.add_text(_read_assistant_text(item, place, family, parts), is_apart=True)


def _get_called_name(item: Mapping[str, Any]) -> Any:
    return build_shown_name(item.get("namespace"), item.get("name"))


def _get_call_id(item: Mapping[str, Any], local_calls: Mapping[Any, Any]) -> Any:
    """Return the id of the call that a result belongs to.

    If a local shell result has only an item id, `local_calls` maps the item id to the call id.
    """
    call_id, item_id = item.get("call_id"), item.get("id")
    if call_id is not None or item.get("type") != "local_shell_call_output":
        return call_id
    return local_calls.get(item_id, item_id) if isinstance(item_id, str) else None


def _build_message(
    item: Mapping[str, Any], place: str, local_calls: Mapping[Any, Any], *, found_tools: str
) -> dict[str, Any]:
    """Build the message of a message item or of a tool result, without checking its content."""
    kind = item.get("type", "message")
    if kind in _RESULTS:
        output = item.get("output")
        if kind == FOUND_TOOLS:
            output = found_tools
        elif kind in CLIENT_RESULTS:
            output = render_result(item, place)
        if isinstance(output, dict):  # Some clients send an object instead of a list of parts.
            output = json.dumps(output, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": _get_call_id(item, local_calls), "content": output}
    role = check_choice(item.get("role"), _ROLES, f"{place}.role")
    return {"role": role, "content": item.get("content")}


def _read_unknown(item: Mapping[str, Any], place: str) -> str:
    """Return the text that the prompt shows for an item of unknown type."""
    kind = item["type"]
    if kind == "compaction_trigger":
        refuse(f"{place}.type", f"{kind!r} is not supported; ask for a summary in a message")
    return "" if is_passed_over(item) else find_text(item)


def is_passed_over(item: Mapping[str, Any]) -> bool:
    """Return whether the prompt omits `item`, such as a hosted tool's call or a new setting."""
    return item.get("type") in _PASSED_OVER or is_hosted_search(item)


def _read_assistant_text(
    item: Mapping[str, Any], place: str, family: ChatFamily | None, parts: AssistantParts
) -> str:
    """Return the text of an assistant message, and add its reasoning to `parts`."""
    content = item.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else [None]):
        kind = part.get("type") if isinstance(part, dict) else None
        note = unseen_note(kind, family, place=f"{place}.content[{index}]")
        if note is not None:
            texts.append(f"\n{note}\n")
            continue
        if not isinstance(part, dict):
            refuse(f"{place}.content[{index}]", "send a part with text, such as 'output_text'")
        if (thought := find_thought(part)) is not None:
            parts.add_reasoning(thought)
        else:
            texts.append(find_text(part, ("refusal",) if kind == "refusal" else ("text",)))
    return "".join(texts)


def _read_reasoning(item: Mapping[str, Any]) -> str | HiddenThought:
    shown_text = "".join(collect_texts(item.get("content")))
    summary = "".join(collect_texts(item.get("summary")))
    encrypted = item.get("encrypted_content")
    if shown_text or not isinstance(encrypted, str):
        return shown_text or summary
    return HiddenThought(encrypted, otherwise=summary)
