import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from negamax.base.errors import ConfigError
from negamax.bench.serve_client import (
    ClientConnection,
    ExchangeError,
    ResponseReader,
    ResponseRecord,
    ServingClient,
)
from tests.speed import is_quick

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def events(*payloads: object, end: str = "\n\n") -> list[str]:
    return [f"data: {json.dumps(payload, ensure_ascii=False)}{end}" for payload in payloads]


def delta(finish_reason: str | None = None, **fields: object) -> dict[str, object]:
    choice = {"index": 0, "delta": fields, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None}


def call_piece(arguments: str) -> dict[str, object]:
    return delta(tool_calls=[{"index": 0, "function": {"arguments": arguments}}])


DETAILS = {"prompt_tokens_details": {"cached_tokens": 4}}
USAGE = {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 7} | DETAILS}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
CHAT = [
    *events(delta(role="assistant", content="")),
    ": keep-alive\n\n",
    *events(delta(reasoning_content="hm", reasoning="hm"), delta(content="héllo")),
    *events(delta(tool_calls=[CALL])),
    *events(call_piece('{"a":'), end="\r\n\r\n"),
    *events(call_piece("1}"), delta("tool_calls"), USAGE),
    "data: [DONE]\n\n",
]


def chunked(parts: Sequence[str]) -> bytes:
    body = b""
    for number, part in enumerate(map(str.encode, parts)):
        body += b"%X%s\r\n%s\r\n" % (len(part), b";x=1" if number == 1 else b"", part)
    head = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    return head + body + b"0\r\nX-Trailer: 1\r\n\r\n"


@asynccontextmanager
async def exchanging(
    reader: ResponseReader,
) -> AsyncIterator[tuple[ClientConnection, asyncio.Future[None], socket.socket]]:
    """Send a request over a socket pair. Yield connection, exchange and the other socket."""
    mine, other = socket.socketpair()
    loop = asyncio.get_running_loop()
    with other:
        _, connection = await loop.create_connection(ClientConnection, sock=mine)
        exchange = asyncio.ensure_future(connection.exchange(b"POST", reader))
        await asyncio.sleep(0)
        yield connection, exchange, other
        connection.close()


async def read(pieces: Sequence[bytes], *, closes: bool = False) -> ResponseReader:
    reader = ResponseReader(ResponseRecord(0), collect=True)
    async with exchanging(reader) as (connection, exchange, other):
        for piece in pieces:
            connection.data_received(piece)
        if closes:
            other.recv(100)
            other.close()
        try:
            await asyncio.wait_for(exchange, 120)
            reader.finish()
        except ExchangeError as error:
            reader.record.fail(str(error))
        return reader


def check_chat(reader: ResponseReader) -> None:
    record = reader.record
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (12, 7, 4)
    assert len(record.arrivals) == 5 and record.finish_reason == "tool_calls"
    function = {"name": "f", "arguments": '{"a":1}'}
    assert reader.message == {
        "role": "assistant",
        "content": "héllo",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("index", [-1, -5, 10**9])
def test_odd_indices_of_calls_are_bounded(index: int) -> None:
    stream = chunked(events(delta("tool_calls", tool_calls=[{**CALL, "index": index}])))
    reader = asyncio.run(read([stream]))
    assert reader.message is not None and len(reader.message["tool_calls"]) in (1, 128)
    assert reader.record.error is None


def test_a_stream_reads_the_same_in_any_pieces() -> None:
    raw = chunked(CHAT)

    async def read_in_pieces() -> None:
        for place in range(1, len(raw)):
            check_chat(await read([raw[:place], raw[place:]]))
        check_chat(await read([raw[place : place + 1] for place in range(len(raw))]))
        check_chat(await read([b"HTTP/1.1 100 Continue\r\n\r\n" + raw]))

    asyncio.run(read_in_pieces())
    body = "".join(CHAT).encode()
    check_chat(asyncio.run(read([f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body])))
    check_chat(asyncio.run(read([f"{HEAD}\r\n".encode(), body], closes=True)))


def test_transport_need_not_be_of_asyncios_class() -> None:
    class OtherTransport:
        def __init__(self) -> None:
            self.sent = b""

        def write(self, data: bytes) -> None:
            self.sent += data

        def is_closing(self) -> bool:
            return False

    async def scene() -> bytes:
        connection, transport = ClientConnection(), OtherTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        reader = ResponseReader(ResponseRecord(0), collect=True)
        exchange = asyncio.ensure_future(connection.exchange(b"POST", reader))
        await asyncio.sleep(0)
        connection.data_received(chunked(CHAT))
        await exchange
        reader.finish()
        check_chat(reader)
        return transport.sent

    assert asyncio.run(scene()) == b"POST"


def test_completions_count_chunks_with_text_and_the_running_usage() -> None:
    def chunk(text: str, count: int, finish: str | None = None) -> dict[str, object]:
        usage = {"prompt_tokens": 3, "completion_tokens": count}
        return {"choices": [{"text": text, "finish_reason": finish}], "usage": usage}

    parts = events(chunk("a", 2), chunk("", 3), chunk("bc", 5), chunk("", 5, "length"))
    record = asyncio.run(read([chunked([*parts, "data: [DONE]\n\n"])])).record
    assert list(record.running_tokens) == [2, 5]
    assert (record.output_tokens, record.finish_reason, record.error) == (5, "length", None)
    assert record.arrivals[-1] <= record.ended


BROKEN: list[tuple[bytes, str]] = [
    (chunked(CHAT)[:-300], "connection closed before the answer ended"),
    (b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}", "HTTP 500"),
    (b"HTTP/1.1 204 Empty\r\n\r\n", "HTTP 204"),
    (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "malformed HTTP answer: Expected HTTP/"),
    (chunked(CHAT).replace(b"\r\n0\r\n", b"\r\nzz\r\n"), "malformed HTTP answer"),
    (chunked(CHAT).replace(b"\r\n0\r\n", b"\r\n-1\r\n"), "malformed HTTP answer: Invalid char"),
    (b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000, "malformed HTTP answer: an endless line"),
    (chunked(["data: {nonsense\n\n"]), "unreadable chunk"),
    (chunked(['data: {"choices": 5}\n\n']), "unreadable chunk"),
    (chunked(events({"error": {"message": "died", "code": 500}})), "error in the stream"),
    (chunked(events({"object": "error", "message": "died"})), "error in the stream"),
    (chunked(events(delta(content="a"))), "stream without an end"),
    (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\nhello",
        "text/html instead of an event stream",
    ),
]


@pytest.mark.parametrize(("raw", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_broken_answers_have_a_reason_in_any_pieces(raw: bytes, reason: str) -> None:
    for size in (len(raw), 7):
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        record = asyncio.run(read(pieces, closes=True)).record
        assert record.error is not None and record.error.startswith(reason)


def test_what_the_server_says_about_a_refusal_is_kept() -> None:
    body = b'{"error": {"message": "the queue is full", "type": "rate_limit_error"}}'
    raw = b"HTTP/1.1 429 Busy\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    record = asyncio.run(read([raw])).record
    assert (record.error, record.detail) == ("HTTP 429", "Retry-After 3: the queue is full")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:70000"])
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        ServingClient(url, headers={}, timeout=1.0)


def test_header_values_cannot_carry_other_headers() -> None:
    with pytest.raises(ConfigError, match="line break"):
        ServingClient("http://host", headers={"x": "a\r\nb: c"}, timeout=1.0)


def test_a_chunk_costs_less_than_50_microseconds() -> None:
    count = 5000
    part = chunked(events(delta(content=" token") | {"id": "chatcmpl-" + "0" * 32, "model": "m"}))
    piece = part[part.index(b"\r\n\r\n") + 4 : part.index(b"0\r\nX-Trailer")]

    async def measure() -> bool:
        reader = ResponseReader(ResponseRecord(0))
        async with exchanging(reader) as (connection, exchange, _):
            first = chunked(events(delta(content="a")))
            connection.data_received(first.removesuffix(b"0\r\nX-Trailer: 1\r\n\r\n"))

            def feed() -> None:
                for _ in range(count):
                    connection.data_received(piece)

            took_little = is_quick(feed, count * 50e-6)
            assert len(reader.record.arrivals) % count == 1
            exchange.cancel()
            return took_little

    assert asyncio.run(measure())
