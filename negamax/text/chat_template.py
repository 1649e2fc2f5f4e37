"""Conversations to prompt text: the checkpoint's own Jinja template in a sandbox, and the checks that come before it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from negamax.base.errors import CheckpointError, ConfigError, InvalidRequestError
from negamax.text.schema_values import parse_json

RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt"})
ROLES = ("system", "developer", "user", "assistant", "tool")

_INSTRUCTION_ROLES = ("system", "developer")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A chat template, compiled once. Rendering changes nothing, so threads may share it."""

    def __init__(self, source: str, *, variables: Mapping[str, Any] | None = None, origin: str = "chat template") -> None:
        """`source` is the Jinja text, `variables` are always defined in it, `origin` names it in errors.

        Errors: `CheckpointError` for a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin} has a syntax error in line {error.lineno}: {error.message}",
                hint="correct the template, or give another one with --chat-template",
            ) from error

    @classmethod
    def from_folder(cls, path: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template in the file `override`, else `chat_template.jinja` of the checkpoint folder `path`, else the
        `chat_template` entry of its tokenizer_config.json (of several, the one named "default"); None if there is none.

        Errors: `ConfigError` for an override that cannot be read, `CheckpointError` for a broken file of the checkpoint.
        """
        config = _read_config(path / "tokenizer_config.json")
        variables = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
        file = override if override is not None else path / "chat_template.jinja"
        if override is not None or file.exists():
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the chat template {file} cannot be read: {error}", hint="give a UTF-8 text file") from error
            return cls(source, variables=variables, origin=str(file))
        entry = config.get("chat_template")
        if isinstance(entry, list):
            named = {item.get("name"): item.get("template") for item in entry if isinstance(item, Mapping)}
            entry = named.get("default")
        if entry is None:
            return None
        origin = f"chat_template in {path / 'tokenizer_config.json'}"
        if not isinstance(entry, str):
            raise CheckpointError(f"{origin} is a {type(entry).__name__}, text is needed", hint="use --chat-template")
        return cls(entry, variables=variables, origin=origin)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a conversation (pass it through `normalize_messages` first). `kwargs` are template variables.

        Errors: `InvalidRequestError` when the template refuses the conversation or fails on it.
        """
        check_template_kwargs(kwargs)
        variables = {**self._variables, **kwargs}
        try:
            return self._template.render(variables, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except InvalidRequestError:
            raise
        except Exception as error:  # the checkpoint's code on the client's values: any failure is an answer to this request
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {error}",
                hint="check roles, contents and chat_template_kwargs",
                param="messages",
            ) from error


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse client-given template variables that would replace the conversation itself."""
    taken = sorted(RESERVED_KWARGS & kwargs.keys())
    if taken:
        raise InvalidRequestError(
            f"chat_template_kwargs must not contain {', '.join(taken)}; use the request field of that name",
            param="chat_template_kwargs",
        )


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one form that MiniMax templates render without losing anything; the input stays as it is.

    - System and developer messages at the start become one system message, texts joined by an empty line. A later one
      stays in its place as a user message whose text is wrapped by `system_note`: the templates would drop it silently, and
      moving it to the start would change the whole prompt and lose its cached prefix.
    - Content null or missing is "". `reasoning` and `reasoning_content` are both read and become `reasoning_content`.
    - Arguments of tool calls become mappings (an empty text is no arguments).
    - Tool results directly follow their calls and are put in the order of the calls.
    Errors: `InvalidRequestError` naming the message, for everything a template would drop, misplace or print as something else.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages is a {type(messages).__name__}; send a list of messages", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message", param="messages")
    return _place_instructions(_order_tool_results([_checked(message, i) for i, message in enumerate(messages)]))


def system_note(text: str) -> str:
    """How an instruction from the middle of a conversation reads as user text."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _checked(message: Any, i: int) -> dict[str, Any]:
    """One message with its own fields in normal form."""
    if not isinstance(message, Mapping):
        _refuse(i, f"is a {type(message).__name__}; send an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        _refuse(i, f"has role {role!r}; use one of {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if key != "reasoning"}
    checked["content"] = _content(message.get("content"), i)
    if role == "assistant":
        reasoning = _reasoning(message, i)
        checked.pop("reasoning_content", None)
        checked.pop("tool_calls", None)
        if reasoning is not None:
            checked["reasoning_content"] = reasoning
        calls = message.get("tool_calls")
        if calls:
            checked["tool_calls"] = _tool_calls(calls, i)
    return checked


def _content(content: Any, i: int) -> str | list[Any]:
    if content is None or content == []:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(i, f"is a {type(content).__name__}; send text, a list of text parts, or null", field="content")
    for j, part in enumerate(content):
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            _refuse(i, f"has type {kind!r}; this model reads text parts only", field=f"content[{j}]")
        if not isinstance(part.get("text"), str):
            _refuse(i, "is a text part without text; set its field text to a string", field=f"content[{j}]")
    return content


def _reasoning(message: Mapping[str, Any], i: int) -> str | None:
    texts = []
    for field in ("reasoning_content", "reasoning"):
        value = message.get(field)
        if value is not None and not isinstance(value, str):
            _refuse(i, f"is a {type(value).__name__}; send text or null", field=field)
        texts.append(value)
    return texts[0] or texts[1] or (texts[0] if texts[0] is not None else texts[1])


def _tool_calls(calls: Any, i: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        _refuse(i, f"is a {type(calls).__name__}; send a list of calls", field="tool_calls")
    checked = []
    for j, call in enumerate(calls):
        where = f"tool_calls[{j}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            _refuse(i, "has no function; send {id, type, function: {name, arguments}}", field=where)
        if not isinstance(function.get("name"), str) or not function["name"]:
            _refuse(i, f"is {function.get('name')!r}; send the name of the called tool", field=f"{where}.function.name")
        arguments = _arguments(function.get("arguments"), i, field=f"{where}.function.arguments")
        checked.append({**call, "function": {**function, "arguments": arguments}})
    ids = [call.get("id") for call in checked]
    if not all(isinstance(call_id, str) for call_id in ids) or len(set(ids)) < len(ids):
        _refuse(i, f"has the ids {ids}; give each call its own id", field="tool_calls")
    return checked


def _arguments(arguments: Any, i: int, *, field: str) -> dict[str, Any]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            _refuse(i, f"is no valid JSON: {error}; send the text of a JSON object", field=field)
    if not isinstance(arguments, Mapping):
        _refuse(i, f"is a JSON {type(arguments).__name__}; send the text of a JSON object", field=field)
    return dict(arguments)


def _order_tool_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that calls are answered exactly once, right after they were made, and put the answers in call order."""
    ordered: list[dict[str, Any]] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        if message["role"] == "tool":
            _refuse(i, "answers no call; a tool message must follow an assistant message with tool_calls")
        ordered.append(message)
        i += 1
        if "tool_calls" in message:
            end = i
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            ordered.extend(_results_in_call_order(message["tool_calls"], messages, start=i, end=end))
            i = end
    return ordered


def _results_in_call_order(
    calls: list[dict[str, Any]], messages: list[dict[str, Any]], *, start: int, end: int
) -> list[dict[str, Any]]:
    if start == len(messages):  # the conversation ends with the calls
        return []
    call_ids = [call.get("id") for call in calls]
    results: dict[Any, dict[str, Any]] = {}
    for i in range(start, end):
        call_id = messages[i].get("tool_call_id")
        if call_id not in call_ids:
            _refuse(i, f"is {call_id!r}; the calls before it are {call_ids}", field="tool_call_id")
        if call_id in results:
            _refuse(i, f"is {call_id!r}, which was answered already; answer each call once", field="tool_call_id")
        results[call_id] = messages[i]
    missing = [call_id for call_id in call_ids if call_id not in results]
    if missing:
        problem = f"has calls without a result: {missing}; send a tool message for each, right after it"
        _refuse(start - 1, problem, field="tool_calls")
    return [results[call_id] for call_id in call_ids]


def _place_instructions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system and developer messages at the start; turn later ones into notes."""
    num_leading = next((i for i, m in enumerate(messages) if m["role"] not in _INSTRUCTION_ROLES), len(messages))
    placed: list[dict[str, Any]] = []
    if num_leading:
        joined: dict[str, Any] = {}
        for message in messages[:num_leading]:
            joined |= message
        texts = [_plain_text(message["content"]) for message in messages[:num_leading]]
        placed.append(joined | {"role": "system", "content": "\n\n".join(text for text in texts if text)})
    for message in messages[num_leading:]:
        if message["role"] in _INSTRUCTION_ROLES:
            message = {"role": "user", "content": system_note(_plain_text(message["content"]))}
        placed.append(message)
    return placed


def _plain_text(content: str | list[Any]) -> str:
    parts = [content] if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


def _refuse(i: int, problem: str, *, field: str = "") -> NoReturn:
    where = f"messages[{i}].{field}" if field else f"messages[{i}]"
    raise InvalidRequestError(f"{where} {problem}", param=where)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise InvalidRequestError(f"the chat template refuses these messages: {message}", param="messages")


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    """Content of tokenizer_config.json; empty where there is none (the tokenizer refuses that on its own)."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}", hint="download the checkpoint again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a JSON {type(config).__name__}, an object is needed", hint="download it again")
    return config
