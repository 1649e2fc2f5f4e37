"""Requests as clients send them: what is accepted, what is refused, and how readable and cheap a refusal is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from negamax.api.schemas.answers import ChatChunkChoice, Delta, FunctionCall, ToolCall, encode
from negamax.api.schemas.chat import ChatRequest
from negamax.api.schemas.common import RequestModel
from negamax.api.schemas.completions import CompletionRequest
from negamax.base.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse({"messages": HELLO, **fields})


def refusal(model: type[RequestModel], body: object) -> InvalidRequestError:
    """The refusal of `body`, which must be short to read and quick to make."""
    started = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        model.parse(body)
    assert time.perf_counter() - started < 1.0
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    return caught.value


def test_unknown_field_names_the_nearest_known_one() -> None:
    error = refusal(ChatRequest, {"messages": HELLO, "max_token": 5})
    assert error.param == "max_token"
    assert "'max_tokens'" in error.message


@pytest.mark.parametrize("name", sorted(ChatRequest.ignored_fields))
def test_harmless_openai_fields_have_no_effect(name: str) -> None:
    assert chat(**{name: "anything"}) == chat()


@pytest.mark.parametrize("name", sorted(ChatRequest.unsupported_fields))
def test_unsupported_field_is_refused_by_name_and_null_is_not(name: str) -> None:
    error = refusal(ChatRequest, {"messages": HELLO, name: "x"})
    assert error.param == name
    assert error.code == "unsupported_parameter"
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("max_tokens", "16"),
        ("max_tokens", 16.5),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("n", "2"),
        ("n", True),
        ("stream", 1),
        ("stream", "true"),
        ("stop", 7),
        ("stop", ["a", 7]),
        ("stop_token_ids", ["1"]),
        ("logit_bias", [1]),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "1"}),
        ("seed", 1.5),
        ("messages", "hello"),
        ("messages", []),
        ("messages", ["hello"]),
        ("tools", {}),
        ("tools", ["f"]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "web_search", "function": {"name": "f"}}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": 'f"><'}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", "sometimes"),
        ("response_format", {"type": "json_object"}),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"not a name": 1}),
        ("modalities", ["audio"]),
        ("thinking", {"type": "disabled"}),
        ("reasoning_split", False),
        ("stream_options", {"include_usages": True}),
        ("stream_options", True),
        ("cache_salt", "s" * 1000),
        ("priority", 2**40),
    ],
)
def test_wrong_value_is_refused_with_the_field_as_param(field: str, value: object) -> None:
    error = refusal(ChatRequest, {"messages": HELLO, field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert field in error.message
    assert error.http_status == 400


@pytest.mark.parametrize("body", [None, [], "text", 3, True])
def test_body_that_is_no_object_is_refused(body: object) -> None:
    assert "object" in refusal(ChatRequest, body).message


def test_missing_messages_are_named() -> None:
    error = refusal(ChatRequest, {"model": "nano"})
    assert (error.param, error.code) == ("messages", "missing_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["s"] * 100_000},
        {"logit_bias": {str(number): 1 for number in range(1_000_000)}},
        {"stop_token_ids": list(range(1_000_000))},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 100_000},
        {"messages": ["x"] * 1_000_000},
        {f"field_{number}": 1 for number in range(100_000)},
        {"x" * 1_000_000: 1},
        {"temperature": "9" * 1_000_000},
        {"max_tokens": 10**400},
        {"seed": -(10**400)},
    ],
)
def test_huge_input_is_refused_quickly_in_one_short_sentence(fields: dict[str, Any]) -> None:
    request = {"messages": HELLO, **fields}
    try:
        sampling = ChatRequest.parse(request).sampling_params(max_tokens=request.get("max_tokens"), logprobs=None)
    except InvalidRequestError:
        refusal(ChatRequest, request)
    else:  # numbers are bounded with the other ranges
        with pytest.raises(InvalidRequestError):
            sampling.check(max_logprobs=20, vocab_size=100)


def test_null_means_left_out() -> None:
    fields = [name for name in ChatRequest.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(fields)) == chat()


def test_integers_are_numbers_for_float_fields() -> None:
    assert chat(temperature=1, top_p=1, frequency_penalty=0).sampling_params(max_tokens=None, logprobs=None).temperature == 1.0


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert chat(max_tokens=5).token_limit == 5
    assert chat().token_limit is None


def test_stop_may_be_one_string_or_a_list() -> None:
    assert chat(stop="END").stop == ["END"]
    assert chat(stop=["a", "b"]).sampling_params(max_tokens=None, logprobs=None).stop == ("a", "b")


def test_logit_bias_keys_become_token_ids() -> None:
    assert chat(logit_bias={"12": -5}).sampling_params(max_tokens=None, logprobs=None).logit_bias == {12: -5.0}


def test_top_logprobs_needs_logprobs() -> None:
    with pytest.raises(InvalidRequestError, match="logprobs=true"):
        _ = chat(top_logprobs=3).wanted_logprobs
    assert chat(logprobs=True).wanted_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).wanted_logprobs == 3


def test_tool_choice_none_hides_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "my-tool.v2"}}]
    assert chat(tools=tools).offered_tools == tools
    assert chat(tools=tools, tool_choice="none").offered_tools is None
    assert chat(tools=[]).offered_tools is None


def test_tools_keep_the_key_order_of_the_client() -> None:
    function = {"name": "f", "zeta": 1, "parameters": {"z": {}, "a": {}}, "alpha": 2}
    (tool,) = chat(tools=[{"type": "function", "function": function}]).offered_tools or []
    assert json.dumps(tool["function"]) == json.dumps(function)


def test_prompt_logprobs_are_refused_in_a_stream() -> None:
    with pytest.raises(InvalidRequestError, match="stream=false"):
        chat(stream=True, prompt_logprobs=1).sampling_params(max_tokens=None, logprobs=None)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), (["a", [1]], ["a", [1]])],
)
def test_every_shape_of_prompt_becomes_a_list(prompt: object, prompts: list[object]) -> None:
    assert CompletionRequest.parse({"prompt": prompt}).prompt == prompts


@pytest.mark.parametrize("prompt", [None, [], {}, 5, [True], [1, "a"], [1, 2.0], [["a"]], ["a"] * 1000, [None]])
def test_other_prompts_are_refused(prompt: object) -> None:
    error = refusal(CompletionRequest, {"prompt": prompt})
    assert (error.param or "").startswith("prompt")


def test_completions_generate_16_tokens_unless_told() -> None:
    assert CompletionRequest.parse({"prompt": "a"}).max_tokens == 16


def test_zero_tokens_only_score_an_echoed_prompt() -> None:
    assert CompletionRequest.parse({"prompt": "a", "max_tokens": 0, "echo": True}).scores_only
    with pytest.raises(InvalidRequestError, match="echo=true"):
        _ = CompletionRequest.parse({"prompt": "a", "max_tokens": 0}).scores_only


def test_a_delta_carries_only_what_is_new() -> None:
    choice = ChatChunkChoice(0, Delta(content="x"))
    assert json.loads(encode(choice)) == {"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}
    call = ToolCall(index=1, function=FunctionCall(arguments="{"))
    assert json.loads(encode(call)) == {"index": 1, "function": {"arguments": "{"}}


def test_every_ignored_and_refused_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    for model in (ChatRequest, CompletionRequest):
        for name in {*model.model_fields, *model.ignored_fields, *model.unsupported_fields} - {"prompt"}:
            assert f"`{name}`" in text, name
