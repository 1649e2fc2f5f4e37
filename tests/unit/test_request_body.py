import asyncio
from typing import Any

import pytest

from negamax.api.dialects.chat.schema import ChatRequest
from negamax.api.http.request_body import BodyLimits, decode_request
from negamax.base.errors import InvalidRequestError

LIMITS = BodyLimits.of(max_bytes=2**25, max_model_len=2048)
LONG = "9" * 400
CHAT = '{"messages": [{"role": "user", "content": "%s"}], %s}'
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "strict": %s, "parameters": %s}}]'
NAMED = '{"description": "\\ud800", "properties": {"a": %s}}'
MANY = f'"chat_template_kwargs": {{"x": [{", ".join([LONG] * 33)}]}}'
SPREAD = f'"chat_template_kwargs": {{"x": [{", ".join([LONG + " " * 20_000] * 33)}]}}'
VALUES = ('{"maximum": 1e400}', '{"enum": ["\\ud800"]}', '{"maximum": -1E999}')
PLACES = (".maximum", ".enum[0]", ".maximum")


def decode(fields: str, *, content: str = "hi") -> Any:
    body = CHAT % (content, fields)
    request, _ = asyncio.run(decode_request(body.encode(), ChatRequest, LIMITS))
    return request


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (MANY, "32 numbers of 400 digits"),
        (SPREAD, "32 numbers of 400 digits"),
        ('"temperature": 1e400', "temperature"),
        ('"max_tokens": 1e400', "max_tokens"),
        *(
            (TOOL % ("true", NAMED % value), rf"tools\[0\].function.parameters.properties.a{place}")
            for value, place in zip(VALUES, PLACES, strict=True)
        ),
    ],
)
def test_numbers_and_texts_that_cannot_be_used_are_refused_by_place(
    fields: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words.replace(".enum[0]", r".enum\[0\]")):
        decode(fields)


def test_such_values_elsewhere_end_no_request() -> None:
    assert decode('"n": 1', content=f"{LONG} " * 50).n == 1
    assert decode(f'"chat_template_kwargs": {{"x": [{LONG}, "{LONG * 40}"]}}').chat_template_kwargs
    for value in VALUES:
        assert decode(TOOL % ("false", NAMED % value)).tools
    valid = '{"description": "\\ufffd", "enum": ["\\ufffd"], "maximum": 1e300}'
    assert decode(TOOL % ("true", valid)).tools
