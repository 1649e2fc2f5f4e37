import contextlib
import json
import math
from typing import Any

import pytest

from negamax.base.errors import InvalidRequestError
from negamax.config.generation import SamplingDefaults
from negamax.config.grammar import (
    MAX_GROUPS,
    MAX_NESTING,
    MAX_TEXT_BYTES,
    Grammar,
    Marker,
    Reasoning,
)
from negamax.models.minimax_m2.chat import M2Calls
from negamax.models.minimax_m3.chat import M3Calls
from negamax.models.registry import CALL_STYLES
from negamax.scheduler.request import SamplingParams
from negamax.text.grammar.budget import MAX_BYTES, MAX_NODES, Budget
from negamax.text.grammar.structural_tag import content_format, structural_tag
from negamax.text.grammar.tool_calls import CallStyle, tool_grammar
from tests.speed import is_quick

TAG_IDS = {"<think>": 1, "</think>": 2, "<minimax:tool_call>": 3, "</minimax:tool_call>": 4}
TOO_LARGE = f"{MAX_NODES} nodes|{MAX_BYTES} bytes"


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def check(params: SamplingParams) -> None:
    params.check(max_logprobs=20, vocab_size=100)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[1]", "a list; an object or a boolean"),
        ("json_schema", nested(MAX_NESTING), f"{MAX_NESTING + 1} levels"),
        ("json_schema", nested(50_000), "nested too deeply"),
        ("regex", "(" * 201 + "a" + ")" * 201, "201 levels"),
        ("ebnf", "root ::= " + "(" * 35_000, "35000 levels"),
        ("choice", "[]", "one or more"),
        ("choice", '["a", 1]', "strings"),
        ("choice", json.dumps(["x"] * 2001), "2001 strings"),
        ("regex", "", "empty"),
        ("ebnf", "x" * (MAX_TEXT_BYTES + 1), str(MAX_TEXT_BYTES)),
        ("regex", "é" * (MAX_TEXT_BYTES // 2 + 1), str(MAX_TEXT_BYTES)),
        ("regex", "\ud800", "surrogate"),
        ("json_schema", '{"enum": ["a", "\\ud800"]}', r"lone surrogate at '.enum\[1\]'"),
        ("json_schema", '{"maximum": 1e400}', "infinite number .* at '.maximum'"),
        ("structural_tag", "[]", "an object"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_refuses_invalid_grammars_in_the_request(kind: Any, text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check(SamplingParams(grammar=Grammar(kind=kind, text=text)))
    assert caught.value.http_status == 400


def make_reasoning(closing_ids: tuple[int, ...] = (5,)) -> Reasoning:
    opener, closer, call = map(Marker, ("<think>", "</think>", "<minimax:tool_call>"), (1, 2, 3))
    markers = {"opener": opener, "closer": closer, "call_opener": call}
    return Reasoning(state="open", **markers, closing_ids=closing_ids, max_newlines=3)


def test_valid_grammars_and_budgets_are_constraints() -> None:
    check(SamplingParams(grammar=Grammar(kind="json_object")))
    check(SamplingParams(grammar=Grammar(kind="json_schema", text=nested(MAX_NESTING - 1))))
    for params in (
        SamplingParams(thinking_token_budget=-1),
        SamplingParams(reasoning=make_reasoning(closing_ids=(100,))),
        SamplingParams(reasoning=make_reasoning(closing_ids=())),
    ):
        with pytest.raises(InvalidRequestError):
            check(params)
    reasoning = make_reasoning()
    assert SamplingParams(reasoning=reasoning, thinking_token_budget=0).is_constrained
    assert not SamplingParams(thinking_token_budget=5).is_constrained
    assert not SamplingParams(reasoning=reasoning).is_constrained
    schema = {"properties": {"not": {"type": "string"}, "if": {}, "uniqueItems": True}}
    text = format_schema(schema)["grammar"]
    assert text.index("not") < text.index("if") < text.index("uniqueItems")


# --- JSON schemas --------------------------------------------------------------------------------


NULL = {"type": "null"}


def format_schema(schema: Any) -> dict[str, Any]:
    text = json.dumps(schema)
    return content_format(Grammar(kind="json_schema", text=text), Budget(), CALL_STYLES)


def test_open_reasoning_is_no_part_of_a_grammar_and_nothing_is_unless_asked() -> None:
    content = Grammar(kind="json_object")
    alone = json.loads(structural_tag(content, None, CALL_STYLES))["format"]
    after = json.loads(structural_tag(content, make_reasoning(), CALL_STYLES))["format"]
    assert after["elements"][1:] == [alone]
    assert "think" not in json.dumps(after)
    compact = Grammar(kind="json_object", compact=True)
    assert "space ::=" not in structural_tag(compact, None, CALL_STYLES)
    assert "space ::=" in alone["grammar"]
    tools, style = [{"type": "function", "function": {"name": "f"}}], M2Calls(TAG_IDS)
    assert tool_grammar(tools, style) is None
    assert tool_grammar([], style) is None
    content = Grammar(kind="json_object")
    assert tool_grammar([], style, content=content) is content
    assert tool_grammar(tools, style, parallel=False) is not None


def row_of(formats: list[Any]) -> str:
    return json.dumps({"format": {"type": "sequence", "elements": formats}})


REPEATED = '(("a"|[b-z]*){1,9} "q"){1,9}'
PLAIN = {"type": "const_string", "value": "a"}
RISKS: list[tuple[str, str, bool]] = [
    ("regex", "[A-Z][a-z]{1,8}, \\d{3}", False),
    ("regex", ".{2000}", False),
    ("regex", "(" * MAX_GROUPS + "a" + ")" * MAX_GROUPS, False),
    ("regex", "[(]\\(" * 210, True),  # no groups
    ("ebnf", 'root ::= ' + '"(" [(] # (\n' * 300, True),
    ("regex", "([a-z]{1,9}q){1,9}", True),
    ("regex", "[a-z]*" * 11, True),
    ("regex", "a" * 1001, True),
    ("ebnf", "root ::= " + REPEATED, True),
    ("choice", json.dumps(["yes", "no"]), False),
    ("choice", json.dumps(["a" * 40_000]), True),
    ("choice", json.dumps([f"{place:05} " * 7 for place in range(2000)]), True),
    ("json_schema", json.dumps({"properties": {"a": {"maxLength": 4000}, "b": {}}}), False),
    ("json_schema", json.dumps({"properties": {n: {"type": "number"} for n in range(999)}}), False),
    ("json_schema", json.dumps({"enum": ["a" * 40_000]}), True),
    ("json_schema", json.dumps({"prefixItems": [{"type": "null"}] * 1100}), True),
    ("json_schema", json.dumps({"pattern": "^((a|b*){1,30}q){1,30}$"}), True),
    ("structural_tag", row_of([PLAIN] * 99), False),
    ("structural_tag", row_of([PLAIN] * 999), True),
    ("structural_tag", row_of([{"type": "star", "content": PLAIN}]), True),
    ("structural_tag", row_of([{"type": "json_schema", "style": "qwen_xml"}]), True),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "is_risky"), RISKS)
def test_grammars_that_may_take_long_are_risky(kind: Any, text: str, is_risky: bool) -> None:
    grammar, budget = Grammar(kind=kind, text=text, strict=False), Budget()
    grammar.check()
    structural_tag(grammar, None, CALL_STYLES, budget)
    assert budget.is_risky == is_risky


# --- tool calls ----------------------------------------------------------------------------------


def strict_tool(**parameters: Any) -> dict[str, Any]:
    return {"name": "f", "strict": True, "parameters": parameters}


def tag_of(tool: dict[str, Any], style: CallStyle | None = None, **options: Any) -> str:
    grammar = tool_grammar([tool], style or M2Calls(TAG_IDS), **{"choice": "required"} | options)
    assert grammar is not None
    grammar.check()
    return structural_tag(grammar, None, CALL_STYLES)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"name": "f" * 513}, "513 characters"),
        (strict_tool(properties={"a": {"not": {}}}), "'not'"),
        (strict_tool(properties={"": {}}), "0 characters"),
        (strict_tool(properties={"a": {"enum": ["</parameter>"]}}), "cannot be written"),
        (strict_tool(properties={"a": {"const": "\ud800"}}), r"'parameters.properties.a.const'"),
        (strict_tool(minProperties=math.inf), "an infinite number .* at 'parameters.minProp"),
    ],
)
def test_refuses_tools_that_cannot_be_called_as_asked(tool: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        tag_of(tool, choice="required" if len(tool["name"]) > 1 else "auto")


def test_tool_without_followable_schema_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    kinds = (HOSTILE["itself"], {"type": "null"}, {"maximum": math.inf}, {"const": "\ud800"})
    tools = [{"name": f"g{place}", "parameters": part} for place, part in enumerate(kinds * 10)]
    followed: dict[str, Any] = {"properties": {"a": {"const": "followed", "title": "\ud800"}}}
    followed = {"name": "f", "parameters": followed}
    for _ in range(2):
        grammar = tool_grammar([*tools, followed], M2Calls(TAG_IDS), choice="required")
        assert grammar is not None
        assert "followed" in structural_tag(grammar, None, CALL_STYLES)
    assert len(caplog.messages) == len(tools) and "'g2' do not follow" in caplog.messages[0]
    assert tag_of(tools[0]) == tag_of({"name": "g0"})


def test_recursive_and_unlisted_names_end_or_are_refused() -> None:
    def recursive(names: Any) -> dict[str, Any]:
        tree = {"type": "object", "properties": {name: {"$ref": "#/$defs/t"} for name in names}}
        return {"$ref": "#/$defs/t", "$defs": {"t": tree}}

    assert tag_of(strict_tool(**recursive("ab")), M3Calls())
    with pytest.raises(InvalidRequestError, match=TOO_LARGE):
        tag_of(strict_tool(**recursive(map(str, range(12)))), M3Calls())
    schema = unlisted(8)
    assert len(format_schema(schema)["grammar"]) < 20 * len(json.dumps(schema))
    assert len(tag_of({"name": "f", "parameters": schema})) < 400_000
    with pytest.raises(InvalidRequestError, match=TOO_LARGE):
        tag_of({"name": "f", "parameters": schema, "strict": True}, M3Calls())


def unlisted(levels: int, *, names: int = 20) -> dict[str, Any]:
    inner = {"type": "string"} if levels == 1 else unlisted(levels - 1, names=names)
    required = [f"p{i}" for i in range(names)]
    return {"type": "object", "required": required, "additionalProperties": inner}


def repeated(keyword: str, value: Any) -> dict[str, Any]:
    properties = {f"p{i}": {"$ref": "#/$defs/long"} for i in range(5000)}
    return {"type": "object", "properties": properties, "$defs": {"long": {keyword: value}}}


LONG = "a" * 100_000
DOUBLING: dict[str, Any] = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)
}
DOUBLING["d40"] = {"type": "object", "properties": {"a": {}}}
MANY: dict[str, Any] = {f"p{i}": {} for i in range(9000)}
POINTERS = {"a": {"$ref": "#" + "/a" * 50_000}}
HOSTILE = {
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    "itself below": {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}},
    "doubling": {"$ref": "#/$defs/d0", "$defs": DOUBLING},
    "doubling below": {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": DOUBLING},
    "long pattern": repeated("pattern", LONG),
    "long enum": repeated("enum", [LONG]),
    "long text": repeated("description", LONG) | {"additionalProperties": {"type": "integer"}},
    "many types": {"properties": MANY, "type": ["object", "array"] * 9000},
    "long pointers": {"$defs": POINTERS, "anyOf": [{"$ref": "#/$defs/a"}] * 9000},
}


@pytest.mark.parametrize("style", ["m2", "m3"])
@pytest.mark.parametrize("name", HOSTILE)
def test_expanding_schemas_are_refused_in_time(name: str, style: str) -> None:
    calls = M2Calls(TAG_IDS) if style == "m2" else M3Calls()

    def expand() -> None:
        with contextlib.suppress(InvalidRequestError):
            assert len(tag_of({"name": "f", "parameters": HOSTILE[name]}, calls)) < 2 * MAX_BYTES
        with contextlib.suppress(InvalidRequestError):
            assert len(json.dumps(format_schema(HOSTILE[name]))) < 2 * MAX_BYTES

    assert is_quick(expand, 5.0)


@pytest.mark.parametrize("style", [M2Calls(TAG_IDS), M3Calls()], ids=["m2", "m3"])
def test_a_large_honest_schema_is_followed(style: CallStyle) -> None:
    part = {"type": "object", "properties": {"a": {"type": "string"}}}
    properties = {f"p{i}": {"$ref": f"#/$defs/part{i}"} for i in range(300)}
    definitions = {f"part{i}": part for i in range(300)}
    tool = strict_tool(type="object", properties=properties, **{"$defs": definitions})
    assert len(tag_of(tool, style)) < 700_000


@pytest.mark.parametrize("options", [{"choice": "required"}, {"choice": "auto", "parallel": False}])
def test_tags_without_tokens_are_text(options: dict[str, Any]) -> None:
    tag = tag_of({"name": "f"}, M2Calls({}), **options)
    assert '"token"' not in tag and "<minimax:tool_call>" in tag


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 10**9]),
        ("temperature", [-0.1, 5.0, math.nan]),
        ("top_p", [0.0, 1.1]),
        ("top_k", [-2]),
        ("min_p", [1.5]),
        ("repetition_penalty", [0.0, math.inf]),
        ("frequency_penalty", [2.5]),
        ("presence_penalty", [-2.5]),
        ("seed", [2**63]),
        ("max_tokens", [0, -1]),
        ("min_tokens", [-1]),
        ("logprobs", [21]),
        ("prompt_logprobs", [-1]),
        ("stop", [("x",) * 33, ("",), ("x" * 2000,)]),
        ("stop_token_ids", [(4160,), tuple(range(257))]),
        ("logit_bias", [{4160: 1.0}, {1: 101.0}, dict.fromkeys(range(1025), 1.0)]),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value}).check(max_logprobs=20, vocab_size=4160)
        assert caught.value.param == field
        assert field in caught.value.message and "allowed" in caught.value.message
        assert len(caught.value.message) < 300


def test_limits_themselves_are_accepted() -> None:
    params = SamplingParams(
        n=128, temperature=2.0, top_p=1.0, top_k=-1, min_p=1.0, max_tokens=1, logprobs=20,
        stop=("x",) * 32, seed=-(2**63),
    )  # fmt: skip
    params.check(max_logprobs=20, vocab_size=10)
    with pytest.raises(InvalidRequestError, match="min_tokens is 5; allowed: 0 to 4"):
        SamplingParams(min_tokens=5, max_tokens=4).check(max_logprobs=20, vocab_size=10)


def test_defaults_fill_missing_fields_and_seeds_of_choices_wrap() -> None:
    defaults = SamplingDefaults(
        temperature=1.0, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.1
    )
    resolved = SamplingParams(temperature=0.5).resolved(defaults, room=77)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.5, 0.95, 40)
    assert (resolved.min_p, resolved.repetition_penalty, resolved.max_tokens) == (0.01, 1.1, 77)
    assert SamplingParams(top_k=-1, max_tokens=3).resolved(defaults, room=77).top_k == 0
    params = SamplingParams(n=3, seed=2**63 - 1, temperature=0.5)
    choices = [params.copy_for_choice(index, seed=2**63 - 1) for index in range(3)]
    assert [choice.seed for choice in choices] == [2**63 - 1, -(2**63), 1 - 2**63]
    assert {(choice.n, choice.temperature) for choice in choices} == {(1, 0.5)}
    assert params.copy_for_choice(2, seed=-3).seed == -1
