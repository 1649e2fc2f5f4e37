"""Walks JSON schemas: references within a document, alternatives, and allowed types."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")

# of JSON values; all others are objects
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
_BRANCHES = ("anyOf", "oneOf", "allOf")


def split_pointer(reference: str) -> list[str] | None:
    """Return the keys that lead to a reference (`#/$defs/Point`); None for another document."""
    if not reference.startswith("#"):
        return None
    steps = unquote(reference[1:]).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def resolve_pointer(reference: str, *, root: Any) -> Any:
    """Return the part of `root` that `reference` names, or None."""
    steps = split_pointer(reference)
    node = None if steps is None else root
    for step in steps or ():
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node


def walk_alternatives(schemas: Iterable[Any], *, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield `schemas` and everything reachable by anyOf, oneOf, allOf and references, each once."""
    stack = list(schemas)
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for branch in _BRANCHES:
            alternatives = node.get(branch)
            if isinstance(alternatives, list):
                stack.extend(alternatives)
        if isinstance(node.get("$ref"), str):
            stack.append(resolve_pointer(node["$ref"], root=root))


def find_types(schemas: Iterable[Any], *, root: Any) -> frozenset[str]:
    """Return all JSON types that any of `schemas` or their alternatives allows."""
    found: set[str] = set()
    for node in walk_alternatives(schemas, root=root):
        declared = node.get("type")
        names = declared if isinstance(declared, list) else [declared]
        found.update(name for name in names if name in TYPES)
        if declared is None:
            found.update(_implied_types(node))
        if node.get("nullable") is True:
            found.add("null")
    return frozenset(found)


def infer_container(node: Mapping[str, Any]) -> str | None:
    """Return "object" or "array" if only such a value can have the keywords of `node`."""
    if "properties" in node:
        return "object"
    return "array" if "items" in node or "prefixItems" in node else None


def _implied_types(node: Mapping[str, Any]) -> set[str]:
    """Return the types of the listed values, or the type that the keywords imply."""
    values = node["enum"] if isinstance(node.get("enum"), list) else []
    if "const" in node:
        values = [*values, node["const"]]
    if values:
        return {_TYPE_NAMES.get(type(value), "object") for value in values}
    container = infer_container(node)
    return {container} if container else set()
