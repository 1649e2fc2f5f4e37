import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from negamax.bench import verify_checks
from negamax.bench.serve_client import WholeResponse
from negamax.bench.server_probe import (
    CheckFailure,
    JudgedAnswer,
    read_chat,
    read_object,
    read_stream,
)
from tests.tables import read_table

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
    return verify_checks.find_wrong_call(JudgedAnswer(calls=[(name, arguments)]), TOOLS)


@pytest.mark.parametrize(
    "arguments",
    ['{"unit": "kelvin"}', '{"points": [{"x": 1}], "note": null, "count": 2.0, "unit": "celsius"}'],
)
def test_arguments_that_follow_the_schema_pass(arguments: str) -> None:
    assert judge("f", arguments) is judge("now", "{}") is None


@pytest.mark.parametrize(
    "arguments", read_table("verify_checks.arguments_that_break_the_schema_fail")
)
def test_arguments_that_break_the_schema_fail(arguments: str) -> None:
    assert str(judge("f", arguments)).startswith("arguments of f ")


def test_missing_and_undeclared_calls_fail() -> None:
    assert (
        verify_checks.find_wrong_call(JudgedAnswer(finish_reason="stop"), TOOLS)
        == "no call (finish_reason 'stop')"
    )
    assert judge("g", "{}") == "the answer calls 'g', which is not declared"


def test_every_case_is_a_rate_or_a_check_with_known_rules() -> None:
    cases = verify_checks.read_own_cases()
    rated = [case for case in cases if "group" not in case]
    assert all("expected_tool_call" in case or "check_type" in case for case in rated)
    checked = [case for case in cases if "group" in case]
    rules = {rule for case in checked for rule in case.get("expect", {})}
    assert rules == {
        "status", "may_refuse", "content", "reasoning", "calls", "never", "most_calls", "keys",
        "finish", "output",
    }  # fmt: skip
    names = [(group, name) for group, name, _ in verify_checks.list_checks(checked, thinking="any")]
    assert len(set(names)) == len(names) > 50


FUNCTION = {"name": "now", "arguments": "{}"}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": FUNCTION}
MESSAGE = {"content": "x", "reasoning_content": "y", "tool_calls": [CALL]}
USAGE = {"completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}}
CHOICE = {"index": 0, "finish_reason": "stop"}
WHOLE = {"choices": [{**CHOICE, "message": MESSAGE}], "usage": USAGE}
EVENTS = [{"choices": [{**CHOICE, "delta": MESSAGE}]}, {"choices": [], "usage": USAGE}]
ODD = (None, -1, 10**30, 1.5, True, "x", "\ud800", [], {}, [None], [[]], [{}], {"x": 1})


def vary(value: Any, change: Any = None) -> Iterator[Any]:
    """Yield copies of `value` in which one part is replaced by an odd value."""
    change = change or (lambda odd: odd)
    yield from map(change, ODD)
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):

            def put(odd: Any, key: Any = key) -> Any:
                changed = copy.copy(value)
                changed[key] = odd
                return change(changed)

            yield from vary(value[key], put)


@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_of_any_form_are_read_or_fail(is_stream: bool) -> None:
    num_read = num_failed = 0
    for answer in vary(EVENTS if is_stream else WHOLE):
        events = answer if isinstance(answer, list) else [answer]
        lines = [*map(json.dumps, events), "[DONE]"] if is_stream else [json.dumps(answer)]
        text = "".join(f"data: {line}\n\n" for line in lines) if is_stream else lines[0]
        response = WholeResponse(status=200, raw=text.encode())
        try:
            found = read_stream(response) if is_stream else read_chat(read_object(response))
            for judge_answer in (verify_checks.find_leak, verify_checks.find_shared_delta):
                judge_answer(found)
            verify_checks.find_wrong_call(found, TOOLS)
            found.count("completion_tokens_details.reasoning_tokens")
            num_read += 1
        except CheckFailure:
            num_failed += 1
    assert num_read > 30 and num_failed > 30
