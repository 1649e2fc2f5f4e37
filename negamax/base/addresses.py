"""Resolve the addresses that a server listens on, and bind sockets to them."""

import socket
from typing import Any

from negamax.base.errors import ConfigError


def resolve_host(host: str, port: int) -> tuple[int, Any]:
    """Resolve `--host` to (family, address). "" means all interfaces. Raises `ConfigError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--host {host!r} cannot be resolved: {error}", hint="use 127.0.0.1 or 0.0.0.0"
        ) from None
    return family, address


def bind(family: int, address: Any, *, is_shared: bool = False) -> socket.socket:
    """Return a TCP socket bound to `address`. Raises `OSError`.

    With `is_shared`, several sockets can be bound to `address`, and the system spreads client
    connections over these sockets.
    """
    # asyncio disables Nagle's algorithm only if the socket was created with IPPROTO_TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
