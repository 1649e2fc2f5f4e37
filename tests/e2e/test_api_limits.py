import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, eventually, serving, talking
from tests.e2e.test_api_errors import CHAT, HELLO, error_of

LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 100_000}
RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--max-num-seqs 2 --max-queued-requests 2 --max-queued-tokens 400 --max-body-bytes 100KiB "
        "--slow-client-timeout 1 --request-timeout 300 --sse-keep-alive-interval 0.1"
    )
    folder = tmp_path_factory.mktemp("small")
    talk = talking(folder, tokens_per_second=1000)
    with serving(*talk, *options.split(), log_file=folder / "log") as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(autouse=True)
def all_is_over_afterwards(small: Server) -> Iterator[None]:
    yield
    assert eventually(
        lambda: small.gauge(RUNNING) == 0 and small.gauge("vllm:num_requests_waiting") == 0
    )
    assert eventually(lambda: small.gauge("vllm:kv_cache_usage_perc") == 0)
    assert eventually(lambda: small.gauge("negamax:open_requests") == 0)
    assert small.gauge("negamax:waiting_tokens") == 0


def address(server: Server) -> tuple[str, int]:
    url = httpx.URL(server.url)
    return url.host, url.port or 80


def post_bytes(body: dict[str, Any], path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content


def open_stream(server: Server, body: dict[str, Any]) -> socket.socket:
    """Open a stream of few events and read its first bytes; unread ones fill the buffers slowly."""
    connection = socket.create_connection(address(server))
    connection.sendall(post_bytes(body | {"stream": True, "stream_interval": 500}))
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return connection


def test_queue_is_limited_by_requests_and_by_tokens(small: Server) -> None:
    running = [open_stream(small, LONG) for _ in range(2)]
    waiting = []
    try:
        connection = socket.create_connection(address(small))
        connection.sendall(
            post_bytes(LONG | {"messages": [{"role": "user", "content": "word " * 300}]})
        )
        waiting.append(connection)
        assert eventually(lambda: small.gauge("negamax:waiting_tokens") > 250)
        with small.http() as http:
            long = http.post(
                CHAT, json=LONG | {"messages": [{"role": "user", "content": "other " * 300}]}
            )
            error_of(long, 429, code="queue_tokens_full")
            assert 1 <= int(long.headers["retry-after"]) <= 120
            connection = socket.create_connection(address(small))
            connection.sendall(post_bytes(LONG))
            waiting.append(connection)
            assert eventually(lambda: small.gauge("vllm:num_requests_waiting") == 2)
            short = http.post(CHAT, json=LONG)
            error_of(short, 429, code="queue_full")
            assert int(short.headers["retry-after"]) >= 1
            # the queue is checked before the body is read
            error_of(http.post(CHAT, json=LONG | {"n": 5}), 429)
    finally:
        for connection in (*running, *waiting):
            connection.close()


def test_choices_that_cannot_share_their_prompt_count_it_once_each(small: Server) -> None:
    connections = [open_stream(small, LONG) for _ in range(2)]
    body = {"prompt": "word " * 100, "n": 2, "max_tokens": 1}
    try:
        for fields, low, high in (({}, 90, 150), ({"prompt_logprobs": 0}, 190, 250)):
            with socket.create_connection(address(small)) as connection:
                connection.sendall(post_bytes(body | fields, path="/v1/completions"))
                assert eventually(
                    lambda low=low, high=high: low < small.gauge("negamax:waiting_tokens") < high
                )
            assert eventually(lambda: small.gauge("negamax:waiting_tokens") == 0)
    finally:
        for connection in connections:
            connection.close()


def test_full_queue_refuses_before_the_body_arrives(small: Server) -> None:
    running = [open_stream(small, LONG) for _ in range(2)]
    try:
        for _ in range(2):
            waiting = socket.create_connection(address(small))
            waiting.sendall(post_bytes(LONG))
            running.append(waiting)
        assert eventually(lambda: small.gauge("vllm:num_requests_waiting") == 2)
        with socket.create_connection(address(small)) as connection:
            connection.settimeout(120)
            connection.sendall(post_bytes(LONG)[:150])  # the body never comes
            assert connection.recv(1000).startswith(b"HTTP/1.1 429")
    finally:
        for connection in running:
            connection.close()


def test_deadline_of_a_whole_answer_is_a_408(small: Server) -> None:
    with small.http() as http:
        error = error_of(http.post(CHAT, json=LONG | {"timeout": 0.5}), 408)
        assert error["code"] == "request_timeout" and error["type"] == "timeout_error"


def test_deadline_in_the_queue_is_a_408_for_streams_too(small: Server) -> None:
    running = [open_stream(small, LONG) for _ in range(2)]
    try:
        with small.http() as http:
            error_of(http.post(CHAT, json=LONG | {"timeout": 0.5, "stream": True}), 408)
    finally:
        for connection in running:
            connection.close()


def test_deadline_of_a_begun_stream_is_an_error_event(small: Server) -> None:
    for _ in range(10):  # on a stalled machine it passes before the stream begins
        with (
            small.http() as http,
            http.stream("POST", CHAT, json=LONG | {"timeout": 1.5, "stream": True}) as answer,
        ):
            lines = [line for line in answer.iter_lines() if line]
        if answer.status_code == 200:
            break
    assert len(lines) > 3
    assert "request_timeout" in lines[-2] and lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_ends_the_request_at_once(small: Server, stream: bool) -> None:
    connection = socket.create_connection(address(small))
    connection.sendall(post_bytes(LONG | {"stream": stream}))
    assert eventually(lambda: small.gauge(RUNNING) == 1)
    aborted = small.num_aborted
    connection.close()
    assert eventually(lambda: small.gauge(RUNNING) == 0)
    assert eventually(lambda: small.num_aborted == aborted + 1)


def test_hang_up_removes_a_waiting_request_from_the_queue(small: Server) -> None:
    running = [open_stream(small, LONG) for _ in range(2)]
    try:
        with socket.create_connection(address(small)) as connection:
            connection.sendall(post_bytes(LONG))
            assert eventually(lambda: small.gauge("vllm:num_requests_waiting") == 1)
            aborted = small.num_aborted
        assert eventually(lambda: small.gauge("vllm:num_requests_waiting") == 0)
        assert eventually(lambda: small.num_aborted == aborted + 1)
    finally:
        for connection in running:
            connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 1000}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 1000}),
    ],
    ids=["chat", "responses"],
)
def test_silent_stream_sends_comments_that_clients_skip(
    small: Server, path: str, body: dict[str, Any]
) -> None:
    import openai

    silent = body | {"ignore_eos": True, "stream": True, "stream_interval": 1000}

    def says_comments() -> bool:
        with small.http() as http:
            return http.post(path, json=silent).text.count(": keep-alive\n\n") >= 2

    assert any(says_comments() for _ in range(10))  # a stalled server sends none
    with small.openai() as client:
        chunks: Any = client.post(
            path.removeprefix("/v1"),
            cast_to=object,
            body=silent,
            stream=True,
            stream_cls=openai.Stream[object],
        )
        events = list(chunks)
    assert len(events) > 2 and "keep-alive" not in json.dumps(events)


def test_client_that_does_not_read_is_disconnected(small: Server) -> None:
    before = small.log.count("is disconnected")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address(small))
    fat = {"logprobs": True, "top_logprobs": 20, "n": 2}  # many bytes per token
    connection.sendall(post_bytes(LONG | fat | {"stream": True}))
    assert eventually(lambda: small.log.count("is disconnected") > before)
    assert eventually(lambda: small.gauge(RUNNING) == 0)
    with small.http() as http:
        assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200
    connection.close()


def exchange(server: Server, sent: bytes) -> bytes:
    """Return everything that the server sends until it closes, even while `sent` is being sent."""
    parts = []
    with socket.create_connection(address(server)) as connection:
        connection.settimeout(120)
        with unless_it_has_hung_up():
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with unless_it_has_hung_up():
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def unless_it_has_hung_up() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (
            b"GET /v1/models?" + b"x" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            414,
            b"url_too_long",
        ),
        (
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 150 + b"\r\n",
            431,
            b"too_many_headers",
        ),
        (
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 40_000 + b"\r\n\r\n",
            431,
            b"headers_too_large",
        ),
        (
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 4_000_000,
            431,
            b"invalid_http",
        ),
        (b"GET /" + b"x" * 4_000_000, 431, b"invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, b"invalid_http"),
        (b"not http at all\r\n\r\n", 400, b"invalid_http"),
    ],
    ids=["url", "headers", "header bytes", "endless header", "endless url", "tls", "noise"],
)
def test_head_beyond_the_limits_is_refused(
    small: Server, head: bytes, status: int, code: bytes
) -> None:
    answer = exchange(small, head)
    if len(head) > 1_000_000 and not answer:
        return  # the server closed while we were sending: the answer is lost
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert code in answer
    assert b"x-request-id: " in answer
    assert b"application/json" in answer


def test_references_count_with_the_size_of_their_items(small: Server) -> None:
    with small.http() as http:
        kept = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 60}).json()
        reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
        body = {"input": [reference] * 800, "max_output_tokens": 1}
        assert len(json.dumps(body)) < 100_000
        error = error_of(http.post("/v1/responses", json=body), 413)
        assert error["code"] == "body_too_large" and "refers to" in error["message"]
        body["input"] = [reference, reference]
        assert http.post("/v1/responses", json=body).status_code == 200


def test_body_and_message_count_have_limits(small: Server) -> None:
    with small.http() as http:
        error_of(
            http.post(CHAT, json={"messages": HELLO, "user": "x" * 102_400}),
            413,
            code="body_too_large",
        )
        many = json.dumps({"messages": [{}] * 16_385})
        assert (
            "16384"
            in error_of(
                http.post(CHAT, content=many, headers={"content-type": "application/json"}), 400
            )["message"]
        )


def test_bodies_that_never_end_do_not_fill_the_memory(small: Server) -> None:
    """Eight bodies of the largest size may be open at a time; the ninth client is refused once."""
    head = (
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        b"application/json\r\ncontent-length: 102400\r\n\r\n"
    )
    connections = []
    for _ in range(9):
        connection = socket.create_connection(address(small))
        connection.sendall(head % CHAT.encode() + b" " * 102_000)
        connections.append(connection)
    connections[-1].settimeout(120)
    assert connections[-1].recv(1000).startswith(b"HTTP/1.1 429")
    for connection in connections:
        connection.close()
    with small.http() as http:
        assert eventually(
            lambda: http.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200
        )


def test_many_hanging_clients_leave_the_others_alone(small: Server) -> None:
    halves = (b"POST /v1/chat", post_bytes(LONG)[:170], b"")
    connections = []
    for number in range(300):
        connection = socket.create_connection(address(small))
        connection.sendall(halves[number % 3])
        connections.append(connection)
    with small.http() as http:
        assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 4}).status_code == 200
    for connection in connections:
        connection.close()


def test_flood_of_refused_requests_leaves_running_ones_alone(small: Server) -> None:
    """One sequence runs, so that a request for four is refused and one for one is not."""
    with small.http() as http, contextlib.ExitStack() as stack:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
        alone = http.post(CHAT, json=body).json()["choices"]
        stack.enter_context(open_stream(small, LONG))
        stop = threading.Event()
        statuses: set[int] = set()

        def flood() -> None:
            with small.http() as other:
                while not stop.is_set():
                    statuses.add(
                        other.post(CHAT, json=body | {"n": 4, "max_tokens": 200}).status_code
                    )

        threads = [threading.Thread(target=flood) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            answers: list[Any] = []
            deadline = time.monotonic() + 120
            while (len(answers) < 2 or not statuses) and time.monotonic() < deadline:
                answer = http.post(CHAT, json=body)
                if answer.status_code == 200:
                    answers.append(answer.json()["choices"])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert 429 in statuses and statuses <= {200, 429}
        assert len(answers) >= 2 and all(answer == alone for answer in answers)
