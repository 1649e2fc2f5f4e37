import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request

from negamax.api.common import peer_hosts
from negamax.api.common.peer_hosts import find_addresses
from negamax.api.http.sse import ClientGoneError
from negamax.api.processes import wire
from negamax.api.processes.peers import PeerClient
from negamax.api.processes.server_rank import ServerRank
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.api.server_worker import can_serve
from negamax.base.errors import InvalidRequestError, UnavailableError
from negamax.engine.wire import TransferInfo
from negamax.options.transfer import CONSUMER, PRODUCER, KvTransferConfig
from tests.unit.test_open_request import in_loop

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def request(*, hang_up: asyncio.Event) -> Request:
    async def receive() -> dict[str, Any]:
        await hang_up.wait()
        return {"type": "http.disconnect"}

    names = {b"host": b"here", b"authorization": b"Bearer k", b"connection": b"keep-alive"}
    headers = [*names.items(), (b"x-request-id", b"old")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses/x y",
        "raw_path": b"/v1/responses/x%20y", "query_string": b"a=1", "headers": headers,
        "state": {"request_id": "rid"},
    }  # fmt: skip
    return Request(scope, receive)


async def relayed(
    folder: Path, peer: Peer, *, hang_up: asyncio.Event | None = None, sent: Any = None
) -> list[dict[str, Any]]:
    """Return process 1's answer as process 0 relays it. `sent` also gets the single messages."""
    rank = ServerRank.of(0, 2, folder)
    sent = [] if sent is None else sent

    async def send(message: Any) -> None:
        sent.append(message)

    async with await asyncio.start_unix_server(peer, str(rank.socket_of(1))):
        asked = request(hang_up=hang_up or asyncio.Event())
        answer = await PeerClient(rank).relay(asked, to=1, body=b'{"x":1}')
        await answer(asked.scope, asked.receive, send)
    return sent


def test_head_body_and_answer_are_passed_on(tmp_path: Path) -> None:
    heads: list[bytes] = []
    sent: list[dict[str, Any]] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        assert await reader.readexactly(7) == b'{"x":1}'
        writer.write(b"HTTP/1.1 429 Too Many\r\nretry-after: 3\r\nx-request-id: rid\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for part in (b"one", b"two"):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            while not sent or sent[-1].get("body") != part:
                await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")
        writer.close()

    first, *parts, last = asyncio.run(relayed(tmp_path, peer, sent=sent))
    (head,) = heads
    first_line, *lines = head.decode().strip().split("\r\n")
    assert first_line == "POST /v1/responses/x%20y?a=1 HTTP/1.1"
    own = ["connection: close", "content-length: 7", "x-request-id: rid"]
    assert sorted(lines) == sorted(["host: here", "authorization: Bearer k", *own])
    assert first["status"] == 429 and first["headers"] == [(b"retry-after", b"3")]
    assert [part["body"] for part in parts] == [b"one", b"two"]
    assert last == {"type": "http.response.body", "body": b"", "more_body": False}


def test_process_that_does_not_listen_is_unavailable(tmp_path: Path) -> None:
    async def scene() -> None:
        peers = PeerClient(ServerRank.of(0, 2, tmp_path))
        await peers.relay(request(hang_up=asyncio.Event()), to=1)

    with pytest.raises(UnavailableError, match="server process 1"):
        asyncio.run(scene())


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"])
def test_the_answer_of_a_process_that_dies_ends_in_an_error(tmp_path: Path, head: bytes) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        writer.close()

    with pytest.raises(UnavailableError) as broken:
        asyncio.run(relayed(tmp_path, peer))
    assert broken.value.code == "server_process"


@pytest.mark.parametrize("has_begun", [False, True])
def test_hang_up_ends_the_request_at_the_other_process(tmp_path: Path, has_begun: bool) -> None:
    ended = False

    async def scene() -> None:
        hang_up, arrived = asyncio.Event(), asyncio.Event()

        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal ended
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(7)
            if has_begun:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            hang_up.set()
            ended = await reader.read() == b""
            writer.close()  # From Python 3.12 on, a server waits for its connections to close.
            arrived.set()

        try:
            await relayed(tmp_path, peer, hang_up=hang_up)
            assert has_begun
        except ClientGoneError:
            assert not has_begun
        await asyncio.wait_for(arrived.wait(), 120)

    asyncio.run(scene())
    assert ended


def test_ids_lead_to_the_process_that_made_them(tmp_path: Path) -> None:
    ranks = [ServerRank.of(index, 3, tmp_path) for index in range(3)]
    for rank in ranks:
        name = rank.new_id("resp", num_bytes=24)
        assert len(name) == len("resp_") + 48
        assert [other.owner_of(name) for other in ranks] == [rank.index] * 3
    for foreign in (None, "", "x", "resp_zz", "resp_ff"):
        assert [rank.owner_of(foreign) for rank in ranks] == [0, 1, 2]


def about(*allowed: str, host: str = "10.1.1.1", role: str = CONSUMER) -> TransferInfo:
    config = KvTransferConfig(role, host=host, allowed_hosts=allowed)
    return TransferInfo("id", role, host, 5600, 1, config.hosts_of_others)


def naming(host: object) -> EngineRequest:
    return EngineRequest(kv_transfer_params={"do_remote_prefill": True, "remote_host": host})


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    known: dict[str, str] = {}

    def resolve(host: str, *_: Any, **__: Any) -> Any:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (known[host], 0))]

    monkeypatch.setattr(peer_hosts.socket, "getaddrinfo", resolve)
    return known


LOCAL = "127.0.0.1"


@pytest.mark.parametrize(
    ("info", "host", "address"),
    [
        (about(), "192.168.3.4", "192.168.3.4"),
        (about(), "::1", "::1"),
        (about(), "::ffff:10.0.0.9", "10.0.0.9"),
        (about(), "8.8.8.8", None),
        (about(), "169.254.169.254", None),  # Clouds serve credentials at this address.
        (about(), "::ffff:169.254.169.254", None),
        (about(), "0.0.0.0", None),
        (about(), "fe80::1%eth0", None),
        (about(host=LOCAL), "10.0.0.1", None),
        (about(host=LOCAL), "127.0.0.2", "127.0.0.2"),
        (about("8.8.8.0/24"), "8.8.8.8", "8.8.8.8"),
        (about("8.8.8.0/24"), LOCAL, None),
        (about(), "inside", "10.0.0.7"),
        (about(), "outside", None),
        (about("Outside"), "outside", "8.8.8.8"),
        (about("Outside"), "inside", None),
        (about(), "unknown", None),
        (about(), "a\x00b", None),
    ],
)
@in_loop
async def test_only_allowed_hosts_have_addresses(
    names: dict[str, str], info: TransferInfo, host: str, address: str | None
) -> None:
    names |= {"inside": "10.0.0.7", "outside": "8.8.8.8"}
    room = EngineRequest(bootstrap_room=1, bootstrap_host=[host, None])
    for params in (naming(host), room):
        if address is None:
            with pytest.raises(InvalidRequestError, match=r"host .*allowed_hosts"):
                await find_addresses(params, info)
        else:
            assert await find_addresses(params, info) == {host: address}
    assert await find_addresses(params, None) == {}
    assert await find_addresses(params, about(role=PRODUCER)) == {}


@in_loop
async def test_slow_dns_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def wait(*_: Any, **__: Any) -> Any:
        released.wait(60)
        return [(0, 0, 0, "", (LOCAL, 0))]

    monkeypatch.setattr(peer_hosts.socket, "getaddrinfo", wait)
    monkeypatch.setattr(peer_hosts, "RESOLVE_SECONDS", 0.2)
    before, began = threading.active_count(), time.monotonic()
    asked = [find_addresses(naming(f"slow-{at}"), about()) for at in range(50)]
    answers = await asyncio.gather(
        *asked, find_addresses(naming(LOCAL), about()), return_exceptions=True
    )
    assert time.monotonic() - began < 5
    assert all(isinstance(each, InvalidRequestError) for each in answers[:-1])
    assert answers[-1] == {LOCAL: LOCAL}
    assert threading.active_count() <= before + 4
    released.set()
    await asyncio.sleep(0.1)
    assert await find_addresses(naming("slow"), about()) == {"slow": LOCAL}


RUNS = wire.UseEngine(0, "folder", cast(Any, None))  # The test does not use the engine's info.
LOST = wire.EngineLost(1, "killed", 1.0)
DEAD = wire.EngineDead(1, "killed")


def test_serves_once_the_state_of_every_engine_is_known_and_one_runs() -> None:
    for messages, num_replicas, expected in (
        ((), 1, False),
        ((RUNS,), 1, True),
        ((RUNS,), 2, False),  # The other engine may be running.
        ((RUNS, LOST), 2, True),
        ((RUNS, DEAD), 2, True),
        ((LOST,), 1, False),
    ):
        heard = dict(enumerate(messages))
        assert can_serve(heard, num_replicas=num_replicas) is expected
