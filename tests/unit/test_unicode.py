import json

import msgspec
import pytest

from negamax.base.unicode import valid_escapes, valid_unicode
from tests.speed import cpu_seconds, is_linear


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
        rb'"\ud83d"',
        rb'"\uD83D\uDE00"',
        rb'"\ud83d\uDE00\ud83d"',
        rb'"\\ud83d"',
        rb'"\\\ud83d"',
        rb'"\\ud83d\ude00"',
        rb'"\ude00\ud83d\ud83d\ude00x"',
        rb'"\ud83d\\ude00"',
        rb'"\\\\\ud83d\n"',
    ],
)
def test_escaped_lone_surrogates_are_replaced_unless_the_backslash_is_escaped(body: bytes) -> None:
    """Python's JSON reader keeps lone surrogates, so it is the reference."""
    assert msgspec.json.decode(valid_escapes(body)) == valid_unicode(json.loads(body))


@pytest.mark.parametrize("unit", [rb"\\", rb"\ud83d\ude00", rb"\ud83d", rb"\\ud83d"])
def test_large_bodies_take_linear_time(unit: bytes) -> None:
    def seconds(num: int) -> float:
        body = b'"' + unit * num + rb'\ude00"'
        return cpu_seconds(lambda: valid_escapes(body))

    assert is_linear(seconds, 320_000)  # most have several pieces
