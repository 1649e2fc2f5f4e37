"""Escape control tokens in a conversation, so that they are encoded as ordinary text.

A chat template puts the strings of a conversation between control tokens (`]~b]`, `[e~[`, ...).
Without escapes, a message with the text of a control token could end its turn early. Before
rendering, `TokenEscaper` inserts an escape character into each token text of a string. Control
tokens that the template itself writes contain no escape. `Tokenizer.encode_escaped` encodes only
control tokens without escapes as tokens, and removes the escapes from all other text.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from negamax.base.pieces import replace_all
from negamax.base.unicode import valid_unicode

ESCAPE = "\udfff"  # a lone surrogate, which valid text of a client cannot contain
_INSERTED = frozenset({"name", "arguments"})  # Call fields that M3's template writes in <>.


def unescape(text: str) -> str:
    return text.replace(ESCAPE, "")


class TokenEscaper:
    """Escapes the texts of added tokens in a conversation.

    Tags of reasoning and tool calls in the assistant's messages stay tokens, because the model
    wrote these messages. Threads may share an object of this class.
    """

    def __init__(self, added: Iterable[str], *, structure: Iterable[str]) -> None:
        """`added`: texts of all added tokens. `structure`: texts of the tags in answers."""
        texts = frozenset(added) - {""}
        self._all = _Spellings(texts)
        self._control = _Spellings(texts - frozenset(structure))

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Escape all strings other than roles in messages from `normalize_messages`."""
        return [self._message(message) for message in messages]

    def value(self, value: Any) -> Any:
        return _escape(value, self._all)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        spellings = self._control if message["role"] == "assistant" else self._all
        escaped = {
            spellings.escaped(key): value if key == "role" else _escape(value, spellings)
            for key, value in message.items()
            if key != "tool_calls"
        }
        if "tool_calls" in message:
            escaped["tool_calls"] = _escape(message["tool_calls"], spellings, inserted=_INSERTED)
        return escaped


class _Spellings:
    """Finds token texts within a string, and parts of token texts at the ends of the string."""

    def __init__(self, texts: frozenset[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first))) if texts else None
        self._heads = tuple({text[:end] for text in texts for end in range(1, len(text))})
        self._tails = tuple({text[start:] for text in texts for start in range(1, len(text))})
        self._middles = "\0".join(text[1:-1] for text in texts)
        self._longest = max(map(len, texts), default=0)

    def escaped(self, text: str, *, is_inserted: bool = False) -> str:
        """Escape token texts in `text`. If `is_inserted`, templates put `text` inside tags."""
        text = valid_unicode(text)
        if self._whole is None or not text:
            return text
        is_middle = is_inserted and len(text) < self._longest and text in self._middles
        before = ESCAPE if text.startswith(self._tails) else ""
        after = ESCAPE if is_middle or text.endswith(self._heads) else ""
        return before + replace_all(self._whole, _break, text, longest=self._longest) + after


def _break(match: re.Match[str]) -> str:
    """Add an escape after each character. The escapes also break overlapping token texts."""
    return "".join(character + ESCAPE for character in match[0])


def _escape(
    value: Any,
    spellings: _Spellings,
    *,
    is_inserted: bool = False,
    inserted: frozenset[str] = frozenset(),
) -> Any:
    """Escape the strings of a JSON value. Templates put values of keys `inserted` inside tags."""

    def escape(inner: Any, *, is_inserted: bool = is_inserted) -> Any:
        return _escape(inner, spellings, is_inserted=is_inserted, inserted=inserted)

    if isinstance(value, str):
        return spellings.escaped(value, is_inserted=is_inserted)
    if isinstance(value, Mapping):
        return {
            escape(key): escape(inner, is_inserted=is_inserted or key in inserted)
            for key, inner in value.items()
        }
    return [escape(inner) for inner in value] if isinstance(value, list | tuple) else value
