import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError
from request_support import HELLO, chat

from negamax.api.dialects.chat.schema import (
    ChatChunkChoice,
    ChatRequest,
    Delta,
    FunctionCall,
    ToolCall,
)
from negamax.api.dialects.completions.schema import CompletionRequest
from negamax.api.dialects.generate.schema import NativeRequest, NativeSampling
from negamax.api.dialects.messages.schema import CountRequest, MessagesRequest
from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.api.schemas.answers import encode
from negamax.api.schemas.request_model import FOREIGN_FIELDS, RequestModel
from negamax.api.schemas.sampled_request import SamplingFields
from negamax.api.schemas.thinking import ReasoningPlace, ThinkingChoice
from negamax.base.errors import InvalidRequestError
from negamax.scheduler.request import SamplingParams
from negamax.text.chat_template import ChatTemplate
from tests.speed import is_quick
from tests.tables import read_table


def refusal(model: type[RequestModel], body: object) -> InvalidRequestError:
    """Return the error that refuses `body`. The error must be short, and come quickly."""
    errors = []

    def parse() -> None:
        with pytest.raises(InvalidRequestError) as caught:
            model.parse(body)
        errors.append(caught.value)

    assert is_quick(parse, 1.0)
    error = errors[-1]
    assert len(str(error)) < 400
    assert "\n" not in str(error)
    return error


def refused(**fields: Any) -> InvalidRequestError:
    return refusal(ChatRequest, {"messages": HELLO, **fields})


def sampling_of(**fields: Any) -> SamplingParams:
    return chat(**fields).sampling_params(max_tokens=None, logprobs=None)


def test_null_and_fields_of_other_servers_are_ignored() -> None:
    other = {"top_a": 0.2, "chat_id": "x", "extra": {"a": 1}, "enable_search": True}
    other |= {"mirostat": 1, "thinking": {"display": "x"}}
    assert chat(**other) == chat(thinking={})
    assert chat(**{f"x{number}": 1 for number in range(40)}) == chat()
    fields = [name for name in ChatRequest.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(fields)) == chat()


@pytest.mark.parametrize("name", sorted(FOREIGN_FIELDS | ChatRequest.ignored_fields))
def test_fields_of_openai_and_resembling_names_without_effect_are_ignored(name: str) -> None:
    assert chat(**{name: ["anything"]}) == chat()


@pytest.mark.parametrize(
    ("fields", "meant"), read_table("api_schemas.ignores_names_beside_known_ones")
)
def test_ignores_names_beside_known_ones(fields: dict[str, Any], meant: dict[str, Any]) -> None:
    assert refused(**fields).code == "unknown_parameter"
    assert refused(**fields, **dict.fromkeys(meant)).code == "unknown_parameter"
    assert chat(**fields, **meant) == chat(**meant)


def test_integers_may_be_written_as_floats_and_as_keys() -> None:
    whole = {"max_tokens": 5, "top_k": 40, "n": 2, "seed": 1}
    as_floats = {name: float(value) for name, value in whole.items()}
    made = chat(**as_floats, thinking={"budget_tokens": 64.0})
    assert made == chat(**whole, thinking={"budget_tokens": 64})
    assert type(made.max_tokens) is int and type(chat(temperature=1.0).temperature) is float
    assert sampling_of(temperature=1, top_p=1, frequency_penalty=0).temperature == 1.0
    assert refused(max_tokens=5.5).param == "max_tokens"
    assert refused(stream=1.0).param == "stream"
    assert chat(logit_bias=[], stop="END") == chat(logit_bias={}, stop=["END"])
    assert sampling_of(logit_bias={"12": -5}).logit_bias == {12: -5.0}


@pytest.mark.parametrize("name", ["thread", "conversation", "previous_response_id"])
@pytest.mark.parametrize(
    "model", [ChatRequest, MessagesRequest, CountRequest], ids=lambda model: model.__name__
)
def test_fields_of_stored_conversations_are_refused(model: type[RequestModel], name: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": HELLO}
    body[name] = {"type": "continue", "previous_message_id": "msg_1"}
    error = refusal(model, body)
    assert error.param == name
    has_code = name == "thread" and model is not ChatRequest
    assert error.code == ("thread_unsupported_request" if has_code else "unsupported_parameter")


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("temprature", "temperature"),
        ("Stop", "stop"), ("tool_choices", "tool_choice"), ("response-format", "response_format"),
        ("top_k_", "top_k"), ("enable_thinkng", "enable_thinking"),
    ],
)  # fmt: skip
def test_misspelt_field_is_refused(slip: str, meant: str) -> None:
    error = refused(**{slip: 1})
    assert (error.param, error.code) == (slip, "unknown_parameter")
    assert f"'{meant}'" in error.message


@pytest.mark.parametrize("name", sorted(ChatRequest.unsupported_fields))
def test_unsupported_field_is_refused_by_name_and_null_is_not(name: str) -> None:
    error = refused(**{name: "x"})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    for asks_for_nothing in (None, False, [], 0, ""):
        assert chat(**{name: asks_for_nothing}) == chat()
    assert chat(best_of=1) == chat()


FUNCTION = {"type": "function"}
WRONG: dict[str, list[Any]] = {
    "temperature": ["0.5", True],
    "max_tokens": ["16", 16.5, -1],
    "max_completion_tokens": [-1],
    "n": ["2", True],
    "stream": [1, "true"],
    "stop": [7, ["a", 7]],
    "stop_token_ids": [["1"]],
    "logit_bias": [[1], {"hello": 1}, {"-1": 1}, {"1": "1"}],
    "seed": [1.5],
    "messages": ["hello", [], ["hello"]],
    "tools": [
        {}, ["f"], [FUNCTION], [{"type": "web_search", "function": {"name": "f"}}],
        [FUNCTION | {"function": {"name": ""}}], [FUNCTION | {"function": {"name": 'f"><'}}],
        [FUNCTION | {"function": {"name": "f", "parameters": []}}],
    ],
    "tool_choice": [
        "sometimes",
        {"type": "allowed_tools", "allowed_tools": {}},
        FUNCTION | {"function": {}},
    ],
    "parallel_tool_calls": ["no"],
    "response_format": ["json"],
    "thinking_token_budget": [-1],
    "chat_template_kwargs": [{"messages": []}, {"not a name": 1}],
    "modalities": [["audio"]],
    "thinking": [{"type": "off"}, {"type": None, "budget_tokens": -1}, "on", {"typ": "enabled"}],
    "thinking_mode": ["sometimes"],
    "reasoning_effort": ["enormous", 3],
    "enable_thinking": ["yes"],
    "reasoning_split": ["no"],
    "request_id": ["with space"],
    "rid": ["x" * 200],
    "stream_options": [True],
    "cache_salt": ["s" * 1000],
    "priority": [2**40],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_wrong_value_is_refused_with_the_field_as_param(field: str, value: object) -> None:
    error = refused(**{field: value})
    assert error.param is not None and error.param.startswith(field)
    assert field in error.message and error.http_status == 400


@pytest.mark.parametrize("body", [None, [], "text", 3, True])
def test_body_that_is_no_object_is_refused(body: object) -> None:
    assert "object" in refusal(ChatRequest, body).message
    error = refusal(ChatRequest, {"model": "nano"})
    assert (error.param, error.code) == ("messages", "missing_parameter")


HUGE: dict[str, Callable[[], dict[str, Any]]] = {
    "stop": lambda: {"stop": ["s"] * 100_000},
    "logit_bias": lambda: {"logit_bias": {str(number): 1 for number in range(1_000_000)}},
    "stop_token_ids": lambda: {"stop_token_ids": list(range(1_000_000))},
    "tools": lambda: {"tools": [{"type": "function", "function": {"name": "f"}}] * 100_000},
    "messages": lambda: {"messages": ["x"] * 1_000_000},
    "fields": lambda: {**{f"field_{i}": 1 for i in range(100_000)}, "temperature": 9.0},
    "names": lambda: {**{"x" * 1_000_000 + str(i): 1 for i in range(10)}, "max_tokns": 1},
    "text": lambda: {"temperature": "9" * 1_000_000},
    "max_tokens": lambda: {"max_tokens": 10**400},
    "seed": lambda: {"seed": -(10**400)},
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_input_is_refused_quickly_in_one_short_sentence(name: str) -> None:
    request = {"messages": HELLO, **HUGE[name]()}
    try:
        request_made = ChatRequest.parse(request)
        limit = request.get("max_tokens")
        sampling = request_made.sampling_params(max_tokens=limit, logprobs=None)
    except InvalidRequestError:
        refusal(ChatRequest, request)
    else:  # Ranges of numbers are checked with the sampling parameters.
        with pytest.raises(InvalidRequestError):
            sampling.check(max_logprobs=20, vocab_size=100)


@pytest.mark.parametrize(
    ("model", "fields", "renamed"),
    [
        (ChatRequest, {"messages": HELLO}, {"max_tokens": 5, "logprobs": None}),
        (CompletionRequest, {"prompt": "x"}, {}),
        (MessagesRequest, {"model": "m", "messages": HELLO, "max_tokens": 5}, {}),
        (ResponsesRequest, {"input": "x"}, {}),
        (NativeSampling, {}, {}),
    ],
    ids=["chat", "completions", "messages", "responses", "generate"],
)
def test_a_sampling_parameter_is_one_field_for_all_dialects(
    model: type[SamplingFields], fields: dict[str, Any], renamed: dict[str, Any]
) -> None:
    values = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5,
        "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {"3": 1.0},
        "stop_token_ids": [5], "ignore_eos": True,
    }  # fmt: skip
    assert values.keys() == SamplingFields.model_fields.keys() - {"stream_interval"}
    sampling = model.parse(fields | values).sampling_params(**renamed)
    converted = values | {"logit_bias": {3: 1.0}, "stop_token_ids": (5,)}
    assert {name: getattr(sampling, name) for name in values} == converted


def test_refused_combinations_and_misspelt_inner_fields_name_the_remedy() -> None:
    with pytest.raises(InvalidRequestError, match="logprobs=true"):
        _ = chat(top_logprobs=3).num_logprobs
    with pytest.raises(InvalidRequestError, match="stream=false"):
        sampling_of(stream=True, prompt_logprobs=1)
    with pytest.raises(InvalidRequestError, match="echo=true"):
        _ = CompletionRequest.parse({"prompt": "a", "max_tokens": 0}).scores_only
    error = refused(stream_options={"include_usages": True})
    assert error.param == "stream_options.include_usages"
    assert "'include_usage'" in error.message


def test_answers_carry_the_clients_id_and_deltas_only_new_fields() -> None:
    assert chat(request_id="a-1").answer_id("chatcmpl") == "chatcmpl-a-1"
    assert chat(rid="a-2").answer_id("chatcmpl") == "chatcmpl-a-2"
    assert len({chat().answer_id("chatcmpl") for _ in range(3)}) == 3
    choice = json.loads(encode(ChatChunkChoice(0, Delta(content="x"))))
    always = {"logprobs": None, "finish_reason": None}
    assert choice == {"index": 0, "delta": {"content": "x"}, **always}
    call = ToolCall(index=1, function=FunctionCall(arguments="{"))
    assert json.loads(encode(call)) == {"index": 1, "function": {"arguments": "{"}}


@pytest.mark.parametrize(
    "prompt", [None, [], {}, 5, [True], [1, "a"], [1, 2.0], [["a"]], ["a"] * 1000, [None]]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    assert (refusal(CompletionRequest, {"prompt": prompt}).param or "").startswith("prompt")


def test_every_ignored_and_refused_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    for model in (ChatRequest, CompletionRequest):
        names = {*model.model_fields, *model.ignored_fields, *model.unsupported_fields}
        assert [name for name in names - {"prompt"} if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (NativeRequest, {"input_ids": True}),
        (NativeRequest, {"input_ids": [True]}),
        (NativeRequest, {"text": 1}),
        (NativeRequest, {"text": "x", "sampling_params": 1}),
        (NativeRequest, {"text": "x", "rid": 1}),
        (ChatRequest, {"messages": HELLO, "allowed_token_ids": True}),
        (ChatRequest, {"messages": HELLO, "guided_choice": 1}),
        (CountRequest, {"model": "nano", "messages": HELLO, "system": 1}),
        (CountRequest, {"model": "nano", "messages": 1}),
        (ResponsesRequest, {"input": 1}),
        (ResponsesRequest, {"input": "x", "include": 1}),
        (ResponsesRequest, {"input": "x", "tools": 1}),
        (ResponsesRequest, {"input": "x", "metadata": {"a": 1}}),
    ],
)
def test_many_wrong_elements_are_refused(model: type[RequestModel], fields: dict[str, Any]) -> None:
    """Fill the last field with many invalid elements, or with an object of many invalid values."""
    name, wrong = list(fields.items())[-1]
    many: Any = [wrong] * 300_000
    if isinstance(wrong, dict):
        many = {str(number): 1 for number in range(300_000)}
    try:
        model.model_validate(fields | {name: many})
    except ValidationError as error:
        assert error.error_count() <= 3  # one error per type of the field
    except InvalidRequestError:
        pass  # The field has a length limit.
    assert refusal(model, fields | {name: many}).param.startswith(name)


# --- answers -------------------------------------------------------------------------------------


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tool_choice", "mode", "name"), read_table("api_schemas.every_shape_of_tool_choice")
)
def test_every_shape_of_tool_choice(tool_choice: object, mode: str, name: str | None) -> None:
    request = chat(tools=[tool("f"), tool("my-tool.v2")], tool_choice=tool_choice)
    choice = request.call_choice(request.offered_tools)
    assert (choice.mode, choice.name, choice.parallel) == (mode, name, mode != "function")
    assert choice.is_forced == (mode in ("required", "function"))


SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}


def json_format(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"), read_table("api_schemas.every_name_of_a_form"), ids=str
)
def test_every_name_of_a_form(fields: dict[str, Any], kind: str, text: object) -> None:
    completion = CompletionRequest.parse({"prompt": "x", **fields})
    for grammar in (chat(**fields).grammar, completion.grammar):
        assert grammar is not None and grammar.kind == kind
        # The schema keeps the key order of the client.
        assert grammar.text == (text if isinstance(text, str) else json.dumps(text))


COMPACT_KEY = "disable_any_whitespace"
COMPACT = {"structured_outputs": {COMPACT_KEY: True}}


@pytest.mark.parametrize("strict", [True, False, None])
def test_schema_is_strict_only_where_asked(strict: bool | None) -> None:
    grammar = chat(**json_format(name="x", schema=SCHEMA, strict=strict)).grammar
    assert grammar is not None and grammar.strict == (strict is True)
    compact = chat(**json_format(schema=SCHEMA, strict=strict), **COMPACT).grammar
    assert compact == replace(grammar, compact=True)


NO_FORMS = [
    COMPACT, {}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json": None}},
]  # fmt: skip


@pytest.mark.parametrize("fields", [*NO_FORMS, {"structured_outputs": {}}], ids=str)
def test_no_form(fields: dict[str, Any]) -> None:
    assert chat(**fields).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"), read_table("api_schemas.wrong_form_is_refused_with_its_field"), ids=str
)
def test_wrong_form_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        _ = chat(**fields).grammar
    assert error.value.param == param
    assert str(error.value).startswith(param)


def test_offered_tools() -> None:
    root = {"role": "root", "content": "x", "tools": [tool("a")]}
    messages = [root, *HELLO, {"role": "system", "tools": [tool("b")]}]
    offered = chat(messages=messages, tools=[tool("c")]).offered_tools
    assert offered == [tool("c"), tool("a"), tool("b")]
    assert chat(messages=messages, tool_choice="none").offered_tools is None
    for wrong in ("x", [5], [{"function": {}}]):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tools"):
            _ = chat(messages=[{**root, "tools": wrong}]).offered_tools
    tools = [tool("my-tool.v2")]
    assert chat(tools=tools).offered_tools == tools
    assert chat(tools=tools, tool_choice="none").offered_tools is None
    assert chat(tools=[]).offered_tools is None


BUDGET = {"budget_tokens": 5}
OFF = {"enable_thinking": False, "reasoning_effort": "none"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ThinkingChoice()),
        ({"thinking": {"type": "disabled"}}, ThinkingChoice("disabled")),
        ({"thinking": BUDGET | {"type": "adaptive"}}, ThinkingChoice("adaptive", budget=5)),
        ({"thinking": BUDGET}, ThinkingChoice("enabled", budget=5)),
        ({"thinking": BUDGET, "thinking_token_budget": 6}, ThinkingChoice("enabled", budget=6)),
        ({"thinking_token_budget": 6, "max_thinking_tokens": 7}, ThinkingChoice(budget=6)),
        ({"max_thinking_tokens": 0}, ThinkingChoice(budget=0)),
        ({"thinking_mode": "adaptive"}, ThinkingChoice("adaptive")),
        ({"enable_thinking": False}, ThinkingChoice("disabled")),
        ({"enable_thinking": True}, ThinkingChoice("enabled")),
        ({"reasoning_effort": "none"}, ThinkingChoice(effort="none")),
        ({"thinking": {}, **OFF}, ThinkingChoice("enabled", "none")),
    ],
    ids=str,
)
def test_thinking_switch_by_every_name(fields: dict[str, Any], expected: ThinkingChoice) -> None:
    assert chat(**fields).thinking_choice == expected


M2_LIKE = ChatTemplate("{{ messages[0].content }}<think>\n")
M3_LIKE = ChatTemplate("{{ thinking_mode }}")


@pytest.mark.parametrize(
    ("choice", "of_m2", "of_m3"),
    [
        (ThinkingChoice(), None, None),
        (ThinkingChoice("enabled"), "enabled", "enabled"),
        (ThinkingChoice("disabled"), "disabled", "disabled"),
        (ThinkingChoice(effort="none"), "disabled", "disabled"),
        (ThinkingChoice(effort="minimal"), None, "disabled"),
        (ThinkingChoice(effort="low"), None, None),
        (ThinkingChoice(effort="max"), None, None),
        (ThinkingChoice("enabled", effort="none"), "enabled", "enabled"),
        (ThinkingChoice(budget=0), "disabled", "disabled"),
        (ThinkingChoice(budget=100), None, None),
    ],
    ids=str,
)
def test_thinking_modes(choice: ThinkingChoice, of_m2: str | None, of_m3: str | None) -> None:
    assert (choice.mode_for(M2_LIKE), choice.mode_for(M3_LIKE)) == (of_m2, of_m3)
    assert choice.template_variables(M2_LIKE) == {}
    assert choice.template_variables(M3_LIKE) == ({"thinking_mode": of_m3} if of_m3 else {})


def test_template_gets_the_variables_that_it_reads() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ reasoning_effort }}")
    for mode, effort in (("enabled", {"reasoning_effort": "max"}), ("disabled", {})):
        expected = {"enable_thinking": mode == "enabled", **effort}
        assert ThinkingChoice(mode, "max").template_variables(template) == expected


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, None),
        ({"separate_reasoning": True}, ReasoningPlace.FIELD),
        ({"reasoning_split": True}, ReasoningPlace.FIELD),
        ({"reasoning_split": False}, ReasoningPlace.CONTENT),
        ({"separate_reasoning": False}, ReasoningPlace.CONTENT),
        ({"separate_reasoning": False, "reasoning_split": True}, ReasoningPlace.FIELD),
        ({"include_reasoning": False}, ReasoningPlace.NOWHERE),
        ({"include_reasoning": False, "separate_reasoning": False}, ReasoningPlace.NOWHERE),
    ],
    ids=str,
)
def test_where_reasoning_goes(fields: dict[str, Any], place: ReasoningPlace | None) -> None:
    assert chat(**fields).reasoning_place is place
