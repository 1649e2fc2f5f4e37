"""Create encrypted ZeroMQ sockets between machines that share a key.

The listening and the connecting end derive both CurveZMQ key pairs from the environment variable
NEGAMAX_NODE_KEY. A peer without the key is ignored. If the variable is unset, every Negamax process
has the same key, which excludes accidental peers but not attackers.

A listening socket limits the cost of peers that have not proved that they have the key. The limits
are the bytes of a frame, the time of a handshake and the number of connections (`ConnectionLimit`).
"""

import contextlib
import hashlib
import os
import socket as sockets

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from negamax.base import env
from negamax.base.errors import ResourceError
from negamax.options.nodes import KEY_VARIABLE

_TCP = "tcp://"
# default limit for a frame, in bytes; frames with log-probabilities may be larger
FRAME_BYTES = 16 * 2**20
_CONNECT_MS = 2000  # long enough for TCP to resend a lost packet, which it does after 1 s
_HANDSHAKE_MS = 5000  # time in which a new connection must prove that it has the key
_MOST_STRANGERS = 64  # connections that a socket accepts in addition to `num_peers`


def has_key() -> bool:
    """Whether NEGAMAX_NODE_KEY is set."""
    return env.get(KEY_VARIABLE) is not None


def tcp_endpoint(address: str, port: int | str) -> str:
    """Return the ZeroMQ endpoint of an IP address. For port "*", the system assigns the port."""
    return f"{_TCP}[{address}]:{port}" if ":" in address else f"{_TCP}{address}:{port}"


def bind(socket: zmq.Socket[bytes], endpoint: str, *, most_bytes: int = FRAME_BYTES) -> None:
    """Listen at `endpoint`. A TCP endpoint is encrypted and receives frames of at most
    `most_bytes`. Raises `ResourceError` if the endpoint cannot be used.
    """
    if endpoint.startswith(_TCP):
        socket.maxmsgsize, socket.handshake_ivl = most_bytes, _HANDSHAKE_MS
        socket.ipv6 = "[" in endpoint
        socket.curve_server = True
        socket.curve_secretkey = _secret_key("listens")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ResourceError(f"cannot listen on {endpoint}: {error.strerror}") from None


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    if endpoint.startswith(_TCP):
        own = _secret_key("connects")
        socket.connect_timeout, socket.handshake_ivl = _CONNECT_MS, _HANDSHAKE_MS
        socket.ipv6 = "[" in endpoint
        socket.curve_serverkey = zmq.curve_public(_secret_key("listens"))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(own), own
    socket.connect(endpoint)


class ConnectionLimit:
    """Closes surplus connections to a listening socket. One thread must call `apply` often."""

    def __init__(self, socket: zmq.Socket[bytes], *, num_peers: int) -> None:
        """`num_peers`: connections that other nodes need. Create this object before `bind`."""
        self._most = num_peers + _MOST_STRANGERS
        self._open: set[int] = set()  # file descriptors of open connections
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )

    def apply(self) -> list[tuple[int, int]]:
        """Close connections above the limit. Return the new (event, value) pairs of the monitor."""
        events = []
        while self._monitor.poll(0):
            message = parse_monitor_message(self._monitor.recv_multipart())
            event, connection = int(message["event"]), int(message["value"])
            events.append((event, connection))
            if event == zmq.EVENT_DISCONNECTED:
                self._open.discard(connection)
            elif event == zmq.EVENT_ACCEPTED and len(self._open) < self._most:
                self._open.add(connection)
            elif event == zmq.EVENT_ACCEPTED:
                _hang_up(connection)
        return events


def _hang_up(connection: int) -> None:
    """Shut down a TCP connection of ZeroMQ, which then closes the file descriptor."""
    # Duplicate the descriptor, because the system may reuse its number for another file anytime.
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(connection)) as peer:
        if peer.family in (sockets.AF_INET, sockets.AF_INET6):
            peer.shutdown(sockets.SHUT_RDWR)


def shared_key(purpose: str) -> bytes:
    """Derive 32 bytes for `purpose` from NEGAMAX_NODE_KEY."""
    given = (env.get(KEY_VARIABLE) or "").encode()
    return hashlib.blake2b(
        given, digest_size=32, person=f"negamax {purpose}"[:16].encode()
    ).digest()


def _secret_key(end: str) -> bytes:
    return z85.encode(shared_key(end))
