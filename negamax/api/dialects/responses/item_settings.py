"""Items that change the settings of later answers: more tools, and the configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from negamax.api.dialects.responses.schema import ResponsesRequest, read_declared_tools
from negamax.api.schemas.request_model import check_choice, check_type
from negamax.api.schemas.thinking import EFFORTS

SETTINGS = ("additional_tools", "configuration_update")


def apply_settings(
    params: ResponsesRequest, items: Sequence[tuple[str, Mapping[str, Any]]]
) -> ResponsesRequest:
    """Apply the changes in `items`, which come with their places, to the request.

    Tools are added unless their name is taken. The last effort and the last text format apply.
    """
    tools = read_declared_tools(
        [(f"tools[{i}]", tool) for i, tool in enumerate(params.tools or ())]
    )
    names = {tool.shown_name for tool in tools}
    added: list[dict[str, Any]] = []
    reasoning, text = params.reasoning, params.text
    for place, item in items:
        match item.get("type"):
            case "additional_tools":
                offered = _check_objects(item.get("tools"), f"{place}.tools")
            case "tool_search_output" if isinstance(item.get("tools"), list):
                offered = _check_objects(item["tools"], f"{place}.tools")
            case "configuration_update":
                effort = _get_object(item, "reasoning", place).get("effort")
                if effort is not None:
                    effort = check_choice(effort, EFFORTS, f"{place}.reasoning.effort")
                    reasoning = reasoning.model_copy(update={"effort": effort})
                form = _get_object(item, "text", place).get("format")
                if form is not None:
                    form = _get_object(item["text"], "format", f"{place}.text")
                    text = text.model_copy(update={"format": form})
                continue
            case _:
                continue
        for where, tool in offered:
            found = {entry.shown_name for entry in read_declared_tools([(where, tool)])}
            if found - names:
                added.append(tool)
                names |= found
    if not added and reasoning is params.reasoning and text is params.text:
        return params
    tools_in_effect = [*(params.tools or ()), *added] or None
    return params.model_copy(
        update={"tools": tools_in_effect, "reasoning": reasoning, "text": text}
    )


def _check_objects(value: object, place: str) -> list[tuple[str, dict[str, Any]]]:
    entries = enumerate(check_type(value, list, place, "a list of tools"))
    return [
        (f"{place}[{index}]", check_type(entry, dict, f"{place}[{index}]"))
        for index, entry in entries
    ]


def _get_object(item: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    value = item.get(name)
    return {} if value is None else check_type(value, dict, f"{place}.{name}")
