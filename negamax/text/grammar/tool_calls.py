"""Grammars of tool calls, in the model's own syntax.

The family's `CallStyle` defines the syntax: strings are raw, up to the closer, and arguments come
in the order of the schema, as models write them.

`tool_grammar` runs in a server process and only writes down the rules, as JSON. `calls_format`
expands the schemas, in the grammar process.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import msgspec

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import MAX_NESTING, Grammar, refuse_grammar, written
from negamax.text.grammar.json_schema import Budget, prepared, resolve
from negamax.text.grammar.tag_formats import Format, any_of, const, json_format, optional, sequence
from negamax.text.schema_walk import TYPES, infer_container, split_pointer

NAME = re.compile(r"[^\"<>\n]+")  # names that a tag can have
_DEFINITIONS = ("$defs", "definitions")
_BRANCHES = {"anyOf": inf, "oneOf": inf, "allOf": 1}  # and the most that are followed
_REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')

# String formats that are enforced in unquoted strings; others are ignored.
_STRING_FORMATS = {
    "date": r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    "time": r"[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-][0-2][0-9]:[0-5][0-9])?",
    "date-time": r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]"
    r"(\.[0-9]+)?(Z|[+-][0-2][0-9]:[0-5][0-9])",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}


class CallStyle(ABC):
    """A model family's syntax of calls, as formats. It spends the `budget` of one request."""

    name: str
    end_of_text: str  # ends a raw string, which cannot contain it
    key: re.Pattern[str]  # pattern of argument names
    forbidden: str  # the same pattern, described in words
    call_tags: tuple[str, str]  # opener and closer of a call, {} in place of its name
    argument_tags: tuple[str, str]  # the same of an argument
    lead: Format | None = None  # white space allowed before the first block
    tag_ids: Mapping[str, int]  # ids of the tags that are written as tokens

    def __init__(
        self, tag_ids: Mapping[str, int] | None = None, budget: Budget | None = None
    ) -> None:
        self.tag_ids = tag_ids or {}
        self.budget = budget or Budget()
        self._level = 0

    @abstractmethod
    def block(self, calls: Format) -> Format:
        """Return a whole block around `calls`."""

    @abstractmethod
    def embed_in_text(self, block: Format, *, once: bool, no_other_calls: bool) -> Format:
        """Return text with `block`s, one if `once`; `no_other_calls`: no other call of a tool."""

    @abstractmethod
    def any_argument(self, value: Format) -> Format:
        """Return a free value, under any name."""

    @abstractmethod
    def container(self, node: Mapping[str, Any], *, root: Any, depth: int) -> Format:
        """Return an object or an array, by the type of `node`."""

    def invoke(self, name: str, arguments: Format) -> Format:
        opener, closer = (const(tag.format(name)) for tag in self.call_tags)
        return sequence([opener, arguments, closer])

    def argument(self, key: str, value: Format) -> Format:
        """Return one named value. Errors: `InvalidRequestError` for a name without a tag."""
        if not self.key.fullmatch(key):
            refuse_grammar(
                f"the parameter name {key!r} cannot be written in a call; leave out "
                f"{self.forbidden}"
            )
        self.budget.spend(num_bytes=2 * len(key))
        opener, closer = (const(tag.format(key)) for tag in self.argument_tags)
        return sequence([opener, value, closer])

    def any_arguments(self) -> Format:
        """Return free arguments."""
        return {"type": "star", "content": self.any_argument(self.raw())}

    def arguments(self, node: Any, *, root: Any, depth: int = 0) -> Format:
        """Return the members of an object, in the order of the schema."""
        with self._enter_level():
            node = resolve(node, root=root, budget=self.budget)
            if not isinstance(node, Mapping):
                return self.any_arguments()
            listed = node.get("properties")
            branches = node.get("anyOf", node.get("oneOf"))
            if isinstance(branches, list) and branches and not listed:
                inner = {"root": root, "depth": depth}
                return any_of([self.arguments(branch, **inner) for branch in branches])
            names = node.get("required")
            names = names if isinstance(names, list) else ()
            required = {name for name in names if isinstance(name, str)}
            parts = []
            for key, schema in listed.items() if isinstance(listed, Mapping) else ():
                part = self.argument(key, self.value(schema, root=root, depth=depth + 1))
                parts.append(part if key in required else optional(part))
            others = node.get("additionalProperties", listed is None)
            if others is True or isinstance(others, Mapping):
                value = self.value(others, root=root, depth=depth + 1)
                parts.append({"type": "star", "content": self.any_argument(value)})
            return sequence(parts) if parts else const("")

    def value(self, node: Any, *, root: Any, depth: int) -> Format:
        """Return a value that follows the schema `node`."""
        with self._enter_level():
            node = resolve(node, root=root, budget=self.budget)
            if not isinstance(node, Mapping):
                return self.raw()
            listed = [node["const"]] if "const" in node else node.get("enum")
            if isinstance(listed, list) and listed:
                texts = dict.fromkeys(map(_spell, listed))
                return any_of([self._spend_size(const(text)) for text in texts])
            for keyword, most in _BRANCHES.items():
                branches = node.get(keyword)
                if isinstance(branches, list) and 0 < len(branches) <= most:
                    inner = {"root": root, "depth": depth + 1}
                    return self._one_of([self.value(branch, **inner) for branch in branches])
            declared = node.get("type")
            names = [name for name in TYPES if isinstance(declared, list) and name in declared]
            if names:
                alike = ({**node, "type": name} for name in names)
                return self._one_of([self.value(one, root=root, depth=depth) for one in alike])
            if declared is None:
                declared = infer_container(node) or "string"
            if declared == "string":
                return self._string(node)
            if declared in ("object", "array"):
                return self.container({**node, "type": declared}, root=root, depth=depth)
            return self._spend_size(
                json_format({key: node[key] for key in node if key not in _DEFINITIONS})
            )

    def raw(self, *, most: int | None = None) -> Format:
        """Return any raw string of at most `most` characters."""
        limits = {} if most is None else {"max_chars": most}
        return {"type": "any_text", "excludes": [self.end_of_text], **limits}

    def json_value(self, node: Mapping[str, Any], *, root: Any) -> Format:
        """Return JSON that follows `node`, with the definitions that it refers to."""
        needed: dict[str, dict[str, Any]] = {}
        texts = [json.dumps(node)]
        while texts:
            for reference in _REFERENCE.findall(texts.pop()):
                steps = split_pointer(json.loads(reference)) or []
                if len(steps) < 2 or steps[0] not in _DEFINITIONS:
                    refuse_grammar(
                        "a tool's schema refers outside its $defs; move the referenced schema there"
                    )
                kind, key = steps[:2]
                definitions = root.get(kind) if isinstance(root, Mapping) else None
                found = needed.setdefault(kind, {})
                if isinstance(definitions, Mapping) and key in definitions and key not in found:
                    found[key] = definitions[key]
                    texts.append(json.dumps(definitions[key]))
        own = {key: node[key] for key in node if key not in _DEFINITIONS}
        return self._spend_size(json_format({**needed, **own}))

    def _spend_size(self, part: Format) -> Format:
        """Spend the size of `part` from the budget; return it."""
        self.budget.spend(num_bytes=len(json.dumps(part)))
        return part

    @contextmanager
    def _enter_level(self) -> Iterator[None]:
        """Enter a nested schema; references count."""
        self.budget.spend()
        self._level += 1
        if self._level > MAX_NESTING:
            refuse_grammar(
                f"a tool's schema is nested more than {MAX_NESTING} levels deep, or only refers to "
                f"itself"
            )
        try:
            yield
        finally:
            self._level -= 1

    def _string(self, node: Mapping[str, Any]) -> Format:
        """Return a raw string with the limits of its schema."""
        pattern = node.get("pattern", _STRING_FORMATS.get(str(node.get("format"))))
        if isinstance(pattern, str):
            return self._spend_size({"type": "regex", "pattern": pattern})
        least, most = count(node.get("minLength")), count(node.get("maxLength"))
        rest = self.raw(most=None if most is None else max(0, most - (least or 0)))
        if not least:
            return rest
        first = f"[^{re.escape(self.end_of_text[0])}]{{{least}}}"
        return sequence([{"type": "regex", "pattern": first}, rest])

    def _one_of(self, branches: list[Format]) -> Format:
        """Return one of `branches`; free text if any branch is free."""
        free = self.raw()
        return free if free in branches else any_of(branches)


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def count(value: Any) -> int | None:
    """Return a limit of a schema, or None if it is malformed."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


CallStyles = Mapping[str, type[CallStyle]]


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    style: CallStyle,
    *,
    choice: str = "auto",
    name: str | None = None,
    allowed: Collection[str] | None = None,
    parallel: bool = True,
    content: Grammar | None = None,
) -> Grammar | None:
    """Return the grammar of an answer that may or must call `tools`; None: nothing to enforce.

    `choice` is "auto", "required" or "function"; with "function", the answer calls the tool `name`
    once. Only `allowed` tools may be called. Without `parallel` there is at most one call.
    `content`: grammar of an answer without a call.

    Arguments follow their schema if the call is forced or the tool is strict. If a schema cannot be
    followed, `calls_format` refuses a strict tool, and leaves the arguments of others free. The
    caller has checked `name` and `allowed`.
    """
    functions = [tool.get("function", tool) for tool in tools]
    forced = choice != "auto"
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
    if allowed is not None:
        functions = [function for function in functions if function["name"] in allowed]
    if not functions:
        assert not forced, "no tool that could be called"
        return content
    is_free = parallel and allowed is None and content is None
    if not forced and is_free and not any(function.get("strict") for function in functions):
        return None
    rules = CallRules(
        style=style.name,
        tag_ids=dict(style.tag_ids),
        functions=[
            _describe(function, follow_schema=forced or bool(function.get("strict")))
            for function in functions
        ],
        is_forced=forced,
        once=not parallel or name is not None,
        no_other_calls=allowed is not None,
        content=content,
    )
    return Grammar(kind="tool_calls", text=written(msgspec.to_builtins(rules), kind="tool_calls"))


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that may be called; `schema` of its arguments, None: free."""

    name: str
    schema: dict[str, Any] | None = None
    is_strict: bool = False


class CallRules(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tool_grammar`; the text of its grammars."""

    style: str
    tag_ids: dict[str, int]
    functions: list[CalledFunction]
    is_forced: bool
    once: bool
    no_other_calls: bool
    content: Grammar | None


def read_rules(text: str) -> CallRules:
    """Parse the text of a grammar. Errors: `InvalidRequestError`."""
    try:
        return msgspec.json.decode(text, type=CallRules)
    except (msgspec.DecodeError, RecursionError) as error:
        refuse_grammar(f"the tool_calls cannot be read: {error}")


def calls_format(
    rules: CallRules, styles: CallStyles, *, content: Format | None, budget: Budget
) -> Format:
    """Return the format of an answer that follows `rules`; `content`: of one without a call.

    Errors: `InvalidRequestError` for a schema that cannot be followed, and above the `budget`.
    """
    style = styles[rules.style](rules.tag_ids, budget)
    calls = any_of([_format_call(function, style) for function in rules.functions])
    block = style.block(calls if rules.once else {"type": "plus", "content": calls})
    alone = block if style.lead is None else sequence([style.lead, block])
    if rules.is_forced:
        return alone
    if content is not None:
        return any_of([alone, content])
    return style.embed_in_text(block, once=rules.once, no_other_calls=rules.no_other_calls)


def _describe(function: Mapping[str, Any], *, follow_schema: bool) -> CalledFunction:
    schema = function.get("parameters")
    followed = dict(schema) if follow_schema and isinstance(schema, Mapping) else None
    return CalledFunction(function["name"], followed, bool(function.get("strict")))


def _format_call(function: CalledFunction, style: CallStyle) -> Format:
    """Return one call of a declared function."""
    if not NAME.fullmatch(function.name):
        refuse_grammar(
            f"the tool name {function.name!r} cannot be written in a call; leave out quotes, angle "
            f"brackets and line breaks"
        )
    arguments = style.any_arguments()
    if function.schema is not None:
        try:
            root = prepared(function.schema, strict=function.is_strict, budget=style.budget)
            arguments = style.arguments(root, root=root)
        except InvalidRequestError:
            if function.is_strict or style.budget.is_spent:
                raise
    return style.invoke(function.name, arguments)
