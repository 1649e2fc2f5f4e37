"""Check declared functions and `tool_choice` for all APIs."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator

from negamax.api.schemas.request_model import describe, refuse, suggest_nearest
from negamax.config.grammar import UNWRITABLE, find_unwritable

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class ClientTool:
    """The description and the schema of a tool. A request declares the tool by one of `types`."""

    types: tuple[str, ...]
    description: str
    schema: dict[str, Any]


_CLIENT_TOOLS = msgspec.json.decode(
    Path(__file__).with_name("client_tools.json").read_bytes(), type=dict[str, list[ClientTool]]
)
_NAME_BREAKERS = frozenset('"<>\n\r\t')  # Characters that cannot be in <invoke name="...">.


def load_client_tools(dialect: str) -> dict[str, ClientTool]:
    return {kind: tool for tool in _CLIENT_TOOLS[dialect] for kind in tool.types}


def check_tool_count(count: int, *, field: str = "tools") -> None:
    if count > MAX_TOOLS:
        refuse(field, f"the request has {count} tools; at most {MAX_TOOLS} are allowed")


def check_function(
    function: Mapping[str, Any], *, where: str, schema_field: str = "parameters"
) -> None:
    """Refuse a function if the prompt or the parser cannot use its name, description or schema.

    `where` is the function's path in the request. The function's `schema_field` has the schema.
    """
    name = function.get("name")
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_TOOL_NAME_CHARS
        or not _NAME_BREAKERS.isdisjoint(name)
    ):
        allowed = (
            f"1 to {MAX_TOOL_NAME_CHARS} characters without quotes, angle brackets and line breaks"
        )
        refuse(f"{where}.name", f"the name {describe(name)} is not allowed; send {allowed}")
    for key, kind in (("description", str), (schema_field, dict)):
        if not isinstance(function.get(key), kind | None):
            refuse(f"{where}.{key}", f"send a JSON {'string' if kind is str else 'object'}")
    if function.get("strict"):
        _check_writable(function.get(schema_field), f"{where}.{schema_field}")


def check_mended_tools(tools: object) -> None:
    """Refuse strict schemas that contain U+FFFD, which has replaced the body's lone surrogates."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(function, Mapping) and function.get("strict"):
            place = f"tools[{index}]" + ("" if function is tool else ".function")
            for field in ("parameters", "input_schema"):
                _check_writable(function.get(field), f"{place}.{field}", mended="\ufffd")


def _check_writable(schema: object, place: str, *, mended: str = "") -> None:
    if (found := find_unwritable(schema, mended=mended)) is not None:
        refuse(f"{place}{found}", f"a strict schema must not contain {UNWRITABLE}")


def check_function_tools(
    tools: list[dict[str, Any]], *, field: str = "tools"
) -> list[dict[str, Any]]:
    """Check the tool fields that the prompt and the parser need."""
    check_tool_count(len(tools), field=field)
    for index, tool in enumerate(tools):
        where = f"{field}[{index}]"
        if tool.get("type", "function") != "function":
            refuse(f"{where}.type", f"{describe(tool['type'])} is not allowed; send 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            refuse(f"{where}.function", f"send an object with a name, not {describe(function)}")
        check_function(function, where=f"{where}.function")
    return tools


Tools = Annotated[list[dict[str, Any]], AfterValidator(check_function_tools)]


def build_function_tool(
    name: str, *, description: Any, parameters: Any, is_strict: bool
) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    if is_strict:
        function["strict"] = True
    function = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": function}


def show_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Format functions as chat templates do, to show the functions within the conversation."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return "\n".join(("<tools>", *(f"<tool>{line}</tool>" for line in lines), "</tools>"))


def read_allowed_tools(
    choice: Mapping[str, Any],
    *,
    may_run_elsewhere: bool = False,
    named_by_type: Collection[str] = (),
) -> tuple[str, dict[str, str]]:
    """Return the mode of a `tool_choice` of type "allowed_tools", and the path of each tool name.

    The choice may have the format of chat completions or of /v1/responses. If a tool's type is in
    `named_by_type`, the type is also the tool's name. `may_run_elsewhere` permits other types.
    """
    field, described = "tool_choice", choice
    if "allowed_tools" in choice:
        field, described = "tool_choice.allowed_tools", choice["allowed_tools"]
    if not isinstance(described, Mapping):
        refuse(field, f"send an object with a mode and tools, not {describe(described)}")
    mode, tools = described.get("mode", "auto"), described.get("tools")
    if mode not in ("auto", "required"):
        refuse(f"{field}.mode", f"mode {describe(mode)} is not allowed; send 'auto' or 'required'")
    if not isinstance(tools, list):
        refuse(f"{field}.tools", f"the value must be a list of tools; got {describe(tools)}")
    check_tool_count(len(tools), field=f"{field}.tools")
    names: dict[str, str] = {}
    for index, tool in enumerate(tools):
        where = f"{field}.tools[{index}]"
        if not isinstance(tool, Mapping):
            refuse(where, f"send an object with a type and a name, not {describe(tool)}")
        kind = tool.get("type", "function")
        if isinstance(kind, str) and kind in named_by_type:
            names.setdefault(kind, f"{where}.type")
            continue
        if kind not in ("function", "custom"):
            if may_run_elsewhere and isinstance(kind, str):
                continue
            refuse(f"{where}.type", f"{describe(kind)} is not allowed; send 'function'")
        where, tool = (f"{where}.{kind}", tool[kind]) if kind in tool else (where, tool)
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str):
            refuse(f"{where}.name", f"the value must be the name of a tool; got {describe(name)}")
        names.setdefault(name, f"{where}.name")
    if not names:
        refuse(
            f"{field}.tools",
            "the list has no tool that can be called here; add a tool, or use tool_choice 'none'",
        )
    return mode, names


@dataclass(frozen=True, slots=True)
class CallChoice:
    """The tool calls that an answer may or must contain.

    `mode` is "auto", "none", "required" or "function". With "function", `name` is the forced tool.
    `allowed` contains the names of the tools that may be called. None allows all tools.
    """

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "function")

    def callable_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if tools is None or self.allowed is None:
            return tools
        return [tool for tool in tools if tool["function"]["name"] in self.allowed]


def check_call_choice(
    mode: str,
    name: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    parallel: bool,
    allowed: Mapping[str, str] | None = None,
) -> CallChoice:
    """Check a tool choice. `mode` is auto, none, required or function. "function" needs a `name`.

    `allowed` maps the name of each tool that may be called to the name's path in the request.
    """
    names = [tool["function"]["name"] for tool in tools or ()]
    for allowed_name, place in (allowed or {}).items():
        if allowed_name not in names:
            hint = suggest_nearest(allowed_name, names)
            refuse(place, f"{describe(allowed_name)} is not a declared tool.{hint}")
    may_call = None if allowed is None else tuple(allowed)
    if mode in ("auto", "none"):
        return CallChoice(mode, parallel=parallel, allowed=may_call)
    if not tools:
        refuse(
            "tool_choice",
            "the choice forces a call, but there are no tools to call; send tools that the client "
            "runs, or use 'auto'",
        )
    if mode == "required":
        return CallChoice("required", parallel=parallel, allowed=may_call)
    if name not in names:
        refuse("tool_choice", f"the choice forces {describe(name)}, which is not declared")
    return CallChoice("function", name, parallel=False)
