"""Send heartbeats between nodes as UDP datagrams, in addition to TCP. TCP doubles its retry delay
after each lost packet. For example, TCP may need 3 s to deliver a message in an outage of 1.6 s.
"""

import contextlib
import hashlib
import hmac
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from negamax.base.errors import ResourceError
from negamax.base.supervision import Silence
from negamax.engine.nodes import wire
from negamax.worker.node_sockets import shared_key

_MAC_BYTES = 16
_MOST_AT_ONCE = 1000  # Largest number of datagrams that one `receive` call reads.
_MOST_BYTES = 2048  # Longest valid datagram in bytes; longer datagrams are ignored.

Address = tuple[Any, ...]  # Socket address: host, port, and further fields for IPv6.


class Datagrams:
    """A UDP socket for signed messages, which may be lost, duplicated or late. Never blocks."""

    def __init__(self, address: str, port: int = 0) -> None:
        """Bind to `address` and `port`; port 0 selects a free port. Raises `ResourceError`."""
        self._key = shared_key("beats")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self.close()
            raise ResourceError(
                f"UDP port {port} on {address} cannot be used: {error.strerror}",
                hint="end the program on this port, or set another --master-port on all nodes",
            ) from None

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._socket.getsockname()
        return host, port

    def send(self, frame: bytes, to: Address) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(self._mac(frame) + frame, to)

    def receive(self) -> Iterator[tuple[bytes, Address]]:
        """Yield up to `_MOST_AT_ONCE` messages with valid signatures, and their senders."""
        for _ in range(_MOST_AT_ONCE):
            try:
                signed, sender = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:  # The system reports a peer's closed port.
                continue
            mac, frame = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
            if hmac.compare_digest(mac, self._mac(frame)):
                yield frame, sender

    def close(self) -> None:
        self._socket.close()

    def _mac(self, frame: bytes) -> bytes:
        return hashlib.blake2b(frame, key=self._key, digest_size=_MAC_BYTES).digest()


class Neighbours:
    """Tracks other agents' heartbeats in one session. One thread must call `lost` regularly."""

    def __init__(self, session: str, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Track the nodes in `addresses`, which maps each node's number to (host, UDP port)."""
        self.addresses = addresses
        self._session = session
        self._numbers = dict.fromkeys(addresses, 0)  # Number of each node's latest heartbeat.
        self._silences = {node: Silence() for node in addresses}

    def receive(self, message: wire.PeerHeartbeat) -> None:
        node, number = message.node, message.number
        if message.session == self._session and number > self._numbers.get(node, number):
            self._numbers[node] = number

    def lost(self) -> str | None:
        """Describe a node whose heartbeats stopped. Ignore nodes that never sent a heartbeat."""
        for node, silence in self._silences.items():
            seconds = silence.seconds(self._numbers[node])
            if seconds > wire.NEIGHBOUR_SECONDS:
                return f"node {node} sent no heartbeat for {seconds:.1f} s"
        return None
