import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from negamax.api.common import peer_hosts
from negamax.api.common.peer_hosts import find_addresses
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.base.errors import InvalidRequestError
from negamax.engine.wire import TransferInfo
from negamax.options.transfer import CONSUMER, PRODUCER, KvTransferConfig
from tests.unit.test_open_request import in_loop


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
