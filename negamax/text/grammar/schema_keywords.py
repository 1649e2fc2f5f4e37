"""Read single keywords of JSON schemas, including keywords of older drafts."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from negamax.text.grammar.shapes import Nodes
from negamax.text.schema_walk import get_list, get_map

_LARGEST = Decimal("1e308")  # lower bounds <= -_LARGEST and upper bounds >= _LARGEST are ignored
MAX_COUNT = 1_000_000_000  # upper limits of lengths and counts above this number are ignored

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?"
_ZONE = r"([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_HEX = r"[0-9a-fA-F]{1,4}"
_CLOCK_SPAN = r"T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DATE_SPAN = r"([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"

# Grammars enforce these string formats if the schema states a type, and ignore other formats.
FORMATS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_CLOCK}{_ZONE}?$",
    "date-time": rf"^{_DATE}[Tt]{_CLOCK}{_ZONE}$",
    "duration": rf"^P({_DATE_SPAN}({_CLOCK_SPAN})?|{_CLOCK_SPAN}|[0-9]+W)$",
    "uuid": r"^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
    "ipv4": rf"^{_IPV4}$",
    "ipv6": rf"^(?=[^:]*(:[^:]*){{2,7}}$)(?!.*::.*::)(?!:[^:])(?!.*[^:]:$)"
    rf"(?=.*::|([^:]*:){{6}}([^:]*:[^:]*|.*\.)[^:]*$)({_HEX})?(:({_HEX})?)*(:{_IPV4})?$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "email": rf"^{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=\[\]-]|%[0-9A-Fa-f]{2})*$",
}


def find_members(node: Mapping[str, Any], name: str | None, matched: Iterable[str]) -> Nodes:
    """Return schemas of member `name` (None: unlisted). `matched`: patterns that match `name`."""
    found = []
    if name is not None and name in (listed := get_map(node, "properties")):
        found.append(listed[name])
    found += [schema for p, schema in get_map(node, "patternProperties").items() if p in matched]
    return tuple(found) if found else (node.get("additionalProperties", True),)


def split_nullable(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: node[key] for key in node if key not in ("nullable", "$id")}, {"type": "null"}]


def drop_values(node: Mapping[str, Any]) -> dict[str, Any]:
    skipped = ("const", "enum", "anyOf", "oneOf", "allOf", "$ref", "$id", "type")
    return {key: node[key] for key in node if key not in skipped}


def read_items(node: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of the first items, and the schema of later items (None: any value)."""
    items = node.get("items")
    if isinstance(items, list):  # drafts before 2020-12 list the first items in `items`
        return items, node.get("additionalItems")
    return get_list(node, "prefixItems"), items


def read_number(value: Any) -> Decimal | None:
    """Return `value` as an exact decimal number if it is finite, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Decimal(repr(value)) if is_number and abs(value) < math.inf else None


def read_bounds(
    node: Mapping[str, Any],
) -> tuple[list[tuple[Decimal, bool]], list[tuple[Decimal, bool]]]:
    """Return (bound, is exclusive) for lower bounds and for upper bounds of numbers in `node`."""
    found: list[list[tuple[Decimal, bool]]] = []
    for sign, side in ((-1, "inimum"), (1, "aximum")):
        limit, exclusive = f"m{side}", f"exclusiveM{side}"
        closed, opened = read_number(node.get(limit)), read_number(node.get(exclusive))
        bounds = [] if closed is None else [(closed, node.get(exclusive) is True)]
        bounds += [] if opened is None else [(opened, True)]
        found.append([bound for bound in bounds if sign * bound[0] < _LARGEST])
    return found[0], found[1]


def read_limits(branch: Nodes, lower: str, upper: str) -> tuple[int, int | None]:
    """Return the largest lower limit and the smallest upper limit in `branch` (None: no limit)."""
    lows = [count for node in branch if (count := read_count(node.get(lower))) is not None]
    highs = [count for node in branch if (count := read_count(node.get(upper))) is not None]
    most = min(highs, default=None)
    return max(lows, default=0), None if most is None or most > MAX_COUNT else most


def read_count(value: Any) -> int | None:
    """Return a limit of a schema, or None for a malformed limit."""
    number = read_number(value)
    is_count = number is not None and number >= 0 and number == number.to_integral_value()
    return int(number) if number is not None and is_count else None
