"""Download images from hosts that the operator allows, without reaching private networks.

The server resolves a host name once, requires that all addresses of the host are public, and
connects to one of these addresses. Downloads use no redirects, proxies, cookies or compression.
Errors do not contain response bodies.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from typing import NoReturn
from urllib.parse import urlsplit

from negamax import __version__
from negamax.base.errors import InvalidRequestError
from negamax.engine.client.image_loader import MAX_IMAGE_BYTES, build_bytes_error

TIMEOUT_SECONDS = 10.0  # Time limit of a download, from connecting to the last byte.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Resolve = Callable[[str, int], list[str]]


def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host. Raises `OSError` for an unknown name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def fetch_media(
    url: str,
    *,
    domains: frozenset[str],
    resolve: Resolve = resolve,
    is_allowed: Callable[[str], bool] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> bytes:
    """Download `url`, whose host must be one of `domains` in lower case.

    `is_allowed` returns whether to connect to an address. The default is `is_public`. Raises
    `InvalidRequestError` or `PayloadTooLargeError` without naming the image's JSON path.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        _refuse("the source is not a URL")
    if parts.username is not None or host not in domains:
        _refuse("the URL names a host that this server does not allow", code="url_not_allowed")
    is_tls = parts.scheme.lower() == "https"
    port = port or (443 if is_tls else 80)
    try:
        addresses = resolve(host, port)
    except (OSError, UnicodeError):
        _refuse("the URL names a host that cannot be resolved")
    if not addresses or not all(map(is_allowed or is_public, addresses)):
        _refuse("the URL names a host with an address that is not public", code="url_not_allowed")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        address = min(addresses, key=lambda each: ":" in each)  # Prefer IPv4 to IPv6.
        return _download(address, port, host, path, is_tls=is_tls, timeout=timeout)
    except (OSError, http.client.HTTPException, ValueError):
        _refuse(f"the URL cannot be downloaded in {timeout:g} s")


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet and is not a tunnel address."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64:
            return False
        ip = ip.ipv4_mapped or ip
    return ip.is_global and not ip.is_multicast


def _download(
    address: str, port: int, host: str, path: str, *, is_tls: bool, timeout: float
) -> bytes:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_connection((address, port), timeout))
        # The socket's timeout limits each read; the timer limits all reads together.
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        connection.sock = sock
        timer = threading.Timer(timeout, _shut_down, [connection])
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        stack.callback(connection.close)
        if is_tls:
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            connection.sock.do_handshake()
        headers = {"User-Agent": f"negamax/{__version__}", "Accept-Encoding": "identity"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            _refuse(f"the host answered with status {answer.status}; redirects are not followed")
        if (answer.length or 0) > MAX_IMAGE_BYTES:
            raise build_bytes_error(answer.length or 0)
        body = answer.read(MAX_IMAGE_BYTES + 1)
        if len(body) > MAX_IMAGE_BYTES:
            raise build_bytes_error(len(body))
        if answer.length:
            raise OSError("the connection ended early")
        return body


def _shut_down(connection: http.client.HTTPConnection) -> None:
    """Shut down the TCP socket, because a shutdown by TLS would race with reads."""
    if (sock := connection.sock) is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _refuse(problem: str, *, code: str = "url_unreachable") -> NoReturn:
    hint = "send the image as a data URL"
    raise InvalidRequestError(problem, hint=hint, code=code)
