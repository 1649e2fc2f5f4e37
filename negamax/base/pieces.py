"""Process long texts in pieces, because a call of a regular expression or a decoder holds the GIL
until it returns. The event loop can run between two pieces.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, AnyStr

PIECE = 2**18  # Texts are processed in pieces of this length, in characters or bytes.
_JOINED_PARTS = 2**14  # Number of strings that one `join` call joins.


def find_all(
    pattern: re.Pattern[AnyStr], text: AnyStr, *, longest: int
) -> Iterator[re.Match[AnyStr]]:
    """Yield the matches of `pattern.finditer(text)`, searching one piece of the text at a time. A
    match must not be longer than `longest`, and must not depend on the text after the match.
    """
    start = 0
    while start < len(text):
        end = after = start + PIECE
        for match in pattern.finditer(text, start, end + longest - 1):
            if match.start() >= end:
                break
            yield match
            after = max(end, match.end())
        start = after


def replace_all(
    pattern: re.Pattern[AnyStr],
    replacement: Callable[[re.Match[AnyStr]], AnyStr],
    text: AnyStr,
    *,
    longest: int,
) -> AnyStr:
    """Return `pattern.sub(replacement, text)`. Matches must obey the limits of `find_all`."""
    if len(text) <= PIECE:
        return pattern.sub(replacement, text)
    empty = text[:0]
    done: list[AnyStr] = []
    parts: list[AnyStr] = []
    end = 0
    for match in find_all(pattern, text, longest=longest):
        parts += (text[end : match.start()], replacement(match))
        end = match.end()
        if len(parts) > _JOINED_PARTS:
            done.append(empty.join(parts))
            parts.clear()
    return empty.join(done + parts + [text[end:]]) if end else text


def num_chars(
    value: object, *, is_left_out: Callable[[Mapping[str, Any]], bool] = lambda _: False
) -> int:
    """Return a lower bound of a JSON value's length. Skip objects that `is_left_out` accepts."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        if is_left_out(value):
            return 0
        return sum(map(len, value)) + sum(
            num_chars(inner, is_left_out=is_left_out) for inner in value.values()
        )
    if isinstance(value, list | tuple):
        return sum(num_chars(inner, is_left_out=is_left_out) for inner in value)
    return 1


def count_nesting(value: object) -> int:
    """Return the number of levels of nested objects and arrays in a JSON value."""
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]
    return depth
