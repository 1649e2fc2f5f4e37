"""Calls against declared tools, as `negamax verify` judges them."""

import pytest

from negamax.bench.server_probe import JudgedAnswer
from negamax.bench.verify_checks import find_wrong_call, list_checks, read_own_cases

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "count": {"type": "integer", "minimum": 1},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1},
    },
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"point": POINT},
}
TOOLS = [{"function": {"name": "f", "parameters": PARAMETERS}}, {"function": {"name": "now"}}]


def judge(name: str, arguments: str) -> str | None:
    return find_wrong_call(JudgedAnswer(calls=[(name, arguments)]), TOOLS)


@pytest.mark.parametrize(
    "arguments",
    ['{"unit": "kelvin"}', '{"points": [{"x": 1}], "note": null, "count": 2.0, "unit": "celsius"}'],
)
def test_arguments_that_follow_the_schema_pass(arguments: str) -> None:
    assert judge("f", arguments) is judge("now", "{}") is None


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"unit": "fahrenheit"}',
        '{"unit": "kelvin", "count": "2"}',
        '{"unit": "kelvin", "count": 0}',
        '{"unit": "kelvin", "note": "long"}',
        '{"unit": "kelvin", "points": []}',
        '{"unit": "kelvin", "points": [{"x": 1}, {"y": 1}]}',
        '{"unit": "kelvin", "more": 1}',
        '{"unit": "kelvin", "count": NaN}',
        '{"unit": "kelvin"',
        '["kelvin"]',
        "",
    ],
)
def test_arguments_that_break_the_schema_fail(arguments: str) -> None:
    assert str(judge("f", arguments)).startswith("arguments of f ")


def test_missing_and_undeclared_calls_fail() -> None:
    assert (
        find_wrong_call(JudgedAnswer(finish_reason="stop"), TOOLS)
        == "no call (finish_reason 'stop')"
    )
    assert judge("g", "{}") == "a call of 'g', which is not declared"


def test_every_case_is_a_rate_or_a_check_with_known_rules() -> None:
    cases = read_own_cases()
    rated = [case for case in cases if "group" not in case]
    assert all("expected_tool_call" in case or "check_type" in case for case in rated)
    checked = [case for case in cases if "group" in case]
    rules = {rule for case in checked for rule in case.get("expect", {})}
    assert rules == {
        "status", "may_refuse", "content", "reasoning", "calls", "never", "most_calls", "keys",
        "finish", "output",
    }  # fmt: skip
    names = [(group, name) for group, name, _ in list_checks(checked, thinking="any")]
    assert len(set(names)) == len(names) > 50
