from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.conftest import Server
from tools.load.fuzz import problem_of
from tools.load.http import Answer

MAX_DEPTH = 6
EXTRA_ITEMS = 3  # number of items beyond the minimum of a schema
# Drawn values could let requests run for minutes, so limit them.
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "timeout": 2}
SETTINGS: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None}
SETTINGS["suppress_health_check"] = list(HealthCheck)
WORDS = st.sampled_from(("", "nano", "auto", "user", "text", "Hello"))
TEXTS = st.one_of(WORDS, st.text(max_size=8))
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


class BodyDrawer:
    """Draw values of schemas in an OpenAPI `document`. If `wrong`, one value in ten is invalid."""

    def __init__(self, draw: st.DrawFn, document: dict[str, Any], *, wrong: bool) -> None:
        self._draw = draw
        self._document = document
        self._wrong = wrong

    def value(self, schema: Any, depth: int = 0) -> Any:
        draw = self._draw
        if not isinstance(schema, dict) or (self._wrong and draw(st.integers(0, 9)) == 9):
            return draw(ANY)
        if "$ref" in schema:
            target: Any = self._document
            for name in schema["$ref"].removeprefix("#/").split("/"):
                target = target[name]
            return self.value(target, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw(st.sampled_from(schema["enum"]))
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self.value(draw(st.sampled_from(schema[union])), depth)
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            kind = draw(st.sampled_from(kind))
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return draw(TEXTS)
            case "boolean":
                return draw(st.booleans())
            case "null":
                return None
            case "integer":
                return draw(_integers(schema))
            case "number":
                return draw(st.one_of(_integers(schema), st.floats(0, 1)))
            case _:
                return draw(ANY)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        others = sorted(set(properties) - required)
        if others and depth < MAX_DEPTH:
            required |= set(self._draw(st.lists(st.sampled_from(others), max_size=5)))
        return {name: self.value(properties.get(name), depth + 1) for name in sorted(required)}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        count = self._draw(st.integers(least, least + (EXTRA_ITEMS if depth < MAX_DEPTH else 0)))
        return [self.value(schema.get("items"), depth + 1) for _ in range(count)]


def _integers(schema: dict[str, Any]) -> st.SearchStrategy[int]:
    low, high = schema.get("minimum", -3), schema.get("maximum", 2**63 - 1)
    return st.one_of(st.integers(int(low), int(high)), st.integers(int(low), int(low) + 2))


def routes_of(document: dict[str, Any]) -> dict[str, Any]:
    routes = {}
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content and "{" not in path:
            routes[path] = content["application/json"]["schema"]
    return routes


def fuzz(server: Server, *, count: int) -> None:
    engine = server.engine_pid()
    with server.http() as http:
        document = http.get("/openapi.json").json()
        routes = routes_of(document)
        assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= set(routes)

        @settings(max_examples=count, **SETTINGS)
        @given(data=st.data())
        def attack(data: st.DataObject) -> None:
            path = data.draw(st.sampled_from(sorted(routes)))
            drawer = BodyDrawer(data.draw, document, wrong=data.draw(st.booleans()))
            body = drawer.value(routes[path])
            if isinstance(body, dict):
                body |= {name: SHORT[name] for name in SHORT if name in body or name == "timeout"}
            answer = http.post(path, json=body)
            response = Answer(answer.status_code, dict(answer.headers), answer.content)
            assert problem_of(response) is None, (path, body, answer.text[:300])

        attack()
    assert server.engine_pid() == engine


def test_bodies_drawn_from_the_openapi_document(server: Server) -> None:
    fuzz(server, count=40)


@pytest.mark.full
def test_many_bodies_drawn_from_the_openapi_document(server: Server) -> None:
    fuzz(server, count=5000)
