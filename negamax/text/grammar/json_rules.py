"""Write GBNF grammars for JSON that follows a schema, and for texts of a regular language.

The grammars allow no needless fractions and exponents in numbers. Members of objects are in the
order of the schema. Strings with length limits contain only the escapes that JSON requires, so that
rules can count the characters of a string.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from negamax.config.grammar import refuse_grammar
from negamax.text.grammar.budget import RISKY_LEVELS
from negamax.text.grammar.dead_ends import find_finite
from negamax.text.grammar.json_schema import Schemas
from negamax.text.grammar.languages import (
    LAST_CHARACTER,
    MAX_STATES,
    Language,
    Languages,
    Ranges,
    State,
    unite,
)
from negamax.text.grammar.shapes import (
    ArrayShape,
    LiteralShape,
    Nodes,
    NumberShape,
    ObjectShape,
    Shape,
    TextShape,
)
from negamax.text.grammar.tag_formats import MAX_WHITESPACE, Format

_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_LITERAL: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, LAST_CHARACTER))
_RAW: Ranges = ((0x01, 0xD7FF), (0xE000, LAST_CHARACTER))  # without NUL, which ends xgrammar texts
_HEX = "0123456789abcdef"

_BLOCK = 8  # a long run of one character class is written in blocks of this many characters
_MAX_CHAIN = 3 * _BLOCK  # a run with more characters is written as repeated blocks
_MAX_PLAIN_STATES = 128  # a language with more states becomes a regular expression if possible

_COMMON = r"""
text ::= "\"" letters
letters ::= ("\"" | [^"\\\u0000-\u001f] letters | "\\" escape letters) AHEAD
escape ::= ["\\/bfnrt] | "u" [0-9A-Fa-f]{4}
integer ::= "-"? natural
natural ::= "0" | [1-9] [0-9]*
number ::= integer ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?
"""


class _Alternative(NamedTuple):
    """One alternative of a rule: its GBNF, and the rules that it refers to."""

    text: str
    rules: tuple[str, ...] = ()


class Rules:
    """The rules of one grammar.

    For JSON, `ahead` is a lookahead expression for the text after a string or number. With `ahead`,
    the compiler decides which tokens may extend beyond the end of a value. Without `ahead`, the
    matcher must test, for every mask, the tokens that extend beyond a value.
    """

    def __init__(self, languages: Languages, *, ahead: str | None = None) -> None:
        self._languages = languages
        self._ahead = ahead
        self._rules: dict[str, list[_Alternative]] = {}
        self._classes: dict[Ranges, list[str]] = {}
        self._chains: dict[tuple[Ranges, str], str] = {}
        self._written: dict[tuple[int, str], str] = {}  # (language, following text) -> rule name
        self.is_risky = False  # whether compiling the grammar may take long

    def define(self, name: str, alternatives: Iterable[_Alternative]) -> str:
        self._rules[name] = list(alternatives)
        return name

    def new_name(self, kind: str) -> str:
        return f"{kind}_{len(self._rules)}"

    def write(self, root: str, *, common: str = "") -> str:
        """Return the grammar that starts with rule `root`, without alternatives that cannot end."""
        rules = self._rules.items()
        finite = find_finite((name, set(way.rules)) for name, ways in rules for way in ways)
        if root not in finite:
            refuse_grammar(
                "the JSON schema allows no output of finite length; make recursive references "
                "optional or nullable"
            )
        lines, waiting = [f"root ::= {root}"], deque([(root, 0)])
        seen = {root}
        while waiting:
            name, level = waiting.popleft()
            self.is_risky |= level > RISKY_LEVELS
            kept = [way for way in self._rules[name] if finite.issuperset(way.rules)]
            body = " | ".join(way.text for way in kept)
            has_end = self._ahead is not None and name.startswith(("words", "loop", "tail"))
            lines.append(f"{name} ::= ({body}) {self._ahead}" if has_end else f"{name} ::= {body}")
            found = {rule for way in kept for rule in way.rules} - seen
            seen |= found
            waiting += [(rule, level + 1) for rule in sorted(found)]
        return "\n".join(lines) + common

    def add_language(self, language: Language, *, after: str = "") -> str:
        """Add a rule for a text of `language` and then `after`, and return the rule's name.

        The rules form an automaton with one rule per state. The compiler quickly computes the token
        masks of rules with one state. Repeated blocks represent long runs of one character class.
        """
        key = (language.ended, after)
        if key in self._written:
            return self._written[key]
        run = self._languages.read_run(language)
        if run is not None and (run[2] or run[1]) > _MAX_CHAIN:
            name = self._add_run(*run, after=after)
        else:
            most = MAX_STATES if language.plain is None else _MAX_PLAIN_STATES
            states = self._languages.find_automaton(language, most=most)
            name = self.new_name("words")
            if states is not None:
                self._add_states(name, states, after=after)
            else:
                assert language.plain is not None, "a language without `plain` has few states"
                self.define(name, [_Alternative(f"{self._spell(language.plain)} {after}")])
        self._written[key] = name
        return name

    def _add_states(self, name: str, states: list[State], *, after: str) -> None:
        names = [name, *(f"{name}_{place}" for place in range(1, len(states)))]
        self.define(name, [])
        for own, state in zip(names, states, strict=False):
            ways = [_Alternative(after or '""')] if state.is_end else []
            for ranges, target in state.steps:
                ways += self._write_step(ranges, names[target])
            self.define(own, ways)

    def _add_run(self, ranges: Ranges, least: int, most: int | None, *, after: str) -> str:
        """Add a rule for `least` to `most` characters of `ranges`, followed by `after`."""
        parts = []
        if least >= _BLOCK:
            parts.append((self._add_chain(ranges, _BLOCK), f"{{{least // _BLOCK}}}"))
        if least % _BLOCK:
            parts.append((self._add_chain(ranges, least % _BLOCK), ""))
        if most is None:
            loop = self.new_name("loop")
            ways = [_Alternative(after or '""'), *self._write_step(ranges, loop)]
            parts.append((self.define(loop, ways), ""))
        else:
            left = most - least
            blocks = max(0, left - _BLOCK) // _BLOCK
            if blocks:
                parts.append((self._add_chain(ranges, _BLOCK), f"{{0,{blocks}}}"))
            parts.append((self._add_chain(ranges, left - blocks * _BLOCK, last=after or '""'), ""))
        text = " ".join(f"({rule}){limits}" if limits else rule for rule, limits in parts)
        way = _Alternative(text, tuple(rule for rule, _ in parts))
        return self.define(self.new_name("words"), [way])

    def _add_chain(self, ranges: Ranges, length: int, *, last: str = "") -> str:
        """Add a rule for `length` characters, or for up to `length` characters before `last`."""
        start = self._chains.setdefault(
            (ranges, last), f"{'tail' if last else 'block'}_{len(self._chains)}"
        )
        for left in range(length + 1):
            name = f"{start}_{left}"
            if name not in self._rules:
                ways = [_Alternative(last or '""')] if last or not left else []
                ways += self._write_step(ranges, f"{start}_{left - 1}") if left else []
                self.define(name, ways)
        return f"{start}_{length}"

    def _spell(self, part: int) -> str:
        """Return the GBNF of the expression `part`, which has no markers and no complements."""
        pieces = []
        while True:
            match self._languages.nodes[part]:
                case "join", int() as first, int() as rest:
                    pieces.append(self._spell(first))
                    part = rest
                    continue
                case "set", tuple() as ranges:
                    pieces.append(f"({' | '.join(self._spell_class(ranges)) or '[]'})")
                case "or", *parts:
                    ways = [self._spell(one) for one in parts if isinstance(one, int)]
                    pieces.append(f"({' | '.join(ways)})")
                case "repeat", int() as inner, least, most:
                    limits = f"{{{least},{'' if most is None else most}}}"
                    repeated = self._spell(inner)
                    # Nested repeats are slow, because the matcher keeps several counters.
                    self.is_risky |= limits not in ("{0,1}", "{0,}", "{1,}") and "{" in repeated
                    pieces.append(f"({repeated}){limits}")
                case _:
                    pieces.append('""')
            return " ".join(pieces)

    def _write_step(self, ranges: Ranges, following: str) -> list[_Alternative]:
        """Return alternatives for one character of `ranges`, followed by the rule `following`."""
        ways = self._spell_class(ranges)
        return [_Alternative(f"{way} {following}", (following,)) for way in ways]

    def _spell_class(self, ranges: Ranges) -> list[str]:
        """Return the ways to write one character of `ranges`, which in JSON include escapes."""
        if ranges in self._classes:
            return self._classes[ranges]
        literal = _intersect(ranges, _RAW if self._ahead is None else _LITERAL)
        ways = [f"[{''.join(map(_spell_range, literal))}]"] if literal else []
        if self._ahead is not None:
            short = [code for code in _ESCAPES if _holds(ranges, code)]
            if short:
                ways.append(f'"\\\\" [{"".join(_escape_code(ord(_ESCAPES[c])) for c in short)}]')
            for row in (0, 1):
                rest = [c for c in range(16 * row, 16 * row + 16) if _holds(ranges, c)]
                digits = "".join(_HEX[c % 16] for c in rest if c not in _ESCAPES)
                if digits:
                    ways.append(f'"\\\\u00{row}" [{digits}]')
        self._classes[ranges] = ways
        return ways


def json_format(
    schemas: Schemas, shapes: Sequence[Shape], *, whitespace: int = MAX_WHITESPACE
) -> Format:
    """Return the format of JSON that has one of `shapes`. Raises `InvalidRequestError`."""
    rules = JsonRules(schemas, whitespace=whitespace)
    return _spend_grammar(schemas, rules.write(shapes), rules.rules)


def words_format(schemas: Schemas, language: Language) -> Format:
    """Return the format of texts in `language`, without quotes and escapes."""
    rules = Rules(schemas.languages)
    return _spend_grammar(schemas, rules.write(rules.add_language(language)), rules)


def _spend_grammar(schemas: Schemas, text: str, rules: Rules) -> Format:
    schemas.budget.spend(num_bytes=len(text))
    schemas.budget.is_risky |= rules.is_risky
    return {"type": "grammar", "grammar": text}


class JsonRules:
    """Grammar of JSON that follows a schema. Limited white space separates parts of the JSON."""

    def __init__(self, schemas: Schemas, *, whitespace: int) -> None:
        self._schemas = schemas
        ahead = "(=(space [,}\\]:]))" if whitespace else "(=([,}\\]:]))"
        self.rules = Rules(schemas.languages, ahead=ahead)
        self._names: dict[frozenset[int], str] = {}
        self._waiting: list[tuple[str, Nodes]] = []
        self._space = "space" if whitespace else '""'
        self._comma = f'{self._space} "," {self._space}'
        self._colon = f'{self._space} ":" {self._space}'
        self._common = _COMMON.replace("AHEAD", ahead)
        if whitespace:
            self._common += f"space ::= [ \\n\\r\\t]{{0,{whitespace}}}\n"

    def write(self, shapes: Sequence[Shape]) -> str:
        """Return the grammar of values with one of `shapes`. Raises `InvalidRequestError`."""
        self._define("start", shapes)
        while self._waiting:
            name, following = self._waiting.pop()
            self._define(name, self._schemas.shapes(following))
        return self.rules.write("start", common=self._common)

    def _define(self, name: str, shapes: Sequence[Shape]) -> None:
        ways = [self._write_shape(shape) for shape in shapes]
        self._schemas.budget.spend(1 + len(ways), num_bytes=sum(len(way.text) for way in ways))
        self.rules.define(name, ways)

    def _name(self, nodes: Nodes) -> str:
        """Return the name of the rule for values that follow all schemas in `nodes`."""
        key = frozenset(map(id, nodes))
        if key not in self._names:
            self._names[key] = f"value_{len(self._names)}"
            self._waiting.append((self._names[key], nodes))
        return self._names[key]

    def _write_shape(self, shape: Shape) -> _Alternative:
        match shape:
            case LiteralShape(value):
                return _Alternative(self._spell_literal(value))
            case TextShape(None, 0, None):
                return _Alternative("text")
            case TextShape(None, least, most):
                run = self._schemas.languages
                return self._write_text(run.whole(run.repeat(run.any_char, least, most)))
            case TextShape(Language() as language):
                return self._write_text(language)
            case NumberShape(name, None):
                return _Alternative(name)
            case NumberShape(_, Language() as language):
                rule = self.rules.add_language(language)
                return _Alternative(rule, (rule,))
            case ArrayShape():
                return self._write_array(shape)
            case ObjectShape():
                return self._write_object(shape)
        raise AssertionError(shape)

    def _write_text(self, language: Language) -> _Alternative:
        rule = self.rules.add_language(language, after='"\\""')
        return _Alternative(f'"\\"" {rule}', (rule,))

    def _spell_literal(self, value: Any) -> str:
        self._schemas.budget.spend()
        match value:
            case dict():
                members = (
                    f"{_quote(spell_json(key))} {self._colon} {self._spell_literal(part)}"
                    for key, part in value.items()
                )
                inside = f" {self._comma} ".join(members)
                return f'"{{" {self._space} {inside} {self._space if value else ""} "}}"'
            case list():
                inside = f" {self._comma} ".join(map(self._spell_literal, value))
                return f'"[" {self._space} {inside} {self._space if value else ""} "]"'
            case float() if value.is_integer() and abs(value) < 1e25:
                return f'"{int(value)}" ".0"?'
        return _quote(spell_json(value))

    def _write_array(self, shape: ArrayShape) -> _Alternative:
        names = [self._name(nodes) for nodes in shape.first]
        entries = [(_Alternative(name, (name,)), True) for name in names]
        inside = self._write_entries(shape, entries, self._name(shape.others), is_tuple=True)
        return _Alternative(f'"[" {self._space} {inside} "]"', (inside,))

    def _write_object(self, shape: ObjectShape) -> _Alternative:
        entries = []
        for key, nodes in shape.listed.items():
            value = self._name(nodes)
            text = f"{_quote(spell_json(key))} {self._colon} {value}"
            entries.append((_Alternative(text, (value,)), key in shape.required))
        inside = self._write_entries(shape, entries, self._write_other(shape), is_tuple=False)
        return _Alternative(f'"{{" {self._space} {inside} "}}"', (inside,))

    def _write_entries(
        self,
        shape: ArrayShape | ObjectShape,
        entries: list[tuple[_Alternative, bool]],
        other: str | None,
        *,
        is_tuple: bool,
    ) -> str:
        """Add rules for the members of an object or the items of an array. Return the first rule.

        `entries` are the listed members or items in order, each with a flag that marks required
        entries. The rule `other` writes one entry that is not listed. A tuple may end after any
        entry. An object may omit entries that are not required. The name of a rule contains the
        index of the next listed entry and the number of written entries.
        """
        start, rules, length = self.rules.new_name("entries"), self.rules, len(entries)
        least, most = shape.least, shape.most
        last = max(1, least, most or 0)
        counted = 1 if is_tuple else min(last, length + 1)
        self._schemas.budget.spend(length * (1 if counted == 1 else 16 * counted))

        def name_of(place: int, count: int) -> str:
            return f"{start}_{place}_{min(count, last)}"

        def write_entry(place: int, count: int) -> _Alternative:
            (text, needed), following = entries[place][0], name_of(place + 1, count + 1)
            lead = self._comma if count else ""
            return _Alternative(f"{lead} {text} {following}", (*needed, following))

        def write_end(count: int) -> list[_Alternative]:
            """Return the alternatives that follow all listed entries. `count`: written entries."""
            ways = [_Alternative(self._space if count else '""')] if count >= least else []
            if other is None or (most is not None and count >= most):
                return ways
            if not count:
                following = name_of(length, 1)
                return [*ways, _Alternative(f"{other} {following}", (other, following))]
            fewest = max(1, least - count)
            limit = "" if most is None else max(fewest, most - count)
            text = f"({self._comma} {other}){{{fewest},{limit}}} {self._space}"
            return [*ways, _Alternative(text, (other,))]

        def write_rest(place: int, count: int) -> list[_Alternative]:
            if place == length:
                return write_end(count)
            is_full, is_required = most is not None and count >= most, entries[place][1]
            ways = [] if is_full else [write_entry(place, count)]
            if is_tuple:
                ended = _Alternative(self._space if count else '""')
                return [ended, *ways] if count >= least else ways
            skipped = name_of(place + 1, count)
            return ways if is_required else [*ways, _Alternative(skipped, (skipped,))]

        # The first rule lists all entries that can be first, because a chain of optional rules
        # compiles slowly.
        first = next((place for place, (_, needed) in enumerate(entries) if needed), length)
        begin = [] if is_tuple or most == 0 else [write_entry(place, 0) for place in range(first)]
        rules.define(name_of(0, 0), [*begin, *write_rest(0 if is_tuple else first, 0)])
        for place in range(1, length + 1) or (0,):
            written = min(max(place, 1), last)
            for count in range(written if is_tuple else 1, written + 1):
                rules.define(name_of(place, count), write_rest(place, count))
        return name_of(0, 0)

    def _write_other(self, shape: ObjectShape) -> str | None:
        """Add a rule for one unlisted member, or return None if unlisted members are forbidden."""
        ways = []
        for language, nodes in shape.others:
            value = self._name(nodes)
            key = _Alternative("text") if language is None else self._write_text(language)
            ways.append(_Alternative(f"{key.text} {self._colon} {value}", (*key.rules, value)))
        return self.rules.define(self.rules.new_name("other"), ways) if ways else None


def spell_json(value: Any) -> str:
    """Return `value` as JSON without needless escapes. Raises `InvalidRequestError`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        refuse_grammar(f"the JSON schema lists {value!r}, which is not a finite number")
    has_surrogates = any(0xD800 <= ord(char) < 0xE000 for char in text)
    return json.dumps(value) if has_surrogates else text  # `dumps` escapes surrogates


def _quote(text: str) -> str:
    return '"' + "".join(_escape_code(ord(char)) for char in text) + '"'


def _spell_range(bounds: tuple[int, int]) -> str:
    first, last = map(_escape_code, bounds)
    return first if bounds[0] == bounds[1] else f"{first}-{last}"


def _escape_code(code: int) -> str:
    if code < 128 and (chr(code).isalnum() or chr(code) in " _,;:.<>/="):
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _holds(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _intersect(one: Ranges, other: Ranges) -> Ranges:
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return unite((first, last) for first, last in pairs if first <= last)
