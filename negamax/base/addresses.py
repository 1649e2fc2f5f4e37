"""Addresses to listen on."""

import socket
from typing import Any

from negamax.base.errors import ConfigError


def resolve_host(host: str, port: int) -> tuple[int, int, int, Any]:
    """Resolve `--host` ("": all interfaces) to family, kind, protocol and address. Errors:
    `ConfigError` for an unknown host.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--host is {host!r}, which cannot be resolved: {error}",
            hint="use 127.0.0.1 or 0.0.0.0",
        ) from None
    return family, kind, protocol, address
