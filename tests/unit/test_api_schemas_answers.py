import json
from typing import Any

import pytest
from request_support import HELLO, chat

from negamax.api.dialects.completions.schema import CompletionRequest
from negamax.api.schemas.thinking import ReasoningPlace, ThinkingChoice
from negamax.base.errors import InvalidRequestError
from negamax.text.chat_template import ChatTemplate


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tool_choice", "mode", "name"),
    [
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        (tool("my-tool.v2"), "function", "my-tool.v2"),
        ({"type": "function", "name": "my-tool.v2"}, "function", "my-tool.v2"),
    ],
)
def test_every_shape_of_tool_choice(tool_choice: object, mode: str, name: str | None) -> None:
    request = chat(tools=[tool("f"), tool("my-tool.v2")], tool_choice=tool_choice)
    choice = request.call_choice(request.offered_tools)
    assert (choice.mode, choice.name, choice.parallel) == (mode, name, mode != "function")
    assert choice.is_forced == (mode in ("required", "function"))


SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
TAG: dict[str, Any] = {"format": {}}


def json_format(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (json_format(name="x", schema=SCHEMA), "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": {}}, "json_schema", {}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_grammar": "root ::= [a]"}, "ebnf", "root ::= [a]"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": "root ::= [a]"}, "ebnf", "root ::= [a]"),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", TAG),
        ({"response_format": {"type": "text"}, "regex": "a+"}, "regex", "a+"),
    ],
    ids=str,
)
def test_every_name_of_a_form(fields: dict[str, Any], kind: str, text: object) -> None:
    completion = CompletionRequest.parse({"prompt": "x", **fields})
    for grammar in (chat(**fields).grammar, completion.grammar):
        assert grammar is not None and grammar.kind == kind
        # in the key order of the client
        assert grammar.text == (text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize("strict", [True, False, None])
def test_schema_is_strict_only_where_asked(strict: bool | None) -> None:
    grammar = chat(**json_format(name="x", schema=SCHEMA, strict=strict)).grammar
    assert grammar is not None and grammar.strict == (strict is True)


NO_FORMS = [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"x": 1}}]


@pytest.mark.parametrize("fields", [*NO_FORMS, {"structured_outputs": {}}], ids=str)
def test_no_form(fields: dict[str, Any]) -> None:
    assert chat(**fields).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (json_format(name="x"), "response_format.json_schema"),
        (json_format(schema="{"), "response_format.json_schema.schema"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"guided_json": "nonsense"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"json_schema": json.dumps([1])}, "json_schema"),
    ],
    ids=str,
)
def test_wrong_form_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        _ = chat(**fields).grammar
    assert error.value.param == param
    assert str(error.value).startswith(param)


def test_tools_of_instructions_are_offered_too() -> None:
    root = {"role": "root", "content": "x", "tools": [tool("a")]}
    messages = [root, *HELLO, {"role": "system", "tools": [tool("b")]}]
    offered = chat(messages=messages, tools=[tool("c")]).offered_tools
    assert offered == [tool("c"), tool("a"), tool("b")]
    assert chat(messages=messages, tool_choice="none").offered_tools is None
    for wrong in ("x", [5], [{"function": {}}]):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tools"):
            _ = chat(messages=[{**root, "tools": wrong}]).offered_tools


def test_tool_choice_none_hides_the_tools() -> None:
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
def test_every_name_of_the_thinking_switch(
    fields: dict[str, Any], expected: ThinkingChoice
) -> None:
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
def test_mode_of_a_thinking_choice_in_each_family(
    choice: ThinkingChoice, of_m2: str | None, of_m3: str | None
) -> None:
    assert (choice.mode_for(M2_LIKE), choice.mode_for(M3_LIKE)) == (of_m2, of_m3)
    assert choice.template_variables(M2_LIKE) == {}
    assert choice.template_variables(M3_LIKE) == ({"thinking_mode": of_m3} if of_m3 else {})


def test_template_gets_the_variables_that_it_reads() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ reasoning_effort }}")
    expected = {"enable_thinking": False, "reasoning_effort": "high"}
    assert ThinkingChoice("disabled", "high").template_variables(template) == expected


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
