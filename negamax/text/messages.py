"""Normalize conversations of clients for MiniMax's chat templates."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NoReturn

from negamax.base.errors import InvalidRequestError
from negamax.images.sizes import LONGEST_SIDES, SIDE
from negamax.text.chat_family import ChatFamily
from negamax.text.parser.schema_values import parse_json

INSTRUCTION_ROLES = ("root", "system", "developer")
ROLES = (*INSTRUCTION_ROLES, "user", "assistant", "tool")
# Reasoning tags of all model families in the registry.
THINK_TAGS = (("<think>", "</think>"), ("<mm:think>", "</mm:think>"))

# fields of a message that may contain its reasoning
_REASONING = ("reasoning", "reasoning_text", "reasoning_details", "thinking", "thinking_blocks")
_KIND_CHARS = 60  # maximum characters of a content part's type that a note quotes
_QUOTES = tuple("`'\"“‘«")

# type of a content part -> field with the text of the part
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
RAW_ARGUMENTS = "arguments"  # parameter for the text of arguments that are not a JSON object

# Other servers and client libraries use these types of reasoning, call and result parts.
_THOUGHTS = ("thinking", "reasoning", "reasoning_content", "reasoning_text")
_CALLS = ("tool_use", "tool_call", "tool-call", "function_call")
# fields of a call part that contain the call's id, the tool's name, and the arguments
_ID_FIELDS, _NAME_FIELDS = ("call_id", "toolCallId", "id"), ("name", "toolName")
_ARGUMENT_FIELDS = ("input", "args", "arguments")
_RESULTS = ("tool_result", "tool-result", "function_call_output")
_HIDDEN = ("redacted_thinking", "redacted_reasoning")  # reasoning that another server encrypted
_THOUGHT_FIELDS = (*_THOUGHTS, "text", "content", "summary")
_CONTENT_FIELDS = ("text", "content", "output", "result", "value")

_NOTES = {
    "image": "[an image, which this model cannot see]",
    "document": "[a document, which this model cannot read]",
    "recording": "[a recording, which this model cannot hear]",
    "video": "[a video, which this model cannot see]",
}
_LONGEST = "max_long_side_pixel"
_IMAGE_FIELDS = ("image_url", "source", "data", "url")
_UNSEEN = {  # type of a content part in any API -> key of `_NOTES`
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "recording"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}


@dataclass(frozen=True, slots=True)
class ImagePart:
    source: str  # data URL or other URL, which is not checked yet
    place: str  # JSON path of the part in the request
    longest: int | None = None  # limit of the longer side after resizing, in pixels


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    has_root: bool = False,
    family: ChatFamily | None = None,
    images: list[ImagePart] | None = None,
) -> list[dict[str, Any]]:
    """Convert messages to the form that MiniMax's templates render without loss.

    - Root, system and developer messages at the start become one system message. Root texts come
      first, and empty lines separate the texts. If the template has the role root (`has_root`),
      root texts become a root message before the system message.
    - A later instruction becomes a note (`system_note`), because templates would drop the message.
      The note is appended to the tool result before the instruction, because a user message within
      a tool loop would hide the reasoning of that loop. If no tool result precedes the instruction,
      the note becomes a user message. An instruction without text is dropped.
    - Null or missing content becomes "". Parts with text become parts of type text. Images become
      parts of type image and are appended to `images` in the order of the prompt. If `images` is
      None, the server does not read images.
    - Images that are not read, documents, recordings and videos become notes (`unseen_note`), or
      are refused if models of `family` can read such parts. All remaining parts without text become
      notes in user and tool messages, and are dropped from answers.
    - Reasoning in `reasoning_content`, in a similar field, in reasoning parts or in a think block
      at the start of the content becomes `reasoning_content`.
    - Parts that are tool calls become `tool_calls` if the message has no `tool_calls`. Parts that
      are tool results become tool messages.
    - Arguments of tool calls become mappings. Empty text and null become empty mappings. Arguments
      that are not a JSON object become one parameter `RAW_ARGUMENTS` with the text.
    - Tool results follow their calls in the order of the calls. Instructions between tool results
      are moved after the last result.

    Raises `InvalidRequestError` with the path of a message that templates cannot render.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a {type(messages).__name__}; send a list of messages", param="messages"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message", param="messages")
    ordered = _order_tool_results(
        [
            _check_message(part, i, family, images is not None)
            for i, message in enumerate(messages)
            for part in _split_results(message)
        ]
    )
    placed = _place_instructions(ordered, has_root=has_root)
    if images is not None:
        lists = [message["content"] for message in placed if _has_images(message["content"])]
        parts = [part for content in lists for part in content if isinstance(part, dict)]
        images += [part.pop("image") for part in parts if part["type"] == "image"]
    return placed


def find_image(part: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """Convert an image part of any API to the normal format, or return None for other parts.

    `place` is the path of the part in the request. Raises `InvalidRequestError` for a bad image.
    """
    if _UNSEEN.get(str(part.get("type"))) != "image":
        return None
    message, _, _ = place.partition(".")
    if isinstance(known := part.get("image"), ImagePart):
        return {"type": "image", "image": replace(known, place=f"{message}.{known.place}")}
    found: Any = next((part[name] for name in _IMAGE_FIELDS if part.get(name) is not None), None)
    settings = [one for one in (found, part) if isinstance(one, Mapping)]
    if isinstance(found, Mapping):
        data, found = found.get("data"), found.get("url")
        found = f"data:;base64,{data}" if isinstance(data, str) else found
    elif part.get("data") == found and found is not None:
        found = f"data:;base64,{found}"
    if not isinstance(found, str):
        raise InvalidRequestError(
            f"{place} is an image without data; send a data URL in base64 instead of a file id",
            param=place,
            code="invalid_image",
        )
    longest = next((one["max_long_side_pixel"] for one in settings if _LONGEST in one), None)
    low, high = LONGEST_SIDES
    is_known = isinstance(longest, int) and low <= longest <= high and longest % SIDE == 0
    if longest is not None and not is_known:
        raise InvalidRequestError(
            f"{place}.{_LONGEST} is {longest!r}; allowed: multiples of {SIDE} from {low} to {high}",
            param=place,
            code="invalid_value",
        )
    return {"type": "image", "image": ImagePart(found, place, longest)}


def _has_images(content: str | list[Any]) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part["type"] == "image" for part in content
    )


def system_note(text: str) -> str:
    """Return the text of a user message that replaces an instruction within a conversation."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def unseen_note(kind: object, family: ChatFamily | None = None, *, place: str = "") -> str | None:
    """Return the note that replaces a part of type `kind`, or None if `kind` is not in `_UNSEEN`.

    A note lets the client's session continue, whereas an error would end the session. If models of
    `family` can read such a part, raises `InvalidRequestError` with `place`, because the client
    expects an answer about the part.
    """
    media = _UNSEEN.get(kind) if isinstance(kind, str) else None
    if media is not None and family is not None and media in family.sees:
        reads = "this engine reads text only"
        hint = "serve a checkpoint with a vision tower, without --encoder-cache-tokens 0"
        if media == "video":
            reads, hint = "Negamax does not read videos", "send text or images"
        raise InvalidRequestError(
            f"{place} has type {kind!r}; {family.title} supports this type, but {reads}",
            hint=hint,
            param=place,
            code="unsupported_content",
        )
    return None if media is None else _NOTES[media]


def is_unseen(value: Mapping[str, Any]) -> bool:
    """Return whether `value` is a part with encrypted reasoning or media."""
    return value.get("type") in _HIDDEN or unseen_note(value.get("type")) is not None


def find_text(part: Mapping[str, Any], fields: Sequence[str] = _CONTENT_FIELDS) -> str:
    """Return the text of a part or item: the first of `fields` that has text, or "".

    The value of a field may be text, an object with the field "text", or a list of both.
    """
    for field in fields:
        value = part.get(field)
        inner = value if isinstance(value, list) else [value]
        texts = [one.get("text") if isinstance(one, Mapping) else one for one in inner]
        if text := "".join(text for text in texts if isinstance(text, str)):
            return text
    return ""


def find_thought(part: Mapping[str, Any]) -> str | None:
    """Return the text of a reasoning part of an answer, or None for other parts."""
    return find_text(part, _THOUGHT_FIELDS) if part.get("type") in _THOUGHTS else None


def show_unknown(part: Mapping[str, Any]) -> str:
    """Return the text of a part of unknown type, or a note if the part has no text."""
    kind = str(part.get("type"))[:_KIND_CHARS]
    return find_text(part) or f"[a part of type {kind!r}, which this model cannot read]"


def split_inline_reasoning(content: str) -> tuple[str | None, str]:
    """Split an answer with reasoning tags in its content into reasoning and content.

    A think block at the start of the content is the reasoning. A later think block is a quotation.
    A closing tag without an opening tag is a quotation if it follows a quotation mark. For a
    quotation, the returned reasoning is "", so that templates do not split the content at the
    quoted tags. If the reasoning is None, templates may split the content.
    """
    is_quoted = False
    for opener, closer in THINK_TAGS:
        end = content.find(closer)
        start = content.find(opener, 0, end) if end >= 0 else -1
        if start < 0:
            is_quoted = is_quoted or (end > 0 and content[:end].endswith(_QUOTES))
            continue
        if content[:start].strip():
            return "", content
        reasoning, rest = content[start + len(opener) : end], content[end + len(closer) :]
        return reasoning.strip("\n"), rest.strip("\n")
    return "" if is_quoted else None, content


def _check_message(
    message: Any, i: int, family: ChatFamily | None, takes_images: bool
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(i, f"is a {type(message).__name__}; send an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        _refuse(i, f"has role {role!r}; use one of {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if key not in _REASONING}
    given = message.get("content")
    if role != "assistant":
        # Templates separate the parts of tool results, so notes in tool results need no line break.
        joins = role != "tool"
        checked["content"] = _read_content(
            given, i, family, joins_notes=joins, takes_images=takes_images
        )
        if checked.pop("tool_calls", None) not in (None, []):
            problem = f"is in a {role} message; only assistant messages may have it"
            _refuse(i, problem, field="tool_calls")
        return checked
    thoughts: list[str] = []
    content = _read_content(given, i, family, thoughts=thoughts)
    reasoning = _read_reasoning(message, i, thoughts="".join(thoughts))
    inline, rest = split_inline_reasoning(plain_text(content))
    if not reasoning and inline is not None:
        reasoning = inline or reasoning or ""
        content = rest
    elif inline and inline == (reasoning or "").strip("\n"):  # the content repeats the reasoning
        content = rest
    checked["content"] = content
    checked.pop("reasoning_content", None)
    checked.pop("tool_calls", None)
    if reasoning is not None:
        checked["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or _find_calls(given)
    if calls:
        checked["tool_calls"] = _read_tool_calls(calls, i)
    return checked


def _split_results(message: Any) -> list[Any]:
    """Move tool results in a user message to tool messages before the user message."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or message.get("role") != "user":
        return [message]
    results, others = [], []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _RESULTS:
            others.append(part)
            continue
        ids = (part.get(name) for name in ("tool_use_id", "tool_call_id", "toolCallId", "call_id"))
        call_id = next((one for one in ids if one is not None), None)
        content = part.get("content")
        kinds = [
            one.get("type")
            for one in (content if isinstance(content, list) else ())
            if isinstance(one, Mapping)
        ]
        has_images = any(_UNSEEN.get(str(kind)) == "image" for kind in kinds)
        shown = content if has_images else find_text(part)
        results.append({"role": "tool", "tool_call_id": call_id, "content": shown})
    return [*results, {**message, "content": others}] if others or not results else results


def _find_calls(content: Any) -> list[dict[str, Any]]:
    """Return the tool calls among the parts of an answer, in the format of `tool_calls`."""
    calls = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") in _CALLS:
            call_id, name, arguments = (
                next((part[field] for field in fields if field in part), None)
                for fields in (_ID_FIELDS, _NAME_FIELDS, _ARGUMENT_FIELDS)
            )
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _read_content(
    content: Any,
    i: int,
    family: ChatFamily | None,
    *,
    thoughts: list[str] | None = None,
    joins_notes: bool = True,
    takes_images: bool = False,
) -> str | list[Any]:
    """Return content as text or as text parts. With `joins_notes`, each note is a separate line.

    The reasoning parts of an answer are appended to `thoughts`, which is None for other messages.
    """
    if content is None or content == []:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problem = f"is a {type(content).__name__}; send text, a list of text parts, or null"
        _refuse(i, problem, field="content")
    parts: list[Any] = []
    was_note = False
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        thought = find_thought(part) if isinstance(part, Mapping) else None
        if thoughts is not None and thought is not None:
            thoughts.append(thought)
            continue
        place = f"messages[{i}].content[{j}]"
        if takes_images and isinstance(part, Mapping) and (image := find_image(part, place)):
            parts.append(image)
            continue
        note = unseen_note(kind, family, place=place)
        if note is not None:
            text = note
        elif isinstance(kind, str) and kind in _TEXT_FIELDS:
            field = _TEXT_FIELDS[kind]
            text = part.get(field)
            if not isinstance(text, str):
                problem = f"is a {kind} part without text; set its field {field} to a string"
                _refuse(i, problem, field=f"content[{j}]")
        elif isinstance(part, str):
            text = part
        elif not isinstance(part, Mapping):
            problem = f"is a {type(part).__name__}; send text or an object with a type"
            _refuse(i, problem, field=f"content[{j}]")
        elif thoughts is None:
            text = show_unknown(part)
        elif kind in _CALLS or not (text := find_text(part)):
            continue
        if joins_notes and parts and (was_note or note is not None):
            text = f"\n{text}"
        parts.append(text if isinstance(part, str) else {"type": "text", "text": text})
        was_note = note is not None
    return parts or ""


def _read_reasoning(message: Mapping[str, Any], i: int, *, thoughts: str) -> str | None:
    """Return the first nonempty reasoning text, "" if all texts are empty, or None if absent."""
    named: list[str] = []
    for field in ("reasoning_content", "reasoning"):
        value = message.get(field)
        if isinstance(value, str):
            named.append(value)
        elif value is not None:
            _refuse(i, f"is a {type(value).__name__}; send text or null", field=field)
    details = message.get("reasoning_details")
    if details is not None and not isinstance(details, list):
        _refuse(i, f"is a {type(details).__name__}; send a list or null", field="reasoning_details")
    texts = [detail.get("text") for detail in details or () if isinstance(detail, Mapping)]
    detailed = "".join(text for text in texts if isinstance(text, str))
    blocks = message.get("thinking_blocks")
    blocks = [one for one in blocks if isinstance(one, Mapping)] if isinstance(blocks, list) else []
    others = "".join(find_text(block, _THOUGHT_FIELDS) for block in blocks)
    others = others or find_text(message, ("thinking", "reasoning_text"))
    found = (*named, detailed, others, thoughts)
    return next((text for text in found if text), "" if named else None)


def _read_tool_calls(calls: Any, i: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        _refuse(i, f"is a {type(calls).__name__}; send a list of calls", field="tool_calls")
    checked = []
    for j, call in enumerate(calls):
        where = f"tool_calls[{j}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(call, Mapping) and isinstance(custom := call.get("custom"), Mapping):
            # the format of a custom tool call in the Responses API
            arguments = {"input": custom.get("input")}
            function = {"name": custom.get("name"), "arguments": arguments}
        if not isinstance(function, Mapping):
            _refuse(i, "has no function; send {id, type, function: {name, arguments}}", field=where)
        if not isinstance(function.get("name"), str) or not function["name"]:
            problem = f"is {function.get('name')!r}; send the name of the called tool"
            _refuse(i, problem, field=f"{where}.function.name")
        arguments = _read_arguments(function.get("arguments"))
        checked.append({**call, "function": {**function, "arguments": arguments}})
    ids = [call.get("id") for call in checked]
    if not all(isinstance(call_id, str) for call_id in ids) or len(set(ids)) < len(ids):
        _refuse(i, f"has the ids {ids}; give each call a unique id", field="tool_calls")
    return checked


def _read_arguments(arguments: Any) -> dict[str, Any]:
    raw = arguments
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else None
        except ValueError:
            return {RAW_ARGUMENTS: raw}
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    return {RAW_ARGUMENTS: raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)}


def _order_tool_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put one tool result after each call, in call order. Drop truncated calls without a result."""
    ordered: list[dict[str, Any]] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        if message["role"] == "tool":
            problem = "a tool message must follow an assistant message with tool_calls"
            _refuse(i, f"answers no call; {problem}")
        ordered.append(message)
        i += 1
        if "tool_calls" in message and i < len(messages):  # the last calls may lack results
            end = i
            while end < len(messages) and messages[end]["role"] in ("tool", *INSTRUCTION_ROLES):
                end += 1
            answered = [messages[j].get("tool_call_id") for j in range(i, end)]
            made = message["tool_calls"]
            # If the arguments of a call were not a JSON object, the call was truncated.
            calls = [
                call
                for call in made
                if set(call["function"]["arguments"]) != {RAW_ARGUMENTS} or call["id"] in answered
            ]
            if len(calls) < len(made):
                others = {key: value for key, value in message.items() if key != "tool_calls"}
                ordered[-1] = {**others, "tool_calls": calls} if calls else others
            ordered.extend(_order_results(calls, messages, start=i, end=end))
            ordered.extend(message for message in messages[i:end] if message["role"] != "tool")
            i = end
    return ordered


def _order_results(
    calls: list[dict[str, Any]], messages: list[dict[str, Any]], *, start: int, end: int
) -> Iterator[dict[str, Any]]:
    results: dict[Any, dict[str, Any] | None] = {call.get("id"): None for call in calls}
    for i in range(start, end):
        if messages[i]["role"] != "tool":
            continue
        call_id = messages[i].get("tool_call_id")
        if not isinstance(call_id, str) or call_id not in results:
            problem = f"is {call_id!r}; the preceding calls have the ids {list(results)}"
            _refuse(i, problem, field="tool_call_id")
        if results[call_id] is not None:
            problem = f"is {call_id!r}, which already has a result; send one result per call"
            _refuse(i, problem, field="tool_call_id")
        results[call_id] = messages[i]
    missing = [call_id for call_id, result in results.items() if result is None]
    if missing:
        remedy = "send one tool message per call, directly after the assistant message"
        _refuse(start - 1, f"has calls without a result: {missing}; {remedy}", field="tool_calls")
    return (result for result in results.values() if result is not None)


def _place_instructions(messages: list[dict[str, Any]], *, has_root: bool) -> list[dict[str, Any]]:
    """Join the instructions at the start, and replace later instructions by notes."""
    leading = list(takewhile(lambda message: message["role"] in INSTRUCTION_ROLES, messages))
    roots = [message for message in leading if message["role"] == "root"]
    others = [message for message in leading if message["role"] != "root"]
    groups = [("root", roots), ("system", others)] if has_root else [("system", roots + others)]
    placed = [_join(group, role=role) for role, group in groups if group]
    notes: list[str] = []  # notes for the last message of `placed`, which is a tool result
    for message in messages[len(leading) :]:
        if message["role"] not in INSTRUCTION_ROLES:
            _attach(notes, placed)
            placed.append(message)
            continue
        text = plain_text(message["content"])
        if _has_images(message["content"]):
            before, after = system_note("\n").split("\n\n")
            around = [{"type": "text", "text": one} for one in (f"{before}\n", f"\n{after}")]
            content = [around[0], *message["content"], around[1]]
            placed.append({"role": "user", "content": content})
            continue
        if not text.strip():
            continue
        if placed[-1]["role"] == "tool":
            notes.append(system_note(text))
        else:
            placed.append({"role": "user", "content": system_note(text)})
    _attach(notes, placed)
    return placed


def _attach(notes: list[str], placed: list[dict[str, Any]]) -> None:
    """Append `notes` to the last message of `placed`, a tool result, and clear `notes`."""
    if not notes:
        return
    content = placed[-1]["content"]
    if isinstance(content, list):
        content = [*content, *({"type": "text", "text": note} for note in notes)]
    else:
        content = "\n\n".join([content, *notes] if content else notes)
    placed[-1] = {**placed[-1], "content": content}
    notes.clear()


def _join(messages: list[dict[str, Any]], *, role: str) -> dict[str, Any]:
    """Merge messages: join their texts, and keep the last value of every other field."""
    joined: dict[str, Any] = {}
    for message in messages:
        joined |= message
    if any(_has_images(message["content"]) for message in messages):
        parts: list[Any] = []
        for message in messages:
            content = message["content"]
            parts += [{"type": "text", "text": "\n\n"}] if parts else []
            parts += [content] if isinstance(content, str) else content
        return joined | {"role": role, "content": parts}
    texts = [plain_text(message["content"]) for message in messages]
    return joined | {"role": role, "content": "\n\n".join(text for text in texts if text)}


def plain_text(content: str | list[Any]) -> str:
    """Return the text of a normalized message's content."""
    parts = [content] if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def _refuse(i: int, problem: str, *, field: str = "") -> NoReturn:
    where = f"messages[{i}].{field}" if field else f"messages[{i}]"
    raise InvalidRequestError(f"{where} {problem}", param=where)
