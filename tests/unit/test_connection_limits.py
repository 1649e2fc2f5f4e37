import asyncio
import contextlib
import logging
import resource
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from negamax.api import auth
from negamax.api.http import listening, protocol
from negamax.api.http.listening import Acceptor, ConnectionLimits, TlsFiles
from negamax.base.errors import ConfigError, RequestTimeoutError
from tests.certificates import make_certificate

FREE = ConnectionLimits(in_all=100, per_address=100)
BIG = b"x" * 10_000_000  # more than the buffers of both kernels' sockets hold


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers /big with a large body, /headers with late headers, /half in part, others with ok."""
    body = BIG if scope["path"] == "/big" else b"ok"
    if scope["path"] == "/headers":
        while (await receive()).get("more_body"):
            pass
        body = repr(scope["headers"]).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    if scope["path"] == "/half":
        headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": scope["path"] == "/half"})
    while scope["path"] == "/half" and (await receive())["type"] != "http.disconnect":
        pass


class Client:
    """A raw connection; `buffer`: size of the kernel's buffer in bytes."""

    def __init__(self, port: int, *, buffer: int | None = None) -> None:
        self._socket = socket.socket()
        if buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self) -> bytes:
        """Return the next bytes; empty if the server closed the connection or on an error."""
        try:
            return await asyncio.wait_for(
                asyncio.get_running_loop().sock_recv(self._socket, 65536), 60
            )
        except ConnectionError:
            return b""

    async def answer(self) -> bytes:
        answer = await self.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        while len(body) < length and (part := await self.read()):
            body += part
        return head + body

    def close(self) -> None:
        self._socket.close()


async def answered(port: int) -> bytes:
    """Return the answer of a server that may first have to notice that others disconnected."""
    for _ in range(600):
        client = Client(port)
        with contextlib.suppress(ConnectionError):
            await client.send(GET)
        head = await client.read()
        client.close()
        if head:
            return head
        await asyncio.sleep(0.05)
    raise AssertionError("the server answers nothing")


def with_server(
    test: Callable[[int], Awaitable[None]],
    *,
    keep_alive: int = 5,
    slow_client_timeout: float = 60.0,
    limits: ConnectionLimits = FREE,
    tls: TlsFiles | None = None,
) -> None:
    async def run() -> None:
        kind = protocol.make_protocol_class(slow_client_timeout=slow_client_timeout)
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            http=kind,
            lifespan="off",
            ws="none",
            log_config=None,
            timeout_keep_alive=keep_alive,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([]))
        while not server.started:
            await asyncio.sleep(0.01)
        make_protocol = partial(kind, config=config, server_state=server.server_state, app_state={})
        acceptor: Any = Acceptor(listener, make_protocol, limits=limits, tls=tls)
        server.servers.append(acceptor)
        try:
            await test(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving
            listener.close()

    asyncio.run(run())


def test_head_that_does_not_come_in_time_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)

    async def test(port: int) -> None:
        silent, half, good = Client(port), Client(port), Client(port)
        await half.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
        await good.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await good.read()).startswith(b"HTTP/1.1 200")
        late = await half.read()
        assert late.startswith(b"HTTP/1.1 408") and b"x-request-id" in late and b'"error"' in late
        assert await silent.read() == b""
        # the second head of a connection has a time limit too
        await good.send(b"GET / HTTP/1.1\r\n")
        assert (await good.read()).startswith(b"HTTP/1.1 408")
        for client in (silent, half, good):
            client.close()

    with_server(test)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "limits", [ConnectionLimits(3, 100), ConnectionLimits(100, 3)], ids=["in all", "per address"]
)
def test_connections_above_a_limit_are_closed_at_once(limits: ConnectionLimits) -> None:
    async def test(port: int) -> None:
        clients = [Client(port) for _ in range(5)]
        await asyncio.sleep(0.1)
        for client in clients[:3]:
            await client.send(GET)
            assert (await client.read()).startswith(b"HTTP/1.1 200")
        for client in clients[3:]:
            assert await client.read() == b""
        for client in clients:
            client.close()
        assert (await answered(port)).startswith(b"HTTP/1.1 200")

    with_server(test, limits=limits)


def test_a_client_with_ipv6_has_one_network() -> None:
    assert (
        listening._get_client("2001:db8::1")
        == listening._get_client("2001:db8::ffff")
        != listening._get_client("2001:db9::1")
    )
    assert (
        listening._get_client("::ffff:10.0.0.1")
        == listening._get_client("10.0.0.1")
        != listening._get_client("10.0.0.2")
    )


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    make_certificate(certificate, key)
    return certificate, key


def test_handshakes_count_as_connections_and_end_in_time(
    tls_files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 1.5)

    async def asked(port: int) -> bytes:
        context = ssl.create_default_context(cafile=tls_files[0])
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
        except (ConnectionError, ssl.SSLError):
            return b""
        writer.write(GET)
        answer = await reader.read(1000)
        writer.close()
        await writer.wait_closed()
        return answer

    async def is_served(port: int) -> bool:
        """Wait until the server has noticed that others disconnected."""
        for _ in range(100):
            if answer := await asked(port):
                return answer.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.05)
        return False

    async def is_refused(port: int) -> bool:
        silent = [Client(port) for _ in range(3)]
        await silent[1].send(b"\x16\x03\x01\x02\x00\x01\x00")  # half of a handshake
        await asyncio.sleep(0.1)
        refused = await asked(port) == b""
        for client in silent:
            assert await client.read() == b""
            client.close()
        return refused

    async def test(port: int) -> None:
        assert await is_served(port)
        for _ in range(10):  # on a stalled machine their timeout passes at once
            if refused := await is_refused(port):
                break
        assert refused
        assert await is_served(port)
        noisy = [Client(port) for _ in range(50)]
        for client in noisy:
            with contextlib.suppress(ConnectionError):
                await client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await is_served(port)
        for client in noisy:
            client.close()

    with_server(test, limits=ConnectionLimits(3, 3), tls=TlsFiles(*tls_files))


def test_new_tls_files_serve_new_connections(tls_files: tuple[str, str], tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    shutil.copy(tls_files[0], certificate)
    shutil.copy(tls_files[1], key)
    files = TlsFiles(certificate, key)
    before = files.context
    Path(key).write_text("no key")
    with pytest.raises(ConfigError):
        files.reload()
    assert files.context is before
    make_certificate(certificate, key)

    async def test(port: int) -> None:
        old, new = (ssl.create_default_context(cafile=path) for path in (tls_files[0], certificate))
        _, kept = await asyncio.open_connection(
            "127.0.0.1", port, ssl=old, server_hostname="localhost"
        )
        files.reload()
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", port, ssl=old, server_hostname="localhost")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=new, server_hostname="localhost"
        )
        writer.write(GET)
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 200")
        writer.close()
        kept.close()

    files.context = before
    with_server(test, tls=files)


def test_files_that_run_out_cost_a_line_of_the_log_and_no_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(port: int) -> None:
        clients = [socket.socket() for _ in range(60)]
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 10, hard))
        try:
            for client in clients:
                client.connect(("127.0.0.1", port))
            await asyncio.sleep(1.2)
            for client in clients:
                client.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await answered(port)).startswith(b"HTTP/1.1 200")

    with caplog.at_level(logging.WARNING):
        with_server(test)
    assert len(caplog.records) == 1 and "connections wait" in caplog.text


def test_unread_answer_is_dropped_after_the_limit() -> None:
    async def begun(port: int, **options: int) -> Client:
        client = Client(port, **options)
        await client.send(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        return client

    async def size_read(client: Client) -> int:
        size = 0
        while part := await client.read():
            size += len(part)
            if size > len(BIG):
                break
        client.close()
        return size

    async def test(port: int) -> None:
        lazy = await begun(port, buffer=4096)
        for _ in range(10):  # a stalled machine reads nothing
            if is_whole := await size_read(await begun(port)) > len(BIG):
                break
        assert is_whole
        await asyncio.sleep(0.5)  # the slow one has not read for longer than the limit
        assert await size_read(lazy) < len(BIG)

    with_server(test, slow_client_timeout=0.4)


def test_body_that_does_not_come_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "BODY_SECONDS", 0.1)

    class Budget:
        taken = 0

        def take_bytes(self, count: int) -> None:
            self.taken += count

    async def run() -> None:
        parts: list[Message] = [{"type": "http.request", "body": b"abc", "more_body": True}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await asyncio.sleep(60)
            raise AssertionError

        budget: Any = Budget()
        body = auth._Body(receive, budget)
        assert (await body.receive())["body"] == b"abc"
        with pytest.raises(RequestTimeoutError):
            await body.receive()
        assert budget.taken == body.num_bytes == 3

    asyncio.run(run())


CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def until_closed(client: Client, *, sending: bytes, most: int) -> tuple[bytes, int]:
    """Send `sending` repeatedly; return the server's answer, and the bytes sent before."""
    size = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while size < most:
            await asyncio.wait_for(client.send(sending), 120)
            size += len(sending)
    answer = b""
    with contextlib.suppress(TimeoutError):
        while part := await client.read():
            answer += part
    return answer, size


def test_trailers_are_no_headers() -> None:
    async def test(port: int) -> None:
        client = Client(port)
        await client.send(
            CHUNKED % b"/headers"
            + b"1\r\nx\r\n0\r\nauthorization: Bearer key\r\nx-api-key: key\r\n\r\n"
        )
        answer = await client.answer()
        assert (
            answer.startswith(b"HTTP/1.1 200")
            and b"transfer-encoding" in answer
            and b"key" not in answer
        )
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer()).endswith(b"ok")
        client.close()

    with_server(test)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"a: " + b"x" * 4000 + b"\r\n"),
        (b"0\r\na: ", b"x" * 4000),
        (b"1;", b"x" * 4000),
        (b"", b"1;" + b"x" * 4000 + b"\r\ny\r\n"),
    ],
    ids=["trailers", "one trailer", "one extension", "extensions"],
)
def test_what_a_chunked_body_carries_beside_its_content_is_bounded(
    begin: bytes, more: bytes
) -> None:
    async def test(port: int) -> None:
        client = Client(port)
        await client.send(CHUNKED % b"/headers" + begin)
        answer, size = await until_closed(client, sending=more, most=20_000_000)
        assert size < 8_000_000  # the capacity of both kernels' buffers
        assert answer.startswith(b"HTTP/1.1 431") or not answer  # lost if we were still sending
        client.close()

    with_server(test)


def test_body_in_chunks_of_a_byte_is_taken() -> None:
    async def test(port: int) -> None:
        client = Client(port)
        await client.send(CHUNKED % b"/headers" + b"00000001;a=b\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        client.close()

    with_server(test)


def test_bodies_that_follow_each_other_have_no_framing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a body and the next request may arrive together after an early answer."""
    monkeypatch.setattr(protocol, "MAX_FRAMING_BYTES", 1000)
    num_bytes = 20_000
    head = f"POST /headers HTTP/1.1\r\nhost: x\r\ncontent-length: {num_bytes}\r\n\r\n".encode()

    async def test(port: int) -> None:
        client = Client(port)
        await client.send(head + b"x")
        await asyncio.sleep(0.05)
        await client.send(b"x" * (num_bytes - 1) + head + b"x")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        await client.send(b"x" * (num_bytes - 1))
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        client.close()

    with_server(test)


@pytest.mark.parametrize("is_slow", [False, True])
def test_body_after_its_answer_is_not_taken_for_ever(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.4 if is_slow else 30.0)
    monkeypatch.setattr(protocol, "MAX_UNWANTED_BYTES", 100_000)

    async def test(port: int) -> None:
        client = Client(port)
        await client.send(CHUNKED % b"/")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        started = asyncio.get_running_loop().time()
        if is_slow:
            while asyncio.get_running_loop().time() < started + 60:
                try:
                    await client.send(b"1\r\nx\r\n")
                except ConnectionError:
                    break
                await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() < started + 30
        else:
            _, size = await until_closed(
                client, sending=b"1000\r\n" + b"x" * 4096 + b"\r\n", most=20_000_000
            )
            assert size < 8_000_000
        client.close()

    with_server(test)


def test_connection_goes_on_behind_a_body_that_came_after_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 1.0)

    async def test(port: int) -> None:
        client = Client(port)
        await client.send(CHUNKED % b"/")
        assert (await client.answer()).endswith(b"ok")
        await client.send(b"1\r\nx\r\n0\r\n\r\n")
        await asyncio.sleep(1.2)
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer()).endswith(b"ok")
        client.close()

    with_server(test, keep_alive=60)


@pytest.mark.parametrize("late", [b"1\r\nx\r\n0\r\n\r\n", b"\r\n"])
def test_connection_that_has_become_idle_is_closed(late: bytes) -> None:
    async def test(port: int) -> None:
        client = Client(port)
        await client.send(
            CHUNKED % b"/" if late != b"\r\n" else b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        assert (await client.answer()).endswith(b"ok")
        await client.send(late)
        assert await client.read() == b""
        client.close()

    with_server(test, keep_alive=1)


def test_noise_behind_a_request_says_nothing_into_its_answer() -> None:
    async def test(port: int) -> None:
        client = Client(port)
        await client.send(b"GET /half HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        await client.send(b"noise\r\n\r\n")
        answer = b""
        while part := await client.read():
            answer += part
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nok")
        client.close()

    with_server(test)
