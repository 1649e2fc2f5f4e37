"""Encrypted ZeroMQ sockets between machines with the same key.

Both ends derive CurveZMQ key pairs for the listening and the connecting end from the environment
variable NEGAMAX_NODE_KEY. A peer without the key is ignored. If the variable is unset, every
Negamax has the same key: this keeps out accidental peers, not attackers.
"""

import hashlib

import zmq
from zmq.utils import z85

from negamax.base import env
from negamax.base.errors import ResourceError
from negamax.options.nodes import KEY_VARIABLE

_TCP = "tcp://"


def has_key() -> bool:
    """Whether the user has set a key."""
    return env.get(KEY_VARIABLE) is not None


def tcp_endpoint(address: str, port: int) -> str:
    """The ZeroMQ endpoint of an IPv4 or IPv6 address."""
    return f"{_TCP}[{address}]:{port}" if ":" in address else f"{_TCP}{address}:{port}"


def bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Listen at `endpoint`, encrypted if it is a TCP endpoint. Errors: `ResourceError`."""
    if endpoint.startswith(_TCP):
        socket.ipv6 = "[" in endpoint
        socket.curve_server = True
        socket.curve_secretkey = _secret_key("listens")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ResourceError(f"cannot listen on {endpoint}: {error.strerror}") from None


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect to the endpoint of a `bind`."""
    if endpoint.startswith(_TCP):
        own = _secret_key("connects")
        socket.ipv6 = "[" in endpoint
        socket.curve_serverkey = zmq.curve_public(_secret_key("listens"))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(own), own
    socket.connect(endpoint)


def shared_key(purpose: str) -> bytes:
    """Derive 32 bytes from the key."""
    given = (env.get(KEY_VARIABLE) or "").encode()
    return hashlib.blake2b(
        given, digest_size=32, person=f"negamax {purpose}"[:16].encode()
    ).digest()


def _secret_key(end: str) -> bytes:
    return z85.encode(shared_key(end))
