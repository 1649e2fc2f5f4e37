"""Tools of the Responses API that have a type instead of a name and a schema, and that clients run:
shells and patches. The model calls them as functions with the name of their type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from negamax.api.dialects.responses.items import (
    ApplyPatchCallItem,
    JsonObject,
    LocalShellCallItem,
    ShellCallItem,
)
from negamax.api.schemas.request_model import refuse, shown

_OPERATIONS = ("create_file", "update_file", "delete_file")
_TIMEOUT = {"type": "integer", "description": "Milliseconds after which it is ended."}
_STRINGS = {"type": "array", "items": {"type": "string"}}


def _schema(required: list[str], **properties: Mapping[str, Any]) -> JsonObject:
    return {"type": "object", "properties": properties, "required": required}


# by type: the description, and the schema of the arguments
CLIENT_TOOLS: dict[str, tuple[str, JsonObject]] = {
    "shell": (
        "Runs commands in a shell and answers what they print and how they end.",
        _schema(
            ["commands"],
            commands={**_STRINGS, "description": "Command lines, each run by itself."},
            timeout_ms=_TIMEOUT,
            max_output_length={
                "type": "integer",
                "description": "Characters of each command's output that are shown at most.",
            },
        ),
    ),
    "local_shell": (
        "Runs a command on the user's machine and answers what it prints.",
        _schema(
            ["command"],
            command={
                **_STRINGS,
                "description": 'The program and its arguments, such as ["bash", "-lc", "ls"].',
            },
            working_directory={"type": "string", "description": "Where it is run."},
            timeout_ms=_TIMEOUT,
        ),
    ),
    "apply_patch": (
        "Creates, updates or deletes a file.",
        _schema(
            ["type", "path"],
            type={"type": "string", "enum": list(_OPERATIONS)},
            path={"type": "string", "description": "Path of the file."},
            diff={
                "type": "string",
                "description": "create_file: all lines of the file, each after a +. update_file: "
                "for each place @@, alone or with a line from before the place, and then lines of "
                "the file, each after a space where it stays, - where it goes, + where it is new.",
            },
        ),
    ),
}
CALLS = {f"{name}_call": name for name in CLIENT_TOOLS}  # types of items: the tool's
RESULTS = tuple(f"{name}_call_output" for name in CLIENT_TOOLS)


def is_run_by_client(tool: Mapping[str, Any]) -> bool:
    """Whether a declared tool is one of these; a shell may also be one of OpenAI's containers."""
    place = tool.get("environment")
    is_local = place is None or (isinstance(place, dict) and place.get("type") == "local")
    return tool.get("type") in CLIENT_TOOLS and is_local


def call_item(
    name: str, arguments: str, *, item_id: str, status: str, call_id: str
) -> ShellCallItem | LocalShellCallItem | ApplyPatchCallItem | None:
    """The item of a call of the tool `name`; None where `arguments`, JSON text, are not what it is
    called with."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    given = {key: given[key] for key in given if key in CLIENT_TOOLS[name][1]["properties"]}
    match name:
        case "shell" if _are_strings(given.get("commands")):
            action = {**given, **_missing(given, "timeout_ms", "max_output_length")}
            return ShellCallItem(item_id, status, call_id, action)
        case "local_shell" if _are_strings(given.get("command")):
            more = _missing(given, "timeout_ms", "working_directory", "user")
            action = {"type": "exec", **given, "env": {}, **more}
            return LocalShellCallItem(item_id, status, call_id, action)
        case "apply_patch" if given.get("type") in _OPERATIONS:
            has_diff = given["type"] == "delete_file" or isinstance(given.get("diff"), str)
            if has_diff and isinstance(given.get("path"), str):
                return ApplyPatchCallItem(item_id, status, call_id, given)
    return None


def call_arguments(item: Mapping[str, Any], place: str) -> JsonObject:
    """The arguments by which the model made the call `item`."""
    name = CALLS[item["type"]]
    field = "operation" if name == "apply_patch" else "action"
    given = item.get(field)
    if not isinstance(given, dict):
        refuse(f"{place}.{field}", f"must be an object; got {shown(given)}")
    known = CLIENT_TOOLS[name][1]["properties"]
    return {key: given[key] for key in given if key in known and given[key] is not None}


def result_text(item: Mapping[str, Any], place: str) -> str:
    """What the model reads of the result `item` of a call."""
    output = item.get("output")
    if item["type"] == "apply_patch_call_output" and output is None:
        output = "" if item.get("status") == "failed" else "Done."
    if isinstance(output, list):
        output = "\n".join(
            _command_text(part, f"{place}.output[{index}]") for index, part in enumerate(output)
        )
    if not isinstance(output, str):
        refuse(f"{place}.output", f"must be text, or a list for shell calls; got {shown(output)}")
    if item.get("status") == "failed":
        return f"Error: {output}" if output else "Error"
    return output


def _command_text(part: object, place: str) -> str:
    """What a command has printed, and how it has ended, if not well."""
    if not isinstance(part, dict):
        refuse(place, f"must be an object; got {shown(part)}")
    texts = [part.get(name) or "" for name in ("stdout", "stderr")]
    for name, text in zip(("stdout", "stderr"), texts, strict=True):
        if not isinstance(text, str):
            refuse(f"{place}.{name}", f"must be a string; got {shown(text)}")
    match part.get("outcome"):
        case {"type": "timeout"}:
            texts.append("[timed out]")
        case {"type": "exit", "exit_code": int(code)} if code:
            texts.append(f"[exit code {shown(code)}]")
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _missing(given: Mapping[str, Any], *names: str) -> JsonObject:
    return {name: None for name in names if name not in given}
