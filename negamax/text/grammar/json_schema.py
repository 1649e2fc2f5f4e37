"""Rewrites JSON schemas for the grammar compiler, and refuses keywords that it cannot enforce."""

from collections.abc import Mapping
from typing import Any

from negamax.config.grammar import refuse_grammar
from negamax.text.schema_walk import resolve_pointer

# Keywords that a grammar cannot enforce: it would have to remember or exclude values.
NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
    "dependentRequired",
    "dependentSchemas", "dependencies", "$dynamicRef", "unevaluatedItems",
)  # fmt: skip

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contains",
)

_MAX_REFERENCES = 32  # longest chain of references to references
_NODE_BYTES = 16  # bytes of a reference that count as one node

MAX_NODES = 50_000
MAX_BYTES = 4 << 20


class Budget:
    """Limit of the expanded schemas of a request: references let small ones become large."""

    def __init__(self) -> None:
        self._nodes = 0
        self._bytes = 0

    @property
    def is_spent(self) -> bool:
        return self._nodes > MAX_NODES or self._bytes > MAX_BYTES

    def spend(self, nodes: int = 1, *, num_bytes: int = 0) -> None:
        """Spend before expanding. Errors: `InvalidRequestError` above the limits."""
        self._nodes += nodes
        self._bytes += num_bytes
        if self._nodes > MAX_NODES:
            refuse_grammar(
                f"the schemas come to more than {MAX_NODES} nodes once expanded; send fewer or "
                f"simpler ones"
            )
        if self._bytes > MAX_BYTES:
            refuse_grammar(
                f"the schemas come to more than {MAX_BYTES} bytes once expanded; send fewer or "
                f"simpler ones"
            )


def prepared(schema: Any, *, strict: bool, budget: Budget | None = None) -> Any:
    """Rewrite `schema` in the keywords that the grammar compiler reads.

    `nullable` becomes a type. Unlisted required properties become listed ones, which share one
    definition. Items without a schema may be anything. Errors: `InvalidRequestError` above the
    `budget`; with `strict` also for a keyword that cannot be enforced and for a dangling reference.
    """
    return _Preparation(schema, budget or Budget(), strict=strict).made


def resolve(node: Any, *, root: Any, budget: Budget | None = None) -> Any:
    """Follow references into `root` from `node`; return None for a dangling one."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(node, Mapping) or not isinstance(node.get("$ref"), str):
            return node
        if budget is not None:
            budget.spend(1 + len(node["$ref"]) // _NODE_BYTES)
        node = resolve_pointer(node["$ref"], root=root)
    return None


def _check_enforceable(node: Mapping[str, Any], *, root: Any, budget: Budget) -> None:
    for keyword in NOT_ENFORCED:
        if keyword in node and node[keyword] is not False:
            refuse_grammar(
                f"the JSON schema uses {keyword!r}, which cannot be enforced; leave it out, or "
                f"send strict: false"
            )
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        refuse_grammar(
            "the JSON schema uses 'allOf' with several schemas; merge them into one, or send "
            "strict: false"
        )
    if isinstance(node.get("$ref"), str) and resolve(node, root=root, budget=budget) is None:
        refuse_grammar(f"the JSON schema refers to {node['$ref']!r}, where it holds no schema")


class _Preparation:
    """Rewrites one schema; the result is `made`."""

    def __init__(self, schema: Any, budget: Budget, *, strict: bool) -> None:
        self._root, self._budget, self._strict = schema, budget, strict
        self._shared: dict[str, Any] = {}  # new definitions of the root
        definitions = schema.get("$defs") if isinstance(schema, Mapping) else None
        self._taken = definitions if isinstance(definitions, Mapping) else {}
        self.made = self._prepare(schema)
        if self._shared:
            given = self.made.get("$defs")
            self.made["$defs"] = {**(given if isinstance(given, Mapping) else {}), **self._shared}

    def _prepare(self, node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        self._budget.spend()
        if self._strict:
            _check_enforceable(node, root=self._root, budget=self._budget)
        made = dict(node)
        for keyword in _MAPS:
            if isinstance(made.get(keyword), Mapping):
                made[keyword] = {name: self._prepare(part) for name, part in made[keyword].items()}
        for keyword in (*_LISTS, *_SINGLES):
            part = made.get(keyword)
            if part is not None:
                made[keyword] = (
                    [self._prepare(item) for item in part]
                    if isinstance(part, list)
                    else self._prepare(part)
                )
        if made.pop("nullable", False) is True:
            _allow_null(made)
        declared = made.get("type")
        is_array = declared == "array" or (isinstance(declared, list) and "array" in declared)
        if is_array and not {"items", "prefixItems"} & made.keys():
            made["items"] = {}
        if isinstance(made.get("required"), list):
            self._list_required(made)
        return made

    def _list_required(self, node: dict[str, Any]) -> None:
        """List the unlisted required properties; they follow `additionalProperties`."""
        listed = node.get("properties")
        listed = listed if isinstance(listed, Mapping) else {}
        missing = dict.fromkeys(
            name for name in node["required"] if isinstance(name, str) and name not in listed
        )
        if not missing:
            return
        self._budget.spend(len(missing))
        others = node.get("additionalProperties", True)
        if not _is_small(others):
            others = node["additionalProperties"] = self._share(others)
        node["properties"] = {**listed, **dict.fromkeys(missing, others)}

    def _share(self, schema: Any) -> dict[str, str]:
        """Make `schema` a definition of the root; return a reference to it."""
        name = f"shared{len(self._shared)}"
        while name in self._taken:
            name += "_"
        self._shared[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _is_small(schema: Any) -> bool:
    """Whether `schema` is no longer than a reference to it."""
    if not isinstance(schema, Mapping):
        return True
    return len(schema) <= 1 and all(
        isinstance(value, str) and len(value) <= _NODE_BYTES for value in schema.values()
    )


def _allow_null(node: dict[str, Any]) -> None:
    declared = node.get("type")
    if isinstance(declared, str):
        node["type"] = [declared, "null"]
    elif isinstance(declared, list) and "null" not in declared:
        node["type"] = [*declared, "null"]
    if isinstance(node.get("enum"), list) and None not in node["enum"]:
        node["enum"] = [*node["enum"], None]
