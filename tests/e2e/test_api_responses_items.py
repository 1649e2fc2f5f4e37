from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import MODEL, Server
from tests.e2e.test_api_responses import ASK, ASK_WEATHER, TOOL

if TYPE_CHECKING:
    import openai


@pytest.fixture
def strict(server: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=180,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("shell", [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]),
        ("local_shell", "a.txt"),
    ],
)
def test_shell_calls_are_run_by_the_client(strict: openai.OpenAI, kind: str, result: Any) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "List the files.",
        "tools": [{"type": kind}],
        "tool_choice": "required",
        "temperature": 0,
        "max_output_tokens": 400,
    }
    with strict.responses.stream(**options) as stream:
        events = list(stream)
        response = stream.get_final_response()
    added, done = (
        [event.item for event in events if event.type == f"response.output_item.{moment}"]
        for moment in ("added", "done")
    )
    call: Any = response.output[-1]
    assert call.type == f"{kind}_call" and call.status == "completed"
    assert all(isinstance(text, str) for text in getattr(call.action, "commands", ()))
    assert done == response.output and [item.id for item in added] == [item.id for item in done]
    output = {"type": f"{kind}_call_output", "output": result, "status": "completed"}
    output |= {"id": call.call_id} if kind == "local_shell" else {"call_id": call.call_id}
    after = strict.responses.create(
        **{**options, "input": [output], "tool_choice": "auto", "max_output_tokens": 8},
        previous_response_id=response.id,
    )
    (item,) = strict.responses.input_items.list(after.id).data
    assert item.type == f"{kind}_call_output"
    assert after.usage and response.usage
    assert after.usage.input_tokens > response.usage.total_tokens  # the call and its result


def test_items_change_the_settings_after_them(strict: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    first = strict.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": ASK},
            {"type": "additional_tools", "role": "developer", "tools": [TOOL]},  # type: ignore[list-item]
            {"type": "configuration_update", "text": {"format": form}},  # type: ignore[list-item]
        ],
        reasoning={"effort": "none"},
        tool_choice="none",
    )
    assert json.loads(first.output_text) == {"n": 7}
    second = strict.responses.create(
        model=MODEL,
        input=ASK_WEATHER,
        previous_response_id=first.id,
        tool_choice={"type": "function", "name": TOOL["name"]},
    )
    assert second.output[-1].type == "function_call"


def test_input_items_hold_in_strict_clients(strict: openai.OpenAI) -> None:
    sent: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A call."}]},
        {"role": "assistant", "content": "One moment."},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "a"}],
        },
        {"type": "custom_tool_call", "call_id": "call_2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "b"},
    ]
    kinds = [item.get("type", "message") for item in sent]
    response = strict.responses.create(model=MODEL, input=sent, max_output_tokens=4)
    assert strict.responses.retrieve(response.id) == response
    items = list(strict.responses.input_items.list(response.id, order="asc", limit=3))
    assert [item.type for item in items] == kinds
    again = list(strict.responses.input_items.list(response.id))
    assert [item.id for item in again] == [item.id for item in reversed(items)]
