"""Receive request bodies within limits of time and memory."""

import asyncio
import sys
import time

from starlette.types import Message, Receive

from negamax.api.http.body_budget import BodyShare
from negamax.api.http.request_body import build_size_error
from negamax.api.http.unpacking import Unpacker
from negamax.base.errors import RequestTimeoutError

BODY_SECONDS = 120.0  # Time limit for receiving a body.
BODIES_IN_FLIGHT = 8  # Request bodies get memory for this number of bodies of maximum size.
PACKED_HEADERS = frozenset({b"content-encoding", b"content-length"})  # describe the compressed body


class LimitedBody:
    """Receives and decompresses one body within limits. Only the route uses this object."""

    def __init__(
        self,
        receive: Receive,
        share: BodyShare,
        *,
        max_packed_bytes: int = sys.maxsize,
        encoding: bytes | None = None,
    ) -> None:
        self._receive = receive
        self._unpacker = None if encoding is None else Unpacker(encoding)
        self._num_packed_bytes = 0
        self._is_all_packed = False  # Whether the whole compressed body arrived.
        self._max_packed_bytes = max_packed_bytes
        self._share = share
        self._end = time.monotonic() + BODY_SECONDS
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the body's next ASGI message. Raises `RequestTimeoutError` or `OverloadedError`.

        Also raises `PayloadTooLargeError` or `InvalidRequestError` for a compressed body.
        """
        if self._is_complete:
            return await self._receive()
        message = await (
            self._receive_in_time()
            if self._unpacker is None
            else self._receive_unpacked(self._unpacker)
        )
        if message["type"] != "http.request":
            return message
        self._share.take(len(message.get("body", b"")))
        self._is_complete = not message.get("more_body", False)
        return message

    async def _receive_unpacked(self, unpacker: Unpacker) -> Message:
        await asyncio.sleep(0)  # Let other requests run between two pieces of the body.
        while not (piece := unpacker.take()):
            if self._is_all_packed:
                unpacker.finish()
                break
            message = await self._receive_in_time()
            if message["type"] != "http.request":
                return message
            packed = message.get("body", b"")
            self._num_packed_bytes += len(packed)
            if self._num_packed_bytes > self._max_packed_bytes:
                raise build_size_error(self._num_packed_bytes, self._max_packed_bytes)
            self._is_all_packed = not message.get("more_body", False)
            unpacker.feed(packed)
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout(max(0.0, self._end - time.monotonic())):
                return await self._receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"the body did not arrive within {BODY_SECONDS:g} s", code="body_timeout"
            ) from None
