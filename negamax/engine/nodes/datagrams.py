"""Signs of life as datagrams, beside the connections between the nodes.

A connection that has lost packets waits before it sends again, and after each failure twice as
long: a network that was cut for 1.6 s is heard of after 3. A datagram is there as soon as the
network is.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
from collections.abc import Iterator
from typing import Any

from negamax.base.errors import ResourceError
from negamax.worker.node_sockets import shared_key

_MAC_BYTES = 16
_MOST_AT_ONCE = 1000  # datagrams
_MOST_BYTES = 2048  # of a datagram; longer ones are cut, and not heard

Address = tuple[Any, ...]  # host and port, of IPv6 more


class Datagrams:
    """A UDP socket whose frames are signed with the key of the nodes. Frames may be lost, and come
    twice or late; nothing blocks, and a network that fails is silent.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        """Binds `address` and `port` (0: a free one). Errors: `ResourceError` for one that is
        taken.
        """
        self._key = shared_key("beats")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self.close()
            raise ResourceError(
                f"UDP port {port} on {address} cannot be listened on: {error.strerror}",
                hint="end what uses it, or give all nodes another --master-port",
            ) from None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for others to send to."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    def send(self, frame: bytes, to: Address) -> None:
        """Send a frame to a host and port. Failures are ignored."""
        with contextlib.suppress(OSError):
            self._socket.sendto(self._mac(frame) + frame, to)

    def receive(self) -> Iterator[tuple[bytes, Address]]:
        """Frames that have arrived from senders with the key, each with its sender's address; of a
        flood only some.
        """
        for _ in range(_MOST_AT_ONCE):
            try:
                signed, sender = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:  # nobody listens at another end
                continue
            mac, frame = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
            if hmac.compare_digest(mac, self._mac(frame)):
                yield frame, sender

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def _mac(self, frame: bytes) -> bytes:
        return hashlib.blake2b(frame, key=self._key, digest_size=_MAC_BYTES).digest()
