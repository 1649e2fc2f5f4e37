"""Read the tools that a request to /v1/messages declares, and the tools that its messages add.

The prompt shows an added tool where a message adds it, so that cached prefixes stay valid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from negamax.api.schemas.request_model import check_type, refuse
from negamax.api.schemas.tools import (
    build_function_tool,
    check_function,
    check_tool_count,
    load_client_tools,
    show_tools,
)

TOOL_CHANGES = ("tool_addition", "tool_removal")  # block types that add or remove a tool
_CLIENT_TOOLS = load_client_tools("messages")
_SERVER_SEARCH = "tool_search_tool_"  # Type prefix of tool searches that this server does not run.


@dataclass(slots=True)
class ToolsInEffect:
    """A conversation's tools, converted to functions. Only `read_tools` changes this object."""

    shown: list[dict[str, Any]] = field(default_factory=list)  # Tools shown at the prompt's start.
    callable: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> callable tool
    notes: dict[str, str] = field(default_factory=dict)  # block path -> prompt text for the block


def read_tools(
    tools: Sequence[dict[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> ToolsInEffect:
    """Read the declared tools and the changes in messages, or raise `InvalidRequestError`.

    A client tool without a schema gets the schema of its type. Tools that run on Anthropic's
    servers are omitted. The prompt shows a tool with `defer_loading` where a message first refers
    to the tool. If a tool search of Anthropic's servers is declared, or if all tools have
    `defer_loading`, the prompt shows all tools at its start. The first tool is always shown at the
    prompt's start, because the template describes the format of calls there.
    """
    effect, known, deferred = ToolsInEffect(), dict[str, dict[str, Any] | None](), set[str]()
    check_tool_count(len(tools))
    is_searched = any(str(tool.get("type")).startswith(_SERVER_SEARCH) for tool in tools)
    is_mixed = any(tool.get("defer_loading") is not True for tool in tools)
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        name, function = _get_name(place, tool), _read_tool(place, tool)
        known[name] = function
        if function is None:
            continue
        effect.callable[name] = function
        if tool.get("defer_loading") is True and is_mixed and not is_searched:
            deferred.add(name)
        else:
            effect.shown.append(function)
    for place, kind, change in _find_changes(messages):
        name = _get_name(place, change)
        if kind == "tool_removal":
            if effect.callable.pop(name, None) is not None:
                effect.notes[place] = f"[the tool {name} can no longer be called]"
            continue
        if change.get("type") == "tool_definition":
            where = f"{place}.tool.definition"
            tool = check_type(change.get("definition"), dict, where, "a tool")
            name = _get_name(where, tool)
            known[name] = _read_tool(where, tool)
            deferred.add(name)
        if (found := known.get(name)) is None:
            continue
        if name in deferred:
            deferred.discard(name)
            if effect.shown:
                effect.notes[place] = show_tools([found])
            else:
                effect.shown.append(found)
        elif name not in effect.callable:
            effect.notes[place] = f"[the tool {name} can be called again]"
        if kind == "tool_addition":
            effect.callable[name] = found
    check_tool_count(len(effect.callable))
    return effect


def _find_changes(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the path, type and tool of each tool change and of each tool reference in a result."""
    for index, message in enumerate(messages):
        for place, block in _list_blocks(message, f"messages[{index}]"):
            kind = block.get("type")
            if kind in TOOL_CHANGES and message.get("role") == "system":
                what = "a reference or a definition"
                yield place, kind, check_type(block.get("tool"), dict, f"{place}.tool", what)
            elif kind == "tool_result":
                for where, part in _list_blocks(block, place):
                    if part.get("type") == "tool_reference":
                        yield where, "tool_reference", {"name": part.get("tool_name")}


def _list_blocks(owner: Mapping[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    content = owner.get("content")
    for number, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict):
            yield f"{place}.content[{number}]", block


def _get_name(place: str, tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    return name if isinstance(name, str) else place


def _read_tool(where: str, declared: dict[str, Any]) -> dict[str, Any] | None:
    """Convert a tool to a function, or return None if the tool's type is unknown."""
    tool = declared if "input_schema" in declared else _add_schema(declared)
    if tool is None:
        if declared.get("type") in (None, "custom"):
            refuse(f"{where}.input_schema", "the field is required and missing")
        return None
    check_function(tool, where=where, schema_field="input_schema")
    return build_function_tool(
        tool["name"],
        description=tool.get("description"),
        parameters=tool["input_schema"],
        is_strict=tool.get("strict") is True,
    )


def _add_schema(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return `tool` with the description and the `input_schema` of its type.

    Return None if the type is unknown or the tool runs on Anthropic's servers.
    """
    kind = tool.get("type")
    known = _CLIENT_TOOLS.get(kind) if isinstance(kind, str) else None
    if known is None:
        return None
    description, most = known.description, tool.get("max_characters")
    if isinstance(most, int):
        description += f" At most {most} characters of a file are shown."
    return {**tool, "description": description, "input_schema": known.schema}
