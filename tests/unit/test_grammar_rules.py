import contextlib
import json
from typing import Any

import pytest

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import MAX_NESTING, MAX_TEXT_BYTES, Grammar, Marker, Reasoning
from negamax.models.minimax_m2.chat import M2Calls
from negamax.models.minimax_m3.chat import M3Calls
from negamax.models.registry import CALL_STYLES
from negamax.scheduler.request import SamplingParams
from negamax.text.grammar.json_schema import MAX_BYTES, MAX_NODES, Budget, prepared, resolve
from negamax.text.grammar.structural_tag import content_format, structural_tag
from negamax.text.grammar.tool_calls import CallStyle, tool_grammar
from tests.speed import is_quick

TAG_IDS = {"<think>": 1, "</think>": 2, "<minimax:tool_call>": 3, "</minimax:tool_call>": 4}


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(kind="json_schema", text="{"), "not valid JSON"),
        (Grammar(kind="json_schema", text="[1]"), "a list; an object or a boolean"),
        (Grammar(kind="json_schema", text=nested(MAX_NESTING)), f"{MAX_NESTING + 1} levels"),
        (Grammar(kind="json_schema", text=nested(50_000)), "nested too deeply"),
        (Grammar(kind="choice", text="[]"), "one or more"),
        (Grammar(kind="choice", text='["a", 1]'), "strings"),
        (Grammar(kind="choice", text=json.dumps(["x"] * 2001)), "2001 strings"),
        (Grammar(kind="regex"), "empty"),
        (Grammar(kind="ebnf", text="x" * (MAX_TEXT_BYTES + 1)), str(MAX_TEXT_BYTES)),
        (Grammar(kind="regex", text="é" * (MAX_TEXT_BYTES // 2 + 1)), str(MAX_TEXT_BYTES)),
        (Grammar(kind="regex", text="\ud800"), "surrogate"),
        (Grammar(kind="structural_tag", text="[]"), "an object"),
    ],
)
def test_a_grammar_that_cannot_be_meant_is_refused_at_the_border(
    grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(grammar=grammar).check(max_logprobs=20, vocab_size=100)
    assert caught.value.http_status == 400


def test_good_ones_pass_and_a_budget_alone_is_a_constraint_only_with_a_reasoning() -> None:
    for grammar in (
        Grammar(kind="json_object"),
        Grammar(kind="json_schema", text=nested(MAX_NESTING - 1)),
    ):
        SamplingParams(grammar=grammar).check(max_logprobs=20, vocab_size=100)
    reasoning = rules()
    assert SamplingParams(reasoning=reasoning, thinking_token_budget=0).is_constrained
    assert not SamplingParams(thinking_token_budget=5).is_constrained
    assert not SamplingParams(reasoning=reasoning).is_constrained


def test_budgets_and_reasonings_out_of_range_are_refused() -> None:
    for params in (
        SamplingParams(thinking_token_budget=-1),
        SamplingParams(reasoning=rules(closing_ids=(100,))),
        SamplingParams(reasoning=rules(closing_ids=())),
    ):
        with pytest.raises(InvalidRequestError):
            params.check(max_logprobs=20, vocab_size=100)


def rules(closing_ids: tuple[int, ...] = (5,)) -> Reasoning:
    return Reasoning(
        state="open",
        opener=Marker("<think>", 1),
        closer=Marker("</think>", 2),
        call_opener=Marker("<minimax:tool_call>", 3),
        closing_ids=closing_ids,
        max_newlines=3,
    )


def test_references_are_followed_and_loops_lead_nowhere() -> None:
    root = {
        "$defs": {
            "a": {"$ref": "#/$defs/b/c"},
            "b": {"c": {"type": "null"}},
            "loop": {"$ref": "#/$defs/loop"},
            "l": [1, 2],
        }
    }
    assert resolve({"$ref": "#/$defs/a"}, root=root) == {"type": "null"}
    assert resolve({"$ref": "#/$defs/loop"}, root=root) is None
    assert resolve({"$ref": "#/$defs/l/1"}, root=root) == 2
    assert resolve({"$ref": "other.json"}, root=root) is None
    assert resolve({"$ref": "#"}, root=root) == root


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        (
            {"type": ["string"], "nullable": True, "enum": ["a"]},
            {"type": ["string", "null"], "enum": ["a", None]},
        ),
        ({"nullable": False}, {}),
        ({"required": ["a"]}, {"required": ["a"], "properties": {"a": True}}),
        (
            {
                "properties": {"b": {"type": "array"}},
                "required": ["a", "b"],
                "additionalProperties": {"type": "null"},
            },
            {
                "properties": {"b": {"type": "array", "items": {}}, "a": {"type": "null"}},
                "required": ["a", "b"],
                "additionalProperties": {"type": "null"},
            },
        ),
        (
            {"enum": [{"nullable": True}], "default": {"type": "array"}},
            {"enum": [{"nullable": True}], "default": {"type": "array"}},
        ),
        (True, True),
    ],
)
def test_schemas_are_put_into_the_compilers_words_and_values_are_left_alone(
    schema: Any, made: Any
) -> None:
    assert prepared(schema, strict=False) == made


def test_property_names_that_look_like_keywords_are_no_keywords() -> None:
    schema = {"properties": {"not": {"type": "string"}, "if": {}, "uniqueItems": True}}
    assert prepared(schema, strict=True) == schema


def test_the_order_of_properties_is_the_clients() -> None:
    schema = {"properties": {"z": {}, "a": {}, "m": {}}, "required": ["m"]}
    made = content_format(
        Grammar(kind="json_schema", text=json.dumps(schema)), Budget(), CALL_STYLES
    )
    assert list(made["json_schema"]["properties"]) == ["z", "a", "m"]


def test_reasoning_in_front_is_a_part_of_the_grammar_only_where_it_may_be_missing() -> None:
    content = Grammar(kind="json_object")
    alone = json.loads(structural_tag(content, None, CALL_STYLES))["format"]
    after = json.loads(structural_tag(content, rules(), CALL_STYLES))["format"]
    assert after["elements"][1:] == [alone]
    assert "think" not in json.dumps(after)


@pytest.mark.parametrize(
    ("tools", "options", "words"),
    [
        ([{"name": 'f"'}], {"choice": "required"}, "quotes"),
        (
            [{"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}],
            {},
            "'not'",
        ),
        (
            [{"name": "f", "strict": True, "parameters": {"properties": {'a"': {}}}}],
            {},
            "parameter name",
        ),
        (
            [
                {
                    "name": "f",
                    "strict": True,
                    "parameters": {
                        "properties": {"a": {"items": {"$ref": "#/properties/b"}}, "b": {}}
                    },
                }
            ],
            {},
            r"\$defs",
        ),
    ],
)
def test_tools_that_cannot_be_called_as_asked_are_refused(
    tools: list[Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        tag_of(tools, **options)


def tag_of(tools: list[Any], style: CallStyle | None = None, **options: Any) -> str:
    grammar = tool_grammar(tools, style or M2Calls(TAG_IDS), **options)
    assert grammar is not None
    grammar.check()
    return structural_tag(grammar, None, CALL_STYLES)


def test_schema_that_cannot_be_followed_leaves_arguments_free_where_not_strict() -> None:
    tool = {"name": "f", "parameters": {"properties": {'a"': {}}}}
    assert tag_of([tool], choice="required") == tag_of([{"name": "f"}], choice="required")


def test_schemas_that_grow_without_end_are_refused_and_recursive_ones_are_cut() -> None:
    tree = {"type": "object", "properties": {key: {"$ref": "#/$defs/tree"} for key in "ab"}}
    tool = {
        "name": "f",
        "strict": True,
        "parameters": {"$ref": "#/$defs/tree", "$defs": {"tree": tree}},
    }
    assert tag_of([tool], M3Calls(), choice="required")
    wide = {"type": "object", "properties": {str(i): {"$ref": "#/$defs/tree"} for i in range(12)}}
    tool = {
        "name": "f",
        "strict": True,
        "parameters": {"$ref": "#/$defs/tree", "$defs": {"tree": wide}},
    }
    with pytest.raises(InvalidRequestError, match=f"{MAX_NODES} nodes|{MAX_BYTES} bytes"):
        tag_of([tool], M3Calls(), choice="required")


def unlisted(levels: int, *, names: int = 20) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"} if levels == 1 else unlisted(levels - 1, names=names)
    return {
        "type": "object",
        "required": [f"p{i}" for i in range(names)],
        "additionalProperties": inner,
    }


def doubling(levels: int) -> dict[str, Any]:
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {
        "$ref": "#/$defs/d0",
        "$defs": {**twice, f"d{levels}": {"type": "object", "properties": {"a": {}}}},
    }


def repeated(keyword: str, value: Any) -> dict[str, Any]:
    long = {"$defs": {"long": {keyword: value}}}
    return {
        "type": "object",
        "properties": {f"p{i}": {"$ref": "#/$defs/long"} for i in range(5000)},
        **long,
    }


HOSTILE = {
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    "itself below": {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}},
    "doubling": doubling(40),
    "doubling below": {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": doubling(40)["$defs"]},
    "long pattern": repeated("pattern", "a" * 100_000),
    "long enum": repeated("enum", ["a" * 100_000]),
    "long description": repeated("description", "a" * 100_000)
    | {"additionalProperties": {"type": "integer"}},
    "many types": {
        "properties": {f"p{i}": {} for i in range(9000)},
        "type": ["object", "array"] * 9000,
    },
    "long pointers": {
        "$defs": {"a": {"$ref": "#" + "/a" * 50_000}},
        "anyOf": [{"$ref": "#/$defs/a"}] * 9000,
    },
}


@pytest.mark.parametrize("style", ["m2", "m3"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_schema_that_comes_to_much_is_refused_in_time(name: str, style: str) -> None:
    calls = M2Calls(TAG_IDS) if style == "m2" else M3Calls()

    def expand() -> None:
        with contextlib.suppress(InvalidRequestError):
            assert (
                len(tag_of([{"name": "f", "parameters": HOSTILE[name]}], calls, choice="required"))
                < 2 * MAX_BYTES
            )
        with contextlib.suppress(InvalidRequestError):
            content = content_format(
                Grammar(kind="json_schema", text=json.dumps(HOSTILE[name])), Budget(), CALL_STYLES
            )
            assert len(json.dumps(content)) < 2 * MAX_BYTES

    assert is_quick(expand, 5.0)


def test_required_names_that_are_not_listed_share_one_definition() -> None:
    schema = unlisted(8)
    made = json.dumps(prepared(schema, strict=True))
    assert len(made) < 10 * len(json.dumps(schema))
    assert len(tag_of([{"name": "f", "parameters": schema}], choice="required")) < 200_000
    with pytest.raises(InvalidRequestError, match=f"{MAX_NODES} nodes|{MAX_BYTES} bytes"):
        tag_of([{"name": "f", "parameters": schema}], M3Calls(), choice="required")
    assert resolve(
        prepared(schema, strict=True)["properties"]["p7"], root=prepared(schema, strict=True)
    )["required"]


def test_what_a_schema_defines_itself_keeps_its_name() -> None:
    schema = unlisted(2) | {"$defs": {"shared0": {"type": "null"}}}
    made = prepared(schema, strict=True)
    assert made["$defs"]["shared0"] == {"type": "null"}
    assert resolve(made["properties"]["p0"], root=made)["properties"]["p19"] == {"type": "string"}


def test_a_large_honest_schema_is_followed() -> None:
    parts = {
        f"part{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(300)
    }
    properties = {f"p{i}": {"$ref": f"#/$defs/part{i}"} for i in range(300)}
    tool = {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": properties, "$defs": parts},
    }
    for style in (M2Calls(TAG_IDS), M3Calls()):
        assert len(tag_of([tool], style, choice="required")) < 300_000


def test_nothing_is_enforced_where_nothing_was_asked() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert tool_grammar(tools, M2Calls(TAG_IDS)) is None
    assert tool_grammar([], M2Calls(TAG_IDS)) is None
    content = Grammar(kind="json_object")
    assert tool_grammar([], M2Calls(TAG_IDS), content=content) is content
    assert tool_grammar(tools, M2Calls(TAG_IDS), parallel=False) is not None


def test_without_tokens_of_their_own_tags_are_text() -> None:
    tools = [{"name": "f"}]
    for options in ({"choice": "required"}, {"parallel": False}):
        tag = tag_of(tools, M2Calls({}), **options)
        assert '"token"' not in tag and "<minimax:tool_call>" in tag
