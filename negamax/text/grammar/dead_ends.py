"""Search for dead ends: points of a grammar from which an output can never end."""

import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from enum import IntEnum
from functools import cache
from typing import NamedTuple, TypeVar

from negamax.base.log import get_logger

logger = get_logger(__name__)

# Versions of serialized grammars that xgrammar 0.2.8 and 0.2.9 write. Both versions have the fields
# that this module reads, with the same meaning.
VERSIONS = ("v16", "v18")

RuleT = TypeVar("RuleT", bound=Hashable)

_LAST_CHARACTER = 0x10FFFF


class _Kind(IntEnum):
    """Expression kinds in a serialized grammar. Comments list the integers that follow a kind."""

    STRING = 0  # bytes of the text
    CHARACTERS = 1  # 1 if the class is negated, else 0; first and last character of each range
    ANY_CHARACTERS = 2  # the integers of CHARACTERS; the class repeats any number of times
    EMPTY = 3
    RULE = 4  # index of the rule to which the expression refers
    SEQUENCE = 5  # indices of consecutive expressions
    CHOICES = 6  # indices of alternative expressions
    TAG_DISPATCH = 7  # each tag's text and rule; 1 if more tags may follow, else 0; excluded texts
    REPEAT = 8  # index of a rule; minimum and maximum number of repeats
    TOKEN = 9  # ids of the allowed tokens.
    # `TOKEN_TAG_DISPATCH`: number of tags, then TAG_DISPATCH's fields with tokens instead of texts
    TOKEN_TAG_DISPATCH = 11


class _Symbol(NamedTuple):
    """A part of an alternative of a rule. If `rule` is None, the part is text or tokens."""

    rule: int | None = None
    is_optional: bool = False
    can_end: bool = True  # whether the part can produce a finite text
    writes: bool = True  # whether the part can produce a text that is not empty


def find_dead_end(serialized: str, *, stop_token_ids: Collection[int]) -> str | None:
    """Return a message if an output can reach a dead end, else None.

    After a dead end, the output cannot end, and maybe no token is allowed. `stop_token_ids` end
    the output and are not tags. The search takes time linear in the size of the grammar.
    """
    grammar = json.loads(serialized)
    if grammar["__VERSION__"] not in VERSIONS:
        _warn_of_version(grammar["__VERSION__"])
        return None
    starts, data = grammar["grammar_expr_indptr"], grammar["grammar_expr_data"]
    parts = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    rules = [
        list(_read_alternatives(parts, rule[1], frozenset(stop_token_ids)))
        for rule in grammar["rules"]
    ]
    finite = find_finite(
        (owner, [each.rule for each in symbols if each.rule is not None and not each.is_optional])
        for owner, alternatives in enumerate(rules)
        for symbols in alternatives
        if all(symbol.can_end for symbol in symbols)
    )
    can_end = [rule in finite for rule in range(len(rules))]
    root = grammar["root_rule_id"]
    if not can_end[root]:
        return "the grammar allows no output of finite length"
    stuck = _find_stuck(rules, root, can_end, _find_writing(rules, can_end))
    if stuck is None:
        return None
    return f"rule {grammar['rules'][stuck][0]!r} of the grammar can begin an output that cannot end"


@cache
def _warn_of_version(version: str) -> None:
    logger.warning(
        "Negamax cannot refuse grammars that never end, because the installed xgrammar writes "
        "version %s and Negamax reads %s; install xgrammar 0.2.9",
        version,
        " and ".join(VERSIONS),
    )


def _read_alternatives(
    parts: list[list[int]], place: int, stop_token_ids: frozenset[int]
) -> Iterator[list[_Symbol]]:
    kind, _, *items = parts[place]
    match kind:
        case _Kind.CHOICES:
            for item in items:
                yield from _read_alternatives(parts, item, stop_token_ids)
        case _Kind.SEQUENCE:
            yield [_read_symbol(parts[item], stop_token_ids) for item in items]
        case _Kind.TAG_DISPATCH | _Kind.TOKEN_TAG_DISPATCH:
            tags = items[:-2] if kind == _Kind.TAG_DISPATCH else items[1 : 1 + 2 * items[0]]
            yield []
            for rule in tags[1::2]:
                yield [_Symbol(), _Symbol(rule)]
        case _:
            yield [_read_symbol(parts[place], stop_token_ids)]


def _read_symbol(part: list[int], stop_token_ids: frozenset[int]) -> _Symbol:
    kind, _, *items = part
    match kind:
        case _Kind.STRING:
            return _Symbol(writes=bool(items))
        case _Kind.CHARACTERS:
            return _Symbol(can_end=_has_characters(items))
        case _Kind.ANY_CHARACTERS:
            return _Symbol(writes=_has_characters(items))
        case _Kind.EMPTY:
            return _Symbol(writes=False)
        case _Kind.RULE:
            return _Symbol(items[0])
        case _Kind.REPEAT:
            return _Symbol(items[0], is_optional=items[1] == 0)
        case _Kind.TOKEN:
            return _Symbol(can_end=not stop_token_ids.issuperset(items))
    return _Symbol()


def _has_characters(items: list[int]) -> bool:
    """Return whether a class of characters contains any character."""
    is_negated, *ends = items
    ranges = sorted(zip(ends[::2], ends[1::2], strict=True))
    if not is_negated:
        return any(first <= min(last, _LAST_CHARACTER) for first, last in ranges)
    following = 0
    for first, last in ranges:
        if first > following:
            return True
        following = max(following, last + 1)
    return following <= _LAST_CHARACTER


def find_finite(ways: Iterable[tuple[RuleT, Collection[RuleT]]]) -> set[RuleT]:
    """Return the rules that produce a finite text. `ways`: (rule, rules in one alternative).

    A rule is returned if all rules in at least one of its `ways` are returned.
    """
    finite: set[RuleT] = set()
    found: list[RuleT] = []
    users: dict[RuleT, list[tuple[RuleT, list[int]]]] = defaultdict(list)
    for owner, needed in ways:
        left = [len(needed)]
        for rule in needed:
            users[rule].append((owner, left))
        if not needed:
            found.append(owner)
    while found:
        rule = found.pop()
        if rule in finite:
            continue
        finite.add(rule)
        for owner, left in users[rule]:
            left[0] -= 1
            if left[0] == 0:
                found.append(owner)
    return finite


def _find_writing(rules: list[list[list[_Symbol]]], can_end: list[bool]) -> list[bool]:
    """Return for each rule whether the rule produces a finite text that is not empty."""
    found = find_finite(
        (owner, () if symbol.rule is None else (symbol.rule,))
        for owner, alternatives in enumerate(rules)
        for symbols in alternatives
        if all(_can_end(symbol, can_end) for symbol in symbols)
        for symbol in symbols
        if symbol.rule is not None or symbol.writes
    )
    return [rule in found for rule in range(len(rules))]


def _can_end(symbol: _Symbol, can_end: list[bool]) -> bool:
    if symbol.rule is None:
        return symbol.can_end
    return symbol.is_optional or can_end[symbol.rule]


def _find_stuck(
    rules: list[list[list[_Symbol]]], root: int, can_end: list[bool], writes: list[bool]
) -> int | None:
    """Return a rule, reachable from `root`, that can write text but cannot end, or None."""
    seen, waiting = {root}, [root]
    while waiting:
        owner = waiting.pop()
        for symbols in rules[owner]:
            has_written = False
            for symbol in symbols:
                if symbol.rule is not None and symbol.rule not in seen:
                    seen.add(symbol.rule)
                    waiting.append(symbol.rule)
                if not _can_end(symbol, can_end):
                    if has_written:
                        return owner
                    break
                has_written |= symbol.writes if symbol.rule is None else writes[symbol.rule]
    return None
