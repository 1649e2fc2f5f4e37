import gzip
import json
import random
import zlib

import msgspec
import pytest
from backports import zstd

from negamax.api.http.unpacking import MAX_PARTS, PIECE_BYTES, Unpacker, find_encoding
from negamax.base.errors import InvalidRequestError, UnsupportedMediaTypeError
from negamax.base.unicode import valid_escapes, valid_unicode
from tests.speed import cpu_seconds, is_linear

SAYS = b'{"prompt": "%s"}' % random.Random(1).randbytes(50_000).hex().encode()
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0more"  # This frame has no content.
RAW = zlib.compressobj(wbits=-15)
FORMS = {
    "gzip": (b"gzip", gzip.compress(SAYS)),
    "x-gzip": (b"x-gzip", gzip.compress(SAYS)),
    "gzip in two parts": (b"gzip", gzip.compress(SAYS[:7]) + gzip.compress(SAYS[7:]) + bytes(512)),
    "deflate": (b"deflate", zlib.compress(SAYS)),
    "raw deflate": (b"deflate", RAW.compress(SAYS) + RAW.flush()),
    "zstd": (b"zstd", zstd.compress(SAYS)),
    "zstd in frames": (b"zstd", zstd.compress(SAYS[:7]) + SKIPPED + zstd.compress(SAYS[7:])),
}


def unpacked(encoding: bytes, packed: bytes, *, packet_bytes: int) -> bytes:
    unpacker = Unpacker(encoding)
    pieces = []
    for start in range(0, len(packed), packet_bytes):
        unpacker.feed(packed[start : start + packet_bytes])
        while piece := unpacker.take():
            assert len(piece) <= PIECE_BYTES
            pieces.append(piece)
    unpacker.finish()
    return b"".join(pieces)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packet_bytes", [1, 3, 1000, 10**6])
def test_every_form_is_unpacked_in_packets_of_any_size(form: str, packet_bytes: int) -> None:
    assert unpacked(*FORMS[form], packet_bytes=packet_bytes) == SAYS


@pytest.mark.parametrize(
    "num_bytes",
    [0, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, PIECE_BYTES + 200, 3 * PIECE_BYTES],
)
def test_body_that_ends_near_a_piece_is_whole(num_bytes: int) -> None:
    said = b"ab" * (num_bytes // 2) + b"c" * (num_bytes % 2)
    assert unpacked(b"gzip", gzip.compress(said), packet_bytes=10**6) == said
    assert unpacked(b"zstd", zstd.compress(said), packet_bytes=10**6) == said


@pytest.mark.parametrize(
    ("encoding", "packed", "problem"),
    [
        (b"gzip", gzip.compress(b"") * (MAX_PARTS + 1), "more than 1024 members or frames"),
        (b"zstd", SKIPPED * (MAX_PARTS + 1), "more than 1024 members or frames"),
        (b"zstd", b"\x28\xb5\x2f\xfd\x00\x70" + bytes(20), "too much memory"),  # 16 MiB
    ],
)
def test_work_and_memory_of_body_are_bounded(encoding: bytes, packed: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        unpacked(encoding, packed, packet_bytes=10**6)


@pytest.mark.parametrize("form", FORMS)
def test_refuses_truncated_and_broken_bodies(form: str) -> None:
    encoding, packed = FORMS[form]
    packed = packed.rstrip(b"\0")
    for broken in (packed[:-20], packed[: len(packed) // 2], b"\xff" * 100, packed + b"more" * 10):
        if form == "raw deflate" and broken.endswith(b"more"):
            broken = broken[:10] + b"\xff" * 100
        with pytest.raises(InvalidRequestError, match="the body is not valid"):
            unpacked(encoding, broken, packet_bytes=1000)


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (b"gzip", b"gzip"), (b"GZIP", b"gzip"), (b" identity", None), (b"", None),
        (b"identity, deflate", b"deflate"),
    ],
)  # fmt: skip
def test_encodings_that_are_read(value: bytes, encoding: bytes | None) -> None:
    assert find_encoding([(b"host", b"x"), (b"content-encoding", value)]) == encoding


@pytest.mark.parametrize("value", [b"br", b"compress", b"gzip, gzip", b"x" * 1000])
def test_other_encodings_are_named_in_the_refusal(value: bytes) -> None:
    allowed = "allowed: 'gzip', 'deflate', 'zstd', or none"
    with pytest.raises(UnsupportedMediaTypeError, match=allowed) as error:
        find_encoding([(b"content-encoding", value)])
    assert value[:20].decode() in error.value.message and len(error.value.message) < 150


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("plain é 😀", "plain é 😀"),
        ("a\ud83db", "a\ufffdb"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd😀"),
    ],
)
def test_lone_surrogates_of_a_text_are_replaced(text: str, valid: str) -> None:
    assert valid_unicode(text) == valid


@pytest.mark.parametrize(
    "body",
    [
        rb'"\ud83d"', rb'"\uD83D\uDE00"', rb'"\ud83d\uDE00\ud83d"', rb'"\\ud83d"', rb'"\\\ud83d"',
        rb'"\\ud83d\ude00"', rb'"\ude00\ud83d\ud83d\ude00x"', rb'"\ud83d\\ude00"',
        rb'"\\\\\ud83d\n"',
    ],
)  # fmt: skip
def test_escaped_lone_surrogates_are_replaced_unless_the_backslash_is_escaped(body: bytes) -> None:
    """Compare with Python's JSON reader, which keeps lone surrogates."""
    assert msgspec.json.decode(valid_escapes(body)) == valid_unicode(json.loads(body))


@pytest.mark.parametrize("unit", [rb"\\", rb"\ud83d\ude00", rb"\ud83d", rb"\\ud83d"])
def test_large_bodies_take_linear_time(unit: bytes) -> None:
    def seconds(num: int) -> float:
        body = b'"' + unit * num + rb'\ude00"'
        return cpu_seconds(lambda: valid_escapes(body))

    assert is_linear(seconds, 320_000)  # Most of these bodies have several pieces.
