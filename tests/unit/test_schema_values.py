"""Argument text to JSON by schema."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.text.parser.schema_values import ToolSchemas, json_string_body, json_value, parse_json
from negamax.text.schema_walk import find_types

TYPE_NAMES = ("null", "integer", "number", "boolean", "object", "array", "string")


def types_of(schema: Any, root: Any = None) -> set[str]:
    return set(find_types([schema], root=root))


def convert(text: str, *types: str) -> Any:
    return parse_json(json_value(text, frozenset(types)))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "object"}, {"anyOf": [{"type": "string"}]}]}, {"object", "string"}),
        ({"allOf": [{"type": "number"}, {"minimum": 0}]}, {"number"}),
        ({"enum": ["low", "high", None]}, {"string", "null"}),
        ({"enum": [1, 2.5, True, [], {}]}, {"integer", "number", "boolean", "array", "object"}),
        ({"const": 3}, {"integer"}),
        ({"type": "string", "enum": ["none", "1"]}, {"string"}),
        ({"properties": {"a": {}}}, {"object"}),
        ({"items": {"type": "string"}}, {"array"}),
        ({"description": "anything"}, set()),
        ({"type": "any"}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types_of_a_schema(schema: Any, expected: set[str]) -> None:
    assert types_of(schema) == expected


DEFINITIONS: dict[str, Any] = {
    "$defs": {
        "a/b": {"type": "integer"},
        "c~d": {"$ref": "#/$defs/a~1b"},
        "loop": {"anyOf": [{"$ref": "#/$defs/back"}, {"type": "string"}]},
        "back": {"$ref": "#/$defs/loop"},
        **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(64)},
        "d64": {"type": "boolean"},
    },
    "definitions": {"e f": {"type": "null"}},
}


@pytest.mark.parametrize(
    ("references", "expected"),
    [
        (["#/$defs/c~0d"], {"integer"}),
        (["#/$defs/a~1b", "#/definitions/e%20f"], {"integer", "null"}),
        (["#/$defs/missing"], set()),
        (["https://example.com/schema"], set()),
        (["#/$defs/back"], {"string"}),  # a loop ends
        (["#/$defs/d0"], {"boolean"}),  # doubled references are walked once
    ],
)
def test_references_are_resolved(references: list[str], expected: set[str]) -> None:
    schema = {"anyOf": [{"$ref": reference} for reference in references]}
    assert types_of(schema, DEFINITIONS) == expected


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("007", ["string"], "007"),
        ("true", ["string"], "true"),
        ("null", ["string"], "null"),
        (" padded\n", ["string"], " padded\n"),
        ("521", [], "521"),
        (" 5 ", ["integer"], 5),
        ("007", ["integer"], 7),
        ("5.0", ["integer"], 5),
        ("5.5", ["integer"], "5.5"),
        ("-12", ["integer"], -12),
        ("12345678901234567890", ["integer"], 12345678901234567890),
        ("not_a_number", ["integer"], "not_a_number"),
        ("", ["integer"], ""),
        ("3.14", ["number"], 3.14),
        ("3.0", ["number"], 3),
        ("1e3", ["number"], 1000),
        ("12345678901234567890", ["number"], 12345678901234567890),
        ("NaN", ["number"], "NaN"),
        ("-Infinity", ["number"], "-Infinity"),
        ("1e999", ["number"], "1e999"),
        ("1e999", ["integer"], "1e999"),
        ("False", ["boolean"], False),
        ("TRUE\n", ["boolean"], True),
        ("1", ["boolean"], True),
        ("0", ["boolean"], False),
        ("yes", ["boolean"], "yes"),
        ('{"a": 1, "b": [true, null]}', ["object"], {"a": 1, "b": [True, None]}),
        ("\n[\n  1\n]\n", ["array"], [1]),
        ('{"a": 1', ["object"], '{"a": 1'),
        ("{'a': 1}", ["object"], "{'a': 1}"),
        ('{"a": NaN}', ["object"], '{"a": NaN}'),
        ("[1e999]", ["array"], "[1e999]"),
        ("null", ["string", "null"], None),
        ("NULL", ["integer", "null"], None),
        (" null ", ["integer", "null"], None),
        (" null ", ["string", "null"], " null "),
        (" null ", ["string", "integer", "null"], " null "),
        ("none", ["string", "null"], "none"),
        ("null", ["null"], None),
        ("other", ["null"], "other"),
        ("42", ["string", "integer"], 42),
        ("4.5", ["integer", "number"], 4.5),
        ("1", ["boolean", "integer"], 1),
        ("true", ["boolean", "string"], True),
        ('{"a":1}', ["object", "string"], {"a": 1}),
        ("[1", ["array", "string"], "[1"),
        ("[1]", ["object"], [1]),
        ("[1]", ["object", "string"], "[1]"),
        ("5", ["object"], "5"),
        ("9" * 4300, ["integer"], int("9" * 4300)),
        ("9" * 4301, ["integer"], "9" * 4301),  # beyond the limits of JSON readers
        ("-" + "9" * 30 + ".000", ["integer"], -int("9" * 30)),
        ("12345678901234567890.0", ["number"], 12345678901234567890),
        ("2e3", ["integer"], 2000),
        ("5.", ["integer"], 5),
        (".5", ["integer"], ".5"),
        ("[" * 200_000 + "]" * 200_000, ["array"], "[" * 200_000 + "]" * 200_000),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_conversion(text: str, types: list[str], expected: Any) -> None:
    value = convert(text, *types)
    assert value == expected
    assert type(value) is type(expected)


def test_large_floats_are_not_spelled_out() -> None:
    assert json_value("1e300", frozenset({"number"})) == "1e+300"


def test_escaped_lone_surrogate_can_be_sent_as_utf8() -> None:
    written = json_value('["\\ud800"]', frozenset({"array"}))
    written.encode()
    assert json.loads(written) == ["\ud800"]


@settings(deadline=None)
@given(text=st.text(), types=st.frozensets(st.sampled_from(TYPE_NAMES)))
def test_every_text_gives_valid_json(text: str, types: frozenset[str]) -> None:
    parse_json(json_value(text, types))


@settings(deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    )
)
def test_containers_keep_their_values(value: Any) -> None:
    for kind, name in ((dict, "object"), (list, "array")):
        if isinstance(value, kind):
            assert parse_json(json_value(json.dumps(value, indent=1), frozenset({name}))) == value


@settings(deadline=None)
@given(parts=st.lists(st.text()))
def test_string_bodies_join(parts: list[str]) -> None:
    assert json.loads('"' + "".join(map(json_string_body, parts)) + '"') == "".join(parts)


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_parameters_are_found_in_branches_and_references() -> None:
    schema = {
        "oneOf": [{"properties": {"number": {"type": "number"}}}, {"$ref": "#/$defs/named"}],
        "properties": {"id": {"type": "string"}},
        "additionalProperties": {"type": "boolean"},
        "patternProperties": {"^n_": {"type": "null"}},
        "$defs": {"named": {"properties": {"names": {"type": "array"}, "id": {"type": "integer"}}}},
    }
    arguments = ToolSchemas([tool("f", schema)]).arguments("f")
    assert arguments.member("number").types == {"number"}
    assert arguments.member("names").types == {"array"}
    assert arguments.member("id").types == {"string", "integer"}
    assert arguments.member("other").types == {"boolean", "null"}
    assert arguments.lists_members
    assert arguments.lists("names")
    assert not arguments.lists("other")


def test_members_and_items_are_found_at_every_depth_of_a_recursive_schema() -> None:
    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "children": {"$ref": "#/$defs/nodes"}},
    }
    schema = {
        "properties": {"root": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "$defs": {"node": node, "nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    }
    view = ToolSchemas([tool("f", schema)]).arguments("f").member("root")
    assert view.types == {"object", "null"}
    deeper = view.member("children").item(0)
    assert deeper.member("value").types == {"integer"}
    again = deeper.member("children").item(1)
    assert again is again.member("children").item(2)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": [{"type": "integer"}]},
        {"prefixItems": [{"type": "integer"}], "items": False},
        {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    ],
)
def test_items_of_every_way_to_write_an_array(schema: dict[str, Any]) -> None:
    view = ToolSchemas([tool("f", {"properties": {"x": schema}})]).arguments("f").member("x")
    assert view.item(0).types == {"integer"}
    assert "array" in view.types


@pytest.mark.parametrize("first", ["items", "prefixItems"])
def test_items_whose_place_says_what_they_are(first: str) -> None:
    schema = {"type": "array", first: [{"type": "integer"}, {"type": "string"}]}
    others = {"items": {"type": "boolean"}} if first == "prefixItems" else {}
    parameters = {"properties": {"x": schema | others}}
    view = ToolSchemas([tool("f", parameters)]).arguments("f").member("x")
    found = [view.item(place).types for place in range(4)]
    assert found == [{"integer"}, {"string"}, *[{"boolean"} if others else set()] * 2]


@pytest.mark.parametrize(
    "tools",
    [
        None, [], [tool("f")], [tool("f", {})], [tool("f", True)], [tool("f", [])],
        [{"type": "web_search"}],
    ],
)  # fmt: skip
def test_missing_schemas_mean_text(tools: list[dict[str, Any]] | None) -> None:
    arguments = ToolSchemas(tools).arguments("f")
    assert arguments.member("x").types == arguments.member("x").item(0).types == frozenset()
    assert not arguments.lists_members
    assert not ToolSchemas(tools).declares("g")


def test_bare_function_objects_are_read_too() -> None:
    schemas = ToolSchemas([{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}])
    assert schemas.declares("f")
    assert schemas.arguments("f").member("x").types == {"integer"}


def test_a_name_in_other_letter_case_is_a_declared_one_only_without_doubt() -> None:
    schemas = ToolSchemas([tool("Read"), tool("write"), tool("WRITE")])
    assert [schemas.declared_name(name) for name in ("Read", "READ", "write", "Write",
        "other")] == [
        "Read", "Read", "write", None, None,
    ]  # fmt: skip
