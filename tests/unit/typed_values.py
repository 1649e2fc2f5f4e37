"""Plausible values for the request types of the OpenAI and Anthropic packages."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

import typing_extensions as extensions

_WRAPPERS = (extensions.Required, extensions.NotRequired, typing.Annotated)
# for fields that do not accept any text
_NAMED: dict[str, Any] = {
    "id": "item_1",
    "call_id": "call_1",
    "tool_use_id": "call_1",
    "name": "look",
    "arguments": "{}",
    "parameters": {"type": "object"},
    "schema": {"type": "object"},
    "input_schema": {"type": "object"},
    "tools": [{"type": "function", "name": "look"}],
}
_SCALARS: dict[Any, list[Any]] = {str: ["text"], int: [3], float: [0.5], bool: [True, False]}


def is_object(hint: Any) -> bool:
    return isinstance(hint, type) and extensions.is_typeddict(hint)


def hints_of(kind: Any) -> dict[str, Any]:
    return extensions.get_type_hints(kind, include_extras=True)


def objects_in(hint: Any) -> list[Any]:
    """Return the object types of a union, or of a list of one."""
    if is_object(hint):
        return [hint]
    found = [kind for part in typing.get_args(hint) for kind in objects_in(part)]
    return list(dict.fromkeys(found))


def values_of(hint: Any, *, depth: int = 0) -> list[Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in _WRAPPERS:
        return values_of(parts[0], depth=depth)
    if origin in (Union, types.UnionType):
        return [value for part in parts for value in values_of(part, depth=depth)]
    if origin in (Literal, extensions.Literal):
        return list(parts)
    if is_object(hint):
        return [smallest(hint, depth=depth + 1)]
    if origin is not None and "dict" in str(origin).lower():
        return [{"a": "b"}]
    if parts and depth < 6:
        return [[value] for value in values_of(parts[0], depth=depth + 1)]
    return [] if hint is type(None) else _SCALARS.get(hint, [{"a": "b"}])


def smallest(kind: Any, *, depth: int = 0) -> dict[str, Any]:
    return {
        name: _value(name, hint, depth=depth)
        for name, hint in hints_of(kind).items()
        if name in kind.__required_keys__ or typing.get_origin(hint) is extensions.Required
    }


def variants(kind: Any) -> Iterator[dict[str, Any]]:
    """Yield the smallest object, then it with each other field, once per alternative."""
    least = smallest(kind)
    yield least
    for name, hint in hints_of(kind).items():
        for value in [_NAMED[name]] if name in _NAMED else values_of(hint):
            if name not in least or least[name] != value:
                yield {**least, name: value}


def _value(name: str, hint: Any, *, depth: int) -> Any:
    values = values_of(hint, depth=depth)
    return _NAMED[name] if name in _NAMED and "Literal" not in str(hint) else values[0]
