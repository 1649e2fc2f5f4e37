"""Read regular expressions (ECMA 262 and common extensions) and bounds of numbers.

An unanchored pattern of a JSON schema may match any part of a text. The reader refuses
backreferences, word boundaries, lookbehinds, flags, and lookaheads inside groups.
"""

import functools
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from typing import NoReturn

from negamax.config.grammar import refuse_grammar
from negamax.text.grammar.languages import (
    LAST_CHARACTER,
    Language,
    Languages,
    Ranges,
    invert,
    unite,
)

MAX_CHARS = 4000  # maximum characters of a pattern
MAX_GROUPS = 50  # maximum levels of nested groups
MAX_REPEATS = 100_000  # maximum product of the upper limits of nested repeats
MAX_PLACES = 20  # maximum decimal places of `multipleOf`
MAX_ENDINGS = 100  # maximum number of different last digits of the multiples of a number

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ANY: Ranges = invert(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
_COUNTS = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"([pP])(?:\{(?:General_Category=|gc=)?(\w+)\}|([A-Z]))")
_CATEGORIES = {
    "Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Titlecase_Letter": "Lt",
    "Mark": "M", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P",
    "Symbol": "S", "Separator": "Z", "Space_Separator": "Zs", "Other": "C", "Control": "Cc",
}  # fmt: skip


@functools.cache
def _list_categories() -> dict[str, Ranges]:
    """Return the characters of Unicode's general categories, such as "L" and "Lu"."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for code in range(LAST_CHARACTER + 1):
        category = unicodedata.category(chr(code))
        if found[category] and found[category][-1][1] == code - 1:
            found[category][-1] = (found[category][-1][0], code)
        else:
            found[category].append((code, code))
    for category in sorted(found):
        found[category[0]] += found[category]
    return {category: unite(ranges) for category, ranges in found.items()}


def read_pattern(pattern: str, languages: Languages) -> Language:
    """Return the language of texts with a match of `pattern`. Raises `InvalidRequestError`."""
    return _PatternReader(pattern, languages).language


class _PatternReader:
    """Reads one pattern into the attribute `language`."""

    def __init__(self, pattern: str, languages: Languages) -> None:
        self._text, self._languages = pattern, languages
        self._place = 0
        self._level = 0
        self._sizes: dict[int, int] = {}  # expression -> product of the limits of nested repeats
        if len(pattern) > MAX_CHARS:
            self._refuse(f"has {len(pattern)} characters; at most {MAX_CHARS} are allowed")
        alternatives = [self._read_whole()]
        while self._take("|"):
            alternatives.append(self._read_whole())
        if self._place < len(pattern):
            self._refuse("has a closing bracket without an opening bracket")
        self.language = languages.containing(alternatives)

    def _refuse(self, reason: str) -> NoReturn:
        text = self._text if len(self._text) <= 80 else self._text[:80] + "..."
        refuse_grammar(f"the pattern {text!r} cannot be enforced, because it {reason}")

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._text, self._place)
        self._place = found.end() if found else self._place
        return found

    def _read_whole(self) -> tuple[list[int], bool]:
        """Read an alternative outside groups; return its parts, and whether one is a lookahead."""
        languages, parts = self._languages, list[int]()
        while self._peek() not in ("", "|", ")"):
            is_wanted = self._take("(?=")
            if is_wanted or self._take("(?!"):
                ahead = languages.join([self._read_group(), languages.everything])
                ahead = ahead if is_wanted else languages.complement(ahead)
                rest, _ = self._read_whole()
                rest_of_text = languages.join([*rest, languages.everything])
                return [*parts, languages.both([ahead, rest_of_text])], True
            parts.append(self._read_quantified())
        return parts, False

    def _read_group(self) -> int:
        """Read the alternatives in a group, up to its closing bracket."""
        self._level += 1
        if self._level > MAX_GROUPS:
            self._refuse(f"nests more than {MAX_GROUPS} groups")
        found = []
        while True:
            parts = []
            while self._peek() not in ("", "|", ")"):
                parts.append(self._read_quantified())
            found.append(self._languages.join(parts))
            if not self._take("|"):
                break
        if not self._take(")"):
            self._refuse("lacks a closing bracket")
        self._level -= 1
        return self._languages.either(found)

    def _read_quantified(self) -> int:
        atom = self._read_atom()
        limits = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if limits is not None:
            self._place += 1
        elif counts := self._match(_COUNTS):
            least = int(counts[1])
            limits = (least, least if counts[2] is None else int(counts[3]) if counts[3] else None)
        if limits is None:
            return atom
        self._take("?")
        if self._peek() in ("*", "+", "?") and self._peek():
            self._refuse("repeats a quantifier")
        least, most = limits
        if most is not None and most < least:
            self._refuse("has a quantifier whose limits are reversed")
        made = self._languages.repeat(atom, least, most)
        size = self._sizes[made] = max(1, most or 0, least) * self._sizes.get(atom, 1)
        if size > MAX_REPEATS:
            self._refuse(f"repeats more than {MAX_REPEATS} times")
        return made

    def _read_atom(self) -> int:
        languages = self._languages
        if self._take("^"):
            return languages.begin
        if self._take("$"):
            return languages.end
        if self._take("."):
            return languages.chars(_ANY)
        if self._take("["):
            return languages.chars(self._read_class())
        if self._match(_GROUP):
            return self._read_group()
        if self._text.startswith("(?", self._place):
            self._refuse("has a lookbehind, a flag, or a lookahead inside a group")
        if self._take("("):
            return self._read_group()
        if self._take("\\"):
            if self._take("A"):
                return languages.begin
            if self._take("Z") or self._take("z"):
                return languages.end
            return languages.chars(self._read_escape())
        if self._peek() in ("*", "+", "?") or self._match(_COUNTS):
            self._refuse("has a quantifier with nothing to repeat")
        char = self._read_char()
        return languages.chars(((char, char),))

    def _read_char(self) -> int:
        char = self._peek()
        if not char:
            self._refuse("ends too early")
        self._place += 1
        return ord(char)

    def _read_class(self) -> Ranges:
        is_negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._read_member()
            after = self._text[self._place : self._place + 2]
            if after.startswith("-") and after != "-]" and first[0][0] == first[-1][1]:
                self._place += 1
                last = self._read_member()
                if last[0][0] != last[-1][1] or last[0][0] < first[0][0]:
                    self._refuse("has a class with a reversed range")
                first = ((first[0][0], last[0][0]),)
            found += first
        ranges = unite(found)
        return invert(ranges) if is_negated else ranges

    def _read_member(self) -> Ranges:
        if self._take("\\"):
            return ((8, 8),) if self._take("b") else self._read_escape()
        char = self._read_char()
        return ((char, char),)

    def _read_escape(self) -> Ranges:
        """Read an escape after its backslash, and return the characters that it matches."""
        char = self._peek()
        if found := self._match(_PROPERTY):
            name = found[2] or found[3]
            ranges = _list_categories().get(_CATEGORIES.get(name, name))
            if ranges is None:
                self._refuse(f"has the Unicode property {name!r}, which is not a general category")
            return ranges if found[1] == "p" else invert(ranges)
        if found := self._match(_CODE):
            code = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._place):
                self._place += 1
                low = self._match(_CODE)
                if not low or not low[2] or not 0xDC00 <= int(low[2], 16) < 0xE000:
                    self._refuse("has half a surrogate pair")
                code = 0x10000 + (code - 0xD800 << 10) + int(low[2], 16) - 0xDC00
            if code > LAST_CHARACTER:
                self._refuse("has a character beyond Unicode")
            return ((code, code),)
        self._read_char()
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return ranges if char.islower() else invert(ranges)
        if char in _CONTROLS:
            return ((_CONTROLS[char],) * 2,)
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            return ((self._read_char() % 32,) * 2,)
        if char == "0" and not self._peek().isdigit():
            return ((0, 0),)
        if char.isalnum():
            self._refuse(f"has the escape \\{char}")
        return ((ord(char),) * 2,)


# --- numbers -------------------------------------------------------------------------------------

_NATURAL = "(0|[1-9][0-9]*)"
_FRACTION = r"(\.[0-9]+)?"

Bound = tuple[Decimal, bool]  # a bound, and whether the bound itself is excluded


def read_number_bounds(
    languages: Languages,
    *,
    is_integer: bool,
    low: Bound | None,
    high: Bound | None,
    steps: Iterable[str],
) -> Language:
    """Return the language of the numbers from `low` to `high` in decimal without exponents.

    The absolute value of each number must match all patterns in `steps` (from `write_multiples`).
    """
    magnitude = languages.both(
        _read_digits(text, languages)
        for text in (_NATURAL if is_integer else _NATURAL + _FRACTION, *steps)
    )

    def limit(least: Bound | None, most: Bound | None) -> int:
        """Return the expression of unsigned numbers from `least` to `most`."""
        if most is not None and most[0] < 0:
            return languages.none
        parts = [magnitude]
        if least is not None and (least[0] > 0 or least == (Decimal(0), True)):
            parts.append(_read_digits(_write_at_least(*least), languages))
        if most is not None:
            beyond = _read_digits(_write_at_least(most[0], not most[1]), languages)
            parts.append(languages.complement(beyond))
        return languages.both(parts)

    positive = limit(low, high)
    if low is not None and low[0] >= 0:
        return languages.whole(positive)
    least = (-high[0], high[1]) if high is not None and high[0] < 0 else (Decimal(0), True)
    negative = limit(least, None if low is None else (-low[0], low[1]))
    signed = languages.join([languages.text("-"), negative])
    return languages.whole(languages.either([positive, signed]))


def write_multiples(step: Decimal) -> str | None:
    """Return a pattern of the unsigned multiples of `step`, or None if the pattern is too large."""
    step = step.normalize()
    exponent = int(step.as_tuple().exponent)
    if -MAX_PLACES <= exponent < 0 and step == Decimal(1).scaleb(exponent):
        return rf"{_NATURAL}(\.[0-9]{{1,{-exponent}}}0*)?"
    if exponent < 0 or exponent > MAX_PLACES:
        return None
    width = next((width for width in range(7) if step > 0 and 10**width % step == 0), None)
    if width is None or 10**width // step > MAX_ENDINGS:
        return None
    values = range(0, 10**width, int(step))
    endings = "|".join(f"{value:0{width}}" if width else "" for value in values)
    return f"[1-9][0-9]*({endings})|{'|'.join(map(str, values))}" if width else _NATURAL


def _read_digits(pattern: str, languages: Languages) -> int:
    found = read_pattern(f"^({pattern})$", languages).plain
    assert found is not None
    return found


def _write_at_least(bound: Decimal, is_open: bool) -> str:
    """Return a pattern of the unsigned numbers >= `bound`, or > `bound` if `is_open`."""
    whole, _, part = f"{bound:f}".partition(".")
    part = part.rstrip("0")
    above = [f"[1-9][0-9]{{{len(whole)},}}"]
    above += [
        f"{start}[0-9]{{{len(whole) - len(start.partition('[')[0]) - 1}}}"
        for start in _list_larger(whole)
    ]
    beyond = [f"{start}[0-9]*" for start in _list_larger(part)]
    beyond.append(part + ("[0-9]*[1-9]" if is_open else "") + "[0-9]*")
    tail = rf"\.({'|'.join(beyond)})"
    if not is_open and not part:
        tail = _FRACTION
    return f"({'|'.join(above)}){_FRACTION}|{whole}{tail}"


def _list_larger(digits: str) -> list[str]:
    """Return patterns for the first digits of all numbers > `digits` with the same length."""
    return [
        f"{digits[:place]}[{int(digit) + 1}-9]" for place, digit in enumerate(digits) if digit < "9"
    ]
