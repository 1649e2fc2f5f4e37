"""Compute regular languages, with intersections and complements, by derivatives of expressions.

A `Languages` object assigns an integer to each expression. Equal expressions have the same integer.
The markers `BEGIN` and `END` represent the anchors of patterns. Markers are integers outside the
range of Unicode. Source: Owens, Reppy, Turon, "Regular-expression derivatives re-examined" (2009).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from negamax.text.grammar.dead_ends import find_finite

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint pairs (first and last character)

BEGIN, LAST_CHARACTER, END = -1, 0x10FFFF, 0x110000
MAX_STATES = 1000  # maximum states of one automaton
MAX_STEPS = 30_000  # maximum transitions of an automaton; a character range is one transition


class Language(NamedTuple):
    """A set of texts."""

    ended: int  # expression that matches the texts of the set, each followed by the marker `END`
    plain: int | None = None  # expression that matches the texts, without markers and complements


class State(NamedTuple):
    is_end: bool
    steps: list[tuple[Ranges, int]]  # (characters, next state); the ranges are disjoint


class Languages:
    def __init__(self) -> None:
        self.nodes: list[tuple[object, ...]] = []  # expression -> operator and operands
        self.nullable: list[bool] = []
        self._is_plain: list[bool] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._derived: dict[tuple[int, int], int] = {}
        self._cuts: dict[int, frozenset[int]] = {}
        # expression -> states of its automaton, or a number of states that the automaton exceeds
        self._automata: dict[int, list[State] | int] = {}
        self.none = self._intern(("set", ()), is_nullable=False)
        self.empty = self._intern(("empty",), is_nullable=True)
        self.everything = self.repeat(self.chars(((BEGIN, END),)))
        self.any_char = self.chars(((0, LAST_CHARACTER),))
        self.begin, self.end = self.chars(((BEGIN, BEGIN),)), self.chars(((END, END),))

    # --- expressions ---

    def chars(self, ranges: Ranges) -> int:
        is_plain = not ranges or (ranges[0][0] > BEGIN and ranges[-1][1] < END)
        return self._intern(("set", ranges), is_nullable=False, is_plain=is_plain)

    def text(self, text: str) -> int:
        return self.join([self.chars(((ord(char), ord(char)),)) for char in text])

    def join(self, parts: Sequence[int]) -> int:
        flat: list[int] = []
        for part in parts:
            while self.nodes[part][0] == "join":  # only the second operand can be a join
                flat.append(_int(self.nodes[part][1]))
                part = _int(self.nodes[part][2])
            flat.append(part)
        if self.none in flat:
            return self.none
        flat = [part for part in flat if part != self.empty]
        joined = flat.pop() if flat else self.empty
        for part in reversed(flat):
            joined = self._intern(
                ("join", part, joined),
                is_nullable=self.nullable[part] and self.nullable[joined],
                is_plain=self._is_plain[part] and self._is_plain[joined],
            )
        return joined

    def either(self, parts: Iterable[int]) -> int:
        found = self._flatten("or", parts) - {self.none}
        if self.everything in found:
            return self.everything
        sets = [part for part in found if self.nodes[part][0] == "set"]
        if len(sets) > 1:
            merged = unite(bounds for part in sets for bounds in self._ranges(part))
            found = (found - set(sets)) | {self.chars(merged)}
        if len(found) < 2:
            return next(iter(found), self.none)
        return self._intern(
            ("or", *sorted(found)),
            is_nullable=any(self.nullable[part] for part in found),
            is_plain=all(self._is_plain[part] for part in found),
        )

    def both(self, parts: Iterable[int]) -> int:
        found = self._flatten("and", parts) - {self.everything}
        if self.none in found:
            return self.none
        if len(found) < 2:
            return next(iter(found), self.everything)
        is_nullable = all(self.nullable[part] for part in found)
        return self._intern(("and", *sorted(found)), is_nullable=is_nullable, is_plain=False)

    def complement(self, part: int) -> int:
        if self.nodes[part][0] == "not":
            return _int(self.nodes[part][1])
        if part in (self.none, self.everything):
            return self.everything if part == self.none else self.none
        return self._intern(("not", part), is_nullable=not self.nullable[part], is_plain=False)

    def repeat(self, part: int, least: int = 0, most: int | None = None) -> int:
        if most == 0 or part == self.empty:
            return self.empty
        if part == self.none:
            return self.empty if least == 0 else self.none
        if (least, most) == (1, 1):
            return part
        is_nullable = least == 0 or self.nullable[part]
        key = ("repeat", part, least, most)
        return self._intern(key, is_nullable=is_nullable, is_plain=self._is_plain[part])

    # --- languages ---

    def whole(self, part: int) -> Language:
        """Return the language of the texts that `part` matches as a whole."""
        return Language(self.join([part, self.end]), part if self._is_plain[part] else None)

    def containing(self, alternatives: Sequence[tuple[Sequence[int], bool]]) -> Language:
        """Return the language of the texts that contain a match of any of the alternatives.

        Each alternative is a pair: a sequence of expressions or markers, and a flag. The flag is
        set if the last expression matches up to the end of the text.
        """
        anything = self.repeat(self.any_char)
        plain: list[int] = []
        for parts, is_whole in alternatives:
            first = parts[:1] == [self.begin]
            last = parts[-1:] == [self.end] and len(parts) > first
            inner = list(parts[first : len(parts) - last])
            if is_whole or not all(self._is_plain[part] for part in inner):
                break
            lead, rest = [] if first else [anything], [] if last else [anything]
            plain.append(self.join([*lead, *inner, *rest]))
        else:
            return self.whole(self.either(plain))
        searched = self.either(self.join([*parts, self.everything]) for parts, _ in alternatives)
        return Language(self.derive(self.join([self.everything, searched]), BEGIN))

    def all_of(self, parts: Sequence[Language]) -> Language:
        distinct = list(dict.fromkeys(parts))
        runs = [self.read_run(part) for part in distinct]
        if len(distinct) == 1:
            return distinct[0]
        if distinct and all(run is not None for run in runs):
            return self.whole(self._intersect_runs([run for run in runs if run is not None]))
        if not distinct:
            return self.whole(self.repeat(self.any_char))
        return Language(self.both(part.ended for part in distinct))

    def any_of(self, parts: Sequence[Language]) -> Language:
        plain = [part.plain for part in parts if part.plain is not None]
        if len(plain) == len(parts):
            return self.whole(self.either(plain))
        return Language(self.either(part.ended for part in parts))

    def invert(self, language: Language) -> Language:
        return Language(self.complement(language.ended))

    def contains(self, language: Language, text: str) -> bool:
        state = language.ended
        for char in text:
            state = self.derive(state, ord(char))
        return self.nullable[self.derive(state, END)]

    def find_automaton(self, language: Language, *, most: int = MAX_STATES) -> list[State] | None:
        """Return all states from which an end state can be reached, with the start state first.

        An empty language has no states. Returns None if there are more than `most` states.
        """
        known = self._automata.get(language.ended)
        if known is None or (isinstance(known, int) and known < most):
            known = self._automata[language.ended] = self._find_states(language.ended, most)
        return None if isinstance(known, int) else known

    def _find_states(self, start: int, most: int) -> list[State] | int:
        """Return the automaton's states, or a limit if the automaton has more states."""
        numbers, order, num_steps = {start: 0}, [start], 0
        steps: list[list[tuple[Ranges, int]]] = []
        for state in order:  # `order` grows within the loop
            found: dict[int, list[tuple[int, int]]] = {}
            cuts = sorted(cut for cut in self._find_cuts(state) if 0 < cut <= LAST_CHARACTER)
            for first, following in zip([0, *cuts], [*cuts, END], strict=True):
                target = self.derive(state, first)
                if target != self.none:
                    found.setdefault(target, []).append((first, following - 1))
            for target in found:
                if target not in numbers:
                    numbers[target] = len(order)
                    order.append(target)
            num_steps += len(cuts)
            if len(order) > most or num_steps > MAX_STEPS:
                return MAX_STATES if num_steps > MAX_STEPS else most
            steps.append([(unite(ranges), numbers[target]) for target, ranges in found.items()])
        return _keep_live([self.nullable[self.derive(state, END)] for state in order], steps)

    def derive(self, part: int, char: int) -> int:
        """Return the derivative of `part`: the expression of the texts that may follow `char`."""
        key = (part, char)
        known = self._derived.get(key)
        if known is None:
            known = self._derived[key] = self._derive(self.nodes[part], char)
        return known

    def _derive(self, node: tuple[object, ...], char: int) -> int:
        match node:
            case "set", tuple() as ranges:
                is_in = any(first <= char <= last for first, last in ranges)
                return self.empty if is_in else self.none
            case "join", int() as first, int() as rest:
                derived = self.join([self.derive(first, char), rest])
                if not self.nullable[first]:
                    return derived
                return self.either([derived, self.derive(rest, char)])
            case "or", *parts:
                return self.either([self.derive(_int(part), char) for part in parts])
            case "and", *parts:
                return self.both([self.derive(_int(part), char) for part in parts])
            case "not", int() as inner:
                return self.complement(self.derive(inner, char))
            case "repeat", int() as inner, int() as least, most:
                left = None if most is None else _int(most) - 1
                rest = self.repeat(inner, max(0, least - 1), left)
                return self.join([self.derive(inner, char), rest])
        return self.none

    def _find_cuts(self, part: int) -> frozenset[int]:
        """Return the first characters of the ranges in which all derivatives are equal."""
        known = self._cuts.get(part)
        if known is not None:
            return known
        match self.nodes[part]:
            case "set", tuple() as ranges:
                found = frozenset(cut for first, last in ranges for cut in (first, last + 1))
            case "join", int() as first, int() as rest:
                found = self._find_cuts(first)
                if self.nullable[first]:
                    found |= self._find_cuts(rest)
            case (("or" | "and"), *parts):
                found = frozenset[int]().union(*(self._find_cuts(_int(inner)) for inner in parts))
            case (("not" | "repeat"), int() as inner, *_):
                found = self._find_cuts(inner)
            case _:
                found = frozenset()
        self._cuts[part] = found
        return found

    def _intern(self, node: tuple[object, ...], *, is_nullable: bool, is_plain: bool = True) -> int:
        number = self._known.get(node)
        if number is None:
            number = self._known[node] = len(self.nodes)
            self.nodes.append(node)
            self.nullable.append(is_nullable)
            self._is_plain.append(is_plain)
        return number

    def _flatten(self, operator: str, parts: Iterable[int]) -> set[int]:
        found: set[int] = set()
        for part in parts:
            node = self.nodes[part]
            found.update(map(_int, node[1:]) if node[0] == operator else [part])
        return found

    def _ranges(self, part: int) -> Ranges:
        ranges = self.nodes[part][1]
        assert isinstance(ranges, tuple)
        return ranges

    def read_run(self, language: Language) -> tuple[Ranges, int, int | None] | None:
        """Return (class, least, most) if `language` repeats one character class, else None."""
        if language.plain is None:
            return None
        match self.nodes[language.plain]:
            case ("empty",):
                return ((0, LAST_CHARACTER),), 0, 0
            case "set", tuple() as ranges if ranges:
                return ranges, 1, 1
            case "repeat", int() as inner, int() as least, most if self.nodes[inner][0] == "set":
                return self._ranges(inner), least, None if most is None else _int(most)
        return None

    def _intersect_runs(self, runs: list[tuple[Ranges, int, int | None]]) -> int:
        ranges = runs[0][0]
        for others, *_ in runs[1:]:
            ranges = invert(unite((*invert(ranges), *invert(others))))
        limits = [most for *_, most in runs if most is not None]
        least, most = max(least for _, least, _ in runs), min(limits, default=None)
        if most is not None and most < least:
            return self.none
        return self.repeat(self.chars(ranges), least, most)


def invert(ranges: Ranges) -> Ranges:
    """Return the characters that are not in `ranges`."""
    found, following = [], 0
    for first, last in ranges:
        if first > following:
            found.append((following, first - 1))
        following = last + 1
    return (*found, (following, LAST_CHARACTER)) if following <= LAST_CHARACTER else tuple(found)


def unite(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of `ranges` as sorted and disjoint ranges."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def _keep_live(is_end: Collection[bool], steps: list[list[tuple[Ranges, int]]]) -> list[State]:
    ways: list[tuple[int, tuple[int, ...]]] = [(n, ()) for n, ends in enumerate(is_end) if ends]
    ways += [(n, (target,)) for n, following in enumerate(steps) for _, target in following]
    live = find_finite(ways)
    if 0 not in live:
        return []
    places = {number: place for place, number in enumerate(sorted(live))}
    return [
        State(ends, [(ranges, places[target]) for ranges, target in following if target in live])
        for number, (ends, following) in enumerate(zip(is_end, steps, strict=True))
        if number in live
    ]


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
