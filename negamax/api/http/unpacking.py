"""Decompresses request bodies in pieces, so that the size limits apply to the decompressed body."""

import zlib

from negamax.base.errors import InvalidRequestError, UnsupportedMediaTypeError

PIECE_BYTES = 256 * 1024  # decompressed at a time
_ENCODINGS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # zlib's numbers of the formats
_FRAME_BYTES = 2  # that show whether there is a frame
_RAW_DEFLATE = -15  # without the frame that the standard requires, as some clients send it


def find_encoding(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the encoding of a body; None if it has none. Errors: `UnsupportedMediaTypeError`."""
    values = b",".join(value for name, value in headers if name == b"content-encoding")
    given = [name.strip() for name in values.lower().split(b",")]
    encodings = [name for name in given if name not in (b"", b"identity")]
    if not encodings:
        return None
    if len(encodings) > 1 or encodings[0] not in _ENCODINGS:
        shown = b", ".join(encodings)[:60].decode("latin-1")
        raise UnsupportedMediaTypeError(
            f"the content encoding is {shown!r}; allowed: 'gzip', 'deflate', or none",
            code="unsupported_encoding",
        )
    return encodings[0]


class Unpacker:
    """Decompresses one body. Single writer: the request that reads it."""

    def __init__(self, encoding: bytes) -> None:
        """`encoding` is a result of `find_encoding`."""
        self._encoding = encoding
        self._decoder = zlib.decompressobj(_ENCODINGS[encoding])
        self._packed = b""
        self._has_begun = False
        self._holds_more = False  # the decoder may hold output although it has consumed its input

    def feed(self, packed: bytes) -> None:
        self._packed += packed

    def take(self) -> bytes:
        """Return the next piece; b"" until more is fed. Errors: `InvalidRequestError`."""
        if not self._has_begun and not self._begin():
            return b""
        while self._packed or self._holds_more:
            if self._decoder.eof:
                self._begin_next_part()
                continue
            piece = self._unpack()
            if piece:
                return piece
        return b""

    def finish(self) -> None:
        """Check that the body is complete. Errors: `InvalidRequestError`."""
        if self._packed or (self._has_begun and not self._decoder.eof):
            raise self._error("it is truncated")

    def _begin(self) -> bool:
        """Return whether the first bytes are there, and choose the format by them."""
        if len(self._packed) < _FRAME_BYTES:
            return False
        self._has_begun = True
        if self._encoding == b"deflate" and not _has_frame(self._packed):
            self._decoder = zlib.decompressobj(_RAW_DEFLATE)
        return True

    def _unpack(self) -> bytes:
        try:
            piece = self._decoder.decompress(self._packed, PIECE_BYTES)
        except zlib.error as error:
            raise self._error(str(error)) from None
        is_over = self._decoder.eof
        self._packed = self._decoder.unused_data if is_over else self._decoder.unconsumed_tail
        self._holds_more = not is_over and len(piece) == PIECE_BYTES
        return piece

    def _begin_next_part(self) -> None:
        """Begin the next part of a gzip body, which may have several, followed by zeros."""
        self._packed = self._packed.lstrip(b"\0")
        if self._packed and self._encoding == b"deflate":
            raise self._error("it is followed by more data")
        if self._packed:
            self._decoder = zlib.decompressobj(_ENCODINGS[self._encoding])

    def _error(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the body is not valid {self._encoding.decode()}: {problem}", code="invalid_encoding"
        )


def _has_frame(packed: bytes) -> bool:
    return packed[0] & 15 == 8 and int.from_bytes(packed[:2]) % 31 == 0
