"""Run MiniMax's acceptance suite for text, by check ids: tools, calls and results of calls."""

import json
from typing import Any

import httpx
import pytest

from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.api_support import (
    CHAT,
    CHAT_DIALECT,
    FUNCTION,
    GREEDY,
    QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    deltas_of,
    join_chat,
    stream,
)
from tests.e2e.conftest import MODEL
from tests.e2e.test_acceptance_suite import (
    ASKED,
    RESULT,
    answered,
    call,
    called,
    message_of,
    refused,
    rendered,
)
from tests.tables import read_table


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    "declared",
    read_table("acceptance_tools.13_05_13_06_16_11_accepts_sparse_tools"),
    ids=["no parameters", "no description", "name only", "16_11"],
)
def test_13_05_13_06_16_11_accepts_few_fields(http: httpx.Client, declared: dict[str, Any]) -> None:
    answered(http, messages=WEATHER_QUESTION, tools=[declared])


def test_13_12_history_may_show_tools_that_are_not_declared(http: httpx.Client) -> None:
    answered(http, messages=[*ASKED, RESULT])
    answered(http, messages=[*ASKED, RESULT], tools=[tool("other")])


def test_13_tools_keep_the_key_order_of_the_client(http: httpx.Client) -> None:
    parameters = {"required": ["z"], "properties": {"z": {}, "a": {}}, "type": "object"}
    function = {"parameters": parameters, "name": "f", "b": 1, "a": 2}
    prompt = rendered(http, tools=[{"function": function, "type": "function"}])
    assert json.dumps(function) in prompt


def test_13_13_a_call_is_reported_although_no_tool_is_declared(http: httpx.Client) -> None:
    tags = Tokenizer.from_folder(EMBEDDED["nano"])
    names = ("<minimax:tool_call>", "</minimax:tool_call>")
    opener, closer = ({"type": "token", "token": tags.token_id(name)} for name in names)
    text = '\n<invoke name="look_up">\n<parameter name="id">007</parameter>\n</invoke>\n'
    elements = [opener, {"type": "const_string", "value": text}, closer]
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    request = {"structured_outputs": {"structural_tag": form}, "max_tokens": 200}
    (choice,) = answered(http, messages=[*ASKED, RESULT], **request)["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "look_up", "arguments": '{"id": "007"}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    # Without declared tools and calls, the text is content.
    (choice,) = answered(http, **request)["choices"]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == f"<minimax:tool_call>{text}</minimax:tool_call>"


def test_15_thinking_and_tools_over_several_turns(client: Any) -> None:
    options = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    messages: list[Any] = [*WEATHER_QUESTION]
    for is_answer in (False, True, False):
        (choice,) = client.chat.completions.create(messages=messages, **options).choices
        assert choice.finish_reason == ("stop" if is_answer else "tool_calls")
        messages.append(choice.message.model_dump(exclude_none=True))
        if is_answer:
            assert "19" in choice.message.content
            messages += WEATHER_QUESTION
        else:
            (made,) = choice.message.tool_calls
            assert choice.message.model_extra["reasoning"]
            messages.append({**RESULT, "tool_call_id": made.id})


@pytest.mark.parametrize(
    ("messages", "param"),
    read_table("acceptance_tools.16_broken_history_is_refused"),
    ids=["16_01", "16_08", "16_09", "16_09 none", "no call"],
)
def test_16_broken_history_is_refused(http: httpx.Client, messages: list[Any], param: str) -> None:
    assert refused(http, messages=messages)["param"] == param


def test_16_results_in_any_order_are_put_in_the_order_of_the_calls(http: httpx.Client) -> None:
    second = {**RESULT, "tool_call_id": "call_2", "content": "ROMAN"}
    results = [second, {**RESULT, "content": "PARISIAN"}]
    messages = [*WEATHER_QUESTION, called(call(), call(number=2)), *results]
    answered(http, messages=messages)
    prompt = rendered(http, messages=messages)
    assert 0 < prompt.index("PARISIAN") < prompt.index("ROMAN")


def test_16_required_call_is_made_after_thinking(http: httpx.Client) -> None:
    body = CHAT_DIALECT.body(functions=(FUNCTION,), tool_choice="required", limit=300)
    said = CHAT_DIALECT.ask(http, body)
    assert said.reason == "tool_calls" and said.calls and said.reasoning
    for _, arguments in said.calls:
        assert isinstance(json.loads(arguments)["city"], str)
    assert CHAT_DIALECT.ask(http, body, is_streamed=True).calls == said.calls


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_16_named_call_is_the_answer_and_ends_with_stop(http: httpx.Client, thinking: str) -> None:
    now = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    body = CHAT_DIALECT.body(WEATHER_QUESTION, functions=(FUNCTION, now), limit=200)
    body |= {"tool_choice": tool("now"), "thinking": {"type": thinking}}
    said = CHAT_DIALECT.ask(http, body)
    assert (said.calls, said.reason) == ([("now", "{}")], "stop")


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": [WEATHER]}], ids=str)
def test_16_14_refuses_undeclared_forced_tools(http: httpx.Client, tools: dict[str, Any]) -> None:
    error, has_none = refused(http, **tools, tool_choice=tool("other")), not tools.get("tools")
    words = "there are no tools to call" if has_none else "'other', which is not declared"
    assert error["param"] == "tool_choice" and words in error["message"]
    if has_none:
        assert refused(http, **tools, tool_choice="required")["param"] == "tool_choice"


@pytest.mark.parametrize("tool_choice", [pytest.param("auto", marks=pytest.mark.full), "required"])
def test_16_without_parallel_calls_there_is_one(http: httpx.Client, tool_choice: str) -> None:
    text = "Get the weather for Berlin, Tokyo and Lima."
    body = {"messages": [{"role": "user", "content": text}], "tools": [WEATHER]}
    body |= {"tool_choice": tool_choice, "max_tokens": 400}
    one = {**GREEDY, **body, "parallel_tool_calls": False}
    assert len(CHAT_DIALECT.ask(http, one, is_streamed=True).calls) == 1
    assert len(message_of(http, **body)["tool_calls"]) > 1


def test_packets_of_a_long_string_argument_grow_and_are_never_huge(http: httpx.Client) -> None:
    """Check packet sizes; a test with a fake clock covers the number of tiny packets."""
    path = {"type": "string", "maxLength": 9}
    properties = {"path": path, "content": {"type": "string", "minLength": 600, "maxLength": 650}}
    parameters = {"type": "object", "properties": properties, "required": ["path", "content"]}
    write = tool("write", parameters=parameters | {"additionalProperties": False})
    body = {"messages": QUESTION, "tools": [write], "tool_choice": "required", "max_tokens": 1500}
    body |= {"parallel_tool_calls": False, "stream_options": {"include_usage": True}}
    events = stream(http, CHAT, **body)
    deltas = deltas_of(events)
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    sizes = [len(piece["arguments"]) for piece in pieces if piece["arguments"]]
    assert len(sizes) > 5 and max(sizes) <= 200  # A single burst would be four packets.
    (made,) = join_chat(events)["choices"][0]["message"]["tool_calls"]
    assert len(json.loads(made["function"]["arguments"])["content"]) >= 600
