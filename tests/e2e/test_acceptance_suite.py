"""Run MiniMax's acceptance suite for text, by check ids, without checks of model quality."""

import json
from typing import Any

import httpx
import pytest

from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.api_support import (
    CHAT,
    CHAT_DIALECT,
    COMPLETIONS,
    FUNCTION,
    GREEDY,
    QUESTION,
    RESULT_TEXT,
    TOTAL,
    WEATHER,
    WEATHER_QUESTION,
    deltas_of,
    error_of,
    join,
    join_chat,
    post,
    stream,
)
from tests.e2e.conftest import MODEL
from tests.tables import read_table

SHORT = {**GREEDY, "max_tokens": 4}


def call(name: str = "get_weather", arguments: Any = '{"city": "Paris"}', number: int = 1) -> Any:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def called(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": RESULT_TEXT}
ASKED = [*WEATHER_QUESTION, called(call(), content=None)]


def answered(http: httpx.Client, **fields: Any) -> Any:
    answer = post(http, CHAT, **{**SHORT, "messages": QUESTION, **fields})
    assert answer["usage"]["prompt_tokens"] > 0
    return answer


def message_of(http: httpx.Client, **fields: Any) -> Any:
    return answered(http, **fields)["choices"][0]["message"]


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return stream(http, CHAT, **{**SHORT, "messages": QUESTION, **fields})


def rendered(http: httpx.Client, **fields: Any) -> str:
    prompt: str = post(http, f"{CHAT}/render", **{"messages": QUESTION, **fields})["prompt"]
    return prompt


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {**SHORT, "messages": QUESTION, **fields}
    assert error_of(http.post(CHAT, json={**body, "stream": True}), 400)
    return error_of(http.post(CHAT, json=body), 400)


@pytest.mark.parametrize(
    "off", read_table("acceptance_suite.04_disabled_thinking_gives_no_reasoning"), ids=str
)
def test_04_disabled_thinking_gives_no_reasoning(http: httpx.Client, off: dict[str, Any]) -> None:
    answer = answered(http, max_tokens=30, **off)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] is message["reasoning_content"] is None
    assert message["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("mode", ["enabled", "adaptive"])
def test_04_other_modes_think(http: httpx.Client, mode: str) -> None:
    assert message_of(http, thinking={"type": mode}, reasoning_effort="high")["reasoning"]


def exactly(text: str, **more: Any) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200, **more}


EMOJI, LINES = "👩‍🚀 🙂 naïve 日本語 العربية", "Two lines\nand an end\n"


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        ("[SILENCE]", "enabled"),
        pytest.param("[SILENCE]", "disabled", marks=pytest.mark.full),
        pytest.param(LINES, "enabled", marks=pytest.mark.full),
        (LINES, "disabled"),
        (EMOJI, "enabled"),
        pytest.param(EMOJI, "disabled", marks=pytest.mark.full),
    ],
)
def test_02_07_12_07_16_15_content_is_whole(http: httpx.Client, text: str, thinking: str) -> None:
    """Check emoji, brackets that begin a marker, and line breaks at the end."""
    request = exactly(text, thinking={"type": thinking})
    assert message_of(http, **request)["content"] == text
    deltas = deltas_of(chunks(http, **request))
    assert join(deltas, "content") == text
    assert any(delta.get("reasoning") for delta in deltas) == (thinking == "enabled")


@pytest.mark.parametrize("text", ["</think> is a tag", "Say <think>"])
def test_04_disabled_thinking_keeps_think_tags_in_content(http: httpx.Client, text: str) -> None:
    request = exactly(text, thinking={"type": "disabled"})
    assert text.split()[-1] in message_of(http, **request)["content"]


BUDGETS = [{name: 4} for name in ("thinking_token_budget", "max_thinking_tokens")]
BUDGETS.append({"thinking": {"type": "enabled", "budget_tokens": 4}})


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_04_budget_of_thinking_is_kept(http: httpx.Client, budget: dict[str, Any]) -> None:
    details = answered(http, max_tokens=100, **budget)["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= 6


def test_04_prompt_of_disabled_thinking_keeps_the_prefix(http: httpx.Client) -> None:
    plain = rendered(http)
    assert rendered(http, thinking={"type": "adaptive"}) == plain
    assert rendered(http, thinking={"type": "disabled"}) == plain + "</think>\n\n"


def test_04_invalid_thinking_type_is_refused(http: httpx.Client) -> None:
    assert refused(http, thinking={"type": "banana"})["param"] == "thinking.type"


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 2])
def test_05_01_usual_temperatures_are_accepted(http: httpx.Client, temperature: float) -> None:
    answered(http, temperature=temperature)


def test_06_token_limits(http: httpx.Client) -> None:
    assert refused(http, max_tokens=-1)["param"] == "max_tokens"
    assert answered(http, max_tokens=524_288)["choices"][0]["finish_reason"] == "stop"
    answer = answered(http, max_tokens=100, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    answer = answered(http, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    events = chunks(http, max_tokens=0, logprobs=True)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


OBJECT_RESULT = {**RESULT, "content": [{"type": "text", "text": "12:00"}]}
GREETING = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "A greeting."}
DETAILS = {"role": "assistant", "content": None, "reasoning_details": [{"text": "Hm."}]}
HISTORIES: dict[str, list[Any]] = {
    "two assistants": [*QUESTION, system("1", "assistant"), system("2", "assistant"), *QUESTION],
    "null content": [*ASKED, RESULT],
    "no content": [*WEATHER_QUESTION, called(call()), RESULT],
    "empty content": [*WEATHER_QUESTION, called(call(), content=""), RESULT],
    "system": [system("A"), system("B"), *QUESTION, system("C")],
    "no arguments": [*WEATHER_QUESTION, called(call("now", "{}")), RESULT],
    "object": [*WEATHER_QUESTION, called(call("now", {"zone": "CET"})), OBJECT_RESULT],
    "details": [*WEATHER_QUESTION, DETAILS, *QUESTION],
    "text parts": [GREETING, THOUGHT, system("Be brief."), *QUESTION],
    # The suite expects status 400; docs/decisions/0014 explains why we accept it (16_12).
    "no JSON": [*WEATHER_QUESTION, called(call(arguments='{"city": "Pa')), RESULT],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_07_shapes_of_history_are_accepted(http: httpx.Client, name: str) -> None:
    answered(http, messages=HISTORIES[name])


def test_10_06_length_means_the_limit(http: httpx.Client) -> None:
    """Check an answer that is truncated while thinking: its content is empty, not null."""
    (choice,) = answered(http, max_tokens=7, ignore_eos=True)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


def test_10_04_a_conversation_that_grows_finds_its_prefix_in_the_cache(http: httpx.Client) -> None:
    """Check that notes within a conversation stay in place, so that its prefix stays cached."""
    messages: list[Any] = [
        system("You know about the weather, and you answer in one short sentence, in English."),
        system("Which months are cold in the north, and which ones are warm there?", "user"),
    ]
    first = answered(http, messages=messages, thinking={"type": "disabled"})
    messages += [
        system(first["choices"][0]["message"]["content"], "assistant"),
        system("From now on, answer in capital letters."),
        system("And in the south?", "user"),
    ]
    second = answered(http, messages=messages)
    first_tokens = first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first_tokens - 48
    prompt = rendered(http, messages=messages)
    words = ("in one short sentence", "Which months", "in capital letters", "in the south?")
    places = [prompt.index(word) for word in words]
    assert places == sorted(places)


ROLES = ["root", "system", "root system", "system root", "root developer"]


@pytest.mark.parametrize("roles", ROLES)
def test_11_root_precedes_system(http: httpx.Client, roles: str) -> None:
    messages = [*(system(role.upper(), role) for role in roles.split()), *QUESTION]
    answered(http, messages=messages)
    prompt = rendered(http, messages=messages)
    order = sorted(roles.upper().split(), key=lambda role: role != "ROOT")
    places = [prompt.index(word) for word in (*order, "Tom has 47")]
    assert places == sorted(places)


def test_forms_hold_in_streams_and_completions(http: httpx.Client) -> None:
    apples = {"type": "integer", "minimum": 0, "maximum": 99}
    properties = {"apples": apples, "sure": {"type": "boolean"}}
    schema = {**TOTAL, "properties": properties, "required": ["apples", "sure"]}
    schema["additionalProperties"] = False
    described = {"name": "count", "schema": schema, "strict": True}
    form = {"type": "json_schema", "json_schema": described}
    deltas = deltas_of(chunks(http, response_format=form, max_tokens=300))
    value = json.loads(join(deltas, "content"))
    assert set(value) == {"apples", "sure"} and 0 <= value["apples"] <= 99
    assert join(deltas, "reasoning")
    choices = ["no apples", "some apples"]
    answer = post(http, COMPLETIONS, prompt="Tom has", guided_choice=choices, max_tokens=50)
    assert answer["choices"][0]["text"] in choices


@pytest.mark.parametrize("streamed", [True, False])
def test_invalid_form_is_refused_before_stream_begins(http: httpx.Client, streamed: bool) -> None:
    for path, body in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "x"})):
        response = http.post(path, json={**SHORT, **body, "guided_regex": "([", "stream": streamed})
        error_of(response, 400, code="invalid_grammar")


def test_reasoning_is_placed_as_requested(http: httpx.Client) -> None:
    plain = message_of(http, max_tokens=200)
    thought = plain["reasoning"]
    split = message_of(http, max_tokens=200, reasoning_split=True)
    assert split["reasoning_details"][0]["text"] == split["reasoning_content"] == thought
    assert "reasoning_details" not in plain
    for inline in ({"reasoning_split": False}, {"separate_reasoning": False}):
        message = message_of(http, max_tokens=200, **inline)
        assert message["content"].startswith(f"<think>{thought}\n</think>")
        assert message["content"].endswith(plain["content"]) and message["reasoning"] is None
    deltas = deltas_of(chunks(http, max_tokens=200, reasoning_split=True))
    texts = [detail["text"] for delta in deltas for detail in delta.get("reasoning_details", ())]
    assert "".join(texts) == thought
    held = deltas_of(chunks(http, max_tokens=200, stream_reasoning=False))
    assert [delta["reasoning"] for delta in held if delta.get("reasoning")] == [thought]


def test_echo_and_fields_of_sglang_and_vllm_reach_the_answer(http: httpx.Client) -> None:
    whole = {"separate_reasoning": False}  # The content then has all tokens.
    body = {"rid": "my-id.1", "logprobs": True, "top_logprobs": 1, **whole}
    answer = answered(http, **body, return_tokens_as_token_ids=True, return_token_ids=True)
    assert answer["id"] == "chatcmpl-my-id.1"
    (choice,) = answer["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{number}" for number in choice["token_ids"]]
    stopped = message_of(http, max_tokens=200, stop=["apples"], no_stop_trim=True)
    assert stopped["content"].endswith("apples")
    body = {"messages": [*QUESTION, {"role": "assistant", "content": "He has"}], "max_tokens": 8}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    expected = f"He has{message_of(http, **body)['content']}"
    assert message_of(http, **body, echo=True)["content"] == expected
    assert join(deltas_of(chunks(http, **body, echo=True)), "content") == expected


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    "declared",
    read_table("acceptance_tools.13_05_13_06_16_11_accepts_sparse_tools"),
    ids=["no parameters", "no description", "name only", "16_11"],
)
def test_13_05_13_06_16_11_accepts_few_fields(http: httpx.Client, declared: dict[str, Any]) -> None:
    answered(http, messages=WEATHER_QUESTION, tools=[declared])


def test_13_history_may_show_other_tools_and_keys_keep_their_order(http: httpx.Client) -> None:
    answered(http, messages=[*ASKED, RESULT])
    answered(http, messages=[*ASKED, RESULT], tools=[tool("other")])
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


def test_16_results_are_put_in_order_and_required_calls_made(http: httpx.Client) -> None:
    second = {**RESULT, "tool_call_id": "call_2", "content": "ROMAN"}
    results = [second, {**RESULT, "content": "PARISIAN"}]
    messages = [*WEATHER_QUESTION, called(call(), call(number=2)), *results]
    answered(http, messages=messages)
    prompt = rendered(http, messages=messages)
    assert 0 < prompt.index("PARISIAN") < prompt.index("ROMAN")
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
