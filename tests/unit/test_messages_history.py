import tracemalloc
import typing
from typing import Any

import msgspec
import pytest

from negamax.api.common.history import History
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.messages.history import build_history
from negamax.api.dialects.messages.schema import CountRequest
from negamax.api.schemas.answers import build_error, build_message_error
from negamax.api.schemas.tools import show_tools
from negamax.base.errors import ContextLengthError, InvalidRequestError
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.text.messages import normalize_messages
from tests.tables import read_table

SIGNER = ThoughtSigner("nano")


def thoughts(*, shows_earlier: bool = False) -> HiddenThoughts:
    return HiddenThoughts(SIGNER, context_length=100, shows_earlier=shows_earlier)


def history(*messages: dict[str, Any], **options: Any) -> History:
    return build_history(messages, **{"system": None, "thoughts": thoughts(), **options})


def shown(*messages: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in history(*messages).messages]


def results_of(made: History) -> list[str]:
    messages = normalize_messages(made.messages)
    return [message["content"] for message in messages if message["role"] == "tool"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": arguments}


def result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": content, **more}


def test_billing_line_of_claude_code_does_not_change_the_prompt() -> None:
    def prompt(cch: str, *, as_blocks: bool) -> list[dict[str, Any]]:
        line = f"x-anthropic-billing-header: cc_version=2.1.7; cc_entrypoint=cli; cch={cch};"
        rest = "You are Claude Code."
        system = [text(line), text(rest)] if as_blocks else f"{line}\n{rest}"
        return history({"role": "user", "content": "Hi"}, system=system).messages

    first = prompt("1", as_blocks=True)
    assert first == prompt("2", as_blocks=True) == prompt("3", as_blocks=False)
    assert first[0] == {"role": "system", "content": "You are Claude Code."}


def test_thinking_text_and_calls_become_one_message_before_their_results() -> None:
    signed = {"type": "thinking", "thinking": "First a look.", "signature": "from somewhere else"}
    made = history(
        user(text("Read both")),
        assistant(signed, text("I read them."), call(1, path="a")),
        assistant(call(2, path="b")),  # Adjacent messages of one role are one turn.
        user(result(2, "B")),
        user(result(1, [text("A"), text("more")])),
    )
    message = made.messages[1]
    assert message["reasoning_content"] == "First a look."
    assert message["content"] == "I read them."
    arguments = [entry["function"]["arguments"] for entry in message["tool_calls"]]
    assert arguments == [{"path": "a"}, {"path": "b"}]
    assert results_of(made) == ["A\nmore", "B"]
    assert made.places == ["messages[0]", "messages[1]", "messages[3]", "messages[4]"]
    words = "A line with\n</think>\nalone ends it."
    made = history(user(text("Which line?")), assistant(text(words)), user(text("Thanks")))
    message = normalize_messages(made.messages)[1]
    # Without a reasoning field the template would split the content.
    assert (message["content"], message["reasoning_content"]) == (words, "")


def test_results_keep_their_reminders_failures_and_tabs() -> None:
    reminder = text("<system-reminder>\nThe list is empty.\n</system-reminder>")
    last = user(reminder, result(1, "done"), text("Now stop."))
    made = history(user(text("Go")), assistant(call(1)), last)
    normal = normalize_messages(made.messages)
    assert [message["role"] for message in normal] == ["user", "assistant", "tool", "user"]
    assert results_of(made) == [f"done\n\n{reminder['text']}"]
    assert normal[3]["content"] == "Now stop."
    assert [role for role, _ in shown(user(reminder, text("Go")))] == ["user"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    last = user(
        result(1, "no such file", is_error=True),
        result(2, "<tool_use_error>cancelled</tool_use_error>", is_error=True),
        result(3, [text("a picture:"), image]),
        result(4, None, is_error=True),
    )
    made = history(user(text("Go")), assistant(call(1), call(2), call(3), call(4)), last)
    first, cancelled, picture, empty = results_of(made)
    assert (first, empty) == ("Error: no such file", "Error")
    assert cancelled == "<tool_use_error>cancelled</tool_use_error>"
    assert picture.startswith("a picture:\n[an image")
    news = {"tab_id": "1", "title": "News", "url": "https://a.example", "active": True}
    state = {"type": "browser_state", "tabs": [news, {"tab_id": "2", "title": "", "url": ""}]}
    made = history(user(text("Go")), assistant(call(1)), user(result(1, [text("done"), state])))
    lines = "[the tab 1 News https://a.example, which is active]\n[the tab 2]"
    assert results_of(made) == [f"done\n{lines}"]


def system(words: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "system", **fields} | ({} if words is None else {"content": words})


A, B, C = user(text("A")), assistant(text("B")), user(text("C"))


@pytest.mark.parametrize(
    ("messages", "contents"),
    read_table("messages_history.system_messages_that_apply"),
    ids=["inline", "until the user writes", "after the user wrote", "never cleared"],
)
def test_system_messages_that_apply(messages: list[dict[str, Any]], contents: list[str]) -> None:
    assert [content for _, content in shown(*messages)] == contents


def test_a_system_message_may_have_an_effort_instead_of_text() -> None:
    effort = system(output_config={"effort": "high"})
    assert [role for role, _ in shown(A, effort, C)] == ["user"]
    for empty in (system(), system(output_config={})):
        with pytest.raises(InvalidRequestError, match=r"messages\[1\].content"):
            history(A, empty)


def test_images_are_refused_for_a_model_that_could_see_them() -> None:
    for message, place in (
        (user(text("Look:"), {"type": "image"}), "content[1]"),
        (user(result(1, [text("a"), {"type": "image"}])), "content[0].content[1]"),
        (assistant(text("Here:"), {"type": "image"}), "content[1]"),
    ):
        with pytest.raises(
            InvalidRequestError, match="has type 'image'; MiniMax-M3 supports"
        ) as caught:
            history(message, family=MINIMAX_M3_FAMILY)
        assert str(caught.value).startswith(f"messages[0].{place} has type 'image'")
        history(message)


def test_blocks_of_other_servers_are_passed_over() -> None:
    blocks = (
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
        {"type": "mcp_tool_listing", "mcp_server_name": "home", "tools": []},
        {"type": "mcp_tool_use", "id": "mcp_1", "server_name": "home", "name": "f"},
        {"type": "mcp_tool_result", "tool_use_id": "mcp_1", "content": []},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "compaction", "content": None},
    )
    made = history(user(text("Go")), assistant(*blocks, text("Found"), text(" it.")))
    expected = {"role": "assistant", "content": "Found it.", "reasoning_content": ""}
    assert made.messages[1] == expected


@pytest.mark.parametrize(
    ("message", "content"), read_table("messages_history.text_of_blocks_is_shown"), ids=str
)
def test_text_of_blocks_is_shown(message: dict[str, Any], content: str) -> None:
    assert shown(message) == [(message["role"], content)]


@pytest.mark.parametrize(
    ("message", "place"),
    read_table("messages_history.refuses_what_cannot_be_shown_by_its_place"),
    ids=str,
)
def test_refuses_what_cannot_be_shown_by_its_place(message: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        history(message)
    assert error.value.param == f"messages[0].{place}"


@pytest.mark.parametrize(
    ("status", "kind"),
    read_table("messages_history.errors_have_anthropics_types"),
)  # fmt: skip
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    def built(**fields: Any) -> Any:
        error = build_error("too much", error_type="whatever", **fields)
        made = build_message_error(status, error, request_id="r")
        return msgspec.json.decode(msgspec.json.encode(made))

    error = {"type": kind, "message": "too much"}
    assert built() == {"type": "error", "error": error, "request_id": "r"}
    assert built(code="too_much")["error"]["details"] == {"error_code": "too_much"}


def test_only_the_model_that_signed_a_thought_can_unpack_it() -> None:
    thought = "One \U0001f642 thought.\n" * 50
    made = history(user(text("Go")), assistant(hidden(thought), text("Ok")))
    assert made.messages[1]["reasoning_content"] == thought
    signature = SIGNER.signature("x")
    assert signature == ThoughtSigner("nano").signature("x")
    assert signature not in (ThoughtSigner("micro").signature("x"), SIGNER.signature("y"))
    signed = SIGNER.signature("x" * 100, is_hidden=True)
    others = ThoughtSigner("micro").signature("x", is_hidden=True)
    broken = ("", "nm1h.", "nm1h.%%%", signed[:-4], signed[:10] + "AAAA" + signed[14:])
    for signature in (others, SIGNER.signature("x"), *broken):
        assert thoughts().unpack(signature, param="") is None


def hidden(thought: str) -> dict[str, Any]:
    signature = SIGNER.signature(thought, is_hidden=True)
    return {"type": "thinking", "thinking": "", "signature": signature}


def test_thoughts_that_the_prompt_shows_are_unpacked_within_one_budget() -> None:
    for blocks in ([hidden("x" * 1_000_000)], [hidden("x" * 900), hidden("y" * 900)]):
        with pytest.raises(ContextLengthError, match=r"more than 1600 bytes") as refused:
            history(user(text("Go")), assistant(*blocks, text("Ok")))
        assert refused.value.param == "messages[1]"
    made = history(user(text("Go")), assistant(hidden("x" * 800), hidden("y" * 800), text("Ok")))
    assert made.messages[1]["reasoning_content"] == "x" * 800 + "\n\n" + "y" * 800
    earlier = [user(text("Go")), assistant(hidden("x" * 1_000_000), text("Ok"))]
    now = [user(text("And now?")), assistant(hidden("short"), call(1)), user(result(1, "ok"))]
    made = history(*earlier, *now)
    answers = [message for message in made.messages if message["role"] == "assistant"]
    assert [answer["reasoning_content"] for answer in answers] == ["", "short"]
    with pytest.raises(ContextLengthError):
        history(*earlier, *now, thoughts=thoughts(shows_earlier=True))


def test_a_decompression_bomb_is_unpacked_only_up_to_the_budget() -> None:
    bomb = SIGNER.signature("x" * 50_000_000, is_hidden=True)
    tracemalloc.start()
    try:
        with pytest.raises(ContextLengthError):
            thoughts().unpack(bomb, param="messages[0]")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(bomb)
    finally:
        tracemalloc.stop()


HELLO = [{"role": "user", "content": "Hi"}]
NEW_EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
RUN_BY_CLIENTS = ("bash_2", "text_editor_2", "memory_2")


def declared() -> list[dict[str, str]]:
    """Return type and name of each tool of the anthropic package that this server supports."""
    from anthropic.types import tool_union_param
    from anthropic.types.beta import beta_tool_union_param

    unions = (beta_tool_union_param.BetaToolUnionParam, tool_union_param.ToolUnionParam)
    tools = {}
    for tool in (each for union in unions for each in typing.get_args(union)):
        hints = typing.get_type_hints(tool)
        kinds = typing.get_args(hints.get("type"))
        if kinds and str(kinds[0]).startswith(RUN_BY_CLIENTS):
            tools[kinds[0]] = {"type": kinds[0], "name": typing.get_args(hints["name"])[0]}
    return list(tools.values())


def request(*messages: dict[str, Any], **fields: Any) -> CountRequest:
    return CountRequest.parse({"model": "nano", "messages": [*HELLO, *messages], **fields})


def offered(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in request(tools=list(tools)).offered_tools or []]


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


def test_editors_and_the_memory_tool_have_the_fields_of_their_version() -> None:
    (old,) = offered({"type": "text_editor_20250124", "name": "str_replace_editor"})
    (new,) = offered(NEW_EDITOR)
    before, after = (tool["parameters"]["properties"] for tool in (old, new))
    assert "insert_text" not in before and "insert_text" in after
    assert "undo_edit" in before["command"]["enum"]
    assert "undo_edit" not in after["command"]["enum"]
    (bounded,) = offered({**NEW_EDITOR, "max_characters": 9000})
    assert "9000" in bounded["description"]
    from anthropic.types.beta import BetaMemoryTool20250818Command

    (function,) = offered({"type": "memory_20250818", "name": "memory"})
    properties = function["parameters"]["properties"]
    commands, fields = set(), set()
    for model in typing.get_args(typing.get_args(BetaMemoryTool20250818Command)[0]):
        fields |= set(model.model_fields)
        commands |= set(typing.get_args(model.model_fields["command"].annotation))
    assert set(properties["command"]["enum"]) == commands
    assert set(properties) == fields


def test_the_latest_definition_of_a_tool_counts_and_server_tools_are_left_out() -> None:
    left_out = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "computer_toolset_20260801"},
        {"type": "bash_29990101", "name": "bash"},
    ]
    assert offered(*left_out) == []
    again = defined(message_tool("a", description="Newer."))
    (tool,) = request(again, tools=[message_tool("a")]).offered_tools or []
    assert tool["function"]["description"] == "Newer."


@pytest.mark.parametrize("tool", [{"name": "bash"}, {"type": "custom", "name": "bash"}], ids=str)
def test_a_tool_that_the_client_defines_needs_a_schema(tool: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="input_schema"):
        offered(tool)


def test_the_effort_of_the_last_system_message_that_has_one_counts() -> None:
    def effort(*messages: dict[str, Any]) -> str | None:
        return request(*messages, output_config={"effort": "low"}).thinking_choice.effort

    high, unchanged = (system("x", output_config=each) for each in ({"effort": "high"}, {}))
    assert effort() == effort(unchanged) == "low"
    assert effort(high, *HELLO, unchanged) == "high"
    for config, place in (({"effort": "huge"}, ".effort"), (3, "")):
        with pytest.raises(InvalidRequestError) as caught:
            effort(system("x", output_config=config))
        assert caught.value.param == f"messages[1].output_config{place}"


def message_tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


def change(kind: str, **tool: Any) -> dict[str, Any]:
    block = {"type": f"tool_{kind}", "tool": {"type": "tool_reference", **tool}}
    return system([block])


def defined(tool: object) -> dict[str, Any]:
    return change("addition", type="tool_definition", definition=tool)


@pytest.mark.parametrize(
    ("changes", "names"),
    read_table("messages_history.messages_change_tools"),
    ids=["added", "removed", "back", "added and removed", "of a server", "unknown", "of MCP"],
)
def test_messages_change_tools(changes: list[dict[str, Any]], names: list[str]) -> None:
    tools = [message_tool("a"), message_tool("b")]
    offered_tools = request(*changes, tools=tools).offered_tools or []
    assert [tool["function"]["name"] for tool in offered_tools] == names


def test_deferred_tools_are_shown_where_they_are_found() -> None:
    """The tools at the start of the prompt, and so the cached prefix, must not change."""
    deferred = message_tool("b", defer_loading=True)
    reference = {"type": "tool_reference", "tool_name": "b"}
    found = (assistant(call(1)), user(result(1, [reference, reference])))
    tools = [message_tool("a"), deferred]
    params = request(*found, change("removal", name="a"), tools=tools)
    effect = params.tools_in_effect
    (shown,), (called,) = effect.shown, params.offered_tools or []
    assert (shown["function"]["name"], called["function"]["name"]) == ("a", "b")
    made = history(*params.messages, tool_notes=effect.notes).messages
    assert made[-2]["content"] == show_tools([called]) + "\n[the tool b]"
    assert made[-1] == system("[the tool a can no longer be called]")
    server_search = {"type": "tool_search_tool_regex_20251119", "name": "search"}
    for tools in ([deferred], [message_tool("a"), deferred, server_search]):
        effect = request(tools=tools).tools_in_effect
        assert effect.shown == list(effect.callable.values())
    effect = request(defined(message_tool("c")), defined(message_tool("d"))).tools_in_effect
    assert [tool["function"]["name"] for tool in effect.shown] == ["c"] and len(effect.notes) == 1


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        (None, ""),
        ({"type": "tool_definition"}, ".definition"),
        ({"type": "tool_definition", "definition": {"name": "c"}}, ".definition.input_schema"),
    ],
    ids=str,
)
def test_a_wrong_change_of_tools_is_named_by_its_place(tool: object, place: str) -> None:
    addition = system([{"type": "tool_addition", "tool": tool}])
    with pytest.raises(InvalidRequestError) as error:
        _ = request(addition).offered_tools
    assert error.value.param == f"messages[1].content[0].tool{place}"
