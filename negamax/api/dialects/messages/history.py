"""Convert Anthropic's conversations into messages of chat completions without losing content.

When a conversation grows, its earlier messages stay unchanged, so that the prefix cache applies.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from negamax.api.common.history import AssistantParts, HiddenThought, History, collect_texts
from negamax.api.common.thought_signature import HiddenThoughts
from negamax.api.dialects.messages.tool_changes import TOOL_CHANGES
from negamax.api.schemas.request_model import check_choice, check_type, describe, refuse
from negamax.text.chat_family import ChatFamily
from negamax.text.messages import find_image, find_text, find_thought, show_unknown, unseen_note

_ROLES = ("user", "assistant", "system")
_CLEAR_AT = ("never", "next_user_message")
# Skip assistant blocks of these types, which only the server that wrote the blocks can read.
_PASSED_OVER = (
    "redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback",
)  # fmt: skip
# `_BILLING_LINE` matches a changing line of Claude Code, which would prevent prefix caching.
_BILLING_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)")
_NO_NOTES: Mapping[str, str] = {}
_REMINDER = re.compile(r"\A\s*<system-reminder>\n?(.*?)\n?</system-reminder>\s*\Z", re.DOTALL)


def build_history(
    messages: Sequence[Mapping[str, Any]],
    *,
    system: str | list[dict[str, Any]] | None,
    thoughts: HiddenThoughts,
    family: ChatFamily | None = None,
    tool_notes: Mapping[str, str] = _NO_NOTES,
    reads_images: bool = False,
) -> History:
    """Build the conversation of a request to a model of `family`.

    The blocks of the system prompt become paragraphs, without the billing line of Claude Code.
    Adjacent messages of one role form one turn. In a user's turn the tool results come first. A
    `<system-reminder>` text after tool results becomes a system message, because a user message
    would hide the tool loop's thinking. The client's system messages are not moved. `tool_notes`
    maps the path of a block that adds or removes tools to the text that the prompt shows. Thinking
    becomes reasoning, and its signature is not checked. A hidden thought that the prompt shows is
    decoded from its signature. With `reads_images`, images in user messages and tool results stay
    images. Raises `InvalidRequestError` with the path of a part that the prompt cannot show.
    """
    history = History()
    _add_system(history, system)
    for role, blocks in _group_turns(messages):
        if role == "assistant":
            _add_assistant(history, blocks, family)
        elif role == "system":
            for place, block in blocks:
                is_change = block.get("type") in TOOL_CHANGES
                text = tool_notes.get(place) if is_change else _read_user_text(block, place, family)
                if text or not is_change:
                    message = {"role": "system", "content": text}
                    history.add(message, place=_get_message_place(place))
        else:
            _add_user(history, blocks, family, tool_notes, reads_images)
    history.reveal(thoughts)
    return history


Blocks = list[tuple[str, Mapping[str, Any]]]  # Each entry is the path of a block, and the block.


def _add_system(history: History, system: str | list[dict[str, Any]] | None) -> None:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    for index, block in enumerate(blocks):
        place = "system" if isinstance(system, str) else f"system[{index}]"
        is_text = block.get("type", "text") == "text"
        text = _read_text(block, place) if is_text else show_unknown(block)
        text = _BILLING_LINE.sub("", text)
        if text.strip():
            history.add({"role": "system", "content": text}, place=place)


def _group_turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Blocks]]:
    run: Blocks = []
    last: str | None = None
    last_user = max((i for i, one in enumerate(messages) if one.get("role") == "user"), default=-1)
    for index, message in enumerate(messages):
        place, role = f"messages[{index}]", message.get("role")
        check_choice(role, _ROLES, f"{place}.role")
        blocks = _read_message_blocks(message, place)
        if not blocks or (_applies_until_user(message, place) and index < last_user):
            continue
        if last is not None and role != last:
            yield last, run
            run = []
        last = role
        run += blocks
    if last is not None:
        yield last, run


def _read_message_blocks(message: Mapping[str, Any], place: str) -> Blocks:
    """Return the blocks of a message. A system message that only sets the effort has no blocks."""
    content = message.get("content")
    if content is None and message.get("role") == "system" and message.get("output_config"):
        return []
    return _read_blocks(content, place)


def _applies_until_user(message: Mapping[str, Any], place: str) -> bool:
    """Return whether the prompt omits `message` if a user message follows it."""
    clear_at = message.get("clear_at")
    if clear_at is not None:
        check_choice(clear_at, _CLEAR_AT, f"{place}.clear_at")
    return clear_at == "next_user_message" and message.get("role") == "system"


def _read_blocks(content: object, place: str) -> Blocks:
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    given = check_type(content, list, f"{place}.content", "text or a list of blocks")
    blocks: Blocks = []
    for index, block in enumerate(given):
        where = f"{place}.content[{index}]"
        blocks.append((where, check_type(block, dict, where, "an object with a type")))
    return blocks or [(place, {"type": "text", "text": ""})]


def _add_user(
    history: History,
    blocks: Blocks,
    family: ChatFamily | None,
    tool_notes: Mapping[str, str],
    reads_images: bool,
) -> None:
    results = [(place, block) for place, block in blocks if block.get("type") == "tool_result"]
    for place, block in results:
        result = {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _read_result(block, place, family, tool_notes, reads_images),
        }
        history.add(result, place=_get_message_place(place))
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            continue
        if reads_images and (image := _find_image(block, place)):
            parts.append(image)
            continue
        text = _read_user_text(block, place, family)
        reminder = _REMINDER.match(text or "") if results and not parts else None
        if reminder is not None and "<system-reminder>" not in reminder[1]:
            history.add({"role": "system", "content": reminder[1]}, place=_get_message_place(place))
        else:
            shown = {"type": block["type"]} if text is None else {"type": "text", "text": text}
            parts.append(shown)
    if parts:
        content = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
        history.add({"role": "user", "content": content}, place=_get_message_place(blocks[-1][0]))


def _add_assistant(history: History, blocks: Blocks, family: ChatFamily | None) -> None:
    parts = AssistantParts()
    for place, block in blocks:
        kind = block.get("type")
        match kind:
            case "text":
                parts.add_text(_read_text(block, place))
            case "thinking":
                thought = _read_string(block, "thinking", place)
                parts.add_reasoning(
                    thought or HiddenThought(_read_string(block, "signature", place))
                )
            case "compaction":  # `content` is another server's summary of messages, or null.
                summary = _read_string(block, "content", place)
                parts.add_text(summary and f"{summary}\n\n", is_apart=True)
            case str() if kind in _PASSED_OVER:
                pass
            case "tool_use":
                parts.add_call(block.get("id"), block.get("name"), block.get("input"))
            case str() if kind.endswith("_tool_result"):
                pass  # Skip the result of a tool that ran on another server.
            case "document" | "search_result" if shown_text := _read_document(block):
                parts.add_text(shown_text, is_apart=True)
            case _ if (other := find_thought(block)) is not None:
                parts.add_reasoning(other)
            case _:
                shown_text = unseen_note(kind, family, place=place) or find_text(block)
                parts.add_text(shown_text, is_apart=True)
    history.add_assistant(parts, place=_get_message_place(blocks[0][0]))


def _read_user_text(block: Mapping[str, Any], place: str, family: ChatFamily | None) -> str | None:
    kind = block.get("type")
    if kind == "text":
        return _read_text(block, place)
    shown_text = _read_document(block)
    if shown_text is None and unseen_note(kind, family, place=place) is None:
        return show_unknown(block)
    return shown_text


def _find_image(block: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """Return the image and its path if the block is an image, else None."""
    part = find_image(block, place)
    if part is not None:
        _, _, inner = place.partition(".")
        part["image"] = replace(part["image"], place=inner)
    return part


def _read_document(block: Mapping[str, Any]) -> str | None:
    source, content = block.get("source"), block.get("content")
    match block.get("type"):
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            text = source.get("data")
        case "document" if isinstance(source, dict) and source.get("type") == "content":
            content = source.get("content")
            text = content if isinstance(content, str) else "\n".join(collect_texts(content))
        case "search_result":
            text = "\n".join(collect_texts(content))
        case _:
            return None
    if not isinstance(text, str):
        return None
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _read_result(
    block: Mapping[str, Any],
    place: str,
    family: ChatFamily | None,
    tool_notes: Mapping[str, str],
    reads_images: bool,
) -> str | list[dict[str, Any]]:
    """Return the text of a tool result, with a note for each part that the model cannot see.

    An error would end the client's session. If the model reads an image, return a list of parts.
    """
    parts: list[dict[str, Any]] = []
    content = block.get("content")
    texts: list[str] = []
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for where, part in _read_blocks(content, place):
            if reads_images and (image := _find_image(part, where)):
                parts += [{"type": "text", "text": "\n".join([*texts, ""])}] if texts else []
                parts.append(image)
                texts.clear()
                continue
            match part.get("type"):
                case "text":
                    texts.append(_read_text(part, where))
                case "browser_state":
                    texts.append(_describe_tabs(part, where))
                case "tool_reference":
                    texts.append(tool_notes.get(where) or f"[the tool {part.get('tool_name')}]")
                case kind:
                    text = _read_document(part) or unseen_note(
                        "document" if kind == "search_result" else kind, family, place=where
                    )
                    texts.append(show_unknown(part) if text is None else text)
    text = "\n".join(texts)
    if parts:
        before = [{"type": "text", "text": "Error: "}] if block.get("is_error") is True else []
        return [*before, *parts, *([{"type": "text", "text": text}] if text else [])]
    is_marked = text.lstrip().lower().startswith(("error", "<tool_use_error>"))
    if block.get("is_error") is True and not is_marked:
        return f"Error: {text}" if text else "Error"
    return text


def _describe_tabs(block: Mapping[str, Any], place: str) -> str:
    tabs = block.get("tabs")
    if not isinstance(tabs, list) or not all(isinstance(tab, dict) for tab in tabs):
        refuse(f"{place}.tabs", f"the value must be a list of objects; got {describe(tabs)}")
    lines = []
    for tab in tabs:
        names = (tab.get(name) for name in ("tab_id", "title", "url"))
        line = " ".join(str(name) for name in names if name)
        lines.append(f"[the tab {line}{', which is active' if tab.get('active') else ''}]")
    return "\n".join(lines)


def _read_text(block: Mapping[str, Any], place: str) -> str:
    return _read_string(block, "text", place, is_required=True)


def _read_string(
    block: Mapping[str, Any], name: str, place: str, *, is_required: bool = False
) -> str:
    value = block.get(name)
    if value is None and not is_required:
        return ""
    return check_type(value, str, f"{place}.{name}")


def _get_message_place(place: str) -> str:
    return place.partition(".")[0]
