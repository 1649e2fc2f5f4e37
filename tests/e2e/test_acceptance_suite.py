"""Run MiniMax's acceptance suite for text, by check ids, without checks of model quality."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    QUESTION,
    RESULT_TEXT,
    TOTAL,
    WEATHER_QUESTION,
    deltas_of,
    error_of,
    join,
    post,
    stream,
)
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


def test_04_disabled_thinking_keeps_the_prefix_and_other_types_fail(http: httpx.Client) -> None:
    plain = rendered(http)
    assert rendered(http, thinking={"type": "adaptive"}) == plain
    assert rendered(http, thinking={"type": "disabled"}) == plain + "</think>\n\n"
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


def test_echo_repeats_the_message_that_is_continued(http: httpx.Client) -> None:
    body = {"messages": [*QUESTION, {"role": "assistant", "content": "He has"}], "max_tokens": 8}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    expected = f"He has{message_of(http, **body)['content']}"
    assert message_of(http, **body, echo=True)["content"] == expected
    assert join(deltas_of(chunks(http, **body, echo=True)), "content") == expected


def test_fields_of_sglang_and_vllm_reach_the_answer(http: httpx.Client) -> None:
    whole = {"separate_reasoning": False}  # The content then has all tokens.
    body = {"rid": "my-id.1", "logprobs": True, "top_logprobs": 1, **whole}
    answer = answered(http, **body, return_tokens_as_token_ids=True, return_token_ids=True)
    assert answer["id"] == "chatcmpl-my-id.1"
    (choice,) = answer["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{number}" for number in choice["token_ids"]]
    stopped = message_of(http, max_tokens=200, stop=["apples"], no_stop_trim=True)
    assert stopped["content"].endswith("apples")
