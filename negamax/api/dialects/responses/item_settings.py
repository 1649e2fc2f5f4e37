"""Apply request items that add tools, and items that change settings of later answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from negamax.api.dialects.responses.client_tools import TOOL_SEARCH
from negamax.api.dialects.responses.schema import ResponsesRequest, read_declared_tools
from negamax.api.schemas.request_model import check_choice, check_type
from negamax.api.schemas.thinking import EFFORTS
from negamax.api.schemas.tools import show_tools

SETTINGS = ("additional_tools", "configuration_update")


@dataclass(frozen=True, slots=True)
class Settings:
    """A request after its items have changed the settings.

    `later` contains the names of tools that the prompt does not show at its start. `notes` maps the
    index of an item that adds tools to the text that describes these tools.
    """

    params: ResponsesRequest
    later: frozenset[str] = frozenset()
    notes: Mapping[int, str] = field(default_factory=dict)


def apply_settings(
    params: ResponsesRequest, items: Sequence[tuple[str, Mapping[str, Any]]]
) -> Settings:
    """Apply the changes in `items` to the request. `items` has pairs of a path and an item.

    A tool is added if no other tool has its name. The start of the prompt shows the declared tools
    and the tools of items before the first user message. If the start has no tools, it shows the
    tools added first, because the template describes the format of calls there. Tools of later
    items are shown at these items, to keep cached prefixes valid. A tool with `defer_loading` is
    shown where a tool search finds it. The last effort and text format in `items` apply.
    """
    tools = read_declared_tools(
        [(f"tools[{i}]", tool) for i, tool in enumerate(params.tools or ())]
    )
    names = {tool.shown_name for tool in tools}
    is_searched = any(tool.kind == TOOL_SEARCH for tool in tools)
    hidden = {tool.shown_name for tool in tools if is_searched and tool.is_deferred}
    later, notes = set(hidden), dict[int, str]()
    added: list[dict[str, Any]] = []
    reasoning, text = params.reasoning, params.text
    is_start, has_shown = True, bool(names - hidden)
    for number, (place, item) in enumerate(items):
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
                is_start = is_start and item.get("role") in ("system", "developer")
                continue
        brought = []
        for where, tool in offered:
            found = read_declared_tools([(where, tool)])
            new = {entry.shown_name for entry in found} - names
            if new:
                added.append(tool)
                names |= new
            brought += [one for one in found if one.shown_name in new | hidden]
            hidden -= {entry.shown_name for entry in found}
        if is_start or not has_shown:
            has_shown = has_shown or bool(brought)
            later -= {entry.shown_name for entry in brought}
        elif brought:
            later |= {entry.shown_name for entry in brought}
            notes[number] = show_tools([entry.as_function for entry in brought])
    if added or reasoning is not params.reasoning or text is not params.text:
        in_effect = [*(params.tools or ()), *added] or None
        params = params.model_copy(
            update={"tools": in_effect, "reasoning": reasoning, "text": text}
        )
    return Settings(params, frozenset(later), notes)


def _check_objects(value: object, place: str) -> list[tuple[str, dict[str, Any]]]:
    entries = enumerate(check_type(value, list, place, "a list of tools"))
    return [
        (f"{place}[{index}]", check_type(entry, dict, f"{place}[{index}]"))
        for index, entry in entries
    ]


def _get_object(item: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    value = item.get(name)
    return {} if value is None else check_type(value, dict, f"{place}.{name}")
