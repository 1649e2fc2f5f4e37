"""Items that say nothing, but change what holds for the answers after them: further tools, and the
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from negamax.api.dialects.responses.schema import ResponsesRequest, declared_tools
from negamax.api.schemas.request_model import refuse, shown
from negamax.api.schemas.thinking import check_effort

SETTINGS = ("additional_tools", "configuration_update")


def with_settings(
    params: ResponsesRequest, items: Sequence[tuple[str, Mapping[str, Any]]]
) -> ResponsesRequest:
    """The request with what `items`, which come with their places, change: tools are added unless
    there is one of that name, and the last effort and the last form of the text hold."""
    tools = declared_tools([(f"tools[{i}]", tool) for i, tool in enumerate(params.tools or ())])
    names = {tool.shown_name for tool in tools}
    added: list[dict[str, Any]] = []
    reasoning, text = params.reasoning, params.text
    for place, item in items:
        match item.get("type"):
            case "additional_tools":
                offered = _objects(item.get("tools"), f"{place}.tools")
            case "tool_search_output" if isinstance(item.get("tools"), list):
                offered = _objects(item["tools"], f"{place}.tools")
            case "configuration_update":
                effort = _part(item, "reasoning", place).get("effort")
                if effort is not None:
                    effort = check_effort(effort, f"{place}.reasoning.effort")
                    reasoning = reasoning.model_copy(update={"effort": effort})
                form = _part(item, "text", place).get("format")
                if form is not None:
                    form = _part(item["text"], "format", f"{place}.text")
                    text = text.model_copy(update={"format": form})
                continue
            case _:
                continue
        for where, tool in offered:
            found = {entry.shown_name for entry in declared_tools([(where, tool)])}
            if found - names:
                added.append(tool)
                names |= found
    if not added and reasoning is params.reasoning and text is params.text:
        return params
    tools_in_effect = [*(params.tools or ()), *added] or None
    return params.model_copy(
        update={"tools": tools_in_effect, "reasoning": reasoning, "text": text}
    )


def _objects(value: object, place: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects in a list, with their places."""
    if not isinstance(value, list):
        refuse(place, f"must be a list of tools; got {shown(value)}")
    placed = [(f"{place}[{index}]", entry) for index, entry in enumerate(value)]
    for where, entry in placed:
        if not isinstance(entry, dict):
            refuse(where, f"must be an object; got {shown(entry)}")
    return placed


def _part(item: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    """The object in a field; empty where there is none."""
    value = item.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(f"{place}.{name}", f"must be an object; got {shown(value)}")
    return value or {}
