"""Splits generated text into tags and the text between them, the same way however the text is cut into pieces."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from negamax.text.detokenizer import TextPiece

MAX_ATTRIBUTE_CHARS = 512  # a longer "tag" is text; bounds what is held back
_MAX_WORD_CHARS = 32  # no tag is longer up to its attributes
_MAX_TAG_CHARS = MAX_ATTRIBUTE_CHARS + 2 * _MAX_WORD_CHARS
_NEVER = "(?!)"  # where every tag is known by its token
_ATTRIBUTES_END = re.compile("[<>]")


class TagKind(enum.Enum):
    """What a stretch of output is. CUT is the beginning of a tag at the very end of the output."""

    TEXT = "text"
    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    BLOCK_OPEN = "block_open"
    BLOCK_CLOSE = "block_close"
    INVOKE_OPEN = "invoke_open"
    INVOKE_CLOSE = "invoke_close"
    PARAMETER_OPEN = "parameter_open"
    PARAMETER_CLOSE = "parameter_close"
    CUT = "cut"


class Lexeme(NamedTuple):
    """One tag or one stretch of text, with the text as generated."""

    kind: TagKind
    text: str


@dataclass(frozen=True, slots=True)
class TagPattern:
    """A tag found by regular expressions without groups: one for the whole tag, one for its proper beginnings."""

    kind: TagKind
    whole: str
    beginning: str


class TagLexer:
    """Finds tags in a stream of pieces. Holds back only what may still become a tag. Single writer: its parser.

    `literals` are tags with a fixed text. Those with an entry in `token_ids` count only as that token; all others, and the
    `patterns`, are found in the text. `first_chars` are the characters with which a tag can begin.
    """

    def __init__(
        self,
        literals: Mapping[str, TagKind],
        *,
        patterns: Sequence[TagPattern],
        first_chars: str,
        token_ids: Mapping[str, int] | None,
    ) -> None:
        ids = token_ids or {}
        self._kind_of_token = {ids[text]: kind for text, kind in literals.items() if text in ids}
        by_text = [(text, kind) for text, kind in literals.items() if text not in ids]
        wholes = [(kind, re.escape(text)) for text, kind in by_text] + [(p.kind, p.whole) for p in patterns]
        beginnings = [literal_beginning(text) for text, _ in by_text] + [p.beginning for p in patterns]
        self._kinds = [kind for kind, _ in wholes]
        self._tag = re.compile("|".join(f"({whole})" for _, whole in wholes) or _NEVER)
        self._beginning = re.compile(rf"(?:{'|'.join(beginnings) or _NEVER})\Z")
        self._first_chars = re.compile(f"[{re.escape(first_chars)}]")
        self._held = ""

    def feed(self, pieces: Sequence[TextPiece]) -> list[Lexeme]:
        """Take the next pieces; return the lexemes that are certain now."""
        lexemes: list[Lexeme] = []
        texts: list[str] = []
        for piece in pieces:
            kind = self._kind_of_token.get(piece.token_id) if piece.token_id is not None else None
            if kind is None:
                texts.append(piece.text)
                continue
            self._scan("".join(texts), lexemes)
            texts = []
            if self._held:  # no text tag runs across a tag token
                lexemes.append(Lexeme(TagKind.TEXT, self._held))
                self._held = ""
            lexemes.append(Lexeme(kind, piece.text))
        self._scan("".join(texts), lexemes)
        return lexemes

    def finish(self) -> list[Lexeme]:
        """The output is over: what was held back is a cut tag."""
        held, self._held = self._held, ""
        return [Lexeme(TagKind.CUT, held)] if held else []

    def _scan(self, text: str, lexemes: list[Lexeme]) -> None:
        if not text:
            return
        if not self._held and not self._first_chars.search(text):
            lexemes.append(Lexeme(TagKind.TEXT, text))
            return
        text = self._held + text
        is_in_attributes = len(self._held) > _MAX_WORD_CHARS and not _ATTRIBUTES_END.search(text, len(self._held))
        if is_in_attributes and len(text) <= MAX_ATTRIBUTE_CHARS:
            self._held = text
            return
        start = 0
        for match in self._tag.finditer(text):
            if match.start() > start:
                lexemes.append(Lexeme(TagKind.TEXT, text[start : match.start()]))
            assert match.lastindex is not None
            lexemes.append(Lexeme(self._kinds[match.lastindex - 1], match[0]))
            start = match.end()
        beginning = self._beginning.search(text, max(start, len(text) - _MAX_TAG_CHARS))
        end = beginning.start() if beginning else len(text)
        if end > start:
            lexemes.append(Lexeme(TagKind.TEXT, text[start:end]))
        self._held = text[end:]


def literal_beginning(text: str, *, then: str = "") -> str:
    """Regular expression for every non-empty beginning of `text`: `<(?:t(?:h…)?)?`; `then` may follow the whole of it."""
    nested = then
    for char in reversed(text[1:]):
        nested = f"(?:{re.escape(char)}{nested})?"
    return re.escape(text[0]) + nested
