"""JSON schemas as grammars understand them: local references, and which keywords nothing can be done about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from negamax.config.grammar import refuse_grammar

# Keywords that a grammar cannot follow: it would have to remember values, or allow everything but something.
NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "$dynamicRef", "unevaluatedItems",
)  # fmt: skip

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else", "contains")

_MAX_REFERENCES = 32  # in a chain of references to references


def prepared(schema: Any, *, strict: bool) -> Any:
    """`schema` in the words that the grammar compiler reads.

    `nullable` becomes a type, a required property that is not listed becomes a listed one, and items that nothing is said about
    may be anything. Errors with `strict`: `InvalidRequestError` for a keyword that cannot be enforced, and for a reference that
    leads nowhere.
    """
    if strict:
        for node in _nodes(schema):
            _check_enforceable(node, root=schema)
    return _prepared(schema)


def resolve(node: Any, *, root: Any) -> Any:
    """What a schema that is a reference into `root` refers to, looked through; None where that leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(node, Mapping) or not isinstance(node.get("$ref"), str):
            return node
        node = _target(node["$ref"], root=root)
    return None


def _target(reference: str, *, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    node = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """`schema` and all schemas written inside it."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield node
            stack.extend(_parts(node))


def _parts(node: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in _MAPS:
        members = node.get(keyword)
        if isinstance(members, Mapping):
            yield from members.values()
    for keyword in _LISTS:
        branches = node.get(keyword)
        if isinstance(branches, list):
            yield from branches
    for keyword in _SINGLES:
        part = node.get(keyword)
        yield from part if isinstance(part, list) else [part]


def _check_enforceable(node: Mapping[str, Any], *, root: Any) -> None:
    for keyword in NOT_ENFORCED:
        if keyword in node and node[keyword] is not False:
            refuse_grammar(f"the JSON schema uses {keyword!r}, which cannot be enforced; leave it out, or send strict: false")
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        refuse_grammar("the JSON schema uses 'allOf' with several schemas; merge them into one, or send strict: false")
    if isinstance(node.get("$ref"), str) and resolve(node, root=root) is None:
        refuse_grammar(f"the JSON schema refers to {node['$ref']!r}, which it does not hold")


def _prepared(node: Any) -> Any:
    if not isinstance(node, Mapping):
        return node
    made = dict(node)
    for keyword in _MAPS:
        if isinstance(made.get(keyword), Mapping):
            made[keyword] = {name: _prepared(part) for name, part in made[keyword].items()}
    for keyword in (*_LISTS, *_SINGLES):
        part = made.get(keyword)
        if part is not None:
            made[keyword] = [_prepared(item) for item in part] if isinstance(part, list) else _prepared(part)
    if made.pop("nullable", False) is True:
        _allow_null(made)
    declared = made.get("type")
    if (declared == "array" or (isinstance(declared, list) and "array" in declared)) and not {
        "items",
        "prefixItems",
    } & made.keys():
        made["items"] = {}
    required = made.get("required")
    if isinstance(required, list):
        listed = made.get("properties")
        listed = dict(listed) if isinstance(listed, Mapping) else {}
        others = made.get("additionalProperties", True)
        missing = {name: others for name in required if isinstance(name, str) and name not in listed}
        if missing:
            made["properties"] = listed | missing
    return made


def _allow_null(node: dict[str, Any]) -> None:
    declared = node.get("type")
    if isinstance(declared, str):
        node["type"] = [declared, "null"]
    elif isinstance(declared, list) and "null" not in declared:
        node["type"] = [*declared, "null"]
    if isinstance(node.get("enum"), list) and None not in node["enum"]:
        node["enum"] = [*node["enum"], None]
