import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from negamax.api.http import limited_body, listening, protocol
from negamax.api.http.body_budget import BodyBudget, BodyShare
from negamax.api.http.listening import Acceptor, ConnectionLimits, TlsFiles
from negamax.base.addresses import bind
from negamax.base.errors import OverloadedError, RequestTimeoutError
from tests.certificates import make_certificate

FREE = ConnectionLimits(in_all=100, per_address=100)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200"
BIG = b"x" * 10_000_000  # larger than the socket buffers of both kernels


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer /big with a large body, /headers with late headers, /half in part, others with ok."""
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
    """Open a raw connection. `buffer` is the size of the kernel's buffer in bytes."""

    def __init__(self, port: int, *, buffer: int | None = None) -> None:
        self._socket = socket.socket()
        if buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.connect(("127.0.0.1", port))
        self._socket.settimeout(60)
        self.send, self.close = self._socket.sendall, self._socket.close

    def read(self) -> bytes:
        """Return the next bytes, or b"" after an error or if the server closed the connection."""
        try:
            return self._socket.recv(65536)
        except ConnectionError:
            return b""

    def read_all(self) -> bytes:
        return b"".join(iter(self.read, b""))

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        head, _, body = self.read().partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        while len(body) < length and (part := self.read()):
            body += part
        return head + body


class Clients:
    def __init__(self, port: int) -> None:
        self.port = port
        self._clients: list[Client] = []

    def connect(self, *, buffer: int | None = None) -> Client:
        self._clients.append(Client(self.port, buffer=buffer))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def answered(self) -> bytes:
        """Return the server's answer, even if the server must first notice other disconnects."""
        for _ in range(600):
            client = self.connect()
            with contextlib.suppress(ConnectionError):
                client.send(GET)
            if head := client.read():
                return head
            client.close()
            time.sleep(0.05)
        raise AssertionError("the server does not answer")


@contextlib.contextmanager
def served(
    *, keep_alive: int = 5, slow_client_timeout: float = 60.0, limits: ConnectionLimits = FREE,
    tls: TlsFiles | None = None,
) -> Iterator[Clients]:  # fmt: skip
    """Serve `app` in a thread, and yield its clients."""
    kind = partial(protocol.LimitedProtocol, slow_client_timeout=slow_client_timeout)
    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "http": kind}
    config = uvicorn.Config(app, timeout_keep_alive=keep_alive, **options)
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    clients, ready = Clients(listener.getsockname()[1]), threading.Event()

    async def run() -> None:
        serving = asyncio.create_task(server._serve([]))
        while not server.started:
            await asyncio.sleep(0.01)
        make_protocol = partial(kind, config=config, server_state=server.server_state, app_state={})
        acceptor: Any = Acceptor(listener, make_protocol, limits=limits, tls=tls)
        server.servers.append(acceptor)
        ready.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield clients
    finally:
        clients.close()
        server.should_exit = True
        thread.join(60)
        listener.close()


def test_accepted_connections_send_small_parts_at_once() -> None:
    async def scene() -> int:
        with bind(socket.AF_INET, ("127.0.0.1", 0)) as listener:
            listener.listen()
            with socket.create_connection(listener.getsockname()):
                accepted, _ = listener.accept()
                loop = asyncio.get_running_loop()
                transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
                raw = transport.get_extra_info("socket")
                delay = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                transport.abort()
                return int(delay)

    assert asyncio.run(scene()) == 1


def test_late_head_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)

    with served() as clients:
        silent, half, good = (clients.connect() for _ in range(3))
        half.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
        assert good.ask(GET).startswith(OK)
        late = half.read()
        assert late.startswith(b"HTTP/1.1 408") and b"x-request-id" in late and b'"error"' in late
        assert silent.read() == b""
        # The time limit also applies to the second head of a connection.
        good.send(b"GET / HTTP/1.1\r\n")
        assert (good.read()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "limits", [ConnectionLimits(3, 100), ConnectionLimits(100, 3)], ids=["in all", "per address"]
)
def test_connections_above_a_limit_are_closed_at_once(limits: ConnectionLimits) -> None:
    with served(limits=limits) as clients:
        admitted = [clients.connect() for _ in range(3)]
        closed = [clients.connect() for _ in range(2)]
        time.sleep(0.1)
        for client in admitted:
            assert client.ask(GET).startswith(OK)
        for client in closed:
            assert client.read() == b""
        clients.close()
        assert clients.answered().startswith(OK)


def test_a_client_with_ipv6_has_one_network() -> None:
    found = map(listening._get_client, ("2001:db8::1", "2001:db8::ffff", "2001:db9::1"))
    first, same, other = found
    assert first == same != other
    assert listening._get_client("::ffff:10.0.0.1") == listening._get_client("10.0.0.1")
    assert listening._get_client("10.0.0.1") != listening._get_client("10.0.0.2")


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    make_certificate(certificate, key)
    return certificate, key


def test_handshake_limits(tls_files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.7)

    context = ssl.create_default_context(cafile=tls_files[0])

    def asked(port: int) -> bytes:
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 60) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(GET)
                return connection.recv(1000)
        except (ConnectionError, ssl.SSLError):
            return b""

    def is_served(port: int) -> bool:
        """Wait until the server has noticed that other clients disconnected."""
        for _ in range(100):
            if answer := asked(port):
                return answer.startswith(OK)
            time.sleep(0.05)
        return False

    def is_refused(clients: Clients) -> bool:
        silent = [clients.connect() for _ in range(3)]
        silent[1].send(b"\x16\x03\x01\x02\x00\x01\x00")  # half of a TLS handshake
        time.sleep(0.1)
        refused = asked(clients.port) == b""
        for client in silent:
            assert client.read() == b""
        clients.close()
        return refused

    with served(limits=ConnectionLimits(3, 3), tls=TlsFiles(*tls_files)) as clients:
        assert is_served(clients.port)
        for _ in range(10):  # On a stalled machine the timeout passes at once, so try again.
            if refused := is_refused(clients):
                break
        assert refused
        assert is_served(clients.port)
        for _ in range(50):
            with contextlib.suppress(ConnectionError):
                clients.connect().send(b"GET / HTTP/1.1\r\n\r\n")
        assert is_served(clients.port)


def test_accepts_again_after_files_ran_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), served() as clients:
        sockets = [socket.socket() for _ in range(60)]
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 10, hard))
        try:
            for each in sockets:
                each.connect(("127.0.0.1", clients.port))
            time.sleep(1.2)
            for each in sockets:
                each.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert clients.answered().startswith(OK)
    assert len(caplog.records) == 1 and "connections wait" in caplog.text


def test_unread_answer_is_dropped_after_the_limit() -> None:
    def size_read(client: Client) -> int:
        size = 0
        while size <= len(BIG) and (part := client.read()):
            size += len(part)
        return size

    with served(slow_client_timeout=0.4) as clients:
        lazy = clients.connect(buffer=4096)
        lazy.send(GET.replace(b"/ ", b"/big "))
        for _ in range(10):  # A stalled machine reads nothing, so try again.
            client = clients.connect()
            client.send(GET.replace(b"/ ", b"/big "))
            if is_whole := size_read(client) > len(BIG):
                break
        assert is_whole
        time.sleep(0.5)  # The slow client has not read for longer than the limit.
        assert size_read(lazy) < len(BIG)


def test_body_that_does_not_come_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_body, "BODY_SECONDS", 0.1)

    share: Any = BodyShare(BodyBudget(10), {"state": {"tenant": "", "shares_queue": False}})

    async def run() -> None:
        parts: list[Message] = [{"type": "http.request", "body": b"abc", "more_body": True}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await asyncio.sleep(60)
            raise AssertionError

        body = limited_body.LimitedBody(receive, share)
        assert (await body.receive())["body"] == b"abc"
        with pytest.raises(RequestTimeoutError):
            await body.receive()
        assert share.num_bytes == 3

    asyncio.run(run())


def test_one_key_leaves_room_for_the_bodies_of_another() -> None:
    budget = BodyBudget(100)

    def share_of(tenant: str) -> BodyShare:
        return BodyShare(budget, {"state": {"tenant": tenant, "shares_queue": bool(tenant)}})

    first, second = share_of("a"), share_of("b")
    first.take(50)
    with pytest.raises(OverloadedError, match="your key's open requests"):
        share_of("a").take(1)
    second.take(25)
    with pytest.raises(OverloadedError):
        second.take(1)
    first.keep(10)
    second.take(20)
    for share in (first, second):
        share.keep(0)
    share_of("").take(100)


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
@pytest.mark.parametrize(
    "url", [b"/" + b"x" * 70_000, b"http://[::1", b"//", b"http://a:b:c/"], ids=lambda url: url[:9]
)
def test_url_that_cannot_be_parsed_is_refused_without_a_traceback(
    url: bytes, before: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with served() as clients:
        client = clients.connect()
        if before:
            assert client.ask(before).startswith(OK)
        answer = client.ask(GET.replace(b" / ", b" %s " % url))
        assert answer.startswith((b"HTTP/1.1 4", OK)), answer
        assert clients.answered().startswith(OK)
    assert [record for record in caplog.records if record.exc_info] == []


def until_closed(client: Client, *, sending: bytes, most: int) -> tuple[bytes, int]:
    """Send `sending` until the server closes; return its answer and the number of bytes sent."""
    size = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while size < most:
            client.send(sending)
            size += len(sending)
    with contextlib.suppress(TimeoutError):
        return client.read_all(), size
    return b"", size


def test_trailers_are_no_headers_and_chunks_may_have_one_byte() -> None:
    trailers = b"0\r\nauthorization: Bearer key\r\nx-api-key: key\r\n\r\n"

    with served() as clients:
        client = clients.connect()
        answer = client.ask(CHUNKED % b"/headers" + b"1\r\nx\r\n" + trailers)
        assert answer.startswith(OK) and b"transfer-encoding" in answer and b"key" not in answer
        assert client.ask(GET).endswith(b"ok")
        body = b"00000001;a=b\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
        assert (clients.connect().ask(CHUNKED % b"/headers" + body)).startswith(OK)


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
def test_framing_of_a_chunked_body_is_bounded(begin: bytes, more: bytes) -> None:
    with served() as clients:
        client = clients.connect()
        client.send(CHUNKED % b"/headers" + begin)
        answer, size = until_closed(client, sending=more, most=20_000_000)
        assert size < 8_000_000  # the capacity of both kernels' socket buffers
        assert answer.startswith(b"HTTP/1.1 431") or not answer  # Answers may be lost.


def test_the_next_request_does_not_count_as_framing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a body's end and the next request may arrive together after an early answer."""
    monkeypatch.setattr(protocol, "MAX_FRAMING_BYTES", 1000)
    num_bytes = 20_000
    head = f"POST /headers HTTP/1.1\r\nhost: x\r\ncontent-length: {num_bytes}\r\n\r\n".encode()

    with served() as clients:
        client, rest = clients.connect(), b"x" * (num_bytes - 1)
        client.send(head + b"x")
        time.sleep(0.05)
        assert client.ask(rest + head + b"x").startswith(OK)
        assert client.ask(rest).startswith(OK)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_body_after_the_answer_has_limits(monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.4 if is_slow else 30.0)
    monkeypatch.setattr(protocol, "MAX_UNWANTED_BYTES", 100_000)

    with served() as clients:
        client = clients.connect()
        assert client.ask(CHUNKED % b"/").startswith(OK)
        started = time.monotonic()
        if is_slow:
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < started + 60:
                    client.send(b"1\r\nx\r\n")
                    time.sleep(0.05)
            assert time.monotonic() < started + 30
        else:
            chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
            _, size = until_closed(client, sending=chunk, most=20_000_000)
            assert size < 8_000_000


def test_connection_goes_on_after_a_late_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.4)

    with served(keep_alive=60) as clients:
        client = clients.connect()
        assert client.ask(CHUNKED % b"/").endswith(b"ok")
        client.send(b"1\r\nx\r\n0\r\n\r\n")
        time.sleep(0.6)
        assert client.ask(GET).endswith(b"ok")


@pytest.mark.parametrize(
    ("sent", "late"), [(CHUNKED % b"/", b"1\r\nx\r\n0\r\n\r\n"), (GET, b"\r\n")]
)
def test_connection_that_has_become_idle_is_closed(sent: bytes, late: bytes) -> None:
    with served(keep_alive=1) as clients:
        client = clients.connect()
        assert client.ask(sent).endswith(b"ok")
        client.send(late)
        assert client.read() == b""


def test_noise_after_a_request_adds_nothing_to_its_answer() -> None:
    with served() as clients:
        client = clients.connect()
        client.send(GET.replace(b"/ ", b"/half "))
        time.sleep(0.1)
        client.send(b"noise\r\n\r\n")
        answer = client.read_all()
        assert answer.startswith(OK) and answer.endswith(b"\r\n\r\nok")
