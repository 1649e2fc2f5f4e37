"""Write grammars of tool calls in the model's own syntax.

The family's `CallStyle` defines the syntax. Strings are raw text up to a closing tag. Arguments are
in the order of the schema, as models write them.

`tool_grammar` runs in a server process and writes the rules as JSON. `calls_format` runs in the
grammar process and expands the schemas.
"""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from negamax.base.log import get_logger
from negamax.base.unicode import valid_unicode
from negamax.config.grammar import UNWRITABLE, Grammar, find_unwritable, refuse_grammar, written
from negamax.text.grammar.budget import Budget
from negamax.text.grammar.json_rules import json_format, words_format
from negamax.text.grammar.json_schema import Schemas
from negamax.text.grammar.languages import Language
from negamax.text.grammar.patterns import read_pattern
from negamax.text.grammar.shapes import (
    ArrayShape,
    LiteralShape,
    Nodes,
    ObjectShape,
    Shape,
    TextShape,
)
from negamax.text.grammar.tag_formats import Format, any_of, const, optional, sequence
from negamax.text.schema_walk import TYPES

logger = get_logger(__name__)

MAX_NAME_CHARS = 512  # maximum characters of a tool or argument name that the parsers accept


class CallStyle(ABC):
    """A model family's syntax of calls. Methods return formats and count the schemas' nodes."""

    name: str
    end_of_text: str  # text that ends a raw string.
    # `free_key`: for argument names that no schema lists, class of the first character, class of
    # later characters, and maximum number of later characters
    free_key: tuple[str, str, int | None]
    call_tags: tuple[str, str]  # opener and closer of a call, with {} in place of the tool's name
    argument_tags: tuple[str, str]  # opener and closer of an argument, with {} in place of the name
    lead: Format | None = None  # format of the white space before the first call block
    tag_ids: Mapping[str, int]  # ids of the tags that are written as tokens

    def __init__(
        self, tag_ids: Mapping[str, int] | None = None, budget: Budget | None = None
    ) -> None:
        self.tag_ids = tag_ids or {}
        self.budget = budget or Budget()

    @abstractmethod
    def block(self, calls: Format) -> Format:
        """Return the format of a call block that contains `calls`."""

    @abstractmethod
    def embed_in_text(self, block: Format, *, once: bool, no_other_calls: bool) -> Format:
        """Return the format of text that may contain blocks, or at most one block if `once`.

        With `no_other_calls`, the text contains only calls that match the format `block`.
        """

    @abstractmethod
    def any_argument(self, name: Format, value: Format) -> Format:
        """Return the format of an argument, given the formats of its name and of its value."""

    def nest(
        self, shape: ArrayShape | ObjectShape, schemas: Schemas, *, depth: int
    ) -> Format | None:
        """Return the format of an object or array in tags, or None if the syntax uses JSON."""
        return None

    def invoke(self, name: str, arguments: Format) -> Format:
        opener, closer = (const(tag.format(name)) for tag in self.call_tags)
        return sequence([opener, arguments, closer])

    def argument(self, key: str, value: Format) -> Format:
        """Return the format of argument `key`. Raises `InvalidRequestError` for an invalid name."""
        _check_name(key)
        self.budget.spend(num_bytes=2 * len(key))
        opener, closer = (const(tag.format(key)) for tag in self.argument_tags)
        return sequence([opener, value, closer])

    def any_arguments(self) -> Format:
        name = {"type": "regex", "pattern": self._key_pattern(0, self.free_key[2])}
        return {"type": "star", "content": self.any_argument(name, self.raw())}

    def arguments(self, nodes: Nodes, schemas: Schemas) -> Format:
        """Return the format of a call's arguments, in the order of the schema.

        Raises `InvalidRequestError` if the schema allows no arguments.
        """
        shapes = [shape for shape in schemas.shapes(nodes) if isinstance(shape, ObjectShape)]
        if not shapes:
            refuse_grammar("the schema of the tool's arguments does not allow an object")
        return any_of([self.members(shape, schemas, depth=0) for shape in shapes])

    def members(self, shape: ObjectShape, schemas: Schemas, *, depth: int) -> Format:
        """Return the format of an object's members, in the order of the schema."""
        is_closed = shape.is_closed and depth == 0
        most = len(shape.listed) if is_closed or not shape.others else shape.most
        if schemas.strict and (
            shape.least > len(shape.required)
            or (shape.most is not None and (most is None or shape.most < len(shape.listed)))
        ):
            refuse_grammar(
                "minProperties and maxProperties cannot be enforced for the arguments of a call; "
                "remove both, or send strict: false"
            )
        parts = []
        for key, nodes in shape.listed.items():
            if nodes and not schemas.shapes(nodes):
                if key in shape.required:
                    refuse_grammar(f"the schema of the required member {key!r} allows no value")
                continue
            part = self.argument(key, self.value(nodes, schemas, depth=depth + 1))
            parts.append(part if key in shape.required else optional(part))
        for language, nodes in () if is_closed else shape.others:
            name = self._free_name(shape, language, schemas)
            value = self.value(nodes, schemas, depth=depth + 1)
            parts.append({"type": "star", "content": self.any_argument(name, value)})
        return sequence(parts) if parts else const("")

    def _free_name(self, shape: ObjectShape, language: Language | None, schemas: Schemas) -> Format:
        """Return the format of names in `language` that the schema does not list."""
        longest = max(map(len, shape.listed), default=0)
        most = self.free_key[2]
        if language is None:
            return {"type": "regex", "pattern": self._key_pattern(0, most)}
        is_split = most is not None and longest < most and not shape.has_patterns
        pattern = self._key_pattern(0, longest if is_split else most)
        allowed = read_pattern(f"^{pattern}$", schemas.languages)
        name = words_format(schemas, schemas.languages.all_of([allowed, language]))
        if not is_split:
            return name
        return any_of([name, {"type": "regex", "pattern": self._key_pattern(longest, most)}])

    def _key_pattern(self, least: int, most: int | None) -> str:
        first, others, _ = self.free_key
        return f"{first}{others}{{{least},{'' if most is None else most}}}"

    def value(self, nodes: Nodes, schemas: Schemas, *, depth: int) -> Format:
        self.budget.spend()
        shapes = schemas.shapes(nodes)
        texts: list[Format] = []
        nested: list[Format] = []
        in_json: list[Shape] = []
        for shape in shapes:
            match shape:
                case LiteralShape(str() as text):
                    if self.end_of_text in text:
                        refuse_grammar(
                            f"the value {text!r} cannot be written in a call, because it contains "
                            f"the closing tag {self.end_of_text!r}"
                        )
                    texts.append(const(text))
                    self.budget.spend(num_bytes=len(json.dumps(texts[-1])))
                case TextShape():
                    texts.append(self._string(shape, schemas))
                case ArrayShape() | ObjectShape() if part := self.nest(shape, schemas, depth=depth):
                    nested.append(part)
                case _:
                    in_json.append(shape)
        if self.raw() in texts:
            texts = [self.raw()]  # the format of raw text also matches JSON
            if {shape.type for shape in shapes} >= _ALL_KINDS:
                return self.raw()
        elif in_json:
            texts.append(json_format(schemas, in_json))
        return any_of([*texts, *nested])

    def raw(self, *, most: int | None = None) -> Format:
        limits = {} if most is None else {"max_chars": most}
        return {"type": "any_text", "excludes": [self.end_of_text], **limits}

    def _string(self, shape: TextShape, schemas: Schemas) -> Format:
        """Return the format of a raw string that follows `shape` and contains no closing tag."""
        languages = schemas.languages
        if shape.language is not None:
            closer = languages.containing([([languages.text(self.end_of_text)], False)])
            parts = [shape.language, languages.invert(closer)]
            return words_format(schemas, languages.all_of(parts))
        least, most = shape.least, shape.most
        if not least:
            return self.raw(most=most)
        # The first `least` characters of a string must not contain the start of a closing tag, so
        # the patterns exclude the tag's first character followed by its second.
        first, second = (f"\\u{ord(char):04x}" for char in self.end_of_text[:2])
        room = None if most is None else most - least
        ways = [sequence([{"type": "regex", "pattern": f"[^{first}]"}, self.raw(most=room)])]
        if room is None or room > 0:
            room = None if room is None else room - 1
            pair = {"type": "regex", "pattern": f"{first}[^{first}{second}]"}
            ways.append(sequence([pair, self.raw(most=room)]))
        ways.append({"type": "regex", "pattern": first})
        if least == 1:
            return any_of(ways)
        return sequence([{"type": "regex", "pattern": f"[^{first}]{{{least - 1}}}"}, any_of(ways)])


_ALL_KINDS = set(TYPES) - {"integer"}


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
    """Return the grammar of an answer that may or must call `tools`, or None if all is allowed.

    `choice` is "auto", "required" or "function". With choice "function", the answer calls the tool
    `name` once. Only `allowed` tools may be called. Without `parallel` there is at most one call.
    `content` is the grammar of an answer without a call.

    Arguments follow the tool's schema if a call is required or the tool is strict. If a grammar
    cannot enforce a schema, `calls_format` refuses a strict tool, and does not limit the arguments
    of other tools. The caller has checked `name` and `allowed`.
    """
    functions = [tool.get("function", tool) for tool in tools]
    forced = choice != "auto"
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
    if allowed is not None:
        functions = [function for function in functions if function["name"] in allowed]
    if not functions:
        assert not forced, "the caller checks that a forced tool exists"
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
    text = valid_unicode(written(msgspec.to_builtins(rules), kind="tool_calls"))
    return Grammar(kind="tool_calls", text=text)


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    schema: dict[str, Any] | None = None  # schema of the arguments; None: any arguments
    is_strict: bool = False


class CallRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of an answer with tools, which `tool_grammar` writes to `Grammar.text` as JSON."""

    style: str
    tag_ids: dict[str, int]
    functions: list[CalledFunction]
    is_forced: bool
    once: bool
    no_other_calls: bool
    content: Grammar | None


def read_rules(text: str) -> CallRules:
    """Parse the text of a `tool_calls` grammar. Raises `InvalidRequestError`."""
    try:
        return msgspec.json.decode(text, type=CallRules)
    except (msgspec.DecodeError, RecursionError) as error:
        refuse_grammar(f"the text of the tool_calls grammar cannot be read: {error}")


def calls_format(
    rules: CallRules, styles: CallStyles, *, content: Format | None, budget: Budget
) -> Format:
    """Return the format of an answer that follows `rules`.

    `content` is the format of an answer without a call. Raises `InvalidRequestError` if the schemas
    exceed the `budget`, or if a grammar cannot enforce the schema of a strict tool.
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
    name, is_strict = function["name"], bool(function.get("strict"))
    if followed is not None and (place := find_unwritable(followed)) is not None:
        problem = f"its schema contains {UNWRITABLE} at 'parameters{place}'"
        if is_strict:
            refuse_grammar(f"the tool {name!r} is strict, but {problem}")
        _warn_of_free_arguments(name, problem)
        followed = None
    return CalledFunction(name, followed, is_strict)


def _format_call(function: CalledFunction, style: CallStyle) -> Format:
    _check_name(function.name)
    arguments = style.any_arguments()
    if function.schema is not None:
        with style.budget.restore_on_refusal(is_final=function.is_strict) as refusals:
            is_strict, budget = function.is_strict, style.budget
            schemas = Schemas(function.schema, strict=is_strict, infers=True, budget=budget)
            arguments = style.arguments((function.schema,), schemas)
        if refusals:
            _warn_of_free_arguments(function.name, refusals[0])
    return style.invoke(function.name, arguments)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        refuse_grammar(
            f"the name {name[:40]!r} has {len(name)} characters; the allowed length is 1 to "
            f"{MAX_NAME_CHARS}"
        )


@functools.lru_cache(maxsize=1024)
def _warn_of_free_arguments(name: str, reason: str) -> None:
    """Warn once per tool and reason that the tool's arguments are not limited."""
    logger.warning("the arguments of tool %r do not follow its schema: %s", name, reason)
