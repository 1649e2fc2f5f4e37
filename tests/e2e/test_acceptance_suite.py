"""MiniMax's acceptance suite for text, by check ids, except checks of a model's quality."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.acceptance_support import ASKED, CALL, CHAT, RESULT, SHORT, answered, refused
from tests.e2e.test_api_chat import QUESTION, WEATHER_QUESTION, joined, stream
from tests.e2e.test_api_errors import error_of

if TYPE_CHECKING:
    import openai


def data_chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(CHAT, json={**SHORT, "messages": QUESTION, "stream": True, **fields})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_stream_02_07_first_delta_has_the_role_and_no_other_has_one(http: httpx.Client) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in data_chunks(http, max_tokens=200)]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    for delta in deltas:
        assert not (delta.get("content") and delta.get("reasoning_content"))
        assert delta.get("reasoning") == delta.get("reasoning_content")


@pytest.mark.parametrize(
    "off",
    [
        {"thinking": {"type": "disabled"}},
        {"thinking_mode": "disabled"},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"thinking_mode": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_04_disabled_thinking_gives_no_reasoning(http: httpx.Client, off: dict[str, Any]) -> None:
    answer = answered(http, max_tokens=30, **off)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] is message["reasoning_content"] is None
    assert message["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("mode", ["enabled", "adaptive"])
def test_04_other_modes_think(http: httpx.Client, mode: str) -> None:
    answer = answered(http, thinking={"type": mode}, reasoning_effort="high")
    assert answer["choices"][0]["message"]["reasoning"]


def exactly(text: str, **more: Any) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200, **more}


@pytest.mark.parametrize(
    "text", ["[SILENCE]", "Two lines\nand an end\n", "👩‍🚀 🙂 naïve 日本語 العربية"]
)
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_02_07_12_07_16_15_content_arrives_whole(
    http: httpx.Client, text: str, thinking: str
) -> None:
    """Cover emoji, brackets that begin a marker, and line breaks at the end."""
    request = exactly(text, thinking={"type": thinking})
    assert answered(http, **request)["choices"][0]["message"]["content"] == text
    deltas = [chunk["choices"][0]["delta"] for chunk in data_chunks(http, **request)]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert any(delta.get("reasoning") for delta in deltas) == (thinking == "enabled")


def test_04_disabled_thinking_keeps_think_tags_out_of_the_content(http: httpx.Client) -> None:
    for text in ("</think> is a tag", "Say <think>"):
        request = exactly(text, thinking={"type": "disabled"})
        assert text.split()[-1] in answered(http, **request)["choices"][0]["message"]["content"]


def test_04_budget_of_thinking_is_kept(http: httpx.Client) -> None:
    for budget in (
        {"thinking_token_budget": 4},
        {"thinking": {"type": "enabled", "budget_tokens": 4}},
        {"max_thinking_tokens": 4},
    ):
        usage = answered(http, max_tokens=100, **budget)["usage"]
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= 6


def test_04_prompt_of_disabled_thinking_keeps_the_prefix(http: httpx.Client) -> None:
    body = {"messages": QUESTION}
    prompts = [
        http.post(f"{CHAT}/render", json={**body, **fields}).json()["prompt"]
        for fields in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}})
    ]
    assert prompts[0] == prompts[2]
    assert prompts[1] == prompts[0] + "</think>\n\n"


def test_04_invalid_thinking_type_is_refused(http: httpx.Client) -> None:
    assert refused(http, thinking={"type": "banana"})["param"] == "thinking.type"


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 2])
def test_05_01_usual_temperatures_are_accepted(http: httpx.Client, temperature: float) -> None:
    answered(http, temperature=temperature)


def test_06_token_limits(http: httpx.Client) -> None:
    assert refused(http, max_tokens=-1)["param"] == "max_tokens"
    for limit in (512_000, 524_288):
        assert answered(http, max_tokens=limit)["choices"][0]["finish_reason"] == "stop"
    answer = answered(http, max_tokens=100, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


def test_06_zero_tokens_only_read_the_prompt(http: httpx.Client) -> None:
    answer = answered(http, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    chunks = data_chunks(http, max_tokens=0, logprobs=True)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


@pytest.mark.parametrize(
    "messages",
    [
        [
            *QUESTION,
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
            *QUESTION,
        ],
        [*ASKED, RESULT],
        [*WEATHER_QUESTION, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
        [*WEATHER_QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
        [
            {"role": "system", "content": "A"},
            {"role": "system", "content": "B"},
            *QUESTION,
            {"role": "system", "content": "C"},
        ],
        [
            *WEATHER_QUESTION,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "now", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        ],
        [
            *WEATHER_QUESTION,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "now", "arguments": {"zone": "CET"}}}],
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": [{"type": "text", "text": "12:00"}],
            },
        ],
        [
            *WEATHER_QUESTION,
            {"role": "assistant", "content": None, "reasoning_details": [{"text": "Hm."}]},
            *QUESTION,
        ],
        [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": None, "reasoning_content": "A greeting."},
            {"role": "system", "content": "Be brief."},
            *QUESTION,
        ],
    ],
    ids=[
        "two assistants",
        "null content",
        "no content",
        "empty content",
        "system",
        "no arguments",
        "object",
        "details",
        "text parts",
    ],
)
def test_07_shapes_of_history_are_accepted(http: httpx.Client, messages: list[Any]) -> None:
    answered(http, messages=messages)


def test_10_06_length_means_the_limit_and_10_07_prompts_count_the_same_in_streams(
    http: httpx.Client,
) -> None:
    answer = answered(http, max_tokens=7, ignore_eos=True)
    (choice,) = answer["choices"]
    # still thinking and no call: the content is empty, not null
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert answer["usage"]["completion_tokens"] == 7
    streamed = data_chunks(
        http, max_tokens=7, ignore_eos=True, stream_options={"include_usage": True}
    )[-1]["usage"]
    assert (streamed["prompt_tokens"], streamed["completion_tokens"]) == (
        answer["usage"]["prompt_tokens"],
        7,
    )


def test_10_04_a_conversation_that_grows_finds_its_prefix_in_the_cache(http: httpx.Client) -> None:
    """Notes in the middle stay in place, so that the prefix before them stays cached."""
    messages: list[Any] = [
        {
            "role": "system",
            "content": "You know about the weather, and you answer in one short sentence, always "
            "in English.",
        },
        {
            "role": "user",
            "content": "Which months are cold in the north of the country, and which ones are "
            "warm there?",
        },
    ]
    first = answered(http, messages=messages, thinking={"type": "disabled"})
    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "system", "content": "From now on, answer in capital letters."},
        {"role": "user", "content": "And in the south?"},
    ]
    second = answered(http, messages=messages)
    first_tokens = first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first_tokens - 48
    prompt = http.post(f"{CHAT}/render", json={"messages": messages}).json()["prompt"]
    assert prompt.index("in one short sentence") < prompt.index("And in the south?")
    assert (
        prompt.index("Which months")
        < prompt.index("in capital letters")
        < prompt.index("And in the south?")
    )


@pytest.mark.parametrize(
    ("instructions", "order"),
    [
        ([{"role": "root", "content": "ROOT"}], ["ROOT"]),
        ([{"role": "system", "content": "SYS"}], ["SYS"]),
        (
            [{"role": "root", "content": "ROOT"}, {"role": "system", "content": "SYS"}],
            ["ROOT", "SYS"],
        ),
        (
            [{"role": "system", "content": "SYS"}, {"role": "root", "content": "ROOT"}],
            ["ROOT", "SYS"],
        ),
        (
            [{"role": "root", "content": "ROOT"}, {"role": "developer", "content": "DEV"}],
            ["ROOT", "DEV"],
        ),
    ],
    ids=str,
)
def test_11_root_precedes_system(
    http: httpx.Client, instructions: list[Any], order: list[str]
) -> None:
    messages = [*instructions, *QUESTION]
    answered(http, messages=messages)
    prompt = http.post(f"{CHAT}/render", json={"messages": messages}).json()["prompt"]
    places = [prompt.index(word) for word in order]
    assert places == sorted(places) and places[-1] < prompt.index("Tom has 47")


def test_forms_of_the_answer_hold_in_streams_too(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "apples": {"type": "integer", "minimum": 0, "maximum": 99},
            "sure": {"type": "boolean"},
        },
        "required": ["apples", "sure"],
        "additionalProperties": False,
    }
    form = {
        "type": "json_schema",
        "json_schema": {"name": "count", "schema": schema, "strict": True},
    }
    chunks = stream(client, messages=QUESTION, response_format=form, max_tokens=300, temperature=0)
    value = json.loads(joined(chunks, "content"))
    assert set(value) == {"apples", "sure"} and 0 <= value["apples"] <= 99
    assert joined(chunks, "reasoning")


@pytest.mark.parametrize("streamed", [True, False])
def test_form_that_cannot_be_compiled_is_refused_before_the_stream_begins(
    http: httpx.Client, streamed: bool
) -> None:
    for path, body in ((CHAT, {"messages": QUESTION}), ("/v1/completions", {"prompt": "x"})):
        response = http.post(path, json={**SHORT, **body, "guided_regex": "([", "stream": streamed})
        error_of(response, 400, code="invalid_grammar")


def test_plain_completions_follow_a_form(http: httpx.Client) -> None:
    body = {"prompt": "Tom has", "guided_choice": ["no apples", "some apples"], "max_tokens": 50}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] in (
        "no apples",
        "some apples",
    )


def test_reasoning_is_placed_as_requested(http: httpx.Client) -> None:
    plain = answered(http, max_tokens=200)["choices"][0]["message"]
    split = answered(http, max_tokens=200, reasoning_split=True)["choices"][0]["message"]
    assert (
        split["reasoning_details"][0]["text"]
        == split["reasoning_content"]
        == plain["reasoning_content"]
    )
    assert "reasoning_details" not in plain
    for inline in ({"reasoning_split": False}, {"separate_reasoning": False}):
        message = answered(http, max_tokens=200, **inline)["choices"][0]["message"]
        assert message["content"].startswith(f"<think>{plain['reasoning']}\n</think>")
        assert message["content"].endswith(plain["content"]) and message["reasoning"] is None
    details = [
        chunk["choices"][0]["delta"]
        for chunk in data_chunks(http, max_tokens=200, reasoning_split=True)
    ]
    texts = [detail["text"] for delta in details for detail in delta.get("reasoning_details", ())]
    assert "".join(texts) == plain["reasoning"] and len(texts) > 1
    held = [
        chunk["choices"][0]["delta"]
        for chunk in data_chunks(http, max_tokens=200, stream_reasoning=False)
    ]
    assert [d["reasoning"] for d in held if d.get("reasoning")] == [plain["reasoning"]]


def test_echo_repeats_the_message_that_is_continued(http: httpx.Client) -> None:
    body = {"messages": [*QUESTION, {"role": "assistant", "content": "He has"}], "max_tokens": 8}
    body |= {"continue_final_message": True, "add_generation_prompt": False, "temperature": 0}
    plain = answered(http, **body)["choices"][0]["message"]["content"]
    assert answered(http, **body, echo=True)["choices"][0]["message"]["content"] == f"He has{plain}"
    deltas = [chunk["choices"][0]["delta"] for chunk in data_chunks(http, **body, echo=True)]
    assert "".join(delta.get("content") or "" for delta in deltas) == f"He has{plain}"


def test_fields_of_sglang_and_vllm_reach_the_answer(http: httpx.Client) -> None:
    answer = answered(
        http,
        rid="my-id.1",
        logprobs=True,
        top_logprobs=1,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
    )
    assert answer["id"] == "chatcmpl-my-id.1"
    (choice,) = answer["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == [
        f"token_id:{i}" for i in choice["token_ids"]
    ]
    stopped = answered(http, max_tokens=200, stop=["apples"], no_stop_trim=True)["choices"][0][
        "message"
    ]
    assert stopped["content"].endswith("apples")
