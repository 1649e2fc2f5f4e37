import gzip
import http.client
import json
import re
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from backports import zstd

from tests.e2e.api_support import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    HELLO,
    JSON,
    MESSAGES,
    RESPONSES,
    error_of,
    flooding,
    post,
)
from tests.e2e.conftest import MODEL, Server
from tests.tables import read_table

UNASKED = {"role": "tool", "tool_call_id": "x", "content": "y"}
LONG = [{"role": "user", "content": "night " * 2500}]
NOTHING_TO_CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *read_table("api_errors.bad_field_is_named"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["s"] * 100_000}, "stop"),
        ({"stop": "s" * 100_000}, "stop"),
        ({"logit_bias": {str(number): 1 for number in range(200_000)}}, "logit_bias"),
        ({"messages": [*HELLO, UNASKED]}, "messages[1]"),
        (NOTHING_TO_CONTINUE, "continue_final_message"),
        ({"n": 128, "prompt_logprobs": 20, "messages": LONG}, "prompt_logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_field_is_named_in_400(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    kind = "invalid_request_error"
    body = {"model": MODEL, "messages": HELLO, **fields}
    error_of(http.post(CHAT, json=body), 400, param=param, type=kind)
    error_of(http.post(CHAT, json={**body, "stream": True}), 400, type=kind)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *read_table("api_errors.bad_completion_names_its_field"),
        ({"prompt": "x" * 40_000, "n": 128, "echo": True}, "echo"),
    ],
    ids=lambda value: str(value)[:200],
)
def test_completion_names_bad_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error_of(http.post(COMPLETIONS, json={"model": MODEL, **fields}), 400, param=param)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b'"text"',
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [], "temperature": -Infinity}',
        b'{"messages": [], "temperature": 1e999}',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"messages": [{"role": "user", "content": ' + b"[" * 200 + b"]" * 200 + b"}]}",
    ],
    ids=lambda content: f"{content[:30]!r}-{len(content)}",
)
def test_broken_body_is_a_400(http: httpx.Client, content: bytes) -> None:
    error_of(http.post(CHAT, content=content, headers=JSON), 400)


@pytest.mark.parametrize("element", [b"{},", b"[],", b"0,"])
def test_json_of_millions_of_elements_is_not_decoded(http: httpx.Client, element: bytes) -> None:
    content = b'{"messages": [' + element * 2_000_000 + b"0]}"
    assert "elements" in error_of(http.post(CHAT, content=content, headers=JSON), 400)["message"]


def test_json_beyond_limits_is_refused(http: httpx.Client) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(100):
        parameters = {"properties": parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    refused = http.post(CHAT, json={"messages": HELLO, "tools": [tool], "max_tokens": 1})
    assert "nested" in error_of(refused, 400)["message"]
    content = gzip.compress(b'{"messages": "' + b"x" * (100 * 2**20) + b'"}', compresslevel=1)
    assert len(content) < 2**21
    refused = http.post(CHAT, content=content, headers={**JSON, "content-encoding": "gzip"})
    error_of(refused, 413, code="body_too_large")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_type_is_a_400(http: httpx.Client, content_type: str) -> None:
    refused = http.post(CHAT, content=b"{}", headers={"content-type": content_type})
    error_of(refused, 400, code="unsupported_media_type")


@pytest.mark.parametrize("has_length", [True, False])
def test_body_over_the_limit_is_a_413(http: httpx.Client, has_length: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(65):
            yield b"x" * 2**20

    body = b"".join(parts()) if has_length else parts()
    error_of(http.post(CHAT, content=body, headers=JSON), 413, code="body_too_large")


TOO_LONG = re.compile(
    r"prompt is too long: (\d+) tokens > (\d+) maximum( \(or more; the rest was not counted\))?\. "
    r"This model's maximum context length is (\d+) tokens, output included; shorten the prompt"
)


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompt_is_a_400_with_the_known_text(http: httpx.Client, stream: bool) -> None:
    length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    kind, code = "invalid_request_error", "context_length_exceeded"
    for text in ("word " * (length * 2), "word " * (length * 1000)):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": stream}
        responses = {"input": text, "stream": stream}
        refused = http.post(MESSAGES, json={**chat, "max_tokens": 9})
        assert refused.status_code == 400 and refused.json()["error"]["type"] == kind
        errors = [
            error_of(http.post(CHAT, json=chat), 400, type=kind, code=code),
            error_of(http.post(RESPONSES, json=responses), 400, type=kind, code=code),
            refused.json()["error"],
        ]
        for error in errors:
            match = TOO_LONG.fullmatch(error["message"])
            assert match and int(match[1]) > length and int(match[2]) == int(match[4]) == length
    for path, field in ((COMPLETIONS, "prompt"), (GENERATE, "input_ids")):
        body = {field: [5] * length, "stream": stream}
        match = TOO_LONG.fullmatch(error_of(http.post(path, json=body), 400)["message"])
        assert match and match.groups() == (str(length), str(length - 1), None, str(length))


def test_unknown_models_routes_and_methods(client: Any, http: httpx.Client) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        client.chat.completions.create(model="nan0", messages=HELLO)
    assert caught.value.code == "model_not_found"
    error_of(http.get("/v1/models/nan0"), 404, param="model")
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert "'/v1/chat/completions'" in error_of(http.post("/v1/chat/completion"), 404)["message"]
    error_of(http.get("/nothing"), 404)
    assert "generate text only" in error_of(http.post("/v1/embeddings"), 404)["message"]
    response = http.get(CHAT)
    error_of(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert http.head("/nothing").status_code == 404
    assert http.head(CHAT).status_code == 405


def test_open_endpoints_answer_with_request_ids(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert CHAT in http.get("/openapi.json").json()["paths"]

    def used(**headers: str) -> str:
        return http.get("/health", headers=headers).headers["x-request-id"]

    assert used(**{"x-request-id": "trace-1"}) == "trace-1"
    assert used(**{"x-request-id": "x" * 500}) != "x" * 500
    assert len({used() for _ in range(3)}) == 3


def test_every_reference_of_the_openapi_document_resolves(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    references: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                references.append(reference)
            value = list(value.values())
        for inner in value if isinstance(value, list) else ():
            collect(inner)

    collect(document)
    assert len(set(references)) > 5
    for reference in references:
        target = document
        assert reference.startswith("#/components/schemas/")
        for name in reference.removeprefix("#/").split("/"):
            target = target[name]
        assert target


def test_server_answers_others_while_it_refuses_a_flood(server: Server, http: httpx.Client) -> None:
    wrong = [
        {"messages": HELLO, "stop": ["s"] * 100_000},
        {"messages": HELLO, "logit_bias": {str(number): 1 for number in range(300_000)}},
        {"messages": [{"role": "user", "content": "word " * 1_000_000}]},
    ]
    bodies = [*(json.dumps(body).encode() for body in wrong), b"[" * 1_000_000]
    with flooding(server, bodies) as refused:
        num_answers = 0
        while num_answers < 3 or len(refused) < 2 * len(bodies):
            assert post(http, CHAT, messages=HELLO, max_tokens=8)["usage"]
            num_answers += 1
    assert set(refused) == {400}


BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0}
PATHS = (
    "/", "/livez", "/readyz", "/health", "/ping", "/version", "/metrics", "/v1", "/v1/models",
    f"/v1/models/{MODEL}", "/openapi.json", "/anthropic/v1/models",
)  # fmt: skip


def receive_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    # The client would decompress the body, but content-length counts compressed bytes.
    plain = {"accept-encoding": "identity"}
    head, whole = http.head(path, headers=plain), http.get(path, headers=plain)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":  # The content of /metrics differs each time.
        length = str(len(whole.content))
        assert head.headers["content-length"] == whole.headers["content-length"] == length
    assert http.get("/livez").status_code == 200  # The connection still works.


def test_codex_gets_its_form_of_the_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models", params={"client_version": "0.153.4"}).json()
    (card,), (model,) = listed["data"], listed["models"]
    assert (model["slug"], model["context_window"]) == (card["id"], card["max_model_len"])
    # Codex discards all models if a model lacks one of these fields.
    assert model.keys() > {
        "display_name", "supported_reasoning_levels", "shell_type", "visibility", "priority",
        "supported_in_api", "base_instructions", "supports_reasoning_summaries",
        "support_verbosity", "truncation_policy", "supports_parallel_tool_calls",
        "experimental_supported_tools",
    }  # fmt: skip
    assert "models" not in http.get("/v1/models").json()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, f"/anthropic{MESSAGES}"])
def test_a_compressed_body_is_read(http: httpx.Client, encoding: str, path: str) -> None:
    body = json.dumps(BODY).encode()
    content = {"gzip": gzip, "deflate": zlib, "zstd": zstd}[encoding].compress(body)
    answer = http.post(path, content=content, headers={**JSON, "content-encoding": encoding})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]


@pytest.mark.parametrize(
    ("encoding", "content", "status", "code"),
    [
        ("br", b"x", 415, "unsupported_encoding"),
        ("gzip, gzip", b"x", 415, "unsupported_encoding"),
        ("gzip", b"no gzip", 400, "invalid_encoding"),
        ("gzip", gzip.compress(json.dumps(BODY).encode(), mtime=0)[:-9], 400, "invalid_encoding"),
        ("gzip", b"", 400, "invalid_json"),
    ],
)
def test_unreadable_encodings_are_refused(
    http: httpx.Client, encoding: str, content: bytes, status: int, code: str
) -> None:
    answer = http.post(CHAT, content=content, headers={**JSON, "content-encoding": encoding})
    error_of(answer, status, code=code)


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(server: Server, stream: bool) -> None:
    body = json.dumps({**BODY, "stream": stream}).encode()
    with server.connect() as connection:
        head = f"POST {CHAT} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = receive_all(connection)
    head_lines, _, content = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head_lines.splitlines()[0]
    assert b"transfer-encoding" not in head_lines.lower()
    assert b"connection: close" in head_lines.lower()
    if not stream:
        assert json.loads(content)["choices"]
        return
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["id"] for event in events[:-2])


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_offer_of_http_2_is_answered_in_http_1_1(server: Server, is_chunked: bool) -> None:
    """Send an upgrade offer as the JDK's HttpClient does; the connection stays usable."""
    body = json.dumps(BODY).encode()
    length = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(body)
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%s%s\r\n\r\n"
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(head % (CHAT.encode(), H2C, length))
            for part in (body[:20], body[20:]):
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
            connection.sendall(b"0\r\n\r\n" if is_chunked else b"")
            with http.client.HTTPResponse(connection) as answer:
                answer.begin()
                assert answer.status == 200
                assert json.loads(answer.read())["choices"]
        connection.sendall((b"GET /livez HTTP/1.1\r\nhost: localhost\r\n%s\r\n" % H2C) * 3)
        connection.sendall(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answers = receive_all(connection)
        assert answers.count(b"HTTP/1.1 200 ") == 3 and answers.count(b"HTTP/1.1 404 ") == 1
    assert "pgrade" not in server.log


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"TLS/1.0, x"])
@pytest.mark.parametrize(
    ("start", "status"),
    [(b"GET /livez", 200), (b"CONNECT localhost:1", 400), (b"CONNECT /livez", 400)],
)
def test_upgrades_are_ignored(server: Server, upgrade: bytes, start: bytes, status: int) -> None:
    head = b"%s HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: %s\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head % (start, upgrade))
        answer = receive_all(connection)
    assert b" %d " % status in answer.splitlines()[0] and answer.count(b"HTTP/1.1 ") == 1
