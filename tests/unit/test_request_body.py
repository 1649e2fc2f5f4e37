import asyncio

import pytest

from negamax.api.dialects.chat.schema import ChatRequest
from negamax.api.http.request_body import BodyLimits, decode_request
from negamax.base.errors import InvalidRequestError

LIMITS = BodyLimits.of(max_bytes=2**25, max_model_len=2048)
CHAT = '{"messages": [{"role": "user", "content": "%s"}], %s}'
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "strict": %s, "parameters": %s}}]'
NAMED = '{"description": "\\ud800", "properties": {"a": %s}}'
VALUES = {'{"maximum": 1e400}': "maximum", '{"enum": ["\\ud800"]}': r"enum\[0\]"}
LONG = "9" * 400
LISTED = '"chat_template_kwargs": {"x": [%s]}'


def decode(fields: str, *, content: str = "hi") -> ChatRequest:
    body = CHAT % (content, fields)
    return asyncio.run(decode_request(body.encode(), ChatRequest, LIMITS))[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (LISTED % ", ".join([LONG] * 33), "32 numbers of 400 digits"),
        (LISTED % ", ".join([LONG + " " * 20_000] * 33), "32 numbers of 400 digits"),
        ('"temperature": 1e400', "temperature"),
        ('"max_tokens": 1e400', "max_tokens"),
        *((TOOL % ("true", NAMED % value), place) for value, place in VALUES.items()),
    ],
)
def test_unusable_numbers_and_texts_are_refused_by_place(fields: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        decode(fields)


def test_such_values_elsewhere_are_accepted() -> None:
    assert decode(LISTED % f'{LONG}, "{LONG * 40}"', content=f"{LONG} " * 50)
    valid = '{"description": "\\ufffd", "enum": ["\\ufffd"], "maximum": 1e300}'
    assert decode(TOOL % ("true", valid)).tools
    assert all(decode(TOOL % ("false", NAMED % value)).tools for value in VALUES)
