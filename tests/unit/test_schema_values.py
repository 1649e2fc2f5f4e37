import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negamax.text.parser.schema_values import (
    ToolSchemas,
    ValueSchema,
    json_string_body,
    json_value,
    parse_json,
)
from negamax.text.schema_walk import find_types

TYPE_NAMES = ("null", "integer", "number", "boolean", "object", "array", "string")


def types_of(schema: Any, root: Any = None) -> set[str]:
    return set(find_types([schema], root=root))


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
        (["#/$defs/back"], {"string"}),  # A cyclic reference is followed once.
        (["#/$defs/d0"], {"boolean"}),  # Doubled references are resolved once.
    ],
)
def test_references_are_resolved(references: list[str], expected: set[str]) -> None:
    schema = {"anyOf": [{"$ref": reference} for reference in references]}
    assert types_of(schema, DEFINITIONS) == expected


LONG, DEEP = "9" * 4300, "[" * 200_000 + "]" * 200_000
# types -> texts with their expected values; `...` means that the text stays text
CONVERSIONS: dict[tuple[str, ...], dict[str, Any]] = {
    (): {"521": ...},
    ("string",): {"007": ..., "true": ..., "null": ..., " padded\n": ...},
    ("integer",): {
        " 5 ": 5, "007": 7, "5.0": 5, "-12": -12, "2e3": 2000, "5.": 5, "5.5": ..., ".5": ...,
        "not_a_number": ..., "": ..., "1e999": ..., "12345678901234567890": 12345678901234567890,
        "-" + "9" * 30 + ".000": -int("9" * 30), LONG: int(LONG),
        f"9{LONG}": ...,  # The number is too long for JSON readers.
    },
    ("number",): {
        "3.14": 3.14, "3.0": 3, "1e3": 1000, "NaN": ..., "-Infinity": ..., "1e999": ...,
        "12345678901234567890": 12345678901234567890,
        "12345678901234567890.0": 12345678901234567890,
    },
    ("boolean",): {"False": False, "TRUE\n": True, "1": True, "0": False, "yes": ...},
    ("object",): {
        '{"a": 1, "b": [true, null]}': {"a": 1, "b": [True, None]}, '{"a": 1': ..., "{'a': 1}": ...,
        '{"a": NaN}': ..., "5": ..., "[1]": [1],
    },
    ("array",): {"\n[\n  1\n]\n": [1], "[1e999]": ..., DEEP: ...},
    ("null",): {"null": None, "other": ...},
    ("string", "null"): {"null": None, " null ": ..., "none": ..., "NULL": ..., "Null": ...},
    ("integer", "null"): {"NULL": None, " null ": None},
    ("string", "integer", "null"): {" null ": ...},
    ("string", "integer"): {"42": 42, "-7": -7, "5.0": ..., "12e5": ...} | dict.fromkeys(
        ("007", "+49", "1_000", "１２", " 5", "5\n", "-", ""), ...
    ),
    ("string", "number"): {"1.5e3": 1500, "0.50": 0.5, "42": 42, "1e999": ..., ".5": ...},
    ("integer", "number"): {"4.5": 4.5},
    ("boolean", "integer"): {"1": 1},
    ("boolean", "string"): {"true": True, "1": ..., "0": ..., "True": ..., " true": ...},
    ("object", "string"): {'{"a":1}': {"a": 1}, "[1]": ...},
    ("array", "string"): {"[1": ..., "[" * 65 + "]" * 65: ...},
}  # fmt: skip


@pytest.mark.parametrize("types", CONVERSIONS, ids=str)
def test_text_is_converted_by_its_types(types: tuple[str, ...]) -> None:
    for text, expected in CONVERSIONS[types].items():
        value = parse_json(json_value(text, frozenset(types)))
        wanted = text if expected is ... else expected
        assert value == wanted and type(value) is type(wanted), text[:30]


def test_large_floats_and_lone_surrogates_are_written_as_common_readers_take_them() -> None:
    assert json_value("1e300", frozenset({"number"})) == "1e+300"
    written = json_value('["\\ud800"]', frozenset({"array"}))
    written.encode()
    assert json.loads(written) == ["\ud800"]


@settings(deadline=None)
@given(text=st.text(), types=st.frozensets(st.sampled_from(TYPE_NAMES)))
def test_every_text_gives_valid_json(text: str, types: frozenset[str]) -> None:
    parse_json(json_value(text, types))


SIMPLE = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(SIMPLE, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(deadline=None, max_examples=50)
@given(value=st.lists(VALUES) | st.dictionaries(st.text(), VALUES))
def test_containers_keep_their_values(value: Any) -> None:
    kind = "array" if isinstance(value, list) else "object"
    assert parse_json(json_value(json.dumps(value, indent=1), frozenset({kind}))) == value


@settings(deadline=None)
@given(parts=st.lists(st.text()))
def test_string_bodies_join(parts: list[str]) -> None:
    assert json.loads('"' + "".join(map(json_string_body, parts)) + '"') == "".join(parts)


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def arguments_of(schema: Any) -> ValueSchema:
    return ToolSchemas([tool("f", schema)]).arguments("f")


def test_members_and_items_are_found_in_branches_references_and_recursion() -> None:
    schema = {
        "oneOf": [{"properties": {"number": {"type": "number"}}}, {"$ref": "#/$defs/named"}],
        "properties": {"id": {"type": "string"}},
        "additionalProperties": {"type": "boolean"},
        "patternProperties": {"^n_": {"type": "null"}},
        "$defs": {"named": {"properties": {"names": {"type": "array"}, "id": {"type": "integer"}}}},
    }
    arguments = arguments_of(schema)
    assert arguments.member("number").types == {"number"}
    assert arguments.member("names").types == {"array"}
    assert arguments.member("id").types == {"string", "integer"}
    assert arguments.member("other").types == {"boolean", "null"}
    assert arguments.names
    assert arguments.lists("names")
    assert not arguments.lists("other")
    members = {"value": {"type": "integer"}, "children": {"$ref": "#/$defs/nodes"}}
    nodes = {"type": "array", "items": {"$ref": "#/$defs/node"}}
    schema = {
        "properties": {"root": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "$defs": {"node": {"type": "object", "properties": members}, "nodes": nodes},
    }
    view = arguments_of(schema).member("root")
    assert view.types == {"object", "null"}
    deeper = view.member("children").item(0)
    assert deeper.member("value").types == {"integer"}
    again = deeper.member("children").item(1)
    assert again is again.member("children").item(2)


INTEGER, TEXT, FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "array", "items": INTEGER}, ["integer", "integer"]),
        ({"type": "array", "items": [INTEGER]}, ["integer", None]),
        ({"prefixItems": [INTEGER], "items": False}, ["integer", None]),
        ({"anyOf": [{"type": "array", "items": INTEGER}, {"type": "null"}]}, ["integer"]),
        ({"type": "array", "items": [INTEGER, TEXT]}, ["integer", "string", None]),
        ({"prefixItems": [INTEGER, TEXT], "items": FLAG}, ["integer", "string", *["boolean"] * 2]),
    ],
)
def test_items_have_the_type_of_their_place(schema: Any, types: list[str | None]) -> None:
    view = arguments_of({"properties": {"x": schema}}).member("x")
    found = [view.item(place).types for place in range(len(types))]
    assert found == [{name} if name else set() for name in types]
    assert "array" in view.types


@pytest.mark.parametrize(
    "tools",
    [None, [], [{"type": "web_search"}], *([tool("f", each)] for each in (None, {}, True, []))],
)
def test_missing_schemas_mean_text(tools: list[dict[str, Any]] | None) -> None:
    arguments = ToolSchemas(tools).arguments("f")
    assert arguments.member("x").types == arguments.member("x").item(0).types == frozenset()
    assert not arguments.names
    assert not ToolSchemas(tools).declares("g")


def test_functions_are_found_bare_and_in_other_letter_case() -> None:
    schemas = ToolSchemas([{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}])
    assert schemas.declares("f")
    assert schemas.arguments("f").member("x").types == {"integer"}
    schemas = ToolSchemas([tool("Read"), tool("write"), tool("WRITE")])
    for name, declared in (("Read", "Read"), ("READ", "Read"), ("write", "write")):
        assert schemas.declared_name(name) == declared
    assert schemas.declared_name("Write") is schemas.declared_name("other") is None
