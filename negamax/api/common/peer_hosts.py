"""Check and resolve the host names of prefilling servers in requests.

A few threads resolve names within a time limit. The engine receives IP addresses, so the engine
never waits for DNS, and a name cannot resolve to another host later.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from negamax.api.schemas.request_model import refuse
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.engine.wire import TransferInfo
from negamax.options.transfer import PRODUCER, allows_host

RESOLVE_SECONDS = 2.0  # time limit for resolving all host names of a request
_MOST_THREADS = 4  # maximum number of threads that wait for DNS at once
_OPTION = "--kv-transfer-config: kv_connector_extra_config.allowed_hosts"
_threads = threading.BoundedSemaphore(_MOST_THREADS)


async def find_addresses(params: EngineRequest, info: TransferInfo | None) -> dict[str, str]:
    """Return the IP address of each prefilling host in a request. Raises `InvalidRequestError` for
    a host that is not allowed or cannot be resolved in time.
    """
    if info is None or info.role == PRODUCER:
        return {}
    named, found = _list_hosts(params), dict[str, str]()
    for field, host in named:
        if host in found:
            continue
        try:
            parsed = ipaddress.ip_address(host)
            address = str(getattr(parsed, "ipv4_mapped", None) or parsed)
        except ValueError:
            address = ""
        if not allows_host(info.allowed_hosts, host, address or None):
            _refuse_host(field, host, "is not allowed")
        found[host] = address
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RESOLVE_SECONDS):
            for host in [host for host, address in found.items() if not address]:
                found[host] = await _resolve(host)
    for field, host in named:
        if not found[host]:
            _refuse_host(field, host, f"cannot be resolved within {RESOLVE_SECONDS:g} s")
        if not allows_host(info.allowed_hosts, host, found[host]):
            _refuse_host(field, host, f"is {found[host]}, which is not allowed")
    return found


def _list_hosts(params: EngineRequest) -> list[tuple[str, str]]:
    """Return the field and the host of each server from which the request reads a prompt."""
    if params.bootstrap_room is not None:
        field, given = "bootstrap_host", params.bootstrap_host
        listed: Sequence[Any] = given if isinstance(given, list) else [given]
    else:
        named = params.kv_transfer_params or {}
        listed = [named.get("remote_host")] if named.get("do_remote_prefill") else []
        field = "kv_transfer_params"
    return [(field, host) for host in listed if isinstance(host, str) and 0 < len(host) <= 253]


def _refuse_host(field: str, host: str, problem: str) -> NoReturn:
    refuse(field, f"host {host[:100]!r} {problem}; the operator allows hosts with {_OPTION}")


async def _resolve(host: str) -> str:
    """Return an address of a host, or "" if the host has no address or no thread is free."""
    if not _threads.acquire(blocking=False):
        return ""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def work() -> None:
        address = ""
        try:
            with contextlib.suppress(OSError, UnicodeError):
                address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        finally:
            _threads.release()
        with contextlib.suppress(RuntimeError):  # Raised if the event loop has ended.
            loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(address))

    # The thread is a daemon, so that a missing DNS answer does not delay the exit.
    threading.Thread(target=work, name="resolve", daemon=True).start()
    return await answer
