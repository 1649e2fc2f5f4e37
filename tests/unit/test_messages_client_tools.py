"""Tools that Anthropic's clients run and whose schema their requests omit."""

import typing
from typing import Any

import pytest

from negamax.api.dialects.messages.schema import CountRequest
from negamax.base.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "Hi"}]
NEW_EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
RUN_BY_CLIENTS = ("bash_2", "text_editor_2", "memory_2")


def declared() -> list[dict[str, str]]:
    """Return type and name of the package's tools that this server supports."""
    from anthropic.types import tool_union_param
    from anthropic.types.beta import beta_tool_union_param

    types = (
        *typing.get_args(beta_tool_union_param.BetaToolUnionParam),
        *typing.get_args(tool_union_param.ToolUnionParam),
    )
    tools = {}
    for tool in types:
        hints = typing.get_type_hints(tool)
        kinds = typing.get_args(hints.get("type"))
        if kinds and str(kinds[0]).startswith(RUN_BY_CLIENTS):
            tools[kinds[0]] = {"type": kinds[0], "name": typing.get_args(hints["name"])[0]}
    return list(tools.values())


def offered(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    request = CountRequest.parse({"model": "nano", "messages": HELLO, "tools": list(tools)})
    return [tool["function"] for tool in request.offered_tools or []]


def test_the_model_is_shown_every_tool_that_clients_run() -> None:
    tools = declared()
    assert len(tools) == 7
    for tool in tools:
        (function,) = offered(tool)
        assert function["name"] == tool["name"] and function["description"]
        schema = function["parameters"]
        assert set(schema["required"]) <= set(schema["properties"])
        assert "strict" not in function
        (strict,) = offered({**tool, "strict": True, "cache_control": {"type": "ephemeral"}})
        assert strict == {**function, "strict": True}


def test_the_memory_tool_has_all_commands_and_their_fields() -> None:
    from anthropic.types.beta import BetaMemoryTool20250818Command

    (function,) = offered({"type": "memory_20250818", "name": "memory"})
    properties = function["parameters"]["properties"]
    commands, fields = set(), set()
    for model in typing.get_args(typing.get_args(BetaMemoryTool20250818Command)[0]):
        fields |= set(model.model_fields)
        commands |= set(typing.get_args(model.model_fields["command"].annotation))
    assert set(properties["command"]["enum"]) == commands
    assert set(properties) == fields


def test_editors_insert_what_their_version_calls_it() -> None:
    (old,) = offered({"type": "text_editor_20250124", "name": "str_replace_editor"})
    (new,) = offered(NEW_EDITOR)
    before, after = (tool["parameters"]["properties"] for tool in (old, new))
    assert "insert_text" not in before and "insert_text" in after
    assert "undo_edit" in before["command"]["enum"]
    assert "undo_edit" not in after["command"]["enum"]
    (bounded,) = offered({**NEW_EDITOR, "max_characters": 9000})
    assert "9000" in bounded["description"]


def test_tools_of_anthropics_servers_and_for_the_eyes_are_left_out() -> None:
    left_out = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "computer_toolset_20260801"},
        {"type": "bash_29990101", "name": "bash"},
    ]
    assert offered(*left_out) == []


@pytest.mark.parametrize("tool", [{"name": "bash"}, {"type": "custom", "name": "bash"}], ids=str)
def test_a_tool_of_the_clients_own_needs_its_schema(tool: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="input_schema"):
        offered(tool)


def test_the_effort_of_the_last_system_message_that_has_one_counts() -> None:
    def effort(*messages: dict[str, Any]) -> str | None:
        body = {"model": "nano", "messages": [*HELLO, *messages]}
        request = CountRequest.parse({**body, "output_config": {"effort": "low"}})
        return request.thinking_choice.effort

    high, unchanged = (
        {"role": "system", "content": "x", "output_config": config}
        for config in ({"effort": "high"}, {})
    )
    assert effort() == effort(unchanged) == "low"
    assert effort(high, *HELLO, unchanged) == "high"
    for config, place in (({"effort": "huge"}, ".effort"), (3, "")):
        with pytest.raises(InvalidRequestError) as caught:
            effort({"role": "system", "content": "x", "output_config": config})
        assert caught.value.param == f"messages[1].output_config{place}"
