import json
from typing import Any

import msgspec
import pytest

from negamax.api.common.history import History
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.responses.client_tools import CLIENT_TOOLS, build_call_item
from negamax.api.dialects.responses.history import build_history
from negamax.api.dialects.responses.input_items import build_page
from negamax.api.dialects.responses.item_settings import apply_settings
from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.api.dialects.responses.store import (
    Item,
    ResponseStore,
    StoredResponse,
    StoredTurn,
    decode_items,
    encode_shown,
    trim_setting,
)
from negamax.api.schemas.tools import show_tools
from negamax.base.errors import InvalidRequestError
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.text.messages import normalize_messages
from tests.tables import read_table

SIGNER = ThoughtSigner("nano")
THOUGHTS = HiddenThoughts(SIGNER, context_length=100, shows_earlier=False)
USER = {"role": "user", "content": "Go"}
LOOKUP = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "shell": {"timeout_ms": 5, "commands": ["ls", "pwd"]},
    "local_shell": {"command": ["ls", "-l"], "working_directory": "/tmp"},
    "apply_patch": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
    "tool_search": {"query": "calendar"},
}
OUTPUTS = {"shell": [], "local_shell": "", "apply_patch": ""}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Searches."}


def placed(*items: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"input[{index}]", item) for index, item in enumerate(items)]


def history(*items: dict[str, Any], **options: Any) -> History:
    options = {"instructions": None, "thoughts": THOUGHTS, **options}
    return build_history(placed(*items), **options)


def assistant_of(*items: dict[str, Any]) -> dict[str, Any]:
    (message,) = [entry for entry in history(*items).messages if entry["role"] == "assistant"]
    return message


def request(*tools: dict[str, Any], **fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse({"input": "Go", "tools": list(tools), **fields})


def settled(params: ResponsesRequest, *items: dict[str, Any]) -> ResponsesRequest:
    return apply_settings(params, placed(*items)).params


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], **fields}


def call(number: int, **more: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": f"call_{number}", "name": "read"}
    return {**item, "arguments": '{"n": 1}', **more}


def result(number: int, output: Any = "ok", *, of: str = "function") -> dict[str, Any]:
    return {"type": f"{of}_call_output", "call_id": f"call_{number}", "output": output}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content}


def summary(text: str) -> dict[str, Any]:
    return {"summary": [{"type": "summary_text", "text": text}]}


def client_call(name: str, arguments: object) -> dict[str, Any]:
    text = json.dumps(arguments)
    item = build_call_item(name, text, item_id="fc_1", status="completed", call_id="call_1")
    return {} if item is None else msgspec.to_builtins(item)


def test_images_are_refused_for_a_model_that_could_see_them() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    for items, place in (
        ([{"role": "user", "content": [image]}], "messages[0].content[0]"),
        ([call(1), result(1, [image])], "messages[1].content[0]"),
        ([{"role": "assistant", "content": [image]}], "input[0].content[0]"),
    ):
        with pytest.raises(InvalidRequestError, match="MiniMax-M3 supports this type") as caught:
            made = history(*items, family=MINIMAX_M3_FAMILY)
            normalize_messages(made.messages, family=MINIMAX_M3_FAMILY)
        assert caught.value.param == place
        normalize_messages(history(*items).messages)


def test_items_of_one_answer_are_one_message_and_loops_keep_their_order() -> None:
    thought = reasoning(content=[{"type": "reasoning_text", "text": "First a look."}])
    answer = (thought, said("I look."), call(1), call(2))
    made = history(USER, *answer, result(2, "b"), result(1, "a"))
    message = made.messages[1]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "First a look.")
    assert [entry["id"] for entry in message["tool_calls"]] == ["call_1", "call_2"]
    assert [entry["role"] for entry in made.messages] == ["user", "assistant", "tool", "tool"]
    assert [entry["content"] for entry in normalize_messages(made.messages)[2:]] == ["a", "b"]
    assert made.places == ["input[0]", "input[1]", "input[5]", "input[6]"]
    made = history(USER, call(1), result(1), call(2), result(2), said("Done."), said("Really."))
    roles = ["user", *["assistant", "tool"] * 2, "assistant"]
    assert [message["role"] for message in made.messages] == roles
    assert made.messages[-1]["content"] == "Done.\n\nReally."
    words = "A line with\n</think>\nalone ends it."
    message = normalize_messages(history(USER, said(words), USER).messages)[1]
    # Without a reasoning field the template would split the content.
    assert (message["content"], message["reasoning_content"]) == (words, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "reasoning_text", "text": "A thought."}], **summary("Other.")},
        {"content": None, "encrypted_content": SIGNER.signature("A thought.", is_hidden=True)},
        {"encrypted_content": "of another server", **summary("A thought.")},
    ],
    ids=["content", "encrypted", "summary"],
)
def test_reasoning_comes_back_in_any_form(fields: dict[str, Any]) -> None:
    message = assistant_of(USER, reasoning(**fields), call(1), result(1))
    assert message["reasoning_content"] == "A thought."


def test_instructions_custom_tools_and_truncated_calls() -> None:
    custom = {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "***"}
    items = (USER, call(1, namespace="home"), custom, result(1), result(2, of="custom_tool"))
    made = history(*items, instructions="Be")
    assert made.messages[0] == {"role": "system", "content": "Be"}
    first, second = (entry["function"] for entry in made.messages[2]["tool_calls"])
    assert first["name"] == "home.read"
    assert second == {"name": "patch", "arguments": {"input": "***"}}
    truncated = call(1, status="incomplete", arguments='{"n": ')
    assert "tool_calls" not in assistant_of(USER, said("Let me see."), truncated, USER)
    message = assistant_of(USER, truncated, result(1, "not JSON"), USER)
    assert message["tool_calls"][0]["id"] == "call_1"


@pytest.mark.parametrize(
    "kinds", read_table("responses_history.calls_that_ran_elsewhere_are_passed_over")
)
def test_calls_that_ran_elsewhere_are_passed_over(kinds: str) -> None:
    made = history(USER, *({"type": kind, "id": kind} for kind in kinds.split()), said("Found."))
    assert [message["role"] for message in made.messages] == ["user", "assistant"]


NOTE = "<system-reminder>\ndone\n</system-reminder>"


@pytest.mark.parametrize(
    ("items", "shown"),
    read_table("responses_history.items_of_unknown_type_are_shown_or_passed_over"),
)
def test_unknown_items_are_shown_or_skipped(items: list[dict[str, Any]], shown: list[str]) -> None:
    made = normalize_messages(history(USER, *items).messages)
    texts = [message["content"] for message in made]
    assert texts == (shown if len(texts) == len(shown) else [*shown[:-2], f"ok\n\n{NOTE}"])


@pytest.mark.parametrize(
    ("item", "place"),
    read_table("responses_history.refuses_what_cannot_be_shown_by_its_place"),
    ids=str,
)
def test_refuses_what_cannot_be_shown_by_its_place(item: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        history(item)
    assert error.value.param == f"input[0]{place}"


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_model_is_shown_tools_that_clients_run_and_may_have_to_call_one(name: str) -> None:
    own = {"type": name, "execution": "client"}
    tools, calls = request(own, LOOKUP, tool_choice={"type": name}).choice()
    assert [tool["function"]["name"] for tool in tools or ()] == [name, "look"]
    assert calls.name == name
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": name}]}
    assert request(own, LOOKUP, tool_choice=allowed).choice()[1].allowed == (name,)
    with pytest.raises(InvalidRequestError, match="not declared"):
        request(LOOKUP, tool_choice={"type": name}).choice()


@pytest.mark.parametrize(("kind", "names"), [("local", ["shell"]), ("container_auto", [])])
def test_shell_in_a_container_of_openai_is_left_out(kind: str, names: list[str]) -> None:
    shell = {"type": "shell", "environment": {"type": kind}}
    assert [tool.name for tool in request(shell).declared_tools] == names


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_call_comes_back_as_the_model_wrote_it(name: str) -> None:
    item = client_call(name, ARGUMENTS[name])
    assert item["type"] == f"{name}_call" and item["call_id"] == "call_1"
    if name == "tool_search":
        found = {"type": "tool_search_output", "call_id": "call_1", "tools": []}
    else:
        found = result(1, OUTPUTS[name], of=name)
    (made,) = assistant_of(USER, item, found)["tool_calls"]
    assert made["function"]["name"] == name
    # The arguments keep their order, so that the prefix stays cached.
    assert json.dumps(made["function"]["arguments"]) == json.dumps(ARGUMENTS[name])


@pytest.mark.parametrize(
    ("name", "arguments"),
    read_table("responses_history.call_that_no_client_could_run_has_no_item_of_its_own"),
    ids=str,
)
def test_call_that_no_client_could_run_has_no_item_of_its_own(name: str, arguments: object) -> None:
    assert client_call(name, arguments) == {}
    assert build_call_item(name, '{"commands": [', item_id="", status="", call_id="") is None


def test_results_have_the_output_and_the_exit_code() -> None:
    patch = {**client_call("apply_patch", ARGUMENTS["apply_patch"]), "call_id": "call_2"}
    printed = [
        {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}},
        {"stdout": "b", "stderr": "", "outcome": {"type": "timeout"}},
    ]
    failed = {"type": "apply_patch_call_output", "call_id": "call_2", "status": "failed"}
    shell = client_call("shell", ARGUMENTS["shell"])
    made = history(USER, shell, patch, result(1, printed, of="shell"), failed)
    results = [message["content"] for message in made.messages if message["role"] == "tool"]
    assert results == ["a\nno\n[exit code 2]\nb\n[timed out]", "Error"]


@pytest.mark.parametrize("name", ["lsh_1", "call_1"])
def test_results_of_local_shells_name_the_call_or_its_item(name: str) -> None:
    shell = {**client_call("local_shell", ARGUMENTS["local_shell"]), "id": "lsh_1"}
    output = {"type": "local_shell_call_output", "id": name, "output": "a"}
    assert normalize_messages(history(USER, shell, output).messages)[2]["content"] == "a"


@pytest.mark.parametrize("kind", ["function_call", "shell_call"])
@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_refuses_ids_that_are_no_text(kind: str, status: str) -> None:
    made = {"type": kind, "name": "f", "arguments": "{}", "action": {}, "status": status}
    output = {"type": f"{kind}_output", "output": "x"}
    for call_id, result_id in (("c", ["c"]), (["c"], "c"), (["c"], ["c"])):
        items = history(USER, {**made, "call_id": call_id}, {**output, "call_id": result_id})
        with pytest.raises(InvalidRequestError):
            normalize_messages(items.messages)


def more_tools(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def update(**fields: Any) -> dict[str, Any]:
    return {"type": "configuration_update", **fields}


def test_items_add_tools_and_the_last_configuration_holds() -> None:
    other, patch = {**LOOKUP, "name": "other"}, {"type": "apply_patch"}
    params = settled(
        request(LOOKUP), USER, more_tools({**LOOKUP, "strict": True}),
        more_tools(patch, {"type": "mcp"}), {"type": "tool_search_output", "tools": [other, patch]},
        {"type": "tool_search_output"},
    )  # fmt: skip
    assert [tool.shown_name for tool in params.declared_tools] == ["look", "apply_patch", "other"]
    assert params.tools == [LOOKUP, patch, other]
    assert history(USER, more_tools(), USER).messages == [USER, USER]
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


def test_tools_that_a_search_finds_are_shown_in_its_result() -> None:
    """The tools at the start of the prompt, and so the cached prefix, must not change."""
    deferred, other = {**LOOKUP, "defer_loading": True}, {**LOOKUP, "name": "other"}
    params = request(SEARCH, deferred)
    call_item = client_call("tool_search", {"query": "look"})
    assert call_item["execution"] == "client"
    found = {"type": "tool_search_output", "call_id": "call_1", "tools": [deferred, other]}
    items = [USER, call_item, found, more_tools({**LOOKUP, "name": "third"})]
    settings = apply_settings(params, placed(*items))
    tools, _ = settings.params.choice()
    names = [tool["function"]["name"] for tool in tools or ()]
    assert names == ["tool_search", "look", "other", "third"] and tools
    assert tools[0]["function"]["description"] == "Searches."
    assert settings.later == {"look", "other", "third"}
    made = history(*items, tool_notes=settings.notes).messages
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "system"]
    assert (
        made[2]["content"] == show_tools(tools[1:3]) and show_tools(tools[3:]) in made[3].values()
    )
    assert apply_settings(request(LOOKUP, deferred), placed(USER)).later == frozenset()
    first = apply_settings(request(), placed(USER, more_tools(LOOKUP), more_tools(other)))
    assert first.later == {"other"} and list(first.notes) == [2]
    hosted = {"type": "tool_search_output", "call_id": None, "tools": [other]}
    shown = apply_settings(request(LOOKUP), placed(USER, hosted))
    assert history(USER, hosted, tool_notes=shown.notes).messages[1]["role"] == "system"


@pytest.mark.parametrize(
    ("item", "place"),
    read_table("responses_history.refuses_wrong_settings_by_their_place"),
    ids=str,
)
def test_refuses_wrong_settings_by_their_place(item: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        settled(request(LOOKUP), item)
    assert caught.value.param == f"input[0]{place}"


LONG = "x" * 5000


def kept(
    parent: StoredTurn | None, number: int, *, size: int = 10, tenant: str = ""
) -> StoredResponse:
    items = [{"id": f"{name}{number}", "text": name[-1] * size} for name in ("in", "out")]
    given, said = (json.dumps([item]).encode() for item in items)
    turn = StoredTurn(parent, input_items=given, output_items=said)
    return StoredResponse(b'{"body": 1}', turn, [f"out{number}"], tenant)


def test_a_full_store_removes_responses_and_later_states_replace_earlier() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(3):
        store.put(f"r{number}", kept(None, number))
    assert store.get("r0")  # used again
    store.put("r3", kept(None, 3))
    assert [name for name in ("r0", "r1", "r2", "r3") if store.get(name)] == ["r0", "r2", "r3"]
    # Ids that the store did not issue are not found.
    assert store.items({"out0", "out1", "out3", "in0", "x"}) == {
        f"out{number}": {"id": f"out{number}", "text": "t" * 10} for number in (0, 3)
    }
    assert store.items({"out0"}, tenant="another") == {}
    store = ResponseStore()
    first = kept(None, 1)
    store.put("r", first)
    store.put("r", StoredResponse(b"{}", first.turn, ()))
    again = store.get("r")
    assert again and again.body == b"{}" and len(store) == 1
    assert store.num_bytes == 2 + first.turn.num_bytes


def test_bytes_are_bounded_and_come_back_to_zero() -> None:
    store = ResponseStore(max_bytes=5000)
    for number in range(20):
        store.put(f"r{number}", kept(None, number, size=500))
        assert store.num_bytes <= 5000
    assert 0 < len(store) < 5
    store.put("huge", kept(None, 99, size=10_000))
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_full_store_removes_responses_of_the_largest_tenant() -> None:
    for limits, size in (({"max_bytes": 5000}, 500), ({"max_responses": 4}, 10)):
        store = ResponseStore(**limits)
        store.put("r", kept(None, 0, size=size, tenant="a"))
        for number in range(20):
            store.put(f"r{number}", kept(None, number, size=size, tenant="b"))
        assert store.get("r", tenant="a") and store.get("r19", tenant="b")
        assert store.get("r", tenant="b") is None and not store.remove("r", tenant="b")
        assert len(store) < 6


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {"type": "web_search_call", "id": "w", "text": LONG},
            {"type": "web_search_call", "id": "w"},
        ),
        ({"role": "user", "content": LONG, "x": [LONG]}, {"role": "user", "content": LONG}),
        (
            {"content": [{"type": "input_image", "image_url": LONG}, {"text": LONG, "y": LONG}]},
            {"content": [{"type": "input_image"}, {"text": LONG}]},
        ),
        ({"type": "function_call_output", "output": LONG}, None),
    ],
    ids=["passed over", "field", "parts", "result"],
)
def test_large_fields_that_are_not_shown_are_not_stored(item: Item, shown: Item | None) -> None:
    assert decode_items(encode_shown([item])) == [item if shown is None else shown]
    tool = {"type": "function", "name": "f", "parameters": {"a": LONG}}
    group = {"type": "namespace", "name": "n", "tools": [{**tool, "x": LONG}]}
    assert trim_setting({**group, "x": LONG}) == {**group, "tools": [tool]}
    assert trim_setting({"type": "web_search", "parameters": LONG}) == {"type": "web_search"}


def test_earlier_turns_are_shared_and_outlive_their_responses() -> None:
    store = ResponseStore()
    parent: StoredTurn | None = None
    for number in range(3000):  # The chain is deeper than Python's stack.
        response = kept(parent, number)
        store.put(f"r{number}", response)
        parent = response.turn
    whole = store.num_bytes
    for number in range(2999):
        assert store.remove(f"r{number}")
    last = store.get("r2999")
    assert last and whole - store.num_bytes == 2999 * len(last.body)
    items = last.turn.conversation()
    assert [item["id"] for item in items[:4]] == ["in0", "out0", "in1", "out1"]
    assert len(items) == 6000
    assert store.remove("r2999") and not store.remove("r2999")
    assert store.num_bytes == 0


RESPONSE = "resp_" + "ab" * 23 + "07"


RESULT = {"type": "function_call_output", "call_id": "c", "output": {"n": 2}}
RESULT |= {"status": "incomplete"}


def items_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return build_page(items, {"order": "asc", "limit": "100"}, response_id=RESPONSE).data


def users(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"number {number}"} for number in range(count)]


def test_items_are_completed_and_their_ids_never_repeat() -> None:
    user, assistant, image, called, result, thought = items_of(
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"n": 1}},
        RESULT,
        {"type": "reasoning", "encrypted_content": "x"},
    )
    assert (user["type"], user["status"]) == ("message", "completed")
    assert user["content"] == [{"type": "input_text", "text": "Hello"}]
    assert assistant["content"] == [{"type": "output_text", "text": "Hi", "annotations": []}]
    assert image["content"][0]["detail"] == "auto"
    assert (called["arguments"], result["output"]) == ('{"n": 1}', '{"n": 2}')
    assert result["status"] == "incomplete"
    assert thought["summary"] == []
    items = [*users(2), {"role": "user", "content": "x", "id": "msg_mine"}]
    ids = [item["id"] for item in items_of(*items, items[-1])]
    assert ids[2] == "msg_mine" and len(set(ids)) == 4
    assert ids == [item["id"] for item in items_of(*items, items[-1])]
    # The last two characters of an id name the server process that owns the response.
    assert all(item_id.endswith(RESPONSE[-2:]) for item_id in (*ids[:2], ids[3]))


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_add_up_to_all_items(order: str) -> None:
    items, texts = users(25), []
    query = {"order": order}
    while True:
        page = build_page(items, query, response_id=RESPONSE)
        texts += [item["content"][0]["text"] for item in page.data]
        assert (page.first_id, page.last_id) == (page.data[0]["id"], page.data[-1]["id"])
        if not page.has_more:
            break
        assert len(page.data) == 20
        query["after"] = str(page.last_id)
    expected = [item["content"] for item in items]
    assert texts == (expected if order == "asc" else expected[::-1])


def test_the_last_item_comes_first_and_nothing_after_the_end() -> None:
    page = build_page(users(3), {"limit": "1"}, response_id=RESPONSE)
    assert page.data[0]["content"][0]["text"] == "number 2" and page.has_more
    last = items_of(*users(3))[0]["id"]
    page = build_page(users(3), {"after": last}, response_id=RESPONSE)
    assert (page.data, page.first_id, page.last_id, page.has_more) == ([], None, None, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "²"), ("after", "msg_other")],
)
def test_invalid_page_queries_are_refused(field: str, value: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_page(users(2), {field: value}, response_id=RESPONSE)
    assert caught.value.param == field
