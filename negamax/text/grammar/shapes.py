"""Shapes of JSON values: one type each, with all that a schema says of it."""

from dataclasses import dataclass
from typing import Any

from negamax.text.grammar.languages import Language
from negamax.text.schema_walk import type_name

Nodes = tuple[Any, ...]  # schemas that a value follows all of; none: any value
NEVER: Nodes = (False,)


@dataclass(frozen=True, eq=False)
class LiteralShape:
    """One value."""

    value: Any

    @property
    def type(self) -> str:
        return type_name(self.value)


@dataclass(frozen=True, eq=False)
class TextShape:
    """A string."""

    language: Language | None  # None: any
    least: int = 0  # length without a language
    most: int | None = None
    type: str = "string"


@dataclass(frozen=True, eq=False)
class NumberShape:
    """A number or an integer; `language`: its digits, None: any number."""

    type: str
    language: Language | None


@dataclass(frozen=True, eq=False)
class ArrayShape:
    """An array: the schemas of its `first` items, and of all others."""

    first: tuple[Nodes, ...]
    others: Nodes
    least: int
    most: int | None
    type: str = "array"


@dataclass(frozen=True, eq=False)
class ObjectShape:
    """An object: the schemas of listed members in order, and of others by their names."""

    listed: dict[str, Nodes]
    required: frozenset[str]
    others: list[tuple[Language | None, Nodes]]  # names without listed ones; None: any others
    least: int
    most: int | None
    is_closed: bool  # by default: members are listed, and nothing is said of others
    has_patterns: bool = False  # others have limits of their names
    type: str = "object"


Shape = LiteralShape | TextShape | NumberShape | ArrayShape | ObjectShape
ANY_MEMBERS = ObjectShape({}, frozenset(), [(None, ())], 0, None, False)
