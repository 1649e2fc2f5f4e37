"""Replace lone surrogates by U+FFFD. JSON can contain escaped surrogates, but UTF-8 cannot."""

import re

from negamax.base.pieces import replace_all

_BACKSLASH = ord("\\")
_REPLACEMENT = rb"\ufffd"
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(_HIGH + b"(" + _LOW + b")?|" + _LOW)
_LONGEST = 12  # Length of an escaped surrogate pair, such as \ud83d\ude00, in bytes.


def valid_unicode(text: str) -> str:
    """Replace lone surrogates in `text` by U+FFFD, and join surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def valid_escapes(body: bytes) -> bytes:
    """Return JSON text with an escaped U+FFFD for every escaped lone surrogate."""
    return replace_all(_ESCAPES, _mend, body, longest=_LONGEST)


def _mend(match: re.Match[bytes]) -> bytes:
    body, start = match.string, match.start()
    low = match[1] or b""
    backslashes = 0
    while start > backslashes and body[start - backslashes - 1] == _BACKSLASH:
        backslashes += 1
    if backslashes % 2:  # The first `\` is escaped, so the pair's first half is plain text.
        return match[0][: len(match[0]) - len(low)] + (_REPLACEMENT if low else b"")
    return match[0] if low else _REPLACEMENT
