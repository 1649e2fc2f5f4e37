"""Request bodies: received within limits, and decoded only as far as the request's model reads
them.

Decoding holds Python's lock, in whatever thread it runs. So what costs more than its bytes, the
elements of lists and objects, is bounded before anything is decoded, and a large body is decoded
piece by piece in a thread, with the event loop's turns between.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from negamax.api.schemas.request_model import RequestModel, RequestT
from negamax.base.errors import ContextLengthError, InvalidRequestError, PayloadTooLargeError
from negamax.base.unicode import valid_escapes

MAX_JSON_DEPTH = 64
_LEAST_CHARS = 2**22  # that a text may have however short the context is
_CHARS_PER_TOKEN = 8
_LEAST_COMMAS = 2**20  # that a body may have however short the context is
_LEAST_OPENERS = 2**18
_INLINE_BYTES = 32 * 1024  # larger bodies are decoded in a thread
_PIECE_BYTES = 256 * 1024  # larger values are decoded piece by piece
_PIECE_LEVELS = 4  # messages, a message, its parts, a part
_DENSE = 16  # bytes per comma: what has fewer is not worth its pieces
_NULL = b"null"
_QUOTE = b'"'
_LONGEST_CHARACTER = 12  # bytes of a pair of escaped surrogates
_CHARACTER = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]+",
    re.DOTALL,
)

_RawFields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The most that one body may have. Commas, colons and brackets count wherever they stand: those
    within a text cost tokens."""

    num_bytes: int
    context_length: int  # tokens of the model's
    chars: int  # of one text, unless it is ASCII: Python takes up to four bytes for each
    commas: int  # elements
    openers: int  # '[', '{' and ':': lists, objects and their members, which cost more than numbers

    @classmethod
    def of(cls, *, max_bytes: int, max_model_len: int) -> BodyLimits:
        """The limits for a context of `max_model_len` tokens."""
        return cls(
            max_bytes,
            context_length=max_model_len,
            chars=max_chars(max_model_len),
            commas=max(_LEAST_COMMAS, 4 * max_model_len),
            openers=max(_LEAST_OPENERS, 2 * max_model_len),
        )


def max_chars(max_model_len: int) -> int:
    """The most characters that a conversation or a prompt may have, for a context of
    `max_model_len` tokens.
    """
    return max(_LEAST_CHARS, _CHARS_PER_TOKEN * max_model_len)


async def read_request(
    request: Request, model: type[RequestT], limits: BodyLimits
) -> tuple[RequestT, int]:
    """The request of type `model` in a JSON body, and the size of the body in bytes. Errors: those
    of `receive` and `decode_request`."""
    body = await receive(request, limits)
    return await decode_request(body, model, limits), len(body)


async def receive(request: Request, limits: BodyLimits) -> bytes:
    """The body. Errors: `InvalidRequestError` for another content type, broken UTF-8 and more
    elements than allowed; `PayloadTooLargeError`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequestError(
            f"the content type is {content_type[:60] or 'missing'!r}; allowed: 'application/json'",
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.num_bytes:
        raise too_large(int(declared), limits.num_bytes)
    parts: list[bytes] = []
    size = num_commas = num_openers = 0
    text = codecs.getincrementaldecoder("utf-8")()
    async for part in request.stream():
        size += len(part)
        if size > limits.num_bytes:
            raise too_large(size, limits.num_bytes)
        num_commas += part.count(b",")
        num_openers += _num_openers(part)
        if num_commas > limits.commas or num_openers > limits.openers:
            allowed = f"{limits.commas} commas, and {limits.openers} brackets and colons"
            raise InvalidRequestError(
                f"the body has more elements than any request needs; allowed: {allowed}",
                code="invalid_json",
            )
        try:
            text.decode(part, final=not part)
        except UnicodeDecodeError as error:
            start = max(0, size - len(part)) + error.start
            raise InvalidRequestError(
                f"the body is not UTF-8 (byte {start})", code="invalid_json"
            ) from None
        parts.append(part)
    return b"".join(parts)


async def decode_request(body: bytes, model: type[RequestT], limits: BodyLimits) -> RequestT:
    """The request in `body`. Errors: `InvalidRequestError` for malformed or absurd JSON (NaN,
    numbers that overflow, nesting, texts), and those of `RequestModel.parse`."""
    if len(body) <= _INLINE_BYTES:
        return model.parse(_decoded(body, model, limits))
    return await asyncio.to_thread(lambda: model.parse(_decoded(body, model, limits)))


def too_large(size: int, max_bytes: int) -> PayloadTooLargeError:
    """The error of a body that is larger than allowed."""
    return PayloadTooLargeError(
        f"the body has {size} bytes or more; allowed: {max_bytes}", code="body_too_large"
    )


def _decoded(body: bytes, model: type[RequestModel], limits: BodyLimits) -> dict[str, object]:
    """The fields in `body`. Of those that the model does not read only name and syntax are
    checked.
    """
    try:
        fields = _fields(body)
        decoded = {
            name: _value(raw, limits)
            if model.reads(name)
            else None
            if memoryview(raw) == _NULL
            else ...
            for name, raw in fields.items()
        }
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    if _num_openers(body) > MAX_JSON_DEPTH:
        _check_depth(decoded)
    return decoded


def _fields(body: bytes) -> _RawFields:
    """The fields of an object. An escaped lone surrogate stands for U+FFFD: agents send such text
    back for ever, once a tool has cut an emoji in two."""
    try:
        return msgspec.json.decode(body, type=_RawFields)
    except msgspec.ValidationError:
        raise InvalidRequestError("the body must be a JSON object", code="invalid_body") from None
    except msgspec.DecodeError:
        mended = valid_escapes(body)
        if mended == body:
            raise
        return msgspec.json.decode(mended, type=_RawFields)


def _value(raw: msgspec.Raw, limits: BodyLimits, *, levels: int = _PIECE_LEVELS) -> object:
    """The value in `raw`; a large one comes in pieces, between which other threads have their
    turns.
    """
    text = memoryview(raw)
    if len(text) <= _PIECE_BYTES:
        return msgspec.json.decode(raw)
    if text[0] == ord(_QUOTE):
        return _text(text[1:-1], limits)
    if levels == 0 or bytes(text).count(b",") * _DENSE > len(text):
        return msgspec.json.decode(raw)
    match text[0]:
        case 0x5B:  # [
            parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
            return [_value(part, limits, levels=levels - 1) for part in parts]
        case 0x7B:  # {
            members = msgspec.json.decode(raw, type=_RawFields)
            return {name: _value(part, limits, levels=levels - 1) for name, part in members.items()}
    return msgspec.json.decode(raw)


def _text(literal: memoryview, limits: BodyLimits) -> str:
    """The text of a JSON string, given without its quotes."""
    pieces: list[str] = []
    num_chars = start = 0
    is_ascii = True
    while start < len(literal):
        piece = bytes(literal[start : start + _PIECE_BYTES + _LONGEST_CHARACTER])
        end = _cut(piece) if len(piece) > _PIECE_BYTES else len(piece)
        pieces.append(msgspec.json.decode(_QUOTE + piece[:end] + _QUOTE, type=str))
        start += end
        num_chars += len(pieces[-1])
        is_ascii = is_ascii and pieces[-1].isascii()
        if not is_ascii and num_chars > limits.chars:
            raise ContextLengthError.of_prompt(
                num_chars // _CHARS_PER_TOKEN,
                context_length=limits.context_length,
                param="messages",
                is_counted=False,
            )
    return "".join(pieces)


def _cut(piece: bytes) -> int:
    """The last place within the first `_PIECE_BYTES` of `piece`, a part of a JSON string that
    begins with a character, at which another one begins."""
    start = _PIECE_BYTES - _LONGEST_CHARACTER
    while piece[start] & 0xC0 == 0x80:  # within a character
        start -= 1
    before = piece[:start]
    num_backslashes = start - len(before.rstrip(b"\\"))
    start -= num_backslashes % 2  # the last one begins an escape
    for match in _CHARACTER.finditer(piece, start):
        if match.end() > _PIECE_BYTES:
            return match.start()
    return _PIECE_BYTES


def _num_openers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(
        f"the JSON is nested too deeply; allowed: {MAX_JSON_DEPTH} levels", code="invalid_json"
    )


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        containers = [part for part in level if isinstance(part, dict | list)]
        if not containers:
            return
        level = [
            inner
            for part in containers
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
    raise _too_deep()
