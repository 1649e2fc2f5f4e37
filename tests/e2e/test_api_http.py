import gzip
import http.client
import json
import socket
import zlib
from typing import Any

import httpx
import pytest
from backports import zstd

from tests.e2e.api_support import CHAT, HELLO, JSON, MESSAGES, error_of
from tests.e2e.conftest import MODEL, Server

BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0}
PATHS = (
    "/", "/livez", "/readyz", "/health", "/ping", "/version", "/metrics", "/v1", "/v1/models",
    f"/v1/models/{MODEL}", "/openapi.json", "/anthropic/v1/models",
)  # fmt: skip


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=120)


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


def test_head_of_unknown_and_post_routes(http: httpx.Client) -> None:
    assert http.head("/nothing").status_code == 404
    assert http.head(CHAT).status_code == 405


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, f"/anthropic{MESSAGES}"])
def test_a_compressed_body_is_read(http: httpx.Client, encoding: str, path: str) -> None:
    body = json.dumps(BODY).encode()
    content = {"gzip": gzip, "deflate": zlib, "zstd": zstd}[encoding].compress(body)
    answer = http.post(path, content=content, headers={**JSON, "content-encoding": encoding})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]


def test_decompressed_body_over_the_limit_is_a_413(http: httpx.Client) -> None:
    content = gzip.compress(b'{"messages": "' + b"x" * (100 * 2**20) + b'"}', compresslevel=1)
    assert len(content) < 2**21
    refused = http.post(CHAT, content=content, headers={**JSON, "content-encoding": "gzip"})
    error_of(refused, 413, code="body_too_large")


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
    with connect(server) as connection:
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
    with connect(server) as connection:
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
    with connect(server) as connection:
        connection.sendall(head % (start, upgrade))
        answer = receive_all(connection)
    assert b" %d " % status in answer.splitlines()[0] and answer.count(b"HTTP/1.1 ") == 1
