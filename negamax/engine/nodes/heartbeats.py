"""Heartbeats as datagrams, in addition to TCP, which doubles its retry delays after packet
loss: after an outage of 1.6 s, its next message arrives after 3 s.
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
_MOST_AT_ONCE = 1000  # datagrams
_MOST_BYTES = 2048  # longest datagram; longer ones are truncated and fail the signature

Address = tuple[Any, ...]  # host and port; IPv6 has more


class Datagrams:
    """A UDP socket with signed frames, which may be lost, duplicated or late. Never blocks."""

    def __init__(self, address: str, port: int = 0) -> None:
        """Bind `address` and `port` (0: any free port). Errors: `ResourceError` for a used port."""
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
                hint="end what uses it, or give all nodes another --master-port",
            ) from None

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._socket.getsockname()
        return host, port

    def send(self, frame: bytes, to: Address) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(self._mac(frame) + frame, to)

    def receive(self) -> Iterator[tuple[bytes, Address]]:
        """Yield validly signed frames with their senders; only some of a flood."""
        for _ in range(_MOST_AT_ONCE):
            try:
                signed, sender = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the peer's port is closed
                continue
            mac, frame = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
            if hmac.compare_digest(mac, self._mac(frame)):
                yield frame, sender

    def close(self) -> None:
        self._socket.close()

    def _mac(self, frame: bytes) -> bytes:
        return hashlib.blake2b(frame, key=self._key, digest_size=_MAC_BYTES).digest()


class Neighbours:
    """Heartbeats of the other agents in one session. Single user: a thread that polls often."""

    def __init__(self, session: str, addresses: Mapping[int, tuple[str, int]]) -> None:
        """`addresses`: host and UDP port by node."""
        self.addresses = addresses
        self._session = session
        self._numbers = dict.fromkeys(addresses, 0)  # number of the latest heartbeat by node
        self._silences = {node: Silence() for node in addresses}

    def receive(self, message: wire.PeerHeartbeat) -> None:
        node, number = message.node, message.number
        if message.session == self._session and number > self._numbers.get(node, number):
            self._numbers[node] = number

    def lost(self) -> str | None:
        """Return a node that stopped its heartbeats; node 0 watches those that never sent any."""
        for node, silence in self._silences.items():
            seconds = silence.seconds(self._numbers[node])
            if seconds > wire.NEIGHBOUR_SECONDS:
                return f"node {node} sent no heartbeat for {seconds:.1f} s"
        return None
