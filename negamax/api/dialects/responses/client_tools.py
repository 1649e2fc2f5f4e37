"""Define the shell, patch and search tools of the Responses API, which clients run.

A client tool has a type instead of a name, and the model calls the tool as a function named after
the type.
"""

import json
from collections.abc import Mapping
from typing import Any

from negamax.api.dialects.responses.items import (
    ApplyPatchCallItem,
    JsonObject,
    LocalShellCallItem,
    ShellCallItem,
    ToolSearchCallItem,
)
from negamax.api.schemas.request_model import check_type, describe, refuse
from negamax.api.schemas.tools import load_client_tools

_OPERATIONS = ("create_file", "update_file", "delete_file")
CLIENT_TOOLS = load_client_tools("responses")
CALLS = {f"{name}_call": name for name in CLIENT_TOOLS}  # Maps a call's item type to the tool name.
TOOL_SEARCH = "tool_search"
FOUND_TOOLS = "tool_search_output"  # Item type of a tool search's result.
RESULTS = tuple(
    FOUND_TOOLS if name == TOOL_SEARCH else f"{name}_call_output" for name in CLIENT_TOOLS
)


def is_run_by_client(tool: Mapping[str, Any]) -> bool:
    """Return whether the client, and not OpenAI's servers, runs a tool."""
    if tool.get("type") == TOOL_SEARCH:
        return tool.get("execution") == "client"
    place = tool.get("environment")
    is_local = place is None or (isinstance(place, dict) and place.get("type") == "local")
    return tool.get("type") in CLIENT_TOOLS and is_local


def is_hosted_search(item: Mapping[str, Any]) -> bool:
    """Return whether an item is the call or the result of a tool search on OpenAI's servers."""
    is_search = item.get("type") in (f"{TOOL_SEARCH}_call", FOUND_TOOLS)
    return is_search and (item.get("execution") == "server" or item.get("call_id") is None)


def build_call_item(
    name: str, arguments: str, *, item_id: str, status: str, call_id: str
) -> ShellCallItem | LocalShellCallItem | ApplyPatchCallItem | ToolSearchCallItem | None:
    """Build the item for a call of tool `name`, or return None for unusable `arguments`."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    if name == TOOL_SEARCH:
        return ToolSearchCallItem(item_id, status, call_id, given)
    given = {key: given[key] for key in given if key in CLIENT_TOOLS[name].schema["properties"]}
    match name:
        case "shell" if _are_strings(given.get("commands")):
            action = {**given, **_fill_missing(given, "timeout_ms", "max_output_length")}
            return ShellCallItem(item_id, status, call_id, action)
        case "local_shell" if _are_strings(given.get("command")):
            more = _fill_missing(given, "timeout_ms", "working_directory", "user")
            action = {"type": "exec", **given, "env": {}, **more}
            return LocalShellCallItem(item_id, status, call_id, action)
        case "apply_patch" if given.get("type") in _OPERATIONS:
            has_diff = given["type"] == "delete_file" or isinstance(given.get("diff"), str)
            if has_diff and isinstance(given.get("path"), str):
                return ApplyPatchCallItem(item_id, status, call_id, given)
    return None


def extract_arguments(item: Mapping[str, Any], place: str) -> Any:
    """Return the arguments of the call `item` in the format that the model wrote."""
    name = CALLS[item["type"]]
    if name == TOOL_SEARCH:
        return item.get("arguments")
    field = "operation" if name == "apply_patch" else "action"
    given = check_type(item.get(field), dict, f"{place}.{field}")
    known = CLIENT_TOOLS[name].schema["properties"]
    return {key: given[key] for key in given if key in known and given[key] is not None}


def render_result(item: Mapping[str, Any], place: str) -> str:
    """Return the text that the model reads for the tool result `item`."""
    output = item.get("output")
    if item["type"] == "apply_patch_call_output" and output is None:
        output = "" if item.get("status") == "failed" else "Done."
    if isinstance(output, list):
        output = "\n".join(
            _render_command(part, f"{place}.output[{index}]") for index, part in enumerate(output)
        )
    if not isinstance(output, str):
        refuse(f"{place}.output", f"send text or a list of outputs, not {describe(output)}")
    if item.get("status") == "failed":
        return f"Error: {output}" if output else "Error"
    return output


def _render_command(part: object, place: str) -> str:
    result = check_type(part, dict, place)
    texts = [
        check_type(result.get(name) or "", str, f"{place}.{name}") for name in ("stdout", "stderr")
    ]
    match result.get("outcome"):
        case {"type": "timeout"}:
            texts.append("[timed out]")
        case {"type": "exit", "exit_code": int(code)} if code:
            texts.append(f"[exit code {describe(code)}]")
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _fill_missing(given: Mapping[str, Any], *names: str) -> JsonObject:
    return {name: None for name in names if name not in given}
