"""Shapes of JSON values. A shape describes values of one JSON type with all limits of a schema."""

from dataclasses import dataclass
from typing import Any

from negamax.text.grammar.languages import Language
from negamax.text.schema_walk import type_name

Nodes = tuple[Any, ...]  # schemas that must all match a value; () allows any value
NEVER: Nodes = (False,)


@dataclass(frozen=True, eq=False)
class LiteralShape:
    """A shape that allows exactly one value."""

    value: Any

    @property
    def type(self) -> str:
        return type_name(self.value)


@dataclass(frozen=True, eq=False)
class TextShape:
    language: Language | None  # None: the string may be any text of `least` to `most` characters
    least: int = 0
    most: int | None = None
    type: str = "string"


@dataclass(frozen=True, eq=False)
class NumberShape:
    type: str  # "number" or "integer"
    language: Language | None  # texts that spell the allowed numbers; None: any number


@dataclass(frozen=True, eq=False)
class ArrayShape:
    """An array of `least` to `most` items, with schemas for `first` items and for the `others`."""

    first: tuple[Nodes, ...]
    others: Nodes
    least: int
    most: int | None
    type: str = "array"


@dataclass(frozen=True, eq=False)
class ObjectShape:
    """An object of `least` to `most` members."""

    listed: dict[str, Nodes]  # member name -> schemas of the member's value
    required: frozenset[str]
    # for unlisted members: (set of allowed names, schemas of the value); None allows any name
    others: list[tuple[Language | None, Nodes]]
    least: int
    most: int | None
    is_closed: bool  # whether the schema lists members and has no keyword for unlisted members
    has_patterns: bool = False  # whether the schema limits the names of unlisted members
    type: str = "object"


Shape = LiteralShape | TextShape | NumberShape | ArrayShape | ObjectShape
ANY_MEMBERS = ObjectShape({}, frozenset(), [(None, ())], 0, None, False)
