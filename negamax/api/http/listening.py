"""Accept connections and TLS handshakes within a total limit and a limit per address."""

import asyncio
import errno
import ipaddress
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from negamax.api.http.protocol import LimitedProtocol
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger

logger = get_logger(__name__)

HANDSHAKE_SECONDS = 15.0  # Time limit of a TLS handshake.
_GOODBYE_SECONDS = 5.0  # Time limit of a TLS shutdown.
_BACKLOG = 2048
_BATCH = 64  # Maximum number of connections that one turn of the event loop accepts.
_RETRY_SECONDS = 0.5  # Pause after accept ran out of file descriptors or memory.
_WARNING_SECONDS = 10.0  # Least time between two warnings about connections.
_MAX_CONNECTIONS = 65_536
_SPARE_FILES = 128  # Number of file descriptors that connections must not use.
_NETWORK_BITS = 64  # Length of the IPv6 prefix that identifies a client.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True)
class ConnectionLimits:
    in_all: int
    per_address: int

    @classmethod
    def of(cls, *, max_files: int, per_address: int | None) -> Self:
        """Return limits for `max_files` files. By default, an address gets half the connections."""
        in_all = max(16, min(_MAX_CONNECTIONS, max_files - _SPARE_FILES))
        return cls(in_all, per_address or in_all // 2)


class TlsFiles:
    """A certificate and its key, read from files. Only the event loop changes this object."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Raises `ConfigError` for files that do not exist or do not match."""
        self._certfile = certfile
        self._keyfile = keyfile
        self.reload()

    def reload(self) -> None:
        """Reload the TLS files for new connections. On `ConfigError`, keep the old certificate."""
        for flag, path in (("--ssl-certfile", self._certfile), ("--ssl-keyfile", self._keyfile)):
            if not Path(path).is_file():
                raise ConfigError(
                    f"{flag} is {path!r}, which is not a file", hint="set the path of a PEM file"
                )
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._certfile, self._keyfile)
        except (ssl.SSLError, OSError) as error:
            message = f"--ssl-certfile and --ssl-keyfile cannot be used: {error}"
            raise ConfigError(message, hint="use matching PEM files") from None
        self.context = context


class Acceptor:
    """Accepts connections for uvicorn. Only the event loop changes this object.

    A connection counts as open from its acceptance, even before the end of its TLS handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], LimitedProtocol],
        *,
        limits: ConnectionLimits,
        tls: TlsFiles | None = None,
    ) -> None:
        """Raises `OSError` if `listener` cannot listen."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._limits = limits
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._addresses: dict[LimitedProtocol, str] = {}  # Client address of each connection.
        self._counts: Counter[str] = Counter()  # Number of open connections by client address.
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._last_warning = -_WARNING_SECONDS
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(error)
                return
            client = _get_client(address[0])
            if len(self._addresses) >= self._limits.in_all:
                self._warn(
                    "connections are refused: %d are open, which is the limit", self._limits.in_all
                )
                connection.close()
            elif self._counts[client] >= self._limits.per_address:
                self._warn(
                    "connections are refused: %s has %d open, which is the limit for an address",
                    client,
                    self._limits.per_address,
                )
                connection.close()
            else:
                self._admit(connection, client)

    def _admit(self, connection: socket.socket, client: str) -> None:
        protocol = self._make_protocol()
        protocol.ended = self._release
        self._addresses[protocol] = client
        self._counts[client] += 1
        task = self._loop.create_task(self._open(connection, protocol))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, protocol: LimitedProtocol) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=_GOODBYE_SECONDS,
                )
        except BaseException as error:
            self._release(protocol)
            connection.close()
            if not isinstance(error, OSError):
                raise
            logger.debug("a connection ended before its first request: %s", error)

    def _release(self, protocol: LimitedProtocol) -> None:
        client = self._addresses.pop(protocol, None)
        if client is not None:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def _pause(self, error: OSError) -> None:
        self._warn("new connections wait: %s", error.strerror)
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(
            _RETRY_SECONDS, self._loop.add_reader, self._listener.fileno(), self._accept
        )

    def _warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now >= self._last_warning + _WARNING_SECONDS:
            self._last_warning = now
            logger.warning(message, *values)


def _get_client(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
