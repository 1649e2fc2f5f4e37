import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import (
    CHAT,
    CHAT_DIALECT,
    COMPLETIONS,
    HELLO,
    JSON,
    RESPONSES,
    RESPONSES_DIALECT,
    Dialect,
    error_of,
    flooding,
    post,
)
from tests.e2e.conftest import Server, eventually, shared

LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 100_000}
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
WAITING_TOKENS = "negamax:waiting_tokens"
small = shared(
    "--max-num-seqs 2 --max-queued-requests 2 --max-queued-tokens 400 --max-body-bytes 100KiB "
    "--slow-client-timeout 1 --request-timeout 300 --sse-keep-alive-interval 0.1",
    rate=1000,
)


@pytest.fixture(autouse=True)
def server_is_idle_afterwards(small: Server) -> Iterator[None]:
    yield
    for name in (RUNNING, WAITING, "vllm:kv_cache_usage_perc", "negamax:open_requests"):
        assert eventually(lambda name=name: small.gauge(name) == 0)
    assert small.gauge(WAITING_TOKENS) == 0


def post_bytes(body: dict[str, Any], path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def send(server: Server, data: bytes) -> socket.socket:
    connection = server.connect()
    connection.sendall(data)
    return connection


def open_stream(server: Server, body: dict[str, Any]) -> socket.socket:
    """Open a stream of few events, which fill the buffers slowly, and read its first bytes."""
    connection = send(server, post_bytes(body | {"stream": True, "stream_interval": 500}))
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return connection


@pytest.fixture
def busy(small: Server) -> Iterator[contextlib.ExitStack]:
    """Fill both places of the batch. Connections in the yielded stack are closed at the end."""
    with contextlib.ExitStack() as connections:
        for _ in range(2):
            connections.enter_context(open_stream(small, LONG))
        yield connections


def say(text: str) -> dict[str, Any]:
    return LONG | {"messages": [{"role": "user", "content": text}]}


def test_queue_is_limited_by_requests_and_tokens(small: Server, busy: contextlib.ExitStack) -> None:
    busy.enter_context(send(small, post_bytes(say("word " * 300))))
    assert eventually(lambda: small.gauge(WAITING_TOKENS) > 250)
    long = small.send(CHAT, say("other " * 300))
    error_of(long, 429, code="queue_tokens_full")
    assert 1 <= int(long.headers["retry-after"]) <= 120
    busy.enter_context(send(small, post_bytes(LONG)))
    assert eventually(lambda: small.gauge(WAITING) == 2)
    short = small.send(CHAT, LONG)
    error_of(short, 429, code="queue_full")
    assert int(short.headers["retry-after"]) >= 1
    # The server checks the queue before it reads the body, which never arrives here.
    with send(small, post_bytes(LONG)[:150]) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 429")


@pytest.mark.parametrize(
    ("fields", "low", "high"), [({}, 90, 150), ({"prompt_logprobs": 0}, 190, 250)]
)
def test_choices_that_cannot_share_their_prompt_count_it_once_each(
    small: Server, busy: contextlib.ExitStack, fields: dict[str, Any], low: int, high: int
) -> None:
    body = {"prompt": "word " * 100, "n": 2, "max_tokens": 1, **fields}
    busy.enter_context(send(small, post_bytes(body, path=COMPLETIONS)))
    assert eventually(lambda: low < small.gauge(WAITING_TOKENS) < high)


def test_deadlines_end_whole_answers_and_begun_streams(small: Server) -> None:
    error_of(small.send(CHAT, LONG, timeout=0.3), 408, code="request_timeout", type="timeout_error")
    for seconds in (0.5, 1, 2, 4, 8):  # On a stalled machine the time passes too early.
        with (
            small.http() as http,
            http.stream("POST", CHAT, json=LONG | {"timeout": seconds, "stream": True}) as answer,
        ):
            lines = [line for line in answer.iter_lines() if line]
        if answer.status_code == 200:
            break
    assert len(lines) > 3
    assert "request_timeout" in lines[-2] and lines[-1] == "data: [DONE]"


def test_deadline_in_queue_is_a_408_in_streams(small: Server, busy: contextlib.ExitStack) -> None:
    error_of(small.send(CHAT, LONG, timeout=0.3, stream=True), 408)


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_ends_the_request_at_once(small: Server, stream: bool) -> None:
    with send(small, post_bytes(LONG | {"stream": stream})):
        assert eventually(lambda: small.gauge(RUNNING) == 1)
        aborted = small.num_aborted
    assert eventually(lambda: small.gauge(RUNNING) == 0)
    assert eventually(lambda: small.num_aborted == aborted + 1)


def test_hang_up_removes_a_waiting_request(small: Server, busy: contextlib.ExitStack) -> None:
    with send(small, post_bytes(LONG)):
        assert eventually(lambda: small.gauge(WAITING) == 1)
        aborted = small.num_aborted
    assert eventually(lambda: small.gauge(WAITING) == 0)
    assert eventually(lambda: small.num_aborted == aborted + 1)


@pytest.mark.parametrize("dialect", [CHAT_DIALECT, RESPONSES_DIALECT], ids=["chat", "responses"])
def test_silent_stream_sends_comments_that_clients_skip(small: Server, dialect: Dialect) -> None:
    import openai

    silent = dialect.body(limit=400) | {"ignore_eos": True, "stream": True, "stream_interval": 400}

    def says_comments() -> bool:
        return small.send(dialect.path, silent).text.count(": keep-alive\n\n") >= 2

    assert any(says_comments() for _ in range(10))  # A stalled server sends no comments.
    with small.openai() as client:
        kinds: dict[str, Any] = {"cast_to": object, "stream_cls": openai.Stream[object]}
        path = dialect.path.removeprefix("/v1")
        events = list(client.post(path, body=silent, stream=True, **kinds))
    assert len(events) > 2 and "keep-alive" not in json.dumps(events)


def test_client_that_does_not_read_is_disconnected(small: Server) -> None:
    before = small.log.count("is disconnected")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    url = httpx.URL(small.url)
    connection.connect((url.host, url.port))
    fat = {"logprobs": True, "top_logprobs": 20, "n": 2, "separate_reasoning": False}
    connection.sendall(post_bytes(LONG | fat | {"stream": True}))
    assert eventually(lambda: small.log.count("is disconnected") > before)
    assert eventually(lambda: small.gauge(RUNNING) == 0)
    small.post(CHAT, messages=HELLO, max_tokens=2)
    connection.close()


def exchange(server: Server, sent: bytes) -> bytes:
    """Return everything that the server sends until it closes, even while we still send."""
    answer = b""
    with send(server, b"") as connection:
        with contextlib.suppress(OSError):  # The server has closed the connection.
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    return answer


GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (GET.replace(b" HTTP", b"?%s HTTP" % (b"x" * 9000)) + b"\r\n", 414, b"url_too_long"),
        (GET + b"a: b\r\n" * 150 + b"\r\n", 431, b"too_many_headers"),
        (GET + b"a: " + b"b" * 40_000 + b"\r\n\r\n", 431, b"headers_too_large"),
        (GET + b"a: " + b"b" * 4_000_000, 431, b"invalid_http"),
        (b"GET /" + b"x" * 4_000_000, 431, b"invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, b"invalid_http"),
        (b"not http at all\r\n\r\n", 400, b"invalid_http"),
    ],
    ids=["url", "headers", "header bytes", "endless header", "endless url", "tls", "noise"],
)
def test_head_over_limits_is_refused(small: Server, head: bytes, status: int, code: bytes) -> None:
    answer = exchange(small, head)
    if len(head) > 1_000_000 and not answer:
        return  # The server closed while we were sending, so its answer is lost.
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert all(part in answer for part in (code, b"x-request-id: ", b"application/json"))


def test_bodies_messages_and_references_have_limits(small: Server) -> None:
    with small.http() as http:
        large = http.post(CHAT, json={"messages": HELLO, "user": "x" * 102_400})
        error_of(large, 413, code="body_too_large")
        many = http.post(CHAT, content=json.dumps({"messages": [{}] * 16_385}), headers=JSON)
        assert "16384" in error_of(many, 400)["message"]
        kept = post(http, RESPONSES, input="Hi", max_output_tokens=60)
        reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
        body = {"input": [reference] * 800, "max_output_tokens": 1}
        assert len(json.dumps(body)) < 100_000
        refused = http.post(RESPONSES, json=body)
        assert "referenced items" in error_of(refused, 413, code="body_too_large")["message"]
        post(http, RESPONSES, **body | {"input": [reference, reference]})


def test_bodies_that_never_end_do_not_fill_the_memory(small: Server) -> None:
    """Send nine bodies of the largest size. Only eight may be open, so the ninth is refused."""
    head = post_bytes({}).replace(b"content-length: 2", b"content-length: 102400")[:-2]
    connections = [send(small, head + b" " * 102_000) for _ in range(9)]
    assert connections[-1].recv(1000).startswith(b"HTTP/1.1 429")
    for connection in connections:
        connection.close()
    body = {"messages": HELLO, "max_tokens": 2}
    assert eventually(lambda: small.send(CHAT, body).status_code == 200)


def test_many_hanging_clients_do_not_block_other_requests(small: Server) -> None:
    halves = (b"POST /v1/chat", post_bytes(LONG)[:170], b"")
    connections = [send(small, halves[number % 3]) for number in range(300)]
    small.post(CHAT, messages=HELLO, max_tokens=4)
    for connection in connections:
        connection.close()


def test_flood_of_refused_requests_does_not_change_running_answers(small: Server) -> None:
    """Run one sequence, so that a request for four is refused, but not a request for one."""
    with small.http() as http, contextlib.ExitStack() as stack:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
        alone = post(http, CHAT, **body)["choices"]
        stack.enter_context(open_stream(small, LONG))
        four = json.dumps(body | {"n": 4, "max_tokens": 200}).encode()
        with flooding(small, [four] * 3) as statuses:
            answers: list[Any] = []
            deadline = time.monotonic() + 120
            while (len(answers) < 2 or not statuses) and time.monotonic() < deadline:
                answer = http.post(CHAT, json=body)
                if answer.status_code == 200:
                    answers.append(answer.json()["choices"])
        assert 429 in statuses and set(statuses) <= {200, 429}
        assert len(answers) >= 2 and all(answer == alone for answer in answers)
