"""Receive request bodies within limits, and decode the fields that the request class has.

Decoding JSON holds the GIL, even in another thread. So a thread decodes a large body piece by
piece, and the event loop can run between two pieces. Decoded elements need more memory than their
JSON text, so the number of elements is limited before decoding.
"""

import codecs
import re
from dataclasses import dataclass
from typing import Self

import msgspec
from starlette.requests import Request

from negamax.api.http.body_budget import get_share
from negamax.api.http.request_threads import run_off_loop
from negamax.api.schemas.request_model import RequestModel, RequestT
from negamax.api.schemas.tools import check_mended_tools
from negamax.base.errors import ContextLengthError, InvalidRequestError, PayloadTooLargeError
from negamax.base.pieces import count_nesting
from negamax.base.unicode import valid_escapes

MAX_JSON_DEPTH = 64
_LEAST_CHARS = 2**22  # Minimum of the character limit, for models with short contexts.
_CHARS_PER_TOKEN = 8
_LEAST_COMMAS = 2**20  # Minimum of the comma limit, for models with short contexts.
_LEAST_OPENERS = 2**18
_INLINE_BYTES = 32 * 1024  # Larger bodies are decoded in a thread.
_PIECE_BYTES = 256 * 1024  # Larger values are decoded piece by piece.
_PIECE_LEVELS = 4  # Number of nesting levels to decode in pieces: messages, message, parts, part.
_DENSE = 16  # Values with fewer bytes per comma are decoded in one piece.
_MOST_LONG_NUMBERS = 32  # limit of long numbers per body, because parsing them takes quadratic time
_LONG_NUMBER = b"0" * 400
_SHOW_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(".") for byte in range(256))
_LITERAL = re.compile(rb'"(?:[^"\\]|\\.)*+"|[0-9]+', re.DOTALL)  # Matches a JSON string, or digits.
_LENIENT = msgspec.json.Decoder(float_hook=float)  # Decodes 1e400 as infinity, as Python does.
_NULL = b"null"
_QUOTE = b'"'
_LONGEST_CHARACTER = 12  # Bytes of a character that JSON writes as two escaped surrogates.
_CHARACTER = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]+",
    re.DOTALL,
)

_RawFields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body. Commas, colons and brackets are also counted in strings."""

    num_bytes: int
    context_length: int  # context length of the model in tokens
    chars: int  # maximum length of a non-ASCII text, which needs more memory per character
    commas: int  # Limit of commas, which separate elements.
    openers: int  # Limit of '[', '{' and ':', because containers take more memory than numbers.

    @classmethod
    def of(cls, *, max_bytes: int, max_model_len: int) -> Self:
        return cls(
            max_bytes,
            context_length=max_model_len,
            chars=compute_max_chars(max_model_len),
            commas=max(_LEAST_COMMAS, 4 * max_model_len),
            openers=max(_LEAST_OPENERS, 2 * max_model_len),
        )


def compute_max_chars(max_model_len: int) -> int:
    """Return the character limit of a conversation for a context of `max_model_len` tokens."""
    return max(_LEAST_CHARS, _CHARS_PER_TOKEN * max_model_len)


async def read_request(
    request: Request, model: type[RequestT], limits: BodyLimits
) -> tuple[RequestT, int]:
    """Parse a JSON body into `model`. Return the request and the size of its fields in bytes.

    Release memory reserved for fields that `model` lacks. Raises the errors of `decode_request`.
    """
    params, num_bytes = await decode_request(await receive(request, limits), model, limits)
    get_share(request).keep(num_bytes)
    return params, num_bytes


async def receive(request: Request, limits: BodyLimits) -> bytes:
    """Receive the body, or raise `InvalidRequestError` or `PayloadTooLargeError`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequestError(
            f"the content type is {content_type[:60] or 'missing'!r}; allowed: 'application/json'",
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.num_bytes:
        raise build_size_error(int(declared), limits.num_bytes)
    parts: list[bytes] = []
    size = num_commas = num_openers = 0
    text = codecs.getincrementaldecoder("utf-8")()
    async for part in request.stream():
        size += len(part)
        if size > limits.num_bytes:
            raise build_size_error(size, limits.num_bytes)
        num_commas += part.count(b",")
        num_openers += count_openers(part)
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
                f"the body is not valid UTF-8 at byte {start}", code="invalid_json"
            ) from None
        parts.append(part)
    return b"".join(parts)


async def decode_request(
    body: bytes, model: type[RequestT], limits: BodyLimits
) -> tuple[RequestT, int]:
    """Decode the request in `body`. Return the request and the size of its fields in bytes.

    Raises `InvalidRequestError` for malformed JSON, NaN, too large numbers, too deep nesting and
    too long texts. Raises the errors of `RequestModel.parse`.
    """

    def decode() -> tuple[RequestT, int]:
        fields, num_bytes = _decode_fields(body, model, limits)
        return model.parse(fields), num_bytes

    return await run_off_loop(decode, num_bytes=len(body), inline_bytes=_INLINE_BYTES)


def build_size_error(size: int, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body has {size} bytes or more; allowed: {max_bytes}", code="body_too_large"
    )


def _decode_fields(
    body: bytes, model: type[RequestModel], limits: BodyLimits
) -> tuple[dict[str, object], int]:
    """Decode the fields in `body`, and return the size in bytes of the fields that `model` has.

    Fields that `model` lacks are only checked for valid syntax.
    """
    try:
        fields, is_mended = _split_fields(body)
        values = _ValueDecoder(limits)
        decoded = {
            name: values.decode(raw)
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
        raise _build_depth_error() from None
    if count_openers(body) > MAX_JSON_DEPTH and count_nesting(decoded) > MAX_JSON_DEPTH:
        raise _build_depth_error()
    if is_mended:
        check_mended_tools(decoded.get("tools"))
    return decoded, sum(len(memoryview(raw)) for name, raw in fields.items() if model.reads(name))


def _split_fields(body: bytes) -> tuple[_RawFields, bool]:
    """Split an object into its fields, and return whether U+FFFD replaced a lone surrogate.

    Agents send a lone surrogate when a tool has cut the text of an emoji in two.
    """
    try:
        return msgspec.json.decode(body, type=_RawFields), False
    except msgspec.ValidationError:
        raise InvalidRequestError("the body must be a JSON object", code="invalid_body") from None
    except msgspec.DecodeError:
        mended = valid_escapes(body)
        if mended == body:
            raise
        return msgspec.json.decode(mended, type=_RawFields), True


class _ValueDecoder:
    """Decodes the values of one body, large values in pieces, so that other threads can run."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._num_long_numbers = 0

    def decode(self, raw: msgspec.Raw, *, levels: int = _PIECE_LEVELS) -> object:
        """Decode `raw`. Raises the errors of `decode_request`."""
        text = memoryview(raw)
        if len(text) <= _PIECE_BYTES:
            return self._decode_piece(text)
        if text[0] == ord(_QUOTE):
            return self._decode_text(text[1:-1])
        if levels == 0 or bytes(text).count(b",") * _DENSE > len(text):
            return self._decode_piece(text)
        match text[0]:
            case 0x5B:  # [
                parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
                return [self.decode(part, levels=levels - 1) for part in parts]
            case 0x7B:  # {
                members = msgspec.json.decode(raw, type=_RawFields)
                return {
                    name: self.decode(part, levels=levels - 1) for name, part in members.items()
                }
        return self._decode_piece(text)

    def _decode_piece(self, text: memoryview) -> object:
        if len(text) >= len(_LONG_NUMBER) and text[0] != ord(_QUOTE):
            self._count_long_numbers(bytes(text))
        try:
            return msgspec.json.decode(text)
        except msgspec.ValidationError:  # Raised for a number that is too large for a float.
            return _LENIENT.decode(text)

    def _count_long_numbers(self, text: bytes) -> None:
        if _LONG_NUMBER not in text.translate(_SHOW_DIGITS):
            return
        for found in _LITERAL.finditer(text):
            is_text = text[found.start()] == ord(_QUOTE)
            self._num_long_numbers += not is_text and len(found[0]) >= len(_LONG_NUMBER)
        if self._num_long_numbers > _MOST_LONG_NUMBERS:
            raise InvalidRequestError(
                f"the body has more than {_MOST_LONG_NUMBERS} numbers of {len(_LONG_NUMBER)} "
                f"digits or more; send such numbers as text",
                code="invalid_json",
            )

    def _decode_text(self, literal: memoryview) -> str:
        limits = self._limits
        pieces: list[str] = []
        num_chars = start = 0
        is_ascii = True
        while start < len(literal):
            piece = bytes(literal[start : start + _PIECE_BYTES + _LONGEST_CHARACTER])
            end = _find_boundary(piece) if len(piece) > _PIECE_BYTES else len(piece)
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


def _find_boundary(piece: bytes) -> int:
    """Return the last position up to `_PIECE_BYTES` at which a character begins."""
    start = _PIECE_BYTES - _LONGEST_CHARACTER
    while piece[start] & 0xC0 == 0x80:  # Go back to the start of a character.
        start -= 1
    before = piece[:start]
    num_backslashes = start - len(before.rstrip(b"\\"))
    start -= num_backslashes % 2  # The last backslash of an odd run begins an escape.
    for match in _CHARACTER.finditer(piece, start):
        if match.end() > _PIECE_BYTES:
            return match.start()
    return _PIECE_BYTES


def count_openers(text: bytes) -> int:
    """Count '[', '{' and ':', also inside strings."""
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _build_depth_error() -> InvalidRequestError:
    return InvalidRequestError(
        f"the JSON is nested too deeply; allowed: {MAX_JSON_DEPTH} levels", code="invalid_json"
    )
