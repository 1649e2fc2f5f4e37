"""Decompress request bodies in pieces, so that size limits apply to the decompressed body."""

import sys
import zlib
from collections.abc import Callable
from typing import Any

from negamax.base.errors import InvalidRequestError, UnsupportedMediaTypeError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 256 * 1024  # maximum size of one piece of decompressed data
MAX_PARTS = 1024  # Limit of gzip members or zstd frames in one body.
_WINDOW_BITS = 23  # Largest zstd window that RFC 9659 allows: 8 MiB.
_FRAME_BYTES = 2  # Number of bytes that show whether data has a zlib header.
_RAW_DEFLATE = -15  # `wbits` of zlib for deflate data without a zlib header.


class _Inflater:
    """Wraps zlib's decompressor in the interface of zstd's. Only `Unpacker` changes this object."""

    def __init__(self, window_bits: int) -> None:
        self._zlib = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        # zlib may still have output after it has consumed its input.
        self.needs_input = not self._zlib.unconsumed_tail and len(piece) < max_length
        return piece


_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_BITS}
_DECODERS: dict[bytes, Callable[[], Any]] = {
    b"gzip": lambda: _Inflater(31),
    b"x-gzip": lambda: _Inflater(31),
    b"deflate": lambda: _Inflater(15),
    b"zstd": lambda: zstd.ZstdDecompressor(options=_ZSTD_OPTIONS),
}


def find_encoding(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the content encoding of a body, or None. Raises `UnsupportedMediaTypeError`."""
    values = b",".join(value for name, value in headers if name == b"content-encoding")
    given = [name.strip() for name in values.lower().split(b",")]
    encodings = [name for name in given if name not in (b"", b"identity")]
    if not encodings:
        return None
    if len(encodings) > 1 or encodings[0] not in _DECODERS:
        shown = b", ".join(encodings)[:60].decode("latin-1")
        raise UnsupportedMediaTypeError(
            f"the content encoding is {shown!r}; allowed: 'gzip', 'deflate', 'zstd', or none",
            code="unsupported_encoding",
        )
    return encodings[0]


class Unpacker:
    """Decompresses one body. Only the request's handler changes this object."""

    def __init__(self, encoding: bytes) -> None:
        """`encoding` is a result of `find_encoding`."""
        self._encoding = encoding
        self._decoder = _DECODERS[encoding]()
        self._packed = b""
        self._has_begun = False
        self._num_parts = 1

    def feed(self, packed: bytes) -> None:
        self._packed += packed

    def take(self) -> bytes:
        """Return decompressed bytes, or b"" to ask for more data. Raises `InvalidRequestError`."""
        if not self._has_begun and not self._begin():
            return b""
        while self._packed or not (self._decoder.eof or self._decoder.needs_input):
            if self._decoder.eof:
                self._begin_next_part()
                continue
            piece = self._unpack()
            if piece:
                return piece
        return b""

    def finish(self) -> None:
        """Raise `InvalidRequestError` if the body is incomplete."""
        if self._packed or (self._has_begun and not self._decoder.eof):
            raise self._error("the data is truncated")

    def _begin(self) -> bool:
        """Return whether the first bytes have arrived, and choose the format from these bytes."""
        if len(self._packed) < _FRAME_BYTES:
            return False
        self._has_begun = True
        if self._encoding == b"deflate" and not _has_frame(self._packed):
            self._decoder = _Inflater(_RAW_DEFLATE)
        return True

    def _unpack(self) -> bytes:
        try:
            piece: bytes = self._decoder.decompress(self._packed, PIECE_BYTES)
        except (zlib.error, zstd.ZstdError) as error:
            raise self._error(str(error)) from None
        self._packed = self._decoder.unused_data if self._decoder.eof else b""
        return piece

    def _begin_next_part(self) -> None:
        """Begin the next gzip member or zstd frame of a body. Skip zeros after gzip members."""
        if self._encoding != b"zstd":
            self._packed = self._packed.lstrip(b"\0")
        if not self._packed:
            return
        if self._encoding == b"deflate":
            raise self._error("there is data after the end of the deflate stream")
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise self._error(f"there are more than {MAX_PARTS} members or frames; send only one")
        self._decoder = _DECODERS[self._encoding]()

    def _error(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the body is not valid {self._encoding.decode()}: {problem}", code="invalid_encoding"
        )


def _has_frame(packed: bytes) -> bool:
    return packed[0] & 15 == 8 and int.from_bytes(packed[:2]) % 31 == 0
