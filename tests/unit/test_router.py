import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from negamax.api.errors import ErrorMiddleware
from negamax.api.http.lifecycle import Lifecycle
from negamax.api.router import app as app_module
from negamax.api.router import servers as routed
from negamax.api.router.app import RouterApp
from negamax.api.router.kv_events import BlockIndex
from negamax.api.router.prompt import RoutedPrompt, read_prompt
from negamax.api.router.servers import OpenCall, ServerPool
from negamax.base.errors import ConfigError, UnavailableError
from negamax.cli.main import main
from negamax.options.route import RouteOptions, list_prefillers, list_servers
from negamax.scheduler.scheduler import ROW_COST
from tests.ports import free_port
from tests.unit.test_open_request import in_loop

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone"
BUSY = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\nretry-after: 7\r\n\r\nbusy"
HANGS = b"hangs"  # This server never answers.
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [0, 1]}


class FakeServer:
    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.blocks = b""  # the answer of /kv_blocks
        self.room_answer: bytes | None = None  # the answer to a body with a room
        self.delay = 0.0  # seconds before an answer
        self.health = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /health "):
            writer.write(self.health)
        else:
            self.heads.append(head)
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
            self.bodies.append(await reader.readexactly(length))
            answer = self.blocks if "/kv_blocks " in head else self.answer
            if self.room_answer is not None and b"bootstrap_room" in self.bodies[-1]:
                answer = self.room_answer
            await asyncio.sleep(self.delay)
            if answer == HANGS:
                await asyncio.sleep(1000)
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def routing(
    *answers: bytes,
    prefill: bytes | None = None,
    has_rooms: bool = False,
    max_body_bytes: int = 10_000,
) -> AsyncIterator[tuple[Any, list[FakeServer], list[ServerPool]]]:
    fakes = [FakeServer(answer) for answer in (*answers, *([] if prefill is None else [prefill]))]
    running = [await asyncio.start_server(fake.serve, "127.0.0.1", 0) for fake in fakes]
    for fake, server in zip(fakes, running, strict=True):
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    addresses = [urlsplit(fake.url) for fake in fakes]
    pools = [ServerPool(addresses[: len(answers)], role="both")]
    if prefill is not None:
        pools.append(ServerPool(addresses[len(answers) :], role="prefill"))
    for pool in pools:
        await pool.probe()
    lifecycle = Lifecycle(drain_timeout=1.0)
    app = RouterApp(
        pools[0],
        None if prefill is None else pools[1],
        lifecycle=lifecycle,
        max_body_bytes=max_body_bytes,
        bootstrap_ports={fake.url: 5600 for fake in fakes} if has_rooms else None,
    )
    yield ErrorMiddleware(app, lifecycle=lifecycle, logs_access=False), fakes, pools
    await asyncio.sleep(0.01)  # for calls that the router cancels after an answer
    assert lifecycle.num_open == 0
    assert all(server.num_open == 0 for pool in pools for server in pool.servers)
    for each in running:
        each.close()


async def ask(
    app: Callable[..., Awaitable[None]],
    path: str = CHAT,
    body: object = None,
    *,
    method: str = "POST",
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes, bool]:
    """Send a request. Return status, headers, body, and whether the answer was complete."""
    sent: list[Any] = []
    content = json.dumps(body).encode() if raw is None else raw
    received = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        if received:
            return received.pop()
        await asyncio.sleep(1000)

    async def send(message: Any) -> None:
        sent.append(message)

    lines = {"host": "here", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "client": None,
        "headers": [(name.encode(), value.encode()) for name, value in lines.items()],
    }
    await app(scope, receive, send)
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    text = b"".join(message["body"] for message in sent[1:])
    return sent[0]["status"], answered, text, not sent[-1].get("more_body", False)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"messages": messages, "model": "nano", **fields}


def prompt(name: str, num_chunks: int = 10) -> RoutedPrompt:
    body = json.dumps({"prompt": name * (256 * num_chunks // len(name)), "model": "nano"})
    return read_prompt(body.encode(), sender=b"")


def pool_of(count: int, indexes: Sequence[list[BlockIndex]] = ()) -> ServerPool:
    addresses = [urlsplit(f"http://127.0.0.1:{1000 + at}") for at in range(count)]
    by_url = {address.geturl(): one for address, one in zip(addresses, indexes, strict=False)}
    pool = ServerPool(addresses, role="both", indexes=by_url)
    for server in pool.servers:
        server.is_up = True
    return pool


def place(pool: ServerPool, given: RoutedPrompt) -> OpenCall:
    call = pool.open(given)
    call.note_first_bytes()
    return call


def test_known_prefixes_go_to_their_server_and_new_prompts_to_an_idle_one() -> None:
    pool = pool_of(3)
    names = ["aa", "bb", "cc"]
    places = [place(pool, prompt(name)) for name in names for _ in range(3)]
    numbers = [pool.servers.index(call.server) for call in places]
    assert numbers == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [server.num_prefix_hits for server in pool.servers] == [2, 2, 2]
    for call in places:
        call.close()
        call.close()
    assert [server.num_open for server in pool.servers] == [0, 0, 0]


def test_a_prompt_goes_to_another_server_if_the_one_with_its_prefix_is_busy() -> None:
    pool, shared = pool_of(2), prompt("shared ", 40)
    calls = [place(pool, shared)]
    while len(calls) < 100 and calls[-1].server is calls[0].server:
        calls.append(place(pool, shared))
    # A row costs as much as ROW_COST prompt tokens and a quarter of its own tokens.
    saved = 64 * len(shared.tags)
    per_row = ROW_COST + shared.num_tokens // 4
    assert len(calls) - 1 == -(-saved // per_row)
    # Both servers now hold the prefix.
    assert pool.open(shared).num_pending == pool.open(shared).num_pending < 64


def test_a_server_that_is_down_or_failed_is_not_chosen() -> None:
    pool, known = pool_of(2), prompt("known")
    first = place(pool, known).server
    assert pool.open(known, without=[first]).server is not first
    first.is_up = False
    assert pool.open(known).server is not first
    with pytest.raises(UnavailableError, match="no server of the router answers: http://127"):
        pool.open(known, without=pool.servers)


def test_hashes_of_a_longer_conversation_begin_with_those_of_the_shorter() -> None:
    def tags(body: dict[str, Any], sender: bytes = b"") -> list[int]:
        return list(read_prompt(json.dumps(body).encode(), sender=sender).tags)

    long = "word " * 300
    one = tags(chat(long))
    two = tags({"temperature": 1, **chat(long, "more", "and more " * 100, stream=True)})
    assert 0 < len(one) < len(two) and two[: len(one)] == one
    system = {"system": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]}
    plain = {"system": [{"type": "text", "text": long}]}
    assert tags({**chat("x"), **system}) == tags({**plain, **chat("x")})
    assert tags({"tools": [long], **chat("x")})[0] != tags({"tools": ["y"], **chat(long)})[0]
    assert tags(chat(long, cache_salt="a"))[0] != tags(chat(long, cache_salt="b"))[0]
    assert tags(chat(long), b"key")[0] != one[0]
    for body in (b"", b"[1]", b"\xff", b"[" * 100_000, b'{"messages": 1}', b'{"messages": []}'):
        assert not read_prompt(body, sender=b"").tags


@in_loop
async def test_requests_and_answers_are_relayed_without_connection_headers() -> None:
    answer = b"HTTP/1.1 401 No\r\nwww-authenticate: Bearer\r\nconnection: x-own\r\nx-own: 1\r\n"
    async with routing(answer + b"content-length: 3\r\n\r\nno!") as (app, (fake,), _):
        sent = {"authorization": "Bearer k", "connection": "x-hop, close", "x-hop": "1", "te": "x"}
        status, headers, body, _ = await ask(app, raw=b'{"a": 1}', headers=sent)
        assert (status, body) == (401, b"no!")
        assert headers.pop("x-request-id")
        assert headers == {"www-authenticate": "Bearer", "content-length": "3"}
        first, *lines = fake.heads[0].strip().split("\r\n")
        assert first == f"POST {CHAT} HTTP/1.1"
        kept = [line for line in lines if not line.startswith(("x-request-id", "content"))]
        assert kept == ["host: here", "authorization: Bearer k"]
        assert fake.bodies == [b'{"a": 1}']
        await ask(app, raw=gzip.compress(b'{"b": 2}'), headers={"content-encoding": "gzip"})
        assert fake.bodies[1] == b'{"b": 2}' and "content-encoding" not in fake.heads[1]
        await ask(app, method="HEAD", path="/v1/models", raw=b"")
        assert fake.heads[2].startswith("GET /v1/models ")


@in_loop
async def test_a_connection_carries_several_requests_until_either_side_ends_it() -> None:
    accepted: list[int] = []
    answers, faults = [OK], list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(0)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
                await reader.readexactly(length)
                fault = faults.pop() if faults and accepted[-1] else ""
                if fault == "end":  # The server closes the connection just as the request arrives.
                    break
                accepted[-1] += 1
                writer.write(answers[0])
                if fault == "garbage":
                    await asyncio.sleep(0.02)
                    writer.write(OK)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    # From Python 3.12 on, `async with` waits for open connections.
    with closing(await asyncio.start_server(serve, "127.0.0.1", 0)) as running:
        address = urlsplit(f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}")
        pool = ServerPool([address], role="both")
        pool.servers[0].is_up = True
        app = RouterApp(pool, lifecycle=Lifecycle(drain_timeout=1.0), max_body_bytes=10_000)
        wrapped = ErrorMiddleware(app, lifecycle=Lifecycle(drain_timeout=1.0), logs_access=False)
        for _ in range(3):
            assert (await ask(wrapped))[2] == b"ok"
        assert accepted == [3]
        faults.append("end")
        assert (await ask(wrapped))[2] == b"ok"  # The router retries once.
        assert accepted == [3, 1] and pool.servers[0].num_failures == 0
        faults.append("garbage")  # Bytes without a request must not answer the next one.
        assert (await ask(wrapped))[2] == b"ok"
        await asyncio.sleep(0.1)
        assert (await ask(wrapped))[2] == b"ok"
        assert accepted == [3, 2, 1]
        for answer in (MISSING, OK + OK, OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)):
            answers[0], before = answer, len(accepted)
            replies = [(await ask(wrapped))[2] for _ in range(3)]
            assert replies == [answer.partition(b"\r\n\r\n")[2].partition(b"HTTP")[0]] * 3
            assert len(accepted) >= before + 2  # The router uses none of these connections again.
        answers[0] = OK
        await ask(wrapped)
        pool.servers[0].connections._idle[-1][0].idle_since -= 10
        before = len(accepted)
        await ask(wrapped)
        assert len(accepted) == before + 1
        (connections := pool.servers[0].connections).close()
        late = await connections.open()
        late[0].feed_data(OK)  # Bytes arrive after the answer and before `keep`.
        connections.keep(late)
        assert connections.take() is None


@in_loop
async def test_a_stream_is_relayed_byte_for_byte() -> None:
    events = [b"data: {%d}\n\n" % at for at in range(500)] + [b": ping\n\n", b"data: [DONE]\n\n"]
    text = b"".join(events)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    for answer in (
        STREAM + chunks + b"0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nx: 1\r\n\r\n" + STREAM + chunks + b"0\r\nlate: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + text,
    ):
        async with routing(answer) as (app, _, _):
            status, headers, body, has_end = await ask(app)
            assert (status, body, has_end) == (200, text, True)
            assert headers.keys() == {"content-type", "x-request-id"}


@in_loop
async def test_a_body_that_is_too_large_reaches_no_server() -> None:
    async with routing(OK, max_body_bytes=1000) as (app, (fake,), _):
        assert (await ask(app, raw=b"x" * 1000))[0] == 200
        status, _, body, _ = await ask(app, raw=b"x" * 1001)
        assert status == 413 and b"allowed: 1000" in body
        packed = gzip.compress(b"x" * 5000)
        assert (await ask(app, raw=packed, headers={"content-encoding": "gzip"}))[0] == 413
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("failure", [BUSY, b"", b"HTTP/1.1 2", STREAM, b"garbage\r\n\r\n"])
@in_loop
async def test_a_request_that_fails_at_once_is_sent_to_one_other_server(failure: bytes) -> None:
    async with routing(failure, OK) as (app, fakes, (pool,)):
        assert (await ask(app))[::2] == (200, b"ok")
        assert [len(fake.bodies) for fake in fakes] == [1, 1]
        assert [server.num_failures for server in pool.servers] == [1, 0]
        assert [server.num_retries for server in pool.servers] == [0, 1]
    async with routing(failure, failure, failure) as (app, fakes, _):
        status, headers, body, _ = await ask(app, MESSAGES)
        assert status == 503 and sum(len(fake.bodies) for fake in fakes) == 2
        if failure == BUSY:
            assert body == b"busy" and headers["retry-after"] == "7"
        else:
            assert json.loads(body)["error"]["details"]["error_code"] == "server_gone"


@in_loop
async def test_a_server_that_is_down_gets_no_requests_until_it_answers() -> None:
    async with routing(OK, OK) as (app, fakes, (pool,)):
        first, second = pool.servers
        first.connections.port, port = free_port(), first.connections.port
        assert (await ask(app))[0] == 200
        assert not first.is_up and first.num_failures == first.num_requests == 1
        for _ in range(3):
            assert (await ask(app))[0] == 200
        assert (first.num_requests, second.num_requests) == (1, 4)
        first.connections.port, fakes[0].health = port, BUSY
        await pool.probe()
        assert not first.is_up
        fakes[0].health = OK
        await pool.probe()
        assert first.is_up
        assert (await ask(app, "/health", method="GET"))[2] == b'{"status":"ok"}'
        fakes[0].health = fakes[1].health = b""
        await pool.probe()
        status, headers, body, _ = await ask(app)
        assert status == 503 and headers["retry-after"] == "1" and b"no server of the" in body
        assert (await ask(app, "/health", method="GET"))[0] == 503
        assert (await ask(app, "/livez", method="GET"))[0] == 200


@in_loop
async def test_a_silent_server_fails_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "_HEALTH_SECONDS", 0.05)
    ended = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await reader.read()  # The call returns when the router closes the connection.
        writer.close()
        ended.set()

    with closing(await asyncio.start_server(wait, "127.0.0.1", 0)) as server:
        address = urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        pool = ServerPool([address], role="both")
        await pool.probe()
        assert not pool.servers[0].is_up
        await asyncio.wait_for(ended.wait(), 60)


@in_loop
async def test_an_answer_that_fails_after_its_first_byte_ends_with_an_error() -> None:
    async with routing(STREAM + b"a\r\ndata: {}\n\n\r\n", OK) as (app, fakes, (pool,)):
        status, _, body, has_end = await ask(app)
        assert status == 200 and has_end
        begun, _, end = body.partition(b"\n\n\n\ndata: ")
        assert begun == b"data: {}"
        assert json.loads(end)["error"]["code"] == "server_gone"
        assert not fakes[1].bodies and pool.servers[0].num_failures == 1
    async with routing(STREAM + b"a\r\ndata: {}\n\n\r\n") as (app, _, _):
        body = (await ask(app, MESSAGES))[2]
        assert b"\n\nevent: error\ndata: " in body
        assert json.loads(body.rpartition(b"data: ")[2])["error"]["type"] == "overloaded_error"
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
    async with routing(half) as (app, _, (pool,)):
        status, _, body, has_end = await ask(app)
        assert pool.servers[0].num_failures == 1
        assert (status, body, has_end) == (200, b"half", False)


@in_loop
async def test_a_stored_response_is_found_on_any_server() -> None:
    async with routing(MISSING, MISSING, OK, MISSING) as (app, fakes, _):
        for _ in range(4):
            assert (await ask(app, "/v1/responses/resp_1", method="GET", raw=b""))[2] == b"ok"
        calls = [len(fake.heads) for fake in fakes]
        assert (await ask(app, "/v1/models/x", method="GET", raw=b""))[0] in (200, 404)
        assert sum(len(fake.heads) for fake in fakes) == sum(calls) + 1
    async with routing(MISSING, MISSING) as (app, _, _):
        assert (await ask(app, "/v1/responses/resp_1", method="GET", raw=b""))[2] == b"none"


def answer_with(value: object, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@in_loop
async def test_a_prefilling_server_gets_the_prompt_and_the_other_one_its_params() -> None:
    answer = answer_with({"choices": [], "kv_transfer_params": PARAMS})
    async with routing(OK, prefill=answer) as (app, (decoding, prefilling), pools):
        own = {"max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
        body = chat("x" * 600, **own, min_tokens=3, n=2, temperature=0.5)
        assert (await ask(app, body=body))[2] == b"ok"
        asked = json.loads(prefilling.bodies[0])
        assert asked.pop("kv_transfer_params")["do_remote_decode"]
        assert asked == chat("x" * 600, max_tokens=1, stream=False, temperature=0.5)
        assert json.loads(decoding.bodies[0]) == {**body, "kv_transfer_params": PARAMS}
        assert pools[0].servers[0].num_requests == pools[1].servers[0].num_requests == 1
        # Answers of this route have no params.
        await ask(app, MESSAGES, chat("x"))
        await ask(app, body=chat("x", kv_transfer_params=PARAMS))
        assert len(prefilling.bodies) == 1 and len(decoding.bodies) == 3


NO_PARAMS = answer_with({"kv_transfer_params": None})


@pytest.mark.parametrize("failure", [BUSY, b"", answer_with({}), answer_with([]), NO_PARAMS])
@in_loop
async def test_the_decoding_server_computes_a_prompt_if_prefilling_fails(failure: bytes) -> None:
    async with routing(OK, prefill=failure) as (app, (decoding, prefilling), _):
        assert (await ask(app, body=chat("x")))[2] == b"ok"
        assert len(prefilling.bodies) == 1 and json.loads(decoding.bodies[0]) == chat("x")


@in_loop
async def test_both_servers_get_one_body_with_a_room() -> None:
    async with routing(OK, prefill=OK, has_rooms=True) as (app, (decoding, prefilling), pools):
        rooms = set()
        for path in (CHAT, "/v1/completions", "/generate"):
            assert (await ask(app, path, chat("x", n=2)))[2] == b"ok"
            assert decoding.bodies[-1] == prefilling.bodies[-1]
            sent = json.loads(decoding.bodies[-1])
            rooms.add(sent.pop("bootstrap_room"))
            address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 5600}
            assert sent == chat("x", n=2) | address
        assert len(rooms) == 3 and max(rooms) < 2**62
        assert pools[0].servers[0].num_requests == pools[1].servers[0].num_requests == 3
        for path, body in ((MESSAGES, chat("x")), (CHAT, chat("x", bootstrap_room=1))):
            await ask(app, path, body)
            assert json.loads(decoding.bodies[-1]) == body and len(prefilling.bodies) == 3


@pytest.mark.parametrize("waits", [HANGS, BUSY])
@pytest.mark.parametrize("failure", [BUSY, b"", answer_with([])[:-1]])
@in_loop
async def test_a_decoding_server_does_not_wait_for_a_failed_prefill(
    failure: bytes, waits: bytes
) -> None:
    async with routing(OK, prefill=failure, has_rooms=True) as (app, fakes, pools):
        decoding, prefilling = fakes
        decoding.room_answer, prefilling.delay = waits, 0.05
        assert (await ask(app, body=chat("x")))[2] == b"ok"
        assert json.loads(decoding.bodies[-1]) == chat("x") and len(decoding.bodies) == 2
        assert [pool.servers[0].num_failures for pool in pools] == [0, 1]


@pytest.mark.parametrize("failure", [BUSY, b""])
@in_loop
async def test_another_room_is_used_after_a_decoding_server_fails(
    failure: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_CAUSE_SECONDS", 0.05)
    async with routing(failure, OK, prefill=HANGS, has_rooms=True) as (app, fakes, pools):
        assert (await ask(app, body=chat("x")))[2] == b"ok"
        rooms = [json.loads(fake.bodies[0])["bootstrap_room"] for fake in fakes[:2]]
        sent = [json.loads(body)["bootstrap_room"] for body in fakes[2].bodies]
        assert sent == rooms and rooms[0] != rooms[1]
        assert [server.num_failures for server in pools[0].servers] == [1, 0]
        assert pools[1].servers[0].num_failures == 0


@pytest.mark.parametrize("has_rooms", [False, True])
@in_loop
async def test_a_refusal_of_a_prefilling_server_is_returned(has_rooms: bool) -> None:
    async with routing(OK, prefill=MISSING, has_rooms=has_rooms) as (app, (decoding, _), _):
        decoding.room_answer = HANGS
        assert (await ask(app, body=chat("x")))[:3:2] == (404, b"none")
        assert len(decoding.bodies) == has_rooms


@pytest.mark.parametrize("has_rooms", [False, True])
@in_loop
async def test_a_request_does_not_wait_for_a_server_that_fails_its_probe(has_rooms: bool) -> None:
    async with routing(OK, prefill=HANGS, has_rooms=has_rooms) as (app, fakes, pools):
        decoding, prefilling = fakes
        decoding.room_answer = HANGS
        asked = asyncio.create_task(ask(app, body=chat("x")))
        while not prefilling.bodies:
            await asyncio.sleep(0.01)
        prefilling.health = BUSY
        await pools[1].probe()
        assert (await asyncio.wait_for(asked, 10))[2] == b"ok"


@in_loop
async def test_no_prompt_is_computed_while_no_server_decodes() -> None:
    async with routing(OK, prefill=NO_PARAMS) as (app, (_, prefilling), pools):
        pools[0].servers[0].is_up = False
        assert (await ask(app, body=chat("x")))[0] == 503
        assert not prefilling.bodies


def test_addresses_are_checked() -> None:
    def listed(*urls: str, **options: Any) -> list[list[str]]:
        return [
            [each.geturl() for each in found]
            for found in list_servers(urls, RouteOptions(**options))
        ]

    assert listed("http://a:1/v1/", "https://b") == [["http://a:1", "https://b"], []]
    assert listed(prefill=("http://p",), decode=("http://d",)) == [["http://d"], ["http://p"]]
    rooms = {"pd_disaggregation": True, "decode": ("http://d",)}
    words = ("http://p", "5600", "http://q/v1", "none", "http://r")
    assert listed(prefill=words, **rooms)[1] == ["http://p", "http://q", "http://r"]
    found = list_prefillers(RouteOptions(prefill=words, **rooms))
    assert [port for _, port in found] == [5600, None, None]
    for urls, options, message in (
        ((), {}, "URL is missing"),
        ((), {"prefill": ("http://p",)}, "--decode is missing"),
        (("http://a",), {"decode": ("http://d",)}, "URL 'http://a' cannot be combined"),
        (("http://a",), {"pd_disaggregation": True}, "--pd-disaggregation has no servers"),
        ((), rooms | {"prefill": ("http://p", "0")}, "'0', which is not the URL of a server"),
        ((), rooms | {"prefill": ("56", "http://p")}, "'56'; allowed: URLs, and with --pd-dis"),
        ((), rooms | {"prefill": ("http://p", "1", "2")}, "'2'; allowed: URLs"),
        ((), rooms | {"prefill": ("http://p", "70000")}, "'70000'; allowed: URLs"),
        ((), {"prefill": ("http://p", "1"), "decode": ("http://d",)}, "'1'; allowed: URLs"),
        (("a:1",), {}, "URL is 'a:1', which is not the URL of a server"),
        (("http://u:p@a",), {}, "not the URL of a server"),
        (("http://a:99999",), {}, "not the URL of a server"),
        (("http://a", "http://a/v1"), {}, "http://a is given twice"),
        (tuple(f"http://a:{at}" for at in range(1, 66)), {}, "65 servers; allowed: 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            listed(*urls, **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("http://a --port 70000", "--port is 70000; allowed: 0 to 65535"),
        ("http://a --health-interval 0", "--health-interval is 0; allowed: seconds above 0"),
        ("http://a --host 0.0.0.0 --port 0", "the router checks no keys"),
        ("http://a --no-such", "--no-such"),
    ],
)
def test_bad_options_end_with_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *line.split()]) == 2
    assert message in capsys.readouterr().err
