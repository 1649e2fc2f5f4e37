"""Convert arguments of calls to JSON by the schemas of the declared tools.

Models write arguments as bare text, so only the schema decides whether `5` is a number or a string.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from negamax.base.pieces import count_nesting
from negamax.text.schema_walk import find_types, get_list, get_map, walk_alternatives

# If a schema allows only these types, the argument is streamed as a string.
TEXT_TYPES = frozenset({"string", "null"})

CONTAINERS = frozenset({"object", "array"})
_ODD = re.compile(r"(?=.*[<>\"]).{1,512}", re.DOTALL)
# Names matching _ODD are listed up to this total length. Tags of other names end at the first ">".
_MAX_ODD_CHARS = 20_000
_MAX_DIGITS = 4300  # `json.loads` refuses integers with more digits.
# `_MAX_NESTING`: levels of JSON that chat templates can render. Python 3.11 reads about 1,000
# levels, 3.12 and newer 10,000.
_MAX_NESTING = 64
# null, booleans and numbers in the spelling of chat templates
_LITERAL = re.compile(
    r"(?P<null>null)|(?P<boolean>true|false)|(?P<integer>-?(?:0|[1-9][0-9]*))"
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
)
_POINT_ZERO = re.compile(r"([+-]?[0-9]+)\.0*")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class ToolSchemas:
    """The tools that a request declares, as objects of the OpenAI API or as `function` objects."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._roots: dict[str, Any] = {}
        self._arguments: dict[str, ValueSchema] = {}  # tool name -> schema, added on first use
        self._folded: dict[str, list[str]] = {}  # case-folded name -> declared names
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                name = function["name"]
                if name not in self._roots:
                    self._roots[name] = function.get("parameters")
                    self._folded.setdefault(name.casefold(), []).append(name)

    def list_names(self) -> tuple[list[str], list[str]]:
        """Return the names of tools, and of members at any depth, that contain <, > or "."""
        members: dict[str, None] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if isinstance(node, list):
                stack.extend(node)
            elif isinstance(node, Mapping):
                stack.extend(node.values())
                members.update(dict.fromkeys(filter(_ODD.fullmatch, get_map(node, "properties"))))
        return _limit(list(filter(_ODD.fullmatch, self._roots))), _limit(members)

    def declares(self, tool: str) -> bool:
        return tool in self._roots

    def declared_name(self, name: str) -> str | None:
        """Return the declared tool `name`, or the only tool with this name in any letter case."""
        if name in self._roots:
            return name
        alike = self._folded.get(name.casefold(), ())
        return alike[0] if len(alike) == 1 else None

    def arguments(self, tool: str) -> ValueSchema:
        """Return the schema of the arguments of `tool`, which is empty for an undeclared tool."""
        if tool not in self._arguments:
            root = self._roots.get(tool)
            self._arguments[tool] = ValueSchema([root], root=root, known={})
        return self._arguments[tool]


class ValueSchema:
    """Types, members and items that a JSON schema allows for one value.

    Alternatives (anyOf, oneOf, allOf) and local references, including recursive references, are
    joined: a value is allowed if at least one alternative allows the value.
    """

    def __init__(
        self, schemas: Sequence[Any], *, root: Any, known: dict[tuple[int, ...], ValueSchema]
    ) -> None:
        """`root` is the document that references refer to. `known` caches the schemas in `root`."""
        # JSON types that the schema allows; empty if unknown, so that the value is text
        self.types = find_types(schemas, root=root)
        self._root = root
        self._known = known
        self._listed: dict[str, list[Any]] = {}  # member -> its schemas
        self._others: list[Any] = []
        # for each alternative: schemas of the first items, and the schema of all later items
        self._arrays: list[tuple[list[Any], Any]] = []
        self._texts: set[str] = set()  # strings in enum and const
        self._required: set[str] = set()
        for node in walk_alternatives(schemas, root=root):
            for key, schema in get_map(node, "properties").items():
                self._listed.setdefault(key, []).append(schema)
            self._others.append(node.get("additionalProperties"))
            self._others.extend(get_map(node, "patternProperties").values())
            items, first = node.get("items"), node.get("prefixItems")
            first = next((given for given in (first, items) if isinstance(given, list)), [])
            self._arrays.append((first, items))
            required = get_list(node, "required")
            self._required.update(name for name in required if isinstance(name, str))
            values = [*get_list(node, "enum"), node.get("const")]
            self._texts.update(value for value in values if isinstance(value, str))

    def missing(self, given: Collection[str]) -> str:
        """If `given` lacks only one listed, or only one required member, return it, else ""."""
        listed = [name for name in self._listed if name not in given]
        required = [name for name in listed if name in self._required]
        return next((only[0] for only in (listed, required) if len(only) == 1), "")

    @property
    def names(self) -> Set[str]:
        return self._listed.keys()

    def lists(self, name: str) -> bool:
        """Return whether the schema or one of its alternatives lists the member `name`."""
        return name in self._listed

    def member(self, name: str) -> ValueSchema:
        """Return the schema of the member `name`, or of unlisted members if `name` is unlisted."""
        return self._view(self._listed.get(name, self._others))

    def item(self, place: int) -> ValueSchema:
        return self._view(
            [first[place] if place < len(first) else others for first, others in self._arrays]
        )

    def convert(self, text: str) -> str:
        """Convert `text` to JSON by `json_value`. A string in enum or const stays a string."""
        return _encode(text) if text in self._texts else json_value(text, self.types)

    def _view(self, schemas: list[Any]) -> ValueSchema:
        schemas = [schema for schema in schemas if isinstance(schema, Mapping)]
        key = tuple(map(id, schemas))  # ids stay unique, because the root keeps the schemas alive
        view = self._known.get(key)
        if view is None:
            view = self._known[key] = ValueSchema(schemas, root=self._root, known=self._known)
        return view


def _limit(names: Iterable[str]) -> list[str]:
    """Return as many of the first names as fit in _MAX_ODD_CHARS characters."""
    names = list(names)
    ends = itertools.accumulate(map(len, names))
    return [name for name, end in zip(names, ends, strict=True) if end <= _MAX_ODD_CHARS]


@dataclass(frozen=True, slots=True)
class WaitingMember:
    """A member that is written at the end of its object."""

    name: str
    json: str
    json_in_list: str  # JSON of the items that this value adds to the list of a repeated name


def group_members(members: Iterable[WaitingMember]) -> Iterator[tuple[str, str]]:
    """Yield the name and the JSON of each member. A repeated name gets a list of its values."""
    by_name: dict[str, list[WaitingMember]] = {}
    for member in members:
        by_name.setdefault(member.name, []).append(member)
    for name, alike in by_name.items():
        items = ", ".join(member.json_in_list for member in alike if member.json_in_list)
        yield name, alike[0].json if len(alike) == 1 else f"[{items}]"


def json_value(text: str, types: frozenset[str]) -> str:
    """Convert the argument `text` to JSON by the first type that fits, else to a string.

    The order of types is null, integer, number, boolean, object, array, string. If a string is
    allowed, only JSON literals become null, booleans or numbers, so `007` and `True` stay strings.
    If no string is allowed, white space, letter case and the spelling of numbers do not matter.
    """
    has_string = "string" in types
    if has_string:
        literal = _LITERAL.fullmatch(text)
        kind = literal.lastgroup if literal else None
        types = types & {kind, "number" if kind == "integer" else kind, *CONTAINERS}
    if "null" in types and text.strip().lower() == "null":
        return "null"
    for name, converter in _CONVERTERS.items():
        converted = converter(text) if name in types else None
        if converted is not None:
            return converted
    # accept an object in place of an array, and an array in place of an object
    if types & CONTAINERS and not has_string:
        return _convert_container(text, (dict, list)) or _encode(text)
    return _encode(text)


json_string = encode_basestring


def json_string_body(text: str) -> str:
    return encode_basestring(text)[1:-1]


def parse_json(text: str) -> Any:
    """Parse strict JSON. Raises `ValueError` for invalid JSON, NaN, infinities and deep nesting."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if text.count("[") + text.count("{") > _MAX_NESTING and count_nesting(value) > _MAX_NESTING:
        raise ValueError("nested too deeply")
    return value


def write_json(value: Any) -> str:
    written = _encode(value)
    try:
        written.encode()
    except UnicodeEncodeError:  # UTF-8 cannot encode a lone surrogate, so it is escaped
        return json.dumps(value)
    return written


def write_object(members: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json_string(name)}: {value}" for name, value in members) + "}"


def _convert_number(text: str, *, is_integer: bool = False) -> str | None:
    exact = _convert_integer(text)
    number = _convert_float(text)
    if exact is not None or number is None:
        return exact
    if number.is_integer():
        return str(int(number)) if is_integer or abs(number) < 2**53 else repr(number)
    return None if is_integer else repr(number)


def _convert_integer(text: str) -> str | None:
    """Return the digits of an integer, without a final ".0"; None if `text` is not an integer."""
    text = text.strip()
    point_zero = _POINT_ZERO.fullmatch(text)
    try:
        return str(int(point_zero[1] if point_zero else text)) if len(text) <= _MAX_DIGITS else None
    except ValueError:
        return None


def _convert_float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _convert_boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.strip().lower())


def _convert_container(text: str, kind: type | tuple[type, ...]) -> str | None:
    try:
        value = parse_json(text)
        return write_json(value) if isinstance(value, kind) else None
    except ValueError:
        return None


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the range of a float")
    return number


# `json_value` tries these converters in this order, after null and before string.
_CONVERTERS: dict[str, Callable[[str], str | None]] = {
    "integer": functools.partial(_convert_number, is_integer=True),
    "number": _convert_number,
    "boolean": _convert_boolean,
    "object": functools.partial(_convert_container, kind=dict),
    "array": functools.partial(_convert_container, kind=list),
}
