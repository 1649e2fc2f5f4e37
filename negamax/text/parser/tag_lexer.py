"""Split generated text into tags and text, however the stream is split into pieces."""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import msgspec

from negamax.text.detokenizer import TextPiece

MAX_ATTRIBUTE_CHARS = 512  # maximum characters of a tag with attributes; longer tags are text
_MAX_TAG_CHARS = MAX_ATTRIBUTE_CHARS + 64  # maximum characters of any tag
_NEVER = "(?!)"


class TagKind(enum.Enum):
    """Kind of a part of the output.

    CUT means that the output ends within a tag. A LOOSE tag belongs to another family, or lacks the
    marker of its format. The parser treats a LOOSE tag as a tag only in positions where text is
    impossible. HELD means a complete tag that may become a longer tag with the next text.
    """

    TEXT = "text"
    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    LOOSE_THINK_CLOSE = "loose_think_close"
    BLOCK_OPEN = "block_open"
    BLOCK_CLOSE = "block_close"
    INVOKE_OPEN = "invoke_open"
    INVOKE_CLOSE = "invoke_close"
    PARAMETER_OPEN = "parameter_open"
    PARAMETER_CLOSE = "parameter_close"
    LOOSE_BLOCK_OPEN = "loose_block_open"
    LOOSE_BLOCK_CLOSE = "loose_block_close"
    LOOSE_INVOKE_OPEN = "loose_invoke_open"
    LOOSE_INVOKE_CLOSE = "loose_invoke_close"
    CUT = "cut"
    HELD = "held"

    # Members are compared by identity. The hash of `Enum` is a slow Python function.
    __hash__ = object.__hash__


TEXT = TagKind.TEXT  # module variable: reading a member of an enumeration takes ten times as long


class Lexeme(msgspec.Struct, frozen=True, gc=False):
    """One tag, or the text between two tags, as generated."""

    kind: TagKind
    text: str


@dataclass(frozen=True, slots=True)
class TagPattern:
    """A tag that consists of `prefix` and a match of `rest`."""

    kind: TagKind
    prefix: str  # literal text at the start of the tag
    rest: str  # regular expression without groups that matches the rest of the tag and ends in `>`


@dataclass(frozen=True, slots=True)
class TagBeginnings:
    """Describes texts that may still become a tag, in addition to the beginnings of literal tags.

    Such a text is a word of `words`, the beginning of such a word, or a match of `growing`.
    `growing` must match the beginnings of all tags. Each match of `growing` contains one of the
    `anchors`. A match of `inside` may become a tag of up to MAX_ATTRIBUTE_CHARS characters, as long
    as no `<` or `>` follows.
    """

    words: tuple[str, ...]
    anchors: tuple[str, ...] = ()
    growing: str = _NEVER
    inside: str = _NEVER


class _Tables:
    """Lookup tables for a set of tags, shared by all lexers of the same set."""

    def __init__(
        self,
        literals: tuple[tuple[str, TagKind], ...],
        patterns: tuple[TagPattern, ...],
        beginnings: TagBeginnings,
        token_ids: tuple[tuple[str, int], ...],
        named: tuple[TagPattern, ...],
    ) -> None:
        ids = dict(token_ids)
        self.kind_of_token: dict[int | None, TagKind] = {
            ids[tag]: kind for tag, kind in literals if tag in ids
        }
        by_text = [(tag, kind) for tag, kind in literals if tag not in ids]
        fixed = [TagPattern(kind, tag[0], re.escape(tag[1:])) for tag, kind in by_text]
        # longest first, because a regular expression takes the first alternative that matches
        longest_first = sorted(named, key=lambda tag: len(tag.rest), reverse=True)
        exact = [TagPattern(tag.kind, tag.prefix, re.escape(tag.rest)) for tag in longest_first]
        tags = [*exact, *fixed, *patterns]
        self.kinds, self.tag = _join_patterns(tags)
        self.last_kinds, self.last_tag = _join_patterns(
            [tag for tag in tags if tag.kind is not TagKind.HELD]
        )
        texts = [tag.prefix + tag.rest for tag in longest_first]
        self.named_starts = frozenset(text[:end] for text in texts for end in range(len(text)))
        self.longest_named = max(map(len, texts), default=0)
        words = [*(tag[:-1] for tag in (*dict(by_text), *texts)), *beginnings.words]
        self.starts = frozenset(
            word[:length] for word in words for length in range(1, len(word) + 1)
        )
        self.last_chars = frozenset(start[-1] for start in self.starts)
        # First character of each word -> largest count of this character in one word. If a word
        # contains a character n times, only the last n of these characters can begin the word.
        self.first_chars = {
            word[0]: max(other.count(word[0]) for other in words if other[0] == word[0])
            for word in words
        }
        self.first_char = re.compile(
            f"[{re.escape(''.join(self.first_chars))}]" if words else _NEVER
        )
        self.anchor = re.compile("|".join(map(re.escape, beginnings.anchors)) or _NEVER)
        self.growing = re.compile(rf"(?:{beginnings.growing})\Z")
        self.inside = re.compile(beginnings.inside)


_tables = lru_cache(maxsize=32)(_Tables)


class TagLexer:
    """Finds tags in a stream of pieces, and holds back only text that may still become a tag.

    `literals` are tags with a fixed text that ends with `>`. The lexer recognizes tags in
    `token_ids` only as tokens. It searches the text for `patterns` and for other literals.
    `list_named` returns tags whose names contain angle brackets or quotes. These tags have a
    literal `rest` and precede `patterns`. The lexer calls `list_named` at the first anchor.
    """

    __slots__ = ("_held", "_is_inside", "_is_tag", "_list_named", "_tables", "_tables_with")

    def __init__(
        self,
        literals: Mapping[str, TagKind],
        *,
        patterns: Sequence[TagPattern],
        beginnings: TagBeginnings,
        token_ids: Mapping[str, int] | None,
        list_named: Callable[[], Sequence[TagPattern]] | None = None,
    ) -> None:
        ids = tuple((token_ids or {}).items())
        self._tables_with = partial(
            _tables, tuple(literals.items()), tuple(patterns), beginnings, ids
        )
        self._tables = self._tables_with(())
        self._list_named = list_named
        self._held = ""
        self._is_inside = False  # whether pattern `TagBeginnings.inside` matches `_held`
        self._is_tag = False  # whether `_held` may contain a whole tag

    def feed(self, pieces: Sequence[TextPiece]) -> list[Lexeme]:
        """Add pieces, and return the lexemes that later text cannot change."""
        lexemes: list[Lexeme] = []
        kind_of_token = self._tables.kind_of_token
        if len(pieces) == 1 and pieces[0].token_id not in kind_of_token:
            self._scan(pieces[0].text, lexemes)
            return lexemes
        texts: list[str] = []
        for piece in pieces:
            if piece.token_id not in kind_of_token:
                texts.append(piece.text)
                continue
            self._scan("".join(texts), lexemes)
            texts = []
            rest = self._release(lexemes)  # no tag spelled in text continues after a tag token
            if rest:
                lexemes.append(Lexeme(TEXT, rest))
            lexemes.append(Lexeme(kind_of_token[piece.token_id], piece.text))
        self._scan("".join(texts), lexemes)
        return lexemes

    def finish(self) -> list[Lexeme]:
        """End the output. Return the held lexemes, and a truncated tag as a CUT lexeme."""
        lexemes: list[Lexeme] = []
        rest = self._release(lexemes)
        end = self._find_beginning(rest, 0) if ">" in rest else 0
        if end:
            lexemes.append(Lexeme(TEXT, rest[:end]))
        return [*lexemes, Lexeme(TagKind.CUT, rest[end:])] if rest[end:] else lexemes

    def _release(self, lexemes: list[Lexeme]) -> str:
        """Append the tags in the held text to `lexemes`, and return the text after the last tag."""
        held, self._held = self._held, ""
        return held[self._split(held, lexemes, is_last=True) :] if ">" in held else held

    def _scan(self, text: str, lexemes: list[Lexeme]) -> None:
        tables, may_end_tag = self._tables, ">" in text
        if self._held:
            stays_inside = self._is_inside and not may_end_tag and "<" not in text
            text = self._held + text
            if (stays_inside and len(text) <= MAX_ATTRIBUTE_CHARS) or text in tables.starts:
                self._held, self._is_inside = text, stays_inside
                self._is_tag = self._is_tag or may_end_tag
                return
            may_end_tag = may_end_tag or self._is_tag
            self._held = ""
            self._is_tag = False
        elif not tables.first_char.search(text):
            if text:
                lexemes.append(Lexeme(TEXT, text))
            return
        if self._list_named is not None and tables.anchor.search(text):
            self._tables = tables = self._tables_with(tuple(self._list_named()))
            self._list_named = None
        start = self._split(text, lexemes) if may_end_tag else 0
        if self._held:
            return
        if start < len(text):
            end = self._find_beginning(text, start)
            if end > start:
                lexemes.append(Lexeme(TEXT, text[start:end]))
            self._held = text[end:]

    def _split(self, text: str, lexemes: list[Lexeme], *, is_last: bool = False) -> int:
        """Append tags of `text` and text between them to `lexemes`. Return where the last tag ends.

        If `is_last` is False, a tag that may become a longer tag is held.
        """
        tables, start = self._tables, 0
        kinds, tag = (tables.last_kinds, tables.last_tag) if is_last else (tables.kinds, tables.tag)
        for match in tag.finditer(text):
            assert match.lastindex is not None
            kind, begin = kinds[match.lastindex - 1], match.start()
            may_grow = not is_last and len(text) - begin < tables.longest_named
            is_held = kind is TagKind.HELD or (may_grow and text[begin:] in tables.named_starts)
            if is_held:  # the tag may be part of a longer tag that began earlier
                begin = min(begin, self._find_beginning(text, start))
            if begin > start:
                lexemes.append(Lexeme(TEXT, text[start:begin]))
            if is_held:
                self._held, self._is_inside, self._is_tag = text[begin:], False, True
                return len(text)
            lexemes.append(Lexeme(kind, match[0]))
            start = match.end()
        return start

    def _find_beginning(self, text: str, start: int) -> int:
        """Return where a possible tag at the end of `text` begins, or the length of `text`."""
        tables = self._tables
        self._is_inside = False
        low = max(start, len(text) - _MAX_TAG_CHARS)
        if tables.anchor.search(text, low):
            growing = tables.growing.search(text, low)
            if growing:
                self._is_inside = tables.inside.fullmatch(growing[0]) is not None
                return growing.start()
        end = len(text)
        if text[-1] not in tables.last_chars:
            return end
        for char, count in tables.first_chars.items():
            position = len(text)
            for _ in range(count):
                position = text.rfind(char, low, position)
                if position < 0:
                    break
                if text[position:] in tables.starts:
                    end = min(end, position)
        return end


def _join_patterns(patterns: Sequence[TagPattern]) -> tuple[list[TagKind], re.Pattern[str]]:
    """Return the kinds of tags, and a regular expression with one group per tag."""
    kinds: list[TagKind] = []
    families: list[str] = []
    for prefix in dict.fromkeys(pattern.prefix for pattern in patterns):
        family = [pattern for pattern in patterns if pattern.prefix == prefix]
        kinds += [pattern.kind for pattern in family]
        families.append(
            f"{re.escape(prefix)}(?:{'|'.join(f'({pattern.rest})' for pattern in family)})"
        )
    return kinds, re.compile("|".join(families) or _NEVER)
