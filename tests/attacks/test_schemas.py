from typing import Any

import httpx
import pytest

from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server


def unlisted(levels: int) -> dict[str, Any]:
    inner = {"type": "string"} if levels == 1 else unlisted(levels - 1)
    required = [f"p{i}" for i in range(20)]
    return {"type": "object", "required": required, "additionalProperties": inner}


def doubling(levels: int) -> dict[str, Any]:
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    last = {"type": "object", "properties": {"a": {}}}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{levels}": last}}


CHAT = "/v1/chat/completions"
SAID = {"messages": [{"role": "user", "content": "Hi"}]}
BELOW = {"allOf": [{"$ref": "#/properties/a"}]}
SCHEMAS = {
    "unlisted": unlisted(5),
    "doubling": doubling(24),
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    "itself below": {"type": "object", "properties": {"a": BELOW}},
}


@pytest.mark.parametrize("place", ["tools", "response_format"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_endlessly_expanding_schema_delays_no_other_request(
    server: Server, http: httpx.Client, name: str, place: str
) -> None:
    body: dict[str, Any] = {"model": "nano", "max_tokens": 5, **SAID}
    if place == "tools":
        function = {"name": "f", "parameters": SCHEMAS[name]}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    else:
        form = {"name": "f", "schema": SCHEMAS[name]}
        body |= {"response_format": {"type": "json_schema", "json_schema": form}}
    answer = unnoticed(server, lambda: http.post(CHAT, json=body), gap=1.0, seconds=20.0)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert "message" in answer.json()["error"]


THINKS = {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 1024}}
ITSELF = {"$ref": "#"}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": ITSELF}}
TYPED = {"type": "json_schema", "name": "f", "schema": ITSELF}
PROPERTIES = {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"a": {"$ref": "#/$defs/a"}}}
FUNCTION = {"name": "f", "strict": True, "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {**SAID, "response_format": FORM}),
        (CHAT, {**SAID, "guided_json": ITSELF, "stream": True}),
        (CHAT, {**SAID, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/completions", {"prompt": "Hi", "guided_json": ITSELF}),
        ("/v1/responses", {"input": "Hi", "text": {"format": TYPED}}),
        ("/v1/messages", {**SAID, **THINKS, "output_config": {"format": TYPED}}),
    ],
)
def test_a_self_referring_schema_is_refused_before_the_answer(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    answer = http.post(path, json={"model": "nano", **fields})
    assert answer.status_code == 400, answer.text
    assert "optional or null" in answer.json()["error"]["message"]
