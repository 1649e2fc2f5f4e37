"""Resolve references, list alternatives and find allowed types in JSON schemas."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")

# Python type from `json` -> JSON type; values of other Python types are objects
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
# JSON type -> keywords that limit only values of this type
_KEYWORDS = {
    "object": {
        "properties", "patternProperties", "additionalProperties", "required", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    },
    "array": {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
        "contains", "unevaluatedItems",
    },
    "string": {"pattern", "minLength", "maxLength", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}  # fmt: skip
_BRANCHES = ("anyOf", "oneOf", "allOf")


def resolve_pointer(reference: str, *, root: Any) -> Any:
    """Return the part of `root` at `reference` (such as `#/$defs/Point`), or None."""
    home = root.get("$id") if isinstance(root, Mapping) else None
    if isinstance(home, str) and home:
        reference = reference.removeprefix(home)
    if reference.startswith("#") and "/" not in reference and len(reference) > 1:
        keywords = ("$defs", "definitions")
        parts = (part for keyword in keywords for part in get_map(root, keyword).values())
        named = (part for part in parts if isinstance(part, Mapping) and "$anchor" in part)
        return next((part for part in named if part["$anchor"] == reference[1:]), None)
    if reference not in ("", "#") and not reference.startswith("#/"):
        return None
    node = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node


def get_map(node: Any, keyword: str) -> Mapping[str, Any]:
    """Return the object at `keyword` of a schema, or an empty object."""
    value = node.get(keyword) if isinstance(node, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def get_list(node: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the list at `keyword` of a schema, or an empty list."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def walk_alternatives(schemas: Iterable[Any], *, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield `schemas` and all schemas that anyOf, oneOf, allOf and `$ref` refer to, each once."""
    stack = list(schemas)
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for branch in _BRANCHES:
            stack.extend(get_list(node, branch))
        if isinstance(node.get("$ref"), str):
            stack.append(resolve_pointer(node["$ref"], root=root))


def find_types(schemas: Iterable[Any], *, root: Any) -> frozenset[str]:
    """Return the JSON types that at least one of `schemas` or their alternatives allows."""
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


def type_name(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "object")


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. 1 equals 1.0, but 1 does not equal true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def infer_type(node: Mapping[str, Any]) -> str | None:
    """Return the JSON type if all keywords of `node` apply to one type only, else None."""
    found = {name for name, keywords in _KEYWORDS.items() if not keywords.isdisjoint(node)}
    return found.pop() if len(found) == 1 else None


def _implied_types(node: Mapping[str, Any]) -> set[str]:
    """Return the types of the values in enum and const, or the type that the keywords imply."""
    values = [*get_list(node, "enum"), *([node["const"]] if "const" in node else [])]
    if values:
        return set(map(type_name, values))
    inferred = infer_type(node)
    return {inferred} if inferred else set()
