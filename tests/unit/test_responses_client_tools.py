"""Shell and patch tools of the Responses API: shown as functions, called by their own items."""

import json
from typing import Any

import msgspec
import pytest

from negamax.api.common.history import History
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.responses.client_tools import CLIENT_TOOLS, build_call_item
from negamax.api.dialects.responses.history import build_history
from negamax.api.dialects.responses.item_settings import apply_settings
from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.base.errors import InvalidRequestError
from negamax.text.messages import normalize_messages

THOUGHTS = HiddenThoughts(ThoughtSigner("nano"), context_length=100, shows_earlier=False)
USER = {"role": "user", "content": "Go"}
LOOKUP = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "shell": {"timeout_ms": 5, "commands": ["ls", "pwd"]},
    "local_shell": {"command": ["ls", "-l"], "working_directory": "/tmp"},
    "apply_patch": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
}
OUTPUTS = {"shell": [], "local_shell": "", "apply_patch": ""}


def history(*items: dict[str, Any]) -> History:
    placed = [(f"input[{index}]", item) for index, item in enumerate(items)]
    return build_history(placed, instructions=None, thoughts=THOUGHTS)


def request(*tools: dict[str, Any], **fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse({"input": "Go", "tools": list(tools), **fields})


def settled(params: ResponsesRequest, *items: dict[str, Any]) -> ResponsesRequest:
    return apply_settings(params, [(f"input[{index}]", item) for index, item in enumerate(items)])


def called(name: str, arguments: object) -> dict[str, Any] | None:
    item = build_call_item(
        name, json.dumps(arguments), item_id="fc_1", status="completed", call_id="call_1"
    )
    return None if item is None else msgspec.to_builtins(item)


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_the_model_is_shown_what_clients_run_and_may_be_told_to_call_it(name: str) -> None:
    tools, calls = request({"type": name}, LOOKUP, tool_choice={"type": name}).choice()
    assert [tool["function"]["name"] for tool in tools or ()] == [name, "look"]
    assert calls.name == name
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": name}]}
    assert request({"type": name}, LOOKUP, tool_choice=allowed).choice()[1].allowed == (name,)
    with pytest.raises(InvalidRequestError, match="not declared"):
        request(LOOKUP, tool_choice={"type": name}).choice()


def test_a_shell_in_a_container_of_openai_is_left_out() -> None:
    local, hosted = (
        {"type": "shell", "environment": {"type": kind}} for kind in ("local", "container_auto")
    )
    assert [tool.name for tool in request(local).declared_tools] == ["shell"]
    assert request(hosted).declared_tools == []


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_a_call_comes_back_as_the_model_wrote_it(name: str) -> None:
    item = called(name, ARGUMENTS[name])
    assert item and item["type"] == f"{name}_call" and item["call_id"] == "call_1"
    result = {"type": f"{name}_call_output", "call_id": "call_1", "output": OUTPUTS[name]}
    (call,) = history(USER, item, result).messages[1]["tool_calls"]
    assert call["function"]["name"] == name
    # in the same order, so that the prefix stays cached
    assert json.dumps(call["function"]["arguments"]) == json.dumps(ARGUMENTS[name])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", {}),
        ("shell", {"commands": "ls"}),
        ("shell", ["ls"]),
        ("local_shell", {"command": [1]}),
        ("apply_patch", {"type": "rename_file", "path": "a"}),
        ("apply_patch", {"type": "update_file", "path": "a"}),
        ("apply_patch", {"type": ["update_file"], "path": "a"}),
        ("apply_patch", {"type": "delete_file"}),
    ],
    ids=str,
)
def test_what_no_client_could_run_is_no_item_of_theirs(name: str, arguments: object) -> None:
    assert called(name, arguments) is None
    assert build_call_item(name, '{"commands": [', item_id="", status="", call_id="") is None


def test_results_say_what_was_printed_and_how_it_ended() -> None:
    shell = called("shell", ARGUMENTS["shell"])
    patch = {**(called("apply_patch", ARGUMENTS["apply_patch"]) or {}), "call_id": "call_2"}
    outcomes = [{"type": "exit", "exit_code": 0}, {"type": "exit", "exit_code": 2}]
    printed = [
        {"stdout": "a\n", "stderr": "", "outcome": outcomes[0]},
        {"stdout": "", "stderr": "no", "outcome": outcomes[1]},
        {"stdout": "b", "stderr": "", "outcome": {"type": "timeout"}},
    ]
    made = history(
        USER,
        shell or {},
        patch,
        {"type": "shell_call_output", "call_id": "call_1", "output": printed},
        {"type": "apply_patch_call_output", "call_id": "call_2", "status": "failed"},
    )
    results = [message["content"] for message in made.messages if message["role"] == "tool"]
    assert results == ["a\nno\n[exit code 2]\nb\n[timed out]", "Error"]


def test_results_of_local_shells_name_the_call_or_its_item() -> None:
    call = {**(called("local_shell", ARGUMENTS["local_shell"]) or {}), "id": "lsh_1"}
    for number in ("lsh_1", "call_1"):
        result = {"type": "local_shell_call_output", "id": number, "output": "a"}
        messages = normalize_messages(history(USER, call, result).messages)
        assert messages[2]["content"] == "a"


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"type": "shell_call", "call_id": "c", "action": "ls"}, "input[0].action"),
        ({"type": "apply_patch_call", "call_id": "c"}, "input[0].operation"),
        ({"type": "shell_call_output", "call_id": "c", "output": 3}, "input[0].output"),
        ({"type": "shell_call_output", "call_id": "c", "output": [3]}, "input[0].output[0]"),
        (
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": 3}]},
            "input[0].output[0].stdout",
        ),
        ({"type": "compaction_trigger"}, "input[0].type"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named_by_its_place(item: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        history(item)
    assert caught.value.param == place


@pytest.mark.parametrize("kind", ["function_call", "shell_call"])
@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_ids_that_are_no_text_are_refused(kind: str, status: str) -> None:
    call = {"type": kind, "name": "f", "arguments": "{}", "action": {}, "status": status}
    result = {"type": f"{kind}_output", "output": "x"}
    for call_id, result_id in (("c", ["c"]), (["c"], "c"), (["c"], ["c"])):
        made = history(USER, {**call, "call_id": call_id}, {**result, "call_id": result_id})
        with pytest.raises(InvalidRequestError):
            normalize_messages(made.messages)


def test_items_add_tools_that_are_not_there_yet() -> None:
    other, patch = {**LOOKUP, "name": "other"}, {"type": "apply_patch"}
    params = settled(
        request(LOOKUP),
        USER,
        {"type": "additional_tools", "role": "developer", "tools": [{**LOOKUP, "strict": True}]},
        {"type": "additional_tools", "role": "developer", "tools": [patch, {"type": "mcp"}]},
        {"type": "tool_search_output", "tools": [other, patch]},
        {"type": "tool_search_output"},
    )
    assert [tool.shown_name for tool in params.declared_tools] == ["look", "apply_patch", "other"]
    assert params.tools == [LOOKUP, patch, other]
    assert history(USER, {"type": "additional_tools", "tools": []}, USER).messages == [USER, USER]


def test_the_last_configuration_holds() -> None:
    def update(**fields: Any) -> dict[str, Any]:
        return {"type": "configuration_update", **fields}

    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    params = settled(
        request(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"}),
        update(reasoning={"effort": "high"}, text={"format": form}),
        update(reasoning={"effort": "medium"}),
        update(reasoning={}, text=None),
    )
    assert (params.reasoning.effort, params.reasoning.summary) == ("medium", "auto")
    assert (params.text.format, params.text.verbosity) == (form, "low")
    assert params.grammar is not None
    assert history(USER, update(), USER).messages == [USER, USER]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"type": "additional_tools"}, "input[0].tools"),
        ({"type": "additional_tools", "tools": [3]}, "input[0].tools[0]"),
        ({"type": "additional_tools", "tools": [{"type": "function"}]}, "input[0].tools[0].name"),
        ({"type": "configuration_update", "reasoning": 3}, "input[0].reasoning"),
        (
            {"type": "configuration_update", "reasoning": {"effort": "huge"}},
            "input[0].reasoning.effort",
        ),
        ({"type": "configuration_update", "text": {"format": 3}}, "input[0].text.format"),
    ],
    ids=str,
)
def test_wrong_settings_are_named_by_their_place(item: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        settled(request(LOOKUP), item)
    assert caught.value.param == place
